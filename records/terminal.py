"""What the tool says: errors, colours, tables, and nothing that a terminal would obey."""

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TextIO

STYLES = {"bold": 1, "dim": 2, "reverse": 7, "red": 31, "green": 32, "yellow": 33, "cyan": 36}
LONGEST = 200  # characters of a name or a value; the rest is cut

Paint = Callable[[str, str], str]


class UserError(Exception):
    """Something that the user can fix: reported in one line, with exit code 2."""


def os_error(path: Path, error: OSError) -> UserError:
    return UserError(f"{shown(path)}: {error.strerror or error}")


def painter(choice: str, stream: TextIO) -> Paint:
    """paint(text, "bold red"), which leaves the text as it is unless this is a terminal that wants colours."""
    wanted = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    if choice == "never" or (choice == "auto" and not wanted):
        return lambda text, style: text

    def paint(text: str, style: str) -> str:
        codes = ";".join(str(STYLES[word]) for word in style.split() if word in STYLES)
        return f"\033[{codes}m{text}\033[0m" if codes and text else text

    return paint


def harmless(text: str) -> str:
    """Text without the control characters that a terminal would obey."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def brief(text: str, longest: int = LONGEST) -> str:
    return text if len(text) <= longest else text[: longest - 3] + "..."


def warn(text: str) -> None:
    print(harmless(brief(text, 2000)), file=sys.stderr)


def shown(path: Path | str) -> str:
    """A path as a reader wants it: seen from here, and without this machine's folders where it lies elsewhere."""
    path = os.path.abspath(path)
    relative = os.path.relpath(path)
    return brief(relative if not relative.startswith("..") else os.path.join(*path.split(os.sep)[-2:]))


def many(things: Iterable, name: str, plural: str = "") -> str:
    count = len(list(things))
    return f"{count} {name if count == 1 else plural or name + 's'}"


def print_table(rows: list[list[str]], paint: Paint) -> None:
    """Rows of cells, the first row the heading; the first and the last column to the left, the others to the right."""
    rows = [[harmless(brief(cell)) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    last = len(widths) - 1
    for number, row in enumerate(rows):
        cells = [
            f"{cell:<{width}}" if i in (0, last) else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print(paint("  ".join(cells).rstrip(), "plain" if number else "bold"))


def print_markdown(rows: list[list[str]]) -> None:
    """The same as a table for a pull request."""
    cells = [[harmless(brief(cell)).replace("\\", "\\\\").replace("|", "\\|") for cell in row] for row in rows]
    for number, row in enumerate(cells):
        print("| " + " | ".join(row) + " |")
        if number == 0:
            print("|" + "|".join("---" if i in (0, len(row) - 1) else "---:" for i in range(len(row))) + "|")


# ---- Files that the tool writes --------------------------------------------------------------------------------------


def write_new(path: Path, content: bytes, ours: Callable[[bytes], bool], write: bool = True) -> None:
    """Write a file, but never over somebody's work: what is there already must be `ours`. Else only look."""
    try:
        if path.exists() and not (path.is_file() and ours(path.read_bytes())):
            raise UserError(f"{path}: is there already and holds something else; take another name, or remove it")
        if write:
            path.write_bytes(content)
    except OSError as error:
        raise UserError(f"{brief(str(path))}: {error.strerror or error}") from None


def write_out(content: bytes) -> None:
    while content:  # with PYTHONUNBUFFERED a write may take only a part
        content = content[sys.stdout.buffer.write(content) :]
