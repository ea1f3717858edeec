"""Scripts and what changed between two of them: line by line, word by word, section by section."""

import ast
import io
import re
import tokenize
from collections import Counter
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import NamedTuple

from records.logs import UserError, find, is_record, log_files, read_log

BOX = re.compile(r"^# ?-{10,}\n# *(\S[^\n]*)\n# ?-{10,}$", re.MULTILINE)
WORD = re.compile(r"\w+|\s+|.")
CONTEXT = 3  # unchanged lines around a change


class Line(NamedTuple):
    number: int  # in the script as it is, comments and all
    text: str


@dataclass
class Script:
    label: str
    source: bytes

    @cached_property
    def text(self):
        return self.source.decode(errors="surrogateescape")

    @cached_property
    def lines(self):
        """Split at line feeds only: splitlines() would also split at form feeds and the like."""
        texts = self.text.split("\n")
        if texts[-1] == "":
            texts.pop()
        return [Line(number, text) for number, text in enumerate(texts, 1)]

    def code_lines(self):
        """The lines without comments, docstrings and blank lines."""
        try:
            comments, inside_strings = scan(self.text)
            docstrings = docstring_lines(self.text)
        except (SyntaxError, tokenize.TokenError, ValueError) as error:
            raise UserError(f"{self.label}: not Python, so comments cannot be told from code: {error}") from None
        kept = []
        for number, text in self.lines:
            if number in comments:
                text = text[: comments[number]]
            if number not in inside_strings:
                text = text.rstrip()
            if number not in docstrings and (text or number in inside_strings):
                kept.append(Line(number, text))
        return kept

    def boxed_sections(self):
        """The section's title for each line, by the boxed headings; None if there are none."""
        boxes = [(self.text.count("\n", 0, box.start()) + 1, box[1]) for box in BOX.finditer(self.text)]
        if not boxes:
            return None
        titles, title = {}, "(top)"
        for number, _ in self.lines:
            if boxes and number == boxes[0][0]:
                title = boxes.pop(0)[1].partition(":")[0].strip()
            titles[number] = title
        return titles

    def named_sections(self):
        """The top-level class or function for each line; None if this is not Python."""
        try:
            tree = ast.parse(self.source)
        except (SyntaxError, ValueError):
            return None
        titles = dict.fromkeys((number for number, _ in self.lines), "(top level)")
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                kind = "class" if isinstance(node, ast.ClassDef) else "def"
                titles.update(dict.fromkeys(range(first, node.end_lineno + 1), f"{kind} {node.name}"))
        return titles


def scan(text):
    """({line: column of its comment}, {lines that begin inside a string}), 1-based."""
    comments, inside_strings, opened = {}, set(), []
    for token in tokenize.generate_tokens(io.StringIO(text, newline="\n").readline):
        (row, column), (last_row, _) = token.start, token.end
        kind = tokenize.tok_name[token.type]
        if kind == "COMMENT":
            comments[row] = column
        elif kind == "STRING":
            inside_strings.update(range(row + 1, last_row + 1))
        elif kind == "FSTRING_START":  # from Python 3.12 on an f-string comes in pieces
            opened.append(row)
        elif kind == "FSTRING_END":
            inside_strings.update(range(opened.pop() + 1, last_row + 1))
    return comments, inside_strings


def docstring_lines(text):
    """The lines that hold a docstring and nothing else."""
    found, lines = set(), text.encode().split(b"\n")  # ast counts columns in bytes
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
                before = lines[first.lineno - 1][: first.col_offset].strip()
                after = lines[first.end_lineno - 1][first.end_col_offset :].strip()
                if not before and (not after or after.startswith(b"#")):
                    found.update(range(first.lineno, first.end_lineno + 1))
    return found


def open_script(name, home):
    """The script that a user means by a record's name, a folder, a script or a log."""
    path = find(name, home)
    if path.is_dir():
        if not is_record(path):
            raise UserError(f"{name}: neither train_gpt.py nor a log in this folder")
        script = path / "train_gpt.py"
        path = script if script.is_file() else log_files(path)[0]
    return script_at(path)


def script_at(path):
    if path.suffix == ".py":
        try:
            return Script(str(path), path.read_bytes())
        except OSError as error:
            raise UserError(f"{path}: {error.strerror or error}") from None
    log = read_log(path)
    if log.source is None:
        reason = log.complaints[0][1] if log.complaints else "it has no line of = after a script"
        raise UserError(f"{path}: no source to be found in this log: {reason}")
    return Script(str(path), log.source)


def name_of(script):
    """A short name to speak of: the record's, or the file's where it is in no record."""
    path = Path(script.label)
    return path.parent.name if path.name == "train_gpt.py" and path.parent.name else path.name


# ----------------------------------------------------------------------------------------------------------------------
# What changed
# ----------------------------------------------------------------------------------------------------------------------


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

    def __init__(self, old, new, comments=True):
        self.old, self.new = old, new
        self.old_lines = old.lines if comments else old.code_lines()
        self.new_lines = new.lines if comments else new.code_lines()
        # Blank lines may follow a match but not make one: else they tear apart what was rewritten as a whole.
        # autojunk would treat frequent lines so as well, `return x` included.
        blank = lambda text: not text.strip()  # noqa: E731
        old_texts = [line.text + missing_end(old, line) for line in self.old_lines]
        new_texts = [line.text + missing_end(new, line) for line in self.new_lines]
        self.matcher = SequenceMatcher(blank, old_texts, new_texts, autojunk=False)
        self.old_sections, self.new_sections = sections(old, new)

    def hunks(self):
        for group in self.matcher.get_grouped_opcodes(CONTEXT):
            (_, i1, _, j1, _), (_, _, i2, _, j2) = group[0], group[-1]
            rows = [row for opcode in group for row in self.rows(*opcode)]
            changed = next(row for row in rows if row.sign != " ")
            section = self.section_of(changed)
            yield Hunk(start(self.old_lines, i1, i2), i2 - i1, start(self.new_lines, j1, j2), j2 - j1, section, rows)

    def rows(self, kind, i1, i2, j1, j2):
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

    def section_of(self, row):
        return self.new_sections[row.new.number] if row.new else self.old_sections[row.old.number]

    def stat(self):
        """{section: (lines added, lines removed)} of the sections that changed, in reading order."""
        added, removed = Counter(), Counter()
        for kind, i1, i2, j1, j2 in self.matcher.get_opcodes():
            if kind != "equal":
                removed.update(self.old_sections[line.number] for line in self.old_lines[i1:i2])
                added.update(self.new_sections[line.number] for line in self.new_lines[j1:j2])
        order = dict.fromkeys([*self.new_sections.values(), *self.old_sections.values()])
        return {title: (added[title], removed[title]) for title in order if added[title] or removed[title]}


def missing_end(script, line):
    """A mark for a script's last line if no line break ends it, which makes it another line than one that has it."""
    return "\n" if line.number == len(script.lines) and not script.text.endswith("\n") else ""


def start(lines, first, end):
    """Where a hunk starts, as diff(1) has it: an empty one is named by the line before it."""
    return lines[first].number if first < end else (lines[first - 1].number if first else 0)


def sections(old, new):
    """Section titles by line for both: boxed headings if both have them, else classes and functions, else one."""
    for way in (Script.boxed_sections, Script.named_sections):
        found = way(old), way(new)
        if None not in found:
            return found
    return tuple(dict.fromkeys((number for number, _ in script.lines), "(whole file)") for script in (old, new))


def compare_words(old, new):
    """Both lines in pieces, those that differ marked; unmarked where hardly anything is alike."""
    a, b = WORD.findall(old), WORD.findall(new)
    matcher = SequenceMatcher(None, a, b, autojunk=False)
    if matcher.ratio() < 0.5:
        return [(old, False)], [(new, False)]
    opcodes = matcher.get_opcodes()
    return (
        [("".join(a[i1:i2]), kind != "equal") for kind, i1, i2, _, _ in opcodes if i1 < i2],
        [("".join(b[j1:j2]), kind != "equal") for kind, _, _, j1, j2 in opcodes if j1 < j2],
    )


def unified(diff, paint):
    """The diff as text that patch(1) accepts when it is not coloured."""
    hunks = list(diff.hunks())
    if not hunks:
        return
    yield paint(f"--- {diff.old.label}", "bold")
    yield paint(f"+++ {diff.new.label}", "bold")
    for hunk in hunks:
        place = f"@@ -{hunk.old_start},{hunk.old_count} +{hunk.new_start},{hunk.new_count} @@"
        yield f"{paint(place, 'cyan')} {paint(hunk.section, 'bold')}"
        for row in hunk.rows:
            colour = {"-": "red", "+": "green", " ": "plain"}[row.sign]
            words = (paint(text, f"{colour} reverse" if changed else colour) for text, changed in row.pieces)
            yield paint(row.sign, colour) + "".join(words)
            if (row.old and missing_end(diff.old, row.old)) or (row.new and missing_end(diff.new, row.new)):
                yield "\\ No newline at end of file"


def stat_table(diff, paint, width=40):
    """Lines added and removed by section, with a bar for each, as `git diff --stat` has it for files."""
    stat = diff.stat()
    if not stat:
        return
    most = max(added + removed for added, removed in stat.values())
    scale = min(1, width / most)
    column = max(map(len, stat))
    for title, (added, removed) in stat.items():
        bar = paint("+" * ceil(added * scale), "green") + paint("-" * ceil(removed * scale), "red")
        yield f" {title:<{column}} | {added + removed:>{len(str(most))}} {bar}"
    plus, minus = (sum(counts) for counts in zip(*stat.values(), strict=True))
    sections_changed = f"{len(stat)} section{'' if len(stat) == 1 else 's'} changed"
    yield f" {sections_changed}, {plus} line{'' if plus == 1 else 's'} added, {minus} removed"
