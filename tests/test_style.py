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
    """# ---- Title ----, to column 120."""
    folders = (ROOT, ROOT / "data", ROOT / "records", ROOT / "rehearsal", ROOT / "rehearsal/watch", ROOT / "tests")
    files = [path for folder in folders for path in folder.glob("*.py")]
    headings = [line for path in files for line in re.findall(r"^# ?[-=]{2}.*", path.read_text(), re.MULTILINE)]
    assert len(files) > 50 and len(headings) > 50
    assert [line for line in headings if len(line) != 120 or not re.fullmatch("# -{4} .*[^-] -+", line)] == []
