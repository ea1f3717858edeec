"""CONTRIBUTING.md, followed from top to bottom: its commands work, and what it shows is what they print."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT
from records_helpers import build_log

GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
DATA = '[{"file": "embedded_train_000001.bin", "tokens": 100, "sha256": "ab12"}]'
RECORD = Path("records/2026-12-01_FewerIterations")
# These set up, train or test for seconds to hours. They were run by hand.
BY_HAND = (
    "./run.sh ",
    ". .venv/bin/activate",
    "pip install ",
    "python -m records race ",
    "python -m records measure ",
)


def commands() -> dict[str, str]:
    """Every command of the guide's code blocks, and what the guide shows of its output."""
    found = {}
    for block in re.findall(r"^```\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL):
        parts = re.split(r"^\$ ", block, flags=re.MULTILINE)
        found |= dict.fromkeys(parts[0].splitlines(), "")
        for part in parts[1:]:
            command, _, output = part.partition("\n")
            found[command] = output
    return {command.split("  #")[0].strip(): output for command, output in found.items() if command}


@pytest.fixture
def house(tmp_path) -> Path:
    """The records tool, what it takes from the rehearsal, and the record that the guide starts from."""
    for name in ("README.md", "rehearsal"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "records", tmp_path / "records", ignore=shutil.ignore_patterns("[0-9]*_*", "__pycache__"))
    shutil.copytree(ROOT / "records/2025-01-04_SoftCap", tmp_path / "records/2025-01-04_SoftCap")
    shutil.copy(ROOT / "train_gpt.py", tmp_path)
    return tmp_path


def run(command: str, house: Path) -> subprocess.CompletedProcess:
    environment = os.environ | dict(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    return subprocess.run(["bash", "-c", command], cwd=house, env=environment, capture_output=True, text=True)


def edit(house: Path) -> str:
    """The guide's idea: one line of the settings."""
    assert "`ns_steps: int = setting(4, ...)`" in GUIDE
    script = house / RECORD / "train_gpt.py"
    source = script.read_text().replace("ns_steps: int = setting(5,", "ns_steps: int = setting(4,")
    script.write_text(source)
    return source


def add_logs(folder: Path, source: str, name: str) -> None:
    for seed, loss in enumerate((1.013, 1.015, 1.012, 1.016, 1.014), 1):
        log = build_log(loss, seed, target=1.04, milliseconds=42_000 + 10 * seed, steps=1100, source=source, data=DATA)
        (folder / f"{name}{seed}.txt").write_text(log)


def test_the_guides_commands_work_one_after_the_other(house):
    fast = [command for command in commands() if not command.startswith(BY_HAND)]
    assert [shlex.split(command)[0] for command in fast] == ["mkdir", "cp", *["python"] * 3, "cp", "cp", "python"]
    soft_cap = house / "records/2025-01-04_SoftCap"
    for log in soft_cap.glob("*.txt"):
        log.unlink()
    add_logs(soft_cap, (soft_cap / "train_gpt.py").read_text(), "old")
    for number, command in enumerate(fast):
        if number == 2:  # after the copy
            add_logs(house / RECORD, edit(house), "new")
        done = run(command, house)
        assert (done.returncode, done.stderr) == (0, ""), command
        if "diff" in command:
            assert done.stdout == commands()[command]
        if "check" in command:
            kinds = [line.split()[:2] for line in commands()[command].splitlines() if line.startswith("  ok")]
            assert [line.split()[:2] for line in done.stdout.splitlines() if line.startswith("  ok")] == kinds
            assert len(kinds) == 7 and "verdict: the evidence suffices" in done.stdout
    written = (house / RECORD / "README.md").read_text()
    assert written.partition("| seed |")[0] == (ROOT / "records/TEMPLATE.md").read_text().partition("| seed |")[0]
    assert "| 2 | 1,100 | 1.0150 | 42.0 s | [new2](new2.txt) |" in written
    assert f"[{RECORD.name}]({RECORD}) | 42.0 ± 0.0 s" in (house / "README.md").read_text()
    assert "setting(4," in (house / "train_gpt.py").read_text()


def test_every_command_run_by_hand_shows_its_output_and_names_no_machine():
    slow = {command: output for command, output in commands().items() if command.startswith("python -m records race")}
    assert len(slow) == 1 and all(output.count("\n") > 5 for output in slow.values())
    assert not re.search(r"/(?:tmp|root|home)/", GUIDE)


def test_the_template_is_in_the_form_that_the_tests_of_the_records_read():
    template = (ROOT / "records/TEMPLATE.md").read_text()
    (row,) = re.findall(r"^\| .*\.txt\) \|$", template, re.MULTILINE)
    assert re.search(r"\| \[(\w{8})\]\(\1[-\w]*\.txt\) \|$", row) and len(row.split("|")) == 7
    assert re.search(r"\(hardware: (.*?)\)", template)
