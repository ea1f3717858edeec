"""The page: the table, the curves and the diffs in one HTML file that needs no network.

The table and the diffs are there without a script; page.js draws the curves, sorts the table and answers the pointer.
Everything that comes from logs and scripts goes through escape().
"""

import argparse
import json
import math
import os
from html import escape
from itertools import pairwise
from pathlib import Path
from urllib.parse import quote

from records.diffs import Diff, Hunk, diff_programs
from records.evidence import Entry, complain, track_title, tracks
from records.figures import mean
from records.folders import Record
from records.plot import drawable
from records.scripts import Program, open_program
from records.tables import COLUMNS, evidence, measured_against, records_to_show, row_of, saving
from records.terminal import UserError, brief, harmless, many, warn, write_new

HERE = Path(__file__).resolve().parent
COLOURS = 8  # --line-0 to --line-7 in page.css; beyond, a colour of the rainbow each
MOST_LINKS = 4  # to logs in one row
MOST_ROWS = 800  # of a diff
START = "<!doctype html>\n<!-- python -m records page -->\n"
STATES = {True: "yes", None: "open", False: "no"}


def page(args: argparse.Namespace) -> int:
    records = records_to_show(args)
    found = list(tracks(records, args.target, args.steps).values())
    complain(records, [entry for entries in found for entry in entries])
    diffs = write_page(args.output, records, found, args.records)
    print(harmless(f"{args.output}: {many(records, 'record')}, {many(found, 'track')}, {many(diffs, 'diff')}"))
    return 0


def write_page(
    output: Path, records: list[Record], found: list[list[Entry]], home: Path, title: str = "Records"
) -> list:
    """Write the page of these records, whose tracks have been found; the diffs that are on it."""
    diffs = find_diffs(records, home)
    without = [record.name for record in records if not any(log.runs for log in record.logs)]
    content = render(found, diffs, without, output, title).encode(errors="replace")
    write_new(output, content, lambda old: old.startswith(START.encode()))
    return diffs


def find_diffs(records: list[Record], home: Path) -> list[tuple[str, str, list[Diff]]]:
    """(old name, new name, a diff for each file) of neighbours in the same track that have a source."""
    chains: dict[str, list[tuple[str, Program]]] = {}
    for record in records:
        places = [record.script] if record.script else [log.path for log in record.logs if log.source][:1]
        for path in places:
            try:
                chains.setdefault(record.track, []).append((record.name, open_program(str(path), home)))
            except UserError as error:
                warn(str(error))
    pairs = [pair for chain in chains.values() for pair in pairwise(chain)]
    return [(old, new, list(diff_programs(a, b))) for (old, a), (new, b) in pairs]


def render(found: list[list[Entry]], diffs: list, without: list[str], output: Path, title: str = "Records") -> str:
    numbers = {new: number for number, (_, new, _) in enumerate(diffs)}
    body = [render_track(number, entries, numbers, output.parent) for number, entries in enumerate(found)]
    if without:
        body.append(f"<p class='quiet'>Without runs: {escape(', '.join(map(brief, without)))}</p>")
    if not found and not without:
        body.append("<p>No records yet: a record is a folder <code>records/&lt;date&gt;_&lt;name&gt;/</code> "
                    "with <code>train_gpt.py</code> and its logs.</p>")  # fmt: skip
    if diffs:
        rendered = "".join(render_diff(number, *diff) for number, diff in enumerate(diffs))
        body.append(f"<section><h2>From record to record</h2>{rendered}</section>")
    # In a script element only "<" can do harm: "</script>" would end it.
    data = json.dumps([curves_of(entries) for entries in found], allow_nan=False).replace("<", "\\u003c")
    style, script = ((HERE / name).read_text() for name in ("page.css", "page.js"))
    return PAGE.format(start=START, title=escape(title), style=style, body="\n".join(body), data=data, script=script)


# ---- Table and curves of one track -----------------------------------------------------------------------------------


def render_track(number: int, entries: list[Entry], diffs: dict[str, int], folder: Path) -> str:
    heads = [f"<th><button>{escape(column)}</button></th>" for column in COLUMNS]
    rows = []
    for place, (entry, before) in enumerate(measured_against(entries, [])):
        cells = [escape(cell) for cell in row_of(entry, before)]
        cells[0] = f"<label><input type='checkbox' checked><i style='background:{colour(place, len(entries))}'></i>"
        cells[0] += f"{render_name(entry.name)}</label>"
        values = sort_values(entry, before, place)
        marked = [f" data-value='{value:.9g}'" if math.isfinite(value) else "" for value in values]
        state = STATES[evidence(entry)[0]]
        tds = [f"<td{mark}>{cell}</td>" for mark, cell in zip(marked, cells, strict=True)]
        tds[-1] = tds[-1].replace("<td", f"<td class='{state}'", 1)
        rows.append(f"<tr>{''.join(tds)}<td>{links(entry, diffs, folder)}</td></tr>")
    title = track_title(entries)
    table = f"<table><thead><tr>{''.join(heads)}<th>see</th></tr></thead><tbody>{''.join(rows)}</tbody></table>"
    figures = "".join(
        f"<figure data-x='{x}'><figcaption>Loss over {words}</figcaption>"
        f"<svg role='img' aria-label='Loss over {words}'></svg><div class='tip' hidden></div></figure>"
        for x, words in (("seconds", "training time"), ("step", "steps"))
    )
    return (
        f"<section data-track='{number}'><h2>{escape(title[:1].upper() + title[1:])}</h2>"
        f"<div class='scroll'>{table}</div>{NOTE}{CONTROLS}<div class='charts'>{figures}</div></section>"
    )


def render_name(name: str) -> str:
    """A name that is broken, where it must be, behind its date."""
    date, line, rest = brief(name, 80).partition("_")
    return f"<span>{escape(date + line)}</span><span>{escape(rest)}</span>" if rest else escape(date + line)


def sort_values(entry: Entry, before: Entry | None, place: int) -> list[float]:
    """A number to sort by for each column; nan sorts last."""
    percent = saving(entry, before)
    found = [first for run in entry.complete if (first := run.reached(entry.target))]
    proof = {True: 0, None: 1, False: 2}[evidence(entry)[0]]
    steps, to_target = mean([run.final.step for run in entry.complete]), mean([first.seconds for first in found])
    gained = math.nan if percent is None else -percent
    return [place, -len(entry.complete), steps, mean(entry.losses), mean(entry.times), to_target, gained, proof]


def colour(place: int, count: int) -> str:
    if count <= COLOURS:
        return f"var(--line-{place})"
    return f"hsl({round(360 * place * 0.618) % 360} {(60, 85)[place % 2]}% var(--light))"


def links(entry: Entry, diffs: dict[str, int], folder: Path) -> str:
    found = [f"<a href='#diff-{diffs[entry.name]}'>diff</a>"] if entry.name in diffs else []
    paths = [log.path for log in entry.logs]
    if len(paths) > MOST_LINKS:
        found.append(link(paths[0].parent, folder, f"{len(paths)} logs"))
    elif len(paths) == 1:
        found.append(link(paths[0], folder, "log"))
    else:
        found.append("logs " + " ".join(link(path, folder, str(n)) for n, path in enumerate(paths, 1)))
    return ", ".join(found)


def link(path: Path, folder: Path, words: str) -> str:
    relative = os.path.relpath(os.path.abspath(path), os.path.abspath(folder))
    # With ./ in front no file name can be taken for an address.
    return f"<a href='./{escape(quote(os.fsencode(relative)), quote=True)}'>{words}</a>"


def curves_of(entries: list[Entry]) -> dict:
    """What page.js needs to draw a track."""
    lines = []
    for place, entry in enumerate(entries):
        at = [[m.step, number(m.seconds, 2), number(m.loss, 4), number(m.spread, 4)] for m in entry.curve()]
        training = [[round(m.step), number(m.seconds, 1), number(m.loss, 3)] for m in entry.training if drawable(m)]
        line = {"name": brief(entry.name, 80), "colour": colour(place, len(entries)), "at": at, "training": training}
        lines.append(line)
    return {"target": entries[0].target or None, "lines": lines}  # 0 means that there is none


def number(value: float, digits: int) -> float | None:
    return round(value, digits) if abs(value) < 1e9 else None


# ---- Diffs -----------------------------------------------------------------------------------------------------------


def render_diff(number: int, old: str, new: str, diffs: list[Diff]) -> str:
    files = [(diff, diff.stat()) for diff in diffs]
    files = [(diff, stat) for diff, stat in files if stat]
    plus = sum(added for _, stat in files for added, _ in stat.values())
    minus = sum(removed for _, stat in files for _, removed in stat.values())
    parts = []
    for diff, stat in files:
        name = f"<p class='file'>{escape(diff.new.label)}</p>" if len(diffs) > 1 else ""
        chips = "".join(f"<span class='chip'>{escape(title)} {signs(a, r)}</span>" for title, (a, r) in stat.items())
        hunks = render_hunks(diff)
        parts.append(f"{name}<div class='chips'>{chips}</div><div class='scroll diff'>{hunks}</div>")
    names = f"<b>{escape(brief(old, 80))} → {escape(brief(new, 80))}</b>"
    content = "".join(parts) or "<p class='quiet file'>No difference.</p>"
    return f"<details id='diff-{number}'><summary>{names} {signs(plus, minus)}</summary>{content}</details>"


def render_hunks(diff: Diff) -> str:
    """The changes, as many as a reader looks at; a file that is new as a whole would make up most of the page."""
    rendered, rows = [], 0
    for hunk in diff.hunks():
        if rows + len(hunk.rows) > MOST_ROWS:
            rendered.append("<p class='quiet file'>And more: see <code>python -m records diff</code>.</p>")
            break
        rendered.append(render_hunk(hunk))
        rows += len(hunk.rows)
    return "".join(rendered)


def signs(added: int, removed: int) -> str:
    return f"<span class='plus'>+{added}</span> <span class='minus'>−{removed}</span>"


def render_hunk(hunk: Hunk) -> str:
    rows = [f"<tr class='place'><td></td><td></td><td></td><td>{escape(hunk.section)}</td></tr>"]
    for sign, old, new, pieces in hunk.rows:
        kind = {"-": "del", "+": "add", " ": "same"}[sign]
        words = "".join(f"<em>{escape(text)}</em>" if changed else escape(text) for text, changed in pieces)
        numbers = f"<td>{old.number if old else ''}</td><td>{new.number if new else ''}</td>"
        rows.append(f"<tr class='{kind}'>{numbers}<td>{sign}</td><td>{words}</td></tr>")
    return f"<table>{''.join(rows)}</table>"


# ---- The page's frame ------------------------------------------------------------------------------------------------

NOTE = """<p class="quiet note">± is one standard deviation of the runs, and so is the band around a curve. Gain: time
saved over the record before that reached the target. Evidence: does <code>python -m records check</code> pass, above
all, is the mean final loss below the target with p &lt; 0.01? Click a heading to sort,
untick a record to hide it.</p>"""

CONTROLS = """<p class="controls"><button data-show="all">show all</button> <button data-show="none">hide all</button>
<label><input type="checkbox" data-log="x"> log time and steps</label>
<label><input type="checkbox" data-log="y"> log loss</label>
<label>show <select data-from><option value="0.2">all</option><option value="0.5">the last half</option>
<option value="0.8">the last 20 %</option><option value="0.95">the last 5 %</option></select> of the steps</label>
<label>smooth the training loss (thin)
<input type="range" min="0" max="0.95" step="0.05" value="0" data-smooth></label>
</p><noscript><p>The curves need JavaScript.</p></noscript>"""

PAGE = """{start}<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
{body}
</main>
<script type="application/json" id="curves">{data}</script>
<script>
{script}</script>
</body>
</html>
"""
