"""What the predicted times are worth: two rates fitted on one public record, and the others as a test.

python -m rehearsal.calibration                          the fitted rates and the table of README.md
python -m rehearsal.calibration --keep NAME report.json  keeps a rehearsal's counts for it, as counts/NAME.json
"""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from rehearsal import predict

FOLDER = Path(__file__).resolve().parent / "counts"
INTERVAL = 125  # steps between validations, over which the public logs tell the time


@dataclass(frozen=True)
class Published:
    """Milliseconds per step on 8 H100s, from the public logs: over the run, over its first and its last interval."""

    mean: float
    early: float | None = None
    late: float | None = None


FITTED_ON = "2025-01-04_SoftCap"
PUBLISHED = {
    "2024-11-24_WindowWarmup": Published(160.9, 152.4, 170.8),
    "2024-12-08_UNetValueEmbeds": Published(161.1, 147.7, 173.5),
    "2024-12-10_BlockWindow": Published(157.2, 149.5, 164.7),
    "2024-12-17_SparsifyEmbeds": Published(144.0, 135.8, 151.4),
    FITTED_ON: Published(148.1, 139.4, 157.1),
    "2025-08-23_ShardedLongShort": Published(99.5, 94.3, 103.0),
    "2025-12-18_NorMuonYarn": Published(61.1, 33.0, 87.6),  # the first and the last third; with Flash Attention 3
}


def counts_of(record: str) -> dict:
    return json.loads((FOLDER / f"{record}.json").read_text())


def keep(name: str, report: Path) -> None:
    """Only what a prediction needs, in few bytes."""
    counts = json.loads(report.read_text()).get("step")
    if not counts:
        raise ValueError(f"{report} has no step: the rehearsal did not get through one")
    for item in (item for stage in predict.stages_in(counts) for item in stage["items"]):
        if "name" in item:
            item["name"] = item["name"][:40]
    (FOLDER / f"{name}.json").write_text(json.dumps(counts, separators=(",", ":")) + "\n")


def milliseconds(counts: dict, rates: predict.Rates) -> Published:
    """The prediction in the form in which times are published."""
    taken = []
    for stage in predict.stages_in(counts):
        windows = predict.windows_of(stage)
        of_window = {w: 1e3 * sum(predict.step_seconds(stage, w, rates=rates).values()) for w in set(windows)}
        taken += [of_window[window] for window in windows]
    last = len(taken) // INTERVAL * INTERVAL
    return Published(mean(taken), mean(taken[:INTERVAL]), mean(taken[last - INTERVAL : last]))


def fit(counts: dict, published: Published) -> predict.Rates:
    """The two rates with which the mean step and its growth with the window are as published, by Newton's method."""

    def misses(products: float, hiding: float) -> tuple[float, float]:
        found = milliseconds(counts, replace(predict.Rates(), products=products, hiding=hiding))
        return found.mean - published.mean, found.late - found.early - (published.late - published.early)

    products, hiding = 0.7, 1.5
    for _ in range(30):
        here = misses(products, hiding)
        if max(map(abs, here)) < 1e-6:
            break
        right, up = misses(products + 1e-4, hiding), misses(products, hiding + 1e-4)
        (a, b), (c, d) = [((right[i] - here[i]) / 1e-4, (up[i] - here[i]) / 1e-4) for i in range(2)]
        products -= (d * here[0] - b * here[1]) / (a * d - b * c)
        hiding -= (a * here[1] - c * here[0]) / (a * d - b * c)
    return replace(predict.Rates(), products=products, hiding=hiding)


def table() -> list[str]:
    """Published, predicted and error of each record, as lines of Markdown."""
    lines = [
        "| record | published ms per step | predicted | error | growth over the run, published and predicted |",
        "|---|---|---|---|---|",
    ]
    for record, published in PUBLISHED.items():
        found = milliseconds(counts_of(record), predict.Rates())
        growth = f"{published.late - published.early:.1f} and {found.late - found.early:.1f}"
        error = "fitted" if record == FITTED_ON else f"{found.mean / published.mean - 1:+.1%}"
        lines.append(f"| {record} | {published.mean:.1f} | {found.mean:.1f} | {error} | {growth} |")
    return lines


def errors() -> list[float]:
    """The relative errors of the records that nothing was fitted on."""
    return [
        milliseconds(counts_of(record), predict.Rates()).mean / published.mean - 1
        for record, published in PUBLISHED.items()
        if record != FITTED_ON
    ]


def in_one_line() -> str:
    found = errors()
    if not found:
        return "its error is not known: nothing published to compare with"
    return (
        f"error on {len(found)} public records that it was not fitted on: {min(found):+.1%} to {max(found):+.1%} "
        "(rehearsal/README.md)"
    )


def main(arguments: list[str]) -> int:
    try:
        if arguments[:1] == ["--keep"] and len(arguments) == 3:
            keep(arguments[1], Path(arguments[2]))
        elif arguments:
            raise ValueError("give nothing, or --keep NAME report.json")
        else:
            rates = fit(counts_of(FITTED_ON), PUBLISHED[FITTED_ON])
            print(f"fitted on {FITTED_ON}: products {rates.products:.4f}, hiding {rates.hiding:.4f}")
            print("\n".join(table()))
    except (OSError, ValueError) as error:
        print(f"calibration: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
