"""The commands that print figures: list, check and compare, as text, Markdown or JSON."""

import argparse
import json
import math
from collections.abc import Iterable

from records.evidence import Entry, complain, entries_of, track_title, tracks
from records.figures import Welch, have_scipy, mean, p_below, show_p, spread, welch, with_spread
from records.folders import Record, all_records, open_records
from records.logs import Log
from records.terminal import (
    Paint,
    UserError,
    brief,
    harmless,
    many,
    print_markdown,
    print_table,
    shown,
    warn,
)

COLUMNS = ["record", "runs", "steps", "final loss", "time", "to target", "gain", "evidence"]
WORDS = {True: ("ok", "green"), False: ("FAIL", "bold red"), None: ("?", "yellow")}


def print_json(value: dict | list) -> None:
    print(json.dumps(plain(value), indent=1, ensure_ascii=False))


def plain(value: object) -> object:
    """The same without nan and infinities, which JSON does not have, and without control characters."""
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return harmless(value) if isinstance(value, str) else value


# ---- list ------------------------------------------------------------------------------------------------------------


def records_to_show(args: argparse.Namespace) -> list[Record]:
    return open_records(args.names, args.records) if args.names else all_records(args.records)


def list_records(args: argparse.Namespace, paint: Paint) -> int:
    records = records_to_show(args)
    found = tracks(records, args.target, args.steps)
    complain(records, [entry for entries in found.values() for entry in entries])
    against = reference(args, records)
    without = [record.name for record in records if not any(log.runs for log in record.logs)]
    if args.json:
        listed = [
            {"target": es[0].target, "data": es[0].data, "dtype": es[0].dtype or None, "records": facts(es, against)}
            for es in found.values()
        ]
        print_json({"tracks": listed, "without_runs": without})
        return 0
    if not records:
        print("no records yet: a record is a folder records/<date>_<name>/ with train_gpt.py and its logs")
    for entries in found.values():
        title = track_title(entries)
        if args.markdown:
            print(f"**{harmless(title)}**\n")
            print_markdown([COLUMNS, *rows_of(entries, against)])
        else:
            print(paint(harmless(title), "cyan"))
            print_table([COLUMNS, *rows_of(entries, against)], paint)
        print()
    if without:
        print(harmless(f"without runs: {', '.join(map(brief, without))}"))
    if found and not args.markdown:
        told = f"over {against[0].name}" if against else "over the record before that reached the target"
        print(harmless(f"gain: time saved {told}; evidence: yes if all checks pass, with p < 0.01 for the loss"))
    return 0


def reference(args: argparse.Namespace, listed: list[Record]) -> list[Entry]:
    """The entries of the record that --against names, among those that are listed or elsewhere; empty without it."""
    if args.against is None:
        return []
    near = [record for record in listed if args.against.lower() in record.name.lower()]
    records = near if len(near) == 1 else open_records([args.against], args.records)
    if len(records) > 1:
        raise UserError(f"--against {args.against}: holds {', '.join(record.name for record in records)}; name one")
    entries = entries_of(records[0], args.target, args.steps)
    if not entries:
        raise UserError(f"--against {args.against}: no runs in this record")
    return entries


def measured_against(entries: list[Entry], against: list[Entry]) -> Iterable[tuple[Entry, Entry | None]]:
    """Each entry with the one that it is measured against: as asked for, or the last that reached the target."""
    fixed = next((entry for entry in against if entry.track == entries[0].track), None)
    before = None
    for entry in entries:
        yield entry, (fixed if against else before)
        before = entry if entry.complete and entry.reached else before


def rows_of(entries: list[Entry], against: list[Entry]) -> list[list[str]]:
    """The table of one track."""
    return [row_of(entry, before) for entry, before in measured_against(entries, against)]


def row_of(entry: Entry, before: Entry | None) -> list[str]:
    steps = sorted({run.final.step for run in entry.complete})
    unfinished = len(entry.runs) - len(entry.complete)
    return [
        entry.name,
        f"{len(entry.complete)}" + (f" + {unfinished} unfinished" if unfinished else ""),
        "-".join(str(step) for step in dict.fromkeys([*steps[:1], *steps[-1:]])) or "-",
        with_spread(entry.losses, 4),
        with_spread(entry.times, 2, " s"),
        to_target(entry),
        gain(entry, before),
        evidence(entry)[1],
    ]


def first_reaching(entry: Entry) -> list:
    """The first validation at the target of each run that has one, where runs validate on the way at all."""
    on_the_way = [run for run in entry.complete if any(0 < v.step < run.final.step for v in run.validations)]
    if not on_the_way or entry.doubt:
        return []
    return [first for run in entry.complete if (first := run.reached(entry.target))]


def to_target(entry: Entry) -> str:
    found = first_reaching(entry)
    if not found:
        return "-"
    if len(found) < len(entry.complete):
        return f"{len(found)} of {many(entry.complete, 'run')}"
    return f"{mean([v.seconds for v in found]):.2f} s, step {mean([v.step for v in found]):.0f}"


def saving(entry: Entry, before: Entry | None) -> float | None:
    """The share of time saved, in percent; None where it means nothing."""
    if before is None or entry.name == before.name or not (entry.reached and before.reached):
        return None
    if entry.hardware != before.hardware or entry.hardware in (None, "mixed"):
        return None
    old, new = mean(before.times), mean(entry.times)
    return 100 * (1 - new / old) if math.isfinite(new) and math.isfinite(old) and old > 0 else None


def gain(entry: Entry, before: Entry | None) -> str:
    """How much less time than the other took; negative where it took more."""
    percent = saving(entry, before)
    if percent is not None:
        test = welch(before.times, entry.times) if have_scipy() else None
        return f"{percent:+.1f} %" + (" (noise)" if test and not test.shown else "")
    if before is None or not entry.complete or not entry.reached or entry.name == before.name:
        return "-"
    if None in (entry.hardware, before.hardware):
        return "hardware unknown"
    if "mixed" in (entry.hardware, before.hardware):
        return "mixed hardware"
    return "other hardware" if entry.hardware != before.hardware else "-"


def evidence(entry: Entry) -> tuple[bool | None, str]:
    """The verdict of `check` in a few words; None where the target is reached, but too few runs show it."""
    failed = [check.name for check in entry.checks if check.passed is False]
    if not entry.target:
        return None, "no target to reach"
    if not failed:
        return True, "yes, " + p_of(entry)
    if failed != ["loss"]:
        return False, "no: " + ", ".join(failed)
    if entry.doubt:
        return False, "no: which target? see --target"
    below = sum(loss <= entry.target for loss in entry.losses)
    test = f", {p_of(entry)}" if len(entry.losses) > 1 else ""
    told = f"{below} of {len(entry.losses)} at the target{test}"
    return (None, told) if below == len(entry.losses) else (False, f"no: {told}")


def p_of(entry: Entry) -> str:
    if not have_scipy():
        return "no test without scipy"
    p = p_below(entry.losses, entry.target)
    return "no test possible" if p is None else f"p {show_p(p)}"


def facts(entries: list[Entry], against: list[Entry]) -> list[dict]:
    """The table as values."""
    return [
        {
            "record": entry.name,
            "hardware": entry.hardware,
            "runs": [
                {
                    "log": shown(run.path),
                    "steps": run.final.step,
                    "loss": run.final.loss,
                    "seconds": run.final.seconds,
                    "complete": entry.is_complete(run),
                }
                for run in entry.runs
            ],
            "copies": [shown(copy.path) for copy, _ in entry.copies],
            "mean_loss": mean(entry.losses),
            "loss_spread": spread(entry.losses),
            "mean_seconds": mean(entry.times),
            "seconds_spread": spread(entry.times),
            "to_target": [{"step": v.step, "seconds": v.seconds} for v in first_reaching(entry)],
            "measured_against": before.name if before else None,
            "gain_percent": saving(entry, before),
            **verdict_of(entry),
        }
        for entry, before in measured_against(entries, against)
    ]


def verdict_of(entry: Entry) -> dict:
    return {
        "p": p_below(entry.losses, entry.target) if have_scipy() else None,
        "stands": entry.stands,
        "checks": [{"name": name, "passed": passed, "text": text} for passed, name, text in entry.checks],
    }


# ---- check -----------------------------------------------------------------------------------------------------------


def check(args: argparse.Namespace, paint: Paint) -> int:
    records = gather_logs(open_records(args.names, args.records))
    found = [entries_of(record, args.target, args.steps) for record in records]
    complain(records, [entry for entries in found for entry in entries])
    answers, stands = [], True
    for record, entries in zip(records, found, strict=True):
        for entry in entries:
            if args.target not in (None, entry.target):
                warn(f"{record.name}: --target is not used, the logs name theirs: {entry.target:g}")
        unread = [log for log in record.logs if not log.runs and log.is_log]
        stands = stands and bool(entries) and not unread and all(entry.stands for entry in entries)
        if args.json:
            answers.append(answer(record, entries, unread))
            continue
        if not entries:
            print(f"{paint('FAIL', 'bold red')}  {harmless(brief(record.name))}: no log with a run in it")
        for entry in entries:
            (check_markdown if args.markdown else check_entry)(entry, paint)
        if unread and entries:
            first = harmless(shown(unread[0].path))
            print(f"{paint('FAIL', 'bold red')}  {many(unread, 'log')} without a run, the first {first}")
    if args.json:
        print_json(answers)
    return 0 if stands else 1


def answer(record: Record, entries: list[Entry], unread: list[Log]) -> dict:
    judged = [{"target": entry.target, "losses": entry.losses, **verdict_of(entry)} for entry in entries]
    stands = bool(entries) and not unread and all(entry.stands for entry in entries)
    return {
        "record": record.name,
        "stands": stands,
        "without_runs": [shown(log.path) for log in unread],
        "targets": judged,
    }


def gather_logs(records: list[Record]) -> list[Record]:
    """Logs named one by one are evidence for one thing; their script is the one beside them, if there is one."""
    logs = [log for record in records if record.folder is None for log in record.logs]
    others = [record for record in records if record.folder]
    if not logs:
        return others
    folders = {log.path.resolve().parent for log in logs}
    script = folders.pop() / "train_gpt.py" if len(folders) == 1 else None
    name = records[0].name if len(logs) == 1 else f"{len(logs)} logs"
    return [Record(name, None, script if script and script.is_file() else None, logs), *others]


def check_entry(entry: Entry, paint: Paint) -> None:
    print(paint(harmless(f"{brief(entry.name)}, target {entry.target:g}"), "bold"))
    for passed, name, text in entry.checks:
        word, style = WORDS[passed]
        print(f"  {paint(f'{word:<4}', style)}  {name:<8}  {harmless(text)}")
    print(f"  {paint(f'verdict: {verdict(entry)}', 'bold green' if entry.stands else 'bold red')}\n")


def check_markdown(entry: Entry, paint: Paint) -> None:
    print(f"**{harmless(brief(entry.name))}**, target {entry.target:g}: {verdict(entry)}\n")
    print_markdown([["check", "result", "what the logs show"]] + [[n, WORDS[p][0], t] for p, n, t in entry.checks])
    print()


def verdict(entry: Entry) -> str:
    failed = [name for passed, name, _ in entry.checks if passed is False]
    unknown = [name for passed, name, _ in entry.checks if passed is None]
    if failed:
        return f"the evidence does not suffice ({', '.join(failed)})"
    limits = f" as far as the logs tell (they do not show: {', '.join(unknown)})" if unknown else ""
    return f"the evidence suffices{limits}"


# ---- compare ---------------------------------------------------------------------------------------------------------

COMPARED = [("time", "times", "s", 3, "faster", "slower"), ("step time", "step_times", "ms", 2, "faster", "slower"),
            ("final loss", "losses", "", 5, "lower", "higher")]  # fmt: skip


def compare(args: argparse.Namespace, paint: Paint) -> int:
    """Two records' times, step times and losses by Welch's test: the means need not have equal spreads."""
    a, b = (one_entry(name, args) for name in (args.a, args.b))
    for word, other, one in (("target", b.target, a.target), ("data", b.data, a.data), ("dtype", b.dtype, a.dtype)):
        if one != other:
            warn(f"not the same {word}: {one or 'not named'} and {other or 'not named'}")
    if a.hardware != b.hardware or a.hardware in (None, "mixed"):
        warn(f"times compare machines too: {a.hardware or 'unknown'} and {b.hardware or 'unknown'}")
    tests = {name: welch(getattr(a, of), getattr(b, of)) for name, of, *_ in COMPARED}
    if args.json:
        print_json({"a": side_facts(a), "b": side_facts(b), "b_minus_a": {n: test_facts(t) for n, t in tests.items()}})
        return 0
    rows = [["", "record", "runs", "steps", "final loss", "time", "per step", "hardware"]]
    for letter, entry in (("A", a), ("B", b)):
        row = row_of(entry, None)
        times = [with_spread(entry.times, 3, " s"), with_spread(entry.step_times, 2, " ms")]
        rows.append([letter, *row[:4], *times, entry.hardware or "unknown"])
    print_markdown(rows) if args.markdown else print_table(rows, paint)
    print()
    for name, of, unit, digits, less, more in COMPARED:
        told = difference(tests[name], getattr(a, of), getattr(b, of), unit, digits, less, more)
        print(f"- {name}: {told}" if args.markdown else f"{paint(name, 'bold')}: {told}")
    return 0


def one_entry(name: str, args: argparse.Namespace) -> Entry:
    records = open_records([name], args.records)
    complain(records, [])
    found = [entry for record in records for entry in entries_of(record, args.target, args.steps) if entry.complete]
    if not found:
        raise UserError(f"{brief(name)}: no complete run to compare")
    if len(found) > 1:
        several = [f"{entry.name} (target {entry.target:g}, {entry.dtype or 'dtype not named'})" for entry in found]
        raise UserError(f"{brief(name)}: holds {brief(', '.join(several), 500)}; name one of them")
    return found[0]


def difference(test: Welch | None, a: list, b: list, unit: str, digits: int, less: str, more: str) -> str:
    """faster by 1.044 s, 95 % 0.910 to 1.178 s, p = 5e-12"""
    unit = f" {unit}" if unit else ""
    gap = mean(b) - mean(a)
    if test is None:
        return f"B - A = {gap:+.{digits}f}{unit}, without a test: that takes two runs of each, with some spread"
    p = f"p = {test.p:.1g}" if test.p > 0 else "p < 1e-300"
    if not test.shown:
        interval = f"95 % {test.low:+.{digits}f} to {test.high:+.{digits}f}{unit}"
        return f"no difference shown: B - A = {gap:+.{digits}f}{unit}, {interval}, {p}"
    ends = sorted([abs(test.low), abs(test.high)])
    share = f" ({100 * abs(gap) / mean(a):.2f} %)" if mean(a) > 0 else ""
    interval = f"95 % {ends[0]:.{digits}f} to {ends[1]:.{digits}f}{unit}"
    return f"B is {less if gap < 0 else more} by {abs(gap):.{digits}f}{unit}{share}, {interval}, {p}"


def side_facts(entry: Entry) -> dict:
    return {
        "record": entry.name,
        "target": entry.target,
        "hardware": entry.hardware,
        "runs": len(entry.complete),
        "seconds": entry.times,
        "step_milliseconds": entry.step_times,
        "losses": entry.losses,
    }


def test_facts(test: Welch | None) -> dict | None:
    return test._asdict() if test else None
