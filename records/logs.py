"""Logs, read back: what ran, on what, and how well.

A log is the script's source, a line of `=`, a header, a line of `=`, and the steps. Public logs of this field vary:
the source may stand between the first two lines of `=`, times may be in seconds, one file may hold several trials.
All are read here, and only lines that start with `step:` after the source count: a script may well print, or quote,
such lines itself. A line that cannot be read is remembered with its number, and the rest is still read.

Whatever a file holds, reading it takes time and memory in proportion to its size.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from records.terminal import os_error

# A line break is put in front of every file, so that its first line has one before it as all others do. The number of
# the line at a position is then the count of line breaks up to there.
RULE = b"\n" + b"=" * 100
OTHER_RULE = re.compile(rb"\n={80,}(?=\r?(?:\n|\Z))")  # only where no line has the usual 100
PYTHON = re.compile(rb"^(?:import \w|from [\w.]+ import |def \w+\(|class \w)", re.MULTILINE)
OPENING = re.compile(rb"#[^\n]*|\"\"\"|'''|\"|'")  # a comment, or the start of a string


class Validation(NamedTuple):
    step: int
    loss: float
    seconds: float  # on the training clock; nan where the log does not say

    @property
    def key(self) -> tuple:
        """What two logs of one run agree in, even if one of them tells more digits."""
        seconds = self.seconds if abs(self.seconds) < 1e12 else 0.0
        return self.step, f"{self.loss:.4f}", round(1000 * seconds)


@dataclass(eq=False)
class Run:
    """One training: its validations, and how many steps it was to have."""

    path: Path
    line: int = 0  # of its first validation
    validations: list[Validation] = field(default_factory=list)
    steps: int | None = None  # planned; None where the log does not say
    last_step: int = 0  # the last one in the log
    complete: bool = False  # validated after its last step, with no step missing
    missing: tuple[int, int] | None = None  # the first steps that the log should tell of and does not
    ended: str | None = None  # how it ended, in its own words
    span: tuple[int, int] = (0, 0)  # where it stands in the file

    @property
    def final(self) -> Validation:
        return self.validations[-1]

    def reached(self, target: float) -> Validation | None:
        """The first validation at or below the target. Nothing is interpolated between validations."""
        return next((v for v in self.validations if v.loss <= target), None)


@dataclass(eq=False)
class Log:
    """One log file. What a log does not say is None."""

    path: Path
    source: bytes | None = None
    runs: list[Run] = field(default_factory=list)
    complaints: list[tuple[int, str]] = field(default_factory=list)  # line number, what is wrong there
    notes: list[tuple[int, str]] = field(default_factory=list)  # the same of what is odd, but not wrong
    is_log: bool = True  # False for some other text that lies among the logs
    settings: dict | None = None
    changes: list[str] = field(default_factory=list)  # what resumed runs changed, as "val_tokens 2048 -> 256"
    target: float | None = None
    seed: str | None = None
    data: str | None = None  # the data's fingerprint, short
    data_files: list[str] = field(default_factory=list)
    hardware: str | None = None
    machine: str | None = None  # the same in the words of a line about a resume
    moved_to: str | None = None  # another machine, on which it was resumed


def read_log(path: Path | str) -> Log:
    """Read one log. Never fails on what is in the file; raises UserError if there is no file to read."""
    from records.header import read_header
    from records.steps import read_steps

    log = Log(Path(path))
    data = read_bytes(log.path)
    start, end, body = find_source(data)
    if body is None:
        log.complaints.append((last_line(data), "ends within the source: no line of = follows it"))
        return log
    log.source = data[start:end] or None
    log.is_log = log.source is not None or b"\nstep:" in data or not data.strip()
    read_header(log, data, start, body)
    read_steps(log, data, body)
    return log


def read_bytes(path: Path) -> bytes:
    """A file with a line break in front."""
    try:
        return b"\n" + path.read_bytes()
    except OSError as error:
        raise os_error(path, error) from None


def find_python(data: bytes, start: int, end: int) -> int:
    """Where the first line of Python code in this part begins, or -1. Most parts hold none, which is quick to say."""
    if not any(
        data.find(word, max(0, start - 1), end) >= 0 for word in (b"\nimport ", b"\nfrom ", b"\ndef ", b"\nclass ")
    ):
        return -1
    match = PYTHON.search(data, start, end)
    return match.start() if match else -1


def same_source(a: bytes, b: bytes) -> bool:
    """Equal up to what a log's writer may add: line breaks at the end, and a carriage return on each line."""
    return a == b or a.replace(b"\r\n", b"\n").rstrip(b"\n") == b.replace(b"\r\n", b"\n").rstrip(b"\n")


def find_copies(runs: list[Run]) -> dict[int, Run]:
    """{place in the list: the run that it repeats}. A log with a summary behind, or a file saved twice, is one run.

    Two runs are the same if all the (step, loss, time) of one are among the other's. Their time decides: a validation
    before the first step is alike in all runs.
    """
    kept, copies = {}, {}
    for place in sorted(range(len(runs)), key=lambda place: (-len(runs[place].validations), place)):
        keys = {validation.key for validation in runs[place].validations}
        timed = {key for key in keys if key[2] > 0}
        other = kept.get(max(timed)) if timed else None
        if other and keys <= other[1]:
            copies[place] = other[0]
        else:
            kept.update((key, (runs[place], keys)) for key in timed if key not in kept)
    return copies


class Lines:
    """The number of the line at a position; cheap as long as positions grow."""

    def __init__(self, data: bytes):
        self.data, self.position, self.number = data, 0, 0

    def at(self, position: int) -> int:
        if position < self.position:
            self.position, self.number = 0, 0
        self.number += self.data.count(b"\n", self.position, position)
        self.position = position
        return self.number


def last_line(data: bytes) -> int:
    return max(1, data.count(b"\n") - data.endswith(b"\n"))


# ---- The source ------------------------------------------------------------------------------------------------------


def find_source(data: bytes) -> tuple[int, int, int | None]:
    """(start, end, body): the source is data[start:end], the header and steps follow from body on.

    Without any line of `=` this is either a console's output, which is all body, or a script cut short: body None.
    A line break that the writer put behind the source stays: nothing tells it from the script's own.
    """
    first = end_of_source(data, 1)
    if first is None:
        return 0, 0, None if find_python(data, 0, len(data)) >= 0 else 0
    if first == next(rules(data, 0)) and find_python(data, 0, first[0]) < 0:
        between = data.find(b"\n", first[1]) + 1
        second = end_of_source(data, between) if between else None
        if second and (not data[: first[0]].strip() or find_python(data, between, second[0]) >= 0):
            return between, second[0] + 1, second[1]
    return 1, first[0] + 1, first[1]


def rules(data: bytes, start: int) -> Iterator[tuple[int, int]]:
    """Where the lines of `=` start (at the line break before them) and end."""
    if RULE not in data:
        yield from (match.span() for match in OTHER_RULE.finditer(data, start))
        return
    at = data.find(RULE, start)
    while at >= 0:
        end = at + len(RULE)
        if data[end : end + 1] in (b"", b"\n") or data[end : end + 2] == b"\r\n":
            yield at, end
        at = data.find(RULE, end)


def end_of_source(data: bytes, start: int) -> tuple[int, int] | None:
    """The line of `=` that ends the source: the first one, unless it stands in a string of the source itself."""
    found = rules(data, max(0, start - 1))
    first = next(found, None)
    if first is None or find_python(data, first[1], len(data)) < 0:
        return first  # no code follows, so there is no doubt
    strings = long_strings(data, start)
    opened, closed = next(strings, (len(data), len(data)))
    rule = first
    while rule:
        while closed <= rule[0]:
            opened, closed = next(strings, (len(data), len(data)))
        if opened > rule[0]:
            return rule
        rule = next(found, None)
    return first


def long_strings(data: bytes, start: int) -> Iterator[tuple[int, int]]:
    """Where the strings in triple quotes start and end, in Python that need not be whole."""
    position = start
    while match := OPENING.search(data, position):
        position = match.end()
        quote = match[0]
        if quote in (b'"', b"'"):
            position = end_of_string(data, position, quote)
        elif not quote.startswith(b"#"):
            end = data.find(quote, position)
            while end >= 0 and is_escaped(data, end):
                end = data.find(quote, end + 1)
            position = end + 3 if end >= 0 else len(data)
            yield match.start(), position


def end_of_string(data: bytes, position: int, quote: bytes) -> int:
    stop = STOPS[quote]
    while match := stop.search(data, position):
        position = match.end()
        if match[0][:1] != b"\\":
            return position
    return len(data)


STOPS = {quote: re.compile(rb"\\.|\n|" + quote, re.DOTALL) for quote in (b'"', b"'")}


def is_escaped(data: bytes, position: int) -> bool:
    start = position
    while start and data[start - 1 : start] == b"\\":
        start -= 1
    return (position - start) % 2 == 1
