"""The READMEs of the records say what the logs beside them say, and name every log that is there.

Records are folders of records/ with a train_gpt.py; one that has not been measured yet has no logs and no rows.
"""

import re
import statistics

import pytest
from helpers import ROOT

from records.logs import read_log, same_source

RECORDS = sorted(path.parent for path in (ROOT / "records").glob("*/train_gpt.py"))


def logs_of(folder) -> list:
    return [read_log(path) for path in sorted(folder.glob("*.txt"))]


def runs_of(folder) -> dict[str, tuple[int, int, float, float]]:
    """What each log proves of the script beside it: seed, steps, final loss, seconds."""
    found, script = {}, (folder / "train_gpt.py").read_bytes()
    for log in logs_of(folder):
        (run,) = log.runs
        assert run.complete and not log.complaints and same_source(log.source, script)
        last = run.validations[-1]
        found[log.path.name] = int(log.seed), run.steps, last.loss, last.seconds
    return found


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


of_each = pytest.mark.parametrize("folder", RECORDS, ids=lambda folder: folder.name)


@of_each
def test_a_records_readme_has_one_row_for_each_of_its_logs(folder):
    rows = re.findall(r"^\| .*\.txt\) \|$", (folder / "README.md").read_text(), re.MULTILINE)
    told = {}
    for seed, steps, loss, seconds, link in map(cells, rows):
        name = re.fullmatch(r"\[(\w{8})\]\((\1[-\w]*\.txt)\)", link)[2]
        told[name] = int(seed), int(steps.replace(",", "")), float(loss), float(seconds.removesuffix(" s"))
    assert told == {name: (*run[:3], round(run[3], 1)) for name, run in runs_of(folder).items()}


@of_each
def test_a_measured_record_reaches_its_target_with_every_seed_that_was_run(folder):
    runs, targets = runs_of(folder).values(), {log.target for log in logs_of(folder)}
    assert len({seed for seed, *_ in runs}) == len(runs), "a seed was run twice"
    assert len({steps for _, steps, *_ in runs}) <= 1 and len(targets) <= 1, "runs of one record differ"
    assert all(loss <= target for _, _, loss, _ in runs for target in targets)


def test_the_table_of_all_records_is_that_of_their_logs():
    def mean_and_spread(values, digits):
        return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"

    rows = re.findall(r"^\| \[.*\]\(.*\) \|.*$", (ROOT / "records/README.md").read_text(), re.MULTILINE)
    told = [tuple(row) for *row, _ in map(cells, rows)]
    slowest, expected = None, []
    for folder in RECORDS:
        measured = "not measured yet", "", "", "", ""
        if runs := runs_of(folder):
            _, steps, losses, seconds = zip(*runs.values(), strict=True)
            slowest = slowest or statistics.mean(seconds)  # the first record, which the others are compared with
            figures = mean_and_spread(losses, 4), f"{mean_and_spread(seconds, 1)} s"
            times = f"{slowest / statistics.mean(seconds):.1f} times"
            measured = str(len(steps)), f"{steps[0]:,}", *figures, times
        expected.append((f"[{folder.name}]({folder.name})", *measured))
    assert told == expected


def test_records_are_compared_on_one_machine_which_their_readmes_name():
    used = {folder: {log.hardware for log in logs_of(folder)} for folder in RECORDS}
    machines = set().union(*used.values())
    assert len(machines) <= 1, f"times are compared between {machines}"
    for folder, hardware in used.items():
        told = re.search(r"\(hardware: (.*?)\)", (folder / "README.md").read_text())
        assert not hardware or (told and hardware.pop().startswith(told[1]))
