"""What the runs of a record prove: their figures, and the checks that a record must pass."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

from records.figures import SIGNIFICANCE, have_scipy, mean, p_below, show_p, spread
from records.folders import SCRIPT, Record
from records.logs import Log, Run, find_copies, same_source
from records.scripts import describe_difference, split_files
from records.steps import training_losses
from records.terminal import UserError, brief, many, shown, warn

DEFAULT_TARGET = 3.28  # the 8xH100 track, for logs that do not name their target
NEIGHBOURHOOD = 0.1  # a final loss further than this from a target that was only guessed is another track's
# These may differ within a record: they change neither what is trained nor how it is judged.
HARMLESS_SETTINGS = {"seed", "resume", "resume_anyway", "save_every", "log_dir", "checkpoint_dir", "collective_timeout"}
HARMLESS_ON_RESUME = HARMLESS_SETTINGS - {"seed"} | {"val_loss_every"}
SMOOTHING = 0.02  # share of the steps over which training losses are averaged
SMOOTHED_STEPS = 50  # but never fewer than this

Value = TypeVar("Value")


class Check(NamedTuple):
    passed: bool | None  # None: the logs do not say
    name: str
    text: str


class Moment(NamedTuple):
    """The runs of an entry at one step."""

    step: int
    seconds: float
    loss: float
    spread: float


def entries_of(record: Record, target: float | None = None, steps: int | None = None) -> list["Entry"]:
    """One entry for each target and dtype, so that runs of different tracks are never put together."""
    logs = [log for log in record.logs if log.runs]
    dtypes = {log: brief(str(log.settings["dtype"]), 40) for log in logs if log.settings and "dtype" in log.settings}
    # What a log does not name it shares with the others, if these agree.
    usual_dtype = only(dtypes.values(), "")
    usual_target = only([log.target for log in logs if log.target is not None], target)
    groups = {}
    for log in logs:
        goal = usual_target if log.target is None else log.target
        key = DEFAULT_TARGET if goal is None else goal, dtypes.get(log, usual_dtype), goal is None
        groups.setdefault(key, []).append(log)
    return [Entry(record, *key, logs, steps) for key, logs in sorted(groups.items(), key=lambda item: item[0])]


@dataclass
class Entry:
    """The runs of one record towards one target, and what they prove."""

    record: Record
    target: float
    dtype: str
    target_guessed: bool
    all_logs: list[Log]
    steps: int | None = None  # how many a run must have, if the user says so

    def __post_init__(self):
        # Of a run that was saved twice, the file that tells more counts.
        logs = sorted(self.all_logs, key=lambda log: (log.source is None, log.seed is None))
        runs = [run for log in logs for run in log.runs]
        copies = find_copies(runs)
        self.copies: list[tuple[Run, Run]] = [(runs[place], copies[place]) for place in sorted(copies)]
        kept = {id(run) for place, run in enumerate(runs) if place not in copies}
        self.logs = [log for log in self.all_logs if any(id(run) in kept for run in log.runs)]
        self.runs = [run for log in self.logs for run in log.runs if id(run) in kept]

    @property
    def name(self) -> str:
        return self.record.name

    @cached_property
    def complete(self) -> list[Run]:
        return [run for run in self.runs if self.is_complete(run)]

    def is_complete(self, run: Run) -> bool:
        if self.steps is None:
            return run.complete
        return run.final.step == self.steps == run.last_step and run.missing is None

    @property
    def losses(self) -> list[float]:
        return [run.final.loss for run in self.complete]

    @property
    def times(self) -> list[float]:
        return [run.final.seconds for run in self.complete]

    @property
    def step_times(self) -> list[float]:
        """Milliseconds per step of each run."""
        return [1000 * run.final.seconds / run.final.step for run in self.complete if run.final.step]

    @property
    def reached(self) -> bool:
        """Is the mean final loss at or below the target?"""
        return mean(self.losses) <= self.target

    @property
    def data(self) -> str | None:
        return only((log.data for log in self.logs), "mixed")

    @property
    def hardware(self) -> str | None:
        return only(("mixed" if log.moved_to else log.hardware for log in self.logs), "mixed")

    @property
    def track(self) -> tuple:
        """What must be equal before two records are compared."""
        return self.target, self.data or "", self.dtype, self.record.track if self.target_guessed else ""

    @property
    def doubt(self) -> str | None:
        """Why the target that was guessed is probably not this record's."""
        if not self.target_guessed:
            return None
        losses = self.losses or [run.final.loss for run in self.runs]
        if abs(mean(losses) - self.target) > NEIGHBOURHOOD:
            return f"a loss of {mean(losses):.4g} is far from {self.target:g}, and the logs name no target"
        track = self.record.track
        if track and "short" not in track.lower():
            return f"the folder names the track {track}, the logs name no target"
        return None

    def curve(self) -> list[Moment]:
        """Mean and spread at each validation, of the same runs throughout: so the curve never runs back in time."""
        runs = self.complete or self.runs
        shared = set.intersection(*({v.step for v in run.validations} for run in runs))
        if not all(run.final.step in shared for run in runs):
            usual = Counter(tuple(v.step for v in run.validations) for run in runs).most_common(1)[0][0]
            runs = [run for run in runs if tuple(v.step for v in run.validations) == usual]
            shared = set(usual)
        moments = []
        columns = [[v for v in run.validations if v.step in shared] for run in runs]
        for found in zip(*columns, strict=True):
            losses = [v.loss for v in found]
            moments.append(Moment(found[0].step, mean([v.seconds for v in found]), mean(losses), spread(losses)))
        return moments

    @cached_property
    def training(self) -> list[Moment]:
        """The mean training loss of the runs in each hundredth of their steps, smoothed; empty if no log has any."""
        hundredths = {}
        for run in self.complete or self.runs:
            steps = run.steps or run.last_step
            for step, (loss, seconds) in training_losses(run).items() if steps else ():
                hundredths.setdefault((step - 1) * 100 // steps, []).append((step, seconds, loss))
        found = [hundredths[key] for key in sorted(hundredths)]
        return smooth(found, max((run.last_step for run in self.runs), default=1))

    # ------------------------------------------------------------------------------------------------
    # Checks
    # ------------------------------------------------------------------------------------------------

    @cached_property
    def checks(self) -> list[Check]:
        """Everything that a record must show."""
        return [
            self.check_complete(),
            self.check_source(),
            self.check_seeds(),
            self.check_settings(),
            self.check_same("data", [log.data for log in self.logs], "fingerprint"),
            self.check_hardware(),
            self.check_loss(),
        ]

    @property
    def stands(self) -> bool:
        return all(check.passed is not False for check in self.checks)

    def check_complete(self) -> Check:
        unread = [(log, *log.complaints[0]) for log in self.logs if log.complaints]
        if unread:
            log, line, problem = unread[0]
            return Check(False, "complete", f"{shown(log.path)}:{line}: {problem}")
        unfinished = [run for run in self.runs if not self.is_complete(run)]
        if unfinished:
            first = f"{shown(unfinished[0].path)} {why_unfinished(unfinished[0], self.steps)}"
            return Check(False, "complete", f"{len(unfinished)} of {many(self.runs, 'run')} unfinished: {first}")
        end = "all to the last step"
        early = [run for run in self.runs if run.steps and run.final.step < run.steps]
        if early:
            end = f"all to their end; {len(early)} at step {early[0].final.step} of {early[0].steps} planned"
        if self.copies:
            end += f"; {many(self.copies, 'copy', 'copies')} not counted"
        return Check(True, "complete", f"{many(self.runs, 'run')} in {many(self.logs, 'log')}, {end}")

    def check_source(self) -> Check:
        without = [log for log in self.logs if log.source is None]
        if len(without) == len(self.logs):
            return Check(None, "source", "no log holds its source")
        if without:
            return Check(False, "source", f"{shown(without[0].path)} holds no source")
        try:
            script = self.record.script_source
        except UserError as error:
            return Check(False, "source", str(error))
        other = shown(self.logs[0].path) if script is None else "the record's script"
        said = []
        for log in self.logs:
            difference = self.difference_from(script, log.source)
            if difference and not difference[0]:
                return Check(False, "source", f"{shown(log.path)} holds another source than {other}: {difference[1]}")
            said += [difference[1]] if difference else []
        but = f", but for {said[0]} in {many(said, 'log')}" if said else ""
        if script is None:
            return Check(None, "source", f"the same in every log{but}; there is no script to compare it with")
        return Check(True, "source", f"the record's script, in every log{but}")

    def difference_from(self, script: bytes | None, source: bytes) -> tuple[bool, str] | None:
        """(is it the same program?, in what it differs) for a log's source that is not the expected one."""
        if same_source(source, self.logs[0].source if script is None else script):
            return None
        files = split_files(source)
        if script is None:
            return describe_difference(split_files(self.logs[0].source), files)
        # Of a log's other files, those that lie beside the script are compared.
        beside = {name: self.record.script.parent / name for name in list(files)[1:]}
        wanted = {SCRIPT: script} | {name: path.read_bytes() for name, path in beside.items() if path.is_file()}
        return describe_difference(wanted, {name: files[name] for name in wanted})

    def check_seeds(self) -> Check:
        kept = set(map(id, self.runs))
        runs = [(log.seed, log.path) for log in self.logs for run in log.runs if id(run) in kept]
        unnamed = [path for seed, path in runs if seed is None]
        if len(unnamed) == len(runs):
            return Check(None, "seeds", "no log names its seed")
        if unnamed:
            return Check(False, "seeds", f"{shown(unnamed[0])} does not name its seed")
        seed, times = Counter(seed for seed, _ in runs).most_common(1)[0]
        if times > 1:
            return Check(False, "seeds", f"{times} runs have the seed {seed}")
        return Check(True, "seeds", "a different one in every run" if len(runs) > 1 else f"one: {seed}")

    def check_settings(self) -> Check:
        changes = [(log, change) for log in self.logs for change in log.changes]
        for log, change in changes:
            if change.partition(" ")[0] not in HARMLESS_ON_RESUME:
                return Check(False, "settings", f"{shown(log.path)} was resumed with another {brief(change)}")
        known = [log.settings for log in self.logs]
        if not any(settings is not None for settings in known):
            return Check(None, "settings", "no log names its settings")
        for log, settings in zip(self.logs, known, strict=True):
            if settings is None:
                return Check(False, "settings", f"{shown(log.path)} does not name its settings")
            first = known[0]
            keys = (settings.keys() | first.keys()) - HARMLESS_SETTINGS
            other = sorted(key for key in keys if settings.get(key) != first.get(key))
            if other:
                value, before = (brief(repr(known.get(other[0])), 60) for known in (settings, first))
                values = f"{value} in {shown(log.path)}, {before} in {shown(self.logs[0].path)}"
                return Check(False, "settings", f"{brief(other[0], 60)} is {values}")
        resumed = f"; changed on resume: {changes[0][1]}" if changes else ""
        return Check(True, "settings", f"the same in every log, but for the seed{resumed}")

    def check_same(self, name: str, values: Sequence, what: str) -> Check:
        if not any(values):
            return Check(None, name, f"no log names its {what}")
        for log, value in zip(self.logs, values, strict=True):
            if value is None:
                return Check(False, name, f"{shown(log.path)} does not name its {what}")
            if value != values[0]:
                return Check(False, name, f"{value} in {shown(log.path)}, {values[0]} in {shown(self.logs[0].path)}")
        return Check(True, name, f"the same in every log: {values[0]}")

    def check_hardware(self) -> Check:
        for log in self.logs:
            if log.moved_to:
                moved = f"began on {log.machine} and was resumed on {log.moved_to}"
                return Check(False, "hardware", f"{shown(log.path)} {moved}")
        return self.check_same("hardware", [log.hardware for log in self.logs], "machine")

    def check_loss(self) -> Check:
        losses = self.losses
        if not losses:
            return Check(False, "loss", "no complete run")
        figures = f"mean {mean(losses):.4f}"
        if self.doubt:
            return Check(False, "loss", f"{figures}: {self.doubt}; say which with --target")
        if len(losses) == 1:
            return Check(False, "loss", f"{figures}: one run has no spread, so nothing can be said")
        figures += f", spread {spread(losses):.4f}"
        if not have_scipy():
            return Check(False, "loss", f"{figures}: the t-test needs scipy: pip install -r requirements-dev.txt")
        p = p_below(losses, self.target)
        if p is None:
            return Check(False, "loss", f"{figures}: losses that are equal, or no numbers, allow no test")
        verdict = "below" if p < SIGNIFICANCE else "not shown to be below"
        test = f"p {show_p(p)} (one-sided t-test, {many(losses, 'run')})"
        return Check(p < SIGNIFICANCE, "loss", f"{figures}, {verdict} {self.target:g}: {test}")


def why_unfinished(run: Run, steps: int | None) -> str:
    planned = f" of {steps or run.steps}" if steps or run.steps else ""
    if run.missing:
        first, last = run.missing
        return f"lacks step {first}" if first == last else f"lacks steps {first} to {last}"
    if run.ended not in (None, "finished"):
        return f"ended at step {run.last_step}{planned}: {brief(run.ended)}"
    return f"was last validated at step {run.final.step}{planned}"


def smooth(found: list[list[tuple]], steps: int) -> list[Moment]:
    """One moment for each group of (step, seconds, loss), its loss a mean over the neighbours too.

    The neighbourhood is the same share of the steps in every record, and never less than some steps.
    """
    width = max(SMOOTHING, SMOOTHED_STEPS / steps) * steps / 2
    means = [[mean(column) for column in zip(*group, strict=True)] for group in found]
    moments, first, end = [], 0, 0
    for step, seconds, _ in means:
        while means[first][0] < step - width:
            first += 1
        while end < len(means) and means[end][0] <= step + width:
            end += 1
        moments.append(Moment(step, seconds, mean([loss for _, _, loss in means[first:end]]), math.nan))
    return moments


def only(values: Iterable[Value], otherwise: Value) -> Value:
    """The one value that all share."""
    values = list(dict.fromkeys(values))
    return values[0] if len(values) == 1 else otherwise


def tracks(records: Iterable[Record], target: float | None, steps: int | None = None) -> dict[tuple, list[Entry]]:
    """{track: its entries, oldest first}. Entries of different tracks are never compared."""
    found = {}
    for record in records:
        for entry in entries_of(record, target, steps):
            found.setdefault(entry.track, []).append(entry)
    return dict(sorted(found.items(), key=lambda item: (-item[0][0], item[0][1:])))


def track_title(entries: list[Entry]) -> str:
    entry = entries[0]
    files = next((log.data_files for log in entry.logs if log.data_files), [])
    data = f"data {entry.data} ({', '.join(files[:1])}{', ...' if files[1:] else ''})" if files else "data not named"
    target = (f"target {entry.target:g}" if entry.target else "no target") + (" (a guess)" if entry.doubt else "")
    parts = [entry.record.track if entry.target_guessed else "", target, data, entry.dtype]
    return brief(", ".join(filter(None, parts)))


def complain(records: Iterable[Record], entries: Iterable[Entry], at_most: int = 3) -> None:
    """Tell what could not be read, what is odd and what was left out, without drowning the rest."""
    for record in records:
        for log in record.logs:
            told = sorted([*log.complaints, *log.notes])
            for line, problem in told[:at_most]:
                warn(f"{shown(log.path)}:{line}: {problem}")
            if len(told) > at_most:
                warn(f"{shown(log.path)}: and {len(told) - at_most} more lines like these")
    for entry in entries:
        for copy, original in entry.copies[:at_most]:
            warn(f"{shown(copy.path)}: the same run as in {shown(original.path)}, counted once")
        if len(entry.copies) > at_most:
            warn(f"{entry.name}: and {len(entry.copies) - at_most} more copies")
        if entry.doubt:
            warn(f"{entry.name}: {entry.doubt}; say which with --target")
