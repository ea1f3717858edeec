"""What a user of `python -m records` may rely on."""

import contextlib
import html
import io
import json
import math
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
import tokenize
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from records.__main__ import main, plot_track, tracks  # noqa: E402
from records.logs import open_records, p_below, read_log  # noqa: E402
from records.scripts import Diff, Script, unified  # noqa: E402

RULER = "=" * 100
PUBLISHED = [float(line) for line in (ROOT / "tests/fixtures/softcap_losses.txt").read_text().splitlines()[1:]]

# A script that quotes a log: its lines must never be taken for results.
SOURCE = '''"""Train. A log looks like this:

step:1390/1390 val_loss:1.0000 train_time:1ms step_avg:1.00ms
"""
import torch

print0(f"step:{step}/{total} val_loss:{val_loss:.4f} train_time:{ms}ms")
# val_loss:0.5
'''


def tool(*arguments, cwd=ROOT, code=0):
    """Run the tool's main() in this process, which is quick; what it printed."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    before = os.getcwd()
    os.chdir(cwd)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main([str(argument) for argument in arguments])
    finally:
        os.chdir(before)
    raw, errors = out.buffer.getvalue(), err.buffer.getvalue().decode()
    assert status == code, (status, raw, errors)
    return SimpleNamespace(out=raw.decode(), err=errors, raw=raw)


def start_tool(*arguments, cwd=ROOT, **environment):
    """Start the tool as its user does, as a process of its own."""
    command = [sys.executable, "-m", "records", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run_tool(*arguments, code=0, **options):
    process = start_tool(*arguments, **options)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, (process.returncode, out, err)
    assert "Traceback" not in err
    return SimpleNamespace(out=out, err=err)


def build_log(loss=3.2785, seed=1234, target=3.28, milliseconds=204345, steps=1390, source=SOURCE, **changes):
    """A log as train_gpt.py writes it: four validations, a few training steps between."""
    facts = {
        "python": "3.11.7 (main) [GCC 12.2.0]",
        "torch": "2.13.0",
        "cuda": "12.6",
        "hardware": "Some CPU, 2 cores",
        "world_size": 2,
        "seed": seed,
        "settings": json.dumps({"seed": seed, "num_iterations": steps, "target_loss": target}),
        "data": json.dumps([{"file": "train.bin", "tokens": 100, "sha256": "ab12"}]),
        **changes,
    }
    lines = [source.removesuffix("\n"), RULER, *(f"{name}: {fact}" for name, fact in facts.items()), RULER]
    for quarter in range(5):
        step, at = steps * quarter // 4, milliseconds * quarter // 4
        here = loss * (10 - 9 * quarter / 4) ** 0.5 if quarter < 4 else loss
        if quarter:
            lines.append(f"step:{step}/{steps} train_loss:{here + 0.02:.4f} train_time:{at}ms step_avg:148.08ms")
        lines.append(f"step:{step}/{steps} val_loss:{here:.4f} train_time:{at}ms step_avg:148.08ms")
    return "\n".join([*lines, "peak memory: 31563 MiB", ""])


def add_record(home, name, logs, script=SOURCE):
    folder = home / name
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(f"# {name}\n")
    if script is not None:
        (folder / "train_gpt.py").write_text(script)
    for number, log in enumerate(logs):
        (folder / f"{number:04}.txt").write_text(log)
    return folder


def add_logs(folder, logs):
    paths = [folder / f"{number:04}.txt" for number in range(len(logs))]
    for path, log in zip(paths, logs, strict=True):
        path.write_text(log)
    return paths


def good_logs(losses=(3.2751, 3.2763, 3.2758, 3.2747, 3.2769), **changes):
    return [build_log(loss, seed=seed, **changes) for seed, loss in enumerate(losses, 1)]


# ----------------------------------------------------------------------------------------------------------------------
# Reading logs
# ----------------------------------------------------------------------------------------------------------------------

NVIDIA_SMI = """Sat Jan  4 06:11:07 2025
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 550.90.07              Driver Version: 550.90.07      CUDA Version: 12.6     |
|-----------------------------------------+------------------------+----------------------+
|   0  NVIDIA H100 80GB HBM3          On  |   00000000:19:00.0 Off |                    0 |
| N/A   38C    P0            121W /  700W |    7750MiB /  81559MiB |      0%      Default |
|   1  NVIDIA H100 80GB HBM3          On  |   00000000:3B:00.0 Off |                    0 |
| N/A   29C    P0            113W /  700W |    3454MiB /  81559MiB |      0%      Default |
+-----------------------------------------------------------------------------------------+
"""
HEADER = f"Running Python 3.12.7\nRunning PyTorch 2.6.0.dev20241231+cu126 compiled for CUDA 12.6\n{NVIDIA_SMI}"
STEPS = """step:0/1390 val_loss:10.8258 train_time:0ms step_avg:nanms
step:1/1390 train_time:23514ms step_avg:nanms
step:11/1390 train_time:1425ms step_avg:142.51ms
step:125/1390 val_loss:4.3777 train_time:17024ms step_avg:148.03ms
step:1389/1390 train_time:204197ms step_avg:148.07ms
step:1390/1390 val_loss:3.2785 train_time:204345ms step_avg:148.08ms
peak memory allocated: 31563 MiB reserved: 32000 MiB
"""
SHAPES = {
    "source in front": f"{SOURCE}{RULER}\n{HEADER}{RULER}\n{STEPS}",
    "source in front, printed with a blank line": f"{SOURCE}\n{RULER}\n{HEADER}\n{RULER}\n{STEPS}",
    "source between": f"{RULER}\n{SOURCE}{RULER}\n{HEADER}{RULER}\n{STEPS}",
    "source between, something before": f"{HEADER}{RULER}\n{SOURCE}{RULER}\n{STEPS}",
    "no header": f"{SOURCE}{RULER}\n{STEPS}",
    "console output": STEPS,
    "training losses": f"{SOURCE}{RULER}\n{STEPS}".replace("train_time", "train_loss:3.3 train_time"),
    "seconds": f"{SOURCE}{RULER}\n" + re.sub(r"(\d+)(\d{3})ms step", r"\1.\2s step", STEPS),
    "five decimals": f"{SOURCE}{RULER}\n{STEPS}".replace("3.2785 ", "3.27850 "),
    "extra fields": f"{SOURCE}{RULER}\n"
    + STEPS.replace(" train_time", " lr:1.0e-03 train_time").replace("ms\n", "ms tok/s:3.5M\n"),
    "other separators": f"{SOURCE}{RULER}\n"
    + STEPS.replace(" val_loss:", " | val_loss: ").replace(" train", ", train"),
    "time before loss": f"{SOURCE}{RULER}\n" + re.sub(r"(val_loss:\S+) (train_time:\S+)", r"\2 \1", STEPS),
    "CRLF": f"{SOURCE}{RULER}\n{HEADER}{RULER}\n{STEPS}".replace("\n", "\r\n"),
    "cut after the last result": f"{SOURCE}{RULER}\n{STEPS}".split("\npeak")[0],
    "ours": build_log().replace("val_loss:32.785 ", "val_loss:10.8258 "),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_known_shape_of_a_log_gives_the_same_result(shape, tmp_path):
    path = tmp_path / "log.txt"
    path.write_bytes(SHAPES[shape].encode())
    log = read_log(path)
    assert log.complaints == []
    assert [run.complete for run in log.runs] == [True]
    assert log.runs[0].validations[0].step == 0
    assert log.runs[0].final == (1390, 3.2785, 204.345)


def test_a_public_log_tells_its_hardware_without_temperatures_and_dates(tmp_path):
    one, two = add_logs(tmp_path, [SHAPES["source in front"], SHAPES["source in front"].replace("38C", "59C")])
    assert read_log(one).hardware == read_log(two).hardware == "2 x NVIDIA H100 80GB HBM3"


def test_bytes_that_are_not_text_do_not_disturb(tmp_path):
    path = tmp_path / "log.txt"
    path.write_bytes(SHAPES["source in front"].encode().replace(b"Sat Jan", b"S\xe1b\xff\x00 Jan"))
    assert read_log(path).runs[0].final == (1390, 3.2785, 204.345)


def test_several_trials_in_one_file_are_several_runs(tmp_path):
    path = tmp_path / "log.txt"
    second = STEPS.replace("3.2785", "3.2801")
    killed = "".join(STEPS.splitlines(keepends=True)[:4])
    path.write_text(f"{SOURCE}{RULER}\n{HEADER}{RULER}\n{STEPS}{second}{killed}{STEPS}")
    runs = read_log(path).runs
    assert [(run.final.loss, run.complete) for run in runs] == [
        (3.2785, True),
        (3.2801, True),
        (4.3777, False),
        (3.2785, True),
    ]


def test_trials_that_only_tell_their_end_are_several_runs_but_a_line_told_twice_is_not(tmp_path):
    path = tmp_path / "log.txt"
    ends = [f"step:1390/1390 val_loss:{loss} train_time:{time}ms\n" for loss, time in [(3.28, 9), (3.27, 9), (3.27, 8)]]
    path.write_text(ends[0] + ends[1] + ends[1] + ends[2])
    assert [run.final.loss for run in read_log(path).runs] == [3.28, 3.27, 3.27]


def test_a_second_log_in_the_file_is_reported_and_its_source_is_not_taken_for_steps(tmp_path):
    (path,) = add_logs(tmp_path, [build_log(3.27) + "import os\n" + build_log(3.26)])
    log = read_log(path)
    assert [run.final.loss for run in log.runs] == [3.27]
    line = build_log(3.27).count("\n") + 1
    assert [(number, "another log begins" in what) for number, what in log.complaints] == [(line, True)]
    (path,) = add_logs(tmp_path, [f"{build_log(3.27)}{RULER}\n{STEPS}"])  # a line of = alone only parts two trials
    assert [run.final.loss for run in read_log(path).runs] == [3.27, 3.2785]


def test_a_resumed_run_is_one_run_and_keeps_no_step_twice(tmp_path):
    path = tmp_path / "log.txt"
    before = "".join(f"step:{step}/40 val_loss:{9 - step / 10:.4f} train_time:{step}00ms\n" for step in (0, 10, 20, 30))
    after = "".join(f"step:{step}/40 val_loss:{8 - step / 10:.4f} train_time:{step}50ms\n" for step in (20, 30, 40))
    note = "stopped by SIGTERM after step 33\nresumed at step 20 from checkpoints/x/step_000020.pt\n"
    path.write_text(f"{SOURCE}{RULER}\n{before}{note}{after}")
    (run,) = read_log(path).runs
    assert run.complete
    assert [(v.step, v.loss) for v in run.validations] == [(0, 9.0), (10, 8.0), (20, 6.0), (30, 5.0), (40, 4.0)]


def test_a_run_that_was_resumed_on_another_machine_has_no_hardware_to_compare_it_by(tmp_path):
    logs = good_logs()
    head, _, tail = logs[2].partition("step:695/1390 val_loss")
    resumed = "resumed at step 348 from checkpoints/on a disk/step_000348.pt on {}\nstep:695/1390 val_loss"
    for machine, moved in ("2 x Some CPU, 2 cores", False), ("1 x Some CPU, 2 cores", True), ("2 x Other CPU", True):
        logs[2] = head + resumed.format(machine) + tail
        record = add_record(tmp_path / machine, "1_A", logs)
        out = tool("check", record, code=int(moved)).out
        assert (f"began on 2 x Some CPU, 2 cores and was resumed on {machine}" in out) == moved
        assert ("no: hardware" in tool("list", record).out) == moved


def test_training_losses_are_averaged_over_the_runs_in_hundredths_of_the_steps(tmp_path):
    def log_of(seed):
        line = "step:{}/400 train_loss:{:.6f} train_time:{}ms".format
        lines = [line(step, seed + step / 1000, step * seed) for step in range(1, 401)]
        again = ["resumed at step 200 from x.pt", line(201, 9.5, 1000), line(202, 9.5, 1000)]
        end = f"step:400/400 val_loss:3.0000 train_time:{400 * seed}ms"
        return "\n".join([SOURCE.rstrip(), RULER, f"seed: {seed}", RULER, *lines, *again * (seed == 2), end, ""])

    record = add_record(tmp_path, "1_A", [log_of(1), log_of(2), build_log(3.0).partition("peak")[0] + STEPS])
    (entry,) = open_records([record], tmp_path)[0].entries()
    first, *_, last = entry.training  # the third log holds two trials, which share their step numbers
    assert len(entry.training) == 100
    assert (first.step, first.loss, first.seconds) == pytest.approx((2.5, 1.5025, 0.00375))
    assert (last.step, last.loss, last.seconds) == pytest.approx((398.5, 1.8985, 0.59775))
    assert entry.training[50].loss == pytest.approx((4 * 1.2025 + 2 * 9.5 + 2 * 2.2035) / 8)


TRUNCATED = {
    "within the source": (SOURCE.encode(), 8, "within the source", 0),
    "within the header": (f"{SOURCE}{RULER}\npython: 3.1".encode(), 10, "without any validation", 0),
    "within a number": (f"{SOURCE}{RULER}\n{STEPS}".encode()[:-80], 15, "middle of a line", 1),
    "empty": (b"", 1, "without any validation", 0),
}


@pytest.mark.parametrize("case", TRUNCATED)
def test_a_truncated_log_is_reported_with_its_last_line(case, tmp_path):
    content, line, problem, runs = TRUNCATED[case]
    path = tmp_path / "cut.txt"
    path.write_bytes(content)
    log = read_log(path)
    assert [(number, problem in what) for number, what in log.complaints] == [(line, True)]
    assert len(log.runs) == runs and not any(run.complete for run in log.runs)
    assert f"cut.txt:{line}: " in tool("list", tmp_path).err


def test_malformed_lines_are_named_with_file_and_line_and_the_rest_is_still_read(tmp_path):
    bad = {
        "step:abc/1390 val_loss:3.1 train_time:1ms": "no step number",
        "step:7/1390 val_loss:three train_time:1ms": "val_loss is no number",
        "step:8/1390 val_loss:3.1 train_time:1h": "neither in ms nor in s",
    }
    lines = build_log().split("\n")
    place = next(number for number, line in enumerate(lines) if line.startswith("step:347"))
    lines[place:place] = bad
    settings_line = next(number for number, line in enumerate(lines) if line.startswith("settings:"))
    home = tmp_path / "records"
    folder = add_record(home, "2025_Some", [*good_logs()[:2], build_log(seed=77)])
    (folder / "bad.txt").write_text("\n".join(lines))
    (folder / "json.txt").write_text(build_log(seed=78, settings="{'not': json}"))
    shown = tool("list", "--records", home)
    for offset, problem in enumerate(bad.values()):
        assert re.search(rf"bad\.txt:{place + 1 + offset}: .*{problem}", shown.err)
    assert f"json.txt:{settings_line + 1}: 'settings' is not JSON" in shown.err
    assert re.search(r"2025_Some +5 ", shown.out)  # all five runs are there all the same


def test_a_flood_of_bad_lines_is_cut_short(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text(build_log() + "step:x\n" * 1000)
    assert len(tool("list", path).err.splitlines()) == 4
    assert "and 997 more" in tool("list", path).err


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_content_whatever_makes_the_reader_fail(data, tmp_path):
    content = build_log().encode()
    words = ["\nstep:", "/", " val_loss:", " train_time:", "9" * 5000, "nan", "ms", "\r", "\xff", "\0", "{", "[", RULER]
    for _ in range(data.draw(st.integers(0, 5))):
        start, length = data.draw(st.integers(0, len(content))), data.draw(st.integers(0, 300))
        middle = data.draw(st.one_of(st.binary(max_size=20), st.sampled_from(words).map(str.encode)))
        content = content[:start] + middle + content[start + length :]
    path = tmp_path / "log.txt"
    path.write_bytes(content)
    log = read_log(path)
    assert log.runs or log.complaints
    assert all(1 <= line <= content.count(b"\n") + 1 for line, _ in log.complaints)


# ----------------------------------------------------------------------------------------------------------------------
# list
# ----------------------------------------------------------------------------------------------------------------------


def table_row(text, name):
    line = next(line for line in text.splitlines() if line.startswith(name))
    return re.split(r" {2,}", line.strip())


def test_list_works_before_there_are_records(tmp_path):
    assert "no records yet" in tool("list", "--records", tmp_path).out


def test_list_shows_runs_steps_loss_time_gain_and_evidence(tmp_path):
    first = [build_log(3.27 + 0.001 * i, i, milliseconds=200000 + 1000 * i) for i in range(5)]
    second = [build_log(3.29 + 0.001 * i, i, milliseconds=150000, steps=1380) for i in range(3)]
    add_record(tmp_path, "2024-01-01_First", first)
    add_record(tmp_path, "2024-02-01_Second", second)
    add_record(tmp_path, "2024-03-01_Third", [])
    out = tool("list", "--records", tmp_path).out
    p = stats.ttest_1samp([3.27 + 0.001 * i for i in range(5)], 3.28, alternative="less").pvalue
    spread = math.sqrt(sum((i - 2) ** 2 for i in range(5)) / 4)
    row = ["2024-01-01_First", "5", "1390", f"3.2720 ± {0.001 * spread:.4f}", f"202.0 ± {spread:.1f} s", "-"]
    assert table_row(out, "2024-01") == [*row, f"yes, p = {p:.4f}"]
    row = ["2024-02-01_Second", "3", "1380", "3.2910 ± 0.0010", "150.0 ± 0.0 s", f"{100 * (1 - 150 / 202):+.1f} %"]
    assert table_row(out, "2024-02")[:6] == row
    assert table_row(out, "2024-02")[6].startswith("no, p = 0.9")
    assert "without runs: 2024-03-01_Third" in out


def test_list_never_compares_tracks_nor_machines(tmp_path):
    add_record(tmp_path, "1_A", good_logs(milliseconds=100000))
    add_record(tmp_path, "2_Laptop", good_logs((1.03, 1.031), target=1.04, milliseconds=10000))
    other_data = json.dumps([{"file": "train.bin", "tokens": 100, "sha256": "other"}])
    add_record(tmp_path, "3_Data", good_logs(milliseconds=50000, data=other_data))
    add_record(tmp_path, "4_Machine", good_logs(milliseconds=50000, hardware="Another CPU"))
    out = tool("list", "--records", tmp_path).out
    gains = {name: table_row(out, name)[5] for name in ("1_A", "2_Laptop", "3_Data", "4_Machine")}
    assert gains == {"1_A": "-", "2_Laptop": "-", "3_Data": "-", "4_Machine": "other hardware"}
    assert out.count("target 3.28") == 2 and out.count("target 1.04") == 1


def test_list_says_when_the_evidence_does_not_suffice_and_why(tmp_path):
    add_record(tmp_path, "1_OneRun", good_logs()[:1])
    add_record(tmp_path, "2_Seeds", [build_log(3.2701, seed=1), build_log(3.2702, seed=1)])
    add_record(tmp_path, "3_Cut", [*good_logs(), build_log(3.27, seed=9).partition("step:1390/1390 val_loss:3.27")[0]])
    out = tool("list", "--records", tmp_path).out
    assert table_row(out, "1_OneRun")[-1] == "no, 1 run"
    assert table_row(out, "2_Seeds")[-1] == "no: seeds"
    assert table_row(out, "3_Cut")[1] == "5 + 1 unfinished" and table_row(out, "3_Cut")[-1] == "no: complete"


# ----------------------------------------------------------------------------------------------------------------------
# check
# ----------------------------------------------------------------------------------------------------------------------


def test_check_says_p_0_0001_for_the_published_softcap_losses(tmp_path):
    assert len(PUBLISHED) == 80
    paths = add_logs(tmp_path, [build_log(loss, seed=seed) for seed, loss in enumerate(PUBLISHED)])
    out = tool("check", *paths).out
    assert "loss      mean 3.2791, spread 0.0019, below 3.28: p = 0.0001 (one-sided t-test, 80 runs)" in out
    assert "verdict: the evidence suffices" in out


def test_check_reads_public_logs_and_says_what_they_do_not_show(tmp_path):
    trials = "".join(STEPS.replace("3.2785", f"{loss:.4f}") for loss in PUBLISHED)
    (path,) = add_logs(tmp_path, [f"{RULER}\n{SOURCE}{RULER}\n{HEADER}{RULER}\n{trials}"])
    out = tool("check", path, "--target", "3.28").out
    assert "p = 0.0001" in out and "80 runs in 1 log" in out
    assert "they do not show: source, seeds, settings, data" in out
    assert "FAIL  loss" in tool("check", path, "--target", "3.279", code=1).out


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(32700, 32850), min_size=2, max_size=12).filter(lambda losses: len(set(losses)) > 1))
def test_p_is_that_of_scipys_one_sided_t_test(ten_thousandths):
    losses = [value / 10000 for value in ten_thousandths]
    expected = stats.ttest_1samp(losses, 3.28, alternative="less").pvalue
    assert p_below(losses, 3.28) == pytest.approx(expected, rel=1e-6, abs=1e-12)


def break_source(folder):
    (folder / "train_gpt.py").write_text(SOURCE + "# changed after the runs\n")


def replace_in_one(old, new):
    def change(folder):
        text = (folder / "0003.txt").read_text()
        assert old in text
        (folder / "0003.txt").write_text(text.replace(old, new))

    return change


BREAKS = {
    "complete": replace_in_one("step:1390/1390 val_loss:3", "step:1389/1390 val_loss:3"),
    "source": break_source,
    "seeds": replace_in_one("\nseed: 4\n", "\nseed: 1\n"),
    "settings": replace_in_one('"num_iterations": 1390', '"num_iterations": 1391'),
    "data": replace_in_one("ab12", "cd34"),
    "hardware": replace_in_one("Some CPU", "Faster CPU"),
    "loss": replace_in_one("val_loss:3.2747", "val_loss:3.3747"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_check_fails_on_exactly_what_is_wrong(name, tmp_path):
    folder = add_record(tmp_path, "2025-01-01_Some", good_logs())
    passed = tool("check", "Some", "--records", tmp_path)
    assert passed.out.count("  ok  ") == 7 and "FAIL" not in passed.out
    BREAKS[name](folder)
    failed = tool("check", "Some", "--records", tmp_path, code=1)
    assert re.findall(r"FAIL +(\w+)", failed.out) == [name]
    assert f"verdict: the evidence does not suffice ({name})" in failed.out


def test_check_sees_one_run_filed_twice_even_without_seeds(tmp_path):
    public = [SHAPES["source in front"].replace("3.2785", str(loss)) for loss in (3.2701, 3.2702, 3.2703)]
    assert "FAIL" not in tool("check", *add_logs(tmp_path, public)).out
    assert "are the same file" in tool("check", *add_logs(tmp_path, [*public, public[0]]), code=1).out


def test_check_fails_without_runs_and_on_losses_that_prove_nothing(tmp_path):
    assert "no log with a run" in tool("check", *add_logs(tmp_path, [SOURCE]), code=1).out
    same = [build_log(3.27, seed=seed) for seed in (1, 2, 3)]
    assert "allow no test" in tool("check", *add_logs(tmp_path, same), code=1).out
    diverged = [log.replace("val_loss:3.2751", "val_loss:nan") for log in good_logs()]
    assert "allow no test" in tool("check", *add_logs(tmp_path, diverged), code=1).out


def test_check_does_not_pass_over_what_it_cannot_read(tmp_path):
    paths = add_logs(tmp_path, [log.replace("peak memory", "step:?\npeak memory") for log in good_logs()])
    assert re.search(r"FAIL  complete  \S+/0000\.txt:28: no step number", tool("check", *paths, code=1).out)
    paths = add_logs(tmp_path, good_logs(settings="{'target_loss': 3.28}"))
    assert "FAIL  complete" in tool("check", *paths, code=1).out


def test_check_takes_the_target_from_the_log_and_judges_each_track_alone(tmp_path):
    add_record(tmp_path, "1_Two", [*good_logs(), *good_logs((1.031, 1.032, 1.033), target=1.04, hardware="Laptop")])
    out = tool("check", "Two", "--records", tmp_path).out
    assert "Two, target 1.04" in out and "Two, target 3.28" in out and out.count("verdict: the evidence suffices") == 2


# ----------------------------------------------------------------------------------------------------------------------
# extract
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["source in front", "source between", "source between, something before", "ours"])
def test_extract_gives_back_what_ran(shape, tmp_path):
    (path,) = add_logs(tmp_path, [SHAPES[shape]])
    assert tool("extract", path).raw == SOURCE.encode()
    tool("extract", path, "-o", tmp_path / "again.py")
    assert (tmp_path / "again.py").read_bytes() == SOURCE.encode()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(source=st.binary(min_size=1, max_size=200), between=st.booleans())
def test_extract_is_byte_for_byte(source, between, tmp_path):
    source = b"import os\n" + source.removesuffix(b"\n") + b"\n"
    front = RULER.encode() + b"\n" if between else b""
    path = tmp_path / "log.txt"
    path.write_bytes(front + source + f"{RULER}\n{HEADER}{RULER}\n{STEPS}".encode())
    assert read_log(path).source == source


def test_what_is_extracted_runs_and_writes_the_same_log_again(tmp_path):
    (tmp_path / "first").mkdir()
    script = fake_script(tmp_path, "train_gpt.py")
    subprocess.run([sys.executable, script, "--seed", "5"], cwd=tmp_path, check=True, capture_output=True)
    (log,) = (tmp_path / "logs").iterdir()
    tool("extract", log, "-o", tmp_path / "first/again.py")
    subprocess.run([sys.executable, "again.py", "--seed", "5"], cwd=tmp_path / "first", check=True, capture_output=True)
    (again,) = (tmp_path / "first/logs").iterdir()
    assert again.read_bytes() == log.read_bytes()


def test_extract_refuses_a_log_without_a_whole_source(tmp_path):
    cut, console, itself = add_logs(tmp_path, [SOURCE, STEPS, build_log()])
    assert "within the source" in tool("extract", cut, code=2).err
    assert "no source" in tool("extract", console, code=2).err
    assert "is the log itself" in tool("extract", itself, "-o", itself, code=2).err
    assert itself.read_text() == build_log()


def test_extract_overwrites_no_other_script(tmp_path):
    (path,) = add_logs(tmp_path, [build_log()])
    mine = tmp_path / "train_gpt.py"
    mine.write_text("my work of today\n")
    assert "is there already" in tool("extract", path, "-o", mine, code=2).err
    assert mine.read_text() == "my work of today\n"
    mine.write_text(SOURCE)
    tool("extract", path, "-o", mine)
    assert mine.read_text() == SOURCE


# ----------------------------------------------------------------------------------------------------------------------
# diff
# ----------------------------------------------------------------------------------------------------------------------

BOX = "# " + "-" * 60
OLD = f'''"""Old words."""
import torch

{BOX}
# Muon: momentum made orthogonal
{BOX}


def step(x):  # take a step
    return x * 0.95 + 1


{BOX}
# Model: a GPT
{BOX}


class GPT:
    """The model."""

    softcap = 30
    text = """one

    # not a comment
    """
'''
NEW = OLD.replace("Old words", "New words").replace("softcap = 30", "softcap = 15").replace("# take a step", "# go on")


def plain(text, style):
    return text


def apply_patch(folder, old, patch):
    """What `git apply`, which knows nothing of us, makes of the old script."""
    (folder / "script.py").write_bytes(old)
    patch = re.sub(rb"\A--- [^\n]*\n\+\+\+ [^\n]*\n", b"--- script.py\n+++ script.py\n", patch)
    command = ["git", "apply", "-p0", "--unidiff-zero", "--whitespace=nowarn", "-"]
    outside = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}  # of any repository
    subprocess.run(command, input=patch, cwd=folder, check=True, env=outside)
    return (folder / "script.py").read_bytes()


def test_a_diff_turns_the_old_script_into_the_new_one(tmp_path):
    (tmp_path / "a.py").write_text(OLD)
    (tmp_path / "b.py").write_text(NEW.rstrip("\n"))
    patch = tool("diff", "a.py", "b.py", cwd=tmp_path).raw
    assert apply_patch(tmp_path, OLD.encode(), patch) == NEW.rstrip("\n").encode()


LINES = st.lists(st.sampled_from(["a", "b", "b2", "", " c", "d\r", "e\x0cf", "é"]), max_size=30).map("\n".join)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(old=LINES, new=LINES)
def test_any_diff_can_be_applied(old, new, tmp_path):
    old, new = "x\n" + old, "x\n" + new  # git has other rules for files that are empty
    patch = "".join(line + "\n" for line in unified(Diff(Script("a", old.encode()), Script("b", new.encode())), plain))
    assert bool(patch) == (old != new)
    if patch:
        assert apply_patch(tmp_path, old.encode(), patch.encode()) == new.encode()


def test_diff_takes_names_folders_scripts_and_logs_and_names_the_section(tmp_path):
    add_record(tmp_path, "2024-01-01_Older", [], script=OLD)
    folder = add_record(tmp_path, "2024-02-01_Newer", [build_log(source=NEW)], script=NEW)
    lone = add_record(tmp_path, "2024-03-01_LogOnly", [build_log(source=NEW)], script=None)
    outputs = [
        tool("diff", "Older", new, "--records", tmp_path).out.split("\n", 2)[2]
        for new in ("newer", folder, folder / "train_gpt.py", folder / "0000.txt", lone)
    ]
    assert len(set(outputs)) == 1
    assert "-    softcap = 30\n+    softcap = 15\n" in outputs[0]
    assert re.search(r"^@@ -\d+,\d+ \+\d+,\d+ @@ Model$", outputs[0], re.MULTILINE)
    assert "no difference" in tool("diff", "Newer", lone, "--records", tmp_path).err


def test_stat_counts_lines_by_section_as_git_counts_them_by_file(tmp_path):
    (tmp_path / "a.py").write_text(OLD)
    (tmp_path / "b.py").write_text(NEW + "\n\nclass More:\n    pass\n")
    out = tool("diff", "a.py", "b.py", "--stat", cwd=tmp_path).out
    assert re.findall(r"^ (\S+) +\| +(\d+) (\+*)(-*)$", out, re.MULTILINE) == [
        ("(top)", "2", "+", "-"),
        ("Muon", "2", "+", "-"),
        ("Model", "6", "+++++", "-"),
    ]
    command = ["git", "diff", "--no-index", "--numstat", "a.py", "b.py"]
    added, removed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout.split()[:2]
    assert f"3 sections changed, {added} lines added, {removed} removed" in out


def test_stat_goes_by_class_and_function_where_there_are_no_headings(tmp_path):
    source = "import os\n\n\n@decorated\ndef one():\n    return 1\n\n\nclass Two:\n    x = 2\n"
    (tmp_path / "a.py").write_text(source)
    (tmp_path / "b.py").write_text(source.replace("@decorated", "@other").replace("x = 2", "x = 3\n    y = 4"))
    out = tool("diff", "a.py", "b.py", "--stat", cwd=tmp_path).out
    assert [line.split("|")[0].strip() for line in out.splitlines()[:-1]] == ["def one", "class Two"]
    (tmp_path / "b.py").write_text("not python (")
    assert "(whole file)" in tool("diff", "a.py", "b.py", "--stat", cwd=tmp_path).out


def test_no_comments_compares_code_only(tmp_path):
    (tmp_path / "a.py").write_text(OLD)
    (tmp_path / "b.py").write_text(NEW)
    out = tool("diff", "a.py", "b.py", "--no-comments", cwd=tmp_path).out
    assert re.findall(r"^[-+](?![-+]).*", out, re.MULTILINE) == ["-    softcap = 30", "+    softcap = 15"]
    for inside_a_string in ("# still not a comment", "# not a comment "):
        (tmp_path / "b.py").write_text(OLD.replace("# not a comment", inside_a_string))
        assert f"+    {inside_a_string}" in tool("diff", "a.py", "b.py", "--no-comments", cwd=tmp_path).out
    (tmp_path / "b.py").write_text("not python (")
    assert "b.py: not Python" in tool("diff", "a.py", "b.py", "--no-comments", cwd=tmp_path, code=2).err


@pytest.mark.parametrize("path", ["records/logs.py", "records/scripts.py", "tests/test_records_tool.py"])
def test_what_no_comments_leaves_is_the_same_program(path):
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT}

    def tokens(text):
        """All that Python goes by; strings that are a statement of their own are docstrings."""
        found = [(t.type, t.string) for t in tokenize.generate_tokens(io.StringIO(text).readline)]
        found = [(0, ""), *(token for token in found if token[0] not in layout)]
        ends = {tokenize.NEWLINE, 0}
        docstrings = {
            i
            for i in range(1, len(found) - 1)
            if found[i - 1][0] in ends and found[i][0] == tokenize.STRING and found[i + 1][0] in ends
        }
        return [token for i, token in enumerate(found) if not {i, i - 1} & docstrings]

    script = Script(path, (ROOT / path).read_bytes())
    kept = "".join(line.text + "\n" for line in script.code_lines())
    assert tokens(kept) == tokens(script.text)
    assert len(kept.splitlines()) < len(script.text.splitlines())


# ----------------------------------------------------------------------------------------------------------------------
# plot
# ----------------------------------------------------------------------------------------------------------------------


def test_plot_draws_every_record_with_its_spread_and_the_target(tmp_path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    add_record(tmp_path, "1_A", good_logs((3.27, 3.28)))
    add_record(tmp_path, "2_B", good_logs((3.29, 3.27), milliseconds=100000))
    (entries,) = tracks(open_records([tmp_path], tmp_path), 3.28).values()
    figure, axes = pyplot.subplots(1, 2)
    plot_track(axes, entries)
    for axis, ends in zip(axes, [(204.345, 100.0), (1390, 1390)], strict=True):
        a, a_training, b, b_training, target = axis.lines
        at, losses = a_training.get_xdata(), a_training.get_ydata()
        assert len(at) == 4 and at[-1] == pytest.approx(ends[0])
        assert losses[-1] == pytest.approx(3.275 + 0.02)  # of two runs, as build_log writes them
        assert a_training.get_color() == a.get_color() != b_training.get_color()
        assert [line.get_xdata()[-1] for line in (a, b)] == pytest.approx(ends)
        assert [line.get_ydata()[-1] for line in (a, b)] == pytest.approx([3.275, 3.28])
        assert set(target.get_ydata()) == {3.28}
        band = axis.collections[1].get_paths()[0].vertices
        edges = [y for x, y in band if x == pytest.approx(ends[1])]
        assert (min(edges), max(edges)) == pytest.approx((3.28 - 0.02 / math.sqrt(2), 3.28 + 0.02 / math.sqrt(2)))
        low, high = axis.get_ylim()
        assert low < 3.27 and 3.28 < high < 10
    pyplot.close(figure)


def test_plot_writes_a_picture_with_one_row_a_track(tmp_path):
    add_record(tmp_path, "1_A", good_logs())
    one = tool("plot", "A", "-o", tmp_path / "one.png", "--records", tmp_path)
    assert "1 track" in one.out
    lone = tmp_path / "laptop.txt"
    lone.write_text(build_log(1.03, target=1.04))
    assert "2 tracks" in tool("plot", "A", lone, "-o", tmp_path / "two.png", "--records", tmp_path).out
    heights = []
    for name in ("one.png", "two.png"):
        content = (tmp_path / name).read_bytes()
        assert content.startswith(b"\x89PNG")
        heights.append(int.from_bytes(content[20:24], "big"))
    assert heights[1] == 2 * heights[0]
    assert "bad.xyz" in tool("plot", "A", "-o", tmp_path / "bad.xyz", "--records", tmp_path, code=2).err


# ----------------------------------------------------------------------------------------------------------------------
# race
# ----------------------------------------------------------------------------------------------------------------------

FAKE = '''"""A training that only pretends: its loss falls with the steps, its clock and its end have some noise."""
import argparse, json, pathlib, random, time, uuid

MS_PER_STEP, FINAL, NOISE = 100.0, 3.27, 1.0
parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--target_loss", type=float, default=3.28)
parser.add_argument("--sleep", type=float, default=0.0)
parser.add_argument("--fail", action="store_true")
settings = parser.parse_args()
if settings.fail:
    raise SystemExit("--fail was asked for")
source = pathlib.Path(__file__).read_text()
same = random.Random(settings.seed)  # what a seed brings is alike in both scripts of a pair
own = random.Random(f"{settings.seed} {source}")
final = FINAL + NOISE * (same.gauss(0, 0.003) + own.gauss(0, 0.0005))
ms = MS_PER_STEP * (1 + NOISE * (same.gauss(0, 0.05) + own.gauss(0, 0.002)))
log = pathlib.Path("logs") / f"{uuid.uuid4()}.txt"
log.parent.mkdir(exist_ok=True)
with open(log, "w") as file:
    file.write(source + "=" * 100 + f"\\nhardware: none\\nseed: {settings.seed}\\n")
    file.write(f"settings: {json.dumps(vars(settings))}\\n" + "=" * 100 + "\\n")
    for step in range(0, 101, 5):
        time.sleep(settings.sleep)
        file.write(f"step:{step}/100 val_loss:{final + (100 - step) / 500:.4f} train_time:{ms * step:.0f}ms\\n")
        file.flush()
'''


def fake_script(folder, name, ms=100.0, final=3.27, noise=1.0):
    """FAKE with other figures."""
    usual = "MS_PER_STEP, FINAL, NOISE = 100.0, 3.27, 1.0"
    assert usual in FAKE
    source = FAKE.replace(usual, f"MS_PER_STEP, FINAL, NOISE = {ms}, {final}, {noise}")
    path = folder / name
    path.write_text(source + f"# {name}\n")
    return path


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
    times, losses = {}, {}
    for path in (tmp_path / "logs").glob("*.txt"):
        log = read_log(path)
        side = "B" if "# fast.py" in log.source.decode() else "A"
        times[side, log.seed] = next(v.seconds for v in log.runs[0].validations if v.loss <= 3.28)
        losses[side, log.seed] = log.runs[0].final.loss
    seeds = ["11", "12", "13", "14"]
    for values, digits in ((times, 1), (losses, 4)):
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


def test_race_gives_no_time_where_a_run_never_reached_the_target(tmp_path):
    fake_script(tmp_path, "good.py", noise=0.1)
    fake_script(tmp_path, "fast_but_bad.py", ms=10.0, final=3.2801, noise=0.1)
    out = race("good.py", "fast_but_bad.py", "--runs", 3, "--nproc", 1, cwd=tmp_path).out
    reached = int(re.search(r"B fast_but_bad.py: (\d) of 3 runs reached it", out)[1])
    assert reached < 3 and "is faster" not in out and "no winner in time" in out
    assert "A good.py ends at a lower loss" in out


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


# ----------------------------------------------------------------------------------------------------------------------
# page
# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def three_records(tmp_path):
    home = tmp_path / "records"
    add_record(home, "2024-01-01_First", good_logs(source=OLD), script=OLD)
    add_record(home, "2024-02-01_Second", good_logs((3.2741, 3.2749), source=NEW, milliseconds=150000), script=NEW)
    evil = NEW + "# </script><script>alert(1)</script> <b>&amp;\n"
    hardware = "<img src=x onerror=alert(2)>"
    logs = good_logs((1.0351, 1.0339, 1.0342), source=evil, target=1.04, hardware=hardware)
    add_record(home, "2024-03-01_<i>Evil", logs, script=evil)
    return home


def test_the_page_has_the_table_the_curves_and_the_diffs_and_needs_no_network(three_records, tmp_path):
    tool("page", "-o", tmp_path / "records.html", "--records", three_records)
    text = (tmp_path / "records.html").read_text()
    listed = tool("list", "--records", three_records).out
    for name in ("2024-01-01_First", "2024-02-01_Second"):
        for cell in table_row(listed, name):
            assert f"{html.escape(cell)}</td>" in text
    assert text.count("<svg ") == 4  # two tracks, each over time and over steps
    assert text.count("<polyline class='training'") == 6  # three records, each over time and over steps
    assert text.count("<details>") == 2 and "2024-01-01_First → 2024-02-01_Second" in text
    assert "<em>30</em>" in text and "<em>15</em>" in text
    assert not re.search(r"(?:src|href)\s*=\s*[\"'](?!data:)|https?:|url\((?!#)|@import", text)


def test_nothing_from_logs_or_scripts_becomes_markup(three_records, tmp_path):
    tool("page", "-o", tmp_path / "records.html", "--records", three_records)
    text = (tmp_path / "records.html").read_text()
    assert text.count("<script") == 2 and text.count("</script>") == 2
    assert "<i>Evil" not in text and "&lt;i&gt;Evil" in text
    assert "&lt;/script&gt;&lt;script&gt;alert(1)&lt;/script&gt; &lt;b&gt;&amp;amp;" in text
    names = [line["name"] for chart in page_curves(text) for line in chart]
    assert names == 2 * ["2024-01-01_First", "2024-02-01_Second"] + 2 * ["2024-03-01_<i>Evil"]


def page_curves(text):
    return json.loads(re.search(r'<script type="application/json" id="curves">(.*?)</script>', text, re.DOTALL)[1])


def test_the_page_says_so_when_there_are_no_records_and_survives_nan(tmp_path):
    tool("page", "-o", tmp_path / "none.html", "--records", tmp_path)
    assert "No records yet" in (tmp_path / "none.html").read_text()
    logs = [log.replace("val_loss:3.2751", "val_loss:nan") for log in good_logs()]
    add_record(tmp_path / "records", "1_Diverged", [*logs, STEPS.replace("0ms step_avg", "nanms step_avg")])
    add_record(tmp_path / "records", "2_OnlyNan", [re.sub(r"(val_loss:)\S+", r"\1nan", STEPS)])
    tool("page", "-o", tmp_path / "nan.html", "--records", tmp_path / "records")
    assert "1_Diverged" in (tmp_path / "nan.html").read_text()


CHROMIUM = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome", "chrome"])), None)
PROBE = """<script>
const found = {errors: [], tips: []};
addEventListener("error", event => found.errors.push(event.message));
addEventListener("load", () => {
  for (const svg of document.querySelectorAll("svg")) {
    const box = svg.getBoundingClientRect();
    svg.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + box.width * 0.97, clientY: box.top + 50}));
    const tip = svg.parentNode.querySelector(".tip"), place = tip.getBoundingClientRect();
    const inside = place.left >= 0 && place.right <= innerWidth && place.width > 50;
    found.tips.push({text: tip.innerText, inside, dots: svg.querySelectorAll("circle[visibility=visible]").length});
    svg.dispatchEvent(new PointerEvent("pointerleave"));
    if (!tip.hidden) found.errors.push("the tip stays");
  }
  for (const details of document.querySelectorAll("details")) details.open = true;
  found.added = [...document.querySelectorAll(".add td:last-child")].map(cell => cell.textContent);
  found.color = getComputedStyle(document.querySelector(".diff .add td")).backgroundColor;
  found.requests = performance.getEntriesByType("resource").length;
  found.wide = document.documentElement.scrollWidth > innerWidth;
  document.body.dataset.found = JSON.stringify(found);
});
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here to open the page with")
def test_in_a_real_browser_curves_answer_the_pointer_and_diffs_open(three_records, tmp_path):
    tool("page", "-o", tmp_path / "records.html", "--records", three_records)
    probed = (tmp_path / "records.html").read_text().replace("<title>", PROBE + "<title>")
    (tmp_path / "probed.html").write_text(probed)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
             "--disable-background-networking", "--disable-component-update", "--window-size=1200,900",
             f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=3000", "--dump-dom"]  # fmt: skip
    done = subprocess.run([CHROMIUM, *flags, f"file://{tmp_path / 'probed.html'}"], capture_output=True, timeout=60)
    dom = done.stdout.decode()
    found = json.loads(html.unescape(re.search(r'data-found="([^"]*)"', dom)[1]))
    assert found["errors"] == [] and found["requests"] == 0 and not found["wide"]
    time_tip, step_tip, evil_tip, _ = found["tips"]
    for tip in (time_tip, step_tip):
        assert tip["inside"] and tip["dots"] == 2
        assert "2024-01-01_First: 3.2758 ± 0.0009 at step 1390, 204.3 s" in tip["text"]
        assert "2024-02-01_Second: 3.2745 ± 0.0006 at step 1390, 150.0 s" in tip["text"]
    assert "2024-03-01_<i>Evil: 1.0344" in evil_tip["text"]
    assert "    softcap = 15" in found["added"] and "# </script><script>alert(1)</script> <b>&amp;" in found["added"]
    assert found["color"] == "rgb(226, 244, 228)"


# ----------------------------------------------------------------------------------------------------------------------
# The command line
# ----------------------------------------------------------------------------------------------------------------------

MISTAKES = [
    ["check"],
    ["nonsense"],
    ["check", "no_such_record"],
    ["check", "tests/fixtures", "--target", "-1"],
    ["list", "no_such_folder"],
    ["diff", "no_such.py", "train"],
    ["extract", "no_such.txt"],
    ["extract", "records"],
    ["plot", "no_such.txt", "-o", "x.png"],
    ["page"],
    ["race", "a", "b", "--runs", "0"],
    ["list", "--", "--seed", "3"],
]


@pytest.mark.parametrize("arguments", MISTAKES, ids=" ".join)
def test_a_mistake_is_told_in_one_line_with_exit_code_2(arguments):
    done = tool(*arguments, code=2)
    assert done.out == "" and len(done.err.splitlines()) == 1 and done.err.startswith("records: ")


def test_a_name_may_be_abbreviated_as_long_as_it_is_clear(tmp_path):
    for name in ("2024-11-24_Window", "2024-12-10_BlockWindow", "2025-01-04_SoftCap"):
        add_record(tmp_path, name, good_logs())
    assert tool("check", "soft", "--records", tmp_path).out.startswith("2025-01-04_SoftCap")
    assert tool("check", "Window", "--records", tmp_path).out.startswith("2024-11-24_Window")  # that is its whole name
    assert "2024-11-24_Window or 2024-12-10_BlockWindow" in tool("check", "win", "--records", tmp_path, code=2).err


def test_the_tool_runs_from_the_repository_root_as_a_module(tmp_path):
    assert "python -m records check" in run_tool().out
    assert run_tool("list", "--records", tmp_path).out.startswith("no records yet")
    assert run_tool("check", "no_such_record", code=2).err.startswith("records: no_such_record: no such file")
    paths = add_logs(tmp_path, good_logs())
    assert "verdict" in run_tool("check", *paths, cwd=tmp_path).out
    assert "verdict" in run_tool("check", paths[0], code=1).out


def test_a_reader_who_leaves_early_is_no_error(tmp_path):
    paths = add_logs(tmp_path, [build_log(source="x\n" * 200000)])
    process = start_tool("extract", *paths)
    assert process.stdout.readline() == "x\n"
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(timeout=30) == 141


def on_a_terminal(*arguments, **environment):
    """What the tool prints when its output is a terminal."""
    ours, its = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", **environment}
    process = subprocess.Popen([sys.executable, "-m", "records", *map(str, arguments)], stdout=its, env=environment)
    os.close(its)
    output = b""
    with contextlib.suppress(OSError):  # Linux says EIO at the end
        while chunk := os.read(ours, 65536):
            output += chunk
    os.close(ours)
    assert process.wait(timeout=30) == 0
    return output.decode()


def test_colours_are_for_terminals_that_want_them(tmp_path):
    (tmp_path / "a.py").write_text(OLD)
    (tmp_path / "b.py").write_text(NEW)
    command = ["diff", tmp_path / "a.py", tmp_path / "b.py"]
    coloured = on_a_terminal(*command, NO_COLOR="")
    assert "\033[31m-\033[0m\033[31m    softcap = \033[0m\033[31;7m30\033[0m" in coloured
    assert "\033" not in on_a_terminal(*command, NO_COLOR="1")
    assert "\033" not in on_a_terminal(*command, "--color", "never")
    assert "\033" not in tool(*command).out
    assert tool(*command, "--color", "always").out.replace("\n", "\r\n") == coloured


def test_control_characters_in_a_log_do_not_reach_the_terminal(tmp_path):
    paths = add_logs(tmp_path, good_logs(hardware="\033]0;gotcha\a\033[2J"))
    done = tool("check", *paths)
    assert "gotcha" in done.out and "\033" not in done.out
    (tmp_path / "bad.txt").write_text("step:\033[2J\n")
    assert "\033" not in tool("list", tmp_path / "bad.txt").err
