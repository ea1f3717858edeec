"""FineWeb in GPT-2 tokens, 100M per shard, from the hub into data/fineweb10B/.

    python data/cached_fineweb10B.py             # validation shard 0 and all 103 training shards (21 GB)
    python data/cached_fineweb10B.py 9           # validation shard 0 and the first 9 training shards (2 GB)
    python data/cached_fineweb10B.py 9 --check   # verify what is on disk: header, size, token range; no network
    python data/cached_fineweb10B.py 9 --repo kjj0/finewebedu10B-gpt2 --revision main --dir /data/edu

Safe to interrupt and to call again, also twice at a time: shards that are there are skipped, and a shard gets its name
only when its size, its header and the sha256 that the hub states are right. --revision also compares the shards that
are already there. HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE work as everywhere.
Exit code 0: all there; 1: --check found something missing or bad; 2: a problem, in one line; 130: Ctrl-C.
"""

import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from shards import UserError, argument_parser, fault_of, run, sha256_of, workplace

TRAINING_SHARDS = {"kjj0/fineweb10B-gpt2": 103, "kjj0/fineweb100B-gpt2": 1030, "kjj0/finewebedu10B-gpt2": 99}
ANSWER_SECONDS, SILENT_SECONDS = 8, 30  # patience with the hub: for its first answer, and while nothing arrives
LASTING = {401: "check --repo, or set HF_TOKEN", 403: "set HF_TOKEN", 404: "check N, --repo and --revision"}


def shard_names(repo: str, count: int | None) -> list[str]:
    """Validation shard 0 and the training shards: fineweb_* of fineweb10B-gpt2, finewebedu_* of finewebedu10B-gpt2."""
    count = TRAINING_SHARDS.get(repo, -1) if count is None else count
    if count < 0:
        raise UserError(f"give the number N of training shards that you want from {repo}, 0 or more")
    prefix = re.split(r"[-_]?\d", repo.split("/")[-1])[0]
    return [f"{prefix}_val_000000.bin", *(f"{prefix}_train_{number:06d}.bin" for number in range(1, count + 1))]


def check(folder: Path, names: list[str]) -> int:
    """Print every shard that is missing or bad, by a token that GPT-2 does not have too; returns the exit code."""
    bad = [f"{name}: {fault}" for name in names if (fault := fault_of(folder / name, largest_token=50256))]
    print(*bad, f"{folder}: {len(names) - len(bad)} of {len(names)} shards are good", sep="\n")
    return 1 if bad else 0


def explained(what: str, error: Exception) -> tuple[UserError, bool]:
    """What went wrong and what to do, without a URL's password; and whether it would go wrong again."""
    status = next((e.response.status_code for e in (error, error.__cause__) if getattr(e, "response", None)), None)
    happened = f"the hub answers {status}" if status else str(error) or "no answer"
    advice = LASTING.get(status, "check --repo, HF_ENDPOINT and the network, and call again: what is finished is kept")
    return UserError(re.sub(r"//\S*@", "//", f"{what}: {happened}; {advice}")), status in LASTING


def look_up(repo: str, revision: str | None) -> tuple[Callable[..., str], str, dict]:
    """The client's download, the commit, and size and sha256 of each file as the hub states them."""
    # The client reads these when it is imported: no bars, warnings or telemetry of its own.
    os.environ |= dict(HF_HUB_DISABLE_PROGRESS_BARS="1", HF_HUB_DISABLE_TELEMETRY="1", HF_HUB_VERBOSITY="critical")
    try:
        _ = urlsplit(os.environ.get("HF_ENDPOINT", "")).port  # the client would print parts of a bad one
        from huggingface_hub import HfApi, constants
    except ValueError:
        raise UserError("huggingface_hub cannot read HF_ENDPOINT or another HF_ variable; check them") from None
    constants.DOWNLOAD_CHUNK_SIZE = 2**16  # its 10 MB may take longer than SILENT_SECONDS
    hub, pool = HfApi(), ThreadPoolExecutor(1)
    try:  # in a thread: the client's own timeouts begin again with each address of a host and with each byte
        info = pool.submit(hub.dataset_info, repo, revision=revision, files_metadata=True).result(ANSWER_SECONDS)
    except Exception as error:
        raise explained(f"{repo} at {constants.ENDPOINT}", error)[0] from None
    return hub.hf_hub_download, info.sha, {file.rfilename: file.lfs for file in info.siblings or ()}


def fetch(repo: str, revision: str | None, folder: Path, names: list[str]) -> None:
    """Get the shards that are not there, and with a revision also those that are not that revision's."""
    download, commit, files = look_up(repo, revision)
    if absent := [name for name in names if not files.get(name)]:
        raise UserError(f"{repo} at {commit} has no {absent[0]} with a sha256; check N, --repo and --revision")
    with workplace(folder) as unfinished:
        wanted = [n for n in names if fault_of(folder / n) or (revision and sha256_of(folder / n) != files[n].sha256)]
        if (need := sum(files[n].size for n in wanted)) > (free := shutil.disk_usage(folder).free):
            raise UserError(f"{folder}: {need:,} bytes to fetch, {free:,} free; make room, choose --dir or a smaller N")
        source = dict(repo_id=repo, repo_type="dataset", revision=commit, local_dir=unfinished)
        pool = ThreadPoolExecutor(4)
        jobs = {pool.submit(fetch_shard, download, folder / n, files[n].sha256, source): files[n].size for n in wanted}
        watch(jobs, unfinished)


def fetch_shard(download: Callable[..., str], path: Path, sha256: str, source: dict) -> None:
    """Fetch one shard, again if need be, and give it its name when it is right."""
    for pause in (1, 5, None):  # seconds; within one download the client tries five times to go on
        try:
            arrived = Path(download(filename=path.name, **source))
            if sha256_of(arrived) == sha256:
                break
            arrived.unlink()
            raise ValueError("what arrived has another sha256 than the hub states")
        except Exception as error:
            if getattr(error, "errno", None):  # of the disk; the client's own have no number
                raise
            problem, lasts = explained(path.name, error)
            if lasts or pause is None:
                raise problem from None
            time.sleep(pause)
    if fault := fault_of(arrived):
        raise UserError(f"{path.name} is no shard: {fault}; check --repo and --revision")
    os.replace(arrived, path)
    if not sys.stderr.isatty():  # so there is no bar
        sys.stderr.write(f"fetched {path}\n")  # in one piece; print would write the line end apart


def watch(jobs: dict[Future, int], unfinished: Path) -> None:
    """Show how many of the jobs' bytes have arrived until all are there; end when no more come, or too many."""
    from tqdm import tqdm

    done, files, before, silent_since = [], [], None, time.monotonic()
    with tqdm(total=sum(jobs.values()), unit="B", unit_scale=True, dynamic_ncols=True, disable=None) as bar:
        while len(done) < len(jobs):
            done = wait(jobs, 0.1, FIRST_EXCEPTION).done
            list(map(Future.result, done))  # which raises what a job raised
            with suppress(FileNotFoundError):  # one may get its name just now
                files = [path.stat() for path in unfinished.rglob("*") if path.is_file()]
            bar.update(min(bar.total, sum(jobs[job] for job in done) + sum(file.st_size for file in files)) - bar.n)
            if any(file.st_size > max(jobs.values()) for file in files):
                raise UserError(f"{unfinished}: more bytes arrive than the hub states; check HF_ENDPOINT")
            if files != before:
                before, silent_since = files, time.monotonic()
            elif time.monotonic() - silent_since > SILENT_SECONDS:
                raise UserError(f"nothing has arrived for {SILENT_SECONDS} s; check the network and call again")


def main() -> int | None:
    parser = argument_parser(__doc__)
    parser.add_argument("training_shards", metavar="N", type=int, nargs="?", help="training shards (default: all)")
    parser.add_argument("--check", action="store_true", help="verify what is on disk instead, without the network")
    parser.add_argument("--repo", default="kjj0/fineweb10B-gpt2", help="dataset on the hub (default: %(default)s)")
    parser.add_argument("--revision", help="its branch, tag or commit (default: main)")
    parser.add_argument("--dir", type=Path, help="where to (default: data/fineweb10B, after the repo's name)")
    args = parser.parse_args()
    names = shard_names(args.repo, args.training_shards)
    folder = args.dir or Path(__file__).resolve().parent / args.repo.split("/")[-1].removesuffix("-gpt2")
    if args.check:
        return check(folder, names)
    if args.revision or any(fault_of(folder / name) for name in names):
        fetch(args.repo, args.revision, folder, names)
    print(f"{folder}: all {len(names)} shards are there")


if __name__ == "__main__":
    run(main)
