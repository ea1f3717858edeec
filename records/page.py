"""The page: the table, the curves and the diffs in one HTML file that needs no network.

Curves are drawn here as SVG, so they are there without a script; the script only answers the pointer.
Everything that comes from logs and scripts goes through escape().
"""

import json
import math
from html import escape

COLOURS = 8  # --line-0 to --line-7 in STYLE
WIDTH, HEIGHT = 560, 340
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 40  # margins around the plot


def render(columns, tracks, diffs, without):
    """tracks: (title, entries, rows of the table) each; diffs: (old name, new name, Diff) each."""
    curves = []
    body = [render_track(columns, *track, curves) for track in tracks]
    if without:
        body.append(f"<p class='quiet'>Without runs: {escape(', '.join(without))}</p>")
    if not tracks and not without:
        body.append("<p>No records yet: a record is a folder <code>records/&lt;date&gt;_&lt;name&gt;/</code> "
                    "with <code>train_gpt.py</code> and its logs.</p>")  # fmt: skip
    if diffs:
        body.append("<section><h2>From record to record</h2>" + "".join(map(render_diff, diffs)) + "</section>")
    # In a script element only "<" can do harm: "</script>" would end it.
    data = json.dumps(curves, allow_nan=False).replace("<", "\\u003c")
    return PAGE.format(style=STYLE, body="\n".join(body), data=data, script=SCRIPT)


# ----------------------------------------------------------------------------------------------------------------------
# Table and curves of one track
# ----------------------------------------------------------------------------------------------------------------------


def render_track(columns, title, entries, rows, curves):
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    lines = []
    for number, row in enumerate(rows):
        swatch = f"<i style='background:var(--line-{number % COLOURS})'></i>"
        state = "yes" if row[-1].startswith("yes") else "no"
        cells = [f"<td>{swatch}{escape(row[0])}</td>", *(f"<td>{escape(cell)}</td>" for cell in row[1:-1])]
        lines.append(f"<tr>{''.join(cells)}<td class='{state}'>{escape(row[-1])}</td></tr>")
    table = f"<div class='scroll'><table><tr>{head}</tr>{''.join(lines)}</table></div>"
    charts = render_chart(entries, "seconds", curves) + render_chart(entries, "step", curves)
    title = escape(title[:1].upper() + title[1:])
    return f"<section><h2>{title}</h2>{table}{NOTE}<div class='charts'>{charts}</div></section>"


def view(entries):
    """(lowest, highest) loss to show: the first fifth of training is far above the rest and would flatten it."""
    target = entries[0].target
    losses, late = [target], [target]
    for entry in entries:
        moments = [moment for moment in [*entry.training, *entry.curve()] if math.isfinite(moment.loss)]
        end = max((moment.step for moment in moments), default=0)
        losses += [moment.loss for moment in moments]
        late += [moment.loss for moment in moments if moment.step >= 0.2 * end]
    low, high = min(losses), max(late)
    margin = 0.06 * (high - low) or 0.1
    return low - margin, high + margin


def render_chart(entries, x_name, curves):
    """One SVG. What the pointer needs to know of it is appended to `curves`."""
    shown = [[moment for moment in entry.curve() if finite(moment, x_name)] for entry in entries]
    x_of = lambda moment: getattr(moment, x_name)  # noqa: E731
    low, high = view(entries)
    end = max((x_of(moment) for moments in shown for moment in moments), default=1) or 1

    def place(x, y):
        return (
            LEFT + x / end * (WIDTH - LEFT - RIGHT),
            TOP + (high - y) / (high - low) * (HEIGHT - TOP - BOTTOM),
        )

    number = len(curves)
    parts = [*render_axes(low, high, end, place, x_name), f"<g clip-path='url(#clip{number})'>"]
    y = place(0, entries[0].target)[1]
    parts.append(f"<line class='target' x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{y:.1f}' y2='{y:.1f}'/>")
    parts.append(f"<text x='{LEFT + 6}' y='{y - 5:.1f}'>target {entries[0].target:g}</text>")
    lines = []
    for index, (entry, moments) in enumerate(zip(entries, shown, strict=True)):
        colour = f"var(--line-{index % COLOURS})"
        spreads = [0 if math.isnan(moment.spread) else moment.spread for moment in moments]
        upper = [place(x_of(m), m.loss + s) for m, s in zip(moments, spreads, strict=True)]
        lower = [place(x_of(m), m.loss - s) for m, s in zip(moments, spreads, strict=True)]
        middle = [place(x_of(m), m.loss) for m in moments]
        parts.append(f"<polygon points='{points(upper + lower[::-1])}' style='fill:{colour}'/>")
        training = [place(x_of(m), m.loss) for m in entry.training if finite(m, x_name)]
        if training:
            parts.append(f"<polyline class='training' points='{points(training)}' style='stroke:{colour}'/>")
        lone = " class='lone'" if len(middle) == 1 else ""  # a line with one point would not be seen
        parts.append(f"<polyline{lone} points='{points(middle * 2 if lone else middle)}' style='stroke:{colour}'/>")
        lines.append({"name": entry.name, "colour": colour, "at": [
            [round(px, 1), round(py, 1), describe(moment)] for (px, py), moment in zip(middle, moments, strict=True)
        ]})  # fmt: skip
    parts.append(f"</g><line class='hair' y1='{TOP}' y2='{HEIGHT - BOTTOM}' visibility='hidden'/>")
    parts += [f"<circle r='4' style='fill:{line['colour']}' visibility='hidden'/>" for line in lines]
    curves.append(lines)
    clip = (
        f"<clipPath id='clip{number}'><rect x='{LEFT}' y='{TOP}' width='{WIDTH - LEFT - RIGHT}' "
        f"height='{HEIGHT - TOP - BOTTOM}'/></clipPath>"
    )
    title = "Validation loss over training time" if x_name == "seconds" else "Validation loss over steps"
    svg = f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='{title}'>{clip}{''.join(parts)}</svg>"
    return f"<figure data-chart='{number}'><figcaption>{title}</figcaption>{svg}<div class='tip' hidden></div></figure>"


def finite(moment, x_name):
    return math.isfinite(moment.loss) and math.isfinite(getattr(moment, x_name))


def describe(moment):
    noise = "" if math.isnan(moment.spread) else f" ± {moment.spread:.4f}"
    clock = f", {moment.seconds:.1f} s" if math.isfinite(moment.seconds) else ""
    return f"{moment.loss:.4f}{noise} at step {moment.step}{clock}"


def points(places):
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def render_axes(low, high, end, place, x_name):
    for value in ticks(low, high):
        y = place(0, value)[1]
        yield f"<line class='grid' x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{y:.1f}' y2='{y:.1f}'/>"
        yield f"<text class='y' x='{LEFT - 8}' y='{y + 4:.1f}'>{value:g}</text>"
    for value in ticks(0, end):
        x = place(value, low)[0]
        yield f"<text class='x' x='{x:.1f}' y='{HEIGHT - BOTTOM + 18}'>{value:g}</text>"
    label = "training time [s]" if x_name == "seconds" else "step"
    yield f"<text class='x' x='{(LEFT + WIDTH - RIGHT) / 2}' y='{HEIGHT - 4}'>{label}</text>"


def ticks(low, high, about=6):
    """Round numbers between low and high."""
    rough = (high - low) / about
    size = 10 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    first = math.ceil(low / step)
    return [round(number * step, 10) for number in range(first, math.floor(high / step) + 1)]


# ----------------------------------------------------------------------------------------------------------------------
# Diffs
# ----------------------------------------------------------------------------------------------------------------------


def render_diff(names_and_diff):
    old, new, diff = names_and_diff
    stat = diff.stat()
    plus, minus = sum(a for a, _ in stat.values()), sum(r for _, r in stat.values())
    chips = "".join(f"<span class='chip'>{escape(title)} {signs(a, r)}</span>" for title, (a, r) in stat.items())
    hunks = "".join(map(render_hunk, diff.hunks())) or "<p class='quiet'>No difference.</p>"
    summary = f"<summary><b>{escape(old)} → {escape(new)}</b> {signs(plus, minus)}</summary>"
    return f"<details>{summary}<div class='chips'>{chips}</div><div class='scroll diff'>{hunks}</div></details>"


def signs(added, removed):
    return f"<span class='plus'>+{added}</span> <span class='minus'>−{removed}</span>"


def render_hunk(hunk):
    rows = [f"<tr class='place'><td></td><td></td><td></td><td>{escape(hunk.section)}</td></tr>"]
    for sign, old, new, pieces in hunk.rows:
        kind = {"-": "del", "+": "add", " ": "same"}[sign]
        words = "".join(f"<em>{escape(text)}</em>" if changed else escape(text) for text, changed in pieces)
        numbers = f"<td>{old.number if old else ''}</td><td>{new.number if new else ''}</td>"
        rows.append(f"<tr class='{kind}'>{numbers}<td>{sign}</td><td>{words}</td></tr>")
    return f"<table>{''.join(rows)}</table>"


# ----------------------------------------------------------------------------------------------------------------------
# The page's frame
# ----------------------------------------------------------------------------------------------------------------------

NOTE = """<p class="quiet note">± is one standard deviation of the runs, and so is the band around a curve.
The thin curves are the training loss, a mean for each hundredth of the steps. Gain: time
saved against the record before. Evidence: does <code>python -m records check</code> pass, above all, is the mean final
loss below the target with p &lt; 0.01?</p>"""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>Records</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>Records</h1>
{body}
</main>
<script type="application/json" id="curves">{data}</script>
<script>{script}</script>
</body>
</html>
"""

STYLE = """
:root {
  --paper: #fdfdfb; --ink: #22252a; --quiet: #6b7078; --rule: #e3e3de; --panel: #f5f5f1;
  --add: #e2f4e4; --add-word: #a9e0b0; --del: #fbe6e4; --del-word: #f4b6b0; --yes: #17763a; --no: #a3402f;
  --line-0: #3366cc; --line-1: #d9622b; --line-2: #2a9d6f; --line-3: #b0378f;
  --line-4: #8a7a12; --line-5: #0f93b5; --line-6: #7652c8; --line-7: #c0392b;
}
@media (prefers-color-scheme: dark) { :root {
  --paper: #16181c; --ink: #e4e6e9; --quiet: #9298a2; --rule: #2e3238; --panel: #1e2126;
  --add: #16301f; --add-word: #27633a; --del: #3a1d1c; --del-word: #7a302b; --yes: #6fce8f; --no: #ef8f7f;
  --line-0: #7aa5ff; --line-1: #ff9a66; --line-2: #5fd3a3; --line-3: #e987cf;
  --line-4: #d6c552; --line-5: #58c8e8; --line-6: #b59bff; --line-7: #ff7f73;
} }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 2.5rem 1.25rem 5rem; }
h1 { font-size: 2rem; letter-spacing: -0.02em; margin: 0 0 1.5rem; }
h2 { font-size: 1.1rem; margin: 2.5rem 0 0.75rem; overflow-wrap: anywhere; }
.quiet, figcaption { color: var(--quiet); }
.note { font-size: 0.85rem; margin: 0.6rem 0 0; max-width: 60rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
section > .scroll > table { width: 100%; }
section > .scroll th, section > .scroll td {
  padding: 0.45rem 0.9rem 0.45rem 0; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--rule);
}
section > .scroll th { color: var(--quiet); font-weight: 500; font-size: 0.85rem; }
section > .scroll :is(th, td):first-child, section > .scroll :is(th, td):last-child { text-align: left; }
section > .scroll :is(th, td):last-child { padding-left: 1rem; }
td i { display: inline-block; width: 0.7em; height: 0.7em; border-radius: 50%; margin-right: 0.6em; }
.yes, .plus { color: var(--yes); } .no, .minus { color: var(--no); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 1.5rem; }
.charts { margin-top: 1.25rem; }
figure { position: relative; margin: 0; }
figcaption { font-size: 0.85rem; }
svg { display: block; width: 100%; height: auto; touch-action: pan-y; }
svg text { fill: var(--quiet); font-size: 12px; }
svg text.x { text-anchor: middle; } svg text.y { text-anchor: end; }
svg .grid { stroke: var(--rule); } svg .hair { stroke: var(--quiet); stroke-width: 0.75; pointer-events: none; }
svg line.target { stroke: var(--ink); stroke-dasharray: 5 4; opacity: 0.7; }
svg polyline { fill: none; stroke-width: 1.75; stroke-linejoin: round; }
svg polyline.lone { stroke-width: 8; stroke-linecap: round; }
svg polyline.training { stroke-width: 1; opacity: 0.55; }
svg polygon { opacity: 0.18; }
svg circle { stroke: var(--paper); stroke-width: 1.5; pointer-events: none; }
.tip {
  position: absolute; top: 1.9rem; right: 0; max-width: 100%; padding: 0.4rem 0.6rem; pointer-events: none;
  background: var(--panel); border: 1px solid var(--rule); border-radius: 6px; overflow-wrap: anywhere;
  font-size: 0.75rem; font-variant-numeric: tabular-nums; opacity: 0.95;
}
.tip i { display: inline-block; width: 0.7em; height: 0.7em; border-radius: 50%; margin-right: 0.5em; }
details { border: 1px solid var(--rule); border-radius: 8px; margin: 0.6rem 0; background: var(--panel); }
summary { padding: 0.6rem 0.9rem; cursor: pointer; overflow-wrap: anywhere; }
summary b { font-weight: 600; margin-right: 0.5rem; }
.chips { padding: 0 0.9rem 0.7rem; display: flex; flex-wrap: wrap; gap: 0.4rem; font-size: 0.8rem; }
.chip { border: 1px solid var(--rule); border-radius: 99px; padding: 0.05rem 0.6rem; background: var(--paper); }
.diff { background: var(--paper); border-top: 1px solid var(--rule); border-radius: 0 0 8px 8px; }
.diff table { font: 12.5px/1.5 ui-monospace, monospace; width: 100%; }
.diff td { white-space: pre; padding: 0 0.5rem; vertical-align: top; }
.diff td:nth-child(-n+2) { color: var(--quiet); text-align: right; user-select: none; width: 1%; opacity: 0.7; }
.diff td:nth-child(3) { width: 1%; user-select: none; padding: 0; }
.diff .add td { background: var(--add); } .diff .del td { background: var(--del); }
.diff em { font-style: normal; border-radius: 2px; }
.diff .add em { background: var(--add-word); } .diff .del em { background: var(--del-word); }
.diff .place td { background: var(--panel); color: var(--quiet); padding-top: 0.3rem; padding-bottom: 0.3rem; }
"""

SCRIPT = """
"use strict";
// At the pointer: for every line the validation nearest in x, marked on the curve and written in the upper right
// corner, which losses that fall leave free.
const charts = JSON.parse(document.getElementById("curves").textContent);
for (const figure of document.querySelectorAll("figure[data-chart]")) {
  const lines = charts[figure.dataset.chart], svg = figure.querySelector("svg");
  const tip = figure.querySelector(".tip"), hair = figure.querySelector(".hair");
  const dots = figure.querySelectorAll("circle");
  function show(event) {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * scale;
    tip.replaceChildren();
    lines.forEach((line, i) => {
      if (!line.at.length) return;
      const near = line.at.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
      dots[i].setAttribute("cx", near[0]);
      dots[i].setAttribute("cy", near[1]);
      dots[i].setAttribute("visibility", near[1] < 0 ? "hidden" : "visible");
      const row = tip.appendChild(document.createElement("div"));
      row.appendChild(document.createElement("i")).style.background = line.colour;
      row.append(line.name + ": " + near[2]);
    });
    hair.setAttribute("x1", x);
    hair.setAttribute("x2", x);
    hair.setAttribute("visibility", "visible");
    tip.hidden = !tip.childNodes.length;
  }
  function hide() {
    tip.hidden = true;
    hair.setAttribute("visibility", "hidden");
    for (const dot of dots) dot.setAttribute("visibility", "hidden");
  }
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", hide);
}
"""
