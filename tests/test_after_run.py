"""What a finished run is told: the result beside the target and the newest record, what to try next, a page."""

import json
import os
import re
import shlex
import sys
import time

import pytest
from records_helpers import NEW, OLD, add_record, build_log, good_logs, tool

import launch
from records import after_run

OTHER_DATA = json.dumps([{"file": "own.bin", "tokens": 7, "sha256": "cd34"}])


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with an old and a new record, and a log of a run that just ended."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(after_run, "HOME", tmp_path / "records")
    add_record(tmp_path / "records", "1_Old", good_logs(), script=OLD)
    add_record(tmp_path / "records", "2_New", good_logs((3.26, 3.27), milliseconds=100_000, source=OLD), script=OLD)
    add_record(tmp_path / "records", "3_Unmeasured", [], script=NEW)
    (tmp_path / "logs").mkdir()
    return tmp_path


def told(here, log: str, command=("./run.sh",), sample=()) -> list[str]:
    (here / "logs/run.txt").write_text(log)
    return list(after_run.after_run((here / "logs/run.txt").relative_to(here), list(command), list(sample)))


def curves(here) -> list[dict]:
    page = (here / "logs/run.html").read_text()
    assert not re.search(r"(?:src|href)=.https?:", page)  # it needs no network
    return json.loads(re.search('id="curves">(.*?)</script>', page)[1])


def test_the_newest_measured_record_is_beside_the_result_and_on_the_page(here):
    lines = told(here, build_log(3.2912, seed=7, milliseconds=90_000, source=NEW))
    assert lines[0] == "result   validation loss 3.2912 after 90.0 s of training, 0.0112 above the target 3.28"
    assert lines[1].startswith("record   validation loss 3.2650 after 100.0 s of training: 2_New, 2 runs")
    assert lines[1].endswith(" on the same hardware") and lines[-1] == "page     logs/run.html"
    (track,) = curves(here)
    assert track["target"] == 3.28
    assert [(line["name"], line["at"][-1][:3]) for line in track["lines"]] == [
        ("2_New", [1390, 100.0, 3.265]),
        ("run", [1390, 90.0, 3.2912]),
    ]
    assert "softcap = <em>15</em>" in (here / "logs/run.html").read_text()  # what changed, beside the curves


def test_every_command_that_it_suggests_for_a_log_works(here):
    lines = told(here, build_log(seed=7, source=NEW))
    commands = [shlex.split(line[9:].split("   ")[-1]) for line in lines if "-m records" in line]
    assert [words[:4] for words in commands] == [
        [sys.executable, "-m", "records", name] for name in ("compare", "diff")
    ]
    for words in commands:
        assert tool(*words[3:], "--records", here / "records", cwd=here).out


def test_the_script_of_the_record_itself_has_nothing_to_diff(here):
    assert not any(" diff " in line for line in told(here, build_log(source=OLD)))


def test_another_seed_keeps_the_other_settings(here):
    command = ["./run.sh", "SoftCap", "--seed", "7", "--num_iterations=5", "--train_files", "a b"]
    (line,) = [line for line in told(here, build_log(seed=7), command) if "another seed" in line]
    assert line.endswith("   ./run.sh SoftCap --num_iterations=5 --train_files 'a b' --seed 8")
    assert not any("another seed" in line for line in told(here, build_log(), ["./run.sh", "--resume=latest"]))


def test_a_run_of_fewer_steps_is_not_to_be_compared_with_the_record(here):
    lines = told(here, build_log(seed=7, steps=100, source=NEW))
    assert not any("compare" in line for line in lines) and any(" diff " in line for line in lines)


def test_the_page_is_named_after_the_run(here):
    told(here, build_log(seed=7))
    assert "<h1>Run run, seed 7, beside 2_New</h1>" in (here / "logs/run.html").read_text()


def test_a_prompt_suits_the_text_that_was_learned(here):
    for log, prompt in (build_log(), "'def forward('"), (build_log(2.5, target=0, data=OTHER_DATA), "'The '"):
        assert any(line.endswith(f"sample.py x.pt --prompt {prompt}") for line in told(here, log, sample=["x.pt"]))


def test_on_other_data_or_without_a_target_the_run_is_alone(here):
    lines = told(here, build_log(2.5, target=0, data=OTHER_DATA))
    assert lines[0] == "result   validation loss 2.5000 after 204.3 s of training"
    assert not any(word in line for line in lines for word in ("record   ", "compare"))
    (track,) = curves(here)
    assert track["target"] is None and [line["name"] for line in track["lines"]] == ["run"]
    assert "No target, data" in (here / "logs/run.html").read_text()


def test_it_needs_nothing_that_training_does_not_need(here, monkeypatch):
    for name in ("scipy", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)
    assert told(here, build_log())[-1] == "page     logs/run.html"


def test_a_page_that_cannot_be_written_is_one_line_and_no_failure(here, capsys):
    (here / "logs/run.txt").write_text(build_log(seed=7))
    (here / "logs/run.html").write_text("somebody's work")
    launch.show_result(["./run.sh"], [], time.time() - 60, [])
    out, err = capsys.readouterr()
    assert out.startswith("\nresult   ") and "another seed" in out and "page  " not in out
    assert err.startswith("run.sh: no page for logs/run.txt: ") and err.count("\n") == 1
    assert (here / "logs/run.html").read_text() == "somebody's work"


def test_only_a_log_of_this_run_is_shown(here, capsys):
    (here / "logs/run.txt").write_text(build_log())
    os.utime(here / "logs/run.txt", (1, 1))
    launch.show_result(["./run.sh"], [], time.time() - 60, [])
    assert capsys.readouterr() == ("", "")
