"""What changed between two scripts: line by line, word by word, section by section."""

import re
from collections import Counter
from collections.abc import Iterator
from difflib import SequenceMatcher
from math import ceil
from typing import NamedTuple

from records.scripts import Line, Program, Script
from records.terminal import Paint, harmless

WORD = re.compile(r"\w+|\s+|.")
CONTEXT = 3  # unchanged lines around a change
LONG_LINE = 500  # characters; words are not compared beyond
MATCHES = 5_000_000  # pairs of equal lines that are looked at; in larger scripts frequent lines make no match
LARGE = 10_000  # lines; larger scripts are compared at their ends only


class Row(NamedTuple):
    """One line of a diff. The pieces are (text, changed): the words that differ from the line's counterpart."""

    sign: str  # " ", "-" or "+"
    old: Line | None
    new: Line | None
    pieces: list[tuple[str, bool]]


class Hunk(NamedTuple):
    old_start: int
    old_count: int
    new_start: int
    new_count: int
    section: str
    rows: list[Row]


class Diff:
    """All changes from one script to another."""

    def __init__(self, old: Script, new: Script, comments: bool = True):
        self.old, self.new = old, new
        self.old_lines = old.lines if comments else old.code_lines()
        self.new_lines = new.lines if comments else new.code_lines()
        old_texts = [line.text + missing_end(old, line) for line in self.old_lines]
        new_texts = [line.text + missing_end(new, line) for line in self.new_lines]
        self.matcher = match_lines(old_texts, new_texts)
        self.old_sections, self.new_sections = sections(old, new)

    def hunks(self) -> Iterator[Hunk]:
        for group in self.matcher.get_grouped_opcodes(CONTEXT):
            (_, i1, _, j1, _), (_, _, i2, _, j2) = group[0], group[-1]
            rows = [row for opcode in group for row in self.rows(*opcode)]
            changed = next(row for row in rows if row.sign != " ")
            section = self.section_of(changed)
            yield Hunk(start(self.old_lines, i1, i2), i2 - i1, start(self.new_lines, j1, j2), j2 - j1, section, rows)

    def rows(self, kind: str, i1: int, i2: int, j1: int, j2: int) -> list[Row]:
        old, new = self.old_lines[i1:i2], self.new_lines[j1:j2]
        if kind == "equal":
            return [Row(" ", a, b, [(b.text, False)]) for a, b in zip(old, new, strict=True)]
        old_pieces = [[(line.text, False)] for line in old]
        new_pieces = [[(line.text, False)] for line in new]
        if len(old) == len(new):  # line for line, so the words that changed can be pointed out
            pairs = [compare_words(a.text, b.text) for a, b in zip(old, new, strict=True)]
            old_pieces, new_pieces = [a for a, _ in pairs], [b for _, b in pairs]
        removed = [Row("-", line, None, pieces) for line, pieces in zip(old, old_pieces, strict=True)]
        added = [Row("+", None, line, pieces) for line, pieces in zip(new, new_pieces, strict=True)]
        return removed + added

    def section_of(self, row: Row) -> str:
        return self.new_sections[row.new.number] if row.new else self.old_sections[row.old.number]

    def stat(self) -> dict[str, tuple[int, int]]:
        """{section: (lines added, lines removed)} of the sections that changed, in reading order."""
        added, removed = Counter(), Counter()
        for kind, i1, i2, j1, j2 in self.matcher.get_opcodes():
            if kind != "equal":
                removed.update(self.old_sections[line.number] for line in self.old_lines[i1:i2])
                added.update(self.new_sections[line.number] for line in self.new_lines[j1:j2])
        order = dict.fromkeys([*self.new_sections.values(), *self.old_sections.values()])
        return {title: (added[title], removed[title]) for title in order if added[title] or removed[title]}


def match_lines(old: list[str], new: list[str]) -> SequenceMatcher:
    """Which lines are the same, in a time that no script can blow up."""
    if max(len(old), len(new)) > LARGE:
        return SequenceMatcher(None, *match_ends(old, new), autojunk=False)
    counts = Counter(new)
    matches = Counter({text: count * counts[text] for text, count in Counter(old).items()})
    frequent = set()
    while matches.total() > MATCHES:
        text, _ = matches.most_common(1)[0]
        frequent.add(text)
        del matches[text]
    # Blank lines may follow a match but not make one: else they tear apart what was rewritten as a whole.
    # autojunk would treat frequent lines so as well, `return x` included.
    return SequenceMatcher(lambda text: not text.strip() or text in frequent, old, new, autojunk=False)


def match_ends(old: list[str], new: list[str]) -> tuple[list, list]:
    """Names for the lines of two large scripts: equal for those that both start and end with, and nowhere else."""
    shorter = min(len(old), len(new))
    head = next((i for i in range(shorter) if old[i] != new[i]), shorter)
    tail = next((i for i in range(shorter - head) if old[-1 - i] != new[-1 - i]), shorter - head)

    def names(lines: list[str], middle: str) -> list:
        between = [(middle, i) for i in range(len(lines) - head - tail)]
        return [*(("head", i) for i in range(head)), *between, *(("tail", i) for i in range(tail))]

    return names(old, "old"), names(new, "new")


def missing_end(script: Script, line: Line) -> str:
    """A mark for a script's last line if no line break ends it, which makes it another line than one that has it."""
    return "\n" if line.number == len(script.lines) and not script.text.endswith("\n") else ""


def start(lines: list[Line], first: int, end: int) -> int:
    """Where a hunk starts, as diff(1) has it: an empty one is named by the line before it."""
    return lines[first].number if first < end else (lines[first - 1].number if first else 0)


def sections(old: Script, new: Script) -> tuple[dict[int, str], dict[int, str]]:
    """Section titles by line for both: boxed headings if both have them, else classes and functions, else one."""
    for way in (Script.boxed_sections, Script.named_sections):
        found = way(old), way(new)
        if None not in found:
            return found
    return tuple(dict.fromkeys((number for number, _ in script.lines), "(whole file)") for script in (old, new))


def compare_words(old: str, new: str) -> tuple[list[tuple[str, bool]], list[tuple[str, bool]]]:
    """Both lines in pieces, those that differ marked; unmarked where hardly anything is alike."""
    if max(len(old), len(new)) > LONG_LINE:
        return [(old, False)], [(new, False)]
    a, b = WORD.findall(old), WORD.findall(new)
    matcher = SequenceMatcher(None, a, b, autojunk=False)
    if matcher.ratio() < 0.5:
        return [(old, False)], [(new, False)]
    opcodes = matcher.get_opcodes()
    return (
        [("".join(a[i1:i2]), kind != "equal") for kind, i1, i2, _, _ in opcodes if i1 < i2],
        [("".join(b[j1:j2]), kind != "equal") for kind, _, _, j1, j2 in opcodes if j1 < j2],
    )


# ---- Diffs as text ---------------------------------------------------------------------------------------------------


def diff_programs(old: Program, new: Program, comments: bool = True) -> Iterator[Diff]:
    """A diff for each file: the main ones with each other, the others by their names."""
    old_files, new_files = list(old.files.items()), list(new.files.items())
    yield Diff(old_files[0][1], new_files[0][1], comments)
    others, new_others = dict(old_files[1:]), dict(new_files[1:])
    for name in dict.fromkeys([*others, *new_others]):
        nothing = Script("/dev/null", b"")
        yield Diff(others.get(name, nothing), new_others.get(name, nothing), comments)


def unified(diff: Diff, paint: Paint) -> Iterator[str]:
    """The diff as text that patch(1) accepts when it is not coloured."""
    hunks = list(diff.hunks())
    if not hunks:
        return
    yield paint(f"--- {harmless(diff.old.label)}", "bold")
    yield paint(f"+++ {harmless(diff.new.label)}", "bold")
    for hunk in hunks:
        place = f"@@ -{hunk.old_start},{hunk.old_count} +{hunk.new_start},{hunk.new_count} @@"
        yield f"{paint(place, 'cyan')} {paint(harmless(hunk.section), 'bold')}"
        for row in hunk.rows:
            colour = {"-": "red", "+": "green", " ": "plain"}[row.sign]
            words = (paint(text, f"{colour} reverse" if changed else colour) for text, changed in row.pieces)
            yield paint(row.sign, colour) + "".join(words)
            if (row.old and missing_end(diff.old, row.old)) or (row.new and missing_end(diff.new, row.new)):
                yield "\\ No newline at end of file"


def stat_table(diff: Diff, paint: Paint, width: int = 40) -> Iterator[str]:
    """Lines added and removed by section, with a bar for each, as `git diff --stat` has it for files."""
    stat = diff.stat()
    if not stat:
        return
    most = max(added + removed for added, removed in stat.values())
    scale = min(1, width / most)
    column = max(map(len, stat))
    for title, (added, removed) in stat.items():
        bar = paint("+" * ceil(added * scale), "green") + paint("-" * ceil(removed * scale), "red")
        yield f" {harmless(title):<{column}} | {added + removed:>{len(str(most))}} {bar}"
    plus, minus = (sum(counts) for counts in zip(*stat.values(), strict=True))
    sections_changed = f"{len(stat)} section{'' if len(stat) == 1 else 's'} changed"
    yield f" {sections_changed}, {plus} line{'' if plus == 1 else 's'} added, {minus} removed"
