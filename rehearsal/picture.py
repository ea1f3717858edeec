"""The predicted timeline of one step, as a page that any browser shows and as a trace that Perfetto opens."""

import html
import json

from rehearsal import compare, predict

COLOURS = {  # by part, told apart by most eyes with impaired colour vision
    "matrix products": "#0072b2",
    "attention forward": "#e69f00",
    "attention backward": "#d55e00",
    "head and loss": "#009e73",
    "other kernels": "#999999",
    "optimizer": "#cc79a7",
    "collectives": "#56b4e9",
    "gaps": "#ffffff",
}


def name_of(span: predict.Span) -> str:
    return compare.told(span.item) if span.item else "waits for a collective"


def rows_of(spans: list[predict.Span]) -> dict[int, str]:
    """The streams that do something, and what: the busiest computes, those with collectives communicate."""
    busy = {stream: 0.0 for stream in sorted({span.stream for span in spans if span.item})}
    for span in spans:
        if span.item and span.item["kind"] != "collective":
            busy[span.stream] += span.end - span.start
    main = max(busy, key=busy.get)
    communicating = {span.stream for span in spans if span.item and span.item["kind"] == "collective"}
    kinds = {stream: "communication" if stream in communicating else "another stream" for stream in busy}
    return {main: "computation", **{stream: kinds[stream] for stream in busy if stream != main}}


def shown(spans: list[predict.Span]) -> list[predict.Span]:
    """All work, and of the waits those of the stream that computes: the others are simply idle."""
    main = next(iter(rows_of(spans)))
    return [span for span in spans if span.item or span.stream == main]


def as_trace(spans: list[predict.Span]) -> dict:
    """Chrome's format: complete events with microseconds, one thread for each stream."""
    events = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": stream, "args": {"name": f"predicted: {name}"}}
        for stream, name in rows_of(spans).items()
    ]
    for span in shown(spans):
        part = span.item["part"] if span.item else "collectives"
        events.append(
            {
                "ph": "X",
                "name": name_of(span),
                "cat": part,
                "pid": 0,
                "tid": span.stream,
                "ts": round(1e6 * span.start, 3),
                "dur": round(1e6 * (span.end - span.start), 3),
                "args": {"part": part, "bytes": (span.item or {}).get("bytes", 0)},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def as_page(spans: list[predict.Span], title: str, error: str) -> str:
    rows = rows_of(spans)
    numbers = {stream: row for row, stream in enumerate(rows)}
    parts = list(COLOURS)
    names = list(dict.fromkeys(name_of(span) for span in spans))
    drawn = [
        [
            numbers[span.stream],
            parts.index(span.item["part"]) if span.item else -1,
            names.index(name_of(span)),
            round(1e6 * span.start, 1),
            round(1e6 * (span.end - span.start), 1),
        ]
        for span in shown(spans)
    ]
    data = {
        "spans": drawn,
        "names": names,
        "rows": list(rows.values()),
        "parts": parts,
        "colours": list(COLOURS.values()),
        "total": max(span.end for span in spans) * 1e6,
    }
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    return PAGE.replace("TITLE", html.escape(title)).replace("ERROR", html.escape(error)).replace("DATA", text)


PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>TITLE</title>
<style>
body { font: 14px system-ui, sans-serif; margin: 24px; color: #222; }
h1 { font-size: 18px; margin: 0 0 4px; } p { margin: 4px 0 12px; color: #555; }
svg { width: 100%; height: 190px; border: 1px solid #ccc; cursor: grab; display: block; touch-action: none; }
.key { display: inline-block; margin: 0 16px 6px 0; } .key i { display: inline-block; width: 12px; height: 12px;
margin-right: 6px; border: 1px solid #666; vertical-align: -1px; }
#told { height: 40px; margin-top: 8px; font-variant-numeric: tabular-nums; }
</style>
<h1>TITLE</h1>
<p>Predicted; ERROR. The wheel zooms, dragging moves, a double click shows all.</p>
<div id="keys"></div><svg id="plot"></svg><div id="told"></div>
<script>
const data = DATA;
const svg = document.getElementById("plot"), told = document.getElementById("told"), left = 110, high = 46, top0 = 24;
let from = 0, to = data.total;
const node = (name, at, text) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in at) made.setAttribute(key, at[key]);
  if (text) made.textContent = text;
  return made;
};
const sums = data.parts.map((_, part) =>
  data.spans.filter(s => s[0] === 0 && s[1] === part).reduce((sum, s) => sum + s[4], 0));
const waits = data.spans.filter(s => s[0] === 0 && s[1] < 0).reduce((sum, s) => sum + s[4], 0);
data.parts.forEach((part, i) => {
  if (part === "gaps") return;
  const key = document.createElement("span"), box = document.createElement("i");
  const ms = part === "collectives" ? waits : sums[i];
  key.className = "key"; box.style.background = data.colours[i];
  key.append(box, `${part}${part === "collectives" ? ", waited for" : ""} ${(ms / 1000).toFixed(1)} ms`);
  document.getElementById("keys").append(key);
});
function draw() {
  const width = svg.clientWidth - left - 8, scale = width / (to - from);
  svg.replaceChildren();
  const power = 10 ** Math.floor(Math.log10((to - from) / 4));
  const step = power * [1, 2, 5].find(n => (to - from) / (n * power) < 12);
  for (let t = Math.ceil(from / step) * step; t <= to; t += step) {
    const x = left + (t - from) * scale;
    svg.append(node("line", {x1: x, x2: x, y1: top0, y2: 185, stroke: "#eee"}),
               node("text", {x, y: 16, "font-size": 11, "text-anchor": "middle"}, `${+(t / 1000).toFixed(4)} ms`));
  }
  data.rows.forEach((row, i) => svg.append(node("text", {x: 6, y: top0 + i * (high + 8) + 28, "font-size": 12}, row)));
  data.spans.forEach(([row, part, name, start, length]) => {
    if (start + length < from || start > to) return;
    const x1 = left + (Math.max(start, from) - from) * scale, x2 = left + (Math.min(start + length, to) - from) * scale;
    const box = node("rect", {x: x1, y: top0 + 4 + row * (high + 8), width: Math.max(x2 - x1, 0.4), height: high,
      fill: part < 0 ? "none" : data.colours[part], stroke: part < 0 ? "#d00" : "none", "stroke-dasharray": "3 2"});
    box.onmouseenter = () => {
      const when = `predicted ${length.toFixed(1)} µs, from ${(start / 1000).toFixed(3)} ms`;
      told.textContent = `${data.names[name]}: ${when}` + (part < 0 ? "" : ` (${data.parts[part]})`);
    };
    svg.append(box);
  });
}
svg.onwheel = event => {
  event.preventDefault();
  const share = Math.min(1, Math.max(0, (event.offsetX - left) / (svg.clientWidth - left - 8)));
  const here = from + share * (to - from), factor = event.deltaY > 0 ? 1.25 : 0.8;
  from = Math.max(0, here - (here - from) * factor); to = Math.min(data.total, here + (to - here) * factor); draw();
};
svg.onpointermove = event => {
  if (event.buttons !== 1) return;
  const moved = Math.max(-from, Math.min(data.total - to, -event.movementX * (to - from) / (svg.clientWidth - left)));
  from += moved; to += moved; draw();
};
svg.ondblclick = () => { from = 0; to = data.total; draw(); };
window.onresize = draw;
draw();
</script>
</html>
"""
