"""Loss over time as an SVG for a README: one file for a light background and one for a dark one.

The colours are those of the page (page.css). Both axes are logarithmic: the first record takes many times as long as
the others, and early losses would flatten what is worth seeing.
"""

import math
import re
from collections.abc import Callable
from html import escape
from pathlib import Path

from records.evidence import Entry, Moment
from records.figures import mean
from records.plot import drawable
from records.terminal import brief

STYLE = Path(__file__).resolve().parent / "page.css"
SCHEMES = ("light", "dark")
WIDTH, HEIGHT = 840, 380
LEFT, RIGHT, TOP, BOTTOM = 52, 560, 30, 334  # of the axes; the legend is to their right
ROW = 34  # of the legend
COLOURS = 8  # in page.css


def palette(scheme: str) -> dict[str, str]:
    """The colours of page.css by name: it gives those for light backgrounds first, then those for dark ones."""
    light, dark = re.findall(r":root \{(.*?)\}", STYLE.read_text(), re.DOTALL)
    return dict(re.findall(r"--([\w-]+): (#\w+)", {"light": light, "dark": dark}[scheme]))


def draw(entries: list[Entry], scheme: str) -> str:
    """The mean validation loss of each record over training time, with a legend that says how long it trains."""
    colours, curves = palette(scheme), [timed(entry) for entry in entries]
    times = [moment.seconds for curve in curves for moment in curve]
    target = entries[0].target
    losses = [target, *(moment.loss for curve in curves for moment in curve)]
    first, last, low, high = 0.9 * min(times), 1.1 * max(times), 0.95 * min(losses), 1.03 * max(losses)
    x, y = scale(first, last, LEFT, RIGHT), scale(low, high, BOTTOM, TOP)
    parts = axes(x, y, (first, last), (low, high), colours)
    parts.append(line(LEFT, y(target), RIGHT, y(target), colours["ink"], ' stroke-dasharray="5 4"'))
    parts.append(text(LEFT + 8, y(target) + 16, f"target {target:g}", colours["ink"]))
    for place, (entry, curve) in enumerate(zip(entries, curves, strict=True)):
        colour = colours[f"line-{place % COLOURS}"]
        points = [(x(moment.seconds), y(moment.loss)) for moment in curve]
        shape = " ".join(f"{across:.1f},{down:.1f}" for across, down in points)
        width = 3 if entry is entries[-1] else 2
        parts.append(f'<polyline points="{shape}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
        parts.append(f'<circle cx="{points[-1][0]:.1f}" cy="{points[-1][1]:.1f}" r="{width + 1}" fill="{colour}"/>')
        parts += legend(place, entry, colour, colours)
    return FRAME.format(width=WIDTH, height=HEIGHT, content="\n".join(parts))


def timed(entry: Entry) -> list[Moment]:
    """What can be drawn: the validation before the first step has no time."""
    return [moment for moment in entry.curve() if drawable(moment) and moment.seconds > 0 and moment.loss > 0]


def scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Where a value is drawn, on a logarithmic axis."""
    return lambda value: start + math.log(value / low) / math.log(high / low) * (end - start)


def axes(x: Callable, y: Callable, times: tuple, losses: tuple, colours: dict[str, str]) -> list[str]:
    parts = [text(LEFT, TOP - 12, "validation loss, nats per byte: lower is better", colours["quiet"])]
    for loss in (fifth / 5 for fifth in range(1, 60)):
        if losses[0] <= loss <= losses[1]:
            parts.append(line(LEFT, y(loss), RIGHT, y(loss), colours["rule"]))
            parts.append(text(LEFT - 8, y(loss) + 4, f"{loss:.1f}", colours["quiet"], "end"))
    for second in (factor * 10**power for power in range(-2, 7) for factor in (1, 2, 5)):
        if times[0] <= second <= times[1]:
            parts.append(line(x(second), BOTTOM, x(second), BOTTOM + 5, colours["quiet"]))
            parts.append(text(x(second), BOTTOM + 20, f"{second:g}", colours["quiet"], "middle"))
    parts.append(line(LEFT, BOTTOM, RIGHT, BOTTOM, colours["quiet"]))
    parts.append(text(RIGHT, BOTTOM + 38, "seconds of training", colours["quiet"], "end"))
    return parts


def legend(place: int, entry: Entry, colour: str, colours: dict[str, str]) -> list[str]:
    top = TOP + 8 + ROW * place
    date, _, name = entry.name.partition("_")
    told = f"{mean(entry.times):.1f} s" + (f", {date}" if date.count("-") == 2 else "")
    return [
        line(RIGHT + 28, top, RIGHT + 52, top, colour, ' stroke-width="4"'),
        text(RIGHT + 62, top + 5, brief(name or entry.name, 24), colours["ink"]),
        text(RIGHT + 62, top + 20, told, colours["quiet"]),
    ]


def line(x1: float, y1: float, x2: float, y2: float, colour: str, more: str = "") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{more}/>'


def text(x: float, y: float, words: str, colour: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}">{escape(words)}</text>'


FRAME = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" \
role="img" font-family="system-ui, sans-serif" font-size="13">
<title>Validation loss over training time of each record on the CPU track</title>
{content}
</svg>
"""
