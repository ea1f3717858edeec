"""Logs, read back: every dialect of the field, whatever is in the file."""

import json
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from records_helpers import (
    HEADER,
    NVIDIA_SMI,
    ROOT,
    RULER,
    SHAPES,
    SOURCE,
    STEPS,
    add_logs,
    add_record,
    build_log,
    good_logs,
    tool,
)

from records.evidence import entries_of
from records.folders import open_records
from records.logs import find_source, read_log
from records.steps import LineReader, read_usual


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
    killed = "".join(STEPS.splitlines(keepends=True)[:4]).replace("17024ms", "17031ms")
    fourth = STEPS.replace("204345ms", "204350ms").replace("17024ms", "17019ms")
    path.write_text(f"{SOURCE}{RULER}\n{HEADER}{RULER}\n{STEPS}{second.replace('20434', '20439')}{killed}{fourth}")
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


def test_training_losses_are_averaged_over_the_runs_and_over_the_same_share_of_the_steps(tmp_path):
    def log_of(seed):
        line = "step:{}/400 train_loss:{:.6f} train_time:{}ms".format
        lines = [line(step, seed + step / 1000, step * seed) for step in range(1, 401)]
        if seed == 2:
            again = ["resumed at step 200 from x.pt", line(201, 9.5, 402), line(202, 9.5, 404)]
            lines[202:202] = again
        end = f"step:400/400 val_loss:3.0000 train_time:{400 * seed}ms"
        return "\n".join([SOURCE.rstrip(), RULER, f"seed: {seed}", RULER, *lines, end, ""])

    record = add_record(tmp_path, "1_A", [log_of(1), log_of(2)])
    (entry,) = entries_of(*open_records([record], tmp_path))
    assert len(entry.training) == 100
    step, seconds, loss = zip(*[moment[:3] for moment in entry.training], strict=True)
    assert (step[0], seconds[0], step[-1], seconds[-1]) == pytest.approx((2.5, 0.00375, 398.5, 0.59775))
    # Each is the mean of the hundredths within 25 steps to either side.
    hundredths = [np.mean([1.5 + s / 1000 for s in range(4 * i + 1, 4 * i + 5)]) for i in range(100)]
    hundredths[50] = (4 * 1.2025 + 2 * 9.5 + 2 * 2.2035) / 8
    for place in (0, 30, 49, 99):
        assert loss[place] == pytest.approx(np.mean(hundredths[max(0, place - 6) : place + 7]))


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
    folder = add_record(home, "2025_Some", [*good_logs()[:2], build_log(3.27, seed=77)])
    (folder / "bad.txt").write_text("\n".join(lines))
    (folder / "json.txt").write_text(build_log(3.26, seed=78, settings="{'not': json}"))
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


# ---- Dialects of the public logs -------------------------------------------------------------------------------------


def training_lines(first, last, steps, ms=100.0, offset=0):
    line = "step:{}/{} train_time:{:.0f}ms step_avg:{:.2f}ms\n".format
    return "".join(line(step, steps, offset + ms * step, ms) for step in range(first, last + 1))


def public_run(loss, steps=40, stop=None, every=10, ms=100.0, start=0):
    """The steps of a public log: a line for each step, a validation every so many and at the last one."""
    stop, lines = stop or steps, []
    for step in range(start, stop + 1):
        if step:
            lines.append(training_lines(step, step, steps, ms))
        if step % every == 0 or step == stop:
            here = loss + (stop - step) / 50
            lines.append(f"step:{step}/{steps} val_loss:{here:.4f} train_time:{ms * step:.0f}ms step_avg:{ms:.2f}ms\n")
    return "".join(lines)


def read(folder, text, name="log.txt"):
    (folder / name).write_text(text)
    return read_log(folder / name)


def test_a_summary_that_repeats_the_last_lines_is_not_a_second_run(tmp_path):
    run = public_run(3.27)
    summaries = {
        "the last line": run.splitlines(keepends=True)[-1],
        "the last three lines": "".join(run.splitlines(keepends=True)[-3:]),
        "all validations": "".join(line for line in run.splitlines(keepends=True) if "val_loss" in line),
        "everything": run,
    }
    for name, summary in summaries.items():
        log = read(tmp_path, f"{SOURCE}{RULER}\n{run}summary\n{summary}")
        assert [(len(r.validations), r.complete) for r in log.runs] == [(5, True)], name
        assert any("counted once" in note for _, note in log.notes) and not log.complaints, name


COPIES = {
    "with other line ends": lambda log: log.replace("\n", "\r\n"),
    "as console output": lambda log: log.rpartition(RULER)[2],
    "as a summary": lambda log: "\n".join(line for line in log.rpartition(RULER)[2].split("\n") if "val_loss" in line),
    "cut off on the way": lambda log: log.partition("step:30/40 val")[0],
}


@pytest.mark.parametrize("copy", COPIES)
def test_a_run_that_was_saved_twice_counts_once_and_improves_no_p(copy, tmp_path):
    logs = [f"{SOURCE}{RULER}\n{HEADER}{RULER}\n{public_run(loss, ms=ms)}" for loss, ms in
            ((3.2712, 100), (3.2724, 101), (3.2731, 102))]  # fmt: skip
    once = tool("check", *add_logs(tmp_path, logs)).out
    p = re.search(r"p = ([\d.]+)", once)[1]
    folder = add_record(tmp_path, "1_Some", logs, script=None)
    for number, suffix in enumerate((".txt", ".stdout", ".log")):
        (folder / f"copy{number}{suffix}").write_bytes(COPIES[copy](logs[number]).encode())
    done = tool("check", folder)
    assert f"p = {p} (one-sided t-test, 3 runs)" in done.out and "3 copies not counted" in done.out
    assert "copy1.stdout: the same run as in" in done.err and "counted once" in done.err
    assert f"p = {p}" in tool("list", folder).out


def test_runs_that_only_share_their_first_validation_are_different_runs(tmp_path):
    first = "step:0/40 val_loss:10.8258 train_time:0ms step_avg:nanms\n"
    log = read(tmp_path, first + first.replace("0/40", "1/40") + training_lines(1, 9, 40) + first + public_run(3.27))
    assert [run.complete for run in log.runs][-1] and len(log.runs) > 1


def test_an_aborted_trial_before_another_is_a_run_of_its_own(tmp_path):
    whole = public_run(3.27, ms=101.0, start=1)
    aborted = {
        "before its second validation": public_run(3.2, stop=30, every=40, ms=99.0).rpartition("step:30/40 val")[0],
        "after two validations": public_run(3.2, ms=99.0).partition("step:17/40")[0],
    }
    for name, text in aborted.items():
        log = read(tmp_path, f"{SOURCE}{RULER}\n{text}{whole}")
        assert [run.complete for run in log.runs] == [False, True], name
        assert [v.step for v in log.runs[1].validations] == [10, 20, 30, 40], name
    without_any = read(tmp_path, f"{SOURCE}{RULER}\n{training_lines(1, 7, 40, ms=99.0)}{whole}")
    assert [run.complete for run in without_any.runs] == [True]
    assert "ends at step 7 without any validation" in without_any.notes[0][1]
    only_validations = "".join(line for line in whole.splitlines(keepends=True) if "val_loss" in line)
    slower = read(tmp_path, "step:5/40 val_loss:5.0 train_time:900ms\nstep:11/40 val_loss:4.9 train_time:9000ms\n"
                  + only_validations.partition("\n")[2])  # fmt: skip
    assert [run.complete for run in slower.runs] == [False, True]


EARLY = {
    "off the grid": public_run(2.919, 2900, stop=2720, every=125).replace("train_time", "x:1 train_time"),
    "a line for every step": public_run(2.919, 2900, stop=2720, every=20),
    "only validations, and a last line": re.sub(r"step:\d+/2900 train.*\n", "", public_run(2.919, 2900, 2720, 20))
    + "peak memory allocated: 31563 MiB reserved: 32000 MiB\n",
}


@pytest.mark.parametrize("shape", EARLY)
def test_a_run_that_ends_early_on_purpose_is_complete(shape, tmp_path):
    (run,) = read(tmp_path, f"{SOURCE}{RULER}\n{EARLY[shape]}").runs
    assert run.complete and (run.final.step, run.steps) == (2720, 2900)


BROKEN_OFF = {
    "between two validations": public_run(2.9, 2900, stop=2600, every=125).rpartition("step:2600/2900 val")[0],
    "right after one of the first": public_run(2.9, 2900, stop=250, every=125),
    "only validations": re.sub(r"step:\d+/2900 train.*\n", "", public_run(2.9, 2900, 2500, 125)),
}


@pytest.mark.parametrize("shape", BROKEN_OFF)
def test_a_run_that_broke_off_is_not(shape, tmp_path):
    (run,) = read(tmp_path, f"{SOURCE}{RULER}\n{BROKEN_OFF[shape]}").runs
    assert not run.complete


def test_steps_decides_what_is_complete_where_the_logs_leave_it_open(tmp_path):
    cut = [re.sub(r"step:\d+/2900 train.*\n", "", public_run(loss, 2900, 2500, 125, ms=ms))
           for loss, ms in ((3.271, 99), (3.273, 100), (3.272, 101))]  # fmt: skip
    folder = add_record(tmp_path, "1_Cut", cut, script=None)
    assert "unfinished" in tool("list", folder).out
    assert re.search(r"1_Cut +3 +2500 ", tool("list", folder, "--steps", 2500).out)
    assert "verdict: the evidence suffices" in tool("check", folder, "--steps", 2500).out
    assert "3 of 3 runs unfinished" in tool("check", folder, "--steps", 2600, code=1).out


def test_a_log_that_lacks_steps_is_not_complete(tmp_path):
    logs = [public_run(loss, 400, every=400, ms=ms) for loss, ms in ((3.271, 99), (3.273, 100), (3.272, 101))]
    assert "FAIL" not in tool("check", *add_logs(tmp_path, logs)).out
    head, tail = logs[1].partition("step:65/")[0], logs[1].partition("step:140/")[2].partition("\n")[2]
    for note in ("", "resumed at step 140 from checkpoints/x/step_000140.pt\n"):
        out = tool("check", *add_logs(tmp_path, [logs[0], head + note + tail, logs[2]]), code=1).out
        assert re.search(r"FAIL  complete  1 of 3 runs unfinished: \S*0001.txt lacks steps 65 to 140\n", out)


def test_a_log_that_begins_with_a_resume_lacks_what_came_before(tmp_path):
    rest = public_run(3.27, 40).partition("step:15/40")
    (run,) = read(tmp_path, f"resumed at step 14 from checkpoints/x/step_000014.pt\n{rest[1]}{rest[2]}").runs
    assert not run.complete and run.missing == (1, 14)


def test_a_line_that_was_torn_off_and_glued_to_the_next_is_told(tmp_path):
    torn = public_run(3.27, 40).replace("step:7/40 train_time:700ms step_avg:100.00ms\n", "step:7/40 train_t")
    log = read(tmp_path, torn)
    assert [(line, "two lines in one" in what) for line, what in log.complaints] == [(8, True)]


def test_a_log_may_tell_only_some_of_the_steps(tmp_path):
    every_tenth = "".join(training_lines(step, step, 400) for step in [*range(1, 11), *range(20, 401, 10)])
    (run,) = read(tmp_path, f"{every_tenth}step:400/400 val_loss:3.27 train_time:40000ms\n").runs
    assert run.complete and run.missing is None


FILED = [path.relative_to(ROOT) for path in sorted((ROOT / "records").glob("*/*.txt"))]
USUAL = {
    "public": f"{SOURCE}{RULER}\n{HEADER}{RULER}\n{public_run(3.27)}",
    "public, cut off": f"{SOURCE}{RULER}\n{public_run(3.27).rpartition('step:40')[0]}",
    "public, stopped early": public_run(3.27, 40, stop=33),
    "ended": f"{public_run(3.27)}peak memory: 1 MiB\nended: finished\n",
    "stopped": f"{public_run(3.27)}ended: the disk is full\n",
    "only validations": "".join(line + "\n" for line in public_run(3.27).split("\n") if "val_loss" in line),
    **{f"filed {path.parent.name} {path.stem[:8]}": path for path in FILED},
}


@pytest.mark.parametrize("name", USUAL)
def test_the_quick_way_to_read_a_log_finds_what_the_thorough_one_finds(name, tmp_path):
    text = (ROOT / USUAL[name]).read_text() if name.startswith("filed") else USUAL[name]
    log = read(tmp_path, text)
    data = b"\n" + text.encode()
    _, _, body = find_source(data)
    quick = read_usual(log, data, body, len(data))
    (thorough,) = LineReader(log, data).read(body, len(data))
    for fact in ("validations", "steps", "last_step", "complete", "missing", "ended", "line"):
        assert getattr(quick, fact) == getattr(thorough, fact), fact


# ---- How a run ended and what a resumed run changed ------------------------------------------------------------------


def test_a_log_says_itself_how_the_run_ended(tmp_path):
    logs = good_logs()
    ended = [log + "ended up on a busy machine\nended: finished\n" for log in logs]
    ended[0] = ended[0].replace("\nended: finished", "").replace("\nstep:347", "\nresumed at steps\nstep:347", 1)
    assert "FAIL" not in tool("check", *add_logs(tmp_path, ended)).out
    ended[3] = logs[3] + "ended: the disk is full, so the log lacks lines\n"
    out = tool("check", *add_logs(tmp_path, ended), code=1).out
    assert "0003.txt ended at step 1390 of 1390: the disk is full, so the log lacks lines" in out
    # What ended before a resume is no longer the end.
    head, found, tail = logs[3].partition("step:695/1390 val_loss")
    note = "ended: stopped by SIGTERM\nresumed at step 348 from checkpoints/x/step_000348.pt\n"
    ended[3] = head + note + found + tail + "ended: finished\n"
    assert "FAIL" not in tool("check", *add_logs(tmp_path, ended)).out


@pytest.mark.parametrize(
    ("change", "decides"),
    [
        ("val_tokens 2048 -> 256", True),
        ("val_files data/a_*.bin -> data/b_*.bin", True),
        ("target_loss 3.28 -> 3.5", True),
        ("dtype float32 -> bfloat16", True),
        ("learning_rate 0.1 -> 0.2", True),
        ("save_every 0 -> 100, val_tokens 2048 -> 256", True),
        ("save_every 0 -> 100", False),
        ("checkpoint_dir checkpoints -> /mnt/other", False),
    ],
)
def test_check_sees_what_a_resumed_run_changed(change, decides, tmp_path):
    logs = good_logs()
    head, found, tail = logs[2].partition("step:695/1390 val_loss")
    note = f"resumed at step 348 from checkpoints/x/step_000348.pt\nchanged on resume: {change}\n"
    logs[2] = head + note + found + tail
    done = tool("check", *add_logs(tmp_path, logs), code=int(decides))
    assert re.findall(r"FAIL +(\w+)", done.out) == ["settings"] * decides
    told = change.rpartition(", ")[2]
    assert (f"0002.txt was resumed with another {told}" if decides else f"changed on resume: {told}") in done.out


# ---- Hardware --------------------------------------------------------------------------------------------------------

EIGHT = "".join(NVIDIA_SMI.splitlines(keepends=True)[:4]) + "".join(
    f"|   {i}  NVIDIA H100 80GB HBM3          {state} |   00000000:{i}9:00.0 Off |                    0 |\n"
    f"| N/A   {30 + i}C    P0            121W /  700W |    7750MiB /  81559MiB |      0%      Default |\n"
    for i, state in enumerate(["On  ", "Off ", "N/A ", "On  "] * 2)
)
ON_EIGHT = {
    "a table in the header": f"{SOURCE}{RULER}\nRunning Python 3.12\n{EIGHT}{RULER}\n{STEPS}",
    "a table behind another rule": f"{SOURCE}{RULER}\nRunning Python 3.12\n{RULER}\n{EIGHT}{RULER}\n{STEPS}",
    "a table before the source": f"{EIGHT}{RULER}\n{SOURCE}{RULER}\n{STEPS}",
    "words": f"{SOURCE}{RULER}\nRunning on device cuda: NVIDIA H100 80GB HBM3 with world_size=8\n{RULER}\n{STEPS}",
    "words alone": f"{SOURCE}{RULER}\nNVIDIA H100 80GB HBM3 with world_size=8\n{RULER}\n{STEPS}",
    "our header": build_log(hardware="NVIDIA H100 80GB HBM3", world_size=8),
    "our header with a table": build_log(hardware=f"NVIDIA H100 80GB HBM3\n{EIGHT.rstrip()}", world_size=8),
}


@pytest.mark.parametrize("shape", ON_EIGHT)
def test_every_way_to_name_a_machine_gives_the_same_words(shape, tmp_path):
    assert read(tmp_path, ON_EIGHT[shape]).hardware == "8 x NVIDIA H100 80GB HBM3"


def test_unknown_hardware_is_unknown(tmp_path):
    other = ON_EIGHT["words"].replace("NVIDIA H100 80GB HBM3 with world_size=8", "NVIDIA L40S with world_size=4")
    logs = {"1_H100": ON_EIGHT["words"], "2_L40S": other, "3_Silent": f"{SOURCE}{RULER}\n{STEPS}",
            "4_Silent": f"{SOURCE}{RULER}\n{STEPS}"}  # fmt: skip
    for name, log in logs.items():
        add_record(tmp_path, name, [log], script=None)
    out = tool("list", "--records", tmp_path).out
    gains = [re.search(rf"^{name} .*", out, re.MULTILINE)[0] for name in logs]
    assert "other hardware" in gains[1] and all("hardware unknown" in line for line in gains[2:])


# ---- Folders ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def public_repository(tmp_path):
    """Folders as the public repository has them, logs one level deeper since 2026-03."""
    home = tmp_path / "public/records"
    short, medium = home / "track_1_short", home / "track_2_medium"

    def logs(loss, ms, steps=40):
        return [f"{SOURCE}{RULER}\n{EIGHT}{RULER}\n{public_run(loss + i / 1000, steps, ms=ms + i)}" for i in range(3)]

    add_record(short, "2025-01-04_SoftCap", logs(3.275, 148), script=None)
    add_record(short, "2026-03-22_Newer/baseline", logs(3.274, 140), script=None)
    add_record(short, "2026-03-22_Newer/this_pr", logs(3.273, 130), script=None)
    add_record(medium, "2025-06-15_Medium", logs(2.912, 300), script=None)
    return home


def test_records_in_nested_folders_are_read_and_named_by_their_paths(public_repository):
    out = tool("list", public_repository / "track_1_short").out
    names = re.findall(r"^(\S+) +3 +40 ", out, re.MULTILINE)
    assert names == ["2025-01-04_SoftCap", "2026-03-22_Newer/baseline", "2026-03-22_Newer/this_pr"]
    assert re.search(r"this_pr .* \+7\.\d %", out)  # over its own baseline
    for name in ("Newer/this_pr", "this_pr"):
        assert "track_1_short/2026-03-22_Newer/this_pr" in tool("check", name, "--records", public_repository).out
    both = tool("check", "Newer", "--records", public_repository).out
    assert both.count("verdict: the evidence suffices") == 2


def test_other_tracks_are_not_judged_by_a_guessed_target(public_repository):
    done = tool("list", public_repository)
    assert "track_2_medium/2025-06-15_Medium: a loss of 2.913 is far from 3.28" in done.err and "--target" in done.err
    assert re.search(r"2025-06-15_Medium .* - +no: which target\? see --target", done.out)
    assert "FAIL  loss" in tool("check", "Medium", "--records", public_repository, code=1).out
    assert "suffices" in tool("check", "Medium", "--records", public_repository, "--target", 2.92).out
    near = add_record(public_repository / "track_2_medium", "Near", [public_run(3.27, ms=i) for i in (1, 2)], None)
    assert "the folder names the track track_2_medium" in tool("check", near, code=1).err
    short = tool("list", public_repository / "track_1_short")
    assert "target" not in short.err


def test_no_log_is_dropped_without_a_word(public_repository):
    folder = public_repository / "track_1_short/2025-01-04_SoftCap"
    for number, suffix in enumerate((".out", ".log", ".stdout")):
        (folder / f"more{suffix}").write_text(public_run(3.2761, ms=150 + number))
    (folder / "empty.log").write_text("")
    (folder / "notes.txt").write_text("Ran on a Tuesday.\n")
    done = tool("list", folder)
    assert re.search(r"SoftCap +6 ", done.out)
    assert "empty.log:1: ends without any validation" in done.err and "notes.txt:1: ends without" in done.err
    (folder / "empty.log").unlink()
    assert "1 log without a run" not in tool("check", folder, "--target", 3.28, code=1).out
    (folder / "cut.log").write_text(SOURCE)
    assert "1 log without a run, the first" in tool("check", folder, "--target", 3.28, code=1).out


def test_a_script_above_the_logs_is_theirs(tmp_path):
    folder = add_record(tmp_path, "1_A", [])
    add_record(folder, "logs", good_logs(), script=None)
    assert "ok    source    the record's script" in tool("check", "A", "--records", tmp_path).out
    (folder / "train_gpt.py").write_text(SOURCE + "x = 1\n")
    assert "FAIL  source" in tool("check", "A", "--records", tmp_path, code=1).out
    add_record(folder, "this_pr", good_logs(source=SOURCE + "x = 1\n"), script=None)
    out = tool("check", "A", "--records", tmp_path).out  # the script is that of one of the two
    assert out.count("ok    source") == 1 and out.count("?     source") == 1


def test_links_that_lead_in_a_circle_end_the_search(tmp_path):
    folder = add_record(tmp_path, "1_A", good_logs())
    (folder / "again").symlink_to(tmp_path)
    assert tool("list", tmp_path).out.count("1_A") == 1


def test_curves_never_run_back_in_time(tmp_path):
    fast, slow = public_run(3.27, 400, every=100), public_run(3.28, 380, every=100, ms=140.0)
    folder = add_record(tmp_path, "1_A", [fast, public_run(3.26, 400, every=100, ms=101.0), slow], script=None)
    (entry,) = entries_of(*open_records([folder], tmp_path))
    moments = entry.curve()
    assert [moment.step for moment in moments] == [0, 100, 200, 300, 400]
    assert [moment.seconds for moment in moments] == pytest.approx([0, 10.05, 20.1, 30.15, 40.2])
    assert moments[-1].loss == pytest.approx(3.265)


def test_float32_and_bfloat16_runs_are_different_tables(tmp_path):
    def logs(dtype, ms):
        described = json.dumps({"target_loss": 3.28, "dtype": dtype})
        return good_logs(settings=described, milliseconds=ms)

    add_record(tmp_path, "1_A", logs("float32", 200000))
    add_record(tmp_path, "2_B", logs("bfloat16", 100000))
    out = tool("list", "--records", tmp_path).out
    assert len(re.findall(r"^target 3\.28, .*, (?:float32|bfloat16)$", out, re.MULTILINE)) == 2 and "+" not in out
