"""`python -m records ablate`: ideas left out one by one, two runs at a time, and what the results show."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT, TINY, alive, flags, val_losses, wait_until
from records_helpers import tool
from scipy import stats

from records.ablate import BEGIN, END, RESULTS, Study, hold_out

STUDIED = sorted(
    path.parent for path in (ROOT / "records").glob("*/ideas.toml") if (path.parent / "train_gpt.py").exists()
)
IDEAS = """
["Muon's rate"]
settings = { muon_lr = 0 }

["squared ReLU"]
replace = [["F.relu(x_TC @ expand_CF).square()", "F.relu(x_TC @ expand_CF)"]]

["FP8"]
unseen = "a CPU has none."
"""


@pytest.fixture
def record(tmp_path):
    """A tiny record with two ideas, in a copy of the repository."""
    folder = tmp_path / "records/1_Tiny"
    folder.mkdir(parents=True)
    shutil.copytree(ROOT / "data", tmp_path / "data", ignore=lambda *_: ["embedded"])
    shutil.copy(ROOT / "launch.py", tmp_path)
    for part in (ROOT / "records").glob("*.py"):
        shutil.copy(part, tmp_path / "records")
    main = 'if __name__ == "__main__":\n'
    source = (ROOT / "train_gpt.py").read_text()
    assert source.count(main) == 1
    (folder / "train_gpt.py").write_text(
        source.replace(main, f"{main}    __import__('sys').argv[1:1] = {flags(**TINY)}\n")
    )
    (folder / "ideas.toml").write_text(IDEAS)
    (folder / "README.md").write_text(f"# Tiny\n\n{BEGIN}{END}\n\nThe end.\n")
    return folder


def start(record, *arguments):
    command = [sys.executable, "-m", "records", "ablate", "Tiny", *arguments]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, cwd=record.parent.parent, start_new_session=True, **pipes)


def results(record) -> list[dict]:
    path = record / RESULTS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def runs(record) -> set[tuple[str, int]]:
    return {(line["idea"], line["steps"]) for line in results(record)}


# ---- Real runs -------------------------------------------------------------------------------------------------------


def test_it_goes_on_where_it_stopped_and_its_losses_are_those_of_the_edited_scripts(record, tmp_path):
    first = start(record, "--seeds", "7", "--steps", "4", "--minutes", "0.001")  # time enough to start two runs
    out, err = first.communicate(timeout=300)
    assert first.returncode == 0 and out.startswith("0 of 5 runs are there already\nunchanged, "), err
    assert runs(record) == {("", 4), ("", 5)}

    second = start(record, "--seeds", "7")  # the number of steps is that of the results
    while len(results(record)) < 3 and second.poll() is None:
        time.sleep(0.05)
    children = Path(f"/proc/{second.pid}/task/{second.pid}/children")
    wait_until(lambda: len(children.read_text().split()) == 2)
    processes = [int(pid) for pid in children.read_text().split()]
    second.send_signal(signal.SIGTERM)
    assert second.wait(120) == 130 and not any(map(alive, processes))
    kept = runs(record)
    assert kept < {("", 4), ("", 5), ("", 3), ("Muon's rate", 4), ("squared ReLU", 4)} and len(kept) >= 3

    third = start(record, "--seeds", "7")
    out, err = third.communicate(timeout=300)
    assert third.returncode == 0 and out.startswith(f"{len(kept)} of 5 runs are there already\n"), err
    assert len(results(record)) == 5 and runs(record) == kept | {("", 3), ("Muon's rate", 4), ("squared ReLU", 4)}
    losses = {(line["idea"], line["steps"]): line["loss"] for line in results(record)}
    assert len(set(losses.values())) == 5 and all(line["seconds"] > 0 for line in results(record))

    hold_out(tmp_path)
    shards = [f"--train_files={tmp_path}/own_train_.bin", f"--val_files={tmp_path}/own_val_.bin", "--seed=7"]
    by_hand = [sys.executable, record / "train_gpt.py", *shards, "--num_iterations=4", "--muon_lr=0"]
    run = dict(cwd=tmp_path, env=os.environ | dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""), timeout=300)
    done = subprocess.run(by_hand, capture_output=True, text=True, **run)
    assert val_losses(done.stdout)[-1] == losses["Muon's rate", 4], done.stderr

    readme = (record / "README.md").read_text()
    assert readme.startswith(f"# Tiny\n\n{BEGIN}Measured: ") and readme.endswith(f"{END}\n\nThe end.\n")
    assert Study(record).table() in readme and Study(record).table() in out


def test_a_run_that_fails_is_told_in_one_line_and_files_nothing(record):
    (record / "ideas.toml").write_text('["too much"]\nsettings = { gate_lr = -1 }\n')
    process = start(record, "--seeds", "1", "--steps", "2")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2 and len(err.splitlines()) == 1
    assert err.startswith("records: without too much, seed 1: ended with exit code 2: train_gpt: --gate_lr -1.0: ")
    assert not any(line["idea"] for line in results(record))


def test_documents_are_held_out_of_the_training_documents_whole_and_always_the_same(tmp_path):
    hold_out(tmp_path)
    import embedded_corpus as corpus  # hold_out has put its folder on the path

    documents, _ = corpus.torch_documents(corpus.pinned_torch())
    tokens = {name: np.fromfile(tmp_path / f"own_{name}_.bin", "<u2", offset=1024) for name in ("train", "val")}
    held_out = bytes(tokens["val"][tokens["val"] < 256].astype(np.uint8))
    assert held_out == b"".join(text for digest, text in documents if 8 <= digest[0] < 33)
    training = sum(len(text) for digest, text in documents if digest[0] >= 8)
    assert 0.08 < len(held_out) / training < 0.12
    assert (tokens["train"] < 256).sum() == training - len(held_out)


# ---- What the results show -------------------------------------------------------------------------------------------


def add(study, seed, losses, seconds):
    """Results of the unchanged script, of it with more and with fewer steps, and of the script without Muon's rate."""
    for variant, loss, time_of_run in zip(study.variants, losses, seconds, strict=False):
        study.add(variant, seed, float(loss), float(time_of_run))


def measured(record, steps=100):
    """Four seeds of each run, with noise: leaving out Muon's rate costs 0.05 and saves a tenth of the time."""
    study, random = Study(record, steps), np.random.default_rng(0)
    for seed in (1, 2, 3, 4):
        losses = np.array([1.0, 0.99, 1.01, 1.05]) + 0.001 * random.standard_normal(4)
        add(study, seed, losses, [10 + 0.1 * seed, 11.0, 9.0, 9 + 0.1 * seed])
    return Study(record)


def test_intervals_are_those_of_scipy_and_of_the_delta_method(record):
    study = measured(record)
    full, more, fewer, without = np.array([line["loss"] for line in results(record)]).reshape(4, 4).T
    (row,) = [line for line in study.table().splitlines() if line.startswith("| Muon's rate |")]
    _, seeds, loss, steps, percent, seconds = [cell.strip() for cell in row.strip("|").split("|")]

    paired = stats.ttest_rel(without, full).confidence_interval(0.95)
    assert loss == f"{np.mean(without - full):+.4f} ± {(paired.high - paired.low) / 2:.4f}" and seeds == "4"

    (var_x, cov), (_, var_y) = np.cov(without - full, (fewer - more) / 20)
    x, y = np.mean(without - full), np.mean(fewer - more) / 20
    half = stats.t.ppf(0.975, 3) * np.sqrt((var_x - 2 * x / y * cov + (x / y) ** 2 * var_y) / 4) / y
    assert steps == f"{x / y:+.0f} ± {half:.0f}" and 40 < x / y < 60
    expected, low, high = x / y, x / y - half, x / y + half

    ratio = np.median([(9 + 0.1 * seed) / (10 + 0.1 * seed) for seed in (1, 2, 3, 4)])
    assert percent == f"{100 * ratio - 100:+.1f} %"
    shown, interval = map(float, re.fullmatch(r"(\S+) ± (\S+) s", seconds).groups())
    longer = [10.25 * ((1 + more / 100) * ratio - 1) for more in (expected, low, high)]
    assert shown == pytest.approx(longer[0], abs=0.06)
    assert interval == pytest.approx((longer[2] - longer[1]) / 2, abs=0.06)


def test_an_idea_that_changes_the_number_of_steps_shows_its_time_per_step_and_that_of_the_whole_run(record):
    (record / "ideas.toml").write_text('["growing batch"]\nsettings = { muon_lr = 0 }\nsteps = 0.8\n')
    study = Study(record, 100)
    add(study, 1, [1.0, 0.9, 1.1, 1.1], [10.0, 11.0, 9.0, 12.0])  # 10 steps worse, 1.5 times as long per step
    assert "| growing batch | 1 | +0.1000 | +10 | +50.0 % | +3.2 s |" in study.table()


def test_a_seed_counts_once_the_unchanged_script_has_its_three_runs(record):
    study = Study(record, 100)
    add(study, 1, [1.0, 0.9, 1.1, 1.1], [10.0] * 4)
    for variant in (study.variants[0], study.variants[1], study.variants[3]):
        study.add(variant, 2, 5.0, 10.0)
    assert "ends at 1.0000 after" in study.table() and "| Muon's rate | 1 | +0.1000 | +10 |" in study.table()


def test_without_results_the_table_says_so_and_still_names_what_cannot_be_seen(record):
    assert Study(record).table().splitlines()[0].endswith("has not been measured yet.")
    assert Study(record).table().endswith("- FP8: a CPU has none.")


def test_one_seed_has_no_interval_and_steps_that_do_not_help_no_effect_in_steps(record):
    study = Study(record, 100)
    add(study, 1, [1.0, 1.1, 1.0, 1.2], [10.0] * 4)
    add(study, 2, [1.0, 1.0, 1.1, 1.2], [10.0] * 4)
    assert "| Muon's rate | 2 | +0.2000 ± 0.0000 | - | +0.0 % | - |" in study.table()  # what a step is worth: 0
    (record / RESULTS).unlink()
    study = Study(record, 100)
    add(study, 1, [1.0, 1.1, 1.0, 1.2], [10.0] * 4)
    assert "| Muon's rate | 1 | +0.2000 | - | +0.0 % | - |" in study.table()


# ---- What is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "file, text, what",
    [
        ("train_gpt.py", "# a comment", "16 lines of another script, idea or number of steps (unchanged, Muon's rate)"),
        ("ideas.toml", '["Muon\'s rate"]\nsettings = { muon_lr = 0.1 }\n', "4 lines of another script, idea or number"),
        ("ideas.toml", '["other"]\nsettings = { muon_lr = 0 }\n', "4 lines of another script, idea or number"),
        (RESULTS, '{"idea": "torn', "line 17 is no result; delete it"),
        (RESULTS, '{"idea": "x", "seed": 1, "steps": 1, "loss": 1, "seconds": 1, "sha256": 1}', "line 17 is no result"),
    ],
)
def test_results_that_do_not_fit_are_refused_in_one_line(record, file, text, what):
    measured(record)
    before = (record / RESULTS).read_bytes()
    with open(record / file, "w" if file == "ideas.toml" else "a") as changed:
        changed.write(f"{text}\n")
    err = tool("ablate", record, "--minutes", 0, code=2).err
    assert what in err and len(err.splitlines()) == 1 and (record / RESULTS).read_bytes().startswith(before)


@pytest.mark.parametrize(
    "ideas, what",
    [
        ('["a"]\nreplace = [["no such text", ""]]', "a: 'no such text' stands 0 times in the script, not once"),
        ('["a"]\nreplace = [["import ", ""]]', "times in the script, not once"),
        ('["a"]\nreplace = ["old", "new"]', "a: must have settings"),
        ('["a"]\nreplace = [["old"]]', "a: must have settings"),
        ('["a"]\nsettings = 1', "a: must have settings"),
        ('["a"]\nflags = "--x"', "a: must have settings"),
        ('["a"]\nsteps = 0.9', "a: must have settings"),
        ("a = 1", "a: must have settings"),
        ('["a"', "ideas.toml: "),
    ],
)
def test_an_idea_that_cannot_be_left_out_is_refused_in_one_line(record, ideas, what):
    (record / "ideas.toml").write_text(ideas)
    err = tool("ablate", record, "--minutes", 0, code=2).err
    assert what in err and "ideas.toml: " in err and len(err.splitlines()) == 1


def test_a_record_without_ideas_is_refused_in_one_line(record):
    (record / "ideas.toml").unlink()
    assert tool("ablate", record, code=2).err == f"records: {record / 'ideas.toml'}: No such file or directory\n"


# ---- The records of this repository ----------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", STUDIED, ids=lambda folder: folder.name)
def test_a_records_readme_has_the_table_of_its_results(folder):
    study, readme = Study(folder), (folder / "README.md").read_text()
    told = re.findall(re.escape(BEGIN) + "(.*?)" + re.escape(END), readme, re.DOTALL)
    assert told == [study.table() + "\n"] or not (told or study.results)


@pytest.mark.parametrize("folder", STUDIED, ids=lambda folder: folder.name)
def test_every_idea_left_out_is_another_script_with_settings_that_it_has(folder):
    study = Study(folder)
    for variant in study.variants:
        compile(variant.source, variant.title, "exec")
        known = set(re.findall(r"^    (\w+): \w+ = setting\(", variant.source, re.MULTILINE))
        assert {flag.partition("=")[0].removeprefix("--") for flag in variant.settings} <= known
    assert len({variant.sha256 for variant in study.variants}) == len(study.variants) - 2 > 5  # unchanged: three
