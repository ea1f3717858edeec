"""The same step on other cards and on other numbers of them: extrapolation, from the counts of one rehearsal.

Nothing here has been compared with a measurement. The kernels are those compiled for the rehearsed card, the rates
those fitted on H100s. The batch is kept: fewer cards take more sequences one after the other, more cards take a part of
a sequence each.
"""

from rehearsal import predict
from rehearsal.predict import CARDS, FITTED, H100, PARTS, Card, Rates

NUMBERS = (1, 2, 4, 8, 16, 64)


def tables(counts: dict) -> dict:
    """Both tables; that of numbers only from ranks with one sequence each, whose collectives are known."""

    def one_each(stage: dict) -> bool:
        return counts["ranks"] > 1 and counts["ranks"] * tokens_in(stage) == stage["tokens"]

    numbers = on_other_numbers(counts) if all(map(one_each, predict.stages_in(counts))) else {}
    return {"cards_ms": on_other_cards(counts), "numbers_ms": {str(number): ms for number, ms in numbers.items()}}


def tokens_in(counts: dict) -> int:
    """The tokens of a forward pass."""
    return max((item["tokens"] for item in counts["items"] if item["kind"] == "attention"), default=0)


def on_other_cards(counts: dict) -> dict[str, float]:
    """Milliseconds per step over the run, with as many cards as were rehearsed."""
    return {card.name: 1e3 * sum(predict.mean_seconds(counts, card).values()) for card in CARDS.values()}


def on_other_numbers(counts: dict, card: Card = H100, rates: Rates = FITTED) -> dict[int, float]:
    """Milliseconds per step over the run on that many cards, with the same batch."""
    return {number: milliseconds(counts, number, card, rates) for number in NUMBERS}


def milliseconds(counts: dict, number: int, card: Card = H100, rates: Rates = FITTED) -> float:
    if "stages" in counts:
        taken = [(stage["steps"], milliseconds(stage, number, card, rates)) for stage in counts["stages"]]
        return sum(steps * ms for steps, ms in taken) / sum(steps for steps, _ in taken)
    parts = predict.mean_seconds(shared_by(counts, number), card, rates, number)
    turns = max(1.0, counts["ranks"] / number)  # sequences that a card takes one after the other
    of_model = ("matrix products", "attention forward", "attention backward", "head and loss", "other kernels", "gaps")
    again = sum(parts[part] for part in of_model) * (turns - 1)  # without collectives: only the last one sums up
    return 1e3 * (sum(parts[part] for part in PARTS) + again)


def shared_by(counts: dict, number: int) -> dict:
    """The counts of one of `number` ranks: its part of a sequence, and its share of the sharded optimizer's work."""
    tokens = tokens_in(counts)
    shorter = min(1.0, counts["ranks"] / number)
    fewer = counts["ranks"] / number
    items = []
    for item in counts["items"]:
        item = dict(item)
        if item["kind"] == "collective":
            if item["name"] != "AllReduce":  # each rank's message is its share
                item["bytes"] *= fewer
        elif item["part"] == "optimizer":
            if item["kind"] == "product":
                item["batches"] *= fewer
            elif item.get("elements"):  # compiled: the orthogonalisation; what torch launches itself, every rank does
                item = scaled(item, fewer)
        elif item["kind"] == "product":
            for side in ("m", "n", "k"):
                if item[side] == tokens:
                    item[side] = round(tokens * shorter)
        elif item["kind"] == "attention":
            item["tokens"] = round(tokens * shorter)
        else:
            item = scaled(item, shorter)
        items.append(item)
    return {**counts, "items": items}


def scaled(item: dict, factor: float) -> dict:
    return {**item, **{name: item[name] * factor for name in ("bytes", "instructions", "special") if name in item}}
