"""run.sh as a newcomer uses it, in a copy of the repository."""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import venv
import zipfile
from pathlib import Path

import pytest
from helpers import ONE_THREAD, ROOT, Started, alive, checkpoint, only_log, wait_until

import launch

USED = ("run.sh", "launch.py", "train_gpt.py", "sample.py", "requirements.txt")


@pytest.fixture
def copy(folder) -> Path:
    """What run.sh needs, beside the tiny shards."""
    for name in USED:
        shutil.copy(ROOT / name, folder)
    for script in (ROOT / "data").glob("*.py"):
        shutil.copy(script, folder / "data")
    shutil.copytree(ROOT / "records", folder / "records", ignore=shutil.ignore_patterns("[0-9]*_*", "__pycache__"))
    return folder


def environment(**variables: str) -> dict:
    return ONE_THREAD | dict(VENV=sys.prefix, PROCESSES="2") | variables


def run_sh(folder: Path, *arguments: str, **variables: str):
    command = [str(folder / "run.sh"), *arguments]
    return subprocess.run(command, env=environment(**variables), capture_output=True, text=True, timeout=300)


class StartedByRunSh(Started):
    """A run by run.sh in the background."""

    def __init__(self, folder: Path, *arguments: str, processes: int = 2):
        self.folder, self.seen = folder, {}
        with open(folder / "out", "w") as out, open(folder / "err", "w") as err:
            command = [str(folder / "run.sh"), *arguments]
            self.process = subprocess.Popen(command, env=environment(PROCESSES=str(processes)), stdout=out, stderr=err)


def test_it_says_what_it_chose_trains_and_shows_a_sample(copy, shards):
    result = run_sh(copy, *shards, "--save_every=100", "--target_loss=9", PROCESSES="")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("no GPU: the CPU track's settings, 1 process with ")
    assert lines[0].endswith("; your training files")
    assert any(re.match("validation loss .* target 9.0 reached", line) for line in lines)
    assert "world_size: 1" in only_log(copy).read_text()
    saved, log = checkpoint(copy, 4).relative_to(copy), only_log(copy).relative_to(copy)
    loss, seconds = re.search(r"step:4/4 val_loss:(\S+) train_time:(\d+)ms", (copy / log).read_text()).groups()
    gap = f"{9 - float(loss):.4f} below the target 9"
    assert f"result   validation loss {loss} after {float(seconds) / 1000:.1f} s of training, {gap}" in lines
    assert (
        f"next     another seed           ./run.sh {shlex.join(shards)} --save_every=100 --target_loss=9 --seed 2"
        in lines
    )
    assert f"sample.py {saved} --prompt 'The '" in result.stdout
    assert f"page     {log.with_suffix('.html')}" in lines and (copy / log).with_suffix(".html").is_file()
    place = lines.index(f"what the model writes (python sample.py {saved}):")
    assert lines[place + 1 :]  # what an untrained model writes is nothing to compare with


# ---- Set-up ----------------------------------------------------------------------------------------------------------


def set_up(folder: Path, **variables: str):
    """The set-up of ./run.sh with nothing behind it, and pip as on a machine without a configuration."""
    (folder / "launch.py").write_text("print('set up')\n")
    return run_sh(folder, **dict(VENV="new", PIP_CONFIG_FILE=os.devnull, PIP_FIND_LINKS="") | variables)


@pytest.mark.parametrize("version", ["2.7.18", "3.9.21", "3.15.0"])
def test_a_python_without_this_torch_is_refused_before_anything_is_made(copy, version):
    answers = copy / "python"  # an interpreter's answer to --version; it can do nothing else
    answers.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo Python {version}\n')
    answers.chmod(0o755)
    result = set_up(copy, PYTHON=str(answers))
    told = f"run.sh: Python 3.10 to 3.14 is needed, {answers} is Python {version}: PYTHON=... names another\n"
    assert (result.returncode, result.stderr, result.stdout) == (2, told, "")
    assert not (copy / "new").exists()


def test_no_python_at_all_is_one_line(copy):
    result = set_up(copy, PYTHON="python_of_nobody")
    told = "run.sh: Python 3.10 to 3.14 is needed, python_of_nobody is missing: PYTHON=... names another\n"
    assert (result.returncode, result.stderr) == (2, told)


def test_a_python_without_venv_is_one_line_that_says_what_to_install(copy):
    (copy / "without").mkdir()
    (copy / "without/ensurepip.py").write_text("raise ImportError\n")  # which Debian puts into python3-venv
    result = set_up(copy, PYTHON=sys.executable, PYTHONPATH=str(copy / "without"))
    told = f"run.sh: {sys.executable} has no venv (Debian, Ubuntu: apt install python3-venv)\n"
    assert (result.returncode, result.stderr, result.stdout) == (2, told, "")
    assert not (copy / "new").exists()


@pytest.fixture(scope="module")
def empty_venv(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(folder, with_pip=True)
    return folder


def write_wheels(folder: Path, *builds: str) -> str:
    """Packages of the names and versions that are required, with nothing in them, for pip to choose from."""
    folder.mkdir()
    versions = dict(numpy="2.0.0", huggingface_hub="1.0.0", tqdm="4.70.0")
    for name, version in [*versions.items(), *(("torch", build) for build in builds)]:
        about = f"{name}-{version}.dist-info"
        with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{about}/RECORD", "")
    return str(folder)


def write_nvidia_smi(folder: Path) -> str:
    """A PATH on which nvidia-smi prints what the real one prints on a machine with two GPUs."""
    tool = folder / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-8f1e)'\necho 'GPU 1: NVIDIA H100'\n")
    tool.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


PIN = re.search("^torch==(.*)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE)[1]


@pytest.mark.parametrize(
    "builds, with_gpu, chosen, size",
    [
        (["", "+cpu", "+cu130"], False, "+cpu", "about 1 GB"),
        (["", "+cpu", "+cu130"], True, "+cu130", "about 5 GB, with CUDA's libraries"),
        ([""], False, "", "about 5 GB: pip is offered no CPU build of torch here, and the default one brings CUDA's"),
    ],
)
def test_without_a_gpu_torchs_cpu_build_is_installed_where_pip_is_offered_one(
    copy, empty_venv, builds, with_gpu, chosen, size
):
    shutil.copytree(empty_venv, copy / "new", symlinks=True)
    path = write_nvidia_smi(copy) if with_gpu else os.environ["PATH"]
    links = write_wheels(copy / "wheels", *(PIN + build for build in builds))
    result = set_up(copy, PIP_NO_INDEX="1", PIP_FIND_LINKS=links, PATH=path)
    assert (result.returncode, result.stderr) == (0, "")
    assert f"setting up new, only this once: huggingface_hub numpy torch tqdm; {size}" in result.stdout
    assert [path.name for path in copy.glob("new/lib/*/site-packages/torch-*")] == [f"torch-{PIN}{chosen}.dist-info"]
    assert set_up(copy, PIP_NO_INDEX="1", PIP_FIND_LINKS="nowhere").stdout == "set up\n"  # pip has no more to do


def test_no_network_and_a_missing_package_are_one_line_each(copy, empty_venv):
    shutil.copytree(empty_venv, copy / "new", symlinks=True)
    with socket.socket() as nobody:  # a port at which nobody answers
        nobody.bind(("127.0.0.1", 0))
        result = set_up(copy, PIP_RETRIES="1", PIP_INDEX_URL=f"http://127.0.0.1:{nobody.getsockname()[1]}/simple")
    told = "run.sh: pip finds no packages; is there a network? (see new/pip.txt)\n"
    assert (result.returncode, result.stderr) == (2, told)
    links = write_wheels(copy / "wheels", "2.12.0")
    result = set_up(copy, PIP_NO_INDEX="1", PIP_FIND_LINKS=links)
    told = f"run.sh: pip could not install requirements.txt: ERROR: No matching distribution found for torch=={PIN} "
    assert (result.returncode, result.stderr) == (2, f"{told}(see new/pip.txt)\n")


def test_the_cpu_build_of_torch_beside_gpus_is_refused_before_any_data_is_fetched(tmp_path, monkeypatch):
    (tmp_path / f"torch-{PIN}+cpu.dist-info").mkdir()
    (tmp_path / f"torch-{PIN}+cpu.dist-info/METADATA").write_text(f"Name: torch\nVersion: {PIN}+cpu\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PATH", write_nvidia_smi(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(launch.UserError, match=r"^2 GPUs, but .* has the CPU build of torch: remove that folder"):
        launch.plan(ROOT / "train_gpt.py", [])


# ---- What it runs ----------------------------------------------------------------------------------------------------


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
        (
            "none",
            "none: not a command or a record: setup bench test rehearse 0_Test 2024-01-01_Other 2024-12-31_HardTest",
        ),
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
    monkeypatch.setenv("PATH", write_nvidia_smi(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert launch.count_gpus() == gpus


@pytest.mark.parametrize(
    "before, after, message",
    [
        ([], ["--nonsense"], "train_gpt: --nonsense: not a setting; "),
        ([], ["--batch_sequences=0"], "train_gpt: --batch_sequences 0: this must hold: processes <= batch_sequences"),
        (["records/none"], [], "run.sh: records/none: not a command or a record: setup bench test rehearse "),
        ([], ["--train_files=none.bin"], "train_gpt: none.bin: no token shard;"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(copy, shards, before, after, message):
    result = run_sh(copy, *before, *shards, *after)
    assert result.returncode == 2
    assert result.stderr.startswith(message) and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "name, cores, processes", [("", 8, 1), ("NorMuonYarn", 2, 1), ("Threads", 2, 1), ("SoftCap", 8, 2), ("Base", 1, 1)]
)
def test_a_script_with_threads_gets_one_process_and_an_older_one_a_process_per_sequence(name, cores, processes):
    script = launch.find_script(name) if name else ROOT / "train_gpt.py"
    assert launch.cpu_processes(script.read_text(), cores) == processes


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
@pytest.mark.parametrize("processes", [1, 2])
def test_ending_it_finishes_the_step_and_the_last_line_is_the_command_that_goes_on(copy, shards, number, processes):
    with StartedByRunSh(copy, *shards, "--num_iterations=150", processes=processes) as run:
        run.wait_for("step:3/").signal(number)
        assert run.exit_code() == 128 + number, run.err
    (saved,) = copy.glob("checkpoints/*/step_*.pt")
    assert run.out.splitlines()[-1] == f"to go on from here: ./run.sh --resume {saved.relative_to(copy)}"
    assert "Traceback" not in run.err
    result = run_sh(copy, "--resume", str(saved.relative_to(copy)))
    assert result.returncode == 0, result.stderr
    assert "the checkpoint's training files\n" in result.stdout
    assert "step:150/150 train_loss" in only_log(copy).read_text()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_process_is_named(copy, shards, processes):
    with StartedByRunSh(copy, *shards, "--num_iterations=100000", processes=processes) as run:
        run.wait_for("step:3/")
        os.kill(run.ranks()[processes - 1], signal.SIGKILL)
        assert run.exit_code() == 137, run.err
    assert run.err.splitlines()[-1] == f"run.sh: rank {processes - 1} was killed by SIGKILL"


def test_a_run_whose_launcher_is_killed_while_it_imports_torch_does_not_go_on_alone(copy, shards):
    with StartedByRunSh(copy, *shards, "--num_iterations=100000", processes=1) as run:
        wait_until(lambda: 0 in run.ranks())
        rank = run.ranks()[0]
        wait_until(lambda: "libtorch_cpu" in Path(f"/proc/{rank}/maps").read_text())
        run.process.kill()
        wait_until(lambda: not alive(rank), 60)
    assert only_log(copy).read_text().splitlines()[-1] == "ended: its launcher is gone"


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_whose_launcher_is_killed_ends_and_says_so(copy, shards, processes):
    with StartedByRunSh(copy, *shards, "--num_iterations=100000", processes=processes) as run:
        run.wait_for("step:3/")
        ranks = run.ranks()
        assert len(ranks) == processes
        run.process.kill()
        log, deadline = only_log(copy), time.monotonic() + 60
        while "\nended: " not in log.read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
    assert log.read_text().splitlines()[-1] == "ended: its launcher is gone"
