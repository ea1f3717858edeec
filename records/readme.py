"""The parts of the READMEs that follow from logs and kept counts: tables between two markers, and the picture.

    <!-- records: python -m records readme -->
    | record | ...
    <!-- end of records -->

`python -m records readme` writes them all again; with --check it only says which are out of date.
"""

import argparse
import re
from pathlib import Path

from records.curves import SCHEMES, draw
from records.evidence import Entry, tracks
from records.figures import mean, with_spread
from records.folders import Record, all_records
from records.terminal import UserError, many, shown

MEASURED_LATER = "not measured yet"


def readme(args: argparse.Namespace) -> int:
    """Write what is out of date, or with --check only name it: exit code 1 if there is something."""
    contents = written(args.records)
    old = [path for path, content in contents.items() if not path.is_file() or path.read_text() != content]
    for path in old:
        if not args.check:
            path.write_text(contents[path])
        print(f"{shown(path)}: {'out of date' if args.check else 'written'}")
    if not old:
        print(f"{many(contents, 'file')} up to date")
    return 1 if old and args.check else 0


def written(home: Path) -> dict[Path, str]:
    """Every file with a part of its own here, and what it should hold."""
    records = [record for record in all_records(home) if record.script]
    entries = {entry.name: entry for entry in cpu_track(records)}
    if not entries:
        raise UserError(f"{shown(home)}: no record has logs of the CPU track")
    contents = {home / f"curves-{scheme}.svg": draw([*entries.values()], scheme) for scheme in SCHEMES}
    front, all_of_them = home.parent / "README.md", home / "README.md"
    contents[front] = with_block(front, "records", front_table(records, entries))
    contents[all_of_them] = with_block(all_of_them, "records", table_of_all(records, entries))
    for record in records:
        path = record.folder / "README.md"
        contents[path] = with_block(path, "runs", table_of_runs(entries.get(record.name)))
    return contents


def cpu_track(records: list[Record]) -> list[Entry]:
    """The records on the embedded corpus, in the dtype in which most of them were measured."""
    found = [
        [entry for entry in entries if entry.complete]
        for entries in tracks(records, None).values()
        if entries[0].target and any(name.startswith("embedded") for name in entries[0].logs[0].data_files)
    ]
    return max(found, key=len, default=[])


def with_block(path: Path, name: str, rows: list[list[str]]) -> str:
    """The file's text with these rows between the markers of that name."""
    start, end = f"<!-- {name}: python -m records readme -->\n", f"<!-- end of {name} -->"
    text = path.read_text()
    if text.count(start) != 1 or end not in text.partition(start)[2]:
        raise UserError(f"{shown(path)}: needs the lines {start.strip()} and {end} once, around its table")
    before, _, rest = text.partition(start)
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    content = "\n".join(lines) if rows[1:] else "Not measured yet."
    return f"{before}{start}{content}\n{end}{rest.partition(end)[2]}"


# ---- The tables ------------------------------------------------------------------------------------------------------


def front_table(records: list[Record], entries: dict[str, Entry]) -> list[list[str]]:
    """The table of the repository's README: measured, published and predicted, each labelled."""
    rows = [["record", "measured: time on 2 CPU cores", "measured: loss", "published: 8xH100", "predicted: 8xH100"]]
    for record in reversed(records):
        name, entry = record.name, entries.get(record.name)
        measured = [with_spread(entry.times, 1, " s"), with_spread(entry.losses, 4)] if entry else [MEASURED_LATER, ""]
        minutes = published_minutes(record)
        published = f"{minutes} min" if minutes else "none"
        rows.append([f"[{name}](records/{name})", *measured, published, predicted(record, minutes)])
    return rows


def table_of_all(records: list[Record], entries: dict[str, Entry]) -> list[list[str]]:
    """The table of records/README.md: how each record was measured, against the first that was."""
    rows = [["record", "runs", "steps", "loss", "time", "speed against the first", "published: 8xH100"]]
    first = next(iter(entries.values()))
    for record in records:
        cells = [MEASURED_LATER, "", "", "", ""]
        if entry := entries.get(record.name):
            steps, speed = entry.complete[0].final.step, mean(first.times) / mean(entry.times)
            cells = [f"{len(entry.complete)}", f"{steps:,}", with_spread(entry.losses, 4)]
            cells += [with_spread(entry.times, 1, " s"), f"{speed:.1f} times"]
        minutes = published_minutes(record)
        rows.append([f"[{record.name}]({record.name})", *cells, f"{minutes} min" if minutes else "none"])
    return rows


def table_of_runs(entry: Entry | None) -> list[list[str]]:
    """The table of a record's own README: one row per run, by seed."""
    rows = [["seed", "steps", "final loss", "training time", "log"]]
    for log in sorted(entry.logs if entry else [], key=lambda log: int(log.seed)):
        final = log.runs[0].final
        link = f"[{log.path.stem[:8]}]({log.path.name})"
        rows.append([log.seed, f"{final.step:,}", f"{final.loss:.4f}", f"{final.seconds:.1f} s", link])
    return rows


# ---- Published and predicted -----------------------------------------------------------------------------------------


def published_minutes(record: Record) -> str:
    """As the script's docstring states them."""
    found = re.search(rb"Published: ([\d.]+) minutes on 8 H100s", record.script_source)
    return found[1].decode() if found else ""


def predicted(record: Record, published: str) -> str:
    """Minutes from the counts that were kept of a rehearsal, and their error against the published time."""
    from rehearsal import calibration, predict

    if not (calibration.FOLDER / f"{record.name}.json").is_file():
        return "not predicted yet"
    found = predict.predict(calibration.counts_of(record.name))
    minutes = f"{found['minutes']:.2f} min"
    if record.name == calibration.FITTED_ON:
        return f"{minutes}, fitted to it"
    known = calibration.PUBLISHED.get(record.name)
    if known:  # milliseconds per step are the better measure: early published totals leave out ten steps
        return f"{minutes}, error {found['run']['ms'] / known.mean - 1:+.1%}"
    return f"{minutes}, error {found['minutes'] / float(published) - 1:+.1%}" if published else minutes
