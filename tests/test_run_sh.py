"""run.sh as a newcomer uses it, in a copy of the repository."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ONE_THREAD, ROOT, Started, checkpoint, only_log

import launch

USED = ("run.sh", "launch.py", "train_gpt.py", "sample.py", "requirements.txt")


@pytest.fixture
def copy(folder) -> Path:
    """What run.sh needs, beside the tiny shards."""
    for name in USED:
        shutil.copy(ROOT / name, folder)
    for script in (ROOT / "data").glob("*.py"):
        shutil.copy(script, folder / "data")
    return folder


def environment(**variables: str) -> dict:
    return ONE_THREAD | dict(VENV=sys.prefix, PROCESSES="2") | variables


def run_sh(folder: Path, *arguments: str, **variables: str):
    command = [str(folder / "run.sh"), *arguments]
    return subprocess.run(command, env=environment(**variables), capture_output=True, text=True, timeout=300)


class StartedByRunSh(Started):
    """A run by run.sh in the background."""

    def __init__(self, folder: Path, *arguments: str):
        self.folder, self.seen = folder, {}
        with open(folder / "out", "w") as out, open(folder / "err", "w") as err:
            command = [str(folder / "run.sh"), *arguments]
            self.process = subprocess.Popen(command, env=environment(), stdout=out, stderr=err)


def test_it_says_what_it_chose_trains_and_shows_a_sample(copy, shards):
    result = run_sh(copy, *shards, "--save_every=100", "--target_loss=9")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("no GPU: the CPU track's settings, 2 processes of 1 threads on ")
    assert lines[0].endswith("; your training files")
    assert any(re.match("validation loss .* target 9.0 reached", line) for line in lines)
    assert "world_size: 2" in only_log(copy).read_text()
    saved = checkpoint(copy, 4).relative_to(copy)
    place = lines.index(f"what the model writes (python sample.py {saved}):")
    assert lines[place + 1 :]  # what an untrained model writes is nothing to compare with


@pytest.mark.parametrize(
    "version, complaint",
    [
        ("2.7.18", "Python 3.10 or newer is needed"),
        ("3.9.21", "Python 3.10 or newer is needed"),
        ("3.10.0", "cannot make the virtual environment new"),
        ("3.14.2", "cannot make the virtual environment new"),
    ],
)
def test_a_python_that_is_too_old_is_refused_before_anything_is_made(copy, version, complaint):
    answers = copy / "python"  # an interpreter's answer to --version; it can do nothing else
    answers.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo Python {version}\n')
    answers.chmod(0o755)
    result = run_sh(copy, VENV="new", PYTHON=str(answers))
    assert (result.returncode, result.stderr) == (2, f"run.sh: {complaint}\n")
    assert not (copy / "new").exists()


def make_records(folder: Path, *names: str) -> str:
    """Records with a script of their own; returns the source of the last."""
    for name in names:
        source = (ROOT / "train_gpt.py").read_text() + f"# {name}\n"
        path = folder / "records" / name / "train_gpt.py"
        path.parent.mkdir(parents=True)
        path.write_text(source)
    return source


@pytest.mark.parametrize(
    "name", ["records/2025-01-01_SoftTest", "records/2025-01-01_SoftTest/train_gpt.py", "softtest"]
)
def test_a_record_is_run_by_its_folder_or_name_and_its_sample_is_its_own(copy, shards, name):
    source = make_records(copy, "2024-12-31_HardTest", "2025-01-01_SoftTest")
    result = run_sh(copy, name, *shards, "--save_every=4")
    assert result.returncode == 0, result.stderr
    assert only_log(copy).read_text().startswith(source)
    assert "--script records/2025-01-01_SoftTest/train_gpt.py):\n" in result.stdout and result.stderr == ""


@pytest.mark.parametrize(
    "name, found",
    [
        ("2024-12-31_HardTest", "2024-12-31_HardTest"),
        ("Hard", "2024-12-31_HardTest"),
        ("hardtest", "2024-12-31_HardTest"),
        ("test", "0_Test"),  # the whole name before a part of one
        ("2024", "2024: could be 2024-01-01_Other or 2024-12-31_HardTest"),
        ("none", "none: not a command or a record: bench test rehearse 0_Test 2024-01-01_Other 2024-12-31_HardTest"),
    ],
)
def test_a_short_name_means_the_record_that_the_records_tool_finds(tmp_path, monkeypatch, name, found):
    make_records(tmp_path, "2024-01-01_Other", "2024-12-31_HardTest", "0_Test")
    monkeypatch.chdir(tmp_path)
    try:
        assert launch.find_script(name) == Path("records", found, "train_gpt.py")
    except launch.UserError as error:
        assert str(error) == found


@pytest.mark.parametrize(
    "visible, gpus", [(None, 2), ("", 0), ("-1", 0), ("1", 1), ("0,1", 2), ("GPU-8f1e, GPU-77ab", 2)]
)
def test_gpus_are_counted_as_cuda_would_show_them(tmp_path, monkeypatch, visible, gpus):
    assert shutil.which("nvidia-smi") or launch.count_gpus() == 0
    tool = tmp_path / "nvidia-smi"  # prints what the real one prints on a machine with two GPUs
    tool.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-8f1e)'\necho 'GPU 1: NVIDIA H100'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert launch.count_gpus() == gpus


@pytest.mark.parametrize(
    "before, after, message",
    [
        ([], ["--nonsense"], "train_gpt: --nonsense: not a setting; "),
        ([], ["--batch_sequences=1"], "train_gpt: --batch_sequences 1: this must hold: processes <= batch_sequences"),
        (["records/none"], [], "run.sh: records/none: not a command or a record: bench test rehearse "),
        ([], ["--train_files=none.bin"], "train_gpt: none.bin: no token shard;"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(copy, shards, before, after, message):
    result = run_sh(copy, *before, *shards, *after)
    assert result.returncode == 2
    assert result.stderr.startswith(message) and result.stderr.count("\n") == 1


@pytest.mark.parametrize("count", ["0", "x", "-1", "1.5"])
def test_an_impossible_number_of_processes_is_told(copy, shards, count):
    result = run_sh(copy, *shards, PROCESSES=count)
    assert result.returncode == 2
    assert result.stderr == f"run.sh: PROCESSES={count}: must be a number of processes, 1 or more\n"


def test_data_that_cannot_be_made_ends_it_with_the_datas_own_line(copy):
    (copy / "data/embedded").write_text("in the way")
    result = run_sh(copy)
    assert result.returncode == 2 and "Traceback" not in result.stderr and result.stderr.count("\n") == 1


def test_help_needs_no_data_and_lists_commands_and_settings(copy):
    for result in (run_sh(copy, "--help"), run_sh(copy, "-h")):
        assert result.returncode == 0 and "./run.sh bench" in result.stdout and "--num_iterations" in result.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ending_it_finishes_the_step_and_the_last_line_is_the_command_that_goes_on(copy, shards, number):
    with StartedByRunSh(copy, *shards, "--num_iterations=150") as run:
        run.wait_for("step:3/").signal(number)
        assert run.exit_code() == 128 + number, run.err
    (saved,) = copy.glob("checkpoints/*/step_*.pt")
    assert run.out.splitlines()[-1] == f"to go on from here: ./run.sh --resume {saved.relative_to(copy)}"
    assert "Traceback" not in run.err
    result = run_sh(copy, "--resume", str(saved.relative_to(copy)))
    assert result.returncode == 0, result.stderr
    assert "the checkpoint's training files\n" in result.stdout and "step:150/150 train_loss" in result.stdout


def test_a_killed_process_is_named(copy, shards):
    with StartedByRunSh(copy, *shards, "--num_iterations=100000") as run:
        run.wait_for("step:3/")
        os.kill(run.ranks()[1], signal.SIGKILL)
        assert run.exit_code() == 137, run.err
    assert run.err.splitlines()[-1] == "run.sh: rank 1 was killed by SIGKILL"
