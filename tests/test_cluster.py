"""Elsewhere: the Slurm job, the container and the workflow, as far as one machine without any of them can tell."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from fnmatch import fnmatch

import pytest
import yaml  # huggingface_hub brings it
from helpers import ONE_THREAD, ROOT, last_line, only_log, tiny_flags

WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
SHELL_SCRIPTS = ["run.sh", "slurm.sh", ".ci/run", "rehearsal/setup.sh"]


@pytest.mark.parametrize("name", SHELL_SCRIPTS)
def test_the_shell_scripts_are_bash_and_executable(name):
    assert subprocess.run(["bash", "-n", ROOT / name]).returncode == 0
    assert os.access(ROOT / name, os.X_OK) and (ROOT / name).read_text().startswith("#!/usr/bin/env bash\n")


def commands_of_run_sh() -> set[str]:
    """setup, test, rehearse, bench."""
    branches = re.findall(r"^([\w| ]+)\)$", (ROOT / "run.sh").read_text(), re.MULTILINE)
    return {word for branch in branches for word in branch.split(" | ")}


# ---- Slurm -----------------------------------------------------------------------------------------------------------


def free_job_id() -> int:
    """slurm.sh makes its port from the job's number."""
    for number in range(1, 1000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", 29500 + number)):
                return number
    raise AssertionError("no free port")


def test_the_job_asks_slurm_for_whole_nodes_before_its_first_command():
    lines = (ROOT / "slurm.sh").read_text().splitlines()
    asked = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines if line.startswith("#SBATCH"))
    expected = {"nodes": "2", "ntasks-per-node": "1", "gpus-per-node": "8", "exclusive": "", "signal": "TERM@120"}
    assert asked.items() >= expected.items()
    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(number < first_command for number, line in enumerate(lines) if line.startswith("#SBATCH"))


def test_the_slurm_job_trains_on_two_nodes_together(folder):
    """Slurm's part is played by two small scripts; the two torchruns, their rendezvous and the training are real."""
    for name in ("slurm.sh", "train_gpt.py"):
        shutil.copy(ROOT / name, folder)
    (folder / "records").mkdir()
    shutil.copy(ROOT / "records/launch.py", folder / "records")
    (folder / ".venv").symlink_to(sys.prefix)
    played = {"scontrol": "echo 127.0.0.1; echo 127.0.0.2", "srun": 'shift; "$@" & "$@" & wait -n && wait -n'}
    (folder / "bin").mkdir()
    for name, body in played.items():
        (folder / "bin" / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (folder / "bin" / name).chmod(0o755)
    job = dict(SLURM_SUBMIT_DIR=str(folder), SLURM_JOB_ID=str(free_job_id()), SLURM_NNODES="2", SLURM_JOB_NODELIST="n")
    environment = ONE_THREAD | job | dict(PROCESSES="1", PET_LOCAL_ADDR="127.0.0.1")
    environment["PATH"] = f"{folder / 'bin'}:{os.environ['PATH']}"
    command = ["bash", "slurm.sh", *tiny_flags(batch_sequences=2)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "world_size: 2" in only_log(folder).read_text() and last_line(folder) == "ended: finished"


# ---- The container ---------------------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    """(instruction, its words) of the Dockerfile, comments left out and continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [tuple(line.split(None, 1)) for line in lines if line.strip()]


def test_the_container_installs_from_the_same_files_and_starts_run_sh():
    found = instructions()
    assert [name for name, _ in found] == ["FROM", "RUN", "WORKDIR", "COPY", "RUN", "COPY", "CMD"]
    assert re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-runtime-ubuntu\d\d\.\d\d", found[0][1])
    for name, words in found:
        if name == "RUN":
            assert subprocess.run(["bash", "-n", "-c", words]).returncode == 0
        if name == "COPY":
            *sources, goal = words.split()
            assert goal in (".", "./") and all((ROOT / source).exists() for source in sources)
    assert json.loads(found[-1][1]) == ["./run.sh"]
    (setup,) = [words for name, words in found if name == "RUN" and "run.sh" in words]
    assert setup.split()[0] == "./run.sh" and setup.split()[1] in commands_of_run_sh()


def test_the_containers_context_has_the_program_and_leaves_out_what_is_large():
    ignored = (ROOT / ".dockerignore").read_text().split()

    def is_left_out(path: str) -> bool:
        """As Docker reads it: a slash at a pattern's end means nothing, the last pattern that matches decides."""
        matches = [pattern for pattern in ignored if fnmatch(path, pattern.lstrip("!").rstrip("/"))]
        return bool(matches) and not matches[-1].startswith("!")

    assert not any(map(is_left_out, ("run.sh", "train_gpt.py", "launch.py", "data/shards.py", "records")))
    assert all(map(is_left_out, (".venv", "logs", "checkpoints", "data/fineweb10B")))


# ---- The workflow ----------------------------------------------------------------------------------------------------


def test_the_workflow_runs_the_tests_as_a_user_does():
    assert WORKFLOW[True].keys() == {"push", "pull_request"}  # YAML reads the key `on` as a truth value
    assert WORKFLOW["permissions"] == {"contents": "read"}
    (job,) = WORKFLOW["jobs"].values()
    steps = job["steps"]
    assert all(("uses" in step) != ("run" in step) for step in steps)
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) for step in steps if "uses" in step)
    (version,) = [step["with"]["python-version"] for step in steps if "with" in step]
    assert re.fullmatch(r"3\.1[0-4]", version)  # as run.sh has it
    (command,) = [step["run"] for step in steps if "run" in step]
    assert command == "./run.sh test" and "test" in commands_of_run_sh()
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == f"exec {command}"
