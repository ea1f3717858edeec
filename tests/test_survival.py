"""A run that survives: checkpoints, resuming, signals, kills, full disks and bad shards, with real processes."""

import json
import math
import os
import re
import resource
import shutil
import signal
import time
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (
    ONE_THREAD,
    SCRIPT,
    Started,
    alive,
    checkpoint,
    differences,
    free_port,
    last_line,
    made_up_tokens,
    make_data,
    only_log,
    run_script,
    tiny_flags,
    train_losses,
    val_losses,
    wait_until,
    write_shard,
)

from train_gpt import Settings, Trainer

# Eight steps whose learning rates, momentum and window all change, with checkpoints at steps 4 and 8.
RUN = dict(num_iterations=8, save_every=4, cooldown_frac=0.5)
LONG = dict(num_iterations=100_000)

# ---- Running and comparing -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The folder of an uninterrupted run with so many processes; each is run once, when it is first asked for."""
    folders = {}

    def run(processes: int) -> Path:
        if processes not in folders:
            folders[processes] = make_data(tmp_path_factory.mktemp(f"of_{processes}"))
            result = run_script(tiny_flags(**RUN), folders[processes], processes)
            assert result.returncode == 0, result.stderr
        return folders[processes]

    return run


@pytest.fixture
def after_four(reference, tmp_path) -> Path:
    """Data, log and the checkpoint of step 4 of a run on one process."""
    folder = Path(shutil.copytree(reference(1), tmp_path, dirs_exist_ok=True))
    checkpoint(folder, 8).unlink()
    return folder


def load(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def added(folder: Path, before: str) -> list[str]:
    """The lines that the log has since then."""
    after = only_log(folder).read_text()
    assert after.startswith(before + "\n")
    return after.removeprefix(before + "\n").splitlines()


def is_one_line(err: str, text: str) -> bool:
    return err.startswith("train_gpt: ") and err.count("\n") == 1 and text in err


# ---- Resuming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 2])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(reference, tmp_path, processes):
    """All settings come from the checkpoint."""
    folder = Path(shutil.copytree(reference(processes), tmp_path, dirs_exist_ok=True))
    resume = [f"--resume={checkpoint(folder, 4)}", "--checkpoint_dir=again", "--kernel_warmup_steps=2"]
    result = run_script(resume, folder, processes)
    assert result.returncode == 0, result.stderr
    assert differences(checkpoint(folder, 8), checkpoint(folder, 8, "again")) == []
    losses = train_losses(only_log(folder).read_text())
    assert len(losses) == 8 + 4 and losses[4:8] == losses[8:]
    assert len(set(losses)) == 7 and losses[0] == losses[1]  # the head is zero until Adam's first update, after step 2
    assert len(set(val_losses(only_log(folder).read_text()))) == 1


@pytest.mark.parametrize("before, after", [(2, 1), (2, 3)])
def test_another_number_of_processes_resumes_within_rounding(reference, tmp_path, before, after):
    folder = Path(shutil.copytree(reference(before), tmp_path, dirs_exist_ok=True))
    result = run_script([f"--resume={checkpoint(folder, 4)}", "--checkpoint_dir=again"], folder, after)
    assert result.returncode == 0, result.stderr
    assert f"step_000004.pt on {after} x " in only_log(folder).read_text()
    losses = train_losses(only_log(folder).read_text())
    assert len(losses) == 8 + 4 and losses[8:] == pytest.approx(losses[4:8], rel=1e-6)

    def distance(first: Path, second: Path, part: str) -> float:
        one, other = (load(path)["state"][part] for path in (first, second))
        assert one.keys() == other.keys()
        return math.sqrt(sum((one[name] - other[name]).square().sum().item() for name in one))

    for part in ("model", "optimizers"):
        way = distance(checkpoint(folder, 8), checkpoint(folder, 4), part)
        assert distance(checkpoint(folder, 8), checkpoint(folder, 8, "again"), part) < 1e-3 * way


def test_a_resumed_run_goes_on_in_the_same_log_and_with_the_same_clock(after_four, train_here):
    before = only_log(after_four).read_text()
    assert train_here(after_four, "--resume=latest")[0] == 0
    resumed, *lines = added(after_four, before)[7:]  # after the header
    path = checkpoint(after_four, 4).relative_to(after_four)
    assert resumed.startswith(f"resumed at step 4 from {path} on 1 x ") and "=" * 100 not in lines
    assert f"hardware: {resumed.split(' on 1 x ')[1]}\n" in before
    times = [
        int(re.search(rf"^step:{step}/8 train_loss\S+ train_time:(\d+)ms", text, re.MULTILINE)[1])
        for step, text in ((4, before), (5, "\n".join(lines)))
    ]
    assert times[1] > times[0] > 0


def test_the_log_says_what_a_resumed_run_changed(after_four, train_here):
    before = only_log(after_four).read_text()
    changes = ["--val_tokens=512", "--target_loss=9", "--dtype=bfloat16"]
    assert train_here(after_four, "--resume=latest", *changes)[0] == 0
    told = [line for line in added(after_four, before) if line.startswith("changed on resume: ")]
    assert sorted(line.removeprefix("changed on resume: ") for line in told) == [
        "dtype float32 -> bfloat16",
        "target_loss 0.0 -> 9.0",
        "val_tokens 1024 -> 512",
    ]


def test_an_edit_of_the_script_is_told_and_does_not_refuse_the_resume(after_four, train_here):
    path = checkpoint(after_four, 4)
    saved = load(path)
    torch.save(saved | dict(source=saved["source"] + "# a comment\n"), path)
    before = only_log(after_four).read_text()
    assert train_here(after_four, "--resume=latest")[0] == 0
    assert "changed on resume: the script" in added(after_four, before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_keeps_the_dtype_that_was_chosen(folder, train_here, dtype):
    assert train_here(folder, **RUN | dict(dtype=dtype))[0] == 0
    code, out, _ = train_here(folder, f"--resume={checkpoint(folder, 4)}")
    assert code == 0 and f"; {dtype}, eager" in out and "changed on resume: dtype" not in out


@pytest.mark.parametrize("change", ["--num_iterations=7", "--muon_lr=0.01", "--model_dim=64", "--seed=5"])
def test_what_a_resumed_run_cannot_change_is_refused(after_four, train_here, change):
    files = sorted(after_four.rglob("*"))
    code, out, err = train_here(after_four, "--resume=latest", change)
    assert (code, out) == (2, "") and is_one_line(err, f"{change.replace('=', ' ')}: a resumed run cannot change it")
    assert sorted(after_four.rglob("*")) == files


def test_other_data_is_refused_and_the_same_data_elsewhere_is_not(after_four, train_here):
    shutil.move(after_four / "data", after_four / "moved")
    moved = ["--train_files=moved/*train*.bin", "--val_files=moved/*val*.bin"]
    write_shard(after_four / "moved/tiny_train_000002.bin", made_up_tokens(4_500, seed=77))
    code, out, err = train_here(after_four, "--resume=latest", *moved)
    assert (code, out) == (2, "") and is_one_line(err, "that run used other shards")
    write_shard(after_four / "moved/tiny_train_000002.bin", made_up_tokens(4_500, seed=2))
    assert train_here(after_four, "--resume=latest", *moved)[0] == 0


# ---- Checkpoints -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_holds_everything_as_plain_data(reference):
    saved = load(checkpoint(reference(1), 8))
    assert saved["settings"].keys() == {setting.name for setting in fields(Settings)}
    assert saved.keys() == {"run_id", "source", "data", "settings", "step", "position", "seconds", "state"}
    assert saved["source"] == SCRIPT.read_text() and json.loads(json.dumps(saved["data"])) == saved["data"]
    assert saved["step"] == 8 and saved["seconds"] > 0 and only_log(reference(1)).stem == saved["run_id"]


def halve(part: dict, name: str) -> None:
    part[name] = part[name][:1]


def remove(part: dict, name: str) -> None:
    del part[name]


def as_int8(part: dict, name: str) -> None:
    part[name] = part[name].to(torch.int8)


@pytest.mark.parametrize(
    "part, name",
    [("model", "blocks.0.mlp.weights"), ("optimizers", "head.mean"), ("optimizers", "mlp.momentum")],
    ids=["model", "adam", "muon"],
)
@pytest.mark.parametrize("damage", [halve, remove, as_int8])
def test_a_checkpoint_that_does_not_fit_is_refused(after_four, train_here, part, name, damage):
    path = checkpoint(after_four, 4)
    saved = load(path)
    damage(saved["state"][part], name)
    torch.save(saved, path)
    code, _, err = train_here(after_four, "--resume=latest")
    message = f"the checkpoint's {part} {name} does not fit this model"
    assert code == 2 and is_one_line(err, message) and last_line(after_four) == f"ended: {message}"


def test_an_entry_that_the_model_lacks_is_refused(after_four, train_here):
    path = checkpoint(after_four, 4)
    saved = load(path)
    saved["state"]["model"]["extra"] = torch.zeros(3)
    torch.save(saved, path)
    code, _, err = train_here(after_four, "--resume=latest")
    assert code == 2 and is_one_line(err, "the checkpoint's model extra does not fit this model")


def test_one_flipped_bit_in_a_checkpoint_is_noticed(after_four, train_here):
    path = checkpoint(after_four, 4)
    weight = load(path)["state"]["model"]["blocks.0.mlp.weights"].numpy().tobytes()
    content = bytearray(path.read_bytes())
    content[content.index(weight) + 100] ^= 4
    path.write_bytes(content)
    code, out, err = train_here(after_four, "--resume=latest")
    assert (code, out) == (2, "") and is_one_line(err, "not a checkpoint, or a damaged one (wrong checksum in ")


@pytest.mark.parametrize("field", ["settings", "run_id", "step", "position", "seconds", "state", "source", "data"])
def test_a_checkpoint_without_one_of_its_fields_is_refused(after_four, train_here, field):
    path = checkpoint(after_four, 4)
    saved = load(path)
    del saved[field]
    torch.save(saved, path)
    before = only_log(after_four).read_text()
    code, out, err = train_here(after_four, "--resume=latest")
    assert (code, out) == (2, "") and is_one_line(err, "not a checkpoint, or a damaged one")
    assert only_log(after_four).read_text() == before


def test_a_checkpoint_of_another_script_is_refused_with_the_settings_that_differ(after_four, train_here):
    path = checkpoint(after_four, 4)
    saved = load(path)
    settings = {name: value for name, value in saved["settings"].items() if name != "seed"} | dict(piece_length=0)
    torch.save(saved | dict(settings=settings), path)
    code, _, err = train_here(after_four, "--resume=latest")
    assert code == 2 and is_one_line(err, "another script's checkpoint: it differs in piece_length, seed")


def test_the_run_id_in_a_checkpoint_cannot_lead_out_of_the_folders(after_four, train_here):
    path = checkpoint(after_four, 4)
    torch.save(load(path) | dict(run_id="../../elsewhere"), path)
    files = sorted(after_four.parent.rglob("*"))
    code, _, err = train_here(after_four, "--resume=latest")
    assert code == 2 and is_one_line(err, "not a checkpoint") and sorted(after_four.parent.rglob("*")) == files


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not a checkpoint", "half"], ids=["empty", "other", "half"])
def test_what_is_no_checkpoint_is_refused_in_one_line(after_four, train_here, content):
    whole = checkpoint(after_four, 4).read_bytes()
    (after_four / "it.pt").write_bytes(whole[: len(whole) // 2] if content == "half" else content)
    code, out, err = train_here(after_four, "--resume=it.pt")
    assert (code, out) == (2, "") and is_one_line(err, "--resume it.pt: not a checkpoint, or a damaged one")


def test_a_strangers_checkpoint_runs_no_code(folder, train_here):
    class Mine:
        def __reduce__(self):
            return open, (str(folder / "was here"), "w")

    torch.save(dict(settings=Mine()), folder / "it.pt")
    assert train_here(folder, "--resume=it.pt")[0] == 2
    assert not (folder / "was here").exists()


def test_latest_is_of_the_run_that_saved_last_and_without_one_a_run_starts(folder, train_here):
    for seed in (1, 2):
        assert "step:8/8" in train_here(folder, **RUN | dict(checkpoint_dir=f"{seed}"), resume="latest", seed=seed)[1]
    for seed in (2, 1):  # the older is copied last: its files keep their times
        shutil.copytree(folder / f"{seed}", folder / "checkpoints", dirs_exist_ok=True)
    out = train_here(folder, "--resume=latest")[1]
    assert "resumed at step 8" in out and "train_loss" not in out and "val_loss" in out
    assert checkpoint(folder, 8, "2").parent.name in out


def test_checkpoints_are_ordered_by_step_whatever_the_clock_says(after_four, train_here):
    future = time.time() + 3600
    os.utime(checkpoint(after_four, 4), (future, future))
    assert train_here(after_four, "--resume=latest", "--save_every=1")[0] == 0
    kept = sorted(path.name for path in after_four.glob("checkpoints/*/*"))
    assert kept == ["step_000007.pt", "step_000008.pt"]
    os.utime(checkpoint(after_four, 7), (future, future))
    assert "resumed at step 8" in train_here(after_four, "--resume=latest")[1]


def test_the_last_two_checkpoints_are_kept_and_nothing_of_an_interrupted_one(after_four, train_here):
    (checkpoint(after_four, 4).parent / "left.tmp").write_bytes(b"what a kill has left")
    code, out, _ = train_here(after_four, "--resume=latest", "--save_every=2")
    assert code == 0 and out.count("saved; to go on from here: --resume checkpoints/") == 2
    assert sorted(path.name for path in after_four.glob("checkpoints/*/*")) == ["step_000006.pt", "step_000008.pt"]


# ---- Two writers of one run ------------------------------------------------------------------------------------------


def test_a_second_writer_of_a_run_is_refused_and_the_first_goes_on(folder):
    with Started(folder, tiny_flags(**LONG, save_every=2)) as run:
        run.wait_for("saved; ")
        second = run_script(["--resume=latest"], folder)
        assert second.returncode == 2 and is_one_line(second.stderr, "another process writes this run's log")
        steps = run.log.count("train_loss")
        wait_until(lambda: run.log.count("train_loss") > steps)
        run.signal(signal.SIGTERM)
        assert run.exit_code() == 143
    losses = re.findall(r"^step:(\d+)/\d+ train_loss", only_log(folder).read_text(), re.MULTILINE)
    assert losses == [str(step) for step in range(1, len(losses) + 1)]


def test_ranks_whose_torchrun_was_killed_end_by_themselves_and_a_new_job_goes_on(folder):
    with Started(folder, tiny_flags(**LONG, save_every=5), processes=2) as run:
        run.wait_for("saved; ")
        ranks = run.ranks()
        run.signal(signal.SIGKILL)
        run.exit_code()
        wait_until(lambda: not any(alive(pid) for pid in ranks.values()), 60)
        assert len(ranks) == 2 and last_line(folder) == "ended: its launcher is gone"
    (saved,) = [max(folder.glob("checkpoints/*/*.pt"))]
    steps = len(train_losses(only_log(folder).read_text()))
    assert load(saved)["step"] == steps, "the last step was saved"
    with Started(folder, ["--resume=latest"], processes=2) as run:
        run.wait_for(f"step:{steps + 1}/")
    losses = re.findall(r"^step:(\d+)/\d+ train_loss", only_log(folder).read_text(), re.MULTILINE)
    assert losses == [str(step) for step in range(1, len(losses) + 1)]


# ---- Signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_ends_a_run_after_the_step_with_a_checkpoint_even_without_save_every(folder, name):
    number = signal.Signals[name]
    with Started(folder, tiny_flags(**LONG)) as run:
        run.wait_for("step:2/").signal(number)
        assert (run.exit_code(), run.err) == (128 + number, "")
    *_, step, saved, ended = only_log(folder).read_text().splitlines()
    (path,) = folder.glob("checkpoints/*/*")
    assert ended == f"ended: {name}" and saved.endswith(f"--resume {path.relative_to(folder)}")
    assert step.startswith(f"step:{load(path)['step']}/100000 train_loss")


def test_a_run_under_nohup_outlives_its_terminal(folder):
    how = dict(preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    with Started(folder, tiny_flags(**LONG), **how) as run:
        run.wait_for("step:2/").signal(signal.SIGHUP)
        steps = run.log.count("train_loss")
        wait_until(lambda: run.log.count("train_loss") > steps + 5)
        run.signal(signal.SIGTERM)
        assert run.exit_code() == 143


def test_a_run_that_was_started_to_ignore_ctrl_c_ignores_it(folder):
    """As a script starts what it runs in the background."""
    how = dict(preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    with Started(folder, tiny_flags(**LONG), **how) as run:
        run.wait_for("step:2/").signal(signal.SIGINT)
        steps = run.log.count("train_loss")
        wait_until(lambda: run.log.count("train_loss") > steps + 5 or run.process.poll() is not None)
        assert run.process.poll() is None


def test_a_signal_before_the_first_step_ends_the_run_at_once(folder):
    with Started(folder, tiny_flags(**LONG, kernel_warmup_steps=1000)) as run:
        run.wait_for("steps    100000 of").signal(signal.SIGTERM)
        assert (run.exit_code(), run.err) == (143, "")
    assert last_line(folder) == "ended: SIGTERM" and "train_loss" not in run.log


def test_a_second_ctrl_c_ends_a_run_at_once(folder):
    write_shard(folder / "data/tiny_val_000000.bin", made_up_tokens(2_000_001, seed=9))  # minutes of validation
    with Started(folder, tiny_flags(num_iterations=2, val_tokens=256 * 7800)) as run:
        run.wait_for("step:2/2 train_loss")
        run.signal(signal.SIGINT)
        time.sleep(1.5)
        assert run.process.poll() is None, "the first one lets the validation finish"
        run.signal(signal.SIGINT)
        assert (run.exit_code(20), run.err) == (130, "")
    assert last_line(folder) == "ended: SIGINT" and "val_loss" not in run.out


def test_ctrl_c_ends_the_wait_for_a_process_that_never_comes(folder):
    place = dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    with Started(folder, tiny_flags(), env=ONE_THREAD | place) as run:
        wait_until(lambda: f":{int(place['MASTER_PORT']):04X} " in Path("/proc/net/tcp6").read_text())  # it listens
        time.sleep(0.5)
        run.signal(signal.SIGINT)
        assert run.exit_code(20) == -signal.SIGINT


def test_a_signal_to_one_rank_stops_all_after_the_same_step(folder):
    with Started(folder, tiny_flags(**LONG), processes=3) as run:
        run.wait_for("step:2/")
        os.kill(run.ranks()[1], signal.SIGTERM)
        assert run.exit_code() != 0
    assert last_line(folder) == "ended: SIGTERM"
    (path,) = folder.glob("checkpoints/*/*.pt")
    assert load(path)["step"] == len(train_losses(only_log(folder).read_text()))
    assert "train_gpt: " not in run.err and 'train_gpt.py", line' not in run.err


def test_torchrun_passes_a_signal_on(folder):
    with Started(folder, tiny_flags(**LONG), processes=2) as run:
        run.wait_for("step:2/").signal(signal.SIGTERM)
        assert run.exit_code() != 0
    assert last_line(folder) == "ended: SIGTERM" and len(list(folder.glob("checkpoints/*/*.pt"))) == 1
    assert 'train_gpt.py", line' not in run.err and "SIGKILL" not in run.err


# ---- Kills, crashes, hangs, and losses that are no numbers -----------------------------------------------------------


def test_torchrun_restarts_a_killed_rank_and_the_run_ends_as_if_nothing_had_happened(reference, folder):
    arguments = tiny_flags(**RUN | dict(save_every=1, num_iterations=8), resume="latest")
    with Started(folder, arguments, processes=2, restarts=3) as run:
        wait_until(lambda: list(folder.glob("checkpoints/*/step_000003.pt")))
        os.kill(run.ranks()[1], signal.SIGKILL)
        assert run.exit_code() == 0, run.err
    assert differences(checkpoint(folder, 8), checkpoint(reference(2), 8)) == []
    losses = [
        dict(re.findall(r"^step:(\d+)/8 train_loss:(\S+)", only_log(where).read_text(), re.MULTILINE))
        for where in (folder, reference(2))
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 8


def test_a_hung_rank_ends_the_job(folder):
    with Started(folder, tiny_flags(**LONG, collective_timeout=5), processes=2) as run:
        run.wait_for("step:2/")
        hung = run.ranks()[1]
        os.kill(hung, signal.SIGSTOP)
        wait_until(lambda: last_line(folder).startswith("ended: "), 60)
        os.kill(hung, signal.SIGKILL)  # torchrun would do it after 30 s
        assert run.exit_code(60) != 0


@pytest.mark.parametrize(
    "error, code, ending",
    [
        (ZeroDivisionError("of a\nfork"), 1, "ended: ZeroDivisionError: of a fork"),
        (torch.OutOfMemoryError("CUDA"), 2, "ended: out of memory: halve --sequence_length and double"),
        (OSError(5, "Input/output error"), 2, "ended: [Errno 5] Input/output error"),
    ],
    ids=["a bug", "out of memory", "input and output"],
)
def test_whatever_ends_a_run_is_the_last_line_of_its_log(folder, train_here, monkeypatch, error, code, ending):
    def fails(self, step):
        raise error

    monkeypatch.setattr(Trainer, "update", fails)
    actual, _, err = train_here(folder)
    assert actual == code and last_line(folder).startswith(ending)
    assert ("Traceback" in err and "in fails" in err) if code == 1 else is_one_line(err, ending[7:])


def test_a_loss_that_is_no_number_stops_the_run_and_the_last_good_checkpoint_stays(after_four, train_here):
    path = checkpoint(after_four, 4)
    saved = load(path)
    saved["state"]["model"]["shortcut_mix"][:] = math.inf
    torch.save(saved, path)
    content = path.read_bytes()
    code, out, err = train_here(after_four, "--resume=latest", "--save_every=1")
    assert code == 1 and "Traceback" not in err and "train_loss" not in out
    assert re.match(r"ended: the loss of step 5 is (nan|inf): lower the learning rates", last_line(after_four))
    assert path.read_bytes() == content and not list(after_four.glob("checkpoints/*/step_000005.pt"))


@pytest.mark.parametrize("step", [4, 7])
def test_weights_that_are_no_numbers_are_not_saved(reference, tmp_path, train_here, step):
    """The update of the next step makes them so; of the last step no loss is computed but the validation's."""
    folder = Path(shutil.copytree(reference(1), tmp_path, dirs_exist_ok=True))
    path = checkpoint(folder, 8).rename(checkpoint(folder, 8).with_name(f"step_{step:06d}.pt"))
    saved = load(path)
    saved["step"] = step
    saved["state"]["optimizers"]["mlp.momentum"][:] = math.nan
    torch.save(saved, path)
    code, _, err = train_here(folder, "--resume=latest", "--save_every=1")
    assert code == 1 and "Traceback" not in err and f"step:{step + 1}/8 train_loss" in only_log(folder).read_text()
    assert re.match(r"ended: the (validation )?loss of step \d is nan", last_line(folder))
    assert f"step_{step + 1:06d}.pt" not in {found.name for found in path.parent.iterdir()}


def test_a_validation_loss_that_is_no_number_reaches_no_target(reference, tmp_path, train_here):
    folder = Path(shutil.copytree(reference(1), tmp_path, dirs_exist_ok=True))
    path = checkpoint(folder, 8)
    saved = load(path)
    saved["state"]["model"]["embedding.weight"][:] = math.nan
    torch.save(saved, path)
    code, out, err = train_here(folder, "--resume=latest", "--target_loss=9")
    assert (code, err) == (1, "") and "reached" not in out
    assert last_line(folder).startswith("ended: the validation loss of step 8 is nan")


# ---- Full disks ------------------------------------------------------------------------------------------------------


def test_a_full_disk_stops_neither_the_run_nor_harms_the_last_checkpoint(reference, after_four):
    (log,) = after_four.glob("logs/*.txt")
    good, full_at = checkpoint(after_four, 4).read_bytes(), log.stat().st_size + 500

    def full_disk():  # no file may grow past this size: the log soon cannot, a checkpoint never could
        resource.setrlimit(resource.RLIMIT_FSIZE, (full_at, full_at))

    with Started(after_four, ["--resume=latest", "--save_every=1"], preexec_fn=full_disk) as run:
        assert (run.exit_code(), run.err) == (1, ""), "a log that lacks lines is no success"
    assert run.out.splitlines()[-1] == "ended: finished, but this log lacks lines: full disk"
    assert run.out.count("no checkpoint at step") == 4
    assert "no checkpoint at step 8: [Errno 27] File too large" in run.out
    last_loss = re.compile(r"(?s).*(step:8/8 val_loss:\S+)")
    assert last_loss.match(run.out)[1] == last_loss.match(only_log(reference(1)).read_text())[1]
    assert log.stat().st_size == full_at
    assert not list(after_four.glob("checkpoints/*/*-*.tmp")) and not list(
        after_four.glob("checkpoints/*/step_000008.pt")
    )
    assert checkpoint(after_four, 4).read_bytes() == good


def test_a_torn_last_line_of_the_log_stays_alone(after_four, train_here):
    with open(only_log(after_four), "a") as log:
        log.write("\nstep:5/8 train_lo")
    before = only_log(after_four).read_text()
    assert train_here(after_four, "--resume=latest")[0] == 0
    assert re.match("device   1 x .*; float32, eager$", added(after_four, before)[0])


# ---- Shards that change during a run ---------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["shrinks", "grows", "is deleted"])
def test_a_shard_that_changes_ends_the_run_with_a_line_and_the_last_step_saved(folder, change):
    path = folder / "data/tiny_train_000002.bin"
    with Started(folder, tiny_flags(**LONG)) as run:
        run.wait_for("step:2/")
        if change == "is deleted":
            path.unlink()
        else:
            os.truncate(path, 2000 if change == "shrinks" else 20_000)
        assert run.exit_code() == 2 and is_one_line(run.err, "data/tiny_train_000002.bin")
    assert "data/tiny_train_000002.bin" in last_line(folder) and last_line(folder).startswith("ended: ")
    (saved,) = folder.glob("checkpoints/*/*.pt")
    assert load(saved)["step"] == len(train_losses(only_log(folder).read_text()))


def test_bad_data_is_told_once_by_two_processes_and_is_in_the_log(folder):
    tokens = made_up_tokens(60_000, seed=1)
    tokens[50_000] = 999  # after a few steps
    write_shard(folder / "data/tiny_train_000001.bin", tokens)
    result = run_script(tiny_flags(**LONG, sequence_length=2048, batch_sequences=2), folder, processes=2)
    reason = "data/tiny_train_000001.bin: token 999 is outside the vocabulary of 257"
    assert result.stderr.count(f"train_gpt: {reason}\n") == 1 and 'train_gpt.py", line' not in result.stderr
    assert last_line(folder) == f"ended: {reason}"
    (saved,) = folder.glob("checkpoints/*/*.pt")
    assert load(saved)["step"] == len(train_losses(only_log(folder).read_text())) > 3


def test_a_validation_shard_that_shrinks_ends_the_run_with_a_line(folder):
    with Started(folder, tiny_flags(**LONG, val_loss_every=20)) as run:
        run.wait_for("step:2/")
        os.truncate(folder / "data/tiny_val_000000.bin", 1500)
        assert run.exit_code() == 2 and is_one_line(
            run.err, "tiny_val_000000.bin: its size changed while it was in use"
        )
    assert last_line(folder).startswith("ended: data/tiny_val_000000.bin: its size changed")
    assert np.isfinite(train_losses(only_log(folder).read_text())).all()
