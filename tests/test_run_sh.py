"""run.sh as a newcomer uses it, in a copy of the repository."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, only_log


@pytest.fixture
def copy(tmp_path, shards):
    """What run.sh needs, beside the tiny shards of the fixture."""
    for name in ("run.sh", "train_gpt.py", "sample.py", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    for script in (ROOT / "data").glob("*.py"):
        shutil.copy(script, tmp_path / "data")
    return tmp_path


def environment() -> dict:
    return os.environ | dict(VENV=sys.prefix, CUDA_VISIBLE_DEVICES="", PROCESSES="2")


def run_sh(folder, *arguments, timeout=300, **variables):
    return subprocess.run(["./run.sh", *arguments], cwd=folder, env=environment() | variables, capture_output=True,
                          text=True, timeout=timeout)


def test_it_says_what_it_chose_trains_and_shows_a_sample(copy, shards):
    result = run_sh(copy, *shards, "--save_every=100", "--target_loss=9")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert any(line.startswith("no GPU: your training files, the LAPTOP settings, 2 processes of ") for line in lines)
    (end,) = (i for i, line in enumerate(lines) if re.match(r"validation loss .* target 9.0 reached; .* logs/", line))
    assert "world_size: 2" in only_log(copy).read_text()
    assert len("\n".join(lines[end + 1:])) > 0  # what an untrained model writes is nothing to compare with


def test_a_record_is_run_by_its_name(copy, shards):
    record = copy / "records/2025-01-01_Test"
    record.mkdir(parents=True)
    source = (copy / "train_gpt.py").read_text() + "# a record\n"
    (record / "train_gpt.py").write_text(source)
    result = run_sh(copy, "records/2025-01-01_Test", *shards)
    assert result.returncode == 0, result.stderr
    assert only_log(copy).read_text().startswith(source)


@pytest.mark.parametrize("before, after, message", [
    ([], ["--nonsense"], "train_gpt: unrecognized arguments: --nonsense (--help lists every setting)"),
    ([], ["--batch_sequences=1"], "train_gpt: --batch_sequences 1: fewer sequences than processes; start at most 1"),
    (["records/none"], [], "run.sh: records/none/train_gpt.py does not exist; there are: test rehearse "),
])
def test_bad_input_is_one_line_and_exit_code_2(copy, shards, before, after, message):
    result = run_sh(copy, *before, *shards, *after)
    assert result.returncode == 2
    assert result.stderr.splitlines() == [message]


@pytest.mark.parametrize("count", ["0", "x", "-1", "1.5"])
def test_an_impossible_number_of_processes_is_told(copy, shards, count):
    result = run_sh(copy, *shards, PROCESSES=count)
    assert result.returncode == 2
    assert result.stderr == f"run.sh: PROCESSES={count}: must be a number of processes, 1 or more\n"


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_needs_no_data(copy, flag):
    result = run_sh(copy, flag)
    assert result.returncode == 0 and "--num_iterations int" in result.stdout


def test_terminating_it_finishes_the_step_and_passes_143_on(copy, shards):
    process = subprocess.Popen(["./run.sh", *shards, "--num_iterations=100000", "--save_every=50000"], cwd=copy,
                               env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step:3/"):
            break
    process.send_signal(signal.SIGTERM)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    assert re.search(r"stopped after step \d+ by SIGTERM; last checkpoint: checkpoints/", rest)
    assert "Traceback" not in errors


def test_a_killed_process_is_named(copy, shards):
    process = subprocess.Popen(["./run.sh", *shards, "--num_iterations=100000"], cwd=copy, env=environment(),
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step:3/"):
            break
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    for child in children:
        with contextlib.suppress(OSError):  # some helpers of torchrun come and go
            if b"\0RANK=1\0" in Path(f"/proc/{child}/environ").read_bytes():
                os.kill(int(child), signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 137, errors
    assert errors.splitlines()[-1] == "run.sh: rank 1 was killed by SIGKILL" and "Traceback" not in errors
