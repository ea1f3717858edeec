"""The end of a run: its result beside the target and the newest record, a page with both curves, what to try next."""

import os
import shlex
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from records.evidence import Entry, entries_of, tracks
from records.figures import mean
from records.folders import Record, log_files, name_of_log, read_record, record_folders
from records.logs import Log, read_log, same_source
from records.page import write_page
from records.terminal import many

HOME = Path(__file__).resolve().parent


def after_run(path: Path, command: list[str], sample: list[str]) -> Iterator[str]:
    """What to print after a run, from its log, its command, and sample.py's arguments if there is a checkpoint.

    Last comes logs/<id>.html. The record is the first in it, so that its diff leads from the record to the run.
    """
    log = read_log(path)
    final, newest = log.runs[-1].final, newest_record(log)
    result = f"validation loss {final.loss:.4f} after {final.seconds:.1f} s of training"
    if log.target:
        side = "above" if final.loss > log.target else "below"
        result += f", {abs(final.loss - log.target):.4f} {side} the target {log.target:g}"
    yield f"result   {result}"
    if newest:
        yield f"record   {describe(newest, log)}"
    tries = list(next_tries(log, newest, command, sample))
    width = max(len(what) for what, _ in tries)
    for number, (what, how) in enumerate(tries):
        yield f"{'' if number else 'next':<9}{what:<{width}}   {how}"
    records = [*([newest.record] if newest else []), Record(name_of_log(log), None, None, [log])]
    title = f"Run {path.stem[:8]}, seed {log.seed}" + (f", beside {newest.name}" if newest else "")
    write_page(path.with_suffix(".html"), records, list(tracks(records, None).values()), HOME, title)
    yield f"page     {path.with_suffix('.html')}"


def newest_record(log: Log) -> Entry | None:
    """The newest record that has logs, if they have this run's data and target; in its dtype, or else another."""
    folders = [folder for folder in record_folders(HOME) if log_files(folder)]
    entries = entries_of(read_record(folders[-1], folders[-1].name)) if folders else []
    alike = [entry for entry in entries if entry.complete and (entry.data, entry.target) == (log.data, log.target)]
    dtype = (log.settings or {}).get("dtype")
    return min(alike, key=lambda entry: entry.dtype != dtype, default=None)


def describe(entry: Entry, log: Log) -> str:
    place = "the same hardware" if entry.hardware == log.hardware else entry.hardware or "unknown hardware"
    figures = f"validation loss {mean(entry.losses):.4f} after {mean(entry.times):.1f} s of training"
    return f"{figures}: {entry.name}, {many(entry.complete, 'run')} in {entry.dtype} on {place}"


def next_tries(log: Log, newest: Entry | None, command: list[str], sample: list[str]) -> Iterator[tuple[str, str]]:
    """(what to try, the command for it)."""
    inside = sys.executable.startswith(f"{os.getcwd()}{os.sep}")
    python = os.path.relpath(sys.executable) if inside else sys.executable
    if not any(word.startswith("--resume") for word in command):
        yield "another seed", shlex.join([*without("--seed", command), "--seed", str(int(log.seed) + 1)])
    if newest:
        both = [newest.name.partition("_")[2] or newest.name, str(log.path)]
        if log.runs[-1].final.step == newest.complete[-1].final.step:
            yield "against the record", shlex.join([python, "-m", "records", "compare", *both])
        if not same_source(log.source, newest.record.script_source or b""):
            yield "what differs from it", shlex.join([python, "-m", "records", "diff", *both])
    if sample:
        prompt = "def forward(" if newest else "The "  # the CPU track's text is code
        yield "text from a prompt", shlex.join([python, "sample.py", *sample, "--prompt", prompt])
    yield "a record of your own", "see CONTRIBUTING.md"


def without(flag: str, words: list[str]) -> list[str]:
    """A command line without a flag and its value."""
    return [word for before, word in pairwise(["", *words]) if flag not in (before, word.partition("=")[0])]
