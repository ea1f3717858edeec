"""The READMEs of the records say what the logs beside them say, and name every log that is there."""

import re
import statistics

import pytest
from helpers import ROOT

from records.logs import read_log, same_source

RECORDS = sorted(path.parent for path in (ROOT / "records").glob("*/train_gpt.py"))
CURRENT = RECORDS[-1]


def runs_of(folder) -> dict[str, tuple[int, int, float, float]]:
    """What each log proves of the script beside it: seed, steps, final loss, seconds."""
    found, script = {}, (folder / "train_gpt.py").read_bytes()
    for path in sorted(folder.glob("*.txt")):
        log = read_log(path)
        (run,) = log.runs
        assert run.complete and not log.complaints and same_source(log.source, script)
        last = run.validations[-1]
        found[path.name] = int(log.seed), run.steps, last.loss, last.seconds
    return found


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


@pytest.mark.parametrize("folder", RECORDS, ids=lambda folder: folder.name)
def test_a_records_readme_has_one_row_for_each_of_its_logs(folder):
    rows = re.findall(r"^\| .*\.txt\) \|$", (folder / "README.md").read_text(), re.MULTILINE)
    told = {}
    for seed, steps, loss, seconds, link in map(cells, rows):
        name = re.fullmatch(r"\[(\w{8})\]\((\1[-\w]*\.txt)\)", link)[2]
        told[name] = int(seed), int(steps.replace(",", "")), float(loss), float(seconds.removesuffix(" s"))
    expected = {name: (seed, steps, loss, round(seconds, 1)) for name, (seed, steps, loss, seconds)
                in runs_of(folder).items()}
    assert told == expected


@pytest.mark.parametrize("folder", RECORDS, ids=lambda folder: folder.name)
def test_every_record_reaches_the_target_with_every_seed_that_was_run(folder):
    runs = runs_of(folder).values()
    seeds, steps, losses, _ = zip(*runs, strict=True)
    assert len(set(seeds)) == len(seeds) >= (5 if folder == CURRENT else 2)
    assert len(set(steps)) == 1
    assert max(losses) <= 1.04


def test_the_table_of_all_records_is_that_of_their_logs():
    def mean_and_spread(values, digits):
        return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"

    rows = re.findall(r"^\| \[.*\]\(.*\) \|.*$", (ROOT / "records/README.md").read_text(), re.MULTILINE)
    told = [(name, *rest) for name, _, _, *rest in map(cells, rows)]
    baseline, expected = None, []
    for folder in RECORDS:
        _, steps, losses, seconds = zip(*runs_of(folder).values(), strict=True)
        baseline = baseline or statistics.mean(seconds)
        expected.append((f"[{folder.name}]({folder.name})", str(len(steps)), f"{steps[0]:,}",
                         mean_and_spread(losses, 4), f"{mean_and_spread(seconds, 1)} s",
                         f"{baseline / statistics.mean(seconds):.1f} times"))
    assert told == expected


def test_all_records_were_measured_on_the_same_hardware_which_their_readmes_name():
    used = {read_log(path).hardware for folder in RECORDS for path in folder.glob("*.txt")}
    assert len(used) == 1, f"times are compared between {used}"
    (hardware,) = used
    for folder in RECORDS:
        told = re.search(r"\(hardware: (.*?)\)", (folder / "README.md").read_text())
        assert told and hardware.startswith(told[1])
