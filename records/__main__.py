"""The records tool: what speedrunners do by hand, in one command. Run it from the repository's root.

    python -m records list                          all records: loss, time, gain over the one before, evidence
    python -m records check SoftCap                 does a record stand? exit code 0 or 1
    python -m records check logs/*.txt --target 3.28
    python -m records extract LOG -o that_ran.py    the script out of a log, byte for byte what ran
    python -m records diff BlockWindow SoftCap      what changed (--stat: by section, --no-comments: code only)
    python -m records plot SoftCap logs/*.txt -o curves.png
    python -m records race SoftCap train_gpt.py --runs 5 -- --num_iterations 500
    python -m records page -o records.html          the table, the curves and the diffs on one page
    python -m records measure --seeds 1 2           run the records here and file their logs; stop it, and it goes on

A record is a folder records/<date>_<name>/ with train_gpt.py and its logs, and any unambiguous part of its name will
do. LOG is a log of train_gpt.py or of the public scripts of this field. Logs name their target themselves; --target
(3.28 by default) is for those that do not. What cannot be read is told on stderr with its file and line.
"""

import argparse
import math
import os
import sys
from itertools import pairwise
from pathlib import Path

from records.logs import (
    DEFAULT_TARGET,
    Record,
    UserError,
    many,
    mean,
    open_records,
    p_below,
    read_record,
    record_folders,
    show_p,
    spread,
)

HOME = Path(__file__).resolve().parent
STYLES = {"bold": 1, "dim": 2, "reverse": 7, "red": 31, "green": 32, "yellow": 33, "cyan": 36}


# ----------------------------------------------------------------------------------------------------------------------
# Saying things
# ----------------------------------------------------------------------------------------------------------------------


def painter(choice, stream):
    """paint(text, "bold red"), which leaves the text as it is unless this is a terminal that wants colours."""
    wanted = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    if choice == "never" or (choice == "auto" and not wanted):
        return lambda text, style: text

    def paint(text, style):
        codes = ";".join(str(STYLES[word]) for word in style.split() if word in STYLES)
        return f"\033[{codes}m{text}\033[0m" if codes and text else text

    return paint


def harmless(text):
    """Text out of a log, without control characters that a terminal would obey."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def complain(records, at_most=3):
    """Tell what could not be read, file and line, without drowning the rest."""
    for record in records:
        for log in record.logs:
            for line, problem in log.complaints[:at_most]:
                print(harmless(f"{log.path}:{line}: {problem}"), file=sys.stderr)
            if len(log.complaints) > at_most:
                print(f"{log.path}: and {len(log.complaints) - at_most} more lines like these", file=sys.stderr)


def print_table(rows, paint):
    """Rows of cells, the first row the heading; the first and the last column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    last = len(widths) - 1
    for number, row in enumerate(rows):
        cells = [
            f"{cell:<{width}}" if i in (0, last) else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print(paint("  ".join(cells).rstrip(), "plain" if number else "bold"))


def with_spread(values, digits, unit=""):
    if not values:
        return "-"
    text = f"{mean(values):.{digits}f}"
    return text + (f" ± {spread(values):.{digits}f}" if len(values) > 1 else "") + unit


# ----------------------------------------------------------------------------------------------------------------------
# list
# ----------------------------------------------------------------------------------------------------------------------

COLUMNS = ["record", "runs", "steps", "final loss", "time", "gain", "evidence"]


def tracks(records, target):
    """{track: its entries, oldest first}. Entries of different tracks are never compared."""
    found = {}
    for record in records:
        for entry in record.entries(target):
            found.setdefault(entry.track, []).append(entry)
    return dict(sorted(found.items(), key=lambda item: (-item[0][0], item[0][1])))


def track_title(entries):
    entry = entries[0]
    files = next((log.data_files for log in entry.logs if log.data_files), [])
    data = f"data {entry.data} ({', '.join(files[:1])}{', ...' if files[1:] else ''})" if files else "data not named"
    return f"target {entry.target:g}, {data}"


def gain(entry, before):
    """How much less time than the record before took, in percent; negative where it took more."""
    if before is None:
        return "-"
    if entry.hardware != before.hardware:
        return "other hardware"
    old, new = mean(before.times), mean(entry.times)
    return f"{100 * (1 - new / old):+.1f} %" if math.isfinite(new) and math.isfinite(old) and old > 0 else "-"


def evidence(entry):
    """(sufficient, in a few words): the verdict of `check`."""
    failed = [check for check in entry.checks() if check.passed is False]
    if not failed:
        return True, "yes, " + p_of(entry)
    names = [check.name for check in failed]
    if names == ["loss"]:
        return False, "no, " + (p_of(entry) if len(entry.losses) > 1 else many(entry.losses, "run"))
    return False, "no: " + ", ".join(names)


def p_of(entry):
    p = p_below(entry.losses, entry.target)
    return "no test possible" if p is None else f"p {show_p(p)}"


def row_of(entry, before):
    steps = sorted({run.final.step for run in entry.complete})
    unfinished = len(entry.runs) - len(entry.complete)
    return [
        entry.name,
        f"{len(entry.complete)}" + (f" + {unfinished} unfinished" if unfinished else ""),
        "-".join(str(step) for step in dict.fromkeys([*steps[:1], *steps[-1:]])) or "-",
        with_spread(entry.losses, 4),
        with_spread(entry.times, 1, " s"),
        gain(entry, before),
        evidence(entry)[1],
    ]


def rows_of(entries):
    """The table of one track; each record is measured against the last one before it that has complete runs."""
    rows, before = [], None
    for entry in entries:
        rows.append(row_of(entry, before))
        before = entry if entry.complete else before
    return rows


def list_records(args, paint):
    records = records_to_show(args)
    complain(records)
    if not records:
        print("no records yet: a record is a folder records/<date>_<name>/ with train_gpt.py and its logs")
    for entries in tracks(records, args.target).values():
        print(paint(harmless(track_title(entries)), "cyan"))
        print_table([COLUMNS, *rows_of(entries)], paint)
        print()
    without = [record.name for record in records if not any(log.runs for log in record.logs)]
    if without:
        print(f"without runs: {', '.join(without)}")
    return 0


def records_to_show(args):
    if args.names:
        return open_records(args.names, args.records)
    return [read_record(folder) for folder in record_folders(args.records)]


# ----------------------------------------------------------------------------------------------------------------------
# check
# ----------------------------------------------------------------------------------------------------------------------


def check(args, paint):
    records = gather_logs(open_records(args.names, args.records))
    complain(records)
    stands = True
    for record in records:
        entries = record.entries(args.target)
        if not entries:
            print(f"{paint('FAIL', 'bold red')}  {record.name}: no log with a run in it")
        for entry in entries:
            if args.asked_target not in (None, entry.target):
                print(f"{record.name}: --target is not used, the logs name theirs: {entry.target:g}", file=sys.stderr)
        stands = all([check_entry(entry, paint) for entry in entries]) and bool(entries) and stands
        unread = [log for log in record.logs if not log.runs]
        if unread and entries:
            print(f"{paint('FAIL', 'bold red')}  {many(unread, 'log')} without a run, the first {unread[0].path}")
            stands = False
    return 0 if stands else 1


def gather_logs(records):
    """Logs named one by one are evidence for one thing; their script is the one beside them, if there is one."""
    logs = [log for record in records if record.folder is None for log in record.logs]
    others = [record for record in records if record.folder]
    if not logs:
        return others
    folders = {log.path.resolve().parent for log in logs}
    script = folders.pop() / "train_gpt.py" if len(folders) == 1 else None
    name = logs[0].path.stem if len(logs) == 1 else f"{len(logs)} logs"
    return [Record(name, None, script if script and script.is_file() else None, logs), *others]


def check_entry(entry, paint):
    print(paint(f"{harmless(entry.name)}, target {entry.target:g}", "bold"))
    checks = entry.checks()
    for passed, name, text in checks:
        word, style = {True: ("ok", "green"), False: ("FAIL", "bold red"), None: ("?", "yellow")}[passed]
        print(f"  {paint(f'{word:<4}', style)}  {name:<8}  {harmless(text)}")
    failed = [name for passed, name, _ in checks if passed is False]
    unknown = [name for passed, name, _ in checks if passed is None]
    if failed:
        print(f"  {paint('verdict: the evidence does not suffice', 'bold red')} ({', '.join(failed)})\n")
        return False
    limits = f" as far as the logs tell (they do not show: {', '.join(unknown)})" if unknown else ""
    print(f"  {paint('verdict: the evidence suffices', 'bold green')}{limits}\n")
    return True


# ----------------------------------------------------------------------------------------------------------------------
# extract and diff
# ----------------------------------------------------------------------------------------------------------------------


def extract(args, paint):
    from records.scripts import script_at

    if not args.log.is_file():
        raise UserError(f"{args.log}: no such log")
    source = script_at(args.log).source
    if args.output is None:
        write_out(source)
        return 0
    if args.output.exists() and args.output.samefile(args.log):
        raise UserError(f"{args.output}: is the log itself")
    if args.output.is_file() and args.output.read_bytes() != source:
        raise UserError(f"{args.output}: is there already and holds something else; take another name, or remove it")
    write(args.output, source)
    return 0


def write_out(content):
    while content:  # with PYTHONUNBUFFERED a write may take only a part
        content = content[sys.stdout.buffer.write(content) :]


def write(path, content):
    try:
        path.write_bytes(content)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None


def show_diff(args, paint):
    from records.scripts import Diff, open_script, stat_table, unified

    old, new = open_script(args.a, args.records), open_script(args.b, args.records)
    diff = Diff(old, new, comments=not args.no_comments)
    nothing = True
    for line in (stat_table if args.stat else unified)(diff, paint):
        # Not harmless(): a diff that is piped into patch must hold the scripts' own bytes.
        write_out(line.encode(errors="surrogateescape") + b"\n")
        nothing = False
    if nothing:
        print(f"no difference between {old.label} and {new.label}", file=sys.stderr)
    return 0


# ----------------------------------------------------------------------------------------------------------------------
# plot
# ----------------------------------------------------------------------------------------------------------------------


def plot(args, paint):
    records = open_records(args.names, args.records)
    complain(records)
    found = tracks(records, args.target)
    if not found:
        raise UserError("nothing to plot: no validation in these logs")
    try:
        import matplotlib
    except ImportError:
        raise UserError("plot needs matplotlib: pip install -r requirements-dev.txt") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, rows = pyplot.subplots(
        len(found), 2, figsize=(13, 5 * len(found)), squeeze=False, sharey="row", layout="constrained"
    )
    for axes, entries in zip(rows, found.values(), strict=True):
        plot_track(axes, entries)
    try:
        figure.savefig(args.output, dpi=150)
    except (OSError, ValueError) as error:
        raise UserError(f"{args.output}: {getattr(error, 'strerror', None) or error}") from None
    print(f"{args.output}: {many(found, 'track')}, {many([e for es in found.values() for e in es], 'record')}")
    return 0


def plot_track(axes, entries):
    """Loss over time on the left, over steps on the right; the band is one standard deviation of the runs.

    The thin line is the training loss, which is all that a run validated only at its end shows of its way there.
    """
    from records.page import view

    for axis, label in zip(axes, ["training time [s]", "step"], strict=True):
        for entry in entries:
            moments = entry.curve()
            x = [moment.step if label == "step" else moment.seconds for moment in moments]
            loss = [moment.loss for moment in moments]
            width = [0 if math.isnan(moment.spread) else moment.spread for moment in moments]
            name = f"{entry.name} ({many(entry.complete or entry.runs, 'run')})"
            (line,) = axis.plot(x, loss, label=name, linewidth=1.5, marker=".", markersize=4 if len(x) > 1 else 10)
            x_training = [moment.step if label == "step" else moment.seconds for moment in entry.training]
            training = [moment.loss for moment in entry.training]
            axis.plot(x_training, training, color=line.get_color(), linewidth=0.8, alpha=0.55)
            low, high = zip(*[(a - b, a + b) for a, b in zip(loss, width, strict=True)], strict=True)
            axis.fill_between(x, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
        target = entries[0].target
        axis.axhline(target, color="black", linestyle="--", linewidth=1, label=f"target {target:g}")
        axis.set_ylim(*view(entries))
        axis.set_xlabel(label)
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("validation loss" + (" (thin: training loss)" if any(e.training for e in entries) else ""))
    axes[0].set_title(track_title(entries), loc="left", fontsize=10)
    axes[1].legend(fontsize=9)


# ----------------------------------------------------------------------------------------------------------------------
# race, measure and page
# ----------------------------------------------------------------------------------------------------------------------


def measure(args, paint):
    from records.measure import measure

    return measure(args, paint)


def race(args, paint):
    from records.race import run_race

    return run_race(args, paint)


def page(args, paint):
    from records.page import render
    from records.scripts import Diff, name_of, script_at

    records = records_to_show(args)
    complain(records)
    scripts = [script_at(record.script) for record in records if record.script]
    diffs = [(name_of(old), name_of(new), Diff(old, new)) for old, new in pairwise(scripts)]
    found = [(track_title(entries), entries, rows_of(entries)) for entries in tracks(records, args.target).values()]
    without = [record.name for record in records if not any(log.runs for log in record.logs)]
    write(args.output, render(COLUMNS, found, diffs, without).encode(errors="replace"))
    print(f"{args.output}: {many(records, 'record')}, {many(found, 'track')}, {many(diffs, 'diff')}")
    return 0


# ----------------------------------------------------------------------------------------------------------------------
# The command line
# ----------------------------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message} (see: python -m records --help)")


def loss(text):
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise ValueError
    return value


def count(text):
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def parser():
    top = Parser(prog="python -m records", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    shared = Parser(add_help=False)
    shared.add_argument("--records", type=Path, default=HOME, metavar="DIR", help="where the records are")
    shared.add_argument("--target", type=loss, help=f"for logs that do not name theirs (default: {DEFAULT_TARGET})")
    shared.add_argument("--color", choices=["auto", "always", "never"], default="auto")

    def command(name, function, help):
        added = commands.add_parser(name, help=help, parents=[shared])
        added.set_defaults(function=function)
        return added

    sub = command("list", list_records, "a table of the records")
    sub.add_argument("names", nargs="*", metavar="RECORD|LOG", help="default: all records")
    sub = command("check", check, "does the evidence of these logs suffice?")
    sub.add_argument("names", nargs="+", metavar="LOG|RECORD")
    sub = command("extract", extract, "the script out of a log")
    sub.add_argument("log", type=Path, metavar="LOG")
    sub.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: standard output")
    sub = command("diff", show_diff, "what changed from one script to another")
    sub.add_argument("a", metavar="A", help="record, folder, script or log")
    sub.add_argument("b", metavar="B")
    sub.add_argument("--stat", action="store_true", help="lines added and removed by section")
    sub.add_argument("--no-comments", action="store_true", help="leave out comments, docstrings and blank lines")
    sub = command("plot", plot, "loss over time and over steps")
    sub.add_argument("names", nargs="+", metavar="RECORD|LOG")
    sub.add_argument("-o", "--output", type=Path, required=True, metavar="curves.png")
    sub = command("race", race, "which of two scripts is faster on this machine?")
    sub.add_argument("a", metavar="A", help="record, folder, script or log")
    sub.add_argument("b", metavar="B")
    sub.add_argument("--runs", type=count, default=5, help="of each script (default: 5)")
    sub.add_argument("--nproc", type=count, help="processes a run (default: one a GPU; on a CPU 2, or 1 on one core)")
    sub.add_argument("--first-seed", type=int, default=1, metavar="N", help="pair i runs with seed N + i - 1")
    sub.add_argument("--state", type=Path, metavar="DIR", help="where finished runs are kept (default: in logs/)")
    sub = command("measure", measure, "run records on this machine and file their logs")
    sub.add_argument("names", nargs="*", metavar="RECORD", help="default: all records")
    sub.add_argument("--seeds", type=int, nargs="+", default=[1, 2], metavar="N", help="a run with each (default: 1 2)")
    sub = command("page", page, "all of it on one page")
    sub.add_argument("names", nargs="*", metavar="RECORD|LOG", help="default: all records")
    sub.add_argument("-o", "--output", type=Path, required=True, metavar="records.html")
    return top


def main(argv):
    if not argv:
        print(__doc__.strip())
        return 0
    argv, settings = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    try:
        args = parser().parse_args(argv)
        args.settings, args.asked_target = settings, args.target
        args.target = args.target or DEFAULT_TARGET
        if settings and args.function is not race:
            raise UserError("only race takes settings after --")
        return args.function(args, painter(args.color, sys.stdout))
    except UserError as error:
        print(harmless(f"records: {error}"), file=sys.stderr)
        return 2


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # a name or a terminal that is not UTF-8 is no reason to fail
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 141
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)
