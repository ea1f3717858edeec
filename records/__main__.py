"""The records tool: what speedrunners do by hand, in one command. Run it from the repository's root.

    python -m records list                          all records: loss, time, gain over the one before, evidence
    python -m records list FOLDER --against NAME    records of any repository, gains over one of them
    python -m records check SoftCap                 does a record stand? exit code 0 or 1
    python -m records check logs/*.txt --target 3.28
    python -m records compare OLD NEW               times and losses of two records, by Welch's test
    python -m records extract LOG -o that_ran.py    the script out of a log, byte for byte what ran
    python -m records diff BlockWindow SoftCap      what changed (--stat: by section, --no-comments: code only)
    python -m records plot SoftCap logs/*.txt -o curves.png
    python -m records export LOG --csv steps.csv    every step for other tools (or --tensorboard DIR)
    python -m records race SoftCap train_gpt.py --runs 5 -- --num_iterations 500
    python -m records page -o records.html          the table, the curves and the diffs on one page
    python -m records measure --seeds 1 2           run the records here and file their logs; stop it, and it goes on
    python -m records readme                        write the tables and the picture of the READMEs from the logs
    python -m records ablate ShardedLongShort       what each of its ideas does, left out in turn; it goes on, too

A record is a folder records/<date>_<name>/ with train_gpt.py and its logs, and any unambiguous part of its name will
do. LOG is a log of train_gpt.py or of the public scripts of this field. Logs name their target themselves; --target
(3.28 by default) is for those that do not. What cannot be read is reported on stderr with its file and line.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from records.evidence import DEFAULT_TARGET
from records.tables import check, compare, list_records
from records.terminal import Paint, UserError, brief, harmless, painter, shown, write_new, write_out

HOME = Path(__file__).resolve().parent

Command = Callable[[argparse.Namespace, Paint], int]


def extract(args: argparse.Namespace, paint: Paint) -> int:
    from records.scripts import program_at

    if not args.log.is_file():
        raise UserError(f"{brief(str(args.log))}: no such log")
    files = program_at(args.log).files
    main, *others = files
    if args.output is None:
        write_out(files[main].source)
        if others:
            print(f"the log also holds {', '.join(others)}; -o writes it beside the script", file=sys.stderr)
        return 0
    if args.output.exists() and args.output.samefile(args.log):
        raise UserError(f"{args.output}: is the log itself")
    paths = {name: args.output if name == main else args.output.parent / name for name in files}
    for write in (False, True):  # all of them or none
        for name, path in paths.items():
            content = files[name].source
            write_new(path, content, lambda old, new=content: old == new, write)
    if others:
        print(f"wrote {', '.join(shown(path) for path in paths.values())}", file=sys.stderr)
    return 0


def show_diff(args: argparse.Namespace, paint: Paint) -> int:
    from records.diffs import diff_programs, stat_table, unified
    from records.scripts import open_program

    old, new = open_program(args.a, args.records), open_program(args.b, args.records)
    # A diff that is piped into patch must hold the scripts' own bytes; a terminal must not obey them.
    clean = harmless_line if sys.stdout.isatty() else str
    diffs = list(diff_programs(old, new, comments=not args.no_comments))
    nothing = True
    for diff in diffs:
        lines = list((stat_table if args.stat else unified)(diff, lambda text, style: paint(clean(text), style)))
        if args.stat and len(diffs) > 1 and lines:
            lines.insert(0, paint(harmless(diff.new.label), "bold"))
        for line in lines:
            write_out(line.encode(errors="surrogateescape") + b"\n")
        nothing = nothing and not lines
    if nothing:
        print(harmless(f"no difference between {shown(old.path)} and {shown(new.path)}"), file=sys.stderr)
    return 0


def harmless_line(text: str) -> str:
    return "\t".join(map(harmless, text.split("\t")))


def plot(args: argparse.Namespace, paint: Paint) -> int:
    from records.plot import plot

    return plot(args)


def export(args: argparse.Namespace, paint: Paint) -> int:
    from records.export import export

    return export(args)


def measure(args: argparse.Namespace, paint: Paint) -> int:
    from records.measure import measure

    return measure(args, paint)


def readme(args: argparse.Namespace, paint: Paint) -> int:
    from records.readme import readme

    return readme(args)


def ablate(args: argparse.Namespace, paint: Paint) -> int:
    from records.ablate import ablate

    return ablate(args)


def race(args: argparse.Namespace, paint: Paint) -> int:
    from records.race import run_race

    return run_race(args, paint)


def page(args: argparse.Namespace, paint: Paint) -> int:
    from records.page import page

    return page(args)


# ---- The command line ------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{brief(message, 500)} (see: python -m records --help)")


def loss(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise ValueError
    return value


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def parser() -> Parser:
    top = Parser(prog="python -m records", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    shared = Parser(add_help=False)
    shared.add_argument("--records", type=Path, default=HOME, metavar="DIR", help="where the records are")
    shared.add_argument("--color", choices=["auto", "always", "never"], default="auto")
    aimed = Parser(add_help=False)
    aimed.add_argument("--target", type=loss, help=f"for logs that do not name theirs (default: {DEFAULT_TARGET})")
    judged = Parser(add_help=False, parents=[aimed])
    judged.add_argument("--steps", type=count, help="a run is complete when it was validated at this step, its last")
    printed = Parser(add_help=False)
    form = printed.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="for programs")
    form.add_argument("--markdown", action="store_true", help="for a pull request")

    def command(name: str, function: Command, help: str, *parents: Parser) -> Parser:
        added = commands.add_parser(name, help=help, parents=[shared, *parents])
        added.set_defaults(function=function)
        return added

    sub = command("list", list_records, "a table of the records", judged, printed)
    sub.add_argument("names", nargs="*", metavar="RECORD|LOG", help="default: all records")
    sub.add_argument("--against", metavar="RECORD", help="gains over this one, not over the one before")
    sub = command("check", check, "does the evidence of these logs suffice?", judged, printed)
    sub.add_argument("names", nargs="+", metavar="LOG|RECORD")
    sub = command("compare", compare, "is one record faster than the other?", judged, printed)
    sub.add_argument("a", metavar="A", help="record, folder or log")
    sub.add_argument("b", metavar="B")
    sub = command("extract", extract, "the script out of a log")
    sub.add_argument("log", type=Path, metavar="LOG")
    sub.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: standard output")
    sub = command("diff", show_diff, "what changed from one script to another")
    sub.add_argument("a", metavar="A", help="record, folder, script or log")
    sub.add_argument("b", metavar="B")
    sub.add_argument("--stat", action="store_true", help="lines added and removed by section")
    sub.add_argument("--no-comments", action="store_true", help="leave out comments, docstrings and blank lines")
    sub = command("plot", plot, "loss over time and over steps", judged)
    sub.add_argument("names", nargs="*", metavar="RECORD|LOG", help="default: all records")
    sub.add_argument("-o", "--output", type=Path, default=Path("curves.png"), metavar="curves.png")
    sub = command("export", export, "every step of these logs, for TensorBoard or as a table")
    sub.add_argument("names", nargs="+", metavar="LOG|RECORD")
    form = sub.add_mutually_exclusive_group(required=True)
    form.add_argument("--tensorboard", type=Path, metavar="DIR", help="one run in this folder for each run of the logs")
    form.add_argument("--csv", type=Path, metavar="FILE")
    sub = command("race", race, "which of two scripts is faster on this machine?", aimed)
    sub.add_argument("a", metavar="A", help="record, folder, script or log")
    sub.add_argument("b", metavar="B")
    sub.add_argument("--runs", type=count, default=5, help="of each script (default: 5)")
    sub.add_argument("--nproc", type=count, help="processes (default: as many as run.sh starts)")
    sub.add_argument("--first-seed", type=int, default=1, metavar="N", help="pair i runs with seed N + i - 1")
    sub.add_argument("--state", type=Path, metavar="DIR", help="where finished runs are kept (default: in logs/)")
    sub = command("measure", measure, "run records on this machine and file their logs")
    sub.add_argument("names", nargs="*", metavar="RECORD", help="default: all records")
    sub.add_argument("--seeds", type=int, nargs="+", default=[1, 2], metavar="N", help="a run with each (default: 1 2)")
    sub = command("readme", readme, "the READMEs' tables and picture, from the logs")
    sub.add_argument("--check", action="store_true", help="write nothing; exit code 1 if something is out of date")
    sub = command("ablate", ablate, "leave out each idea of a record in turn, and see what it does")
    sub.add_argument("name", metavar="RECORD", help="with an ideas.toml, which says how to leave them out")
    sub.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4], metavar="N", help="default: 1 2 3 4")
    sub.add_argument("--minutes", type=float, default=math.inf, metavar="N", help="stop after this time; 0: only look")
    sub.add_argument("--steps", type=count, help="default: the CPU track's")
    sub = command("page", page, "all of it on one page", judged)
    sub.add_argument("names", nargs="*", metavar="RECORD|LOG", help="default: all records")
    sub.add_argument("-o", "--output", type=Path, required=True, metavar="records.html")
    return top


def main(argv: list[str]) -> int:
    if not argv:
        print(__doc__.strip())
        return 0
    argv, settings = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    try:
        args = parser().parse_args(argv)
        args.settings = settings
        if settings and args.function is not race:
            raise UserError("only race takes settings after --")
        return args.function(args, painter(args.color, sys.stdout))
    except UserError as error:
        problem = str(error)
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk, a name that no file can have
        problem = f"{brief(str(error.filename or 'output'))}: {error.strerror or error}"
    print(harmless(f"records: {problem}"), file=sys.stderr)
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
