"""How long a step would take: arithmetic on the counts of a rehearsal (see steps.py) and nothing else.

Every constant is a physical rate. Two of them are fitted, both on the public record of 2025-01-04 (SoftCap) alone:
the matrix products' share of the peak on its mean step, and how many warps it takes to hide the instructions' latency
on the growth of its step with the window. The others are the data sheet's, or are known for such cards. What the
predictions are worth is in README.md beside this file: published, predicted, error.
"""

import math
from collections import Counter
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import NamedTuple

from rehearsal.steps import AWAIT, BLOCK, RECORD

PARTS = (
    "matrix products",
    "attention forward",
    "attention backward",
    "head and loss",
    "other kernels",
    "optimizer",
    "collectives",
    "gaps",
)
GRAIN = 64  # tokens: the public records' windows grow by half a block or by a whole one


class Windows(NamedTuple):
    """Of the layers of a stage, in blocks: of a few, of most, and whether they end within their last block."""

    long: int
    short: int
    cut: bool = False


Window = int | Windows


@dataclass(frozen=True)
class Card:
    """Published peaks of one card, and of what connects it to the others."""

    name: str
    bfloat16_flops: float  # of the tensor cores, dense, summed in float32
    float8_flops: float
    float32_flops: float
    memory_bytes: float  # per second
    multiprocessors: int
    lanes: int  # threads for which a multiprocessor issues an instruction per clock
    threads: int  # that a multiprocessor holds
    shared_bytes: int  # of a multiprocessor
    clock: float  # per second, at which the peaks hold
    link_bytes: float  # per second and direction, to the other cards of the node
    cards_per_node: int = 8
    schedulers: int = 4  # of a multiprocessor
    registers: int = 65536  # of a multiprocessor
    network_bytes: float = 50e9  # per second and card between nodes: InfiniBand of 400 Gb/s
    host_bytes: float = 50e9  # per second, from and to the host


H100 = Card("H100 SXM", 989.4e12, 1978.9e12, 66.9e12, 3.35e12, 132, 128, 2048, 228 * 1024, 1.83e9, 450e9)
CARDS = {
    "H100": H100,
    "A100": Card(
        "A100 SXM 80GB", 312e12, 312e12, 19.5e12, 2.039e12, 108, 64, 2048, 164 * 1024, 1.41e9, 300e9, host_bytes=25e9
    ),
    "4090": Card(
        "RTX 4090", 165.2e12, 330.3e12, 82.6e12, 1.008e12, 128, 128, 1536, 100 * 1024, 2.52e9, 25e9, host_bytes=25e9
    ),
    "H200": replace(H100, name="H200 SXM", memory_bytes=4.8e12),
    "B200": Card("B200", 2250e12, 4500e12, 75e12, 8e12, 148, 128, 2048, 228 * 1024, 1.85e9, 900e9),
}


@dataclass(frozen=True)
class Rates:
    """What of the peaks is reached. The first two are fitted on SoftCap, see calibration.py."""

    products: float = 0.6589  # of the tensor cores' peak, in a large product that fills the card
    hiding: float = 1.1582  # warps of a scheduler with which it issues an instruction in every second clock
    memory: float = 0.90  # of the memory's peak, in a kernel that streams
    links: float = 0.80  # of a link's peak, in a large collective
    launch: float = 2.5e-6  # seconds between two kernels of a stream, their first and last blocks included
    collective: float = 20e-6  # seconds until a collective's data flows
    special: float = 1 / 8  # of the lanes that compute exponentials and roots
    tile: tuple[int, int] = (128, 256)  # of a matrix product's result, computed by one multiprocessor
    ramp: int = 64  # a product's inner dimension is as if longer by this: filling the pipeline, writing the result
    split: int = 1024  # inner dimension from which a product is shared by several multiprocessors


FITTED = Rates()


# ---- Documents and windows: how many pairs of blocks attention visits ------------------------------------------------


@dataclass(frozen=True)
class Documents:
    """FineWeb's documents in GPT-2 tokens, log-normal: mean and median as published for the speedrun's shards."""

    mean: float = 690.0
    median: float = 403.0
    longest: float = math.inf  # where a script cuts them

    def share_within(self, tokens: int) -> float:
        """The probability that this many tokens in a row are of one document."""
        if tokens <= 1:
            return 1.0
        return max(0.0, 1 - self.mean_up_to(tokens - 1) / self.mean_up_to(self.longest))

    def mean_up_to(self, longest: float) -> float:
        """Their mean length if they are cut at this one."""
        if longest == math.inf:
            return self.mean
        mu, sigma = math.log(self.median), math.sqrt(2 * math.log(self.mean / self.median))
        normal, beyond = NormalDist().cdf, (mu - math.log(longest)) / sigma
        return self.mean * (1 - normal(beyond + sigma)) + longest * normal(beyond)


FINEWEB = Documents()


def visible_blocks(window: int, documents: Documents = FINEWEB, cut: bool = False) -> tuple[float, float]:
    """Key blocks that a block of queries visits within a window of that many blocks, on average: masked and full.

    A block is visited if its last token and the queries' first are of one document, and is full if all tokens from
    its first to the queries' last are; but not the last of a window that cuts it token by token.
    """
    masked, full = 1.0, 0.0  # its own block, half of which is the future
    for distance in range(1, window):
        visited = documents.share_within((distance - 1) * BLOCK + 2)
        whole = 0.0 if cut and distance == window - 1 else documents.share_within((distance + 1) * BLOCK)
        masked, full = masked + visited - whole, full + whole
    return masked, full


# ---- Seconds of one item ---------------------------------------------------------------------------------------------


def product_seconds(item: dict, card: Card, rates: Rates) -> float:
    """A matrix product: its operations at the reachable rate, slower where the card is not filled or k is short."""
    m, n, k, batches = item["m"], item["n"], item["k"], item["batches"]
    peak = {"float8": card.float8_flops, "float32": card.float32_flops}.get(item["dtype"], card.bfloat16_flops)
    size = {"float8": 1, "float32": 4}.get(item["dtype"], 2)
    tall, wide = rates.tile
    tiles = min(math.ceil(m / tall) * math.ceil(n / wide), math.ceil(m / wide) * math.ceil(n / tall)) * batches
    moved = size * batches * (m * k + k * n + m * n)

    def shared_by(parts: int) -> float:
        """Seconds if this many multiprocessors share each tile's sum, which they then have to add up in memory."""
        waves = math.ceil(tiles * parts / card.multiprocessors)
        operations = waves * 2 * tall * wide * (k / parts + rates.ramp)
        sums = 8 * batches * m * n * parts if parts > 1 else 0
        return max(
            operations * card.multiprocessors / (peak * rates.products),
            (moved + sums) / (card.memory_bytes * rates.memory),
        )

    return min(map(shared_by, range(1, max(1, min(k // rates.split, card.multiprocessors)) + 1)))


def issue_rate(item: dict, card: Card, rates: Rates) -> float:
    """Instructions per second, of all threads: the more warps are at hand, the less a scheduler waits for one."""
    warps = item.get("warps") or 8
    threads = 32 * warps
    blocks = min(
        32,
        card.threads // threads,
        card.registers // (max(item.get("registers") or 0, 32) * threads),
        card.shared_bytes // ((item.get("shared") or 0) + 1024),
    )
    at_hand = max(blocks, 1) * warps / card.schedulers
    return card.multiprocessors * card.lanes * card.clock * at_hand / (at_hand + rates.hiding)


def attention_flops(item: dict) -> float:
    """Of one pair of blocks: two products forward; backward seven, as two of its five are computed twice."""
    return (14 if item["backward"] else 4) * BLOCK * BLOCK * item["head_dim"]


def blocks_visited(item: dict, window: Window, documents: Documents) -> tuple[float, float]:
    """Masked and full blocks for each block of queries. Of a single window, most layers have half of it where a script
    has two masks."""
    found = window if isinstance(window, Windows) else Windows(window, max(1, window // 2))
    return visible_blocks(found.short if item.get("short") else found.long, documents, found.cut)


def attention_seconds(item: dict, window: Window, card: Card, rates: Rates, documents: Documents = FINEWEB) -> float:
    """FlexAttention: each visited pair of blocks takes its products and its other instructions, one after the other."""
    masked, full = blocks_visited(item, window, documents)
    if not item["full_blocks"]:
        masked, full = masked + full, 0.0
    queries = item["heads"] * item["tokens"] / BLOCK
    products = (masked + full) * attention_flops(item) / (card.bfloat16_flops * rates.products)
    others = (masked * item["instructions"][0] + full * item["instructions"][1]) / issue_rate(item, card, rates)
    return max(queries * (products + others), item["bytes"] / (card.memory_bytes * rates.memory))


def kernel_seconds(item: dict, card: Card, rates: Rates) -> float:
    """Any other kernel: what takes longest of its bytes, its instructions and its special functions."""
    issued = issue_rate(item, card, rates)
    return max(
        item["bytes"] / (card.memory_bytes * rates.memory),
        item["instructions"] / issued,
        item["special"] / (issued * rates.special),
    )


def collective_seconds(item: dict, card: Card, rates: Rates, ranks: int) -> float:
    """In a ring each card sends on what it has received; the slowest link of the ring sets the pace."""
    if ranks < 2:
        return 0.0
    link = card.link_bytes if ranks <= card.cards_per_node else min(card.network_bytes, card.link_bytes)
    times = {
        "AllReduce": 2 * (ranks - 1) / ranks,
        "AllGather": ranks - 1,
        "ReduceScatter": ranks - 1,
        "AllToAll": ranks - 1,
    }.get(item["name"], 1)
    return rates.collective + times * item["bytes"] / (link * rates.links)


def seconds(
    item: dict, window: Window, card: Card, rates: Rates, ranks: int | None = None, documents: Documents = FINEWEB
) -> float:
    match item["kind"]:
        case "product":
            return product_seconds(item, card, rates)
        case "attention":
            return attention_seconds(item, window, card, rates, documents)
        case "kernel":
            return kernel_seconds(item, card, rates)
        case "copy":  # on the card it is read and written
            return (
                item["bytes"] / card.host_bytes
                if item["host"]
                else 2 * item["bytes"] / (card.memory_bytes * rates.memory)
            )
        case "collective":
            return collective_seconds(item, card, rates, item["ranks"] if ranks is None else ranks)
    raise ValueError(f"no such kind: {item['kind']}")


# ---- One step: streams that wait for each other ----------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """Something on a stream, from when to when; a wait has no item."""

    item: dict | None
    stream: int
    start: float
    end: float


def timeline(
    counts: dict, window: Window, card: Card = H100, rates: Rates = FITTED, ranks: int | None = None
) -> list[Span]:
    """Runs the order of the counted steps on their streams: work follows work, and an awaited event holds a stream
    back."""
    documents = documents_of(counts)
    taken = [seconds(item, window, card, rates, ranks, documents) for item in counts["items"]]
    now: Counter = Counter()
    recorded: dict[int, float] = {}
    spans = []
    for entry in counts["order"]:
        if entry[0] == RECORD:
            recorded[entry[1]] = now[entry[2]]
        elif entry[0] == AWAIT:
            _, stream, event = entry
            if recorded.get(event, 0) > now[stream]:
                spans.append(Span(None, stream, now[stream], recorded[event]))
                now[stream] = recorded[event]
        else:
            index, stream = entry
            item = counts["items"][index]
            start = now[stream] + (0 if item["kind"] == "collective" else rates.launch * item.get("launches", 1))
            now[stream] = start + taken[index]
            spans.append(Span(item, stream, start, now[stream]))
    return spans


def step_seconds(
    counts: dict, window: Window, card: Card = H100, rates: Rates = FITTED, ranks: int | None = None
) -> dict[str, float]:
    """The seconds of a step by part; their sum is the step.

    Work on the stream that computes counts as its part, the spaces between as gaps. Where that stream waits for
    another, or another ends after it, the time belongs to the collectives: they are not hidden.
    """
    spans = timeline(counts, window, card, rates, ranks)
    parts = dict.fromkeys(PARTS, 0.0)
    if not spans:
        return parts
    busy: Counter = Counter()
    for span in spans:
        if span.item and span.item["kind"] != "collective":
            busy[span.stream] += span.end - span.start
    main = max(busy, key=busy.get, default=0)
    ended = 0.0
    for span in (span for span in spans if span.stream == main):
        parts["collectives" if span.item is None else span.item["part"]] += span.end - span.start
        parts["gaps"] += span.start - ended
        ended = span.end
    parts["collectives"] += max(span.end for span in spans) - ended
    return {part: taken / counts.get("counted_steps", 1) for part, taken in parts.items()}


# ---- The run: windows, and the whole prediction ----------------------------------------------------------------------


def window_at(progress: float, counts: dict) -> int:
    """Blocks within the window: settings give it in tokens, what was compiled says how it is cut.

    A mask that is worked out for each pair of tokens lets a query reach into one block more. Where the mask of a
    block reads the window, the list of blocks is rounded up to hold it; else blocks are all there is, rounded down.
    """
    first, last = counts["window_tokens"]
    tokens = max(int((1 - progress) * first + progress * last) // GRAIN * GRAIN, 1)
    if counts["mask"] == "tokens":
        return 1 + math.ceil((tokens - 1) / BLOCK)
    if counts["mask"] == "window":
        return math.ceil(tokens / BLOCK)
    return max(1, tokens // BLOCK)


def windows_of(counts: dict) -> list[Window]:
    """The window of each step of a stage, in blocks; never more than a sequence has.

    Windows of a table of stages are a pair for all its steps. Where the mask reads them, they are exact in tokens: then
    a query reaches into one block more.
    """
    lengths = [item["tokens"] // BLOCK for item in counts["items"] if item["kind"] == "attention"]
    steps, most = counts["steps"], max(lengths, default=1)
    if "window_blocks" in counts:
        cut = counts["mask"] != "blocks"
        short, long = (min(window + cut, most) for window in counts["window_blocks"])
        return [Windows(long, short, cut)] * steps
    return [min(window_at(step / steps, counts), most) for step in range(steps)]


def mean_window(counts: dict) -> Window:
    windows = windows_of(counts)
    return windows[0] if isinstance(windows[0], Windows) else round(sum(windows) / len(windows))


def stages_in(counts: dict) -> list[dict]:
    """The counts of each stage of a run: those of a run without stages are its only one."""
    return counts.get("stages") or [counts]


def documents_of(counts: dict) -> Documents:
    return replace(FINEWEB, longest=counts.get("longest_document") or math.inf)


def mean_seconds(counts: dict, card: Card = H100, rates: Rates = FITTED, ranks: int | None = None) -> dict[str, float]:
    """The seconds of a step by part, over all windows and stages of the run."""
    total, steps = dict.fromkeys(PARTS, 0.0), 0
    for stage in stages_in(counts):
        for window, times in Counter(windows_of(stage)).items():
            taken = step_seconds(stage, window, card, rates, ranks)
            total, steps = {part: total[part] + times * taken[part] for part in PARTS}, steps + times
    return {part: total[part] / steps for part in PARTS}


def predict(counts: dict, card: Card = H100, rates: Rates = FITTED, ranks: int | None = None) -> dict:
    """Milliseconds per step by part at the first, middle and last step and over the run, and what follows. For a run in
    stages also those of each."""
    every = [(stage, window) for stage in stages_in(counts) for window in windows_of(stage)]
    steps, mean = len(every), mean_seconds(counts, card, rates, ranks)

    def column(window: str | float, parts: dict) -> dict:
        return {"window": window, "ms": 1e3 * sum(parts.values()), "parts_ms": {p: 1e3 * parts[p] for p in PARTS}}

    def at(stage: dict, window: Window) -> dict:
        return column(window, step_seconds(stage, window, card, rates, ranks))

    def stage_column(stage: dict) -> dict:
        return at(stage, windows_of(stage)[0]) | {"steps": stage["steps"], "tokens": stage["tokens"]}

    step = sum(mean.values())
    cards = counts["ranks"] if ranks is None else ranks
    useful = sum(stage["steps"] * model_flops(stage) for stage in stages_in(counts)) / steps * counts["ranks"]
    tokens = sum(stage["steps"] * stage["tokens"] for stage in stages_in(counts)) / steps
    longest = [window.long if isinstance(window, Windows) else window for _, window in every]
    return {
        "card": card.name,
        "cards": cards,
        "steps": steps,
        "first": at(*every[0]),
        "middle": at(*every[steps // 2]),
        "last": at(*every[-1]),
        "stages": [stage_column(stage) for stage in counts.get("stages", [])],
        "run": column(round(sum(longest) / steps, 1), mean),
        "minutes": step * steps / 60,
        "tokens_per_second": tokens / step,
        "flop_utilisation": useful / (step * cards * card.bfloat16_flops),
    }


def model_flops(counts: dict) -> float:
    """Operations of the model's own products in one rank's step, at the mean window; attention's backward counted as
    five products."""
    items, order, window = counts["items"], Counter(entry[0] for entry in counts["order"]), mean_window(counts)
    total = 0.0
    for index, item in enumerate(items):
        if item["kind"] == "product" and item["part"] != "optimizer":
            total += order[index] * 2 * item["batches"] * item["m"] * item["n"] * item["k"]
        elif item["kind"] == "attention":
            pairs = sum(blocks_visited(item, window, documents_of(counts)))
            pair = (10 if item["backward"] else 4) * BLOCK * BLOCK * item["head_dim"]
            total += order[index] * pairs * pair * item["heads"] * item["tokens"] / BLOCK
    return total / counts.get("counted_steps", 1)
