"""What a user of `python -m records` may rely on: the tables, the checks, and the command line."""

import contextlib
import json
import math
import os
import pty
import re
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from records_helpers import (
    HEADER,
    NEW,
    OLD,
    PUBLISHED,
    ROOT,
    RULER,
    SHAPES,
    SOURCE,
    STEPS,
    add_logs,
    add_record,
    build_log,
    good_logs,
    run_tool,
    start_tool,
    table_row,
    tool,
)
from scipy import stats

from records.figures import p_below, welch

# ---- list ------------------------------------------------------------------------------------------------------------


def test_list_works_before_there_are_records(tmp_path):
    assert "no records yet" in tool("list", "--records", tmp_path).out


def test_list_shows_runs_steps_loss_time_gain_and_evidence(tmp_path):
    first = [build_log(3.27 + 0.001 * i, i, milliseconds=200000 + 1000 * i) for i in range(5)]
    second = [build_log(3.262 + 0.001 * i, i, milliseconds=150000 + 100 * i, steps=1380) for i in range(3)]
    missed = [build_log(3.29 + 0.001 * i, i, milliseconds=100000 + i) for i in range(3)]
    add_record(tmp_path, "2024-01-01_First", first)
    add_record(tmp_path, "2024-02-01_Second", second)
    add_record(tmp_path, "2024-03-01_Missed", missed)
    add_record(tmp_path, "2024-04-01_Last", second[:1])
    add_record(tmp_path, "2024-05-01_Empty", [])
    out = tool("list", "--records", tmp_path).out
    p = stats.ttest_1samp([3.27 + 0.001 * i for i in range(5)], 3.28, alternative="less").pvalue
    spread = math.sqrt(sum((i - 2) ** 2 for i in range(5)) / 4)
    row = ["2024-01-01_First", "5", "1390", f"3.2720 ± {0.001 * spread:.4f}", f"202.00 ± {spread:.2f} s"]
    assert table_row(out, "2024-01") == [*row, "202.00 s, step 1390", "-", f"yes, p = {p:.4f}"]
    gain = f"{100 * (1 - 150.1 / 202):+.1f} %"
    row = ["2024-02-01_Second", "3", "1380", "3.2630 ± 0.0010", "150.10 ± 0.10 s", "150.10 s, step 1380", gain]
    assert table_row(out, "2024-02")[:-1] == row
    # A record that missed the target saved no time, whatever it took, and the next one is not measured against it.
    assert table_row(out, "2024-03")[5:7] == ["-", "-"]
    assert table_row(out, "2024-03")[7].startswith("no: 0 of 3 at the target, p = 0.9")
    assert table_row(out, "2024-04")[6:] == ["+0.1 %", "1 of 1 at the target"]
    assert "without runs: 2024-05-01_Empty" in out


def test_list_calls_a_gain_noise_where_the_runs_do_not_show_it(tmp_path):
    times = {"1_A": [100, 110, 120], "2_B": [99, 109, 118], "3_C": [80, 81, 82]}
    for name, seconds in times.items():
        add_record(tmp_path, name, [build_log(3.27, i, milliseconds=1000 * s) for i, s in enumerate(seconds)])
    out = tool("list", "--records", tmp_path).out
    for name, before in (("2_B", "1_A"), ("3_C", "2_B")):
        low, high = stats.ttest_ind(times[before], times[name], equal_var=False).confidence_interval()
        assert ("(noise)" in table_row(out, name)[6]) == (low < 0 < high)


def test_list_against_measures_every_record_against_one(tmp_path):
    for name, ms in (("1_A", 200000), ("2_B", 150000), ("3_C", 120000)):
        add_record(tmp_path, name, good_logs(milliseconds=ms))
    out = tool("list", "--records", tmp_path, "--against", "A").out
    assert [table_row(out, name)[6] for name in ("1_A", "2_B", "3_C")] == ["-", "+25.0 %", "+40.0 %"]
    assert "time saved over 1_A" in out
    out = tool("list", "--records", tmp_path, "--against", "C").out
    assert table_row(out, "1_A")[6] == f"{100 * (1 - 200.003 / 120.003):+.1f} %"
    assert "no such" in tool("list", "--records", tmp_path, "--against", "D", code=2).err


def test_list_shows_when_the_target_was_first_reached(tmp_path):
    def log(reached_at, ms):
        lines = [f"step:{s}/400 val_loss:{3.25 if s >= reached_at else 3.3} train_time:{s * ms}ms\n"
                 for s in (0, 100, 200, 300, 400)]  # fmt: skip
        return "".join(lines)

    add_record(tmp_path, "1_Some", [log(300, 100), log(200, 102)], script=None)
    add_record(tmp_path, "2_One", [log(300, 100), log(500, 102)], script=None)
    add_record(tmp_path, "3_End", ["step:400/400 val_loss:3.25 train_time:9ms\n"], script=None)
    out = tool("list", "--records", tmp_path).out
    assert table_row(out, "1_Some")[5] == f"{(30 + 20.4) / 2:.2f} s, step 250"
    assert table_row(out, "2_One")[5] == "1 of 2 runs" and table_row(out, "3_End")[5] == "-"


def test_without_scipy_the_table_is_there_and_the_test_is_not(tmp_path, monkeypatch):
    add_record(tmp_path, "1_A", good_logs())
    monkeypatch.setitem(sys.modules, "scipy", None)
    out = tool("list", "--records", tmp_path).out
    assert table_row(out, "1_A")[3] == "3.2758 ± 0.0009" and "no test without scipy" in out
    assert "the t-test needs scipy" in tool("check", "A", "--records", tmp_path, code=1).out
    assert json.loads(tool("list", "--records", tmp_path, "--json").out)["tracks"][0]["records"][0]["p"] is None
    assert "needs scipy" in tool("compare", "A", "A", "--records", tmp_path, code=2).err


def test_list_takes_a_race_apart(tmp_path):
    folder = add_record(tmp_path, "race_a_b", [], script=None)
    (folder / "race.json").write_text(json.dumps({"A": {"name": "a.py"}, "B": {"name": "b.py"}}))
    for number, log in enumerate(good_logs(milliseconds=100000)[:2], 1):
        (folder / f"pair{number:02}_A.txt").write_text(log)
    for number, log in enumerate(good_logs(milliseconds=90000)[:2], 1):
        (folder / f"pair{number:02}_B.txt").write_text(log)
    (folder / "output.txt").write_text(STEPS)
    out = tool("list", folder).out
    assert re.search(r"race_a_b/A a\.py +2 ", out) and re.search(r"race_a_b/B b\.py +2 .* \+10\.0 %", out)
    assert "output" not in out


def test_list_never_compares_tracks_nor_machines(tmp_path):
    add_record(tmp_path, "1_A", good_logs(milliseconds=100000))
    add_record(tmp_path, "2_Laptop", good_logs((1.03, 1.031), target=1.04, milliseconds=10000))
    other_data = json.dumps([{"file": "train.bin", "tokens": 100, "sha256": "other"}])
    add_record(tmp_path, "3_Data", good_logs(milliseconds=50000, data=other_data))
    add_record(tmp_path, "4_Machine", good_logs(milliseconds=50000, hardware="Another CPU"))
    out = tool("list", "--records", tmp_path).out
    gains = {name: table_row(out, name)[6] for name in ("1_A", "2_Laptop", "3_Data", "4_Machine")}
    assert gains == {"1_A": "-", "2_Laptop": "-", "3_Data": "-", "4_Machine": "other hardware"}
    assert out.count("target 3.28") == 2 and out.count("target 1.04") == 1


def test_list_says_when_the_evidence_does_not_suffice_and_why(tmp_path):
    add_record(tmp_path, "1_OneRun", good_logs()[:1])
    add_record(tmp_path, "2_Seeds", [build_log(3.2701, seed=1), build_log(3.2702, seed=1)])
    add_record(tmp_path, "3_Cut", [*good_logs(), build_log(3.27, seed=9).partition("step:1390/1390 val_loss:3.27")[0]])
    out = tool("list", "--records", tmp_path).out
    assert table_row(out, "1_OneRun")[-1] == "1 of 1 at the target"
    assert table_row(out, "2_Seeds")[-1] == "no: seeds"
    assert table_row(out, "3_Cut")[1] == "5 + 1 unfinished" and table_row(out, "3_Cut")[-1] == "no: complete"


# ---- check -----------------------------------------------------------------------------------------------------------


def test_check_says_p_0_0001_for_the_published_softcap_losses(tmp_path):
    assert len(PUBLISHED) == 80
    paths = add_logs(
        tmp_path, [build_log(loss, seed, milliseconds=204345 + seed) for seed, loss in enumerate(PUBLISHED)]
    )
    out = tool("check", *paths).out
    assert "loss      mean 3.2791, spread 0.0019, below 3.28: p = 0.0001 (one-sided t-test, 80 runs)" in out
    assert "verdict: the evidence suffices" in out


def test_check_reads_public_logs_and_says_what_they_do_not_show(tmp_path):
    trials = "".join(
        STEPS.replace("3.2785", f"{loss:.4f}").replace("204345ms", f"{204345 + i}ms")
        for i, loss in enumerate(PUBLISHED)
    )
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
    (folder / "train_gpt.py").write_text(SOURCE + "changed = 'after the runs'\n")


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


def test_a_file_that_is_there_twice_counts_once_even_without_seeds(tmp_path):
    public = [SHAPES["source in front"].replace("3.2785", str(loss)) for loss in (3.2701, 3.2702, 3.2703)]
    once = tool("check", *add_logs(tmp_path, public))
    twice = tool("check", *add_logs(tmp_path, [*public, public[0]]))
    loss = re.compile(r"ok    loss .*3 runs\)")
    assert loss.search(once.out)[0] == loss.search(twice.out)[0]
    assert "0003.txt: the same run as in" in twice.err and "1 copy not counted" in twice.out


def test_check_fails_without_runs_and_on_losses_that_prove_nothing(tmp_path):
    assert "no log with a run" in tool("check", *add_logs(tmp_path, [SOURCE]), code=1).out
    same = good_logs((3.27, 3.27, 3.27))
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


# ---- compare, and other forms of the tables --------------------------------------------------------------------------


def test_compare_gives_welchs_test_and_its_interval(tmp_path):
    times = {"1_Old": [204.345, 204.401, 204.290, 204.377], "2_New": [203.301, 203.290, 203.388]}
    losses = {"1_Old": [3.2785, 3.2771, 3.2790, 3.2779], "2_New": [3.2781, 3.2788, 3.2775]}
    for name, seconds in times.items():
        logs = [build_log(loss, i, milliseconds=round(1000 * s)) for i, (s, loss) in
                enumerate(zip(seconds, losses[name], strict=True))]  # fmt: skip
        add_record(tmp_path, name, logs)
    done = tool("compare", "Old", "New", "--records", tmp_path)
    test = stats.ttest_ind(times["1_Old"], times["2_New"], equal_var=False)
    low, high = test.confidence_interval(0.95)
    gap = sum(times["1_Old"]) / 4 - sum(times["2_New"]) / 3
    expected = f"B is faster by {gap:.3f} s ({100 * gap / 204.35325:.2f} %), 95 % {low:.3f} to {high:.3f} s, p = "
    assert expected + f"{test.pvalue:.1g}\n" in done.out
    test = stats.ttest_ind(losses["2_New"], losses["1_Old"], equal_var=False)
    low, high = test.confidence_interval(0.95)
    assert f"95 % {low:+.5f} to {high:+.5f}, p = {test.pvalue:.1g}" in done.out and "no difference shown" in done.out
    assert re.search(r"A +1_Old +4 +1390 .*204\.353 ± 0\.048 s +147\.02 ± 0\.03 ms", done.out) and done.err == ""
    told = json.loads(tool("compare", "Old", "New", "--records", tmp_path, "--json").out)
    assert told["a"]["seconds"] == times["1_Old"] and told["b_minus_a"]["time"]["difference"] == pytest.approx(-gap)
    assert told["b_minus_a"]["final loss"]["p"] == pytest.approx(test.pvalue, rel=1e-9)
    pasted = tool("compare", "Old", "New", "--records", tmp_path, "--markdown").out
    assert "| B | 2_New | 3 | 1390 |" in pasted and f"- time: {expected}" in pasted


@settings(max_examples=50, deadline=None)
@given(*[st.lists(st.integers(200000, 205000), min_size=2, max_size=9).filter(lambda v: len(set(v)) > 1)] * 2)
def test_welchs_test_is_scipys(a, b):
    expected = stats.ttest_ind(b, a, equal_var=False)
    found = welch(a, b)
    assert found.p == pytest.approx(expected.pvalue, rel=1e-9)
    assert (found.low, found.high) == pytest.approx(expected.confidence_interval(0.95), rel=1e-9, abs=1e-9)


def test_compare_says_what_makes_a_comparison_doubtful(tmp_path):
    add_record(tmp_path, "1_A", good_logs())
    add_record(tmp_path, "2_B", good_logs(hardware="Another CPU", milliseconds=100000))
    add_record(tmp_path, "3_C", good_logs((1.03, 1.031), target=1.04))
    add_record(tmp_path, "4_One", good_logs()[:1])
    add_record(tmp_path, "5_None", [])
    compare = ["--records", tmp_path]
    assert "times compare machines too: Some CPU, 2 cores" in tool("compare", "A", "B", *compare).err
    assert "not the same target: 3.28 and 1.04" in tool("compare", "A", "C", *compare).err
    assert "without a test: that takes two runs of each" in tool("compare", "A", "One", *compare).out
    assert "no complete run to compare" in tool("compare", "A", "None", *compare, code=2).err
    assert "name one of them" in tool("compare", "A", tmp_path, *compare, code=2).err


def test_json_and_markdown_say_what_the_tables_say(tmp_path):
    add_record(tmp_path, "1_A|B", good_logs())
    add_record(tmp_path, "2_C", [*good_logs(milliseconds=100000)[:2], STEPS.replace("3.2785", "nan")])
    listed = json.loads(tool("list", "--records", tmp_path, "--json").out)
    first, second = (record for track in listed["tracks"] for record in track["records"])
    assert (first["record"], len(first["runs"]), first["stands"]) == ("1_A|B", 5, True)
    losses = [run["loss"] for run in first["runs"]]
    assert first["p"] == pytest.approx(stats.ttest_1samp(losses, 3.28, alternative="less").pvalue)
    failed = [check["name"] for check in second["checks"] if check["passed"] is False]
    assert failed == ["source", "seeds", "settings", "data", "hardware", "loss"] and second["mean_loss"] is None
    checked = json.loads(tool("check", "A|B", "C", "--records", tmp_path, "--json", code=1).out)
    assert [(answer["record"], answer["stands"]) for answer in checked] == [("1_A|B", True), ("2_C", False)]
    table = tool("list", "--records", tmp_path, "--markdown").out.splitlines()
    assert table[2].startswith("| record | runs |") and table[3] == "|---|---:|---:|---:|---:|---:|---:|---|"
    assert table[4].startswith(r"| 1_A\|B | 5 | 1390 | 3.2758 ± 0.0009 |")
    pasted = tool("check", "A|B", "--records", tmp_path, "--markdown").out
    assert "target 3.28: the evidence suffices" in pasted and "| seeds | ok | a different one in every run |" in pasted
    assert "not allowed with" in tool("list", "--json", "--markdown", code=2).err


# ---- The command line ------------------------------------------------------------------------------------------------


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
    ["compare", "SoftCap"],
    ["export", "README.md"],
    ["list", "--steps", "0"],
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
