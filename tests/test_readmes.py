"""What the READMEs say: their commands work, their generated parts are those of the logs, their names exist."""

import ast
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from records_helpers import NEW, OLD, ROOT, add_record, good_logs, tool

from records.curves import SCHEMES, palette
from rehearsal import calibration, predict, readings

PAGES = sorted(
    [*ROOT.glob("*.md"), ROOT / "rehearsal/README.md", *(ROOT / "records").glob("*.md"), *ROOT.glob("records/*/*.md")]
)
README = (ROOT / "README.md").read_text()
RECORDS = sorted(path.parent for path in (ROOT / "records").glob("*/train_gpt.py"))

# ---- Commands --------------------------------------------------------------------------------------------------------
COMMAND = re.compile(r"(?:[A-Z]+=\S+ )?(?:\./run\.sh|python|torchrun|sbatch|git|cp|mkdir|pip|\.)(?= |$)")

# Executed below, with the exit code that they have in a fresh copy of the repository.
FAST = {
    r"python -m records( (list|diff|check|compare|extract|plot|page|export|readme)( .*)?)?": 0,
    r"python -m rehearsal\.calibration": 0,
    r"python data/embedded_corpus\.py --text ~/my_texts": 0,
    r"python data/cached_fineweb10B\.py 10 --check": 1,  # nothing has been downloaded
    r"\./run\.sh --help": 0,
}
# Executed by another test.
ELSEWHERE = {
    r"(mkdir|cp) .*": "test_contributing.py",
    r"python -m records (check|compare|diff) .*FewerIterations.*": "test_contributing.py",
    r"python -m rehearsal\.calibration --keep NAME report\.json": "test_prediction.py",
    r"\./run\.sh --train_files \.\.\.": "test_data_embedded.py",
}
# These set up, train, rehearse or test for many seconds up to hours. They are run by hand, and their flags are checked.
BY_HAND = [
    r"git clone <this repository> speedrun && cd speedrun",
    r"\. \.venv/bin/activate",
    r"pip install -r requirements-dev\.txt",
    r"(PROCESSES=\d )?\./run\.sh( --.*)?",
    r"\./run\.sh (records/)?[\w-]+( --(seed|num_iterations) \d+)?",  # setup, bench and test are among these, too
    r"\./run\.sh (test|bench|rehearse) .*",
    r"python train_gpt\.py",
    r'python sample\.py latest --prompt "def forward\("',
    r"python -m records (race|measure) .*",
    r"torchrun .*",
    r"sbatch slurm\.sh",
]


def commands(page: Path) -> list[str]:
    """The commands of a page's code blocks, after $ where a block shows output too; and those within its text."""
    text, found = page.read_text(), []
    for block in re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        lines = block.splitlines()
        if any(line.startswith("$ ") for line in lines):
            found += [line[2:] for line in lines if line.startswith("$ ")]
        elif COMMAND.match(lines[0]):
            found += filter(None, lines)
    prose = re.sub(r"^```\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    found += [code for code in re.findall(r"`([^`\n]+)`", prose) if COMMAND.match(code) and " " in code]
    return [re.split(r"  +# |    +", line)[0].strip() for line in found]


def matching(command: str, patterns) -> list[str]:
    return [pattern for pattern in patterns if re.fullmatch(pattern, command)]


EVERY = {command: page for page in PAGES for command in commands(page)}


def executed() -> list[tuple[str, int]]:
    chosen = [command for command in EVERY if not matching(command, ELSEWHERE)]
    return [(command, FAST[pattern]) for command in chosen for pattern in matching(command, FAST)]


def test_every_command_is_executed_by_a_test_or_known_to_be_run_by_hand():
    assert len(PAGES) > 12 and len(EVERY) > 50
    known = [*FAST, *ELSEWHERE, *BY_HAND]
    assert [(str(page), command) for command, page in EVERY.items() if not matching(command, known)] == []
    assert [pattern for pattern in known if not any(re.fullmatch(pattern, command) for command in EVERY)] == []
    assert all((ROOT / "tests" / name).is_file() for name in ELSEWHERE.values())


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """A copy of the repository, a clone of a public one beside it, and somebody's texts."""
    folder = tmp_path_factory.mktemp("readmes")
    left_out = (".git", ".venv", "logs", "checkpoints", "__pycache__", "*.bin")
    shutil.copytree(ROOT, folder / "speedrun", ignore=shutil.ignore_patterns(*left_out))
    home = folder / "speedrun/public/records"
    for name, script in (("20_First", OLD), ("22_Second/baseline", OLD), ("22_Second/this_pr", NEW)):
        add_record(home / "track_1_short", f"2026-03-{name}", good_logs(source=script), script=script)
    add_record(home / "track_2_medium", "2026-01-01_Medium", good_logs((2.91, 2.915, 2.912), target=2.92))
    (folder / "my_texts").mkdir()
    for number in range(20):
        (folder / f"my_texts/{number}.txt").write_text(f"Text number {number}. " * 200)
    return folder


@pytest.mark.parametrize("command, code", executed(), ids=lambda value: str(value)[:60])
def test_a_fast_command_does_what_it_is_shown_for(copy, command, code):
    log = next((ROOT / "records/2025-01-04_SoftCap").glob("*.txt")).relative_to(ROOT)
    real = command.replace("extract LOG", f"extract {log}").replace("MyIdea", "BlockWindow")
    environment = os.environ | dict(HOME=str(copy), VENV=sys.prefix, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", real], cwd=copy / "speedrun", env=environment, capture_output=True, text=True, timeout=120
    )
    if "--tensorboard" in command and done.returncode == 2:
        assert "tensorboard" in done.stderr and done.stderr.count("\n") == 1  # it is not among the requirements
        return
    assert done.returncode == code and done.stdout and "Traceback" not in done.stderr, (done.stdout, done.stderr)


@pytest.mark.parametrize("command", [command for command in EVERY if " --" in command and "-m records" not in command])
def test_the_flags_of_the_commands_exist(command):
    words = shlex.split(command)
    given = [word.partition("=")[0] for word in words if word.startswith("--")]
    settings = [f"--{name}" for name in readings.settings_of((ROOT / "train_gpt.py").read_text())]
    others = {"rehearse": "rehearsal/__main__.py", "bench": "bench.py", "test": "run.sh", "sample.py": "sample.py"}
    others |= {
        "data/embedded_corpus.py": "data/embedded_corpus.py",
        "rehearsal.calibration": "rehearsal/calibration.py",
        "rehearsal/attention_alone.py": "rehearsal/attention_alone.py",
    }
    others |= {"data/cached_fineweb10B.py": "data/cached_fineweb10B.py"}
    tools = [(ROOT / path).read_text() for word, path in others.items() if word in words]
    of_torchrun = {"--standalone", "--nproc_per_node", "--nnodes", "--rdzv_backend", "--rdzv_endpoint"}
    known = {*settings, "--help", *(of_torchrun if words[0] == "torchrun" else ())}
    assert given and [flag for flag in given if flag not in known and not any(flag in text for text in tools)] == []


@pytest.mark.parametrize("name", ["README.md", "slurm.sh"])
def test_a_batch_of_shorter_sequences_has_as_many_tokens_as_the_records(name):
    record = readings.settings_of((ROOT / "train_gpt.py").read_text())
    lines = (ROOT / name).read_text().splitlines()
    found = [dict(re.findall(r"--(batch_sequences|sequence_length) (\d+)", line)) for line in lines]
    tokens = [int(cut["batch_sequences"]) * int(cut["sequence_length"]) for cut in found if len(cut) == 2]
    assert len(tokens) > 1 and set(tokens) == {record["batch_sequences"] * record["sequence_length"]}


# ---- Generated parts -------------------------------------------------------------------------------------------------


def test_the_tables_and_the_picture_are_up_to_date():
    assert "up to date" in tool("readme", "--check").out, "python -m records readme writes them"


def rows_of(table: str) -> list[list[str]]:
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_front_table_has_measured_published_and_predicted_times_of_every_record():
    table = README.partition("<!-- records: python -m records readme -->")[2].partition("<!-- end of records -->")[0]
    heading, *rows = rows_of(table)
    assert [cell.partition(":")[0] for cell in heading] == ["record", "measured", "measured", "published", "predicted"]
    assert [row[0] for row in rows] == [f"[{x.name}](records/{x.name})" for x in reversed(RECORDS)]
    for folder, (_, seconds, loss, published, predicted) in zip(reversed(RECORDS), rows, strict=True):
        script = (folder / "train_gpt.py").read_text()
        assert published.removesuffix(" min") in script.partition("Published: ")[2][:30]
        ends = [re.findall(r"^step:(\d+)/\1 val_loss:(\S+) train_time:(\d+)ms", path.read_text(), re.MULTILINE)[-1]
                for path in folder.glob("*.txt")]  # fmt: skip
        if ends:
            times = [int(milliseconds) / 1000 for _, _, milliseconds in ends]
            assert seconds == f"{statistics.mean(times):.1f} ± {statistics.stdev(times):.1f} s"
            losses = [float(loss) for _, loss, _ in ends]
            assert loss == f"{statistics.mean(losses):.4f} ± {statistics.stdev(losses):.4f}"
        else:
            assert (seconds, loss) == ("not measured yet", "")
        counts = calibration.FOLDER / f"{folder.name}.json"
        if counts.is_file():
            step = sum(predict.mean_seconds(calibration.counts_of(folder.name)).values())
            steps = readings.settings_of(script)["num_iterations"]
            assert float(predicted.split()[0]) == pytest.approx(step * steps / 60, abs=0.006)
        else:
            assert predicted == "not predicted yet"
        if found := re.search(r"error ([-+.\d]+)%", predicted):
            known = calibration.PUBLISHED.get(folder.name)
            published_step = known.mean if known else 60_000 * float(published.split()[0]) / steps
            assert float(found[1]) == pytest.approx(100 * (1000 * step / published_step - 1), abs=0.06)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_picture_shows_every_measured_record_in_colours_that_the_background_does_not_swallow(scheme):
    picture = ElementTree.fromstring((ROOT / f"records/curves-{scheme}.svg").read_text())
    space = "{http://www.w3.org/2000/svg}"
    measured = [folder.name.partition("_")[2] for folder in RECORDS if any(folder.glob("*.txt"))]
    told = [text.text for text in picture.iter(f"{space}text")]
    assert [name for name in measured if name not in told] == []
    lines = [line.get("stroke") for line in picture.iter(f"{space}polyline")]
    assert len(lines) == len(measured) and len(set(lines)) == min(len(lines), 8)
    words = {text.get("fill") for text in picture.iter(f"{space}text")}
    background = {"light": "#ffffff", "dark": "#0d1117"}[scheme]  # GitHub's
    assert min(contrast(colour, background) for colour in words) > 4.5  # WCAG, for text
    assert min(contrast(colour, background) for colour in lines) > 3  # and for what is drawn
    assert set(lines) <= set(palette(scheme).values())


def contrast(a: str, b: str) -> float:
    """By the definition of WCAG 2.1."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted([luminance(a), luminance(b)])
    return (high + 0.05) / (low + 0.05)


def test_both_pictures_are_where_the_readme_shows_them():
    shown = re.findall(r'(?:srcset|src)="(\S+)"', README)
    assert shown == ["records/curves-dark.svg", "records/curves-light.svg"]
    assert all((ROOT / path).is_file() for path in shown)


def make_house(folder: Path) -> Path:
    """A repository with one measured record and one without logs."""
    data = '[{"file": "embedded_train_000001.bin", "tokens": 100, "sha256": "ab12"}]'
    source = '"""Published: 3.00 minutes on 8 H100s."""\n'
    logs = good_logs((1.01, 1.02, 1.015), target=1.04, milliseconds=40_000, source=source, data=data)
    add_record(folder / "records", "2026-01-01_One", logs, script=source)
    add_record(folder / "records", "2026-01-02_Two", [], script=source)
    for path, name in (
        ("README.md", "records"),
        ("records/README.md", "records"),
        ("records/2026-01-01_One/README.md", "runs"),
        ("records/2026-01-02_Two/README.md", "runs"),
    ):
        (folder / path).write_text(
            f"before\n<!-- {name}: python -m records readme -->\nold\n<!-- end of {name} -->\nafter"
        )
    return folder / "records"


def test_new_logs_are_in_the_readmes_after_one_command(tmp_path):
    home = make_house(tmp_path)
    assert tool("readme", "--check", "--records", home, code=1).out.count("out of date") == 6
    tool("readme", "--records", home)
    assert tool("readme", "--check", "--records", home).out == "6 files up to date\n"
    front = (tmp_path / "README.md").read_text()
    assert front.startswith("before\n") and front.endswith("\nafter") and "old" not in front
    assert "| [2026-01-02_Two](records/2026-01-02_Two) | not measured yet |  | 3.00 min | not predicted yet |" in front
    assert "| 40.0 ± 0.0 s | 1.0150 ± 0.0050 | 3.00 min |" in front
    runs = (home / "2026-01-01_One/README.md").read_text()
    assert "| 2 | 1,390 | 1.0200 | 40.0 s | [0001](0001.txt) |" in runs
    assert "Not measured yet." in (home / "2026-01-02_Two/README.md").read_text()
    (home / "2026-01-01_One/0002.txt").unlink()
    tool("readme", "--records", home)
    assert "| 40.0 ± 0.0 s | 1.0150 ± 0.0071 |" in (tmp_path / "README.md").read_text()


def test_a_readme_without_its_markers_is_named_and_nothing_is_written(tmp_path):
    home = make_house(tmp_path)
    (home / "2026-01-02_Two/README.md").write_text("# Two\n")
    told = tool("readme", "--records", home, code=2).err
    assert told.startswith("records: ") and "2026-01-02_Two/README.md: needs the lines <!-- runs: " in told
    assert "old" in (tmp_path / "README.md").read_text() and not (home / "curves-light.svg").exists()


# ---- Names and links -------------------------------------------------------------------------------------------------


def names_in(source: str) -> set[str]:
    """The script's top-level names, and its methods as Class.method."""
    found = set()
    for node in ast.parse(source).body:
        targets = [target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)]
        found |= {*targets, *([node.name] if hasattr(node, "name") else [])}
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
    return found


def test_every_idea_is_where_the_readme_says_and_came_with_the_record_that_it_names():
    table = README.partition("| idea | in `train_gpt.py`")[2].partition("\n\n")[0]
    rows = rows_of(table)[1:]
    known = names_in((ROOT / "train_gpt.py").read_text())
    told = [name for _, places, _ in rows for name in re.findall(r"`([\w.]+)`", places)]
    assert len(rows) > 12 and len(told) >= len(rows)
    assert [name for name in told if name not in known] == []
    records = {folder.name.partition("_")[2] for folder in RECORDS}
    assert [since for _, _, since in rows if since and since not in records] == []


def anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_are_there(page):
    if page.name == "TEMPLATE.md":
        pytest.skip("its links are examples")
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, place = link.partition("#")
        if "://" in link:
            continue
        goal = page.parent / path if path else page
        assert goal.exists(), link
        if place:
            headings = re.findall(r"^#+ (.*)$", goal.joinpath("README.md" if goal.is_dir() else "").read_text(), re.M)
            assert place in map(anchor, headings), link
