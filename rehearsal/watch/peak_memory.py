"""Who held the memory when it was fullest, from the caching allocator's own history.

The history is a list of events (alloc, free_requested, ...) with addresses, sizes, times and Python stacks. It may
have lost its beginning, so it is walked backwards from what is allocated at its end.
"""

import linecache
import os
import re

ALLOCATION = re.compile(r"empty_strided\w*\((\([^)]*\)),\s*\([^)]*\),\s*(?:dtype=)?torch\.(\w+)")
GRAPH = re.compile(r"# AOT ID: \['\d+_(\w+)'\]")


def blocks_at_peak(snapshot: dict, device: int) -> list[dict]:
    """The live blocks (addr, size, time_us, frames) at the moment of the highest sum of their sizes."""
    events = [e for e in snapshot["device_traces"][device] if e["action"] in ("alloc", "free_requested")]
    live_at_end = [
        {"addr": block["address"], "size": block["size"], "time_us": 0, "frames": block.get("frames", [])}
        for segment in snapshot["segments"]
        if segment["device"] == device
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]
    total = peak = sum(block["size"] for block in live_at_end)
    peak_index = len(events)
    for i in range(len(events) - 1, -1, -1):
        total += events[i]["size"] if events[i]["action"] == "free_requested" else -events[i]["size"]
        if total > peak:
            peak, peak_index = total, i
    live = {block["addr"]: block for block in live_at_end}
    for event in reversed(events[peak_index:]):
        if event["action"] == "free_requested":
            live[event["addr"]] = {**event, "time_us": 0, "frames": []}
        else:
            live.pop(event["addr"], None)
    # what is live at the peak was allocated before it: take time and stack from there
    allocated_at = {e["addr"]: e for e in events[:peak_index] if e["action"] == "alloc"}
    return [allocated_at.get(address, block) for address, block in live.items()]


def lifetimes(snapshot: dict, device: int) -> dict[tuple[int, int], int]:
    """(address, time of allocation) -> time of the free, for blocks that were freed."""
    ends, opened = {}, {}
    for event in snapshot["device_traces"][device]:
        if event["action"] == "alloc":
            opened[event["addr"]] = event["time_us"]
        elif event["action"] == "free_requested":
            ends[event["addr"], opened.pop(event["addr"], 0)] = event["time_us"]
    return ends


def owner_of(block: dict, freed_us: float, owners: list[dict]) -> str | None:
    """'parameters', 'gradients' or 'optimizer state' if one of them lived at the block's address in its time."""
    for note in owners:
        if block["time_us"] <= note["time_us"] <= freed_us and block["addr"] in note["addresses"]:
            return note["addresses"][block["addr"]]
    return None


def generated_by_inductor(filename: str) -> str | None:
    """'forward', 'backward' or 'inference' if the file is a graph that Inductor wrote."""
    if not re.fullmatch(r"c\w{40,}\.py", os.path.basename(filename)):
        return None
    head = "".join(linecache.getline(filename, line) for line in range(1, 6))
    found = GRAPH.search(head)
    return found[1] if found else "compiled"


def describe(frames: list[dict]) -> tuple[str, str]:
    """Where a block comes from, as (holder, detail): the graph and its shape, or the line of the script."""
    for frame in frames:
        graph = generated_by_inductor(frame["filename"])
        if graph:
            line = linecache.getline(frame["filename"], frame["line"]).strip()
            if "extern_kernels." in line:
                return "cuBLAS workspace", ""  # the product's result has its own line
            shape = ALLOCATION.search(line)
            return f"{graph} graph", f"{shape[1]} {shape[2]}" if shape else line[:80]
    for frame in frames:
        if "site-packages" not in frame["filename"] and os.path.isfile(frame["filename"]):
            line = linecache.getline(frame["filename"], frame["line"]).strip()
            return "script", f"{os.path.basename(frame['filename'])}:{frame['line']} {line[:80]}"
    if frames:
        return "torch", f"{os.path.basename(frames[0]['filename'])}:{frames[0]['line']} {frames[0]['name']}"
    return "autograd", "no Python frame: gradients on their way"


def holders_at_peak(snapshot: dict, device: int, owners: list[dict]) -> list[dict]:
    """[{holder, detail, blocks, bytes}], largest first."""
    freed = lifetimes(snapshot, device)
    groups: dict[tuple[str, str], dict] = {}
    for block in blocks_at_peak(snapshot, device):
        freed_us = freed.get((block["addr"], block["time_us"]), float("inf"))
        owner = owner_of(block, freed_us, owners)
        holder, detail = (owner, "") if owner else describe(block["frames"])
        group = groups.setdefault((holder, detail), {"holder": holder, "detail": detail, "blocks": 0, "bytes": 0})
        group["blocks"] += 1
        group["bytes"] += block["size"]
    return sorted(groups.values(), key=lambda group: -group["bytes"])
