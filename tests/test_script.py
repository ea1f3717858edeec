"""The script as something to read: its size, its order, and one place for everything about a setting."""

import ast
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, fields

import pytest
from helpers import SCRIPT

from train_gpt import Settings, make_settings

LINES = SCRIPT.read_text().splitlines()
TREE = ast.parse(SCRIPT.read_text())
ROOMS = [
    "Settings",
    "The process's place",
    "Data",
    "Attention",
    "Model",
    "Optimizers and schedules",
    "The step",
    "The record of the run",
    "The run",
]
IDEAS = {"Attention", "Model", "Optimizers and schedules", "The step"}


def rooms() -> dict[str, int]:
    """The sections with their numbers of lines, in the file's order; a section ends where the next begins."""
    headings = {i: found[1] for i, line in enumerate(LINES) if (found := re.match(r"# -{4,} ([^:]+): .* -{4,}$", line))}
    ends = [*[*headings][1:], LINES.index('if __name__ == "__main__":')]
    return {name: end - start for (start, name), end in zip(headings.items(), ends, strict=True)}


def test_the_script_has_fewer_than_1100_lines_of_at_most_120_characters():
    assert len(LINES) < 1100
    assert max(map(len, LINES)) <= 120


def test_no_function_is_longer_than_60_lines():
    functions = [node for node in ast.walk(TREE) if isinstance(node, ast.FunctionDef)]
    assert len(functions) > 50
    assert max(node.end_lineno - node.lineno + 1 for node in functions) <= 60


def test_the_sections_are_in_reading_order_and_more_than_half_of_their_lines_are_ideas():
    assert list(rooms()) == ROOMS
    assert sum(lines for name, lines in rooms().items() if name in IDEAS) > sum(rooms().values()) / 2


def test_nothing_is_used_before_it_is_defined():
    """Of the file's own names, where a definition's body or a later line of the file needs them to be read."""
    defined = {}
    for node in TREE.body:
        targets = [x.id for target in getattr(node, "targets", []) for x in ast.walk(target) if isinstance(x, ast.Name)]
        for name in [node.name] if hasattr(node, "name") else targets:
            defined[name] = node.lineno
    used = [(x.id, x.lineno) for x in ast.walk(TREE) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)]
    assert len(defined) > 30
    assert [(name, line) for name, line in used if line < defined.get(name, 0)] == []


def test_importing_the_script_runs_nothing_and_needs_nothing_of_the_repository(tmp_path):
    (tmp_path / "copy.py").write_bytes(SCRIPT.read_bytes())
    code = (
        "import importlib.util as u; spec = u.spec_from_file_location('speedrun', 'copy.py'); "
        "m = u.module_from_spec(spec); import sys; sys.modules['speedrun'] = m; spec.loader.exec_module(m); print('ok')"
    )
    result = subprocess.run([sys.executable, "-Pc", code], cwd=tmp_path, capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("ok\n", "")
    assert set(os.listdir(tmp_path)) <= {"copy.py", "__pycache__"}


@pytest.mark.parametrize("setting", fields(Settings), ids=lambda setting: setting.name)
def test_a_setting_has_a_meaning_a_rule_and_a_value_of_its_type_on_both_tracks(setting):
    about = setting.metadata
    assert about.keys() == {"meaning", "rule", "cpu", "free"} and len(about["meaning"]) > 5
    assert type(setting.default) is setting.type
    assert about["cpu"] is None or (type(about["cpu"]) is setting.type and about["cpu"] != setting.default)
    if isinstance(about["rule"], tuple):
        low, high = about["rule"]
        assert low < high and setting.type in (int, float)
    else:
        assert about["rule"] == "True" or setting.name in about["rule"]


@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize("processes", [1, 2])
def test_the_defaults_of_both_tracks_are_valid_and_no_number_may_be_left_unbounded(on_gpu, processes):
    s = make_settings({}, processes, on_gpu)
    assert s.target_loss == (3.28 if on_gpu else 1.04) and (s.num_iterations == 2090) == on_gpu
    assert json.loads(json.dumps(asdict(s))) == asdict(s)
    numbers = [setting for setting in fields(Settings) if setting.type in (int, float)]
    assert len(numbers) > 25 and not [setting.name for setting in numbers if setting.metadata["rule"] == "True"]


def test_what_changes_the_result_of_a_step_is_fixed_in_a_resumed_run():
    free = {setting.name for setting in fields(Settings) if setting.metadata["free"]}
    places = {"train_files", "val_files", "log_dir", "checkpoint_dir", "resume"}
    watching = {"val_sequence_length", "val_tokens", "val_loss_every", "target_loss", "save_every"}
    machine = {"dtype", "fp8_head", "compile", "coordinate_descent", "recompute", "kernel_warmup_steps"}
    assert free == places | watching | machine | {"collective_timeout"}
