"""Scripts: the files inside a log, their sections, and in what two of them differ."""

import ast
import io
import re
import tokenize
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from records.folders import SCRIPT, UUID, find, log_files
from records.logs import long_strings, read_log, same_source
from records.terminal import UserError, brief, os_error, shown

# A heading is a comment between two lines of dashes, or between dashes on one line.
BOX = re.compile(r"^# ?-{10,}\n# *(\S[^\n]*)\n# ?-{10,}$|^# -{4} (\S[^\n]*?) -{4,}$", re.MULTILINE)
# Public logs of 2026 hold two files: the second follows a line of dashes and its name in a comment.
DIVIDER = re.compile(rb"\n-{20,}\r?\n# ?([\w.-]{1,80}\.py)[ \r]{0,4}\n(?:-{20,}\r?\n)?(?:\r?\n)?")
NAMES_RUN = re.compile(r"\b(?:run_id|run_name|uuid)\b", re.IGNORECASE)
ID_VALUE = re.compile(r"'[^'\n]{0,200}'|\"[^\"\n]{0,200}\"|\d{6,40}")


class Line(NamedTuple):
    number: int  # in the script as it is, comments and all
    text: str


@dataclass
class Script:
    label: str
    source: bytes

    @cached_property
    def text(self) -> str:
        return self.source.decode(errors="surrogateescape")

    @cached_property
    def lines(self) -> list[Line]:
        """Split at line feeds only: splitlines() would also split at form feeds and the like."""
        texts = self.text.split("\n")
        if texts[-1] == "":
            texts.pop()
        return [Line(number, text) for number, text in enumerate(texts, 1)]

    def code_lines(self) -> list[Line]:
        """The lines without comments, docstrings and blank lines."""
        try:
            comments, inside_strings = scan(self.text)
            docstrings = docstring_lines(self.text)
        except (SyntaxError, tokenize.TokenError, ValueError, RecursionError, MemoryError) as error:
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

    def boxed_sections(self) -> dict[int, str] | None:
        """The section's title for each line, by the boxed headings; None if there are none."""
        titles, title, position, number = {}, "(top)", 0, 1
        for box in BOX.finditer(self.text):
            start = number + self.text.count("\n", position, box.start())
            titles.update(dict.fromkeys(range(number, start), title))
            title, position, number = brief((box[1] or box[2]).partition(":")[0].strip(), 80), box.start(), start
        if not titles and title == "(top)":
            return None
        titles.update(dict.fromkeys(range(number, len(self.lines) + 1), title))
        return titles

    def named_sections(self) -> dict[int, str] | None:
        """The top-level class or function for each line; None if this is not Python."""
        try:
            tree = ast.parse(self.source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
        titles = dict.fromkeys((number for number, _ in self.lines), "(top level)")
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                kind = "class" if isinstance(node, ast.ClassDef) else "def"
                titles.update(dict.fromkeys(range(first, node.end_lineno + 1), f"{kind} {node.name}"))
        return titles


def scan(text: str) -> tuple[dict[int, int], set[int]]:
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


def docstring_lines(text: str) -> set[int]:
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


# ---- Files -----------------------------------------------------------------------------------------------------------


@dataclass
class Program:
    """A script as a user names it: its main file, and the others that a log holds with it."""

    name: str  # short: the record's, or the file's where it is in no record
    path: Path
    source: bytes  # all of it
    files: dict[str, Script]  # the main one first

    @property
    def main(self) -> bytes:
        return next(iter(self.files.values())).source


def split_files(source: bytes) -> dict[str, bytes]:
    """{name: content} of the files in a log's source, the main one first."""
    dividers = list(DIVIDER.finditer(source))
    if not dividers:
        return {SCRIPT: source}
    quoted = list(long_strings(source, 0))
    dividers = [match for match in dividers if not any(a < match.start() < b for a, b in quoted)]
    names = [SCRIPT, *(match[1].decode() for match in dividers)]
    starts = [0, *(match.end() for match in dividers)]
    ends = [*(match.start() + 1 for match in dividers), len(source)]
    files = {}
    for name, start, end in zip(names, starts, ends, strict=True):
        content = source[start:end]
        if end < len(source):
            content = content.rstrip(b"\r\n") + b"\n"  # the blank lines before a divider are the log's
        files[name if name not in files else f"{len(files)}_{name}"] = content
    return files


def open_program(name: str, home: Path) -> Program:
    """The script that a user means by a record's name, a folder, a script or a log."""
    path = find(name, home)
    if path.is_dir():
        script, logs = path / SCRIPT, log_files(path)
        if not script.is_file() and not logs:
            raise UserError(f"{shown(path)}: neither {SCRIPT} nor a log in this folder")
        path = script if script.is_file() else logs[0]
    return program_at(path)


def program_at(path: Path) -> Program:
    if path.suffix == ".py":
        try:
            source = path.read_bytes()
        except OSError as error:
            raise os_error(path, error) from None
        in_record = path.name == SCRIPT and path.absolute().parent != Path.cwd()
        name = path.absolute().parent.name if in_record else path.name
        return Program(name, path, source, {path.name: Script(shown(path), source)})
    log = read_log(path)
    if log.source is None:
        reason = log.complaints[0][1] if log.complaints else "it has no line of = after a script"
        raise UserError(f"{shown(path)}: no source to be found in this log: {reason}")
    files = split_files(log.source)
    label = {file: shown(path) + (f":{file}" if len(files) > 1 else "") for file in files}
    return Program(path.name, path, log.source, {file: Script(label[file], files[file]) for file in files})


# ---- In what two sources differ --------------------------------------------------------------------------------------


def describe_difference(old_files: dict[str, bytes], new_files: dict[str, bytes]) -> tuple[bool, str] | None:
    """(is it the same program?, in what they differ) of two sources, file by file; None if they are equal."""
    if old_files.keys() != new_files.keys():
        return False, f"{' and '.join(new_files)} in place of {' and '.join(old_files)}"
    words = []
    for name in old_files:
        if not same_source(old_files[name], new_files[name]):
            same, told = describe_change(Script(name, old_files[name]), Script(name, new_files[name]))
            if not same:
                return False, told if len(old_files) == 1 else f"{name}, {told}"
            words.append(told)
    return (True, " and ".join(dict.fromkeys(words))) if words else None


def describe_change(old: Script, new: Script) -> tuple[bool, str]:
    old, new = (Script(s.label, s.source.replace(b"\r\n", b"\n")) for s in (old, new))
    masked_old, masked_new = mask_ids(old), mask_ids(new)
    if masked_old.text.rstrip("\n") == masked_new.text.rstrip("\n"):
        return True, "a run id"
    try:
        if [line.text for line in masked_old.code_lines()] == [line.text for line in masked_new.code_lines()]:
            return True, "comments"
    except UserError:
        pass  # not Python, so every line counts
    pairs = zip(old.lines, new.lines, strict=False)
    first = next((n for n, (a, b) in enumerate(pairs) if a.text != b.text), min(len(old.lines), len(new.lines)))
    texts = [repr(brief(s.lines[first].text.strip(), 60)) if first < len(s.lines) else "nothing" for s in (old, new)]
    lines = [Counter(line.text for line in s.lines) for s in (old, new)]
    count = max((lines[0] - lines[1]).total(), (lines[1] - lines[0]).total())
    return False, f"{count} line{'' if count == 1 else 's'}, from line {first + 1} on: {texts[0]} became {texts[1]}"


def mask_ids(script: Script) -> Script:
    """The script with every id of a run replaced by the same word."""
    lines = []
    for _, text in script.lines:
        if len(text) < 1000:
            text = UUID.sub("<id>", text)
            text = ID_VALUE.sub("<id>", text) if NAMES_RUN.search(text) else text
        lines.append(text)
    return Script(script.label, "\n".join(lines).encode(errors="surrogateescape"))
