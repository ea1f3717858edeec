"""A run that survives: checkpoints, resuming, signals, kills, hangs, full disks and bad shards, with real processes."""

import contextlib
import json
import math
import os
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import SCRIPT, TINY, flags, made_up_tokens, run_script, train_losses, val_losses, write_shard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import train_gpt
from train_gpt import Checkpoints, Hyperparameters, Loader, RunLog, Shard, UserError, World

# Eight steps whose learning rates, momentum and window all change, with checkpoints at steps 4 and 8.
RUN = TINY | dict(train_files="train_*.bin", val_files="val.bin", num_iterations=8, save_every=4,
                  cooldown_frac=0.5)
LONG = RUN | dict(num_iterations=100_000)
ONE_THREAD = os.environ | dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")

# ----------------------------------------------------------------------------------------------------
# Running and comparing
# ----------------------------------------------------------------------------------------------------


def make_shards(folder: Path) -> Path:
    for i in (1, 2):  # small, so that eight steps cross from one to the other
        write_shard(folder / f"train_{i}.bin", made_up_tokens(4_500, seed=i))
    write_shard(folder / "val.bin", made_up_tokens(3_000, seed=9))
    return folder


@pytest.fixture
def folder(tmp_path) -> Path:
    return make_shards(tmp_path)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The folder of an uninterrupted run with so many processes; each is run once, when it is first asked for."""
    folders = {}

    def run(processes: int) -> Path:
        if processes not in folders:
            folders[processes] = make_shards(tmp_path_factory.mktemp(f"of_{processes}"))
            result = run_script(flags(**RUN), folders[processes], processes)
            assert result.returncode == 0, result.stderr
        return folders[processes]

    return run


def copy_of(folder: Path, to: Path) -> Path:
    """Data, checkpoints and log of a run, to be gone on with elsewhere."""
    return Path(shutil.copytree(folder, to, dirs_exist_ok=True))


def checkpoint(folder: Path, step: int, within: str = "checkpoints") -> Path:
    (path,) = folder.glob(f"{within}/*/step_{step:06d}.pt")
    return path


def load(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def tensors_of(value, name: str = ""):
    """Every tensor and number in a checkpoint, with its name."""
    if isinstance(value, dict | list | tuple):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from tensors_of(part, f"{name}/{key}")
    else:
        yield name, value


def differing_bits(first: Path, second: Path) -> list[str]:
    """The names of all that is not the same, to the last bit, in what two checkpoints would go on with."""
    a, b = ({name: value for part in ("state", "step", "loader") for name, value in tensors_of(load(path)[part], part)}
            for path in (first, second))
    assert a.keys() == b.keys() and sum(isinstance(value, torch.Tensor) for value in a.values()) > 50
    return [name for name in a if not (torch.equal(a[name], b[name]) if isinstance(a[name], torch.Tensor)
                                       else a[name] == b[name])]


def distance(first: Path, second: Path, part: str) -> float:
    """Between two checkpoints' weights or momentum, all taken as one long vector."""
    one, other = (dict(tensors_of(load(path)["state"][part])) for path in (first, second))
    assert one.keys() == other.keys()
    return math.sqrt(sum((one[name] - other[name]).square().sum().item() for name in one))


class Ranks:
    """The processes of a run, started one by one, so that each one's exit code and output can be seen."""

    def __init__(self, folder: Path, count: int, arguments: list[str], command=(str(SCRIPT),), **how):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.folder = folder
        world = dict(WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        self.processes = [
            subprocess.Popen([sys.executable, *command, *arguments], cwd=folder,
                             stdout=open(folder / f"out{rank}", "w"), stderr=open(folder / f"err{rank}", "w"),
                             env=ONE_THREAD | world | dict(RANK=str(rank), LOCAL_RANK=str(rank)), **how)
            for rank in range(count)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.processes:
            process.kill()

    def wait_for(self, text: str, seconds: float = 200) -> None:
        wait_until(lambda: text in self.output(0) or self.processes[0].poll() is not None, seconds)
        assert text in self.output(0), self.errors()

    def output(self, rank: int) -> str:
        return (self.folder / f"out{rank}").read_text()

    def errors(self) -> str:
        return "".join((self.folder / f"err{rank}").read_text() for rank in range(len(self.processes)))

    def exit_codes(self, seconds: float = 100) -> list[int]:
        return [process.wait(seconds) for process in self.processes]


def wait_until(happens, seconds: float = 200) -> None:
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.02)


@contextlib.contextmanager
def torchrun(folder: Path, processes: int, *arguments: str, restarts: int = 0):
    """A run under torchrun, its output in the files out and err."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}",
               f"--max-restarts={restarts}", str(SCRIPT), *arguments]
    with (open(folder / "out", "w") as out, open(folder / "err", "w") as err,
          subprocess.Popen(command, cwd=folder, stdout=out, stderr=err, env=ONE_THREAD) as run):
        try:
            yield run
        finally:
            for pid in ranks_of(run).values():
                os.kill(pid, signal.SIGKILL)
            run.kill()


def ranks_of(run: subprocess.Popen) -> dict[int, int]:
    """The process ids of torchrun's children by their rank, as the kernel knows them."""
    ranks = {}
    with contextlib.suppress(OSError):
        for pid in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split():
            with contextlib.suppress(OSError):
                rank = re.search(rb"(?:^|\0)RANK=(\d+)", Path(f"/proc/{pid}/environ").read_bytes())
                if rank:
                    ranks[int(rank[1])] = int(pid)
    return ranks


def only_log(folder: Path) -> str:
    (path,) = folder.glob("logs/*.txt")
    return path.read_text()


@pytest.fixture
def train_here(monkeypatch, capsys):
    """The script's main() in this process, which has torch already; returns its exit code and output."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def run(folder: Path, **changes):
        monkeypatch.chdir(folder)
        code = train_gpt.main(flags(**RUN | changes))
        output = capsys.readouterr()
        return code, output.out, output.err

    yield run
    torch.set_num_threads(threads)
    for number, handler in handlers.items():
        signal.signal(number, handler)


# ----------------------------------------------------------------------------------------------------
# Checkpoints and resuming
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(reference, tmp_path, processes):
    folder = copy_of(reference(processes), tmp_path)
    resume = RUN | dict(resume=checkpoint(folder, 4), checkpoint_dir="again", warmup_steps=1)
    result = run_script(flags(**resume), folder, processes)
    assert result.returncode == 0, result.stderr
    assert differing_bits(checkpoint(folder, 8), checkpoint(folder, 8, "again")) == []
    losses = train_losses(only_log(folder))
    assert len(losses) == 8 + 4 and losses[4:8] == losses[8:] and len(set(losses)) == 8
    assert val_losses(only_log(folder))[0] == val_losses(only_log(folder))[1]


@pytest.mark.parametrize("before, after", [(2, 1), (1, 3)])
def test_another_number_of_processes_resumes_within_rounding(reference, tmp_path, before, after):
    folder = copy_of(reference(before), tmp_path)
    result = run_script(flags(**RUN | dict(resume=checkpoint(folder, 4), checkpoint_dir="again")), folder, after)
    assert result.returncode == 0, result.stderr
    assert f"step_000004.pt on {after} x " in only_log(folder)
    losses = train_losses(only_log(folder))
    assert len(losses) == 8 + 4 and losses[8:] == pytest.approx(losses[4:8], rel=1e-6)
    uninterrupted, resumed = checkpoint(folder, 8), checkpoint(folder, 8, "again")
    for part in ("model", "muon"):
        way = distance(uninterrupted, checkpoint(folder, 4), part)
        assert distance(uninterrupted, resumed, part) < 1e-3 * way


def test_a_resumed_run_goes_on_in_the_same_log_and_with_the_same_clock(reference, tmp_path, train_here):
    folder = copy_of(reference(1), tmp_path)
    before = only_log(folder)
    code, _, _ = train_here(folder, resume=checkpoint(folder, 4))
    after = only_log(folder)
    assert code == 0 and after.startswith(before)
    added = after.removeprefix(before)
    assert added.startswith(f"resumed at step 4 from {checkpoint(folder, 4)} on 1 x ") and "====" not in added
    assert f"hardware: {added.splitlines()[0].split(' on 1 x ')[1]}\n" in before
    step_4, step_5 = (int(re.search(rf"^step:{step}/8 train_loss\S+ train_time:(\d+)ms", text, re.MULTILINE)[1])
                      for step, text in ((4, before), (5, added)))
    assert step_5 > step_4 > 0


def test_a_checkpoint_of_another_run_is_refused_with_every_difference(reference, tmp_path, train_here):
    folder = copy_of(reference(1), tmp_path)
    write_shard(folder / "train_2.bin", made_up_tokens(4_500, seed=77))
    files = sorted(folder.rglob("*"))
    code, out, err = train_here(folder, resume=checkpoint(folder, 4), model_dim=64, muon_lr=0.01)
    assert code == 2 and out == "" and err.count("\n") == 1
    for difference in ("model_dim was 32 and is 64", "muon_lr was 0.05 and is 0.01", "the data differs: train_2.bin",
                       "--resume_anyway goes on"):
        assert difference in err
    assert "seed" not in err and "script" not in err and "train_1" not in err
    assert sorted(folder.rglob("*")) == files


def test_a_checkpoint_of_another_script_is_refused_and_resume_anyway_goes_on(reference, tmp_path, train_here):
    folder = copy_of(reference(1), tmp_path)
    changed = load(checkpoint(folder, 4))
    lines = changed["source"].splitlines()
    changed["source"] = "\n".join([*lines[:6], "# a change", *lines[6:]])
    torch.save(changed, checkpoint(folder, 4))
    code, _, err = train_here(folder, resume=checkpoint(folder, 4))
    assert code == 2 and "the script differs from line 7 on" in err
    code, out, err = train_here(folder, resume=checkpoint(folder, 4), resume_anyway=True, muon_lr=0.01)
    assert code == 0 and "resumed at step 4" in out, err
    assert out.count("train_loss") == 4


def test_resume_anyway_with_weights_that_do_not_fit_says_so_in_one_line(reference, tmp_path, train_here):
    folder = copy_of(reference(1), tmp_path)
    code, _, err = train_here(folder, resume=checkpoint(folder, 4), resume_anyway=True, model_dim=64)
    assert code == 2 and err.count("\n") == 1 and "size mismatch" in err


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not a checkpoint", None], ids=["empty", "damaged", "missing"])
def test_what_is_no_checkpoint_is_refused_in_one_line(folder, train_here, content):
    if content is not None:
        (folder / "it.pt").write_bytes(content)
    code, _, err = train_here(folder, resume="it.pt")
    assert code == 2 and err.startswith("train_gpt: --resume it.pt: ") and err.count("\n") == 1
    assert not (folder / "logs").exists()


def test_a_strangers_checkpoint_runs_no_code(folder, train_here):
    class Mine:
        def __reduce__(self):
            return open, (str(folder / "was here"), "w")

    torch.save(dict(settings=Mine()), folder / "it.pt")
    assert train_here(folder, resume="it.pt", resume_anyway=True)[0] == 2
    assert not (folder / "was here").exists()


def test_latest_is_the_newest_of_all_runs_and_without_one_the_run_starts_afresh(folder, train_here):
    assert "step:1/8" in train_here(folder, resume="latest", seed=1)[1]
    shutil.move(folder / "checkpoints", folder / "first")
    assert "step:1/8" in train_here(folder, resume="latest", seed=2)[1]
    shutil.copytree(folder / "first", folder / "checkpoints", dirs_exist_ok=True)  # older, whatever their names
    out = train_here(folder, resume="latest", seed=2)[1]
    assert "resumed at step 8" in out and "train_loss" not in out and "val_loss" in out


class Silence:
    def note(self, text: str) -> None:
        self.last = text


def test_the_last_two_checkpoints_are_kept_and_nothing_of_an_interrupted_one(tmp_path):
    checkpoints, log = Checkpoints(tmp_path, log := Silence(), "none"), log
    (tmp_path / "unfinished.tmp").write_bytes(b"what a kill has left")
    names = []
    for step in (5, 999_999, 1_000_000, 3):  # the last after going back to an earlier one
        checkpoints.save(dict(step=step, state=torch.full((3,), step)))
        names.append(f"step_{step:06d}.pt")
        assert {path.name for path in tmp_path.iterdir()} == set(names[-2:])
        assert load(tmp_path / names[-1])["step"] == step
    assert log.last == f"saved {tmp_path / names[-1]}"


# ----------------------------------------------------------------------------------------------------
# Signals
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count, target, number, code", [
    (1, 0, signal.SIGTERM, 143), (1, 0, signal.SIGINT, 130), (3, 1, signal.SIGTERM, 143), (2, None, signal.SIGINT, 130),
], ids=["SIGTERM", "Ctrl-C", "SIGTERM to one of three", "Ctrl-C to all"])
def test_a_signal_ends_every_rank_after_the_step_with_a_checkpoint_and_a_line(folder, count, target, number, code):
    with Ranks(folder, count, flags(**LONG | dict(save_every=10**6))) as ranks:
        ranks.wait_for("step:2/")
        for process in ranks.processes if target is None else [ranks.processes[target]]:
            process.send_signal(number)
        assert ranks.exit_codes() == [code] * count
        assert ranks.errors() == ""
    step = len(train_losses(only_log(folder)))
    (saved,) = folder.glob("checkpoints/*/*")
    assert load(saved)["step"] == step
    assert only_log(folder).endswith(f"stopped after step {step} by {signal.Signals(number).name}; "
                                     f"last checkpoint: {saved.relative_to(folder)}\n")


def test_a_signal_before_the_first_step_ends_the_run_at_once_with_a_line(folder):
    with Ranks(folder, 1, flags(**LONG | dict(warmup_steps=10**6))) as ranks:
        ranks.wait_for("log: ")
        time.sleep(1)
        ranks.processes[0].send_signal(signal.SIGTERM)
        assert ranks.exit_codes() == [143] and ranks.errors() == ""
    assert only_log(folder).endswith("=\nstopped by SIGTERM before the first step\n")


def test_without_saving_a_signal_leaves_a_line_and_no_checkpoint(folder):
    with Ranks(folder, 1, flags(**LONG | dict(save_every=0))) as ranks:
        ranks.wait_for("step:2/")
        ranks.processes[0].send_signal(signal.SIGINT)
        assert ranks.exit_codes() == [130]
    assert re.search(r"stopped after step \d+ by SIGINT; last checkpoint: none\n$", only_log(folder))
    assert not (folder / "checkpoints").exists()


def test_torchrun_passes_a_signal_on_and_the_ranks_add_no_traceback(folder):
    with torchrun(folder, 2, *flags(**LONG)) as run:
        wait_until(lambda: "step:2/" in (folder / "out").read_text())
        run.send_signal(signal.SIGTERM)
        assert run.wait(100) != 0
    assert "stopped after step" in only_log(folder).splitlines()[-1]
    assert list(folder.glob("checkpoints/*/*.pt"))
    errors = (folder / "err").read_text()
    assert "train_gpt" not in errors and errors.count("Traceback") == 1  # torchrun's own
    assert "SIGKILL" not in errors


# ----------------------------------------------------------------------------------------------------
# Kills, crashes, hangs, and losses that are no numbers
# ----------------------------------------------------------------------------------------------------


def test_torchrun_restarts_a_killed_rank_and_the_run_ends_as_if_nothing_had_happened(reference, folder):
    with torchrun(folder, 2, *flags(**RUN | dict(save_every=1, resume="latest")), restarts=3) as run:
        wait_until(lambda: list(folder.glob("checkpoints/*/step_000003.pt")))
        os.kill(ranks_of(run)[1], signal.SIGKILL)
        assert run.wait(200) == 0, (folder / "err").read_text()
    assert differing_bits(checkpoint(folder, 8), checkpoint(reference(2), 8)) == []
    losses = [dict(re.findall(r"^step:(\d+)/8 train_loss:(\S+)", only_log(where), re.MULTILINE))
              for where in (folder, reference(2))]
    assert losses[0] == losses[1] and len(losses[0]) == 8
    assert "(exitcode: -9) local_rank: 1" in (folder / "err").read_text()
    assert "train_gpt.py\", line" not in (folder / "err").read_text()


def test_a_hung_rank_ends_the_job_and_is_named(folder):
    with torchrun(folder, 3, *flags(**LONG | dict(collective_timeout=8, save_every=0))) as run:
        wait_until(lambda: "step:2/" in (folder / "out").read_text())
        hung = ranks_of(run)[1]
        os.kill(hung, signal.SIGSTOP)
        wait_until(lambda: "no answer from" in (folder / "err").read_text(), 60)
        os.kill(hung, signal.SIGKILL)  # torchrun would do it after 30 s
        assert run.wait(60) != 0
    errors = (folder / "err").read_text()
    assert "train_gpt: no answer from rank 1 within" in errors and "train_gpt.py\", line" not in errors


def test_a_rank_that_fails_is_named_and_the_others_end_without_a_traceback(folder):
    fails = (f"import sys\n"
             f"sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
             "import train_gpt\n"
             "def update(self):\n"
             "    raise ZeroDivisionError('of this rank alone')\n"
             "if train_gpt.find_place().rank == 1:\n"
             "    train_gpt.Trainer.update = update\n"
             "train_gpt.os._exit(train_gpt.main())\n")
    with Ranks(folder, 3, flags(**LONG), command=("-c", fails)) as ranks:
        assert ranks.exit_codes() == [1, 1, 1]
    assert ranks.errors().count("Traceback") == 1
    assert "train_gpt: rank 1 failed:" in ranks.errors() and "of this rank alone" in ranks.errors()


def test_a_loss_that_is_no_number_stops_all_ranks_at_that_step_and_names_the_last_good_checkpoint(reference, tmp_path):
    folder = copy_of(reference(2), tmp_path)
    checkpoint(folder, 8).unlink()
    good = checkpoint(folder, 4)
    poison = RUN | dict(resume="latest", resume_anyway=True, muon_lr=1e12, scalar_lr=1e12, save_every=1)
    with Ranks(folder, 2, flags(**poison)) as ranks:
        assert ranks.exit_codes() == [1, 1] and ranks.errors() == ""
    message = only_log(folder).splitlines()[-1]
    assert re.match(r"stopped at step 6: the loss is (nan|inf); learning rates 0\.45, 0\.006, 7\.5e\+11; ", message)
    assert message.endswith(f"last good checkpoint: {good.relative_to(folder)}")
    # Step 5 was saved with weights that give no number: it is set aside, and latest finds the good one.
    assert [path.name for path in sorted(good.parent.iterdir())] == ["step_000004.pt", "step_000005.bad"]


def test_a_validation_loss_that_is_no_number_stops_the_run(reference, tmp_path, train_here):
    folder = copy_of(reference(1), tmp_path)
    poisoned = load(checkpoint(folder, 8))
    poisoned["state"]["model"]["embedding.weight"][:] = math.nan
    torch.save(poisoned, checkpoint(folder, 8))
    code, out, _ = train_here(folder, resume="latest")
    assert code == 1 and "stopped at step 8: the loss is nan" in out and "target" not in out


# ----------------------------------------------------------------------------------------------------
# Full disks
# ----------------------------------------------------------------------------------------------------


def test_a_full_disk_stops_neither_the_run_nor_harms_the_last_checkpoint(reference, tmp_path):
    folder = copy_of(reference(1), tmp_path)
    checkpoint(folder, 8).unlink()
    (log,) = folder.glob("logs/*.txt")
    good, full_at = checkpoint(folder, 4).read_bytes(), log.stat().st_size + 200

    def full_disk():  # no file may grow past this size: the log soon cannot, a checkpoint never could
        resource.setrlimit(resource.RLIMIT_FSIZE, (full_at, full_at))

    with Ranks(folder, 1, flags(**RUN | dict(resume="latest", save_every=1)), preexec_fn=full_disk) as ranks:
        assert ranks.exit_codes() == [0] and ranks.errors() == ""
    out = ranks.output(0)
    assert out.count("the log cannot be written, the run goes on: file too large") == 1
    assert out.count("no checkpoint at step") == 4 and "no checkpoint at step 8, the run goes on: " in out
    assert train_losses(out) == train_losses(only_log(reference(1)))[4:8]
    assert log.stat().st_size == full_at
    assert [path.name for path in checkpoint(folder, 4).parent.iterdir()] == ["step_000004.pt"]
    assert checkpoint(folder, 4).read_bytes() == good


def test_a_log_catches_up_once_there_is_room_again(tmp_path):
    class Disk:
        """Takes so many bytes, as a nearly full disk does, and then no more."""
        room, content = 0, b""

        def write(self, content: bytes) -> int:
            taken = content[:self.room]
            if not taken:
                raise OSError(28, "No space left on device")
            self.content, self.room = self.content + taken, self.room - len(taken)
            return len(taken)

    log = RunLog(World(0, 1, 0, torch.device("cpu")), tmp_path / "log.txt", "header\n")
    log.file, said = Disk(), []
    log.say = said.append
    for line, room in ("one", 100), ("two", 0), ("three", 4), ("four", 0), ("five", 100), ("six", 1), ("seven", 50):
        log.file.room = room
        log.write(line)
    assert log.file.content == b"one\ntwo\nthree\nfour\nfive\nsix\nseven\n"
    assert said == ["the log cannot be written, the run goes on: no space left on device"] * 2  # once each time


def test_a_console_that_takes_nothing_more_does_not_stop_the_run(folder):
    with open("/dev/full", "w") as full:
        result = subprocess.run([sys.executable, str(SCRIPT), *flags(**RUN)], cwd=folder, stdout=full, timeout=200,
                                stderr=subprocess.PIPE, text=True, env=ONE_THREAD)
    assert (result.returncode, result.stderr) == (0, "")
    assert len(train_losses(only_log(folder))) == 8 and "peak memory" in only_log(folder)


def test_a_log_that_cannot_even_be_started_is_one_line_and_leaves_nothing(folder, train_here):
    (folder / "logs").write_text("a file where the folder should be")
    code, out, err = train_here(folder)
    assert code == 2 and err.count("\n") == 1 and "cannot be written: file exists" in err and out == ""
    assert not (folder / "checkpoints").exists()


# ----------------------------------------------------------------------------------------------------
# Bad shards
# ----------------------------------------------------------------------------------------------------

VOCABULARY = 257
many = settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
extremes = st.sampled_from([0, 1, -1, 2, 255, 256, 2**15, 2**30, 2**31 - 1, -2**31, 20240520, 20240521])


def good_bytes(count: int) -> bytes:
    tokens = (i % VOCABULARY for i in range(count))
    return struct.pack("<iii", 20240520, 1, count) + bytes(1012) + struct.pack(f"<{count}H", *tokens)


@st.composite
def damaged_shards(draw) -> bytes:
    """Files as they come out of broken downloads, wrong programs and bad luck; some of them are still good."""
    content = bytearray(good_bytes(draw(st.integers(0, 600))))
    kind = draw(st.sampled_from(["noise", "truncated", "header", "grown", "bit", "token"]))
    if kind == "noise":
        return draw(st.binary(max_size=3000))
    if kind == "truncated":
        return bytes(content[:draw(st.integers(0, len(content)))])
    if kind == "header":
        field = draw(st.integers(0, 3))
        content[4 * field:4 * field + 4] = struct.pack("<i", draw(extremes | st.integers(-2**31, 2**31 - 1)))
    if kind == "grown":
        content += draw(st.binary(min_size=1, max_size=40))
    if kind == "bit":
        content[draw(st.integers(0, len(content) - 1))] ^= 1 << draw(st.integers(0, 7))
    if kind == "token" and len(content) > 1026:
        content[1024:1026] = struct.pack("<H", draw(st.sampled_from([256, 257, 258]) | st.integers(0, 65535)))
    return bytes(content)


def tokens_by_hand(content: bytes) -> list[int] | None:
    """What a shard of these bytes holds, or None if it is none: written from the format's description."""
    if len(content) < 1024 or struct.unpack("<ii", content[:8]) != (20240520, 1):
        return None
    (count,) = struct.unpack("<i", content[8:12])
    if count < 1 or len(content) != 1024 + 2 * count:
        return None
    tokens = [content[i] + 256 * content[i + 1] for i in range(1024, len(content), 2)]
    return tokens if max(tokens) < VOCABULARY else None


@many
@given(damaged_shards())
def test_a_bad_shard_is_one_clear_line_and_a_good_one_is_read_right(content):
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(content)
        file.flush()
        expected = tokens_by_hand(content)
        try:
            shard = Shard(file.name, VOCABULARY)
        except UserError as error:
            assert expected is None and file.name in str(error) and "\n" not in str(error)
        else:
            assert expected == shard.tokens.tolist()
            if len(expected) > 1:
                inputs, targets = shard.sequence(0, len(expected) - 1)
                assert inputs.tolist() == expected[:-1] and targets.tolist() == expected[1:]


def change(path: Path, how: str, amount: int) -> None:
    """What may happen to a file that another program has open."""
    if how == "truncated":
        os.truncate(path, amount % path.stat().st_size)
    elif how == "grown":
        with open(path, "ab") as file:
            file.write(bytes(1 + amount))
    elif how == "overwritten":
        path.write_bytes(good_bytes(500)[:1024] + bytes(1000))
    elif how == "replaced":
        path.with_suffix(".new").write_bytes(bytes(amount))
        path.with_suffix(".new").replace(path)
    elif how == "deleted":
        path.unlink()


class ChangedInTheMiddle:
    """Tokens that another program changes at the very moment when they are read."""

    def __init__(self, tokens: np.ndarray, path: Path, how: str, amount: int):
        self.tokens, self.change = tokens, lambda: change(path, how, amount)

    def __getitem__(self, part: slice) -> np.ndarray:
        self.change()
        return self.tokens[part]


@many
@given(st.sampled_from(["truncated", "grown", "overwritten", "replaced", "deleted"]), st.integers(0, 3000),
       st.integers(0, 400), st.booleans())
def test_a_shard_that_changes_while_mapped_gives_an_error_or_the_tokens_it_had(how, amount, start, in_the_middle):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shard.bin"
        path.write_bytes(good_bytes(500))
        os.utime(path, (1e9, 1e9))  # not written within the file system's clock tick
        shard = Shard(str(path), VOCABULARY)
        if in_the_middle and how != "truncated":
            shard.tokens = ChangedInTheMiddle(shard.tokens, path, how, amount)
        else:
            change(path, how, amount)
        try:
            inputs, targets = shard.sequence(start, 99)
        except UserError as error:
            assert how in ("truncated", "grown", "overwritten") and "was changed while it was in use" in str(error)
        else:
            assert how in ("replaced", "deleted")
            assert inputs.tolist() == [i % 257 for i in range(start, start + 99)]
            assert targets.tolist() == [i % 257 for i in range(start + 1, start + 100)]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(damaged_shards(), st.sampled_from(["from the start", "when it is reached"]))
def test_no_batch_ever_comes_from_a_bad_shard(content, damaged):
    tiny = Hyperparameters(vocab_size=257, document_token=256, sequence_length=128, batch_sequences=1, train_files="x")
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder) / "1.bin", Path(folder) / "2.bin"
        first.write_bytes(good_bytes(300))
        second.write_bytes(content if damaged == "from the start" else good_bytes(300))
        loader = Loader([str(first), str(second)], tiny, World(0, 1, 0, torch.device("cpu")))
        second.write_bytes(content)
        stream = [tokens_by_hand(good_bytes(300)), tokens_by_hand(content)]
        allowed = [tokens[i:i + 128] for tokens in stream if tokens for i in range(0, len(tokens) - 128, 128)]
        try:
            for _ in range(8):
                ((inputs, _),) = loader.next_batch(lambda text: None)
                assert inputs.tolist() in allowed
        except UserError:
            assert stream[1] is None or damaged == "when it is reached"
        else:
            assert stream[1] is not None
        finally:
            loader.reader.shutdown()


def test_shards_that_cannot_be_read_are_one_line(folder, train_here):
    (folder / "train_2.bin").unlink()
    (folder / "train_2.bin").symlink_to("nowhere.bin")
    code, out, err = train_here(folder)
    assert (code, out) == (2, "") and err == "train_gpt: train_2.bin: no such file or directory\n"
    assert not (folder / "logs").exists()


def test_every_setting_is_either_free_or_compared(reference):
    """A checkpoint holds all settings, so that a resumed run cannot differ from it without a word."""
    saved = load(checkpoint(reference(1), 8))
    assert saved["settings"].keys() == {field.name for field in train_gpt.fields(Hyperparameters)}
    assert saved["settings"].keys() > train_gpt.FREE_SETTINGS
    assert {"run_id", "source", "data", "step", "train_time", "loader", "state"} < saved.keys()
    assert saved["source"] == SCRIPT.read_text() and json.loads(json.dumps(saved["data"])) == saved["data"]
    assert np.prod(saved["state"]["random"].shape) > 1000
