"""Scripts out of logs, and what changed between two of them."""

import io
import os
import re
import subprocess
import sys
import tokenize

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from records_helpers import (
    HEADER,
    NEW,
    OLD,
    ROOT,
    RULER,
    SHAPES,
    SOURCE,
    STEPS,
    add_logs,
    add_record,
    build_log,
    fake_script,
    good_logs,
    tool,
)

from records.diffs import Diff, unified
from records.logs import read_log
from records.scripts import Script

# ---- Extract ---------------------------------------------------------------------------------------------------------


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


# ---- Diff ------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("path", ["records/logs.py", "records/scripts.py", "tests/records_helpers.py"])
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


# ---- Logs that hold two files ----------------------------------------------------------------------------------------


DASHES = "-" * 40
KERNELS = '''import triton


def kernel(x):
    """Two

    lines."""
    return x + 1
'''
DIVIDERS = {
    "dashes, the name, dashes": f"\n\n{DASHES}\n# triton_kernels.py\n{DASHES}\n\n",
    "dashes and the name": f"\n\n{'-' * 100}\n# triton_kernels.py\n\n",
    "without blank lines": f"{DASHES}\n# triton_kernels.py\n",
}


def two_files(source=SOURCE, kernels=KERNELS, divider="dashes, the name, dashes"):
    return f"{source}{DIVIDERS[divider]}{kernels}{RULER}\n{HEADER}{RULER}\n{STEPS}"


@pytest.mark.parametrize("divider", DIVIDERS)
def test_extract_writes_both_files_of_a_log(divider, tmp_path):
    (path,) = add_logs(tmp_path, [two_files(divider=divider)])
    done = tool("extract", path)
    assert done.raw == SOURCE.encode() and "also holds triton_kernels.py" in done.err
    (tmp_path / "out").mkdir()
    tool("extract", path, "-o", tmp_path / "out/train_gpt.py")
    assert (tmp_path / "out/train_gpt.py").read_text() == SOURCE
    assert (tmp_path / "out/triton_kernels.py").read_text() == KERNELS
    for file in (tmp_path / "out").iterdir():
        compile(file.read_bytes(), file, "exec")


def test_extract_writes_none_of_two_files_if_it_would_overwrite_one(tmp_path):
    (path,) = add_logs(tmp_path, [two_files()])
    (tmp_path / "triton_kernels.py").write_text("my kernels\n")
    assert "triton_kernels.py: is there already" in tool("extract", path, "-o", tmp_path / "a.py", code=2).err
    assert not (tmp_path / "a.py").exists() and (tmp_path / "triton_kernels.py").read_text() == "my kernels\n"


def test_a_divider_inside_a_string_divides_nothing(tmp_path):
    source = f'"""A log looks like this:\n{DASHES}\n# other.py\n"""\nimport torch\n'
    (path,) = add_logs(tmp_path, [f"{source}{RULER}\n{STEPS}"])
    assert tool("extract", path).out == source


def test_diff_and_stat_go_file_by_file(tmp_path):
    changed = KERNELS.replace("x + 1", "x + 2")
    old, new, one_file = add_logs(tmp_path, [two_files(), two_files(kernels=changed), build_log()])
    out = tool("diff", old.name, new.name, cwd=tmp_path).out
    assert out.startswith("--- 0000.txt:triton_kernels.py\n+++ 0001.txt:triton_kernels.py\n@@ -5,4 +5,4 @@ def")
    assert "-    return x + 1\n+    return x + 2\n" in out and out.count("@@") == 2
    stat = tool("diff", old, new, "--stat").out
    assert re.search(r"triton_kernels.py\n def kernel \| 2 \+-\n", stat)
    added = tool("diff", one_file, new, "--stat").out
    assert f"{len(KERNELS.splitlines())} lines added, 0 removed" in added


LINE = "=" * 100
QUOTES = {
    "one": f'"""A log:\n{LINE}\nsteps\n"""\n',
    "a whole log": f"r'''\n{LINE}\nhardware: none\n{LINE}\nstep:1/1 val_loss:1.0 train_time:1ms\n'''\n",
    "after a quote in a comment": f'# don\'t "stop\nx = "\\"" + \'"\'\ny = """\n{LINE}\n"""\n',
    "after an escaped end": f'x = """ \\""" \n{LINE}\n"""\n',
}


@pytest.mark.parametrize("quote", QUOTES)
@pytest.mark.parametrize("shape", ["in front", "between"])
def test_a_line_of_equal_signs_in_the_source_does_not_cut_it_short(quote, shape, tmp_path):
    source = QUOTES[quote] + SOURCE
    compile(source, "source", "exec")
    front = f"{RULER}\n" if shape == "between" else ""
    (path,) = add_logs(tmp_path, [f"{front}{source}{RULER}\n{HEADER}{RULER}\n{STEPS}"])
    assert tool("extract", path).out == source
    assert read_log(path).runs[0].final.loss == 3.2785


def test_check_says_in_what_sources_differ(tmp_path):
    with_id = 'run_id = "{}"\n'.format
    ids = ["5a1c7d2e-0a1b-4c2d-8e3f-0123456789ab", "99999999-0a1b-4c2d-8e3f-0123456789ab", "2026-01-02_first"]
    logs = [log.replace(SOURCE, with_id(run_id) + SOURCE) for run_id, log in zip(ids, good_logs(), strict=False)]
    assert "the same in every log, but for a run id in 2 logs" in tool("check", *add_logs(tmp_path, logs)).out
    commented = [*good_logs()[:3], good_logs()[3].replace("import torch\n", "import torch  # the library\n")]
    assert "but for comments in 1 log" in tool("check", *add_logs(tmp_path, commented)).out
    changed = [*good_logs()[:3], good_logs()[3].replace("import torch\n", "import numpy\n")]
    out = tool("check", *add_logs(tmp_path, changed), code=1).out
    assert "1 line, from line 5 on: 'import torch' became 'import numpy'" in out
    other_seed = [*good_logs()[:3], good_logs()[3].replace("import torch\n", "import torch\nSEED = 123456789\n")]
    assert "FAIL  source" in tool("check", *add_logs(tmp_path, other_seed), code=1).out


def test_check_compares_each_file_with_the_one_beside_the_script(tmp_path):
    logs = [two_files().replace("3.2785", f"{loss}") for loss in (3.2701, 3.2702, 3.2703)]
    folder = add_record(tmp_path, "1_Two", logs)
    assert "ok    source" in tool("check", folder).out
    (folder / "triton_kernels.py").write_text(KERNELS)
    assert "ok    source" in tool("check", folder).out
    (folder / "triton_kernels.py").write_text(KERNELS.replace("x + 1", "x + 2"))
    assert "triton_kernels.py, 1 line" in tool("check", folder, code=1).out


def test_diff_prints_no_folders_of_this_machine(tmp_path):
    add_record(tmp_path / "records", "1_A", [], script=OLD)
    add_record(tmp_path / "records", "2_B", [], script=NEW)
    here = tool("diff", "A", "B", "--records", tmp_path / "records", cwd=tmp_path).out
    assert here.startswith("--- records/1_A/train_gpt.py\n+++ records/2_B/train_gpt.py\n")
    elsewhere = tool("diff", "A", "B", "--records", tmp_path / "records").out
    assert elsewhere.startswith("--- 1_A/train_gpt.py\n+++ 2_B/train_gpt.py\n")
