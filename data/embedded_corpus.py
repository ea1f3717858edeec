"""Byte-token shards without the network.

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

Token 256 starts a document. Documents are longer than a batch, so training shards are cut into pieces: runs of 511
tokens, each with token 256 in front, shuffled once and for all; a shorter last one stays at the end. Validation keeps
whole documents in their order.
"""

from __future__ import annotations

import base64
import csv
import glob
import hashlib
import importlib.metadata
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from shards import UserError, argument_parser, header, run, sha256_of, workplace

if TYPE_CHECKING:
    import numpy as np

DOCUMENT_TOKEN = 256
MAX_SHARD_TOKENS = 100_000_000  # as FineWeb's
PIECE_TOKENS = 512  # of training shards, the document token in front included

PINNED_TORCH = "2.13.0"
LEFT_OUT = ("torch/version.py", "torch/testing/", "torch/_vendor/", "torch/sparse/_triton_ops_meta.py")
SHA256 = {
    "embedded_train_000001.bin": "b17d285eee8fe4de0c54332165351e54f13d2b20d53fdceb62e30d536b3ec7ee",
    "embedded_val_000000.bin": "63672a6c7147f003c2b989eab5c6645ca6fdb82e9f829ca1050d5f38587c975f",
}

HERE = Path(__file__).resolve().parent


# ---- Shards: documents as a stream of tokens, and for training as shuffled pieces of it ------------------------------


def stream_of(documents: Iterable[Iterable[bytes]]) -> np.ndarray:
    """The tokens of documents, each given in chunks, with the document token before each."""
    import numpy as np

    parts = [np.empty(0, "<u2")]
    for document in documents:
        parts.append(np.array([DOCUMENT_TOKEN], "<u2"))
        parts += [np.frombuffer(chunk, np.uint8).astype("<u2") for chunk in document]
    return np.concatenate(parts)


def shuffled_pieces(stream: np.ndarray) -> np.ndarray:
    """Cut a stream into pieces of 512 tokens: the document token and the next 511. The full ones are shuffled, always
    in the same way (numpy keeps RandomState's results the same); what is left at the end is the last, shorter piece."""
    import numpy as np

    run_tokens = PIECE_TOKENS - 1
    count, rest = divmod(len(stream), run_tokens)
    full_runs = stream[: count * run_tokens].reshape(count, run_tokens)
    tokens = np.full(len(stream) + count + bool(rest), DOCUMENT_TOKEN, "<u2")
    full_pieces = tokens[: count * PIECE_TOKENS].reshape(count, PIECE_TOKENS)
    full_pieces[:, 1:] = full_runs[np.random.RandomState(0).permutation(count)]
    tokens[count * PIECE_TOKENS + 1 :] = stream[count * run_tokens :]
    return tokens


def write_shard(path: Path, documents: Iterable[Iterable[bytes]]) -> int:
    """Write a training or validation shard, as its name says; returns the number of its tokens."""
    tokens = stream_of(documents)
    if "_train_" in path.name:
        tokens = shuffled_pieces(tokens)
    try:
        with open(path, "wb") as file:
            file.write(header(len(tokens)))
            file.write(tokens)
    except OSError as error:
        error.filename = str(path)  # a failed write does not name its file
        raise
    return len(tokens)


# ---- The embedded corpus ---------------------------------------------------------------------------------------------


def make_embedded(folder: Path) -> None:
    """Make sure that the default corpus is in the folder, with the sha256 stated above."""
    if not good_shards(folder):
        torch = pinned_torch()
        with workplace(folder) as unfinished:
            if not good_shards(folder):
                build_embedded(torch, unfinished)
                for name in SHA256:
                    os.replace(unfinished / name, folder / name)
    print(f"{folder}: 2,013 documents, 39,380,222 bytes; sha256 as stated")


def good_shards(folder: Path) -> bool:
    return all((folder / name).is_file() and sha256_of(folder / name) == SHA256[name] for name in SHA256)


def build_embedded(torch: importlib.metadata.Distribution, folder: Path) -> None:
    documents, changed = torch_documents(torch)
    for name in SHA256:
        write_shard(folder / name, [[text] for digest, text in documents if (digest[0] < 8) == ("_val_" in name)])
    if not good_shards(folder):
        what = f"{changed[0]}, for one, is not as published" if changed else "it has other files"
        again = f"pip install --force-reinstall --no-deps torch=={PINNED_TORCH}"
        raise UserError(f"the source of the installed torch is not that of {PINNED_TORCH}: {what}; {again}")


def pinned_torch() -> importlib.metadata.Distribution:
    """The installed torch as its metadata describes it: nothing is imported, and CPU and CUDA builds are alike."""
    advice = f"the embedded corpus is the source of torch {PINNED_TORCH}: pip install torch=={PINNED_TORCH}"
    try:
        torch = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"torch is not installed for {sys.executable}; {advice}") from None
    if torch.version.split("+")[0] != PINNED_TORCH:
        raise UserError(f"the installed torch is {torch.version}; {advice}")
    if not torch.read_text("RECORD"):
        raise UserError(f"the installed torch has no RECORD, so it is not from a wheel; {advice}")
    return torch


def torch_documents(torch: importlib.metadata.Distribution) -> tuple[list[tuple[bytes, bytes]], list[Path]]:
    """(sha256 of the name, text) of every document in the order of the digests, and the files that were changed."""
    documents, changed = [], []
    for name, stated, _ in csv.reader(torch.read_text("RECORD").splitlines()):
        if not re.fullmatch(r"torch/.*\.py", name) or name.startswith(LEFT_OUT) or "serialized_patterns" in name:
            continue
        path = Path(torch.locate_file(name))
        text = path.read_bytes() if path.exists() else b""
        digest = base64.urlsafe_b64encode(hashlib.sha256(text).digest()).decode().rstrip("=")
        if stated != f"sha256={digest}":
            changed.append(path)
        if text:
            documents.append((hashlib.sha256(name.encode()).digest(), text.replace(b"\r\n", b"\n")))
    return sorted(documents), changed


# ---- Anybody's text: a document is (path, start, end), the bytes of a file or of a part of one -----------------------

Document = tuple[Path, int, int]
VALIDATION_SHARE, MAX_VALIDATION_TOKENS = 10, 10 * 2**20 + 1  # one more than FineWeb's: targets are shifted by one
SEQUENCE_LENGTH, BATCH_TOKENS, ENOUGH_VALIDATION = 1024, 2048, 2**18  # of the CPU track
LEAST_VALIDATION, LEAST_TRAINING = SEQUENCE_LENGTH + 1, BATCH_TOKENS + 1


def make_from_text(source: Path, folder: Path) -> None:
    """Turn every text file below source into shards named after their folder, and say how to train on them."""
    documents = text_files(source)
    total = sum(1 + end for _, _, end in documents)
    if total < LEAST_TRAINING + LEAST_VALIDATION:
        raise UserError(
            f"--text {source}: {total - len(documents):,} bytes of text in {len(documents):,} files;"
            f" {LEAST_TRAINING + LEAST_VALIDATION:,} are the least that can be trained on"
        )
    validation_tokens = min(max(total // VALIDATION_SHARE, LEAST_VALIDATION), MAX_VALIDATION_TOKENS)
    training, validation = cut(documents, total - validation_tokens)
    warn_of_twins(training, validation)
    shards = {f"{folder.name}_val_000000.bin": validation}
    while training:
        shard, training = cut(training, MAX_SHARD_TOKENS // PIECE_TOKENS * (PIECE_TOKENS - 1))
        shards[f"{folder.name}_train_{len(shards):06d}.bin"] = shard
    with workplace(folder) as unfinished:
        tokens = [write_shard(unfinished / name, (read(*document) for document in shards[name])) for name in shards]
        for name in shards:
            os.replace(unfinished / name, folder / name)
        for path in folder.glob(f"{glob.escape(folder.name)}_train_{'[0-9]' * 6}.bin"):
            if path.name not in shards:  # of an earlier call with more text
                path.unlink()
    print(f"{folder}: {len(documents):,} documents, {sum(tokens[1:]):,} training and {tokens[0]:,} validation tokens")
    print(training_command(folder, tokens[0]))


def text_files(source: Path) -> list[Document]:
    """Every text file below source, in the order of the sha256 of its name."""
    if not source.is_dir():
        what = "a file; give the folder that it is in" if source.exists() else "no such folder"
        raise UserError(f"--text {source}: {what}")
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
        raise UserError(f"--text {source}: no text file in this folder")
    return sorted(documents, key=lambda document: hashlib.sha256(os.fsencode(document[0].relative_to(source))).digest())


def raise_it(error: OSError) -> None:
    raise error


def is_text(path: Path) -> bool:
    with open(path, "rb") as file:
        beginning = file.read(2**16)
    return bool(beginning) and b"\0" not in beginning


def cut(documents: list[Document], tokens: int) -> tuple[list[Document], list[Document]]:
    """Divide documents into those that fill this many tokens and the rest, inside one if need be."""
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


def warn_of_twins(training: list[Document], validation: list[Document]) -> None:
    """Warn of validation files with the same bytes as a training file: the model will know them by heart."""
    sizes = {path: path.stat().st_size for path, _, _ in training + validation}
    count = Counter(sizes.values())
    digests = {path: sha256_of(path) for path, size in sizes.items() if count[size] > 1}
    known = {}
    for path, _, _ in training:
        known.setdefault(digests.get(path), path)
    twins = [path for path, _, _ in validation if path in digests and known.get(digests[path], path) != path]
    if twins:
        which = f"{twins[0]}{f' and {len(twins) - 1:,} more' * (len(twins) > 1)}"
        print(
            f"warning: {which} in validation, and the same bytes in training: the loss will be too low", file=sys.stderr
        )


def read(path: Path, start: int, end: int) -> Iterator[bytes]:
    """The bytes of a file from start to end, in chunks, so that a document may be larger than memory."""
    with open(path, "rb") as file:
        file.seek(start)
        while chunk := file.read(min(2**24, end - file.tell())):
            yield chunk


def training_command(folder: Path, validation_tokens: int) -> str:
    """How to train on these shards, from the repository's root."""
    whole_sequences = (validation_tokens - 1) // SEQUENCE_LENGTH * SEQUENCE_LENGTH
    root = HERE.parent
    shown = Path(glob.escape(str(folder.relative_to(root) if folder.is_relative_to(root) else folder)))
    files = {key: shlex.quote(str(shown / f"{glob.escape(folder.name)}_{key}_*.bin")) for key in ("train", "val")}
    return (
        f"./run.sh --train_files {files['train']} --val_files {files['val']}"
        f" --val_tokens {min(whole_sequences, ENOUGH_VALIDATION)} --vocab_size 257 --document_token {DOCUMENT_TOKEN}"
    )


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--text", metavar="DIR", type=Path, help="make shards of this folder's text files instead")
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="where to (default: data/<name of DIR>)")
    args = parser.parse_args()
    if args.text is None:
        if args.out:
            raise UserError(f"--out {args.out} goes with --text; the default corpus belongs in {HERE / 'embedded'}")
        return make_embedded(HERE / "embedded")
    name = re.sub(r"[^\w.-]", "_", args.text.resolve().name, flags=re.ASCII).lstrip(".") or "text"
    folder = (args.out or HERE / name).resolve()
    if folder == HERE / "embedded":
        raise UserError(f"{folder} is the default corpus's own; choose another with --out")
    make_from_text(args.text, folder)


if __name__ == "__main__":
    run(main)
