"""Bad input gets one clear line, exit code 2, and nothing half-written."""

import os
import resource
import subprocess
import sys
from dataclasses import fields

import numpy as np
import pytest
from helpers import ONE_THREAD, SCRIPT, TINY, last_line, made_up_tokens, only_log, run_script, tiny_flags, write_shard

import train_gpt


@pytest.fixture
def complaint(folder, train_here):
    """The one line that the script prints about these settings."""

    def line(*arguments, **changes) -> str:
        before = sorted(folder.rglob("*"))
        code, out, err = train_here(folder, *arguments, **changes)
        assert (code, out) == (2, "") and err.count("\n") == 1 and err.startswith("train_gpt: "), (code, out, err)
        assert sorted(folder.rglob("*")) == before, "nothing is written"
        return err.removeprefix("train_gpt: ").rstrip("\n")

    return line


# ---- Settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, message",
    [
        (
            dict(sequence_length=200),
            "--sequence_length 200: this must hold: sequence_length in range(128, 2**24, 128)",
        ),
        (dict(val_tokens=1000), "--val_tokens 1000: this must hold: val_tokens % val_sequence_length == 0"),
        (dict(val_tokens=0), "--val_tokens 0: this must hold: "),
        (dict(val_tokens=-256), "--val_tokens -256: this must hold: "),
        (dict(val_tokens=5120), "--val_tokens 5120: data/tiny_val_000000.bin has 2999"),
        (dict(document_token=257), "--document_token 257: this must hold: 0 <= document_token < vocab_size"),
        (dict(num_heads=3), "--model_dim 32: this must hold: model_dim % (4 * num_heads) == 0"),
        (dict(num_layers=1), "--num_layers 1: this must hold: 2 <= num_layers <= 1000"),
        (dict(kernel_warmup_steps=1), "--kernel_warmup_steps 1: this must hold: kernel_warmup_steps >= adam_every"),
        (dict(key_offset="some"), "--key_offset some: this must hold: key_offset in ('long', 'all', 'none')"),
        (dict(num_iterations=0), "--num_iterations 0: this must hold: 1 <= num_iterations"),
        (dict(cooldown_frac=1.5), "--cooldown_frac 1.5: this must hold: 0 <= cooldown_frac <= 1"),
        (dict(muon_lr=-1), "--muon_lr -1.0: this must hold: 0 <= muon_lr"),
        (dict(muon_lr="nan"), "--muon_lr nan: this must hold: 0 <= muon_lr"),
        (dict(max_document=0), "--max_document 0: this must hold: 1 <= max_document <= 16777216"),
        (dict(stages="2 1 1.0 1 1"), "--stages 2 1 1.0 1 1: rows like those of 684 1 1.00 1 3 683 2 1.51 3 7 "),
        (dict(dtype="float16"), "--dtype float16: this must hold: dtype in ('auto', 'bfloat16', 'float32')"),
        (dict(num_layers="many"), "argument --num_layers: invalid int value: 'many'"),
        (dict(compile="maybe"), "a switch is true or false"),
        (dict(mun_lr=0.1), "--mun_lr=0.1: not a setting; did you mean --muon_lr?"),
        (dict(resume_anyway="true"), "--resume_anyway=true: not a setting; "),
        (dict(qqq=1), "--qqq=1: not a setting; --help lists them"),
        (dict(train_files="nowhere/*.bin"), "nowhere/*.bin: no token shard; data/cached_fineweb10B.py and"),
        (dict(val_files="nowhere/*.bin"), "nowhere/*.bin: no token shard; data/cached_fineweb10B.py and"),
        (
            dict(batch_sequences=1000),
            "data/tiny_train_*.bin: no shard has documents for 1000 x 256 tokens",
        ),
        (dict(document_token=255), "data/tiny_train_*.bin: no shard has documents for 4 x 256 tokens"),
        (dict(gate_channels=33), "--gate_channels 33: this must hold: 1 <= gate_channels <= model_dim"),
        (dict(resume="nothing.pt"), "--resume nothing.pt: not a checkpoint, or a damaged one"),
        (dict(resume="data"), "--resume data: not a checkpoint, or a damaged one"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_a_bad_setting_is_named_with_what_is_right(complaint, change, message):
    assert message in complaint(**change)


def test_a_flag_without_a_value_is_one_line(complaint):
    assert "--num_layers: expected one argument" in complaint("--num_layers")


def test_help_lists_every_setting_with_meaning_and_default(folder, train_here, capsys):
    with pytest.raises(SystemExit):
        train_here(folder, "--help")
    text = " ".join(capsys.readouterr().out.split())
    for setting in fields(train_gpt.Settings):
        cpu = "" if setting.metadata["cpu"] is None else f"; on a CPU {setting.metadata['cpu']}"
        about = f"{setting.metadata['meaning']} [{setting.default}{cpu}]"
        assert " ".join(f"--{setting.name} {about}".split()) in text
    assert set(TINY) <= {setting.name for setting in fields(train_gpt.Settings)}


# ---- Files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda path: write_shard(path, made_up_tokens(9000), magic=7), "no token shard"),
        (lambda path: write_shard(path, made_up_tokens(9000), version=3), "no token shard"),
        (lambda path: os.truncate(path, 2999), "2999 bytes do not fit its"),
        (lambda path: os.truncate(path, 10), "no token shard"),
        (lambda path: (path.unlink(), path.mkdir()), "no token shard"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "no token shard"),
        (lambda path: (path.unlink(), path.symlink_to("nowhere.bin")), "no token shard"),
    ],
    ids=["magic", "version", "truncated", "tiny", "folder", "FIFO", "broken link"],
)
@pytest.mark.parametrize("shard", ["tiny_train_000002.bin", "tiny_val_000000.bin"])
def test_a_bad_shard_is_named_at_the_start(folder, complaint, shard, damage, message):
    damage(folder / "data" / shard)
    line = complaint()
    assert message in line and shard in line


def test_a_token_outside_the_vocabulary_is_one_line_and_nothing_is_written_if_it_is_in_the_first_batch(
    folder, complaint
):
    write_shard(folder / "data/tiny_train_000001.bin", np.full(9000, 400))
    assert complaint() == "data/tiny_train_000001.bin: token 400 is outside the vocabulary of 257"


def test_a_fifo_as_checkpoint_does_not_hang(folder, complaint):
    os.mkfifo(folder / "fifo.pt")
    assert "--resume fifo.pt: not a checkpoint" in complaint(resume="fifo.pt")


@pytest.mark.parametrize("setting", [dict(log_dir="file/below"), dict(checkpoint_dir="file/below", save_every=4)])
def test_a_folder_that_cannot_be_written_is_told_at_the_start(folder, complaint, setting):
    (folder / "file").write_text("")
    assert "Not a directory: 'file/below" in complaint(**setting)


def test_a_full_disk_at_the_start_leaves_no_half_written_log(folder):
    result = subprocess.run(
        [sys.executable, SCRIPT, *tiny_flags()],
        cwd=folder,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000)),
    )
    assert result.returncode == 2
    assert result.stderr.startswith("train_gpt: logs/") and result.stderr.endswith(".txt: no room for the log\n")
    assert result.stderr.count("\n") == 1 and list((folder / "logs").iterdir()) == []


@pytest.mark.parametrize("setting", ["checkpoint_dir", "log_dir"])
def test_a_line_break_in_a_path_cannot_write_lines_of_its_own_into_the_log(folder, train_here, setting):
    fake = "\nstep:8/8 val_loss:0.0001 train_time:1ms step_avg:1.00ms\n"
    assert train_here(folder, save_every=4, **{setting: f"some{fake}where"})[0] == 0
    (log,) = folder.glob("**/*.txt")
    assert fake.strip() not in log.read_text().splitlines() and "some step:8/8 val_loss:0.0001" in log.read_text()


def test_a_folder_whose_name_is_not_utf_8_is_no_problem(folder):
    name = b"--checkpoint_dir=caf\xe9"
    result = run_script([*tiny_flags(save_every=4), name], folder, PYTHONIOENCODING="utf-8:strict")
    assert (result.returncode, result.stderr) == (0, "")
    assert len(list(folder.glob("caf*/*/step_000004.pt"))) == 1


# ---- The process's surroundings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environment, message",
    [
        (dict(RANK="1"), "cannot start: RANK=1 with WORLD_SIZE=0"),
        (dict(RANK="-1"), "cannot start: RANK=-1 with WORLD_SIZE=0"),
        (dict(RANK="abc"), "cannot start: invalid literal for int() with base 10: 'abc'"),
        (dict(RANK="2", WORLD_SIZE="2"), "cannot start: RANK=2 with WORLD_SIZE=2"),
        (dict(WORLD_SIZE="2"), "environment variable RANK expected, but not set"),
        (dict(RANK="0", WORLD_SIZE="2"), "environment variable MASTER_ADDR expected, but not set"),
    ],
    ids=str,
)
def test_half_of_a_launchers_environment_is_one_line(complaint, monkeypatch, environment, message):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert message in complaint()


@pytest.fixture
def listed_gpu(folder, monkeypatch) -> None:
    """As after a driver update without a reboot: nvidia-smi lists a GPU, and torch sees none."""
    (folder / "bin").mkdir()
    (folder / "bin/nvidia-smi").write_text('#!/bin/sh\necho "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)"\n')
    (folder / "bin/nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")


def test_a_gpu_that_torch_cannot_use_is_told_and_not_replaced_by_the_cpu(complaint, listed_gpu, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # so that it is put back after the test
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    line = complaint()
    assert line.startswith("cannot start: ") and "CUDA_VISIBLE_DEVICES='' trains on the CPU" in line
    assert os.environ["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:64", "the user's choice of allocator is kept"


def test_a_gpu_that_is_hidden_is_not_asked_for(folder, train_here, listed_gpu):
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "" and train_here(folder)[0] == 0


@pytest.mark.parametrize("closed", ["<&- >&-", "2>&-", "<&- >&- 2>&-", ">/dev/full", ">/dev/full 2>/dev/full"])
def test_a_console_that_is_closed_or_full_does_not_harm_the_run(folder, closed):
    shell = ["sh", "-c", f'"$@" {closed}', "sh", sys.executable, str(SCRIPT), *tiny_flags()]
    result = subprocess.run(shell, cwd=folder, env=ONE_THREAD, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "") and last_line(folder) == "ended: finished"
    assert only_log(folder).read_text().startswith(SCRIPT.read_text())


@pytest.mark.parametrize("closed", ["2>&-", ">/dev/full 2>/dev/full"])
def test_a_closed_console_does_not_change_the_exit_code_of_a_bad_setting(folder, closed):
    shell = ["sh", "-c", f'"$@" {closed}', "sh", sys.executable, str(SCRIPT), *tiny_flags(resume="no.pt")]
    assert subprocess.run(shell, cwd=folder, env=ONE_THREAD, capture_output=True).returncode == 2


def test_python_without_docstrings_and_asserts_trains_and_helps(folder):
    result = run_script(tiny_flags(), folder, PYTHONOPTIMIZE="2")
    assert (result.returncode, result.stderr) == (0, "") and last_line(folder) == "ended: finished"
    result = run_script(["--help"], folder, PYTHONOPTIMIZE="2")
    assert result.returncode == 0 and "--num_iterations" in result.stdout


def test_two_processes_tell_a_bad_setting_once(folder):
    result = run_script(tiny_flags(batch_sequences=1), folder, processes=2)
    ours = [line for line in result.stderr.splitlines() if line.startswith("train_gpt:")]
    rule = "this must hold: processes <= batch_sequences < 2**24"
    assert ours == [f"train_gpt: --batch_sequences 1: {rule}"] and "exitcode  : 2" in result.stderr
    assert not (folder / "logs").exists()
