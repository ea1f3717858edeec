"""Logs and records, read back: what ran, on what, and how well.

A log is the script's source, a line of `=`, a header, a line of `=`, and the steps. Public logs of this field vary:
the source may stand between the first two lines of `=`, times may be in seconds, one file may hold several trials.
All are read here, and only lines that start with `step:` after the source count: a script may well print, or quote,
such lines itself. A line that cannot be read is remembered with its number, and the rest is still read.

Logs are read as bytes with one regular expression that stops at validations only, because there may be thousands.
"""

import json
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import NamedTuple

DEFAULT_TARGET = 3.28  # the 8xH100 track, for logs that do not name their target
# These may differ within a record: they do not change what is trained.
PER_RUN_SETTINGS = {"seed", "resume", "resume_anyway", "save_every", "log_dir", "checkpoint_dir"}
SIGNIFICANCE = 0.01


class UserError(Exception):
    """Something the user can put right: told in one line, with exit code 2."""


# ----------------------------------------------------------------------------------------------------------------------
# Log: one file, one source, one or more runs
# ----------------------------------------------------------------------------------------------------------------------

# A literal in front (a line break, `step:`) lets the regular expressions skip ahead quickly; so that the first line has
# a line break before it too, one is put in front of every file, and the line at a position is the count of those.
RULER = re.compile(rb"\n={100}(?=\r?(?:\n|\Z))")
OTHER_RULER = re.compile(rb"\n={80,}(?=\r?(?:\n|\Z))")  # only where no line has the usual 100
PYTHON = re.compile(rb"^(?:import \w|from [\w.]+ import |def \w+\(|class \w)", re.MULTILINE)
HEADER_LINE = re.compile(rb"^(python|torch|cuda|hardware|world_size|seed|settings|data): *(.*?)\r?$", re.MULTILINE)
GPU = re.compile(rb"^\| +\d+ +(\S.*?) +(?:On|Off|N/A) +\|", re.MULTILINE)  # a row of nvidia-smi's table

# Three things happen in a log: a validation, a resume, and a line to look at more closely. Ordinary training lines
# match none of them, so they cost no Python at all; most are known by their usual form, which is quickest to test.
EVENT = re.compile(
    rb"\n(?:step:(?!\d+/\d+ (?:train_loss:[\d.]+ )?train_time:[\d.]+m?s step_avg:\S+\r?\n)"
    rb"(?:(\d{1,15})/(\d{1,15}) val_loss:(\d+\.\d+) train_time:(\d+(?:\.\d+)?)(m?s)\b"
    rb"|(?!\d+(?:/\d+)? (?:(?!val_loss:)[^\s:]+:\S* +)*train_time:(?:\d+(?:\.\d+)?|nan)m?s\b(?![^\n]*val_loss:))"
    rb"([^\n]*))"
    rb"|resumed at step:? *(?P<checkpoint>\d{1,15}))"
)
RESUMED_ON = re.compile(rb"[^\n]* on (\d+ x [^\r\n]+)")  # the rest of a line that tells of a resume
TRAINING = re.compile(rb"\nstep:(\d{1,15})/\d+ train_loss:(\d+\.\d+) train_time:(\d+(?:\.\d+)?)(m?s)\b")
FIELD = re.compile(r"(\w+): *([^\s|,]+)")
CLOCK = re.compile(r"(\d+(?:\.\d+)?|nan)(ms|s)")


class Validation(NamedTuple):
    step: int
    loss: float
    seconds: float  # on the training clock; nan where the log does not say


@dataclass
class Run:
    """One training: its validations, and how many steps it was to have."""

    validations: list[Validation] = field(default_factory=list)
    steps: int | None = None  # planned; None where the log does not say
    complete: bool = False  # validated after its last step

    @property
    def final(self):
        return self.validations[-1]

    def reached(self, target):
        """The first validation at or below the target, or None. Nothing is interpolated between validations."""
        return next((v for v in self.validations if v.loss <= target), None)


@dataclass
class Log:
    """One log file. What a log does not say is None."""

    path: Path
    source: bytes | None = None
    runs: list[Run] = field(default_factory=list)
    complaints: list[tuple[int, str]] = field(default_factory=list)  # line number, what is wrong there
    settings: dict | None = None
    target: float | None = None
    seed: str | None = None
    data: str | None = None  # the data's fingerprint, short
    data_files: list[str] = field(default_factory=list)
    hardware: str | None = None
    machine: str | None = None  # the same in the words of a line that tells of a resume
    moved_to: str | None = None  # another machine, on which it was resumed
    content: int = 0  # hash of the whole file: the same run filed twice is not two runs


def read_log(path):
    """Read one log. Never fails on what is in the file; raises UserError if there is no file to read."""
    path = Path(path)
    try:
        data = b"\n" + path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    log = Log(path, content=hash(data))
    start, end, body = find_source(data)
    if body is None:
        log.complaints.append((last_line(data), "ends within the source: no line of = follows it"))
        return log
    log.source = data[start:end] or None
    read_header(log, data, body)
    read_steps(log, data, body)
    return log


def find_source(data):
    """(start, end, body): the source is data[start:end], the header and steps follow from body on.

    Without any line of `=` this is either a console's output, which is all body, or a script cut short: body None.
    A line break that the writer put behind the source stays: nothing tells it from the script's own.
    """
    rulers = list(islice(RULER.finditer(data), 2)) or list(islice(OTHER_RULER.finditer(data), 2))
    if not rulers:
        return 0, 0, None if PYTHON.search(data) else 0
    first = rulers[0]
    if len(rulers) == 2 and not PYTHON.search(data, 0, first.start()):
        between, second = data.index(b"\n", first.end()) + 1, rulers[1]
        if not data[: first.start()].strip() or PYTHON.search(data, between, second.start()):
            return between, second.start() + 1, second.end()
    return 1, first.start() + 1, first.end()


def last_line(data):
    return max(1, data.count(b"\n") - data.endswith(b"\n"))


def read_header(log, data, body):
    """Take `key: value` lines up to the next line of `=` or the first step, whichever comes first."""
    ruler = RULER.search(data, body)
    end = ruler.start() if ruler else len(data)
    first_step = data.find(b"\nstep:", body, end)
    end = first_step if first_step >= 0 else end
    header = {}
    for match in HEADER_LINE.finditer(data, body, end):
        header.setdefault(match[1].decode(), (match[2].decode(errors="replace"), match.start()))

    def read_json(key, kind):
        if key not in header:
            return None
        text, position = header[key]
        try:
            value = json.loads(text)
            if isinstance(value, kind):
                return value
            problem = f"is not a JSON {'object' if kind is dict else 'list'}"
        except (ValueError, RecursionError) as error:
            problem = f"is not JSON: {error}"
        log.complaints.append((data.count(b"\n", 0, position), f"'{key}' {problem}"))
        return None

    log.settings = read_json("settings", dict)
    if log.settings is not None and "target_loss" in log.settings:
        target = log.settings["target_loss"]
        if isinstance(target, int | float) and math.isfinite(target):
            log.target = float(target)
        else:
            line = data.count(b"\n", 0, header["settings"][1])
            log.complaints.append((line, f"target_loss is {target!r}, no number"))
    log.seed = header["seed"][0] if "seed" in header else None
    if log.seed is None and log.settings and "seed" in log.settings:
        log.seed = str(log.settings["seed"])
    log.hardware = describe_hardware(header, GPU.findall(data, body, end))
    if "hardware" in header and "world_size" in header:
        log.machine = f"{header['world_size'][0]} x {header['hardware'][0]}"
    shards = read_json("data", list)
    if shards:
        log.data, log.data_files = fingerprint(shards)


def describe_hardware(header, gpus):
    """One line that is equal for equal machines: nvidia-smi's dates and temperatures are not part of it."""
    if gpus:
        hardware = ", ".join(f"{n} x {gpu.decode(errors='replace')}" for gpu, n in sorted(Counter(gpus).items()))
    elif "hardware" in header:
        hardware = header["hardware"][0]
    else:
        return None
    return hardware + (f", world size {header['world_size'][0]}" if "world_size" in header else "")


def fingerprint(shards):
    """(short hash, file names) of the data. The folder that the shards lie in is no part of what they are."""
    shards = [{**s, "file": Path(str(s.get("file", ""))).name} if isinstance(s, dict) else s for s in shards]
    text = json.dumps(sorted(shards, key=str), sort_keys=True)
    return sha256(text.encode()).hexdigest()[:8], [s["file"] for s in shards if isinstance(s, dict)]


def read_steps(log, data, body):
    """Sort the validations of a log into runs: a step number that does not grow starts another trial."""
    run, resumed = None, False
    for match in EVENT.finditer(data, body, end_of_log(log, data, body)):
        checkpoint = match["checkpoint"]
        if checkpoint is not None:
            told = RESUMED_ON.match(data, match.end())
            resumed_on = told[1].decode(errors="replace") if told else None
            if log.machine and resumed_on not in (None, log.machine):
                log.moved_to = resumed_on
            if run:  # the steps since that checkpoint are run once more
                run.validations = [v for v in run.validations if v.step <= int(checkpoint)]
                resumed = True
            continue
        try:
            validation, steps = read_validation(match)
        except ValueError as error:
            log.complaints.append((data.count(b"\n", 0, match.start() + 1), str(error)))
            continue
        if validation is None:
            continue
        if run and run.validations and validation == run.final:
            continue  # the same line twice is not two runs
        if resumed:
            run.validations = [v for v in run.validations if v.step < validation.step]
            resumed = False
        if run is None or (run.validations and validation.step <= run.final.step):
            run = Run()
            log.runs.append(run)
        run.validations.append(validation)
        run.steps = steps
    log.runs = [run for run in log.runs if run.validations]
    for run in log.runs:
        # Where the plan is not told, only the closing line of memory use shows that the end was reached.
        run.complete = run.final.step == run.steps if run.steps else data.find(b"\npeak memory", body) >= 0
    if not log.runs and not log.complaints:
        log.complaints.append((last_line(data), "ends without any validation: no line like 'step:... val_loss:...'"))


def training_losses(path):
    """{step: (loss, seconds)} of a log with one run; a step that was run again after a resume counts as it was last."""
    data = b"\n" + Path(path).read_bytes()
    lines = (match.groups() for match in TRAINING.finditer(data, find_source(data)[2]))
    return {int(step): (float(loss), seconds_of(clock, unit)) for step, loss, clock, unit in lines}


def end_of_log(log, data, body):
    """Where the steps end: with the file, or where somebody put a second log behind, source and all."""
    first_step = data.find(b"\nstep:", body)
    ruler = RULER.search(data, first_step) if first_step >= 0 else None
    source = PYTHON.search(data, first_step, ruler.start()) if ruler else None
    if source is None:
        return len(data)
    line = data.count(b"\n", 0, source.start())
    log.complaints.append((line, "another log begins about here: not read, one file may hold one source"))
    return source.start()


def read_validation(match):
    """(validation or None, planned steps or None) of a line; ValueError says what is wrong with it."""
    step, steps, loss, clock, unit, odd, _ = match.groups()
    if odd is None:
        return Validation(int(step), float(loss), seconds_of(clock, unit)), int(steps)
    text = odd.decode(errors="replace")
    quoted = repr("step:" + text.rstrip("\r")[:80])
    head = re.match(r"(\d{1,15})(?:/(\d{1,15}))?(?=[\s|,]|$)", text)
    fields = dict(FIELD.findall(text[head.end() :])) if head else {}
    clock = CLOCK.fullmatch(fields.get("train_time", ""))
    if match.end() == len(match.string) and not clock:
        raise ValueError(f"ends in the middle of a line: {quoted}")
    if not head:
        raise ValueError(f"no step number in {quoted}")
    if "train_time" in fields and not clock:
        raise ValueError(f"train_time is neither in ms nor in s in {quoted}")
    if not fields.keys() & {"val_loss", "train_loss", "train_time"}:
        raise ValueError(f"neither loss nor train_time in {quoted}")
    if "val_loss" not in fields:
        return None, None
    try:
        loss = float(fields["val_loss"])
    except ValueError:
        raise ValueError(f"val_loss is no number in {quoted}") from None
    return Validation(int(head[1]), loss, seconds_of(*clock.groups()) if clock else math.nan), int(head[2] or 0) or None


def seconds_of(clock, unit):
    return float(clock) / (1000 if unit in (b"ms", "ms") else 1)


# ----------------------------------------------------------------------------------------------------------------------
# Record: a folder with a script and its logs; Entry: its runs towards one target
# ----------------------------------------------------------------------------------------------------------------------


@dataclass
class Record:
    name: str
    folder: Path | None  # None for logs that a user names one by one
    script: Path | None
    logs: list[Log]

    def entries(self, default_target=DEFAULT_TARGET):
        """One entry a target, so that runs of different tracks are never put together."""
        by_target = {}
        for log in self.logs:
            if log.runs:
                by_target.setdefault(default_target if log.target is None else log.target, []).append(log)
        script = self.script.read_bytes() if self.script else None
        return [Entry(self.name, target, script, logs) for target, logs in sorted(by_target.items())]


class Check(NamedTuple):
    passed: bool | None  # None: the logs do not say
    name: str
    text: str


class Moment(NamedTuple):
    """All runs of an entry at one step."""

    step: int
    seconds: float
    loss: float
    spread: float


@dataclass
class Entry:
    """The runs of one record towards one target, and what they prove."""

    name: str
    target: float
    script: bytes | None
    logs: list[Log]

    @cached_property
    def runs(self):
        return [run for log in self.logs for run in log.runs]

    @cached_property
    def complete(self):
        return [run for run in self.runs if run.complete]

    @property
    def losses(self):
        return [run.final.loss for run in self.complete]

    @property
    def times(self):
        return [run.final.seconds for run in self.complete]

    @property
    def data(self):
        return common(log.data for log in self.logs)

    @property
    def hardware(self):
        return common("mixed" if log.moved_to else log.hardware for log in self.logs)

    @property
    def track(self):
        """What must be equal before two records are compared: the target and the data."""
        return self.target, self.data or ""

    def curve(self):
        """Mean and spread of the runs at each validation."""
        by_step = {}
        for run in self.complete or self.runs:
            for validation in run.validations:
                by_step.setdefault(validation.step, []).append(validation)
        moments = []
        for step, found in sorted(by_step.items()):
            losses = [v.loss for v in found]
            moments.append(Moment(step, mean([v.seconds for v in found]), mean(losses), spread(losses)))
        return moments

    @cached_property
    def training(self):
        """The mean training loss of all runs in each hundredth of their steps; empty where the logs do not tell it."""
        hundredths = {}
        for log in self.logs:
            if len(log.runs) == 1 and log.runs[0].steps and (log.runs[0].complete or not self.complete):
                for step, (loss, seconds) in training_losses(log.path).items():
                    hundredths.setdefault((step - 1) * 100 // log.runs[0].steps, []).append((step, seconds, loss))
        columns = [zip(*found, strict=True) for _, found in sorted(hundredths.items())]
        means = [[mean(values) for values in column] for column in columns]
        return [Moment(step, seconds, loss, math.nan) for step, seconds, loss in means]

    def checks(self):
        """Everything that a record must show, as one Check each."""
        return [
            self.check_complete(),
            self.check_source(),
            self.check_seeds(),
            self.check_settings(),
            self.check_same("data", [log.data for log in self.logs], "fingerprint"),
            self.check_hardware(),
            self.check_loss(),
        ]

    def check_complete(self):
        unread = [(log, *log.complaints[0]) for log in self.logs if log.complaints]
        if unread:
            log, line, problem = unread[0]
            return Check(False, "complete", f"{log.path}:{line}: {problem}")
        unfinished = [(log, run) for log in self.logs for run in log.runs if not run.complete]
        if unfinished:
            log, run = unfinished[0]
            planned = f" of {run.steps}" if run.steps else ""
            first = f"{log.path} was last validated at step {run.final.step}{planned}"
            return Check(False, "complete", f"{len(unfinished)} of {many(self.runs, 'run')} unfinished: {first}")
        return Check(True, "complete", f"{many(self.runs, 'run')} in {many(self.logs, 'log')}, all to the last step")

    def check_source(self):
        without = [log for log in self.logs if log.source is None]
        if len(without) == len(self.logs):
            return Check(None, "source", "no log holds its source")
        if without:
            return Check(False, "source", f"{without[0].path} holds no source")
        expected = self.logs[0].source if self.script is None else self.script
        differing = [log for log in self.logs if not same_source(log.source, expected)]
        if self.script is None:
            if differing:
                return Check(False, "source", f"{differing[0].path} and {self.logs[0].path} hold different sources")
            return Check(None, "source", "the same in every log; there is no script to compare it with")
        if differing:
            return Check(False, "source", f"{differing[0].path} holds another source than the record's script")
        return Check(True, "source", "the record's script, in every log")

    def check_seeds(self):
        seen = {}
        for log in self.logs:
            if log.content in seen:
                return Check(False, "seeds", f"{log.path} and {seen[log.content]} are the same file")
            seen[log.content] = log.path
        runs = [(log.seed, log.path) for log in self.logs for _ in log.runs]
        unnamed = [path for seed, path in runs if seed is None]
        if len(unnamed) == len(runs):
            return Check(None, "seeds", "no log names its seed")
        if unnamed:
            return Check(False, "seeds", f"{unnamed[0]} does not name its seed")
        seed, times = Counter(seed for seed, _ in runs).most_common(1)[0]
        if times > 1:
            return Check(False, "seeds", f"{times} runs have the seed {seed}")
        return Check(True, "seeds", "a different one in every run" if len(runs) > 1 else f"one: {seed}")

    def check_settings(self):
        known = [log.settings for log in self.logs]
        if not any(settings is not None for settings in known):
            return Check(None, "settings", "no log names its settings")
        for log, settings in zip(self.logs, known, strict=True):
            if settings is None:
                return Check(False, "settings", f"{log.path} does not name its settings")
            first = known[0]
            keys = (settings.keys() | first.keys()) - PER_RUN_SETTINGS
            other = sorted(key for key in keys if settings.get(key) != first.get(key))
            if other:
                key = other[0]
                values = f"{settings.get(key)!r} in {log.path}, {first.get(key)!r} in {self.logs[0].path}"
                return Check(False, "settings", f"{key} is {values}")
        return Check(True, "settings", "the same in every log, but for the seed")

    def check_same(self, name, values, what):
        if not any(values):
            return Check(None, name, f"no log names its {what}")
        for log, value in zip(self.logs, values, strict=True):
            if value is None:
                return Check(False, name, f"{log.path} does not name its {what}")
            if value != values[0]:
                return Check(False, name, f"{value} in {log.path}, {values[0]} in {self.logs[0].path}")
        return Check(True, name, f"the same in every log: {values[0]}")

    def check_hardware(self):
        for log in self.logs:
            if log.moved_to:
                return Check(False, "hardware", f"{log.path} began on {log.machine} and was resumed on {log.moved_to}")
        return self.check_same("hardware", [log.hardware for log in self.logs], "machine")

    def check_loss(self):
        losses = self.losses
        if not losses:
            return Check(False, "loss", "no complete run")
        figures = f"mean {mean(losses):.4f}"
        if len(losses) == 1:
            return Check(False, "loss", f"{figures}: one run has no spread, so nothing can be said")
        figures += f", spread {spread(losses):.4f}"
        p = p_below(losses, self.target)
        if p is None:
            return Check(False, "loss", f"{figures}: losses that are equal, or no numbers, allow no test")
        verdict = "below" if p < SIGNIFICANCE else "not shown to be below"
        test = f"p {show_p(p)} (one-sided t-test, {many(losses, 'run')})"
        return Check(p < SIGNIFICANCE, "loss", f"{figures}, {verdict} {self.target:g}: {test}")


def same_source(a, b):
    """Equal up to what a log's writer may add: line breaks at the end, and a carriage return on each line."""
    return a == b or a.replace(b"\r\n", b"\n").rstrip(b"\n") == b.replace(b"\r\n", b"\n").rstrip(b"\n")


# ----------------------------------------------------------------------------------------------------------------------
# Figures
# ----------------------------------------------------------------------------------------------------------------------


def mean(values):
    return math.fsum(values) / len(values) if values else math.nan


def spread(values):
    """The standard deviation of the runs around their own mean; nan for a single run."""
    if len(values) < 2:
        return math.nan
    centre = mean(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))


def p_below(losses, target):
    """How likely such losses were if the true mean were at the target or above: Student's one-sided t-test.

    None where the test has no meaning: fewer than two runs, no spread, or a loss that is no number.
    """
    noise = spread(losses) / math.sqrt(len(losses)) if losses else math.nan
    if not noise > 0 or not math.isfinite(noise):
        return None
    return float(student("stdtr")(len(losses) - 1, (mean(losses) - target) / noise))


def half_interval(differences, confidence=0.95):
    """Half the width of the interval that holds the true mean difference with this confidence (t distribution)."""
    quantile = float(student("stdtrit")(len(differences) - 1, (1 + confidence) / 2))
    return quantile * spread(differences) / math.sqrt(len(differences))


def student(function):
    # Imported here, since most commands need no statistics; scipy.special loads much faster than scipy.stats.
    try:
        from scipy import special
    except ImportError:
        raise UserError("the t-test needs scipy: pip install -r requirements-dev.txt") from None
    return getattr(special, function)


def show_p(p):
    return f"= {p:.4f}" if p >= 0.00005 else "< 0.0001"


def many(things, name):
    return f"{len(things)} {name}" + ("" if len(things) == 1 else "s")


def common(values):
    """The one value that all share."""
    values = list(dict.fromkeys(values))
    return values[0] if len(values) == 1 else "mixed"


# ----------------------------------------------------------------------------------------------------------------------
# Finding records
# ----------------------------------------------------------------------------------------------------------------------


def log_files(folder):
    return sorted(path for path in folder.iterdir() if path.suffix in (".txt", ".log") and path.is_file())


def is_record(folder):
    return folder.is_dir() and ((folder / "train_gpt.py").is_file() or bool(log_files(folder)))


def record_folders(folder):
    """The records in a folder, oldest first: their names start with their dates."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if path.name[0] not in "._" and is_record(path)), key=str)


def read_record(folder):
    script = folder / "train_gpt.py"
    logs = [read_log(path) for path in log_files(folder)]
    return Record(folder.resolve().name, folder, script if script.is_file() else None, logs)


def find(name, home):
    """The path that a user means: a folder or file, or a record of `home` by its name or an unambiguous part of it."""
    path = Path(name)
    if path.exists():
        return path
    folders = record_folders(home)
    for matches in (
        [folder for folder in folders if folder.name == name],
        [folder for folder in folders if folder.name.partition("_")[2].lower() == name.lower()],
        [folder for folder in folders if name.lower() in folder.name.lower()],
    ):
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise UserError(f"{name}: could be {' or '.join(folder.name for folder in matches)}")
    known = f"the records are {', '.join(folder.name for folder in folders)}" if folders else "there are no records yet"
    raise UserError(f"{name}: no such file, folder or record; {known}")


def open_records(names, home):
    """The records that a user names: each folder is a record or holds some; each log stands for itself."""
    records = []
    for name in names:
        path = find(name, home)
        if path.is_file():
            records.append(Record(path.stem, None, None, [read_log(path)]))
        elif is_record(path):
            records.append(read_record(path))
        else:
            inside = record_folders(path)
            if not inside:
                raise UserError(f"{name}: no record and no log in this folder")
            records.extend(read_record(folder) for folder in inside)
    return records
