"""
FineWeb in GPT-2 tokens, 100M a shard, from the hub into data/fineweb10B/.

    python data/cached_fineweb10B.py             # validation shard 0 and all 103 training shards (21 GB)
    python data/cached_fineweb10B.py 9           # validation shard 0 and the first 9 training shards (2 GB)
    python data/cached_fineweb10B.py 9 --check   # verify what is on disk: header, size, token range; no network
    python data/cached_fineweb10B.py 9 --repo kjj0/finewebedu10B-gpt2 --revision main --dir /data/edu

Safe to interrupt and to call again, also twice at a time: complete shards are skipped, others go on where they stopped,
and a shard gets its name only when its size, its header and the sha256 that the hub states are right. --revision also
compares the shards that are already there. HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE work as everywhere.
Exit code 0: all there; 1: --check found something missing or bad; 2: a problem, in one line; 130: Ctrl-C.
"""

import io
import os
import re
import shutil
import struct
import sys
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as StillRunning
from pathlib import Path
from typing import NamedTuple

from embedded_corpus import (
    HEADER_BYTES,
    MAGIC,
    TOKEN_BYTES,
    VERSION,
    Problem,
    one_line_parser,
    one_process,
    run_script,
    sha256_of,
)

try:
    from huggingface_hub import constants, get_hf_file_metadata, get_session, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status
    from tqdm import tqdm
except ImportError as error:
    print(f"{error.name} is missing for {sys.executable}: pip install -r requirements.txt", file=sys.stderr)
    sys.exit(2)
except ValueError as error:  # the client reads its settings when it is imported
    print(f"HF_ENDPOINT or another HF_ variable is wrong: {error}", file=sys.stderr)
    sys.exit(2)

REPO = "kjj0/fineweb10B-gpt2"
TRAINING_SHARDS = {REPO: 103, "kjj0/fineweb100B-gpt2": 1030, "kjj0/finewebedu10B-gpt2": 99}
LARGEST_TOKEN = 50256  # of GPT-2's vocabulary
HERE = Path(__file__).resolve().parent

DOWNLOADS_AT_A_TIME = 4
FIRST_ANSWER_SECONDS = int(os.environ.get("HF_HUB_ETAG_TIMEOUT") or 6)  # the client's own name for that patience
PAUSES, LONGEST_PAUSE = (1, 2, 4, 8, 16), 60  # seconds before another try; the longest that Retry-After can ask for
PLAIN_LINE_SECONDS = 15  # between two lines of progress where stderr is no terminal
TransportError = HfHubHTTPError.__bases__[0]  # of the HTTP library, which is another in huggingface_hub 1 than in 2


def shard_names(repo, training_shards):
    """Validation shard 0 and the training shards. fineweb10B-gpt2 has fineweb_*, finewebedu10B-gpt2 finewebedu_*."""
    most = TRAINING_SHARDS.get(repo)
    if training_shards is None and most is None:
        raise Problem(f"--repo {repo}: the number of its training shards is not known here, so give N")
    if training_shards is not None and not 0 <= training_shards <= (most or 999_999):
        raise Problem(f"N = {training_shards}: give a number of training shards from 0 to {most or 999_999}")
    prefix = re.split(r"[-_]?\d", repo.split("/")[-1])[0]
    last = most if training_shards is None else training_shards
    return [f"{prefix}_val_000000.bin", *(f"{prefix}_train_{number:06d}.bin" for number in range(1, last + 1))]


# ---------------------------------------------------------------------------------------------------------------------
# What is on disk
# ---------------------------------------------------------------------------------------------------------------------


def what_is_wrong(path):
    """Why this is not a whole shard, in a few words; None if it is one."""
    if not path.exists():
        return "missing"
    size = path.stat().st_size
    with open(path, "rb") as file:
        magic, version, tokens = struct.unpack("<3i", file.read(12).ljust(12, b"\0"))
    if (magic, version) != (MAGIC, VERSION):
        return f"its header starts with {magic}, {version}; a shard's with {MAGIC}, {VERSION}"
    if tokens <= 0:
        return f"its header says {tokens} tokens"
    if size != HEADER_BYTES + TOKEN_BYTES * tokens:
        return f"{size} bytes, where {tokens} tokens make {HEADER_BYTES + TOKEN_BYTES * tokens}"


def largest_token(path):
    import numpy as np

    tokens, step = np.memmap(path, "<u2", "r", HEADER_BYTES), 10**7
    return max(int(tokens[start : start + step].max()) for start in range(0, len(tokens), step))


def check(folder, names):
    """Print every shard that is missing or bad; returns the exit code."""
    failed = 0
    for name in names:
        wrong = what_is_wrong(folder / name)
        if not wrong and (largest := largest_token(folder / name)) > LARGEST_TOKEN:
            wrong = f"token {largest} is beyond the vocabulary's last, {LARGEST_TOKEN}; remove the file"
        if wrong:
            failed += 1
            print(f"{name}: {wrong if wrong == 'missing' else 'bad: ' + wrong}")
    print(f"{folder}: {len(names) - failed} of {len(names)} shards are good" + "; fetch the others" * bool(failed))
    return 1 if failed else 0


# ---------------------------------------------------------------------------------------------------------------------
# Talking to the hub: plain ranges through the client's session. The client's own hf_hub_download begins a killed
# download anew, leaves the dead one's bytes on disk, and can wait for an answer for minutes
# ---------------------------------------------------------------------------------------------------------------------


def be_sure_it_answers(url):
    """Give up within ten seconds where nobody answers. The client's timeouts begin anew for every address of a host
    and with every byte, and the look-up of its name has none: so one request in a thread, with one patience."""
    answer = ThreadPoolExecutor(1).submit(get_hf_file_metadata, url, timeout=FIRST_ANSWER_SECONDS)
    try:
        answer.result(FIRST_ANSWER_SECONDS)
        return
    except HfHubHTTPError:
        return  # an answer, if a bad one
    except StillRunning:
        reason = f"no answer within {FIRST_ANSWER_SECONDS} s"
    except Exception as error:
        reason = str(error) or type(error).__name__
    raise Problem(f"cannot reach {constants.ENDPOINT}: {reason}; check the network, the proxy and HF_ENDPOINT")


def persistently(action, url, progress=lambda: 0):
    """action(), again after growing pauses if the hub is busy or the connection breaks; new bytes give new patience."""
    pauses, farthest = iter(PAUSES), progress()
    while True:
        try:
            return action()
        except TransportError as error:
            response = getattr(error, "response", None)
            status = response.status_code if response is not None else None
            if progress() > farthest:
                pauses, farthest = iter(PAUSES), progress()
            pause = next(pauses, None)
            happened = f"the hub answers {status}" if status else str(error) or type(error).__name__
            if pause is None or status not in (None, 408, 416, 429, *range(500, 600)):
                raise Problem(f"{url}: {happened}; {advice(status)}") from None
            asked = response.headers.get("Retry-After", "") if status else ""
            pause = min(int(asked), LONGEST_PAUSE) if asked.isdecimal() else pause
            say(f"{Path(url).name}: {happened}; trying again in {pause} s")
            time.sleep(pause)


def advice(status):
    if status in (401, 403):
        return "set HF_TOKEN to a token that may read it, or check --repo"
    if status == 404:
        return "check N, --repo and --revision"
    if status == 429:
        return "wait some minutes and call again, or set HF_TOKEN, which allows more requests"
    return "wait some minutes and call again: what has arrived is kept"


def say(line):
    tqdm.write(" ".join(line.split()), file=sys.stderr)  # above the bar, not through it


def append(url, partial, size):
    """Get what is still missing of a file; anything else than the right number of bytes is a TransportError."""
    with open(partial, "ab") as file:
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        if file.tell():
            headers["Range"] = f"bytes={file.tell()}-"
        with get_session().stream("GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as response:
            if file.tell() and response.status_code in (200, 416):  # no such range to be had: from the beginning
                file.seek(0)
                file.truncate()
            hf_raise_for_status(response)
            for piece in response.iter_raw():
                file.write(piece)
                file.flush()  # what has arrived outlives this process
        if file.tell() != size:
            raise TransportError(f"the body ended after {file.tell()} of {size} bytes")
        os.fsync(file.fileno())


# ---------------------------------------------------------------------------------------------------------------------
# Fetching
# ---------------------------------------------------------------------------------------------------------------------


class Shard(NamedTuple):
    name: str
    url: str
    size: int
    sha256: str  # empty where the hub does not state it
    path: Path  # where it will be
    partial: Path  # where it grows, named after its version so that no two are ever mixed
    cached: str | None  # the client's own copy below HF_HOME, if there is one


def fetch(repo, revision, folder, names):
    """Get the shards that are not there, and with a revision also those that are not that revision's."""
    offline = constants.HF_HUB_OFFLINE
    if revision and offline:
        say(f"HF_HUB_OFFLINE is set: shards on disk are not compared with revision {revision}")
    wanted = [name for name in names if what_is_wrong(folder / name) or (revision and not offline)]
    commit, pool = revision or constants.DEFAULT_REVISION, ThreadPoolExecutor(DOWNLOADS_AT_A_TIME)
    if wanted and not offline:
        be_sure_it_answers(url_of(repo, wanted[0], commit))
        commit = metadata_of(url_of(repo, wanted[0], commit)).commit_hash  # one version for all, whatever is pushed now
    found = list(pool.map(lambda name: look_up(repo, commit, folder, name), wanted))
    shards = [shard for shard, there in zip(found, pool.map(is_there, found), strict=True) if not there]
    for orphan in set(folder.glob(".*_[0-9]*.bin.*.partial")) - {shard.partial for shard in shards}:
        orphan.unlink()
    if shards:
        need, free = sum(shard.size - arrived(shard) for shard in shards), shutil.disk_usage(folder).free
        if need > free:
            raise Problem(f"{folder}: {need:,} bytes to fetch, {free:,} free; make room, choose --dir or a smaller N")
        say(f"fetching {len(shards)} shards of {repo} at {commit} into {folder}")
        wait_for({pool.submit(complete, shard): shard for shard in shards})


def url_of(repo, name, revision):
    try:
        return hf_hub_url(repo, name, repo_type="dataset", revision=revision)
    except ValueError as error:
        raise Problem(f"--repo {repo}: {error}") from None


def metadata_of(url):
    metadata = persistently(lambda: get_hf_file_metadata(url, timeout=FIRST_ANSWER_SECONDS), url)
    if not metadata.commit_hash or not metadata.etag or metadata.size is None:
        raise Problem(f"{url}: the answer has no commit, ETag or size, so this is no hub; check HF_ENDPOINT")
    return metadata


def look_up(repo, commit, folder, name):
    """What the hub, or offline the client's cache, says about a shard."""
    url, cached = url_of(repo, name, commit), try_to_load_from_cache(repo, name, repo_type="dataset", revision=commit)
    cached = cached if isinstance(cached, str) else None
    if not constants.HF_HUB_OFFLINE:
        metadata = metadata_of(url)
        size, version = metadata.size, re.sub(r"\W", "", metadata.etag)
    elif cached:
        size, version = os.path.getsize(cached), "cache"
    else:
        raise Problem(f"{name} is neither in {folder} nor in {constants.HF_HUB_CACHE}; unset HF_HUB_OFFLINE")
    sha256 = version if re.fullmatch("[0-9a-f]{64}", version) else ""
    return Shard(name, url, size, sha256, folder / name, folder / f".{name}.{version[:16]}.partial", cached)


def is_there(shard):
    """Is the shard on disk, whole, and the one that the hub has?"""
    wrong = what_is_wrong(shard.path)
    if not wrong and (shard.path.stat().st_size != shard.size or not has_sha256(shard.path, shard.sha256)):
        wrong = "not that of this revision"
    if wrong not in (None, "missing"):
        say(f"{shard.path}: {wrong}; fetching it again")
    return not wrong


def has_sha256(path, stated):
    return not stated or sha256_of(path) == stated


def arrived(shard):
    return shard.partial.stat().st_size if shard.partial.exists() else 0


def complete(shard):
    """Let the partial file grow until it is the shard, and only then give it its name."""

    def grow():
        if arrived(shard) != shard.size:
            append(shard.url, shard.partial, shard.size)
        if not has_sha256(shard.partial, shard.sha256):
            shard.partial.unlink()
            raise TransportError("what arrived has another sha256 than the hub states")

    try:
        if shard.cached:
            shutil.copyfile(shard.cached, shard.partial)
        persistently(grow, shard.url, progress=lambda: arrived(shard))
    except OSError as error:
        error.filename = error.filename or str(shard.partial)  # a failed write does not name its file
        raise
    if wrong := what_is_wrong(shard.partial):
        shard.partial.unlink()
        raise Problem(f"{shard.url} is no shard: {wrong}; check --repo and --revision")
    os.replace(shard.partial, shard.path)


def wait_for(jobs):
    """Show one bar over all bytes until every job is done, or plain lines where stderr is no terminal."""
    terminal, last_line = sys.stderr.isatty(), time.monotonic()
    start, total = sum(map(arrived, jobs.values())), sum(shard.size for shard in jobs.values())
    if terminal:
        look = dict(file=sys.stderr, dynamic_ncols=True)
    else:
        plain = "{percentage:.0f}%, {n_fmt} of {total_fmt}, {rate_fmt}, {remaining} left{postfix}"
        look = dict(file=io.StringIO(), bar_format=plain)
    running = set(jobs)
    with tqdm(total=total, initial=start, unit="B", unit_scale=True, **look) as bar:
        while running:
            finished, running = wait(running, timeout=0.2, return_when=FIRST_EXCEPTION)
            now = sum(arrived(shard) if job in running else shard.size for job, shard in jobs.items())
            bar.set_postfix_str(f"{now / TOKEN_BYTES / 1e6:,.0f}M of {total / TOKEN_BYTES / 1e6:,.0f}M tokens", False)
            bar.update(now - bar.n)
            if not terminal and time.monotonic() - last_line > PLAIN_LINE_SECONDS:
                last_line = time.monotonic()
                say(str(bar))
            for job in finished:
                job.result()


def main():
    parser = one_line_parser(__doc__)
    parser.add_argument("training_shards", metavar="N", type=int, nargs="?", help="training shards (default: all)")
    parser.add_argument("--check", action="store_true", help="verify what is on disk instead, without the network")
    parser.add_argument("--repo", default=REPO, help=f"dataset on the hub (default: {REPO})")
    parser.add_argument("--revision", help="its branch, tag or commit (default: main)")
    parser.add_argument("--dir", type=Path, help="where to (default: data/fineweb10B, after the repo's name)")
    args = parser.parse_args()
    names = shard_names(args.repo, args.training_shards)
    folder = args.dir or HERE / args.repo.split("/")[-1].removesuffix("-gpt2")
    if args.check:
        return check(folder, names)
    unfinished = any(folder.glob(".*_[0-9]*.bin.*.partial")) or any(what_is_wrong(folder / name) for name in names)
    if unfinished or args.revision:
        with one_process(folder):
            fetch(args.repo, args.revision, folder, names)
    tokens = sum((folder / name).stat().st_size - HEADER_BYTES for name in names) // TOKEN_BYTES
    print(f"{folder}: {len(names)} shards, {tokens:,} tokens")


if __name__ == "__main__":
    run_script(main)
