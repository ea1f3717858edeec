"""The steps of a log, sorted into runs.

Most logs are one run whose lines have the usual form and follow each other: those are recognised by a few searches
over the whole text, because there may be thousands of logs. All others are read line by line.
"""

import math
import re
from itertools import pairwise
from operator import sub

from records.logs import Lines, Log, Run, Validation, find_copies, find_python, last_line, read_bytes, rules

# Every repetition has a bound, so that no line takes more time than its length.
EXTRAS = rb"(?: [a-z_]{1,20}:[\w.+-]{1,20}){0,3}\r?"
USUAL_STEP = re.compile(
    rb"\nstep:(\d{1,15})/\d{1,15} (?:train_loss:[\d.]{1,20} )?train_time:(?:[\d.]{1,20}|nan)m?s" + EXTRAS + rb"(?=\n)"
)
USUAL_VALIDATION = re.compile(
    rb"\nstep:(\d{1,15})/(\d{1,15}) val_loss:(\d{1,9}\.\d{1,12}) train_time:(\d{1,15}(?:\.\d{1,9})?)(m?s)"
    + EXTRAS
    + rb"(?=\n|\Z)"
)
TRAINING = re.compile(rb"\nstep:(\d{1,15})/\d{1,15} train_loss:(\d{1,9}\.\d{1,12}) train_time:([\d.]{1,20})(m?s)\b")
LINE = re.compile(rb"\n(?:step:|(resumed at step(?=:? )|changed on resume(?=: )|ended(?=: )):? )([^\n]{0,500})")
FIELD = re.compile(r"(\w{1,40}): *([^\s|,]{1,60})")
HEAD = re.compile(r"(\d{1,15})(?:/(\d{1,15}))?(?=[\s|,]|$)")
GLUED = re.compile(r"step:\d{1,15}/\d")  # inside a line: the one before was torn off
CLOCK = re.compile(r"(\d{1,15}(?:\.\d{1,12})?|nan)(ms|s)")
RESUMED = re.compile(rb"(\d{1,15})(?:.* on (\d{1,9} x .+))?")
ANOTHER_CHANGE = re.compile(r"[,;] (?=\w{1,60} [^,;]{0,200} -> )")
UNTIMED_STEPS = 10  # public scripts start their clock again after these
MOST_COMPLAINTS = 10_000


def read_steps(log: Log, data: bytes, body: int) -> None:
    end = end_of_log(log, data, body)
    run = read_usual(log, data, body, end)
    log.runs = [run] if run else LineReader(log, data).read(body, end)
    copies = find_copies(log.runs)
    for place, original in sorted(copies.items()):
        log.notes.append((log.runs[place].line, f"repeats the run of line {original.line}: counted once"))
    log.runs = [run for place, run in enumerate(log.runs) if place not in copies]
    if not log.runs and not log.complaints:
        log.complaints.append((last_line(data), "ends without any validation: no line like 'step:... val_loss:...'"))


def end_of_log(log: Log, data: bytes, body: int) -> int:
    """Where the steps end: with the file, or where somebody put a second log behind, source and all."""
    first_step = data.find(b"\nstep:", body)
    rule = next(rules(data, first_step), None) if first_step >= 0 else None
    source = find_python(data, first_step, rule[0]) if rule else -1
    if source < 0:
        return len(data)
    line = Lines(data).at(source)
    log.complaints.append((line, "another log begins about here: not read, one file may hold one source"))
    return source


# ---- The usual log ---------------------------------------------------------------------------------------------------


def read_usual(log: Log, data: bytes, body: int, end: int) -> Run | None:
    """The run of a log in which every line has the usual form and every step is there, once; else None."""
    if data.find(b"\nresumed at step", body, end) >= 0 or data.find(b"\nchanged on resume", body, end) >= 0:
        return None
    run, places = Run(log.path), []
    at = data.find(b" val_loss:", body, end)
    while at >= 0:
        match = USUAL_VALIDATION.match(data, data.rfind(b"\n", body, at), end)
        if match is None:
            return None
        run.validations.append(validation_of(match))
        places.append(match)
        at = data.find(b" val_loss:", match.end(), end)
    steps = list(map(int, USUAL_STEP.findall(data, body, end)))
    if not places or len(places) + len(steps) != data.count(b"\nstep:", body, end) or not follows(steps, run, places):
        return None
    run.steps, run.last_step = int(places[0][2]), max([run.final.step, *steps[-1:]])
    run.span, run.line = (body, end), Lines(data).at(places[0].start() + 1)
    ended = data.rfind(b"\nended: ", body, end)
    run.ended = told_end(data[ended + 8 : ended + 500]) if ended >= 0 else None
    closed = data.find(b"\npeak memory", places[-1].end(), end) >= 0
    run.complete = is_complete(run, closed, last=True, trained=bool(steps))
    return run


def follows(steps: list[int], run: Run, places: list[re.Match]) -> bool:
    """Do the steps grow one by one, the validations with their times, and do they end together?"""
    validations = run.validations
    if any(a.step >= b.step or a.seconds > b.seconds for a, b in pairwise(validations)):
        return False
    if any(place[2] != places[0][2] for place in places):
        return False
    return not steps or (set(map(sub, steps[1:], steps)) <= {1} and validations[-1].step <= steps[-1] + 1)


def validation_of(match: re.Match) -> Validation:
    step, _, loss, clock, unit = match.groups()
    return Validation(int(step), float(loss), seconds_of(clock, unit))


def seconds_of(clock: bytes | str, unit: bytes | str) -> float:
    try:
        return float(clock) / (1000 if unit in (b"ms", "ms") else 1)
    except ValueError:  # 1.2.3
        return math.nan


def told_end(text: bytes) -> str:
    return text.partition(b"\n")[0].decode(errors="replace").strip()


# ---- Any other log ---------------------------------------------------------------------------------------------------


class LineReader:
    """Sorts the lines of a log into trials.

    Another trial begins where a step, a time or the plan goes back, unless the log reports a resume, or the line
    was there before: then it is a summary that repeats it.
    """

    def __init__(self, log: Log, data: bytes):
        self.log, self.data, self.lines = log, data, Lines(data)
        self.runs: list[Run] = []
        self.run: Run | None = None
        self.times: dict[int, float] = {}  # of the training steps of the current trial
        self.trained: list[bool] = []  # for each run: does the log tell of training steps?
        self.known: set[tuple] = set()  # the validations of the current trial
        self.resumed = self.replanned = False
        self.repeats = 0

    def read(self, body: int, end: int) -> list[Run]:
        for match in LINE.finditer(self.data, body, end):
            kind, text = match.groups()
            if kind is None:
                self.read_step(match, text)
            elif kind == b"ended":
                if self.run:
                    self.run.ended = told_end(text)
            elif kind == b"changed on resume":
                self.log.changes += ANOTHER_CHANGE.split(told_end(text))
            elif resumed := RESUMED.match(text):
                self.resume(match.start(), int(resumed[1]), resumed[2])
        self.finish(end)
        for number, run in enumerate(self.runs):
            last = number == len(self.runs) - 1
            closed = self.data.find(b"\npeak memory", run.span[0], run.span[1]) >= 0
            run.complete = run.missing is None and is_complete(run, closed, last, self.trained[number])
        return self.runs

    def read_step(self, match: re.Match, text: bytes) -> None:
        try:
            step, planned, loss, seconds = read_line(text, whole=match.end() < len(self.data))
        except ValueError as error:
            told = len(self.log.complaints)
            if told <= MOST_COMPLAINTS:
                problem = str(error) if told < MOST_COMPLAINTS else "and more that cannot be read"
                self.log.complaints.append((self.lines.at(match.start() + 1), problem))
            return
        if loss is None:
            self.train(match.start(), step, seconds)
        else:
            self.validate(match.start(), Validation(step, loss, seconds), planned)

    def train(self, position: int, step: int, seconds: float) -> None:
        run = self.run
        if run and not self.resumed and step < run.last_step:
            if same_time(self.times.get(step), seconds):
                return  # told before
            run = None
        if run is None:
            run = self.start(position)
        self.resumed = False
        run.last_step = step
        self.times[step] = seconds

    def validate(self, position: int, validation: Validation, planned: int | None) -> None:
        run = self.run
        if run and not self.resumed and (run.validations or run.last_step > validation.step):
            if validation.step > 0 and validation.key in self.known:
                self.repeats += 1
                if self.repeats == 1:
                    self.log.notes.append((self.lines.at(position + 1), "repeats earlier lines: counted once"))
                return
            if self.goes_back(validation, run.steps if self.replanned else planned):
                run = None
        if run is None:
            run = self.start(position)
        if self.resumed:
            self.forget(validation.step - 1)
        self.resumed = self.replanned = False
        if not run.validations:
            run.line = self.lines.at(position + 1)
        run.validations.append(validation)
        self.known.add(validation.key)
        run.last_step = max(run.last_step, validation.step)
        run.steps = planned

    def goes_back(self, validation: Validation, planned: int | None) -> bool:
        run = self.run
        if run.last_step > validation.step and validation.seconds < self.times.get(run.last_step, math.nan):
            return True
        if not run.validations:
            return False
        in_time = validation.seconds < run.final.seconds and run.final.step > UNTIMED_STEPS
        return in_time or validation.step <= run.final.step or planned != run.steps

    def resume(self, position: int, checkpoint: int, machine: bytes | None) -> None:
        """The steps since that checkpoint are run once more."""
        machine = machine.decode(errors="replace").strip() if machine else None
        if self.log.machine and machine not in (None, self.log.machine):
            self.log.moved_to = machine
        if self.run is None:
            self.start(position).missing = (1, checkpoint) if checkpoint else None
        self.forget(checkpoint)
        while self.times and next(reversed(self.times)) > checkpoint:
            self.times.popitem()
        self.run.last_step, self.run.ended = min(self.run.last_step, checkpoint), None
        self.resumed = self.replanned = True

    def forget(self, step: int) -> None:
        """The validations after this step."""
        while self.run.validations and self.run.final.step > step:
            self.known.discard(self.run.validations.pop().key)

    def start(self, position: int) -> Run:
        self.finish(position)
        self.run = Run(self.log.path, self.lines.at(position + 1), span=(position, position))
        self.times, self.known = {}, set()
        return self.run

    def finish(self, position: int) -> None:
        """Close the current trial."""
        run = self.run
        if run is None:
            return
        run.span = run.span[0], position
        if run.validations:
            run.missing = run.missing or missing_steps(self.times.keys() | {v.step for v in run.validations})
            self.runs.append(run)
            self.trained.append(bool(self.times))
        else:
            text = f"a trial that ends at step {run.last_step} without any validation is not counted"
            self.log.notes.append((run.line, text))


def same_time(a: float | None, b: float) -> bool:
    return a is not None and (a == b or (math.isnan(a) and math.isnan(b)))


def read_line(text: bytes, whole: bool) -> tuple[int, int | None, float | None, float]:
    """(step, planned steps, validation loss or None, seconds) of a line; ValueError says what is wrong with it."""
    line = text.decode(errors="replace")
    quoted = repr("step:" + line.rstrip("\r")[:80])
    head = HEAD.match(line)
    fields = dict(FIELD.findall(line[head.end() :])) if head else {}
    clock = CLOCK.fullmatch(fields.get("train_time", ""))
    if not whole and not clock:
        raise ValueError(f"ends in the middle of a line: {quoted}")
    if not head:
        raise ValueError(f"no step number in {quoted}")
    if GLUED.search(line, head.end()):
        raise ValueError(f"two lines in one: {quoted}")
    if "train_time" in fields and not clock:
        raise ValueError(f"train_time is neither in ms nor in s in {quoted}")
    if not fields.keys() & {"val_loss", "train_loss", "train_time"}:
        raise ValueError(f"neither loss nor train_time in {quoted}")
    seconds = seconds_of(*clock.groups()) if clock else math.nan
    planned = int(head[2] or 0) or None
    if "val_loss" not in fields:
        return int(head[1]), planned, None, seconds
    try:
        return int(head[1]), planned, float(fields["val_loss"]), seconds
    except ValueError:
        raise ValueError(f"val_loss is no number in {quoted}") from None


# ---- Is it all there? ------------------------------------------------------------------------------------------------


def is_complete(run: Run, closed: bool, last: bool, trained: bool) -> bool:
    """Was the run validated after its last step?

    A run may end before its planned steps on purpose. It is then the last of its file, and the file does not just
    break off: it reports the end; or it has most of the steps, so that a validation as the last of them is no
    accident. Or the validation is off the grid of the others: it was made because the run ended there.
    """
    if run.ended not in (None, "finished") or run.final.step < run.last_step:
        return False
    if run.steps is None:
        return closed or run.ended == "finished"
    if run.final.step >= run.steps:
        return True
    steps = [v.step for v in run.validations]
    jumps = list(map(sub, steps[1:], steps))
    off_grid = len(jumps) > 2 and len(set(jumps[:-1])) == 1 and jumps[-1] < jumps[0]
    no_accident = trained and 2 * run.final.step > run.steps
    return off_grid or (last and (closed or no_accident or run.ended == "finished"))


def missing_steps(steps: set[int]) -> tuple[int, int] | None:
    """The first gap in a log that tells every step."""
    steps = sorted(steps)
    jumps = list(map(sub, steps[1:], steps))
    if 2 * jumps.count(1) <= len(jumps):
        return None
    for i in range(3, len(jumps)):
        if jumps[i] > 1 and jumps[i - 3 : i] == [1, 1, 1] and jumps[i + 1 : i + 2] in ([], [1]):
            return steps[i] + 1, steps[i + 1] - 1
    return None


# ---- Training losses, which only curves and exports need -------------------------------------------------------------


def training_losses(run: Run) -> dict[int, tuple[float, float]]:
    """{step: (loss, seconds)}; a step that was run again after a resume counts as it was last."""
    lines = TRAINING.findall(read_bytes(run.path), *run.span)
    return {int(step): (float(loss), seconds_of(clock, unit)) for step, loss, clock, unit in lines}
