"""Bad input gets one clear line, exit code 2, and nothing half-written."""

import os
import resource
import subprocess
import sys
from dataclasses import fields

import numpy as np
import pytest
from helpers import SCRIPT, TINY, flags, made_up_tokens, run_script, write_shard

import train_gpt


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


def complaint(arguments, capsys) -> str:
    """The one line that the script prints about these arguments."""
    assert train_gpt.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("train_gpt: "), (out, err)
    assert not os.path.exists("logs") and not os.path.exists("checkpoints")
    return err


@pytest.mark.parametrize("change, message", [
    (dict(sequence_length=200), "--sequence_length 200: must be a multiple of the attention block, 128"),
    (dict(piece_length=100), "--piece_length 100: must divide sequence_length (256)"),
    (dict(val_tokens=1000), "--val_tokens 1000: must be a multiple of sequence_length (256)"),
    (dict(val_tokens=5120), "holds 3000, and one more is needed"),
    (dict(vocab_size=100, document_token=1), "is outside the vocabulary of 100"),
    (dict(document_token=257), "--document_token 257: must be from 0 to 256"),
    (dict(num_heads=3), "--model_dim 32: must be a multiple of 4 x num_heads"),
    (dict(num_heads=4, num_kv_heads=3), "--num_kv_heads 3: must divide num_heads (4)"),
    (dict(num_iterations=0), "--num_iterations 0: must be from 1"),
    (dict(cooldown_frac=1.5), "--cooldown_frac 1.5: must be from 0 to 1"),
    (dict(muon_lr=-1), "--muon_lr -1.0: must be from 0"),
    (dict(window_start=64), "--window_start 64: must be from 128"),
    (dict(dtype="float16"), "--dtype float16: must be auto, bfloat16 or float32"),
    (dict(num_layers="many"), "argument --num_layers: invalid int value: 'many'"),
    (dict(muon_lr="nan"), "argument --muon_lr: invalid finite_number value: 'nan'"),
    (dict(compile="maybe"), "argument --compile: invalid true_or_false value: 'maybe'"),
    (dict(no_such_setting=1), "unrecognized arguments: --no_such_setting=1"),
    (dict(train_files="nowhere/*.bin"), "no shards match nowhere/*.bin: python data/cached_fineweb10B.py 10"),
    (dict(val_files="nowhere/*.bin"), "no shards match nowhere/*.bin"),
    (dict(batch_sequences=1000), "holds a batch of 256000 tokens"),
    (dict(resume="nothing.pt"), "--resume nothing.pt: "),
])
def test_a_bad_setting_is_named_with_what_is_right(shards, here, capsys, change, message):
    assert message in complaint([*shards, *flags(**change)], capsys)


@pytest.mark.parametrize("damage, message", [
    (lambda path: write_shard(path, made_up_tokens(9000), magic=7), "magic number 7, not 20240520"),
    (lambda path: write_shard(path, made_up_tokens(9000), version=3), "version 3, but only version 1 can be read"),
    (lambda path: os.truncate(path, 9999), "it is truncated or damaged, fetch it again"),
    (lambda path: os.truncate(path, 10), "too few for a shard's header"),
    (lambda path: write_shard(path, np.full(9000, 400)), "token 400 is outside the vocabulary of 257"),
    (lambda path: (path.unlink(), path.mkdir()), "is a directory"),
])
@pytest.mark.parametrize("shard", ["tiny_train_000001.bin", "tiny_val_000000.bin"])
def test_a_bad_shard_is_named_with_what_is_wrong(shards, here, capsys, shard, damage, message):
    damage(here / "data" / shard)
    line = complaint(shards, capsys)
    assert message in line and shard in line


def test_an_unreadable_data_folder_is_named(shards, here):
    """As root every folder is readable, so the script runs as somebody else."""
    code = f"import os, sys, train_gpt; os.getuid() or os.setuid(65534); sys.exit(train_gpt.main({shards!r}))"
    here.chmod(0o755)
    (here / "data").chmod(0)
    result = subprocess.run([sys.executable, "-c", code], cwd=here, capture_output=True, text=True,
                            env=os.environ | dict(PYTHONPATH=str(SCRIPT.parent)))
    (here / "data").chmod(0o755)
    assert result.returncode == 2
    assert result.stderr == "train_gpt: data: permission denied; the data folder must be readable\n"


@pytest.mark.parametrize("processes", [1, 2])
def test_exit_code_and_one_line_from_the_command_line(shards, tmp_path, processes):
    result = run_script([*shards, "--sequence_length=200"], tmp_path, processes)
    ours = [line for line in result.stderr.splitlines() if line.startswith("train_gpt:")]
    assert ours == ["train_gpt: --sequence_length 200: must be a multiple of the attention block, 128"]
    if processes == 1:
        assert result.returncode == 2 and len(result.stderr.splitlines()) == 1
    else:
        assert "exitcode  : 2" in result.stderr


def test_fewer_sequences_than_processes(shards, tmp_path):
    result = run_script([*shards, "--batch_sequences=1"], tmp_path, processes=2)
    assert "train_gpt: --batch_sequences 1: fewer sequences than processes; start at most 1\n" in result.stderr
    assert not (tmp_path / "logs").exists()


def test_a_full_disk_at_the_start_leaves_no_half_written_log(shards, tmp_path):
    result = subprocess.run(
        [sys.executable, SCRIPT, *shards], cwd=tmp_path, capture_output=True, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000)))
    assert result.returncode == 2
    assert result.stderr.startswith("train_gpt: the log logs/") and "cannot be written" in result.stderr
    assert result.stderr.count("\n") == 1 and list((tmp_path / "logs").iterdir()) == []


def test_help_lists_every_setting_with_meaning_and_default(capsys):
    with pytest.raises(SystemExit):
        train_gpt.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for field in fields(train_gpt.Hyperparameters):
        assert f"--{field.name} " in text and f"[{field.default}" in text
    assert "[1390; " in text and "on a CPU]" in text and "training steps" in text


def test_every_laptop_value_is_a_setting_of_the_right_type():
    types = {field.name: field.type for field in fields(train_gpt.Hyperparameters)}
    assert all(type(value) is types[name] for name, value in train_gpt.LAPTOP.items())
    assert set(TINY) <= set(types)
