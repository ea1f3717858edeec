"""Twenty kills at random times: a run under torchrun that restarts, resumes, and ends as if nothing had happened.

    python tests/kill_twenty.py                                  20 kills, 3 processes
    python tests/kill_twenty.py --kills 5 --processes 2 --seed 7

First the run is done once without a kill. Then it is started again under `torchrun --max-restarts=3` with
`--resume latest`, a random rank gets a SIGKILL after a random time, again and again, and when torchrun has used up its
restarts it is started again. In the end every step's loss and every bit of the last checkpoint must be the same.
"""

import argparse
import os
import random
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

from helpers import Started, checkpoint, differences, make_data, run_script, tiny_flags


def goes_on(run: Started, seconds: float) -> bool:
    """Does the run last for so long?"""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and run.process.poll() is None:
        time.sleep(0.01)
    return run.process.poll() is None


def losses(folder: Path) -> dict[str, set[str]]:
    """The losses that the logs have of each step; more than one, if a repeated step gave another."""
    found = {}
    for log in folder.glob("logs/*.txt"):
        for step, loss in re.findall(r"^step:(\d+)/\d+ train_loss:(\S+)", log.read_text(), re.MULTILINE):
            found.setdefault(step, set()).add(loss)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--longest", type=float, default=12.0, help="seconds until the next kill at most")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    arguments = tiny_flags(num_iterations=options.steps, save_every=1)
    with tempfile.TemporaryDirectory() as of_reference, tempfile.TemporaryDirectory() as of_run:
        reference, folder = make_data(Path(of_reference)), make_data(Path(of_run))
        result = run_script(arguments, reference, options.processes)
        assert result.returncode == 0, result.stderr
        print(f"uninterrupted: {options.steps} steps, {result.stdout.splitlines()[-1]}")

        kills = starts = 0
        finished = False
        while not finished:
            starts += 1
            with Started(folder, [*arguments, "--resume=latest"], options.processes, restarts=3) as run:
                while goes_on(run, chance.uniform(0, options.longest)):
                    victims = run.ranks()
                    if kills == options.kills or not victims:
                        continue
                    rank = chance.choice(sorted(victims))
                    os.kill(victims[rank], signal.SIGKILL)
                    kills += 1
                    saved = sorted(path.name for path in folder.glob("checkpoints/*/*"))
                    print(f"kill {kills}: rank {rank}; checkpoint folder: {', '.join(saved) or 'nothing'}", flush=True)
                finished = run.exit_code(600) == 0
        assert kills == options.kills, f"the run was over after {kills} kills: give it more --steps"

        changed = differences(checkpoint(folder, options.steps), checkpoint(reference, options.steps))
        same = losses(folder) == losses(reference) and len(losses(folder)) == options.steps
        print(
            f"{kills} kills, torchrun started {starts} times; {len(losses(folder))} steps, their losses "
            f"{'are those' if same else 'DIFFER from those'} of the uninterrupted run; "
            f"{len(changed)} differences in the last checkpoint's bits"
        )
        return 0 if same and not changed else 1


if __name__ == "__main__":
    sys.exit(main())
