"""The steps of logs for other tools: TensorBoard's event files, or one table as CSV."""

import argparse
import csv
import io
import math
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from records.evidence import complain
from records.folders import open_records
from records.logs import Log, Run
from records.steps import training_losses
from records.terminal import UserError, brief, harmless, many, os_error, shown, write_new

HEADING = ["run", "seed", "step", "seconds", "train_loss", "val_loss"]


def export(args: argparse.Namespace) -> int:
    records = open_records(args.names, args.records)
    complain(records, [])
    runs = dict(named_runs(records))
    if not runs:
        raise UserError("nothing to export: no run in these logs")
    if args.csv:
        write_new(args.csv, as_csv(runs), lambda old: old.startswith(",".join(HEADING).encode()))
        print(harmless(f"{args.csv}: {many(runs, 'run')}"))
    else:
        write_events(runs, args.tensorboard)
        print(
            harmless(
                f"{args.tensorboard}: {many(runs, 'run')}; look at them with: tensorboard --logdir {args.tensorboard}"
            )
        )
    return 0


def named_runs(records: list) -> Iterator[tuple[str, tuple[Log, Run]]]:
    """(name, (log, run)): the record and the log, and a number where a log holds several runs."""
    for record in records:
        for log in record.logs:
            for number, run in enumerate(log.runs, 1):
                name = record.name if record.folder is None else f"{record.name}/{log.path.stem}"
                yield name + (f"/{number}" if len(log.runs) > 1 else ""), (log, run)


def points(run: Run) -> Iterator[tuple[int, float, float | None, float | None]]:
    """(step, seconds, training loss, validation loss), in the order of the steps."""
    training = training_losses(run)
    validations = {validation.step: validation for validation in run.validations}
    for step in sorted(training.keys() | validations.keys()):
        loss, seconds = training.get(step, (None, math.nan))
        validation = validations.get(step)
        yield step, validation.seconds if validation else seconds, loss, validation.loss if validation else None


def as_csv(runs: dict[str, tuple[Log, Run]]) -> bytes:
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(HEADING)
    for name, (log, run) in runs.items():
        for step, seconds, loss, val_loss in points(run):
            told = [value if value is not None and not math.isnan(value) else "" for value in (seconds, loss, val_loss)]
            writer.writerow([harmless(name), harmless(log.seed or ""), step, *told])
    return table.getvalue().encode(errors="replace")


def write_events(runs: dict[str, tuple[Log, Run]], folder: Path) -> None:
    """TensorBoard's own writer makes the files; a clock that starts now stands for the run's own."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        raise UserError("--tensorboard needs the tensorboard package: pip install tensorboard (or use --csv)") from None
    started = time.time()
    for name, (_, run) in runs.items():
        place = folder / os.path.join(*(re.sub(r"[^\w.=-]+", "_", brief(part, 100)) for part in name.split("/")))
        if place.exists() and any(place.iterdir()):
            raise UserError(f"{shown(place)}: is there already; take another folder, or remove it")
        try:
            writer = EventFileWriter(str(place))
        except OSError as error:
            raise os_error(place, error) from None
        for step, seconds, *losses in points(run):
            values = [
                Summary.Value(tag=tag, simple_value=loss)
                for tag, loss in zip(("loss/train", "loss/validation"), losses, strict=True)
                if loss is not None
            ]
            at = started + (seconds if math.isfinite(seconds) else 0)
            writer.add_event(Event(wall_time=at, step=step, summary=Summary(value=values)))
        writer.close()
