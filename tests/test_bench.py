"""./run.sh bench at tiny sizes: that it runs, and that its table and JSON agree. Its figures are nothing to test."""

import json
import re
import subprocess
import sys

import pytest
import torch
from helpers import ONE_THREAD, ROOT, SCRIPT, tiny_flags

import bench


def run_bench(*arguments: str):
    command = [str(ROOT / "run.sh"), "bench", *arguments]
    environment = ONE_THREAD | dict(VENV=sys.prefix)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)


def test_a_bench_prints_a_table_and_writes_the_same_figures_as_json(folder):
    files = dict(train_files=f"{folder}/data/tiny_train_*.bin", val_files=f"{folder}/data/tiny_val_*.bin")
    small = ["--rounds=1", "--steps=3", "--length=512", "--matrix=64", "--dtype=float32", f"--json={folder}/figures"]
    settings = [word for word in tiny_flags(**files) if not word.startswith(("--num_iterations", "--dtype"))]
    result = run_bench(*small, f"--against={SCRIPT}", *settings)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if not line.startswith("setting up ")]
    title, blank, head, *rows = lines
    assert f"measured against {SCRIPT}:" in title and blank == "" and head.split() == ["measured", "rounds", "limit"]
    written = json.loads((folder / "figures").read_text())
    assert len(rows) == len(written["figures"]) == 19
    for row, figure in zip(rows, written["figures"], strict=True):
        assert row.startswith(figure["name"]) and f"{figure['value']:.4g} {figure['unit']}".strip() in row
        assert figure["value"] > 0 and min(figure["rounds"]) <= figure["value"] <= max(figure["rounds"])
        told = re.search(r"  (at (?:most|least)) (\S+)  +(met|not met)$", row)
        assert bool(told) == bool(figure["limit"])
        if told:
            within = (figure["value"] <= float(told[2])) == (told[1] == "at most") or figure["value"] == float(told[2])
            assert (told[3] == "met") == within == figure["met"]


def test_dense_attention_and_ours_are_the_same_attention(monkeypatch):
    results = []
    for dense in (True, False):
        torch.manual_seed(1)
        work = bench.attention(1024, torch.float32, dense)
        monkeypatch.setattr(torch.autograd, "grad", lambda y, inputs, gradient: results.append(y.detach()))
        work()
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--against", "no-such-revision"], "--against no-such-revision: neither a file nor a git revision"),
        (["--rounds", "0"], "--rounds, --steps and --matrix must be 1 or more"),
        (["--rounds", "x"], "argument --rounds: invalid int value: 'x'"),
        (["--json", "/no/such/folder/figures"], "No such file or directory: '/no/such/folder/figures'"),
        (["--nonsense"], "./run.sh ended before its first step: train_gpt: --nonsense: not a setting"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message):
    result = run_bench(*arguments)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("bench: ") and message in result.stderr and result.stderr.count("\n") == 1
