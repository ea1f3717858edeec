"""Whatever a log, a name or a folder holds: no traceback, no endless work, no control of the terminal."""

import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from records_helpers import ROOT, RULER, SOURCE, STEPS, add_record, build_log, good_logs, start_tool, table_row, tool

HUGE = "9" * 400
HOSTILE = {
    "a target of 400 digits": build_log(settings=f'{{"target_loss": {HUGE}}}'),
    "a target of 5,000 digits": build_log(settings=f'{{"target_loss": {HUGE * 20}}}'),
    "an infinite target": build_log(settings='{"target_loss": Infinity}'),
    "a loss of 1e200": build_log().replace("val_loss:3.2785", "val_loss:1e200"),
    "a loss of 400 digits": build_log().replace("val_loss:3.2785", f"val_loss:{HUGE}.0"),
    "infinite losses": build_log().replace("val_loss:3.2785", "val_loss:inf"),
    "both infinities": build_log().replace("val_loss:3.2785", "val_loss:-inf"),
    "a time of 400 digits": build_log().replace("train_time:204345ms", f"train_time:{HUGE}ms"),
    "a time with two points": build_log().replace("train_time:204345ms", "train_time:204.3.45ms"),
    "a step of 15 digits": build_log().replace("step:1390/1390", f"step:{'9' * 15}/1390"),
    "settings that nest": build_log(settings="[" * 100000),
    "a long seed": build_log(seed="7" * 5000),
    "a long machine": build_log(hardware="x" * 100000),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_no_figure_in_a_log_brings_the_tool_down(case, tmp_path):
    other = build_log(-1e200 if "infinit" not in case else math.inf, seed=3, milliseconds=7)
    folder = add_record(tmp_path, "1_A", [*good_logs(), HOSTILE[case], other])
    add_record(tmp_path, "2_B", [HOSTILE[case]])
    for command in (["list"], ["list", "--json"], ["list", "--markdown"], ["page", "-o", tmp_path / "x.html"],
                    ["plot", "-o", tmp_path / "x.png"]):  # fmt: skip
        done = tool(*command, "--records", tmp_path)
        assert max(map(len, (done.out + done.err).splitlines())) < 3000 or "json" in str(command)
    tool("check", folder, code=1)
    tool("check", folder, "--json", code=1)
    tool("compare", folder, tmp_path / "1_A", "--target", 3)
    tool("export", folder, "--csv", tmp_path / "x.csv")


LARGE = 2_000_000
SLOW = {
    "spaces": " " * LARGE,
    "bad lines": "step:x\n" * (LARGE // 7),
    "trials that end": "step:1/1 val_loss:3.0 train_time:1ms\n" * (LARGE // 37),
    "trials that go back": "".join(f"step:{9 - i % 9}/9 val_loss:3.{i} train_time:{i}ms\n" for i in range(LARGE // 40)),
    "fields without an end": "step:1/9 " + "a:" * (LARGE // 2),
    "words without a colon": ("step:1/9 " + "a" * 900 + "\n") * (LARGE // 900),
    "a header of spaces": f"{SOURCE}{RULER}\nhardware:{' ' * LARGE}x\nstep:1/1 val_loss:3.0 train_time:1ms\n",
    "a table row of spaces": f"{SOURCE}{RULER}\n| 0 {' ' * LARGE}\nstep:1/1 val_loss:3.0 train_time:1ms\n",
    "rows of a table": f"{SOURCE}{RULER}\n" + "|   0  NVIDIA\n" * (LARGE // 14) + STEPS,
    "lines of =": f"{RULER}\nimport os\n" * (LARGE // 111),
    "quotes that escape": f"import os\n{RULER}\n" + '\\"""' * (LARGE // 4) + f"\nimport os\n{RULER}\n",
    "open strings": f"x = '\nimport os\n{RULER}\n" + "'\\" * (LARGE // 2) + f"\nimport os\n{RULER}\n",
    "dashes": "import os\n" + f"{'-' * 40}\n# a.py\n" * (LARGE // 48) + f"{RULER}\n{STEPS}",
    "resumes": "step:9/9 val_loss:3.0 train_time:1ms\n" + "resumed at step 5\n" * (LARGE // 18),
    "resumes that go back": "".join(
        f"step:{i}/9 train_time:{i}ms\nstep:{i}/9 val_loss:3.0 train_time:{i}ms\n" for i in range(LARGE // 100)
    )
    + "step:99999/9 train_time:1ms\nresumed at step 99998\n" * (LARGE // 100),
    "trials that end at once": "step:2/9 train_time:2ms\nstep:1/9 train_time:1ms\n" * (LARGE // 48),
    "trials that end at once, each another": "".join(
        f"step:{2 - i % 2}/9 train_time:{i}ms\n" for i in range(LARGE // 24)
    ),
    "one long line": "step:1/9 val_loss:3.0 train_time:1ms " + "x" * LARGE + "\n",
    "a JSON line": f"{SOURCE}{RULER}\nsettings: {'[' * LARGE}\n{RULER}\n{STEPS}",
}


@pytest.mark.parametrize("case", SLOW)
def test_the_time_for_a_file_grows_no_faster_than_its_size(case, tmp_path):
    """Linear work on 2 MB is done in a moment; what grows with the square would take minutes to hours."""
    (tmp_path / "log.txt").write_text(SLOW[case])
    process = start_tool("list", tmp_path / "log.txt")
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0 and "Traceback" not in err and len(out + err) < 20000


def test_the_time_for_a_diff_is_bounded(tmp_path):
    scripts = {"same.py": "x\n" * 9000, "more.py": "x\n" * 9500 + "y\n", "long.py": "y = 1\n" * 50000,
               "wide.py": "a b " * 100000 + "\n", "wider.py": "b a " * 100000 + "\n"}  # fmt: skip
    for name, text in scripts.items():
        (tmp_path / name).write_text(text)
    for pair in (("same.py", "more.py"), ("same.py", "long.py"), ("wide.py", "wider.py")):
        process = start_tool("diff", *pair, "--stat", cwd=tmp_path)
        out, err = process.communicate(timeout=30)
        assert process.returncode == 0 and "changed" in out and err == ""


def test_names_that_a_terminal_would_obey_reach_none(tmp_path):
    name = "1_\033]0;gotcha\a\033[2J"
    add_record(tmp_path / name, "1_Inner", good_logs())
    add_record(tmp_path, "2_\033[31mRed", [])
    (tmp_path / name / "bad\033[2J.txt").write_text("step:\033[2J\n")
    (tmp_path / name / "train_gpt.py").write_text("def f\033[2J():\n    pass\n")
    commands = [["list"], ["list", "--markdown"], ["list", "--json"], ["check", "Inner", "gotcha"],
                ["compare", "Inner", "Inner"], ["diff", "gotcha", "Inner", "--stat"], ["list", "no\033[2Jne"],
                ["plot", "-o", tmp_path / "\033[2J.png"], ["page", "-o", tmp_path / "\033[2J.html"],
                ["export", "Inner", "--csv", tmp_path / "\033[2J.csv"]]  # fmt: skip
    for command in commands:
        process = start_tool(*command, "--records", tmp_path)
        out, err = process.communicate(timeout=60)
        assert "Traceback" not in err and "\033" not in out + err and "\a" not in out + err, command


@pytest.mark.parametrize("name", ["x" * 5000, "records/" * 700], ids=["long", "deep"])
def test_a_name_that_cannot_be_a_file_is_a_mistake_like_others(name, tmp_path):
    for command in (["list", name], ["check", name], ["diff", name, name], ["extract", name], ["compare", name, name],
                    ["page", "-o", name], ["plot", "-o", name], ["list", "--against", name]):  # fmt: skip
        done = tool(*command, "--records", tmp_path, code=2)
        assert len(done.err.splitlines()) == 1 and len(done.err) < 700 and done.err.startswith("records: "), command


@pytest.mark.skipif(os.geteuid() == 0 and shutil.which("setpriv") is None, reason="root may read everything")
def test_what_may_not_be_read_is_told_and_hides_nothing_else(request):
    tmp_path = Path(tempfile.mkdtemp())  # pytest's own folders are closed to others
    request.addfinalizer(lambda: shutil.rmtree(tmp_path))
    os.chmod(tmp_path, 0o755)
    closed, script, log = (add_record(tmp_path, name, good_logs(milliseconds=ms)) for name, ms in
                           (("1_Closed", 9000), ("2_Script", 8000), ("3_Log", 7000)))  # fmt: skip
    os.chmod(closed, 0)
    os.chmod(script / "train_gpt.py", 0)
    os.chmod(log / "0001.txt", 0)
    try:
        as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if os.geteuid() == 0 else []
        command = [*as_nobody, sys.executable, "-m", "records", "list", "--records", str(tmp_path)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    finally:
        os.chmod(closed, 0o755)
    if "No module named" in done.stderr or "can't open" in done.stderr:
        pytest.skip("the tool's own folder is closed to others")
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert "1_Closed: Permission denied" in done.stderr and "0001.txt:1: Permission denied" in done.stderr
    assert table_row(done.stdout, "2_Script")[-1] == "no: source" and table_row(done.stdout, "3_Log")[1] == "4"
