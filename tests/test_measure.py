"""`python -m records measure`: stopped at any time, it goes on where it was, and files whole logs only."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from helpers import ROOT, TINY, flags, made_up_tokens, write_shard

COMMAND = [sys.executable, "-m", "records", "measure", "--seeds", "1", "2"]


@pytest.fixture
def house(tmp_path):
    """A copy of the repository with two tiny records."""
    for name in ("run.sh", "launch.py", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/embedded_corpus.py").write_text("# the shards of this test are there already\n")
    write_shard(tmp_path / "data/tiny_train.bin", made_up_tokens(20_000, seed=1))
    write_shard(tmp_path / "data/tiny_val.bin", made_up_tokens(3_000, seed=9))
    tiny = flags(train_files="data/tiny_train.bin", val_files="data/tiny_val.bin", target_loss=9.0, **TINY)
    main = 'if __name__ == "__main__":\n'
    source = (ROOT / "train_gpt.py").read_text()
    assert source.count(main) == 1
    source = source.replace(main, f"{main}    __import__('sys').argv[1:1] = {tiny}\n")
    for name in ("1_First", "2_Second"):
        (tmp_path / "records" / name).mkdir(parents=True)
        (tmp_path / "records" / name / "train_gpt.py").write_text(f"{source}# {name}\n")
    for part in (ROOT / "records").glob("*.*"):  # the tool, and what its pages are made of
        shutil.copy(part, tmp_path / "records")
    return tmp_path


def environment() -> dict:
    return os.environ | dict(VENV=sys.prefix, CUDA_VISIBLE_DEVICES="", PROCESSES="1")


def filed(house) -> dict:
    return {record.name: sorted(log.name for log in record.glob("*.txt")) for record in house.glob("records/[12]_*")}


def test_a_run_that_was_stopped_is_made_again_and_a_finished_one_is_not(house):
    first = subprocess.Popen(
        COMMAND,
        cwd=house,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not any(filed(house).values()) and first.poll() is None:
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate(timeout=60)
    before = filed(house)
    assert 1 <= sum(map(len, before.values())) < 4

    again = subprocess.run(COMMAND, cwd=house, env=environment(), capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    after = filed(house)
    assert [len(logs) for logs in after.values()] == [2, 2]
    assert all(set(before[name]) <= set(after[name]) for name in before)
    for record in house.glob("records/[12]_*"):
        source, logs = (record / "train_gpt.py").read_text(), [log.read_text() for log in record.glob("*.txt")]
        assert all(log.startswith(source) and "step:4/4 val_loss:" in log for log in logs)
        assert {f"seed: {seed}" for seed in (1, 2)} == {
            line for log in logs for line in log.splitlines() if line.startswith("seed: ")
        }
        assert sorted(path.suffix for path in record.iterdir()) == [".py", ".txt", ".txt"]

    third = subprocess.run(COMMAND, cwd=house, env=environment(), capture_output=True, text=True, timeout=60)
    assert third.stdout == "4 of 4 runs are there already\n" and filed(house) == after


def test_a_record_whose_script_changed_is_measured_again(house):
    command = [sys.executable, "-m", "records", "measure", "First", "--seeds", "1"]
    for runs in (1, 2):
        done = subprocess.run(command, cwd=house, env=environment(), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and done.stdout.startswith("0 of 1 runs"), done.stderr
        assert "\n    validation loss " in done.stdout and done.stderr == ""
        assert len(filed(house)["1_First"]) == runs and not filed(house)["2_Second"]
        with open(house / "records/1_First/train_gpt.py", "a") as script:
            script.write("# changed\n")


def test_a_failing_run_files_nothing_and_is_told_in_one_line(house):
    (house / "data/tiny_val.bin").write_bytes(b"short")
    done = subprocess.run(COMMAND, cwd=house, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "records: 1_First with seed 1 ended with exit code 2"
    assert not any(filed(house).values())
