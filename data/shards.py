"""What the two data scripts share: a shard's format, one process per folder, and how a script ends."""

import argparse
import errno
import fcntl
import hashlib
import os
import shutil
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

# A shard is 256 int32 (20240520, 1, number of tokens, zeros), then the tokens as uint16.
MAGIC, VERSION, HEADER_BYTES, TOKEN_BYTES = 20240520, 1, 1024, 2


class UserError(Exception):
    """Something the user can fix: one line that names the file, setting or value and says what to do."""


def header(tokens: int) -> bytes:
    return struct.pack("<3i", MAGIC, VERSION, tokens).ljust(HEADER_BYTES, b"\0")


def fault_of(path: Path, largest_token: int | None = None) -> str | None:
    """Why this is not a whole shard of tokens up to the largest, in a few words; None if it is one."""
    if not path.is_file():  # opening a FIFO would wait forever
        return "no regular file" if path.exists() else "missing"
    with open(path, "rb") as file:
        magic, version, tokens = struct.unpack("<3i", file.read(12).ljust(12, b"\0"))
        size = os.fstat(file.fileno()).st_size
        if (magic, version) != (MAGIC, VERSION):
            return f"bad: its header starts with {magic}, {version}; a shard's with {MAGIC}, {VERSION}"
        if tokens <= 0 or size != HEADER_BYTES + TOKEN_BYTES * tokens:
            return f"bad: {size} bytes, but its header says {tokens} tokens"
        if largest_token is not None:
            import numpy as np

            file.seek(HEADER_BYTES)
            chunks = iter(lambda: file.read(2**24), b"")
            largest = max((np.frombuffer(chunk, "<u2").max() for chunk in chunks), default=0)
            if largest > largest_token:
                return f"bad: token {largest} is beyond the last of the vocabulary, {largest_token}; remove the file"
    return None


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def workplace(folder: Path) -> Iterator[Path]:
    """FOLDER/.unfinished for one process, from which it moves what is good; others wait for FOLDER/.lock until it ends.

    Both go with a process that is killed: the kernel frees the lock, and the next process clears the workplace.
    """
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / ".unfinished"
    with open(folder / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another process is at work in {folder}: waiting for it", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            yield unfinished
        finally:
            for _ in range(40):  # after a fault, other downloads may go on writing into it for a moment
                shutil.rmtree(unfinished, ignore_errors=True)
                time.sleep(0.05)
                if not unfinished.exists():
                    break


def argument_parser(doc: str) -> argparse.ArgumentParser:
    """A parser with the docstring as its help, whose complaints are UserErrors."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(message: str) -> NoReturn:
        raise UserError(f"{message} (--help shows the usage)")

    parser.error = error
    return parser


def run(main: Callable[[], int | None]) -> None:
    """Exit with main()'s code; 2 and one line for what the user can fix, 130 and one line for Ctrl-C."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller, as by >&-
            setattr(sys, name, open(os.devnull, "w"))
    sys.stdout.reconfigure(errors="backslashreplace")  # a file's name need not be UTF-8
    line = ""
    try:
        code = main() or 0
        sys.stdout.flush()
    except KeyboardInterrupt:
        line, code = "interrupted; the same call again finishes the job", 130
    except UserError as error:
        line, code = str(error), 2
    except ImportError as error:
        line, code = f"{error.name} is missing for {sys.executable}: pip install -r requirements.txt", 2
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        advice = "free some space or choose another folder" if full else "check the path and its permissions"
        line, code = f"{error.filename or 'writing'}: {error.strerror or error}; {advice}", 2
    with suppress(OSError):
        if line:
            print(f"{Path(sys.argv[0]).name}: {' '.join(line.split())}", file=sys.stderr, flush=True)
    os._exit(code)  # not sys.exit: that waits for threads, and one may sit in a connect or read for minutes
