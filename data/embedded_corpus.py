"""
Byte-token shards without the network.

    python data/embedded_corpus.py               # the default corpus -> data/embedded/ (79 MB)
    python data/embedded_corpus.py --text DIR    # any folder of text -> data/<name of DIR>/
    python data/embedded_corpus.py --text DIR --out FOLDER

The default corpus is the Python source inside the pinned torch wheel: 2,013 documents, 39,380,222 bytes, the same on
every platform. Its shards are compared with the sha256 below at every call and made again where they differ; good
shards need no torch at all.

With --text every file below DIR is a document, byte for byte. Left out, and counted: hidden, empty and binary files
(a zero byte in the first 64 KiB), links, and what is no regular file. The documents are ordered by the sha256 of their
name; the last tenth (at least 1,025 tokens, at most 10 MiB) is validation. A document that lies across that line, or
across the end of a shard (100M tokens), is divided there.

A shard is 256 int32 (20240520, 1, number of tokens, zeros), then the tokens as uint16. Token 256 starts a document.
Documents are longer than a batch, so training shards are cut into pieces: runs of 255 tokens, each with token 256 in
front, shuffled once and for all; a shorter last one stays at the end. Validation keeps whole documents in their order.
"""

import argparse
import base64
import csv
import errno
import fcntl
import glob
import hashlib
import importlib.metadata
import os
import re
import shlex
import struct
import sys
from contextlib import contextmanager
from pathlib import Path

MAGIC, VERSION, HEADER_BYTES, TOKEN_BYTES = 20240520, 1, 1024, 2
DOCUMENT_TOKEN = 256
MAX_SHARD_TOKENS = 100_000_000  # as FineWeb's
PIECE_TOKENS = 256  # of training shards, the document token in front included

PINNED_TORCH = "2.13.0"
LEFT_OUT = ("torch/version.py", "torch/testing/", "torch/_vendor/", "torch/sparse/_triton_ops_meta.py")
SHA256 = {
    "embedded_train_000001.bin": "cd629f56f9b8e01b43c10e5a162debbef76b2f655849dadbd5f4e030be884e22",
    "embedded_val_000000.bin": "63672a6c7147f003c2b989eab5c6645ca6fdb82e9f829ca1050d5f38587c975f",
}

HERE = Path(__file__).resolve().parent


# ---------------------------------------------------------------------------------------------------------------------
# Shared with cached_fineweb10B.py: how a script ends, one process per folder, a file's digest
# ---------------------------------------------------------------------------------------------------------------------


class Problem(Exception):
    """What a user can mend: one line that names the file, setting or value and says what to do."""


def one_line_parser(doc):
    """An argument parser with the docstring as its help, whose complaints are Problems."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(message):
        raise Problem(f"{message} (--help shows the usage)")

    parser.error = error
    return parser


def run_script(main):
    """Exit with main()'s code; 2 and one line for what a user can mend, 130 and one line for Ctrl-C."""
    sys.stdout.reconfigure(errors="backslashreplace")  # a file's name need not be UTF-8
    line = ""
    try:
        code = main() or 0
    except KeyboardInterrupt:
        line, code = "interrupted; the same call again finishes the job", 130
    except Problem as problem:
        line, code = str(problem), 2
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        advice = "free some space or choose another folder" if full else "check the path and its permissions"
        line, code = f"{error.filename or 'writing'}: {error.strerror or error}; {advice}", 2
    if line:
        print(f"{Path(sys.argv[0]).name}: {' '.join(line.split())}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # not sys.exit: that waits for threads, and one may sit in a connect or read for minutes


@contextmanager
def one_process(folder):
    """Hold FOLDER/.lock: one process works, the others wait. The kernel frees the lock of a killed process."""
    folder.mkdir(parents=True, exist_ok=True)
    path, told = folder / ".lock", False
    while True:
        with open(path, "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not told:
                    print(f"another process is at work in {folder}: waiting for it", file=sys.stderr, flush=True)
                told = True
                fcntl.flock(lock, fcntl.LOCK_EX)
            # Its holder removes the file when done, so this may be the lock of a file that is gone: then once more
            if is_named(lock, path):
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return


def is_named(file, path):
    """Is this open file the one that now has this name?"""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# Shards
# ---------------------------------------------------------------------------------------------------------------------


def temporary(path):
    return path.with_name(f".{path.name}.tmp")


def stream_of(documents):
    """The tokens of documents (each an iterable of bytes), with the document token before each."""
    import numpy as np

    parts = []
    for document in documents:
        parts.append(struct.pack("<H", DOCUMENT_TOKEN))
        parts.extend(np.frombuffer(chunk, np.uint8).astype("<u2") for chunk in document)
    return np.frombuffer(b"".join(parts), "<u2")


def shuffled_pieces(stream):
    """Cut a stream into pieces of 256 tokens: the document token and the next 255. The full ones are shuffled, always
    in the same way (numpy keeps RandomState's results for ever); what is left at the end is the last, shorter piece."""
    import numpy as np

    run = PIECE_TOKENS - 1
    count, rest = divmod(len(stream), run)
    full_runs = stream[: count * run].reshape(count, run)
    tokens = np.full(len(stream) + count + bool(rest), DOCUMENT_TOKEN, "<u2")
    full_pieces = tokens[: count * PIECE_TOKENS].reshape(count, PIECE_TOKENS)
    full_pieces[:, 1:] = full_runs[np.random.RandomState(0).permutation(count)]
    tokens[count * PIECE_TOKENS + 1 :] = stream[count * run :]
    return tokens


def write_shard(path, documents, training):
    """Write a shard of documents under its temporary name; returns its number of tokens."""
    tokens = shuffled_pieces(stream_of(documents)) if training else stream_of(documents)
    try:
        with open(temporary(path), "wb") as file:
            file.write(struct.pack("<3i", MAGIC, VERSION, len(tokens)).ljust(HEADER_BYTES, b"\0"))
            file.write(tokens)
    except OSError as error:
        error.filename = error.filename or str(path)  # a failed write does not name its file
        raise
    return len(tokens)


def put_in_place(folder, paths):
    """Give finished shards their names; shards of an earlier call that had more of them go."""
    for path in paths:
        os.replace(temporary(path), path)
    for path in set(folder.glob(f"{glob.escape(folder.name)}_train_{'[0-9]' * 6}.bin")) - set(paths):
        path.unlink()


def remove_temporaries(folder):
    for path in folder.glob(f".{glob.escape(folder.name)}_*.bin.tmp"):
        path.unlink()


# ---------------------------------------------------------------------------------------------------------------------
# The embedded corpus
# ---------------------------------------------------------------------------------------------------------------------


def make_embedded(folder):
    """Make sure that the default corpus is in the folder, with the sha256 stated above."""
    if not good_shards(folder):
        with one_process(folder):
            if not good_shards(folder):
                build_embedded(folder)
    print(f"{folder}: 2,013 documents, 39,380,222 bytes; sha256 as stated")


def good_shards(folder):
    return all((folder / name).is_file() and sha256_of(folder / name) == SHA256[name] for name in SHA256)


def build_embedded(folder):
    torch = pinned_torch()
    documents = torch_documents(torch)
    shards = {name: [[text] for digest, text in documents if (digest[0] < 8) == ("val" in name)] for name in SHA256}
    try:
        for name in shards:
            write_shard(folder / name, shards[name], training="train" in name)
        if any(sha256_of(temporary(folder / name)) != SHA256[name] for name in SHA256):
            raise Problem(f"the source of the installed torch is not that of {PINNED_TORCH}: {what_differs(torch)}")
        put_in_place(folder, [folder / name for name in SHA256])
    finally:
        remove_temporaries(folder)


def pinned_torch():
    """The installed torch as its metadata tell it: nothing is imported, and CPU and CUDA builds are alike."""
    advice = f"the embedded corpus is the source of torch {PINNED_TORCH}: pip install torch=={PINNED_TORCH}"
    try:
        torch = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        raise Problem(f"torch is not installed for {sys.executable}; {advice}") from None
    if torch.version.split("+")[0] != PINNED_TORCH:
        raise Problem(f"the installed torch is {torch.version}; {advice}")
    if not torch.read_text("RECORD"):
        raise Problem(f"the installed torch has no RECORD, so it is not from a wheel; {advice}")
    return torch


def corpus_names(torch):
    """{name: sha256 as the wheel states it} of the documents, from the wheel's RECORD."""
    rows = csv.reader(torch.read_text("RECORD").splitlines())
    return {
        name: stated
        for name, stated, _ in rows
        if name.startswith("torch/") and name.endswith(".py")
        if not name.startswith(LEFT_OUT) and "serialized_patterns" not in name
    }


def torch_documents(torch):
    """(sha256 of the name, text) of every document that is not empty, in the order of the digests."""
    documents = []
    for name in corpus_names(torch):
        try:
            text = Path(torch.locate_file(name)).read_bytes().replace(b"\r\n", b"\n")
        except FileNotFoundError:
            continue  # the sha256 will be wrong, and what_differs() says which file is gone
        if text:
            documents.append((hashlib.sha256(name.encode()).digest(), text))
    return sorted(documents)


def what_differs(torch):
    """Which files are not as the wheel brought them, in words."""
    changed = []
    for name, stated in corpus_names(torch).items():
        path = Path(torch.locate_file(name))
        digest = hashlib.sha256(path.read_bytes()).digest() if path.exists() else b""
        if base64.urlsafe_b64encode(digest).decode().rstrip("=") != stated.removeprefix("sha256="):
            changed.append(str(path))
    again = f"pip install --force-reinstall --no-deps torch=={PINNED_TORCH}"
    if not changed:
        return f"its RECORD lists other files than the published wheel's; {again}"
    return f"{changed[0]}{f' and {len(changed) - 1} more' * (len(changed) > 1)} changed or missing; {again}"


# ---------------------------------------------------------------------------------------------------------------------
# Anybody's text
# ---------------------------------------------------------------------------------------------------------------------

VALIDATION_SHARE, MAX_VALIDATION_TOKENS = 10, 10 * 2**20 + 1  # one more than FineWeb's: targets are shifted by one
SEQUENCE_LENGTH, BATCH_TOKENS, ENOUGH_VALIDATION = 1024, 2048, 2**18  # of the CPU track
LEAST_VALIDATION, LEAST_TRAINING = SEQUENCE_LENGTH + 1, BATCH_TOKENS + 1


def make_from_text(source, folder):
    """Turn every text file below source into shards named after their folder, and say how to train on them."""
    documents = text_files(source)
    total = sum(1 + end for _, _, end in documents)
    if total < LEAST_TRAINING + LEAST_VALIDATION:
        raise Problem(
            f"--text {source}: {total - len(documents):,} bytes of text in {len(documents):,} files;"
            f" {LEAST_TRAINING + LEAST_VALIDATION:,} are the least that can be trained on"
        )
    validation_tokens = min(max(total // VALIDATION_SHARE, LEAST_VALIDATION), MAX_VALIDATION_TOKENS)
    training, validation = cut(documents, total - validation_tokens)
    warn_of_twins(training, validation)
    shards = {folder / f"{folder.name}_val_000000.bin": validation}
    while training:
        shard, training = cut(training, MAX_SHARD_TOKENS // PIECE_TOKENS * (PIECE_TOKENS - 1))
        shards[folder / f"{folder.name}_train_{len(shards):06d}.bin"] = shard
    with one_process(folder):
        try:
            tokens = [
                write_shard(path, (read(*document) for document in shards[path]), training=index > 0)
                for index, path in enumerate(shards)
            ]
            put_in_place(folder, shards)
        finally:
            remove_temporaries(folder)
    print(f"{folder}: {len(documents):,} documents, {sum(tokens[1:]):,} training and {tokens[0]:,} validation tokens")
    print(training_command(folder, tokens[0]))


def warn_of_twins(training, validation):
    """Say which validation files are also training files: their loss would be that of text learned by heart."""
    sizes = {path.stat().st_size for path, _, _ in training} & {path.stat().st_size for path, _, _ in validation}
    known = {}
    for path, _, _ in training:
        if path.stat().st_size in sizes:
            known.setdefault(sha256_of(path), path)
    twins = [
        path for path, _, _ in validation if path.stat().st_size in sizes and known.get(sha256_of(path), path) != path
    ]
    if twins:
        others = f" and {len(twins) - 1:,} more" * (len(twins) > 1)
        print(
            f"warning: {twins[0]}{others} in validation, with the same bytes as files in training:"
            " the validation loss will be too low",
            file=sys.stderr,
        )


def text_files(source):
    """(path, 0, size) of every text file below source, shuffled once and for all by the sha256 of its name."""
    if not source.is_dir():
        what = "a file; give the folder that it is in" if source.exists() else "no such folder"
        raise Problem(f"--text {source}: {what}")
    documents, left_out = [], 0
    for parent, folders, names in os.walk(source, onerror=raise_it):
        entered = [name for name in folders if not name.startswith(".") and not os.path.islink(Path(parent, name))]
        left_out += len(folders) - len(entered)
        folders[:] = entered
        for path in (Path(parent, name) for name in names):
            if path.name.startswith(".") or path.is_symlink() or not path.is_file() or not is_text(path):
                left_out += 1
            else:
                documents.append((path, 0, path.stat().st_size))
    if left_out:
        print(f"left out {left_out} of {left_out + len(documents)}: hidden, empty, binary, links or no regular files")
    if not documents:
        raise Problem(f"--text {source}: no text file in this folder")
    return sorted(documents, key=lambda document: hashlib.sha256(os.fsencode(document[0].relative_to(source))).digest())


def raise_it(error):
    raise error


def is_text(path):
    with open(path, "rb") as file:
        beginning = file.read(1 << 16)
    return bool(beginning) and b"\0" not in beginning


def cut(documents, tokens):
    """Divide documents (path, start, end) into those that fill this many tokens and the rest, inside one if need be."""
    taken = []
    for index, (path, start, end) in enumerate(documents):
        middle = start + tokens - 1  # one for the document token
        if middle <= start:
            return taken, documents[index:]
        if middle < end:
            return [*taken, (path, start, middle)], [(path, middle, end), *documents[index + 1 :]]
        taken.append((path, start, end))
        tokens -= 1 + end - start
    return taken, []


def read(path, start, end):
    """The bytes of a file from start to end, in pieces, so that a document may be larger than memory."""
    with open(path, "rb") as file:
        file.seek(start)
        while piece := file.read(min(1 << 24, end - file.tell())):
            yield piece


def training_command(folder, validation_tokens):
    """How to train on these shards, from the repository's root."""
    whole_sequences = (validation_tokens - 1) // SEQUENCE_LENGTH * SEQUENCE_LENGTH
    root = HERE.parent
    shown = Path(glob.escape(str(folder.relative_to(root) if folder.is_relative_to(root) else folder)))
    files = {key: shlex.quote(str(shown / f"{glob.escape(folder.name)}_{key}_*.bin")) for key in ("train", "val")}
    return (
        f"./run.sh --train_files {files['train']} --val_files {files['val']}"
        f" --val_tokens {min(whole_sequences, ENOUGH_VALIDATION)} --vocab_size 257 --document_token {DOCUMENT_TOKEN}"
    )


def main():
    parser = one_line_parser(__doc__)
    parser.add_argument("--text", metavar="DIR", type=Path, help="make shards of this folder's text files instead")
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="where to (default: data/<name of DIR>)")
    args = parser.parse_args()
    if args.text is None:
        if args.out:
            raise Problem(f"--out {args.out} goes with --text; the default corpus belongs in {HERE / 'embedded'}")
        return make_embedded(HERE / "embedded")
    name = re.sub(r"[^\w.-]", "_", args.text.resolve().name, flags=re.ASCII).lstrip(".") or "text"
    folder = (args.out or HERE / name).resolve()
    if folder == HERE / "embedded":
        raise Problem(f"{folder} is the default corpus's own; choose another with --out")
    make_from_text(args.text, folder)


if __name__ == "__main__":
    run_script(main)
