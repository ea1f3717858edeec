"""What each idea of a record does on the CPU track: `python -m records ablate`, which can be stopped and goes on.

ideas.toml beside a record's script says how to leave each idea out. Each seed has a run without each idea and three of
the unchanged script: one as it is, two with a tenth more and fewer steps to see what a step is worth. Losses are those
of held-out training documents: the validation set stays unseen. Each finished run is a line of ideas.jsonl.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

from records.figures import half_interval, mean
from records.folders import SCRIPT, find
from records.ideas import IDEAS, Variant, leave_out, read_ideas, steps_of_track
from records.logs import read_log
from records.race import last_words, raise_interrupt, replace, stop
from records.terminal import UserError, brief, harmless, many, shown

ROOT = Path(__file__).resolve().parent.parent
RESULTS = "ideas.jsonl"
BEGIN, END = "<!-- ideas: python -m records ablate -->\n", "<!-- end of ideas -->"
TABLE = """\
Measured: each idea left out in turn, {steps:,} steps, one thread, loss on held-out training documents. The unchanged \
script ends at {loss:.4f} after {seconds:.1f} s, and one more step is worth {worth:.6f} (by runs of {tenth} steps less \
and more). All differences are to the unchanged script with the same seed. Plus: worse or slower without the idea. \
Times are rough, as two runs share the machine: medians over the seeds. The last column is the additional time that a \
run without the idea needs to the same loss; effects of more than {tenth} steps are rough. ±: 95 % interval (paired t \
over the seeds), without the times' noise.

| without | seeds | loss | in steps | time per step | to the same loss |
|---|---:|---:|---:|---:|---:|"""


def ablate(args: argparse.Namespace) -> int:
    """Seed by seed through all ideas, so that a study which is stopped early has seen most of them."""
    study = Study(find(args.name, args.records), args.steps)
    wanted = [(variant, seed) for seed in args.seeds for variant in study.variants]
    queue = [(variant, seed) for variant, seed in wanted if (variant.idea, variant.steps, seed) not in study.results]
    print(f"{len(wanted) - len(queue)} of {len(wanted)} runs are there already", flush=True)
    if queue and args.minutes:
        with tempfile.TemporaryDirectory(prefix="ablate_") as place:
            hold_out(Path(place))
            measure(study, queue, args.minutes, Path(place))
    print(table := study.table())
    write_table(study.folder / "README.md", table)
    return 0


# ---- Runs ------------------------------------------------------------------------------------------------------------


def hold_out(folder: Path) -> None:
    """The track's training documents in shards of their own: by the hash of its name, a tenth of them is validation."""
    sys.path.insert(0, str(ROOT / "data"))
    import embedded_corpus as corpus

    try:
        documents, changed = corpus.torch_documents(corpus.pinned_torch())
    except corpus.UserError as error:
        raise UserError(str(error)) from None
    if changed:
        raise UserError(f"{shown(changed[0])}: is not as published, so neither is the corpus; install torch again")
    for name, held_out in (("train", False), ("val", True)):  # digests below 8 are the validation set's
        texts = [[text] for digest, text in documents if digest[0] >= 8 and (digest[0] < 33) == held_out]
        corpus.write_shard(folder / f"own_{name}_.bin", texts)


class Run:
    """A process with one thread, in a folder of its own."""

    def __init__(self, variant: Variant, seed: int, place: Path):
        from launch import KEEP_MEMORY

        self.variant, self.seed, self.home = variant, seed, Path(tempfile.mkdtemp(dir=place))
        (self.home / SCRIPT).write_text(variant.source)
        command = [sys.executable, SCRIPT, f"--seed={seed}", f"--num_iterations={variant.steps}", *variant.settings]
        command += [f"--train_files={place}/own_train_.bin", f"--val_files={place}/own_val_.bin"]
        command += ["--val_loss_every=0", "--save_every=0", "--log_dir=logs"]
        how = dict(env=os.environ | KEEP_MEMORY | dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""), cwd=self.home)
        how |= dict(stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, start_new_session=True)
        with open(self.home / "output.txt", "wb") as output:
            self.began, self.process = time.monotonic(), subprocess.Popen(command, stdout=output, **how)

    def result(self) -> tuple[float, float]:
        """Loss and seconds, once the process has ended."""
        if code := self.process.returncode:
            words = last_words((self.home / "output.txt").read_text(errors="replace"), self.home / SCRIPT)
            raise UserError(f"{self.variant.title}, seed {self.seed}: ended with exit code {code}: {words}")
        (log,) = self.home.glob("logs/*.txt")
        return read_log(log).runs[0].final[1:]


def measure(study: "Study", queue: list[tuple[Variant, int]], minutes: float, place: Path) -> None:
    """Two runs at a time; the last has the unchanged script beside it, as company. If one fails, the other is stopped.

    The first two start in any case, the others if there is time for their steps at the slowest pace so far.
    """
    for sign in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(sign, raise_interrupt)
    end, pace, going, company = time.monotonic() + 60 * minutes, 0.0, [], None
    try:
        while True:
            while queue and len(going) < 2 and (not pace or time.monotonic() + pace * queue[0][0].steps < end):
                going.append(Run(*queue.pop(0), place))
            if going in ([], [company]):
                return
            if len(going) < 2:
                going.append(company := Run(study.full, 1, place))
            time.sleep(0.05)
            for run in [run for run in going if run.process.poll() is not None]:
                going.remove(run)
                loss, seconds = run.result()
                if run is not company:
                    study.add(run.variant, run.seed, loss, seconds)
                    pace = max(pace, (time.monotonic() - run.began) / run.variant.steps)
    finally:
        for run in going:
            if run.process.poll() is None:
                stop(run.process)


# ---- The study: what is to be measured, what has been, and what it shows ---------------------------------------------


class Result(NamedTuple):
    """A line of ideas.jsonl."""

    idea: str
    seed: int
    steps: int
    loss: float
    seconds: float
    sha256: str


def read_results(path: Path) -> list[Result]:
    results = []
    for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else [], start=1):
        try:
            results.append(Result(**json.loads(line)))
            if list(map(type, results[-1])) != [str, int, int, float, float, str]:
                raise ValueError
        except (ValueError, TypeError):
            raise UserError(f"{shown(path)}: line {number} is no result; delete it") from None
    return results


class Study:
    """The runs of a record, and their results. Complains of results that belong to other runs."""

    def __init__(self, folder: Path, steps: int | None = None):
        self.folder, ideas, found = folder, read_ideas(folder / IDEAS), read_results(folder / RESULTS)
        source = (folder / SCRIPT).read_text()
        known = sorted({line.steps for line in found if not line.idea})[-2:]  # the run with fewer steps comes last
        self.full = full = Variant("", steps or (known[0] if known else steps_of_track(source)), source)
        self.tenth = max(1, round(full.steps / 10))
        self.variants = [full._replace(steps=full.steps + more) for more in (0, self.tenth, -self.tenth)]
        self.unseen = {name: x["unseen"] for name, x in ideas.items() if isinstance(x, dict) and "unseen" in x}
        self.variants += [leave_out(name, x, full) for name, x in ideas.items() if name not in self.unseen]
        digests = {(x.idea, x.steps): x.sha256 for x in self.variants}
        if stale := [line for line in found if digests.get((line.idea, line.steps)) != line.sha256]:
            names = brief(", ".join(dict.fromkeys(line.idea or "unchanged" for line in stale)))
            what = f"{many(stale, 'line')} of another script, idea or number of steps ({names})"
            raise UserError(f"{shown(folder / RESULTS)}: {what}; delete them to measure again")
        self.results = {(line.idea, line.steps, line.seed): line for line in found}

    def add(self, variant: Variant, seed: int, loss: float, seconds: float) -> None:
        line = Result(variant.idea, seed, variant.steps, loss, seconds, variant.sha256)
        with open(self.folder / RESULTS, "a") as file:
            file.write(json.dumps(line._asdict()) + "\n")
        self.results[line.idea, line.steps, seed] = line
        full = self.results.get(("", self.full.steps, seed))
        same = ", as with it: was anything left out?" if line.idea and full and full.loss == loss else ""
        print(harmless(f"{variant.title}, seed {seed}: loss {loss:.4f}{same}, {seconds:.1f} s"), flush=True)

    def seeds(self, variant: Variant) -> list[tuple[Result, Result, float]]:
        """For each seed: a variant's result, the unchanged script's, and by how much one more step lowers its loss."""
        runs = [(x.idea, x.steps) for x in (variant, *self.variants[:3])]
        found = [[self.results.get((*run, seed)) for run in runs] for seed in {seed for _, _, seed in self.results}]
        complete = [lines for lines in found if None not in lines]
        return [(line, full, (fewer.loss - more.loss) / (2 * self.tenth)) for line, full, more, fewer in complete]

    def row(self, variant: Variant, seconds: float) -> str:
        """What leaving an idea out does, also to the `seconds` that a run needs to the same loss.

        In steps it is the mean difference over the mean worth of a step. For the interval, a seed contributes the
        linear term of that ratio: so the spread of both counts, and the terms' mean is the ratio.
        """
        seeds, total = self.seeds(variant), self.full.steps
        losses, worth = [line.loss - full.loss for line, full, _ in seeds], mean([worth for *_, worth in seeds])
        worth = worth if worth > 0 else math.nan
        ratio = mean(losses) / worth
        steps = [ratio + (x - ratio * y) / worth for x, (*_, y) in zip(losses, seeds, strict=True)]
        pace = median([line.seconds / line.steps * total / full.seconds for line, full, _ in seeds])
        longer = [seconds * ((1 + x / total) * pace * variant.steps / total - 1) for x in steps]
        cells = show(losses, 4), show(steps, 0), show([100 * pace - 100], 1, " %"), show(longer, 1, " s")
        return f"| {variant.idea} | {len(seeds)} | {' | '.join(cells)} |"

    def table(self) -> str:
        """The results in Markdown, and what cannot be seen here."""
        unseen = [f"- {name}: {reason}" for name, reason in self.unseen.items()]
        unseen = ["", "Ideas that cannot be seen on the CPU track:", "", *unseen] if unseen else []
        measured = [variant for variant in self.variants[3:] if self.seeds(variant)]
        if not measured:
            return "\n".join(["What each idea does on the CPU track has not been measured yet.", *unseen])
        _, unchanged, worth = zip(*self.seeds(self.full), strict=True)
        loss, seconds = mean([line.loss for line in unchanged]), median([line.seconds for line in unchanged])
        text = TABLE.format(steps=self.full.steps, tenth=self.tenth, loss=loss, seconds=seconds, worth=mean(worth))
        return "\n".join([text, *[self.row(variant, seconds) for variant in measured], *unseen])


def show(values: list[float], digits: int, unit: str = "") -> str:
    if not math.isfinite(mean(values)):
        return "-"
    interval = f" ± {half_interval(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):+.{digits}f}{interval}{unit}"


def write_table(readme: Path, table: str) -> None:
    """Put the table between its two comments in the README, if they are there."""
    before, begin, rest = readme.read_text().partition(BEGIN)
    if END in rest:
        replace(readme, f"{before}{begin}{table}\n{END}{rest.partition(END)[2]}".encode())
