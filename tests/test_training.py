"""Whole runs as a user starts them: real processes, real torchrun, real logs."""

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from itertools import islice

import pytest
import torch
from helpers import (
    ONE_THREAD,
    RULE,
    SCRIPT,
    Started,
    checkpoint,
    differences,
    free_port,
    made_up_tokens,
    make_data,
    only_log,
    run_script,
    tiny_flags,
    train_losses,
    val_losses,
)

from train_gpt import DistributedDataLoader, Shard, Trainer, World, make_settings, parse_flags

RESULT = rf"validation loss \d\.\d{{4}} after 4 of the track's {make_settings({}, 1, False).num_iterations} steps"


def trained(folder, processes=1, **settings) -> str:
    """A run in a folder of its own; returns its log."""
    make_data(folder)
    result = run_script(tiny_flags(**settings), folder, processes)
    assert (result.returncode, "Traceback" in result.stderr) == (0, False), result.stderr
    return only_log(folder).read_text()


def test_one_two_and_three_processes_give_the_same_losses(tmp_path):
    """Three processes have two, one and one of the four sequences."""
    logs = [trained(tmp_path / f"{size}", size, num_iterations=10, val_loss_every=5) for size in (1, 2, 3)]
    for log in logs[1:]:
        assert train_losses(log) == pytest.approx(train_losses(logs[0]), rel=1e-5)
        assert val_losses(log) == pytest.approx(val_losses(logs[0]), rel=5e-5)  # 4 decimals
    assert len(train_losses(logs[0])) == 10 and train_losses(logs[0])[-1] < train_losses(logs[0])[0] - 0.3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_seed_gives_the_same_bits_and_kernel_warm_up_leaves_no_trace(folder, train_here, dtype):
    settings = dict(cold={}, warm=dict(kernel_warmup_steps=3), other=dict(seed=2))
    logs = {}
    for name, changes in settings.items():
        places = dict(log_dir=f"{name}/logs", checkpoint_dir=f"{name}/checkpoints")
        assert train_here(folder, save_every=4, dtype=dtype, **places, **changes)[0] == 0
        logs[name] = train_losses(only_log(folder / name).read_text())
    assert logs["cold"] == logs["warm"] != logs["other"]
    assert differences(checkpoint(folder / "cold", 4), checkpoint(folder / "warm", 4)) == []
    assert len(differences(checkpoint(folder / "cold", 4), checkpoint(folder / "other", 4))) > 20


def test_warm_up_puts_weights_and_both_optimizers_back_to_the_last_bit(folder, monkeypatch):
    monkeypatch.chdir(folder)
    s = make_settings(parse_flags(tiny_flags(kernel_warmup_steps=2)), processes=1, on_gpu=False)
    world = World(0, 1, torch.device("cpu"))
    loader = DistributedDataLoader(s, world)
    trainers = [Trainer(s, world) for _ in range(2)]
    trainers[1].warm_up(loader)
    for step, (_, batch) in enumerate(islice(loader.batches(0, [0, 0]), 2)):
        losses = [trainer.backward(batch, step) for trainer in trainers]
        assert losses[0] == losses[1]
        for trainer in trainers:
            trainer.update(step)
    for part, tensors in trainers[0].state().items():
        others = trainers[1].state()[part]
        assert tensors.keys() == others.keys() and all(torch.equal(tensors[name], others[name]) for name in tensors)


def test_a_validation_is_the_mean_loss_over_the_first_tokens_and_leaves_no_trace(folder, monkeypatch):
    monkeypatch.chdir(folder)
    s = make_settings(parse_flags(tiny_flags(val_sequence_length=384, val_tokens=768)), processes=1, on_gpu=False)
    trainer = Trainer(s, World(0, 1, torch.device("cpu")))
    with torch.no_grad():
        trainer.model.head.weight.normal_()
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    actual = trainer.validate(Shard("data/tiny_val_000000.bin", s.vocab_size), step=2)
    tokens = torch.from_numpy(made_up_tokens(3_000, seed=9))
    losses = []
    assert trainer.model.training
    trainer.model.eval()
    for first in (0, 384):  # longer than the 256 tokens of a training sequence
        with torch.no_grad():  # with the windows of step 2
            logits = trainer.model.logits(trainer.model.hidden(tokens[first : first + 384], torch.tensor([1, 2])))
        picked = logits.double().log_softmax(-1)[torch.arange(384), tokens[first + 1 : first + 385]]
        losses.append(-picked.mean().item())
    assert actual == pytest.approx(sum(losses) / 2, rel=1e-5)
    assert all(torch.equal(before[name], value) for name, value in trainer.model.state_dict().items())
    assert all(param.grad is None for param in trainer.model.parameters())


# ---- Log and console -------------------------------------------------------------------------------------------------


def test_the_log_holds_source_machine_settings_data_and_steps(folder, train_here):
    code, out, _ = train_here(folder, val_loss_every=2, seed=7)
    source, facts, steps = only_log(folder).read_text().split(f"\n{RULE}\n")
    assert code == 0 and source + "\n" == SCRIPT.read_text()
    facts = dict(line.split(": ", 1) for line in facts.splitlines())
    assert list(facts) == ["python", "torch", "cuda", "hardware", "world_size", "seed", "settings", "data"]
    assert facts["torch"] == torch.__version__ and facts["world_size"] == "1" and facts["seed"] == "7"
    settings = json.loads(facts["settings"])
    assert settings["num_iterations"] == 4 and settings["sequence_length"] == 128 and settings["dtype"] == "float32"
    assert [(entry["file"], entry["tokens"]) for entry in json.loads(facts["data"])] == [
        ("tiny_train_000001.bin", 4500),
        ("tiny_train_000002.bin", 4500),
        ("tiny_val_000000.bin", 3000),
    ]
    times = r"train_time:\d+ms step_avg:\d+\.\d\dms"
    shape = [r"device   1 x .*; float32, eager", r"model    2 layers of width 32, [\d,]+ parameters"]
    shape += ["head     trained in float32", "steps    4 of 4 x 128, 256 tokens"]
    shape += [r"data     .*, validation on [\d,]+ tokens of .*", "target   none"]
    shape += [r"log      logs/.*\.txt", rf"step:0/4 val_loss:\d\.\d{{4}} {times}"]
    for step in range(1, 5):
        shape.append(rf"step:{step}/4 train_loss:\d\.\d{{6}} {times}")
        if step % 2 == 0:
            shape.append(rf"step:{step}/4 val_loss:\d\.\d{{4}} {times}")
    shape += [RESULT, "ended: finished"]
    lines = steps.splitlines()
    shown = out.splitlines()
    assert [line for line in lines if line in shown or "train_loss" not in line] == shown, "steps: one line per second"
    assert len(lines) == len(shape)
    for line, pattern in zip(lines, shape, strict=True):
        assert re.fullmatch(pattern, line), line


def test_the_last_result_names_the_target_if_one_was_asked_for(folder, train_here):
    for target, verdict in (0, ""), (9, "; target 9.0 reached"), (0.1, "; target 0.1 not reached"):
        out = train_here(folder, target_loss=target)[1]
        assert re.fullmatch(RESULT + re.escape(verdict), out.splitlines()[-2])


def test_the_tracks_target_is_for_the_tracks_data():
    assert make_settings({}, 1, on_gpu=False).target_loss == 1.04
    assert make_settings(dict(train_files="mine.bin"), 1, on_gpu=True).target_loss == 3.28
    assert make_settings(dict(val_files="mine.bin"), 1, on_gpu=True).target_loss == 0
    assert make_settings(dict(val_files="mine.bin", target_loss=2.0), 1, on_gpu=False).target_loss == 2


def test_the_source_in_a_log_runs_again(tmp_path):
    log = trained(tmp_path / "first")
    make_data(tmp_path / "again")
    script = tmp_path / "again/cut_out.py"
    script.write_text(log.split(f"\n{RULE}\n")[0] + "\n")
    result = run_script(tiny_flags(), tmp_path / "again", script=script)
    assert result.returncode == 0, result.stderr
    assert train_losses(only_log(tmp_path / "again").read_text()) == train_losses(log)


def test_the_logged_source_is_what_runs_even_if_the_file_is_edited_meanwhile(folder):
    """The script is copied and started with a torch that takes a while to import; the edit comes in between."""
    source = SCRIPT.read_text()
    (folder / "script.py").write_text(source)
    (folder / "slow").mkdir()
    slow = "import sys, time\nopen('importing', 'w').close()\ntime.sleep(2)\nsys.path.pop(0)\n"
    slow += "del sys.modules['numpy']\nimport numpy\n"
    (folder / "slow/numpy.py").write_text(slow)
    start = f"import sys, runpy; sys.argv[0] = 'script.py'; sys.path.insert(0, {str(folder / 'slow')!r}); "
    start += "runpy.run_path('script.py', run_name='__main__')"
    process = subprocess.Popen([sys.executable, "-c", start, *tiny_flags()], cwd=folder, env=ONE_THREAD)
    while not (folder / "importing").exists() and process.poll() is None:
        time.sleep(0.01)
    (folder / "script.py").write_text("# edited\n" + source)
    assert process.wait(100) == 0
    assert only_log(folder).read_text().startswith(source)


def test_a_terminal_gets_a_progress_bar_and_validation_lines(folder):
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("4H", 40, 160, 0, 0))
    arguments = tiny_flags(val_loss_every=50, num_iterations=100)
    environment = ONE_THREAD | dict(TERM="xterm")
    process = subprocess.Popen(
        [sys.executable, SCRIPT, *arguments], cwd=folder, env=environment, stdout=child, stderr=child
    )
    os.close(child)
    screen, deadline = b"", time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            screen += os.read(parent, 4096)
        except OSError:  # the other end is closed
            break
    assert process.wait() == 0
    text = screen.decode()
    assert "it/s" in text and "step:50/100 val_loss:" in text and "validation loss" in text
    assert "train_loss" not in text  # step lines are for consoles that are no terminals


# ---- Launchers -------------------------------------------------------------------------------------------------------


def test_two_torchrun_agents_train_together(tmp_path):
    expected = trained(tmp_path / "alone")
    make_data(tmp_path)
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d"]
    agent += ["--rdzv_id=tiny", f"--rdzv_endpoint=127.0.0.1:{free_port()}", "--local_addr=127.0.0.1"]
    run = dict(cwd=tmp_path, env=ONE_THREAD, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    agents = [subprocess.Popen([*agent, SCRIPT, *tiny_flags()], **run) for _ in range(2)]
    for process in agents:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
    log = only_log(tmp_path).read_text()
    assert "world_size: 2" in log
    assert train_losses(log) == pytest.approx(train_losses(expected), rel=1e-5)


def test_after_a_good_run_what_waits_for_the_exit_is_done(folder):
    """Profilers and trackers register themselves for the interpreter's exit."""
    start = f"import atexit, runpy, sys; atexit.register(print, 'at exit'); sys.argv[0] = {str(SCRIPT)!r}; "
    start += f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    run = dict(cwd=folder, env=ONE_THREAD, capture_output=True, text=True)
    result = subprocess.run([sys.executable, "-c", start, *tiny_flags()], **run)
    assert (result.returncode, result.stdout.splitlines()[-1]) == (0, "at exit")


def test_a_killed_run_leaves_a_readable_log(folder):
    with Started(folder, tiny_flags(num_iterations=100_000)) as run:
        run.wait_for("step:5/").signal(signal.SIGKILL)
        run.exit_code()
    log = only_log(folder).read_text()
    assert log.startswith(SCRIPT.read_text()) and log.endswith("ms")
    assert len(train_losses(log)) >= 5
