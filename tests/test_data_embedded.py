"""data/embedded_corpus.py in real processes: the default corpus, and anybody's text."""

import base64
import csv
import fcntl
import glob
import hashlib
import importlib.metadata
import os
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

DATA = Path(__file__).resolve().parent.parent / "data"
SCRIPT = DATA / "embedded_corpus.py"
TRAIN, VAL = "embedded_train_000001.bin", "embedded_val_000000.bin"

sys.path.insert(0, str(DATA))
import embedded_corpus  # noqa: E402


def run(script, *args, flags=(), prefix=(), **env):
    line = [*prefix, sys.executable, *flags, str(script), *map(os.fspath, args)]
    result = subprocess.run(line, env=os.environ | env, cwd="/", capture_output=True, text=True, timeout=60)
    result.lines = result.stderr.splitlines()
    return result


def assert_one_line(result, *words, code=2):
    assert (result.returncode, len(result.lines)) == (code, 1), result.stderr
    for word in words:
        assert word in result.lines[0]


def tokens_of(path):
    data = path.read_bytes()
    tokens = np.frombuffer(data, "<u2", offset=1024)
    assert data[:1024] == struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253)
    return tokens


def pieces_by_hand(documents):
    """The tokens of a training shard of these documents, by plain loops over them."""
    stream = [token for document in documents for token in [256, *document]]
    pieces = [[256, *stream[start : start + 511]] for start in range(0, len(stream), 511)]
    last = pieces.pop() if pieces and len(pieces[-1]) < 512 else []
    order = np.random.RandomState(0).permutation(len(pieces))
    return [token for number in order for token in pieces[number]] + last


def unshuffled(path):
    """The stream of tokens that a training shard was cut from."""
    tokens = tokens_of(path)
    full = len(tokens) // 512
    pieces = tokens[: full * 512].reshape(full, 512)
    in_order = np.empty_like(pieces)
    in_order[np.random.RandomState(0).permutation(full)] = pieces
    assert (pieces[:, 0] == 256).all() and (tokens[full * 512 :: 512] == 256).all()
    return np.concatenate([in_order[:, 1:].ravel(), tokens[full * 512 + 1 :]])


def documents_of(*paths):
    """The documents of shards as bytes: what stands between the document tokens."""
    streams = [unshuffled(path) if "_train_" in path.name else tokens_of(path) for path in paths]
    assert all(stream[0] == 256 for stream in streams)
    tokens = np.concatenate(streams)
    return [piece[1:].astype(np.uint8).tobytes() for piece in np.split(tokens, np.flatnonzero(tokens == 256)[1:])]


@pytest.fixture
def script(tmp_path):
    """A copy of the script in a data folder of its own, so that no test touches the user's shards."""
    return copy_script(tmp_path / "data")


def copy_script(folder):
    folder.mkdir()
    shutil.copy(DATA / "shards.py", folder)
    return Path(shutil.copy(SCRIPT, folder))


def content(folder):
    """Everything in the folder, hidden files too, except for the lock, which stays."""
    return sorted(set(os.listdir(folder)) - {".lock"})


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """The default corpus, made once."""
    script = copy_script(tmp_path_factory.mktemp("house") / "data")
    result = run(script)
    assert result.returncode == 0, result.stderr
    return script.parent / "embedded"


@pytest.fixture
def with_corpus(script, corpus):
    shutil.copytree(corpus, script.parent / "embedded")
    return script


# ---- The default corpus ----------------------------------------------------------------------------------------------


def test_the_corpus_is_what_the_design_says_of_the_wheel(corpus):
    torch, documents = importlib.metadata.distribution("torch"), {}
    for name, _, _ in csv.reader(torch.read_text("RECORD").splitlines()):
        left_out = re.match(r"torch/(version\.py$|testing/|_vendor/|sparse/_triton_ops_meta\.py$)", name)
        if re.fullmatch(r"torch/.*\.py", name) and not left_out and "serialized_patterns" not in name:
            text = re.sub(rb"\r\n", b"\n", Path(torch.locate_file(name)).read_bytes())
            if text:
                documents[hashlib.sha256(name.encode()).hexdigest()] = text
    order = sorted(documents)
    assert (len(order), sum(map(len, documents.values()))) == (2013, 39_380_222)
    validation = [documents[digest] for digest in order if digest < "08"]
    training = [documents[digest] for digest in order if digest >= "08"]
    assert (len(validation), sum(map(len, validation))) == (61, 1_428_068)
    assert (len(training), sum(map(len, training))) == (1952, 37_952_154)
    assert documents_of(corpus / VAL) == validation
    assert documents_of(corpus / TRAIN) == training
    assert tokens_of(corpus / TRAIN).tolist() == pieces_by_hand(training)


def test_the_shards_have_the_sha256_that_the_script_states(corpus):
    stated = re.findall(r'"(embedded_\w+\.bin)": "([0-9a-f]{64})"', SCRIPT.read_text())
    assert dict(stated) == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in corpus.glob("*.bin")}


def test_nothing_but_the_two_shards_is_left(corpus):
    assert content(corpus) == [TRAIN, VAL]


def test_good_shards_are_checked_without_torch_and_not_touched(with_corpus):
    before = {path: path.stat().st_mtime_ns for path in (with_corpus.parent / "embedded").iterdir()}
    result = run(with_corpus, flags=["-S"])  # -S: without site-packages
    assert (result.returncode, result.stderr) == (0, "")
    assert before == {path: path.stat().st_mtime_ns for path in (with_corpus.parent / "embedded").iterdir()}


@pytest.mark.parametrize("damaged", [TRAIN, VAL])
def test_one_wrong_byte_is_noticed_and_the_shard_made_again(with_corpus, corpus, damaged):
    path = with_corpus.parent / "embedded" / damaged
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    assert_one_line(run(with_corpus, flags=["-S"]), "torch is not installed")
    assert run(with_corpus).returncode == 0
    assert path.read_bytes() == (corpus / damaged).read_bytes()


def test_what_a_killed_process_left_is_cleared_away(with_corpus):
    folder = with_corpus.parent / "embedded"
    (folder / ".unfinished").mkdir()
    (folder / TRAIN).rename(folder / ".unfinished" / TRAIN)
    assert run(with_corpus).returncode == 0
    assert content(folder) == [TRAIN, VAL]


def test_of_several_processes_one_makes_the_corpus_and_the_others_wait(script):
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    processes = [subprocess.Popen([sys.executable, str(script)], **pipes) for _ in range(3)]
    errors = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], errors
    assert all(re.fullmatch("(another process is at work in .*: waiting for it\n)?", error) for error in errors)
    assert content(script.parent / "embedded") == [TRAIN, VAL]


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_make_no_difference(with_corpus, tmp_path, closed):
    prefix = ["sh", "-c", f'exec "$@" {closed}', "sh"]
    write_texts(tmp_path / "texts", 20)
    assert run(with_corpus, prefix=prefix).returncode == 0
    assert run(with_corpus, "--text", tmp_path / "texts", prefix=prefix).returncode == 0
    assert run(with_corpus, "--text", tmp_path / "nowhere", prefix=prefix).returncode == 2
    assert len(tokens_of(with_corpus.parent / "texts" / "texts_val_000000.bin")) > 6000


def test_ctrl_c_ends_in_one_line(script):
    (script.parent / "embedded").mkdir()
    with open(script.parent / "embedded" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen([sys.executable, str(script)], stderr=subprocess.PIPE, text=True)
        assert "waiting for it" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=20)
    assert (process.returncode, len(rest.splitlines())) == (130, 1)


def fake_torch(folder, version, files):
    """An installed torch as far as its metadata go: {name: (content, content as the wheel had it)}."""
    info = folder / f"torch-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    rows = []
    for name, (content, original) in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(original).digest()).decode().rstrip("=")
        rows.append(f"{name},sha256={digest},{len(original)}\n")
        if content is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    (info / "RECORD").write_text("".join(rows))
    return {"PYTHONPATH": str(folder)}


def test_line_ends_of_a_windows_wheel_make_no_difference(tmp_path):
    fake_torch(tmp_path, "2.13.0", {"torch/a.py": (b"a\r\nb\r\n", b"a\r\nb\r\n"), "torch/b.py": (b"", b"")})
    torch = importlib.metadata.Distribution.at(tmp_path / "torch-2.13.0.dist-info")
    documents, changed = embedded_corpus.torch_documents(torch)
    assert documents == [(hashlib.sha256(b"torch/a.py").digest(), b"a\nb\n")]
    assert changed == []


def test_a_torch_that_is_missing_or_another_version_is_reported(script, tmp_path):
    assert_one_line(run(script, flags=["-S"]), "torch is not installed", "pip install torch==2.13.0")
    env = fake_torch(tmp_path / "old", "2.12.1+cpu", {"torch/a.py": (b"a", b"a")})
    assert_one_line(run(script, **env), "2.12.1+cpu", "pip install torch==2.13.0")
    env = fake_torch(tmp_path / "conda", "2.13.0", {})
    assert_one_line(run(script, **env), "RECORD", "pip install torch==2.13.0")


@pytest.mark.parametrize("build", ["2.13.0", "2.13.0+cu130"])
def test_a_changed_or_missing_source_file_is_named(script, tmp_path, build):
    for content_of_b in (b"changed", None):
        files = {"torch/a.py": (b"a" * 3000, b"a" * 3000), "torch/b.py": (content_of_b, b"b")}
        result = run(script, **fake_torch(tmp_path / str(content_of_b), build, files))
        assert_one_line(result, "torch/b.py", "is not as published", "--force-reinstall")
        assert content(script.parent / "embedded") == []


def test_a_torch_with_other_files_is_reported(script, tmp_path):
    env = fake_torch(tmp_path / "torch", "2.13.0", {"torch/a.py": (b"a", b"a")})
    assert_one_line(run(script, **env), "other files", "--force-reinstall")


def test_a_disk_that_fills_up_ends_in_one_line_and_leaves_nothing(script):
    result = run(script, prefix=["sh", "-c", 'ulimit -f 20000; exec "$@"', "sh"])  # 10 MB
    assert_one_line(result, TRAIN, "File too large", "free some space")
    assert content(script.parent / "embedded") == []


# ---- Anybody's text --------------------------------------------------------------------------------------------------


def write_texts(folder, count, size=3000):
    """Texts with CRLF, no final newline and bytes that are no UTF-8; names that are no UTF-8; subfolders."""
    texts = {}
    for number in range(count):
        name = os.fsencode(f"{number % 3}/text {number}") + b"\xff.txt"
        texts[name] = (b"%d\r\n\xfe" % number * size)[:size]
        path = os.path.join(os.fsencode(folder), name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        Path(os.fsdecode(path)).write_bytes(texts[name])
    return [texts[name] for name in sorted(texts, key=lambda name: hashlib.sha256(name).digest())]


def command_of(result):
    """The arguments of the command that the script prints, as a shell would see them."""
    words = shlex.split(result.stdout.splitlines()[-1])
    assert words[0] == "./run.sh"
    return dict(zip(words[1::2], words[2::2], strict=True))


def test_every_file_becomes_a_document_and_the_last_tenth_is_validation(script, tmp_path):
    texts = write_texts(tmp_path / "my texts", 40)
    result = run(script, "--text", tmp_path / "my texts")
    assert result.returncode == 0, result.stderr
    folder = script.parent / "my_texts"
    assert content(folder) == ["my_texts_train_000001.bin", "my_texts_val_000000.bin"]
    training = documents_of(folder / "my_texts_train_000001.bin")
    validation = documents_of(folder / "my_texts_val_000000.bin")
    assert len(tokens_of(folder / "my_texts_val_000000.bin")) in (12_004, 12_005)  # one more if a document is divided
    if len(training) + len(validation) == 41:
        training[-1] += validation.pop(0)
    assert training + validation == texts


def test_the_same_folder_gives_the_same_shards(script, tmp_path):
    write_texts(tmp_path / "texts", 20)
    for out in ("one", "two"):
        assert run(script, "--text", tmp_path / "texts", "--out", tmp_path / out).returncode == 0
    for kind in ("train_000001", "val_000000"):
        assert (tmp_path / f"one/one_{kind}.bin").read_bytes() == (tmp_path / f"two/two_{kind}.bin").read_bytes()


def test_the_printed_command_finds_the_shards_and_its_val_tokens_fit(script, tmp_path):
    write_texts(tmp_path / "texts", 60)
    for out in ("data/texts", "odd [name] it's"):
        out = tmp_path / out
        command = command_of(run(script, "--text", tmp_path / "texts", "--out", out))
        found = [glob.glob(command[key], root_dir=tmp_path) for key in ("--train_files", "--val_files")]
        assert [[Path(path).name for path in paths] for paths in found] == [
            [f"{out.name}_train_000001.bin"],
            [f"{out.name}_val_000000.bin"],
        ]
        val_tokens, there = int(command["--val_tokens"]), len(tokens_of(out / f"{out.name}_val_000000.bin"))
        assert val_tokens % 1024 == 0
        assert val_tokens < there <= val_tokens + 1024
        assert (command["--vocab_size"], command["--document_token"]) == ("257", "256")


def test_a_single_document_is_divided(script, tmp_path):
    (tmp_path / "book").mkdir()
    text = bytes(range(1, 256)) * 400
    (tmp_path / "book" / "all.txt").write_bytes(text)
    assert run(script, "--text", tmp_path / "book").returncode == 0
    pieces = [documents_of(script.parent / "book" / f"book_{kind}.bin") for kind in ("train_000001", "val_000000")]
    assert [len(piece) for piece in pieces] == [1, 1]
    assert pieces[0][0] + pieces[1][0] == text
    assert len(text) // 10 <= len(pieces[1][0]) <= len(text) // 10 + 1


def test_long_text_becomes_several_shards_and_a_later_call_with_less_leaves_none_behind(script, tmp_path):
    texts = write_texts(tmp_path / "texts", 40)
    lines = f"import sys; sys.path.insert(0, {str(script.parent)!r}); import embedded_corpus as it; "
    lines += "it.MAX_SHARD_TOKENS = 25_000; it.run(it.main)"
    subprocess.run([sys.executable, "-c", lines, "--text", str(tmp_path / "texts")], check=True, capture_output=True)
    folder = script.parent / "texts"
    shards = sorted(folder.glob("texts_train_*.bin"))
    assert [path.name[-10:] for path in shards] == [f"{number:06d}.bin" for number in range(1, 6)]
    assert all(25_000 - 2 * 256 < len(tokens_of(path)) <= 25_000 for path in shards[:-1])
    assert b"".join(documents_of(*shards, folder / "texts_val_000000.bin")) == b"".join(texts)
    for path in shards:
        assert tokens_of(path).tolist() == pieces_by_hand(documents_of(path))
    assert run(script, "--text", tmp_path / "texts").returncode == 0
    assert content(folder) == ["texts_train_000001.bin", "texts_val_000000.bin"]


def test_what_is_no_text_is_left_out_and_counted(script, tmp_path):
    texts = write_texts(tmp_path / "texts", 40)
    odd = tmp_path / "texts" / "odd"
    (odd / ".git").mkdir(parents=True)
    (odd / ".git" / "object").write_bytes(b"hidden")
    (odd / ".hidden").write_bytes(b"hidden")
    (odd / "empty").write_bytes(b"")
    (odd / "picture").write_bytes(b"PNG\0\1\2")
    (odd / "link").symlink_to("/etc/passwd")
    (odd / "dangling").symlink_to("nowhere")
    (odd / "circle").symlink_to(tmp_path / "texts")
    os.mkfifo(odd / "pipe")
    result = run(script, "--text", tmp_path / "texts")
    assert result.returncode == 0, result.stderr
    assert "left out 8 of 48" in result.stdout
    assert b"".join(documents_of(*sorted((script.parent / "texts").glob("*.bin")))) == b"".join(texts)


def test_a_file_that_may_not_be_read_is_named(script, tmp_path):
    prefix = []
    if os.geteuid() == 0:  # root may read everything unless it gives that up
        if not shutil.which("setpriv"):
            pytest.skip("root without setpriv cannot meet an unreadable file")
        prefix = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"]
    write_texts(tmp_path / "texts", 3)
    (tmp_path / "texts" / "secret").write_text("x")
    (tmp_path / "texts" / "secret").chmod(0)
    assert_one_line(run(script, "--text", tmp_path / "texts", prefix=prefix), "texts/secret", "Permission denied")


def test_text_that_cannot_become_shards_is_reported(script, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "little").mkdir()
    (tmp_path / "little" / "note").write_text("hello")
    (tmp_path / "embedded").mkdir()
    assert_one_line(run(script, "--text", tmp_path / "nowhere"), "nowhere", "no such folder")
    assert_one_line(run(script, "--text", tmp_path / "little" / "note"), "note", "a file", "the folder")
    assert_one_line(run(script, "--text", tmp_path / "empty"), "empty", "no text file")
    assert_one_line(run(script, "--text", tmp_path / "little"), "little", "5 bytes", "3,074")
    assert_one_line(run(script, "--text", tmp_path / "embedded"), "embedded", "--out")
    assert_one_line(run(script, "--out", tmp_path / "out"), "--out", "--text")
    assert_one_line(run(script, "--nonsense"), "--nonsense")
    assert {path.name for path in script.parent.iterdir()} <= {script.name, "shards.py", "__pycache__"}


@pytest.mark.parametrize(("size", "val_tokens"), [(3_073, "1024"), (10_300, "1024"), (25_000, "2048")])
def test_a_small_folder_gets_shards_that_hold_a_batch_and_a_sequence_to_validate_on(script, tmp_path, size, val_tokens):
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "note").write_bytes(b"x" * size)
    result = run(script, "--text", tmp_path / "small")
    assert result.returncode == 0, result.stderr
    assert command_of(result)["--val_tokens"] == val_tokens
    assert len(tokens_of(script.parent / "small" / "small_train_000001.bin")) > 2048
    assert len(tokens_of(script.parent / "small" / "small_val_000000.bin")) > int(val_tokens)


def test_files_that_are_both_in_training_and_validation_get_a_warning(script, tmp_path):
    write_texts(tmp_path / "texts", 40)
    assert run(script, "--text", tmp_path / "texts").stderr == ""
    shutil.copytree(tmp_path / "texts", tmp_path / "texts" / "copy")
    result = run(script, "--text", tmp_path / "texts")
    assert result.returncode == 0
    assert_one_line(result, "warning", "the same bytes", code=0)
    validation = documents_of(script.parent / "texts" / "texts_val_000000.bin")
    training = documents_of(script.parent / "texts" / "texts_train_000001.bin")
    both = sum(text in training for text in validation)
    assert f" and {both - 1} more" in result.stderr or f" and {both} more" in result.stderr  # one may be divided


@given(st.lists(st.binary(min_size=1, max_size=600), max_size=5))
@example([b"x" * 254])  # one full piece and nothing left
def test_pieces_are_those_of_a_plain_loop_whatever_the_lengths(documents):
    stream = embedded_corpus.stream_of([document] for document in documents)
    assert embedded_corpus.shuffled_pieces(stream).tolist() == pieces_by_hand(documents)


@given(st.lists(st.integers(1, 50), max_size=8), st.integers(0, 300))
def test_a_cut_fills_exactly_the_tokens_and_loses_no_byte(sizes, tokens):
    documents = [(str(index), 0, size) for index, size in enumerate(sizes)]
    taken, rest = embedded_corpus.cut(documents, tokens)
    everything = [(name, byte) for name, start, end in documents for byte in range(start, end)]
    assert [(name, byte) for name, start, end in taken + rest for byte in range(start, end)] == everything
    used = sum(1 + end - start for _, start, end in taken)
    # All that fit; one token stays free where a document would get its token and not a byte
    assert used <= tokens and (not rest or used >= tokens - 1)
    assert all(start < end for _, start, end in taken + rest)
