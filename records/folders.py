"""Finding records: folders with logs, at any depth, and the names that users give them."""

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from records.logs import Log, read_log, same_source
from records.terminal import UserError, brief, os_error, shown, warn

LOG_SUFFIXES = {".txt", ".log", ".out", ".stdout"}
SCRIPT = "train_gpt.py"
RACE = "race.json"  # in a folder that `race` made
UUID = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}", re.IGNORECASE)


@dataclass
class Record:
    name: str
    folder: Path | None  # None for logs that a user names one by one
    script: Path | None
    logs: list[Log] = field(default_factory=list)

    @property
    def track(self) -> str:
        """The track that a folder above the logs is named after, if there is one: track_2_medium."""
        paths = [self.folder] if self.folder else [log.path.parent for log in self.logs[:1]]
        parts = [part for path in paths for part in Path(os.path.abspath(path)).parts]
        return next((part for part in reversed(parts) if part.lower().startswith("track_")), "")

    @property
    def script_source(self) -> bytes | None:
        if self.script is None:
            return None
        try:
            return self.script.read_bytes()
        except OSError as error:
            raise os_error(self.script, error) from None


# ---- Folders ---------------------------------------------------------------------------------------------------------


def entries_in(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        warn(f"{shown(folder)}: {error.strerror or error}")
        return []


def log_files(folder: Path) -> list[Path]:
    return [path for path in entries_in(folder) if path.suffix in LOG_SUFFIXES and path.is_file()]


def folders_below(top: Path) -> Iterator[Path]:
    """A folder and all below it, each once; hidden ones, caches and virtual environments left out."""
    waiting, seen = [top], set()
    while waiting:
        folder = waiting.pop()
        try:
            about = folder.stat()
            inside = [path for path in sorted(folder.iterdir(), reverse=True) if path.is_dir()]
        except OSError as error:
            warn(f"{shown(folder)}: {error.strerror or error}")
            continue
        if (about.st_dev, about.st_ino) in seen or (folder / "pyvenv.cfg").exists():
            continue
        seen.add((about.st_dev, about.st_ino))
        yield folder
        waiting += [path for path in inside if path.name[0] != "." and path.name != "__pycache__"]


def record_folders(top: Path) -> list[Path]:
    """The folders with logs or a script, in the order of their paths, so oldest first where names start with dates.

    A folder with a script and no logs counts only if no folder below it has some.
    """
    if not top.is_dir():
        return []
    found = [(folder, bool(log_files(folder))) for folder in folders_below(top)]
    with_logs = [folder for folder, has_logs in found if has_logs]
    above = {parent for folder in with_logs for parent in folder.parents}
    return [folder for folder, has_logs in found if has_logs or ((folder / SCRIPT).is_file() and folder not in above)]


def read_records(top: Path, named_from: Path) -> list[Record]:
    """All records at or below a folder, named by their paths."""
    records = []
    for folder in record_folders(top):
        name = os.path.relpath(os.path.abspath(folder), os.path.abspath(named_from))
        records += read_race(folder, name) if (folder / RACE).is_file() else [read_record(folder, name)]
    return records


def read_record(folder: Path, name: str) -> Record:
    record = Record(name, folder, None, read_logs(log_files(folder)))
    above = folder.parent / SCRIPT
    if (folder / SCRIPT).is_file():
        record.script = folder / SCRIPT
    elif record.logs and record.logs[0].source and above.is_file():
        # Of several folders of logs below a script, it may be the script of one.
        record.script = above
        siblings = [other for other in entries_in(folder.parent) if other.is_dir() and log_files(other)]
        if len(siblings) > 1 and not same_source(record.logs[0].source, record.script_source):
            record.script = None
    return record


def read_race(folder: Path, name: str) -> list[Record]:
    """A race is two records; what else lies in its folder is not a log."""
    try:
        plan = json.loads((folder / RACE).read_bytes())
        sides = {side: brief(str(plan[side]["name"])) for side in "AB"}
    except (OSError, ValueError, TypeError, KeyError):
        warn(f"{shown(folder / RACE)}: cannot be read, so its runs are not told apart")
        return [read_record(folder, name)]
    files = [path for path in log_files(folder) if path.name.startswith("pair")]
    return [
        Record(f"{name}/{side} {sides[side]}", folder, None, read_logs(p for p in files if p.stem.endswith(side)))
        for side in "AB"
    ]


def read_logs(paths: Iterable[Path]) -> list[Log]:
    """The logs of a folder; one that cannot be read does not hide the others."""
    logs = []
    for path in paths:
        try:
            logs.append(read_log(path))
        except UserError as error:
            logs.append(Log(path, complaints=[(1, str(error).partition(": ")[2])]))
    return logs


# ---- Names -----------------------------------------------------------------------------------------------------------


def find(name: str, home: Path) -> Path:
    """The path that a user means: a folder or file, or a record of `home` by its name or an unambiguous part of it."""
    try:
        if Path(name).exists():
            return Path(name)
    except (OSError, ValueError):
        raise UserError(f"{brief(name)}: no such file, folder or record") from None
    folders = record_folders(home)
    # A folder that holds records goes by its name too.
    known = dict.fromkeys(f for folder in folders for f in [folder, *folder.parents] if home in f.parents)
    names = {folder: folder.relative_to(home).as_posix() for folder in known}
    wanted = name.lower()
    for matches in (
        [folder for folder in known if names[folder] == name],
        [folder for folder in known if names[folder].partition("_")[2].lower() == wanted],
        [folder for folder in known if wanted in names[folder].lower()],
    ):
        matches = [folder for folder in matches if not any(parent in matches for parent in folder.parents)]
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise UserError(f"{name}: could be {brief(' or '.join(names[folder] for folder in matches), 500)}")
    listed = brief(", ".join(names[folder] for folder in folders), 500)
    known = f"the records are {listed}" if folders else "there are no records yet"
    raise UserError(f"{brief(name)}: no such file, folder or record; {known}")


def open_records(names: Iterable[str | Path], home: Path) -> list[Record]:
    """The records that a user names: each folder is a record or holds some; each log stands for itself."""
    records, names = [], list(names)
    for name in names:
        path = find(str(name), home)
        if path.is_dir():
            found = read_records(path, where_names_start(path, home, several=len(names) > 1))
            if not found:
                raise UserError(f"{shown(path)}: no record and no log in this folder")
            records += found
        else:
            log = read_log(path)
            records.append(Record(name_of_log(log), None, None, [log]))
    return records


def where_names_start(path: Path, home: Path, several: bool) -> Path:
    """The folder that the names of the records in a folder are relative to: short, but a record keeps its own name."""
    path, home = Path(os.path.abspath(path)), Path(os.path.abspath(home))
    if home in path.parents:
        return home
    return path.parent if several or path.name[:1].isdigit() or log_files(path) else path


def all_records(home: Path) -> list[Record]:
    return read_records(home, home)


def name_of_log(log: Log) -> str:
    """What a reader calls a log: its name, or its folder and seed where the name is only an id."""
    path = Path(os.path.abspath(log.path))
    if not UUID.fullmatch(path.stem):
        return path.stem
    return f"{path.parent.name}/{path.stem[:8]}" + (f" seed {log.seed}" if log.seed is not None else "")
