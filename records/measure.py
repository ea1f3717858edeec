"""Runs the records on this machine and files their logs: `python -m records measure`, which can be stopped and goes on.

What is already done is read off the records' own logs: a run of this very script with this seed, complete. So there is
no state to lose, and a script that changed is measured again.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from records.folders import SCRIPT, log_files, open_records, record_folders
from records.logs import read_log, same_source
from records.terminal import Paint, UserError, shown

ROOT = Path(__file__).resolve().parent.parent


def measure(args: argparse.Namespace, paint: Paint) -> int:
    """Seed by seed through all records, so that what the machine does meanwhile happens to all of them."""
    folders = record_folders(args.records)
    if args.names:
        folders = [record.folder or record.logs[0].path.parent for record in open_records(args.names, args.records)]
    without = [folder for folder in folders if not (folder / SCRIPT).is_file()]
    if without:
        raise UserError(f"{shown(without[0])}: no {SCRIPT} to run in this folder")
    wanted = [(folder, seed) for seed in args.seeds for folder in folders]
    missing = [(folder, seed) for folder, seed in wanted if not is_measured(folder, seed)]
    print(f"{len(wanted) - len(missing)} of {len(wanted)} runs are there already")
    for number, (folder, seed) in enumerate(missing, start=1):
        load = os.getloadavg()[0]
        busy = paint(f" (the machine is busy: load {load:.1f})", "yellow") if load > 1.5 and number == 1 else ""
        print(f"{number}/{len(missing)}: {folder.name}, seed {seed}{busy}", flush=True)
        print(f"    {run(folder, seed)}", flush=True)
    return 0


def is_measured(folder: Path, seed: int) -> bool:
    source = (folder / SCRIPT).read_bytes()
    return any(
        log.seed == str(seed) and log.source and same_source(log.source, source) and any(r.complete for r in log.runs)
        for log in map(read_log, log_files(folder))
    )


def run(folder: Path, seed: int) -> str:
    """One run through run.sh; its log goes into the record's folder when it is whole, and only then."""
    (ROOT / "logs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "logs", prefix="unfinished_") as unfinished:
        log_dir = os.path.relpath(unfinished, ROOT)  # a log need not tell where on this machine it was written
        command = ["./run.sh", str(folder), "--seed", str(seed), "--log_dir", log_dir, "--save_every", "0"]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=sys.stderr, text=True)
        logs = list(Path(unfinished).glob("*.txt"))
        if done.returncode or len(logs) != 1:
            raise UserError(f"{folder.name} with seed {seed} ended with exit code {done.returncode}")
        shutil.copy(logs[0], folder / "unfinished.tmp")
        (folder / "unfinished.tmp").rename(folder / logs[0].name)
    return next(line for line in done.stdout.splitlines() if line.startswith("validation loss"))
