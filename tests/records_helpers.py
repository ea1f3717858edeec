"""What the tests of the records tool share: the tool itself, and logs as the field writes them."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from records.__main__ import main  # noqa: E402

RULER = "=" * 100
PUBLISHED = [float(line) for line in (ROOT / "tests/fixtures/softcap_losses.txt").read_text().splitlines()[1:]]

# A script that quotes a log: its lines must never be taken for results.
SOURCE = '''"""Train. A log looks like this:

step:1390/1390 val_loss:1.0000 train_time:1ms step_avg:1.00ms
"""
import torch

print0(f"step:{step}/{total} val_loss:{val_loss:.4f} train_time:{ms}ms")
# val_loss:0.5
'''


def tool(*arguments, cwd=ROOT, code=0):
    """Run the tool's main() in this process, which is quick; what it printed."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    before = os.getcwd()
    os.chdir(cwd)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main([str(argument) for argument in arguments])
    finally:
        os.chdir(before)
    raw, errors = out.buffer.getvalue(), err.buffer.getvalue().decode()
    assert status == code, (status, raw, errors)
    return SimpleNamespace(out=raw.decode(), err=errors, raw=raw)


def start_tool(*arguments, cwd=ROOT, **environment):
    """Start the tool as its user does, as a process of its own."""
    command = [sys.executable, "-m", "records", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run_tool(*arguments, code=0, **options):
    process = start_tool(*arguments, **options)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, (process.returncode, out, err)
    assert "Traceback" not in err
    return SimpleNamespace(out=out, err=err)


def build_log(loss=3.2785, seed=1234, target=3.28, milliseconds=204345, steps=1390, source=SOURCE, **changes):
    """A log as train_gpt.py writes it: four validations, a few training steps between."""
    facts = {
        "python": "3.11.7 (main) [GCC 12.2.0]",
        "torch": "2.13.0",
        "cuda": "12.6",
        "hardware": "Some CPU, 2 cores",
        "world_size": 2,
        "seed": seed,
        "settings": json.dumps({"seed": seed, "num_iterations": steps, "target_loss": target}),
        "data": json.dumps([{"file": "train.bin", "tokens": 100, "sha256": "ab12"}]),
        **changes,
    }
    lines = [source.removesuffix("\n"), RULER, *(f"{name}: {fact}" for name, fact in facts.items()), RULER]
    for quarter in range(5):
        step, at = steps * quarter // 4, milliseconds * quarter // 4
        here = loss * (10 - 9 * quarter / 4) ** 0.5 if quarter < 4 else loss
        if quarter:
            lines.append(f"step:{step}/{steps} train_loss:{here + 0.02:.4f} train_time:{at}ms step_avg:148.08ms")
        lines.append(f"step:{step}/{steps} val_loss:{here:.4f} train_time:{at}ms step_avg:148.08ms")
    return "\n".join([*lines, "peak memory: 31563 MiB", ""])


def add_record(home, name, logs, script=SOURCE):
    folder = home / name
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(f"# {name}\n")
    if script is not None:
        (folder / "train_gpt.py").write_text(script)
    for number, log in enumerate(logs):
        (folder / f"{number:04}.txt").write_text(log)
    return folder


def add_logs(folder, logs):
    paths = [folder / f"{number:04}.txt" for number in range(len(logs))]
    for path, log in zip(paths, logs, strict=True):
        path.write_text(log)
    return paths


def good_logs(losses=(3.2751, 3.2763, 3.2758, 3.2747, 3.2769), **changes):
    milliseconds = changes.pop("milliseconds", 204345)
    return [build_log(loss, seed, milliseconds=milliseconds + seed, **changes) for seed, loss in enumerate(losses, 1)]


NVIDIA_SMI = """Sat Jan  4 06:11:07 2025
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 550.90.07              Driver Version: 550.90.07      CUDA Version: 12.6     |
|-----------------------------------------+------------------------+----------------------+
|   0  NVIDIA H100 80GB HBM3          On  |   00000000:19:00.0 Off |                    0 |
| N/A   38C    P0            121W /  700W |    7750MiB /  81559MiB |      0%      Default |
|   1  NVIDIA H100 80GB HBM3          On  |   00000000:3B:00.0 Off |                    0 |
| N/A   29C    P0            113W /  700W |    3454MiB /  81559MiB |      0%      Default |
+-----------------------------------------------------------------------------------------+
"""
HEADER = f"Running Python 3.12.7\nRunning PyTorch 2.6.0.dev20241231+cu126 compiled for CUDA 12.6\n{NVIDIA_SMI}"
STEPS = """step:0/1390 val_loss:10.8258 train_time:0ms step_avg:nanms
step:1/1390 train_time:23514ms step_avg:nanms
step:11/1390 train_time:1425ms step_avg:142.51ms
step:125/1390 val_loss:4.3777 train_time:17024ms step_avg:148.03ms
step:1389/1390 train_time:204197ms step_avg:148.07ms
step:1390/1390 val_loss:3.2785 train_time:204345ms step_avg:148.08ms
peak memory allocated: 31563 MiB reserved: 32000 MiB
"""
SHAPES = {
    "source in front": f"{SOURCE}{RULER}\n{HEADER}{RULER}\n{STEPS}",
    "source in front, printed with a blank line": f"{SOURCE}\n{RULER}\n{HEADER}\n{RULER}\n{STEPS}",
    "source between": f"{RULER}\n{SOURCE}{RULER}\n{HEADER}{RULER}\n{STEPS}",
    "source between, something before": f"{HEADER}{RULER}\n{SOURCE}{RULER}\n{STEPS}",
    "no header": f"{SOURCE}{RULER}\n{STEPS}",
    "console output": STEPS,
    "training losses": f"{SOURCE}{RULER}\n{STEPS}".replace("train_time", "train_loss:3.3 train_time"),
    "seconds": f"{SOURCE}{RULER}\n" + re.sub(r"(\d+)(\d{3})ms step", r"\1.\2s step", STEPS),
    "five decimals": f"{SOURCE}{RULER}\n{STEPS}".replace("3.2785 ", "3.27850 "),
    "extra fields": f"{SOURCE}{RULER}\n"
    + STEPS.replace(" train_time", " lr:1.0e-03 train_time").replace("ms\n", "ms tok/s:3.5M\n"),
    "other separators": f"{SOURCE}{RULER}\n"
    + STEPS.replace(" val_loss:", " | val_loss: ").replace(" train", ", train"),
    "time before loss": f"{SOURCE}{RULER}\n" + re.sub(r"(val_loss:\S+) (train_time:\S+)", r"\2 \1", STEPS),
    "CRLF": f"{SOURCE}{RULER}\n{HEADER}{RULER}\n{STEPS}".replace("\n", "\r\n"),
    "cut after the last result": f"{SOURCE}{RULER}\n{STEPS}".split("\npeak")[0],
    "ours": build_log().replace("val_loss:32.785 ", "val_loss:10.8258 "),
}

# Two versions of a script with headings.
BOX = "# " + "-" * 60
OLD = f'''"""Old words."""
import torch

{BOX}
# Muon: momentum made orthogonal
{BOX}


def step(x):  # take a step
    return x * 0.95 + 1


{BOX}
# Model: a GPT
{BOX}


class GPT:
    """The model."""

    softcap = 30
    text = """one

    # not a comment
    """
'''
NEW = OLD.replace("Old words", "New words").replace("softcap = 30", "softcap = 15").replace("# take a step", "# go on")

FAKE = '''"""A training that only pretends: its loss falls with the steps, its clock and its end have some noise."""
import argparse, json, pathlib, random, time, uuid

MS_PER_STEP, FINAL, NOISE = 100.0, 3.27, 1.0
parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--target_loss", type=float, default=3.28)
parser.add_argument("--sleep", type=float, default=0.0)
parser.add_argument("--fail", action="store_true")
settings = parser.parse_args()
if settings.fail:
    raise SystemExit("--fail was asked for")
source = pathlib.Path(__file__).read_text()
same = random.Random(settings.seed)  # what a seed brings is alike in both scripts of a pair
own = random.Random(f"{settings.seed} {source}")
final = FINAL + NOISE * (same.gauss(0, 0.003) + own.gauss(0, 0.0005))
ms = MS_PER_STEP * (1 + NOISE * (same.gauss(0, 0.05) + own.gauss(0, 0.002)))
log = pathlib.Path("logs") / f"{uuid.uuid4()}.txt"
log.parent.mkdir(exist_ok=True)
with open(log, "w") as file:
    file.write(source + "=" * 100 + f"\\nhardware: none\\nseed: {settings.seed}\\n")
    file.write(f"settings: {json.dumps(vars(settings))}\\n" + "=" * 100 + "\\n")
    for step in range(0, 101, 5):
        time.sleep(settings.sleep)
        file.write(f"step:{step}/100 val_loss:{final + (100 - step) / 500:.4f} train_time:{ms * step:.0f}ms\\n")
        file.flush()
'''


def fake_script(folder, name, ms=100.0, final=3.27, noise=1.0):
    """FAKE with other figures."""
    usual = "MS_PER_STEP, FINAL, NOISE = 100.0, 3.27, 1.0"
    assert usual in FAKE
    source = FAKE.replace(usual, f"MS_PER_STEP, FINAL, NOISE = {ms}, {final}, {noise}")
    path = folder / name
    path.write_text(source + f"# {name}\n")
    return path


def table_row(text, name):
    line = next(line for line in text.splitlines() if line.startswith(name))
    return re.split(r" {2,}", line.strip())
