"""Curves as a picture: loss over time and over steps, one row for each track."""

from __future__ import annotations

import argparse
import io
import math
import warnings
from typing import TYPE_CHECKING

from records.evidence import Entry, Moment, complain, track_title, tracks
from records.tables import records_to_show
from records.terminal import UserError, brief, harmless, many, write_new

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DRAWABLE = 1e9  # larger figures come from damaged logs, and would flatten everything else
LEGEND_ROWS = 26


def plot(args: argparse.Namespace) -> int:
    records = records_to_show(args)
    found = tracks(records, args.target, args.steps)
    complain(records, [entry for entries in found.values() for entry in entries])
    if not found:
        raise UserError("nothing to plot: no validation in these logs")
    try:
        import matplotlib
    except ImportError:
        raise UserError("plot needs matplotlib: pip install -r requirements-dev.txt") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = max(legend_columns(entries) for entries in found.values())
    size = 13 + 3.5 * columns, 5 * len(found)
    figure, rows = pyplot.subplots(len(found), 2, figsize=size, squeeze=False, sharey="row", layout="constrained")
    for axes, entries in zip(rows, found.values(), strict=True):
        plot_track(tuple(axes), entries)
    picture = io.BytesIO()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph")  # a name in letters that the font lacks
            figure.savefig(picture, dpi=150, format=args.output.suffix.removeprefix(".") or "png")
    except ValueError as error:
        raise UserError(f"{args.output}: {error}") from None
    finally:
        pyplot.close(figure)
    content = picture.getvalue()
    write_new(args.output, content, lambda old: old[:4] == content[:4])
    drawn = [entry for entries in found.values() for entry in entries]
    print(harmless(f"{args.output}: {many(found, 'track')}, {many(drawn, 'record')}"))
    return 0


def plot_track(axes: tuple[Axes, Axes], entries: list[Entry]) -> None:
    """Loss over time on the left, over steps on the right; the band is one standard deviation of the runs.

    The thin line is the training loss, smoothed over the same share of the steps in every record.
    """
    styles = line_styles(len(entries))
    for axis, label in zip(axes, ["training time [s]", "step"], strict=True):
        x_of = (lambda moment: moment.step) if label == "step" else (lambda moment: moment.seconds)
        for entry, style in zip(entries, styles, strict=True):
            moments = [moment for moment in entry.curve() if drawable(moment)]
            x, loss = [x_of(moment) for moment in moments], [moment.loss for moment in moments]
            width = [0 if math.isnan(moment.spread) else moment.spread for moment in moments]
            name = plain_text(f"{brief(entry.name, 60)} ({many(entry.complete or entry.runs, 'run')})")
            marker = {"marker": ".", "markersize": 4 if len(x) > 1 else 10}
            (line,) = axis.plot(x, loss, label=name, linewidth=1.5, **marker, **style)
            training = [moment for moment in entry.training if drawable(moment)]
            thin = {"color": line.get_color(), "linewidth": 0.8, "alpha": 0.55}
            axis.plot([x_of(moment) for moment in training], [moment.loss for moment in training], **thin)
            low, high = ([at + sign * by for at, by in zip(loss, width, strict=True)] for sign in (-1, 1))
            axis.fill_between(x, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
        if target := entries[0].target:
            axis.axhline(target, color="black", linestyle="--", linewidth=1, label=f"target {target:g}")
        axis.set_ylim(*view(entries))
        axis.set_xlabel(label)
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("validation loss" + (" (thin: training loss)" if any(e.training for e in entries) else ""))
    axes[0].set_title(plain_text(track_title(entries)), loc="left", fontsize=10)
    beside = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "borderaxespad": 0.0}
    axes[1].legend(fontsize=8, ncols=legend_columns(entries), **beside)


def legend_columns(entries: list[Entry]) -> int:
    return math.ceil((len(entries) + 1) / LEGEND_ROWS)


def line_styles(count: int) -> list[dict]:
    """A style for each line: the usual ten colours, or as many as there are records, neighbours dashed differently."""
    from matplotlib import colormaps

    if count <= 10:
        return [{"color": f"C{i}"} for i in range(count)]
    colours = colormaps["turbo"]
    return [
        {"color": colours(0.03 + 0.94 * i / (count - 1)), "linestyle": ["-", "--", "-."][i % 3]} for i in range(count)
    ]


def plain_text(text: str) -> str:
    """Text that matplotlib draws as it is: a dollar would start a formula, a leading underscore hide the line."""
    return (" " if text.startswith("_") else "") + harmless(text).replace("$", r"\$")


def drawable(moment: Moment) -> bool:
    return all(abs(value) < DRAWABLE for value in (moment.loss, moment.seconds, moment.step))


def view(entries: list[Entry]) -> tuple[float, float]:
    """(lowest, highest) loss to show: the first fifth of training is far above the rest and would flatten it."""
    goals = [min(entries[0].target, DRAWABLE)] if entries[0].target else []
    losses, late = [*goals], [*goals]
    for entry in entries:
        moments = [moment for moment in [*entry.training, *entry.curve()] if drawable(moment)]
        end = max((moment.step for moment in moments), default=0)
        losses += [moment.loss for moment in moments]
        late += [moment.loss for moment in moments if moment.step >= 0.2 * end]
    low, high = min(losses, default=0), max(late, default=1)
    margin = 0.06 * (high - low) or 0.1
    return low - margin, high + margin
