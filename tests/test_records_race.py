"""`python -m records race`: two scripts on this machine, in turn."""

import re
import signal
import subprocess
import time

import pytest
from records_helpers import FAKE, add_record, build_log, fake_script, run_tool, start_tool
from scipy import stats

from records.logs import read_log


def race(*arguments, **options):
    return run_tool("race", *arguments, **options)


def runs_in_order(err):
    return re.findall(r"pair (\d+) of \d+, ([AB]): .*--seed (\d+)", err)


def test_race_runs_abba_with_one_seed_a_pair_and_gives_the_paired_interval(tmp_path):
    fake_script(tmp_path, "slow.py")
    fake_script(tmp_path, "fast.py", ms=97.0)
    done = race("slow.py", "fast.py", "--runs", 4, "--nproc", 1, "--first-seed", 11, cwd=tmp_path)
    order = [("1", "A", "11"), ("1", "B", "11"), ("2", "B", "12"), ("2", "A", "12")]
    assert runs_in_order(done.err) == [*order, ("3", "A", "13"), ("3", "B", "13"), ("4", "B", "14"), ("4", "A", "14")]

    # The same figures from the logs, by scipy's own interval.
    times, losses, step_times = {}, {}, {}
    for path in (tmp_path / "logs").glob("*.txt"):
        log = read_log(path)
        side = "B" if "# fast.py" in log.source.decode() else "A"
        times[side, log.seed] = next(v.seconds for v in log.runs[0].validations if v.loss <= 3.28)
        losses[side, log.seed] = log.runs[0].final.loss
        step_times[side, log.seed] = 1000 * log.runs[0].final.seconds / log.runs[0].final.step
    seeds = ["11", "12", "13", "14"]
    for values, digits in ((times, 1), (losses, 4), (step_times, 2)):
        test = stats.ttest_rel([values["B", seed] for seed in seeds], [values["A", seed] for seed in seeds])
        low, high = test.confidence_interval(0.95)
        assert f"95 % interval {low:+.{digits}f} to {high:+.{digits}f}" in done.out
    assert "B fast.py is faster to the target, by" in done.out
    assert "not interpolated" in done.out


def test_race_calls_no_winner_within_the_noise(tmp_path):
    for name in ("one.py", "two.py"):
        fake_script(tmp_path, name)
    out = race("one.py", "two.py", "--runs", 3, "--nproc", 1, cwd=tmp_path).out
    assert "no winner in time" in out and "no winner in loss" in out and "is faster" not in out


def test_a_race_of_one_pair_has_no_verdict(tmp_path):
    fake_script(tmp_path, "one.py")
    fake_script(tmp_path, "two.py")
    out = race("one.py", "two.py", "--runs", 1, "--nproc", 1, cwd=tmp_path).out
    assert "no verdict: one pair does not show the noise" in out and "without an interval: that takes two pairs" in out
    assert "no winner" not in out and "within the noise" not in out


def test_race_gives_no_time_where_a_run_never_reached_the_target(tmp_path):
    fake_script(tmp_path, "good.py", noise=0.1)
    fake_script(tmp_path, "fast_but_bad.py", ms=10.0, final=3.2801, noise=0.1)
    out = race("good.py", "fast_but_bad.py", "--runs", 3, "--nproc", 1, cwd=tmp_path).out
    reached = int(re.search(r"B fast_but_bad.py: (\d) of 3 runs reached it", out)[1])
    assert reached < 3 and "is faster" not in out and "no winner in time" in out
    assert "A good.py ends at a lower loss" in out and "the steps of B fast_but_bad.py take less time, by 90" in out


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_race_goes_on_after_its_last_finished_run(sign, tmp_path):
    for name in ("a.py", "b.py"):
        fake_script(tmp_path, name)
    command = ["race", "a.py", "b.py", "--runs", 2, "--nproc", 1, "--state", "state", "--", "--sleep", "0.03"]
    process = start_tool(*command, cwd=tmp_path)
    logs = tmp_path / "logs"
    wait_for(lambda: (tmp_path / "state/pair01_B.txt").exists() and len(list(logs.glob("*.txt"))) == 3)
    process.send_signal(sign)
    err = process.communicate(timeout=30)[1]
    assert process.returncode == (-signal.SIGKILL if sign == signal.SIGKILL else 130) and "Traceback" not in err
    if sign == signal.SIGKILL:  # the run outlives the race, and may not be joined by another
        assert "still going on" in run_tool(*command, cwd=tmp_path, code=2).err
        wait_for(lambda: all(log.runs and log.runs[0].complete for log in map(read_log, logs.glob("*.txt"))))
        time.sleep(0.5)
    kept = (tmp_path / "state/pair01_A.txt").stat().st_mtime_ns
    done = run_tool(*command, cwd=tmp_path)
    assert runs_in_order(done.err) == [("2", "B", "2"), ("2", "A", "2")]
    assert (tmp_path / "state/pair01_A.txt").stat().st_mtime_ns == kept
    assert "(paired t, 2 pairs)" in done.out
    assert runs_in_order(run_tool(*command, cwd=tmp_path).err) == []


def wait_for(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "this took too long"
        time.sleep(0.02)


def test_race_refuses_what_would_not_be_a_fair_race(tmp_path):
    fake_script(tmp_path, "a.py")
    fake_script(tmp_path, "b.py")
    other_track = tmp_path / "other.py"
    other_track.write_text(FAKE.replace("default=3.28", "default=1.04"))
    quick = ["--runs", 1, "--nproc", 1]
    assert "different tracks cannot race" in race("a.py", "other.py", *quick, cwd=tmp_path, code=2).err
    (tmp_path / "half.py").write_text(FAKE.replace("vars(settings)", "vars(settings) | {'dtype': 'bfloat16'}"))
    assert "cannot race: dtype bfloat16" in race("a.py", "half.py", *quick, cwd=tmp_path, code=2).err
    failed = race("a.py", "b.py", *quick, "--", "--fail", cwd=tmp_path, code=2).err
    assert "exit code 1: --fail was asked for" in failed
    assert "--first-seed" in race("a.py", "b.py", *quick, "--", "--seed", "3", cwd=tmp_path, code=2).err
    race("a.py", "b.py", *quick, "--state", "state", cwd=tmp_path)
    (tmp_path / "b.py").write_text(FAKE)
    assert "holds another race" in race("a.py", "b.py", *quick, "--state", "state", cwd=tmp_path, code=2).err


def test_race_runs_scripts_out_of_logs_and_records(tmp_path):
    add_record(tmp_path / "records", "1_Some", [], script=FAKE)
    (tmp_path / "old.txt").write_text(build_log(source=FAKE.replace("100.0, 3.27", "200.0, 3.27")))
    done = race("Some", "old.txt", "--records", "records", "--runs", 2, "--nproc", 1, cwd=tmp_path)
    assert "A 1_Some is faster to the target, by 50" in done.out


def test_a_race_of_few_steps_gives_step_times_and_does_not_go_on_about_the_target(tmp_path):
    for name in ("one.py", "two.py"):
        fake_script(tmp_path, name, final=5.0)
    out = race("one.py", "two.py", "--runs", 2, "--nproc", 1, cwd=tmp_path).out
    assert "time to target 3.28: no run reached it" in out and out.count("reached") == 1
    assert re.search(r"pair 1 A: final loss [\d.]+, 100 steps in [\d.]+ s, [\d.]+ ms per step\n", out)


def test_a_race_ends_with_a_summary_to_paste(tmp_path):
    subprocess.run("git init -q; git config user.email a@b.c; git config user.name a; git commit -q --allow-empty -m x",
                   shell=True, cwd=tmp_path, check=True)  # fmt: skip
    name = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=tmp_path, capture_output=True, text=True).stdout
    for file in ("one.py", "two.py"):
        fake_script(tmp_path, file)
    settings = ["--", "--target_loss", "3.3"]
    out = race("one.py", "two.py", "--runs", 2, "--nproc", 1, "--first-seed", 5, *settings, cwd=tmp_path).out
    pasted = out.partition("to paste\n")[2].splitlines()
    assert pasted[:2] == ["|  | one.py | two.py |", "|---|---:|---|"]
    assert [line.split(" | ")[0] for line in pasted[2:5]] == ["| time to target", "| time per step", "| final loss"]
    about = dict(line.removeprefix("- ").split(": ", 1) for line in pasted[6:])
    assert about == {"commit": name.strip(), "settings": "--target_loss 3.3", "dtype": "not named", "hardware": "none",
                     "processes": "1", "seeds": "5 to 6, in the order A B, B A"}  # fmt: skip


def test_a_failing_script_is_heard_and_torchrun_is_not(tmp_path):
    # Both processes say it at once. Under torchrun print would write the line end apart, and they could mix.
    said = '__import__("sys").stderr.write("train_gpt: no shards match data/x_*.bin: run data/y.py\\n"); exit(2)\n'
    for name in ("a.py", "b.py"):
        fake_script(tmp_path, name)
        (tmp_path / name).write_text((tmp_path / name).read_text().replace("source =", said + "source =", 1))
    done = race("a.py", "b.py", "--runs", 1, "--nproc", 2, cwd=tmp_path, code=2)
    assert done.err.splitlines()[-1].startswith(
        "records: the run ended with exit code 2: train_gpt: no shards match data/x_*.bin: run data/y.py (all of"
    )
    (output,) = tmp_path.glob("logs/race_*/output.txt")
    assert "torch.distributed" not in output.read_text() and "Traceback" not in output.read_text()


def test_a_race_makes_the_default_data_once_as_run_sh_does(tmp_path):
    (tmp_path / "data").mkdir()
    made = "import pathlib, sys\nwith open('data/made', 'a') as file:\n    file.write('once\\n')\nprint('made it')\n"
    (tmp_path / "data/embedded_corpus.py").write_text(made)
    for name in ("a.py", "b.py"):
        fake_script(tmp_path, name)
    quick = ["--runs", 1, "--nproc", 1, "--state", "state"]
    done = race("a.py", "b.py", *quick, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert "made it" in done.err and (tmp_path / "data/made").read_text() == "once\n"
    race("a.py", "b.py", *quick, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")  # nothing is left to run
    assert (tmp_path / "data/made").read_text() == "once\n"
    (tmp_path / "data/embedded_corpus.py").write_text("raise SystemExit('embedded_corpus.py: the disk is full')\n")
    failed = race("a.py", "b.py", "--runs", 2, *quick[2:], cwd=tmp_path, CUDA_VISIBLE_DEVICES="", code=2).err
    assert failed.endswith("data/embedded_corpus.py ended with exit code 1: embedded_corpus.py: the disk is full\n")


def test_two_files_of_a_log_race_together(tmp_path):
    kernels = "STEP = 50.0\n"
    source = FAKE.replace("import argparse", "from kernels import STEP\nimport argparse", 1)
    source = source.replace("MS_PER_STEP, FINAL, NOISE = 100.0", "MS_PER_STEP, FINAL, NOISE = STEP")
    (tmp_path / "two.txt").write_text(build_log(source=f"{source}\n\n{'-' * 40}\n# kernels.py\n{kernels}"))
    fake_script(tmp_path, "one.py")
    done = race("one.py", "two.txt", "--runs", 2, "--nproc", 1, cwd=tmp_path)
    assert re.search(r"B two\.txt is faster to the target, by (?:49|50)", done.out)
