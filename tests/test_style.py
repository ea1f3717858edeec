"""One style for the whole repository: one formatter, one lint configuration, one shape of heading."""

import re
import subprocess
import sys

import pytest
from helpers import ROOT


@pytest.mark.parametrize("command", (["format", "--check"], ["check"]), ids=" ".join)
def test_ruff_has_nothing_to_say(command):
    done = subprocess.run([sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_section_headings_have_one_shape():
    boxes = re.compile(r"^# ?-{60,}\n# *\S[^\n]*\n# ?-{60,}$", re.MULTILINE)
    folders = (ROOT, ROOT / "data", ROOT / "records", ROOT / "rehearsal", ROOT / "tests")
    files = [path for folder in folders for path in folder.glob("*.py")]
    assert len(files) > 50
    assert [path.name for path in files if boxes.search(path.read_text())] == []
