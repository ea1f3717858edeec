"""One training step as counts: what the device was asked to do, in order, from the trace of a rehearsal.

The counts are plain values that go into a report and can be kept:

    {"items": [{"kind": ..., "part": ..., ...}, ...],     every different product, kernel, operation, copy, collective
     "order": [[item, stream], ..., [-1, event, stream], [-2, stream, event], ...],
     "mask": "blocks" | "window" | "tokens",               how attention's window is cut
     "counted_steps": 1}                                   or more, if only several steps together repeat

-1 records an event on a stream and -2 makes a stream wait for one. Kinds and what they carry:

    product      m, n, k, batches, dtype
    attention    backward, tokens, heads, head_dim, full_blocks, bytes, instructions (of a pair of blocks: masked, full)
                 short: of two masks in one forward pass it has that of most layers
    kernel       name, bytes, instructions, special (of those the slow ones: exponentials, roots), launches
                 both with the warps, registers of a thread and shared bytes of a block, where they were compiled
    copy         bytes, and whether they cross from or to the host
    collective   name, bytes of this rank's message, ranks
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from rehearsal.readings import Stage, repeating

BLOCK = 128  # tokens of a block of FlexAttention's mask
RECORD, AWAIT = -1, -2
WORK = {"launch", "product", "copy", "fill", "collective"}
FROM_HOST, TO_HOST = 1, 2  # cudaMemcpyKind
LABEL = re.compile(r"^(?:\$L__(BB\d+_\d+):|// %bb\.\d+:)")  # of a block of code that is jumped to, or of another
LOOP = re.compile(r"//.*(?:=>This (?:Inner )?Loop Header|in Loop: Header=(BB\d+_\d+))")
INSTRUCTION = re.compile(r"^\s+(?:@!?%p\d+\s+)?([a-z]\w*)((?:\.[\w:]+)*)\s")
SPECIAL = {"ex2", "lg2", "rcp", "sqrt", "rsqrt", "sin", "cos", "tanh", "div"}
FREE = {"mov", "ret", "bra"}  # ptxas renames registers instead of moving them; branches are few
BEYOND_100_000, END_OF_REDUCTION = "__cudart_i2opi_f", "__internal_trig_reduction_kernel.exit"
WIDE = (".s64", ".u64", ".b64")  # take two instructions of 32 bits each


# ---- Kernels: the instructions of their code -------------------------------------------------------------------------


def count_instructions(ptx: str) -> tuple[Counter, list[Counter]]:
    """All instructions and the special ones of a kernel's PTX: outside of its loops, and in one turn of each loop.

    LLVM says beside each block of code which loop it belongs to. Both sides of a branch are counted, since the
    threads of a warp rarely agree; but not what sine and cosine do with arguments above 100,000.
    """
    loops: dict[str, Counter] = {}
    outside = here = Counter()
    label, skipping = "", False
    for line in ptx.splitlines():
        skipping = (skipping or (BEYOND_100_000 in line and "mov" in line)) and END_OF_REDUCTION not in line
        if skipping:
            continue
        if found := LABEL.match(line):
            label, here = found[1] or "", outside
        if found := LOOP.search(line):
            here = loops.setdefault(found[1] or label, Counter())
        elif found := INSTRUCTION.match(line):
            name, suffixes = found.groups()
            if name not in FREE:
                here["all"] += 2 if suffixes.endswith(WIDE) and name not in ("ld", "st", "cvt", "cp") else 1
            here["special"] += name in SPECIAL
    order = sorted(loops, key=lambda name: int(name.rpartition("_")[2]))
    return outside, [loops[name] for name in order]


def turns_of(kernel: dict) -> int:
    """How often a reduction's loops run: each turn takes a block of the reduced dimension."""
    block = kernel["constants"].get("R0_BLOCK") or kernel["constants"].get("RBLOCK")
    return -(-kernel["numels"][-1] // block) if block and kernel["numels"] else 1


def kernel_item(kernel: dict, blocks: int, ptx: str) -> dict:
    outside, loops = count_instructions(ptx)
    threads = blocks * 32 * kernel["warps"]
    counts = {
        kind: threads * (outside[kind] + turns_of(kernel) * sum(loop[kind] for loop in loops))
        for kind in ("all", "special")
    }
    return {
        "kind": "kernel",
        "name": kernel["name"],
        "bytes": kernel["bytes"],
        "instructions": counts["all"],
        "special": counts["special"],
        "elements": math.prod(kernel["numels"]),
        "launches": 1,
        **resources(kernel),
    }


def resources(kernel: dict) -> dict:
    return {name: kernel.get(name) or 0 for name in ("warps", "registers", "shared")}


def attention_item(kernel: dict, ptx: str) -> dict:
    """FlexAttention's kernels have one loop over the masked blocks and one over the full ones; its backward has a
    pair for the queries' gradient and a pair for that of keys and values."""
    sizes, backward = kernel["template"], "BLOCK_M1" in kernel["template"]  # names hold what else was fused in
    loops = [loop["all"] for loop in count_instructions(ptx)[1]]
    tiles = (
        [sizes["BLOCK_M2"] * sizes["BLOCK_N2"], sizes["BLOCK_M1"] * sizes["BLOCK_N1"]]
        if backward
        else [sizes["BLOCK_M"] * sizes["BLOCK_N"]]
    )
    full_blocks = bool(sizes.get("HAS_FULL_BLOCKS"))
    expected = len(tiles) * (2 if full_blocks else 1)
    if len(loops) != expected:
        raise ValueError(f"{kernel['name']} has {len(loops)} loops, not {expected}")
    per_pair = [
        32 * kernel["warps"] * loop * (BLOCK * BLOCK // tile)
        for loop, tile in zip(loops, [tile for tile in tiles for _ in range(expected // len(tiles))], strict=True)
    ]
    masked, full = (sum(per_pair[0::2]), sum(per_pair[1::2])) if full_blocks else (sum(per_pair), sum(per_pair))
    shapes = [shape for shape, _ in kernel["shapes"]]
    lengths = [max(shape) for shape in shapes if len(shape) >= 3 and shape[-1] == sizes["QK_HEAD_DIM"]]
    return {
        "kind": "attention",
        "backward": backward,
        "tokens": lengths[0],
        "heads": kernel["numels"][-1],
        "head_dim": sizes["QK_HEAD_DIM"],
        "full_blocks": full_blocks,
        "reads_window": any(shape == [] for shape in shapes),
        "instructions": [masked, full],
        "bytes": kernel["bytes"],
        **resources(kernel),
    }


# ---- Steps: cutting the trace, and the typical one -------------------------------------------------------------------


def with_updates(lines: list[str]) -> list[str]:
    """Where a script's own optimizer begins: at the end of the last backward pass before it ends."""
    lines, last = list(lines), None
    for number, line in enumerate(lines):
        if line == "Backward ends":
            last = number
        elif line.startswith("Optimizer ") and last is not None:
            lines[last], last = "Optimizer 0 begins", None
    return lines


def cut(lines: list[str]) -> list[list[str]]:
    """The lines of each step: from the end of the one before, or from the last wait, to its last optimizer's end.

    Optimizers are numbered in the order in which a step uses them, so one that is not after the last begins a step.
    """
    steps, last, begun, ended = [], None, 0, 0
    for number, line in enumerate(lines):
        words = line.split()
        if words[:1] == ["Optimizer"]:
            index = int(words[1])
            if words[2] == "begins":
                if last is not None and index <= last:
                    steps.append(lines[begun:ended])
                    waits = [at for at in range(ended, number) if lines[at] == "Wait"]
                    begun = waits[-1] if waits else ended
                last = index
            else:
                ended = number + 1
    return [*steps, lines[begun:ended]] if last is not None else []


def typical(steps: list[list[str]]) -> list[list[str]]:
    """The steps of one period, before which the script has not waited: a validation may follow a wait. Else it is the
    step that occurs most often, and is shortest. The first one is incomplete."""
    work = [sum(line.split()[0] in WORK for line in step) for step in steps]
    if calm := repeating(work, [number > 0 and step[:1] != ["Wait"] for number, step in enumerate(steps)]):
        return [steps[number] for number in calm]
    whole = steps[1:] or steps
    lengths = Counter(len(step) for step in whole)
    return [next(step for step in whole if len(step) == max(lengths, key=lambda length: (lengths[length], -length)))]


def short_masks(lines: list[str], kernels: dict[int, dict]) -> list[str]:
    """Marks attention with the mask of most layers as 'short', if the layers of a forward or backward pass have two."""
    lines, passes = list(lines), [[]]  # numbers of the lines that launch attention
    backward = None
    for number, line in enumerate(lines):
        words = line.split()
        if words[0] == "inductor" and words[2:] not in ([], ["0"]):
            if backward != (backward := "BLOCK_M1" in kernels[int(words[1])]["template"]):
                passes.append([])
            passes[-1].append(number)
    for numbers in passes:
        masks = Counter(lines[number].split()[2] for number in numbers)
        for number in numbers if len(masks) > 1 else []:
            _, kernel, mask = lines[number].split()
            lines[number] = f"inductor {kernel} {'short' if mask == masks.most_common(1)[0][0] else 'long'}"
    return lines


# ---- Counts: the lines of a step as items and their order ------------------------------------------------------------


class Counting:
    def __init__(self, kernels: dict[int, dict], ptx_of: Callable[[dict], str], vocabulary: set[int]):
        self.kernels, self.ptx_of, self.vocabulary = kernels, ptx_of, vocabulary
        self.items: dict[str, int] = {}
        self.order: list[list[int]] = []
        self.names: dict[str, int] = {}  # of streams and events: small numbers for opaque ones
        self.operation: dict | None = None  # what torch says of the launches that follow
        self.in_optimizer = False

    def number(self, opaque: str) -> int:
        return self.names.setdefault(opaque, len(self.names))

    def add(self, item: dict, part: str, stream: str) -> None:
        item = {**item, "part": "optimizer" if self.in_optimizer and item["kind"] != "collective" else part}
        key = json.dumps(item, sort_keys=True)
        self.order.append([self.items.setdefault(key, len(self.items)), self.number("stream " + stream)])

    def read(self, line: str) -> None:
        words = line.split()
        match words[0]:
            case "Optimizer":
                self.in_optimizer = words[2] == "begins"
            case "inductor":
                self.operation = {"kernel": self.kernels[int(words[1])], "short": words[2:] == ["short"]}
            case "op":
                self.operation = {"name": words[1], "bytes": int(words[2]) + int(words[3]), "launched": None}
            case "made":  # said after the launches of the last operation: what it has written
                if self.operation and (at := self.operation.get("launched")) is not None:
                    self.add_bytes(at, int(words[1]))
            case "launch":
                self.read_launch(words[1], int(words[2]), words[4])
            case "product":
                m, n, k, batches = map(int, words[1:5])
                part = "head and loss" if self.vocabulary & {m, n, k} else "matrix products"
                self.add(
                    {"kind": "product", "m": m, "n": n, "k": k, "batches": batches, "dtype": words[5]}, part, words[6]
                )
            case "copy":
                from_or_to_host = int(words[2]) in (FROM_HOST, TO_HOST)
                self.add({"kind": "copy", "bytes": int(words[1]), "host": from_or_to_host}, "other kernels", words[3])
            case "fill":
                self.add(
                    {
                        "kind": "kernel",
                        "name": "fill",
                        "bytes": int(words[1]),
                        "instructions": 0,
                        "special": 0,
                        "launches": 1,
                    },
                    "other kernels",
                    words[2],
                )
            case "collective":
                self.add(
                    {"kind": "collective", "name": words[1], "bytes": int(words[2]), "ranks": int(words[3])},
                    "collectives",
                    words[4],
                )
            case "record":
                self.order.append([RECORD, self.number("event " + words[1]), self.number("stream " + words[2])])
            case "await":
                self.order.append([AWAIT, self.number("stream " + words[1]), self.number("event " + words[2])])

    def read_launch(self, name: str, blocks: int, stream: str) -> None:
        operation = self.operation
        if operation and "kernel" in operation:
            kernel, self.operation = operation["kernel"], None
            ptx = self.ptx_of(kernel)
            if "flex_attention" in name and kernel["template"]:
                item = attention_item(kernel, ptx) | {"short": operation["short"]}
                self.add(item, "attention backward" if item["backward"] else "attention forward", stream)
            else:
                item = kernel_item(kernel, blocks, ptx)
                shapes = [shape for shape, _ in kernel["shapes"]]
                of_head = any(len(shape) >= 2 and self.vocabulary & set(shape[-1:]) for shape in shapes)
                self.add(item, "head and loss" if of_head else "other kernels", stream)
        elif operation and operation["launched"] is not None:  # one operation may launch several kernels
            self.change(operation["launched"], lambda item: item.update(launches=item["launches"] + 1))
        else:
            told = operation or {"name": "unknown", "bytes": 0}
            self.add(
                {
                    "kind": "kernel",
                    "name": told["name"],
                    "bytes": told["bytes"],
                    "instructions": 0,
                    "special": 0,
                    "launches": 1,
                },
                "other kernels",
                stream,
            )
            if operation:
                operation["launched"] = len(self.order) - 1

    def add_bytes(self, at: int, count: int) -> None:
        self.change(at, lambda item: item.update(bytes=item["bytes"] + count))

    def change(self, at: int, how: Callable[[dict], None]) -> None:
        item = json.loads(list(self.items)[self.order[at][0]])
        how(item)
        self.order[at][0] = self.items.setdefault(json.dumps(item, sort_keys=True), len(self.items))

    def counts(self) -> dict:
        keys, order = list(self.items), needed_events(self.order)
        used = sorted({entry[0] for entry in order if entry[0] >= 0})
        items = [json.loads(keys[index]) for index in used]
        return {"items": items, "order": numbered(order, used), "mask": mask_of(items)}


def numbered(order: list[list[int]], used: list[int]) -> list[list[int]]:
    """Items, streams and events by the order in which they come: the same in each rehearsal of a script."""
    items = {old: new for new, old in enumerate(used)}
    streams: dict[int, int] = {}
    events: dict[int, int] = {}
    renumbered, recorded = [], 0
    for entry in order:
        if entry[0] == RECORD:
            _, event, stream = entry
            events[event] = recorded
            renumbered.append([RECORD, recorded, streams.setdefault(stream, len(streams))])
            recorded += 1  # a handle that is recorded again is another event
        elif entry[0] == AWAIT:
            _, stream, event = entry
            renumbered.append([AWAIT, streams.setdefault(stream, len(streams)), events[event]])
        else:
            renumbered.append([items[entry[0]], streams.setdefault(entry[1], len(streams))])
    return renumbered


def needed_events(order: list[list[int]]) -> list[list[int]]:
    """Without the events for which no other stream waits: torch records many to know when memory is free."""
    recorded: dict[int, tuple[int, int]] = {}  # event: where it was last recorded, on which stream
    needed = set()
    for at, entry in enumerate(order):
        if entry[0] == RECORD:
            recorded[entry[1]] = (at, entry[2])
        elif entry[0] == AWAIT and entry[2] in recorded:
            where, stream = recorded[entry[2]]
            if stream != entry[1]:
                needed |= {where, at}
    return [entry for at, entry in enumerate(order) if entry[0] >= 0 or at in needed]


def mask_of(items: list[dict]) -> str:
    """How the window is cut: worked out for each pair of 'tokens', read by each block's mask, or in 'blocks' only."""
    attention = [item for item in items if item["kind"] == "attention"]
    tokens = max((item["tokens"] for item in attention), default=0)
    if tokens and any(item.get("elements") and item["elements"] % tokens**2 == 0 for item in items):
        return "tokens"
    return "window" if any(item["reads_window"] for item in attention) else "blocks"


def kernels_in(trace: str) -> dict[int, dict]:
    """What the trace says of each kernel that Inductor compiled, by its number."""
    described = (line.split(" ", 2) for line in trace.splitlines() if line.startswith("kernel "))
    return {int(number): json.loads(text) for _, number, text in described}


def count(trace: str, cache: Path, vocabulary: set[int], stages: list[Stage]) -> list[dict]:
    """The counts of typical steps of one rank's trace: of each stage, or of the run if it has none. Else nothing."""
    lines, kernels = trace.splitlines(), kernels_in(trace)
    ptx = {}
    for kernel in kernels.values():
        compiled = cache / "triton" / str(kernel["cache_hash"])
        for path in compiled.glob("*.ptx"):
            ptx[kernel["cache_hash"]] = path.read_text()
            kernel["shared"] = json.loads(path.with_suffix(".json").read_text()).get("shared", 0)

    def counted(steps: list[list[str]]) -> dict:
        counting = Counting(kernels, lambda kernel: ptx.get(kernel["cache_hash"], ""), vocabulary)
        for line in (line for step in steps for line in short_masks(step, kernels)):
            counting.read(line)
        return counting.counts() | {"counted_steps": len(steps)}

    steps = cut(with_updates([line for line in lines if not line.startswith("kernel ")]))
    if not stages:
        return [counted(typical(steps))] if steps else []
    before = len(steps) - stages[-1].first_step - stages[-1].steps  # of the warm-up
    parts = [steps[max(0, before + s.first_step) : max(0, before + s.first_step + s.steps)] for s in stages]
    return [counted(typical(part)) for part in parts] if all(parts) else []


def vocabulary_of(settings: dict) -> set[int]:
    """The sizes by which the head's tensors are known: the vocabulary, and padded to a multiple of 128."""
    size = int(settings.get("vocab_size") or 0)
    return {size, -(-size // BLOCK) * BLOCK} - {0}
