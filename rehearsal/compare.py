"""Two rehearsals side by side: what changed in kernels, bytes, memory, collectives and predicted time."""

from collections import Counter
from collections.abc import Iterator

from rehearsal import predict
from rehearsal.predict import PARTS

GIB = 2**30
LISTED = 12  # kernels and products that differ, before the rest is summed up
NOISE_MS = 0.005


def of_reports(ours: dict, other: dict) -> dict:
    """The figures of both and their differences, other less ours; the predicted time by part and by item."""
    figures = {
        name: (figure(ours), figure(other))
        for name, figure in (
            ("peak memory, GiB", lambda found: peak(found) / GIB),
            ("launches per step", lambda found: work(found)["launches"]),
            ("GiB read and written by kernels", lambda found: work(found)["bytes"] / GIB),
            ("TFLOP in matrix products", lambda found: work(found)["flops"] / 1e12),
            ("billion instructions of kernels", lambda found: work(found)["instructions"] / 1e9),
            ("collectives per step", lambda found: found["collectives"]["per_step"]),
            ("GiB in collectives", lambda found: found["collectives"]["bytes_per_step"] / GIB),
            ("kernels that spill", lambda found: sum(kernel["runs"] for kernel in found["spilling_kernels"])),
        )
    }
    parts = {part: tuple(found["prediction"]["run"]["parts_ms"][part] for found in (ours, other)) for part in PARTS}
    parts["step"] = tuple(found["prediction"]["run"]["ms"] for found in (ours, other))
    for name in ("first", "last"):
        parts[f"step, {name} window"] = tuple(found["prediction"][name]["ms"] for found in (ours, other))
    return {
        "ours": named(ours),
        "other": named(other),
        "figures": {name: {"ours": a, "other": b} for name, (a, b) in figures.items()},
        "predicted_ms": {name: {"ours": a, "other": b} for name, (a, b) in parts.items()},
        "items": changed_items(ours, other),
    }


def named(found: dict) -> str:
    given = " ".join(f"--{name} {value}" for name, value in found.get("given", {}).items())
    return f"{found['script']} {given}".strip()


def peak(found: dict) -> int:
    return max((rank["peak_allocated_bytes"] for rank in found["memory"]["per_rank"].values()), default=0)


def work(found: dict) -> Counter:
    """What rank 0 does in a step, summed up; in a run with stages, on average."""
    total: Counter = Counter()
    for item, times in in_a_step(found["step"]):
        total["launches"] += times * item.get("launches", 1)
        if item["kind"] == "product":
            total["flops"] += times * 2 * item["m"] * item["n"] * item["k"] * item["batches"]
        elif item["kind"] == "kernel":
            total["bytes"] += times * item["bytes"]
            total["instructions"] += times * item["instructions"]
    return total


def in_a_step(counts: dict) -> Iterator[tuple[dict, float]]:
    """Every item, and how often it occurs in a step of the run, on average."""
    stages = predict.stages_in(counts)
    steps = sum(stage["steps"] for stage in stages)
    for stage in stages:
        share = stage["steps"] / steps / stage.get("counted_steps", 1)
        for index, times in Counter(entry[0] for entry in stage["order"] if entry[0] >= 0).items():
            yield stage["items"][index], times * share


def told(item: dict) -> str:
    """What an item is called, the same in both reports if it does the same."""
    match item["kind"]:
        case "product":
            return f"product {item['m']} x {item['n']} x {item['k']} {item['dtype']}"
        case "attention":
            return f"{item['part']}, {item['tokens']} tokens, {item['heads']} heads"
        case "collective":
            return f"{item['name']} of {item['bytes'] / 2**20:.1f} MiB"
        case "copy":
            return "copies"
    return item["name"].rstrip("0123456789").rstrip("_")  # Inductor's number of it in its graph


def milliseconds_by_item(found: dict) -> Counter:
    """At the mean window of each stage, on average over the run."""
    taken: Counter = Counter()
    stages = predict.stages_in(found["step"])
    steps = sum(stage["steps"] for stage in stages)
    for stage in stages:
        share = 1e3 * stage["steps"] / steps / stage.get("counted_steps", 1)
        for span in predict.timeline(stage, predict.mean_window(stage)):
            if span.item:
                taken[told(span.item)] += share * (span.end - span.start)
    return taken


def changed_items(ours: dict, other: dict) -> list[dict]:
    """What takes longer or shorter, the largest difference first; collectives whether hidden or not."""
    before, after = milliseconds_by_item(ours), milliseconds_by_item(other)
    changed = [
        {"item": name, "ours": before[name], "other": after[name]}
        for name in dict.fromkeys([*before, *after])
        if abs(after[name] - before[name]) > NOISE_MS
    ]
    return sorted(changed, key=lambda entry: -abs(entry["other"] - entry["ours"]))


def as_text(comparison: dict, error: str) -> str:
    def row(name: str, a: float, b: float) -> str:
        change = f"{b - a:+10.2f}" if abs(b - a) >= 0.005 else f"{'same':>10}"
        return f"    {name[:58]:<58}{a:>10.2f}{b:>10.2f}{change}"

    lines = [f"A: {comparison['ours']}", f"B: {comparison['other']}", ""]
    lines.append(f"    {'rehearsed, of rank 0 in one step':<58}{'A':>10}{'B':>10}{'B - A':>10}")
    lines += [row(name, **renamed(pair)) for name, pair in comparison["figures"].items()]
    lines += ["", f"    {'predicted milliseconds per step, over the run':<58}{'A':>10}{'B':>10}{'B - A':>10}"]
    lines += [row(name, **renamed(pair)) for name, pair in comparison["predicted_ms"].items()]
    changed = comparison["items"]
    if changed:
        lines += ["", f"    {'predicted milliseconds of what changed most':<58}{'A':>10}{'B':>10}{'B - A':>10}"]
        lines += [row(entry["item"], entry["ours"], entry["other"]) for entry in changed[:LISTED]]
        if rest := changed[LISTED:]:
            lines.append(row(f"and {len(rest)} more", sum(e["ours"] for e in rest), sum(e["other"] for e in rest)))
    return "\n".join([*lines, "", f"    {error}"])


def renamed(pair: dict) -> dict:
    return {"a": pair["ours"], "b": pair["other"]}
