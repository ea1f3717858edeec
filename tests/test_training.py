"""Whole runs as a user starts them: real processes, real torchrun, real logs."""

import fcntl
import json
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import time

import pytest
import torch
from helpers import SCRIPT, flags, only_log, run_script, train_losses, val_losses

RULE = "=" * 100


def weights(folder) -> dict:
    """What the run's last checkpoint holds."""
    newest = max(folder.glob("checkpoints/*/step_*.pt"))
    return torch.load(newest, weights_only=True)["state"]["model"]


def assert_same_bits(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def trained(shards, folder, processes=1, **settings) -> str:
    """Runs in a folder of its own beside the data; returns the log."""
    folder.mkdir()
    (folder / "data").symlink_to(folder.parent / "data")
    result = run_script([*shards, *flags(**settings)], folder, processes)
    assert result.returncode == 0, result.stderr
    return only_log(folder).read_text()


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("bfloat16", 1e-3)])
def test_one_two_and_three_processes_give_the_same_losses(shards, tmp_path, dtype, tolerance):
    logs = [trained(shards, tmp_path / f"{size}", size, num_iterations=10, val_loss_every=5, dtype=dtype)
            for size in (1, 2, 3)]
    for log in logs[1:]:
        assert train_losses(log) == pytest.approx(train_losses(logs[0]), rel=tolerance)
        assert val_losses(log) == pytest.approx(val_losses(logs[0]), rel=max(tolerance, 5e-5))  # 4 decimals
    assert len(train_losses(logs[0])) == 10 and train_losses(logs[0])[-1] < train_losses(logs[0])[0] - 0.3


@pytest.mark.parametrize("processes", [1, 2])
def test_warm_up_leaves_no_trace_and_the_same_seed_gives_the_same_bits(shards, tmp_path, processes):
    runs = {name: trained(shards, tmp_path / name, processes, save_every=100, num_iterations=6, **settings)
            for name, settings in dict(cold={}, again={}, warm=dict(warmup_steps=3), other=dict(seed=2)).items()}
    assert train_losses(runs["cold"]) == train_losses(runs["again"]) == train_losses(runs["warm"])
    assert_same_bits(weights(tmp_path / "cold"), weights(tmp_path / "again"))
    assert_same_bits(weights(tmp_path / "cold"), weights(tmp_path / "warm"))
    assert train_losses(runs["cold"]) != train_losses(runs["other"])


def test_the_log_holds_source_machine_settings_data_and_steps(shards, tmp_path):
    log = trained(shards, tmp_path / "run", num_iterations=4, val_loss_every=2, seed=7)
    source, facts, steps = log.split(f"\n{RULE}\n")
    assert source + "\n" == SCRIPT.read_text()
    facts = dict(line.split(": ", 1) for line in facts.splitlines())
    assert list(facts) == ["python", "torch", "cuda", "hardware", "world_size", "seed", "settings", "data"]
    assert facts["torch"] == torch.__version__ and facts["world_size"] == "1" and facts["seed"] == "7"
    settings = json.loads(facts["settings"])
    assert settings["num_iterations"] == 4 and settings["sequence_length"] == 256 and settings["dtype"] == "float32"
    assert [(entry["file"], entry["tokens"]) for entry in json.loads(facts["data"])] == [
        ("tiny_train_000001.bin", 20000), ("tiny_train_000002.bin", 20000), ("tiny_val_000000.bin", 3000)]
    time_fields = r"train_time:\d+ms step_avg:\d+\.\d\dms"
    shape = [rf"step:0/4 val_loss:\d\.\d{{4}} {time_fields}"]
    for step in range(1, 5):
        shape.append(rf"step:{step}/4 train_loss:\d\.\d{{6}} {time_fields}")
        if step % 2 == 0:
            shape.append(rf"step:{step}/4 val_loss:\d\.\d{{4}} {time_fields}")
    shape.append(r"peak memory: \d+ MiB resident")
    lines = steps.splitlines()
    assert len(lines) == len(shape)
    for line, pattern in zip(lines, shape, strict=True):
        assert re.fullmatch(pattern, line), line


def test_the_source_in_a_log_runs_again(shards, tmp_path):
    log = trained(shards, tmp_path / "first")
    (tmp_path / "again").mkdir()
    (tmp_path / "again/data").symlink_to(tmp_path / "data")
    script = tmp_path / "again/cut_out.py"
    script.write_text(log.split(f"\n{RULE}\n")[0] + "\n")
    result = run_script(shards, tmp_path / "again", script=script)
    assert result.returncode == 0, result.stderr
    assert train_losses(only_log(tmp_path / "again").read_text()) == train_losses(log)


def test_a_killed_run_leaves_a_readable_log(shards, tmp_path):
    environment = os.environ | dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    process = subprocess.Popen([sys.executable, SCRIPT, *shards, "--num_iterations=100000"], cwd=tmp_path,
                               env=environment, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step:5/"):
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    log = only_log(tmp_path).read_text()
    assert log.startswith(SCRIPT.read_text()) and log.endswith("ms\n")
    assert len(train_losses(log)) >= 5


def test_the_console_ends_with_loss_target_time_and_log(shards, tmp_path):
    result = run_script([*shards, "--target_loss=9"], tmp_path)
    last = result.stdout.splitlines()[-1]
    assert re.fullmatch(r"validation loss \d\.\d{4}, target 9.0 reached; \d+\.\d s of training; logs/.*\.txt", last)
    assert (tmp_path / last.split("; ")[-1]).exists()
    result = run_script([*shards, "--target_loss=0.1"], tmp_path)
    assert "target 0.1 not reached" in result.stdout.splitlines()[-1]


def test_grouped_queries_and_odd_layers_train(shards, tmp_path):
    log = trained(shards, tmp_path / "run", num_heads=4, num_kv_heads=2, num_layers=9, num_iterations=8)
    assert train_losses(log)[-1] < train_losses(log)[0]


def test_two_torchrun_agents_train_together(shards, tmp_path):
    expected = trained(shards, tmp_path / "alone", num_iterations=4)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    agents = [subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d",
         "--rdzv_id=tiny", f"--rdzv_endpoint=127.0.0.1:{port}", "--local_addr=127.0.0.1", SCRIPT, *shards],
        cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for agent in agents:
        _, errors = agent.communicate(timeout=240)
        assert agent.returncode == 0, errors
    log = only_log(tmp_path).read_text()
    assert "world_size: 2" in log
    assert train_losses(log) == pytest.approx(train_losses(expected), rel=1e-5)


def test_a_terminal_gets_a_progress_bar_and_validation_lines(shards, tmp_path):
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("4H", 40, 160, 0, 0))
    environment = os.environ | dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", TERM="xterm")
    process = subprocess.Popen([sys.executable, SCRIPT, *shards, "--val_loss_every=50", "--num_iterations=100"],
                               cwd=tmp_path, env=environment,
                               stdout=child, stderr=child)
    os.close(child)
    screen, deadline = b"", time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            screen += os.read(parent, 4096)
        except OSError:  # the other end is closed
            break
    assert process.wait() == 0
    text = screen.decode()
    assert "tokens/s" in text and "loss " in text and "step:50/100 val_loss:" in text
    assert "train_loss" not in text  # step lines are for consoles that are no terminals


def test_importing_the_script_runs_nothing_and_needs_nothing_of_the_repository(tmp_path):
    (tmp_path / "speedrun.py").write_bytes(SCRIPT.read_bytes())
    code = "import importlib.util as u; s = u.spec_from_file_location('c', 'speedrun.py'); " \
           "m = u.module_from_spec(s); s.loader.exec_module(m); print('imported')"
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.stdout == "imported\n", result.stderr
    assert os.listdir(tmp_path) in (["speedrun.py"], ["__pycache__", "speedrun.py"], ["speedrun.py", "__pycache__"])
