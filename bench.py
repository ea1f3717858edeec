"""How fast the CPU track is on this machine: a step and its parts, each figure beside its limit.

    ./run.sh bench                               about ten minutes; keep the machine quiet meanwhile
    ./run.sh bench --against path/or/revision    compare a step with another script [b2d4a9c, the one before]
    ./run.sh bench --json figures.json           the same for programs, with every round
    ./run.sh bench --rounds 1 --steps 20         quick and rough; settings of train_gpt.py may follow, for all its runs

Speeds of machines vary, and so does one machine's from minute to minute. So everything that is compared is measured in
turn, round by round, and the limits are on ratios. A figure is the median of its rounds.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import train_gpt
from launch import KEEP_MEMORY
from train_gpt import BLOCK, attend, gathered_bias

HERE = Path(__file__).resolve().parent
CPU_TRACK = os.environ | dict(CUDA_VISIBLE_DEVICES="", VENV=sys.prefix)


class UserError(Exception):
    """Something the user can fix, reported in one line."""


def seconds(work: Callable) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


# ---- Runs: the script, started as a user starts it -------------------------------------------------------------------
def other_script(which: str, folder: Path) -> Path:
    """The script to compare with: a file, or what a git revision has under the name train_gpt.py."""
    if Path(which).is_file():
        return Path(which).resolve()
    shown = subprocess.run(["git", "show", f"{which}:train_gpt.py"], cwd=HERE, capture_output=True)
    if shown.returncode:
        raise UserError(f"--against {which}: neither a file nor a git revision with a train_gpt.py")
    path = folder / "train_gpt.py"
    path.write_bytes(shown.stdout)
    return path


def run(script: Path, settings: list[str], processes: str = "") -> str:
    """The output of a run by run.sh, with as many processes and threads as it chooses."""
    command = [str(HERE / "run.sh"), str(script), *settings]
    result = subprocess.run(command, env=dict(PROCESSES=processes) | CPU_TRACK, capture_output=True, text=True)
    if result.returncode:
        last = (result.stderr.splitlines() or result.stdout.splitlines() or ["no output"])[-1]
        raise UserError(f"{script} ended with code {result.returncode}: {last}")
    return result.stdout


def step_milliseconds(script: Path, settings: list[str]) -> tuple[float, float]:
    """Of a step, and of 1,000 tokens: scripts have steps of different lengths, and one script has in its stages."""
    output = run(script, settings)
    step = float(re.findall(r"^step:.* step_avg:([\d.]+)ms", output, re.MULTILINE)[-1])
    folder = next(word for word in settings if word.startswith("--log_dir=")).partition("=")[2]
    about = max(Path(folder).glob("*.txt"), key=lambda log: log.stat().st_mtime_ns).read_text()
    s = json.loads(re.search(r"^settings: (\{.*)", about, re.MULTILINE)[1])
    words = [float(word) for word in s.get("stages", "1 1 1 1 1").split()]
    steps, lengths = words[::5], words[1::5]
    length = sum(a * b for a, b in zip(steps, lengths, strict=True)) / sum(steps) * s["sequence_length"]
    return step, 1000 * step / (length * s["batch_sequences"])


def startup_seconds(settings: list[str]) -> float:
    """From ./run.sh to the first line of a training step: in a pipe there is at most one line per second."""
    started, pipes = time.perf_counter(), dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen([str(HERE / "run.sh"), *settings], env=CPU_TRACK, **pipes) as process:
        for line in process.stdout:
            if re.match(r"step:[1-9]", line):
                seconds = time.perf_counter() - started
                process.send_signal(signal.SIGTERM)
                process.stdout.read()
                return seconds
        raise UserError(f"./run.sh ended before its first step: {process.stderr.read().strip()}")


# ---- Parts of a step: run.sh starts this file too, in the script's place, so that the parts are measured as they run -
def step_parts(flags: list[str]) -> dict:
    """Median milliseconds of the parts of a step, and the mean number of its floating-point operations."""
    world = train_gpt.join_world(600)
    s = train_gpt.make_settings(train_gpt.parse_flags(flags), world.size, world.on_gpu)
    trainer, loader = train_gpt.Trainer(s, world), train_gpt.DistributedDataLoader(s, world)
    trainer.warm_up(loader)
    times, batches, spans = defaultdict(list), loader.batches(0, [0, 0]), []

    def timed(name: str, work: Callable) -> Callable:
        def measured(*arguments):
            started = time.perf_counter()
            result = work(*arguments)
            times[name].append(1000 * (time.perf_counter() - started))
            return result

        return measured

    def spanned(work: Callable) -> Callable:
        def measured(*arguments):
            started = time.perf_counter()
            work(*arguments)
            spans.append((started, time.perf_counter()))

        return measured

    for muon in (share for share in trainer.shares if isinstance(share, train_gpt.NorMuon)):
        muon.update = spanned(muon.update)
    next_batch, backward = timed("loader", lambda: next(batches)[1]), timed("backward", trainer.backward)
    update = timed("update", trainer.update)
    for step in range(s.num_iterations):
        backward(next_batch(), step)
        update(step)
        starts, ends = zip(*spans, strict=True)  # they may run at the same time
        times["muon"].append(1000 * (max(ends) - min(starts)))
        spans.clear()
    trainer.map, flops = map, 0  # torch counts in one thread only
    lengths = [train_gpt.stage_at(step, trainer.stages).length for step in range(s.num_iterations)]
    for length in set(lengths):
        step = lengths.index(length)
        batch = next(loader.batches(step, [0, 0]))[1]
        with FlopCounterMode(display=False) as counter:
            trainer.backward(batch, step)
            trainer.update(step)
        flops += counter.get_total_flops() * lengths.count(length) / len(lengths)
    parts = {name: median(values) for name, values in times.items()}
    step = parts["loader"] + parts["backward"] + parts["update"]
    return parts | dict(step=step, flops=flops * world.size, rank=world.rank)


def peak_flops(dtype: torch.dtype, size: int) -> float:
    """Of all cores, by a large matrix product: the fastest of several."""
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    times = [seconds(lambda: a @ b) for _ in range(6)]
    return 2 * size**3 / min(times)


# ---- Attention: over gathered blocks, and dense with a mask ----------------------------------------------------------
def attention(length: int, dtype: torch.dtype, dense: bool) -> Callable:
    """A forward and backward pass of one layer, in the CPU track's shape, with a window of 256 tokens."""
    s = train_gpt.make_settings({}, 1, False)
    shape, window = (length, s.num_heads, s.model_dim // s.num_heads), 256
    q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3))
    token = torch.arange(length)
    documents = token // 5000
    if dense:
        in_window = (token[:, None] >= token) & (token[:, None] - token <= window)
        mask = in_window & (documents[:, None] == documents)
    else:
        mask = gathered_bias(documents, window // BLOCK, s.num_heads, dtype)

    def forward_and_backward() -> None:
        if dense:
            heads = (x.transpose(0, 1)[None] for x in (q, k, v))
            y = F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=1.0)[0].transpose(0, 1)
        else:
            y = attend(q, k, v, mask)
        torch.autograd.grad(y, (q, k, v), torch.ones_like(y))

    return forward_and_backward


def in_turn(works: list[Callable], rounds: int) -> list[list[float]]:
    """The seconds of each work in each round, after one round that does not count."""
    times = [[seconds(work) for work in works] for _ in range(rounds + 1)]
    return [list(column) for column in zip(*times[1:], strict=True)]


# ---- Figures, each beside its limit ----------------------------------------------------------------------------------
class Figures(list):
    def add(self, name: str, unit: str, rounds: list[float], limit: str = "") -> None:
        """A figure and its limit: "at most 8", "at least 14" or none."""
        value, (*sense, bound) = median(rounds), (limit or "0").split()
        met = None if not limit else value <= float(bound) if sense[1] == "most" else value >= float(bound)
        self.append(dict(name=name, unit=unit, value=value, limit=limit, met=met, rounds=rounds))
        print(f"  {name}: {value:.4g} {unit}", file=sys.stderr, flush=True)

    def table(self) -> str:
        rows = [("", "measured", "rounds", "limit", "")]
        for figure in self:
            value, low, high = (f"{x:.4g}" for x in (figure["value"], min(figure["rounds"]), max(figure["rounds"])))
            spread = f"{low} to {high}" if low != high else ""
            met = {True: "met", False: "not met", None: ""}[figure["met"]]
            rows.append((figure["name"], f"{value} {figure['unit']}", spread, figure["limit"], met))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
        return "\n".join("  ".join(row).rstrip() for row in padded)


def measure_step(figures: Figures, options: argparse.Namespace, old: Path, dtype: str, settings: list[str]) -> None:
    """A step of this script and of the other one, its parts, and the machine's peak, in turn."""
    rounds = []
    for _ in range(options.rounds):
        output = run(Path(__file__), ["--parts", *settings], processes="1")
        parts = json.loads(re.search(r"^parts (.*)", output, re.MULTILINE)[1])
        new, old_one = step_milliseconds(HERE / "train_gpt.py", settings), step_milliseconds(old, settings)
        parts |= dict(new=new[0], old=old_one[0], new_tokens=new[1], old_tokens=old_one[1])
        rounds.append(parts | dict(peak=peak_flops(getattr(torch, dtype), options.matrix)))

    def add(name: str, unit: str, figure: Callable[[dict], float], limit: str = "") -> None:
        figures.add(f"{dtype}: {name}", unit, [figure(parts) for parts in rounds], limit)

    add("a step", "ms", lambda x: x["new"])
    add(f"a step of {options.against}", "ms", lambda x: x["old"])
    add("1,000 tokens", "ms", lambda x: x["new_tokens"])
    add(f"1,000 tokens of {options.against}", "ms", lambda x: x["old_tokens"])
    add("a token, part of that one's", "", lambda x: x["new_tokens"] / x["old_tokens"], "at most 0.5")
    add("operations in a step, counted by torch, mean", "GFLOP", lambda x: x["flops"] / 1e9)
    add(f"matrix peak, {options.matrix} x {options.matrix}", "GFLOP/s", lambda x: x["peak"] / 1e9)
    add("a step's part of the peak", "%", lambda x: 100 * x["flops"] / (x["new"] / 1000 * x["peak"]), "at least 40")
    add("Muon's part of a step", "%", lambda x: 100 * x["muon"] / x["step"], "at most 6")
    add("the loader's part of a step", "%", lambda x: 100 * x["loader"] / x["step"], "at most 1")


def measure_attention(figures: Figures, options: argparse.Namespace, dtype: str) -> None:
    """Against dense attention, and the cost per token from a quarter to eight times that length."""
    work = partial(attention, dtype=getattr(torch, dtype))
    dense, gathered = in_turn([work(options.length, dense=dense) for dense in (True, False)], 2 * options.rounds)
    ratios = [a / b for a, b in zip(dense, gathered, strict=True)]
    figures.add(f"{dtype}: attention over {options.length} tokens, dense / ours", "", ratios, "at least 14")
    lengths = [options.length // 4 * 2**i for i in range(6)]
    columns = in_turn([work(length, dense=False) for length in lengths], 3 * options.rounds)
    costs = [[1e6 * x / length for x in column] for column, length in zip(columns, lengths, strict=True)]
    for cost, length in zip(costs, lengths, strict=True):
        figures.add(f"{dtype}: attention over {length} tokens, per token", "us", cost)
    middle = [median(cost) for cost in costs]
    figures.add(f"{dtype}: the highest of these / the lowest", "", [max(middle) / min(middle)], "at most 1.1")


def measure(options: argparse.Namespace, settings: list[str], folder: Path) -> Figures:
    figures, old = Figures(), other_script(options.against, folder)
    settings = [f"--log_dir={folder}/logs", f"--checkpoint_dir={folder}/saved", *settings]
    starts = [startup_seconds(settings) for _ in range(options.rounds + 1)]
    figures.add("start-up, from ./run.sh to the first step", "s", starts[1:], "at most 8")  # the first reads the disk
    for dtype in options.dtype or dict.fromkeys(["float32", train_gpt.make_settings({}, 1, False).dtype]):
        short = ["--val_loss_every=0", "--save_every=0", "--val_tokens=8192", f"--num_iterations={options.steps}"]
        measure_step(figures, options, old, dtype, [*short, *settings, f"--dtype={dtype}"])
        measure_attention(figures, options, dtype)
    return figures


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--parts"]:
        parts = step_parts(arguments[1:])
        if parts.pop("rank") == 0:
            print(f"parts {json.dumps(parts)}", flush=True)
        os._exit(0)  # the threads of the process group would disturb the interpreter's end
    if not os.environ.keys() >= KEEP_MEMORY.keys():  # read when a process starts
        os.execve(sys.executable, [sys.executable, __file__, *arguments], os.environ | KEEP_MEMORY)
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--against", default="b2d4a9c", help="script or git revision to compare with [b2d4a9c]")
    parser.add_argument("--rounds", type=int, default=5, help="rounds per comparison [5]")
    parser.add_argument("--steps", type=int, default=80, help="training steps per run [80]")
    parser.add_argument("--length", type=int, default=8192, help="tokens of the comparison with dense attention [8192]")
    parser.add_argument("--matrix", type=int, default=3072, help="size of the matrix product for the peak [3072]")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), action="append", help="only this one [what is fast]"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    try:
        options, settings = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError(error) from None
    if min(options.rounds, options.steps, options.matrix) < 1 or options.length < 512 or options.length % 512:
        raise UserError("--rounds, --steps and --matrix must be 1 or more, --length a multiple of 512")
    with open(options.json or os.devnull, "a"):  # a file that cannot be written is reported now, not at the end
        pass
    processor = torch.cpu.get_capabilities().get("cpu_name", "CPU")
    machine = f"{processor}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(options, settings, Path(folder))
    about = dict(date=time.strftime("%Y-%m-%d"), machine=machine, against=options.against, settings=settings)
    print(f"{about['date']}, {machine}, measured against {options.against}:\n\n{figures.table()}")
    if options.json:
        options.json.write_text(json.dumps(about | dict(figures=figures), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (UserError, OSError, train_gpt.UserError) as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
