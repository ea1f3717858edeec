"""data/cached_fineweb10B.py against a real hub on the loopback, with the real client in real processes."""

import fcntl
import os
import pty
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import numpy as np
import pytest
from hub_server import FOREVER, Hub

DATA = Path(__file__).resolve().parent.parent / "data"
SCRIPT = DATA / "cached_fineweb10B.py"
VAL, ONE, TWO = "fineweb_val_000000.bin", "fineweb_train_000001.bin", "fineweb_train_000002.bin"
NOWHERE = "http://127.0.0.1:9"
QUICK = "time.sleep = lambda _: None"  # no pauses between tries, the client's included


def shard(seed, tokens=3000):
    content = np.random.default_rng(seed).integers(0, 50257, tokens).astype("<u2")
    return struct.pack("<256i", 20240520, 1, tokens, *[0] * 253) + content.tobytes()


def shards(training, prefix="fineweb", seed=0, tokens=3000):
    train = {f"{prefix}_train_{number:06d}.bin": shard(seed + number, tokens) for number in range(1, training + 1)}
    return {f"{prefix}_val_000000.bin": shard(seed, tokens), **train}


@pytest.fixture
def hub():
    with Hub({"main": shards(3)}) as hub:
        yield hub


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "shards"


def environment(hub, folder, **more):
    """The user's environment without settings of the client and proxies, which would reach the tests."""
    kept = {key: value for key, value in os.environ.items() if not re.match("HF_|.*_proxy|.*_PROXY", key)}
    home = str(Path(folder).parent / "home")
    return kept | {"HF_ENDPOINT": getattr(hub, "url", hub), "HF_HOME": home, "NO_PROXY": "*"} | more


def command(*args, patch=None, script=SCRIPT):
    """The command line; with a patch, the same script with a value changed."""
    if not patch:
        return [sys.executable, str(script), *map(str, args)]
    lines = (
        f"import sys; sys.path.insert(0, {str(DATA)!r}); import cached_fineweb10B as it; it.{patch}; it.run(it.main)"
    )
    return [sys.executable, "-c", lines, *map(str, args)]


def fetch(hub, folder, *args, patch=None, prefix=(), **env):
    """Call the script to its end: the result, with the lines of stderr."""
    line = [*prefix, *command(*args, "--dir", folder, patch=patch)]
    result = subprocess.run(line, env=environment(hub, folder, **env), capture_output=True, text=True, timeout=60)
    result.lines = result.stderr.splitlines()
    return result


def start(hub, folder, *args):
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command(*args, "--dir", folder), env=environment(hub, folder), **pipes)


def until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "waited for nothing"
        time.sleep(0.02)


def content(folder):
    """Everything in the folder, hidden files too, except for the lock, which stays."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def assert_one_line(result, *words, code=2):
    """The last line says it; lines before it may only tell of shards that have come."""
    assert result.returncode == code, result.stderr
    assert all(line.startswith("fetched ") for line in result.lines[:-1]), result.stderr
    for word in words:
        assert word in result.lines[-1]


# ---- Fetching --------------------------------------------------------------------------------------------------------


def test_n_gets_the_validation_shard_and_the_first_n_training_shards_and_leaves_nothing_else(hub, folder):
    result = fetch(hub, folder, 2)
    assert result.returncode == 0, result.stderr
    assert content(folder) == shards(2)
    assert sorted(result.lines) == sorted(f"fetched {folder / name}" for name in shards(2))


def test_without_n_all_103_training_shards_are_fetched(folder):
    with Hub({"main": shards(103, tokens=10)}) as hub:
        assert fetch(hub, folder).returncode == 0
    assert content(folder) == shards(103, tokens=10)


def test_several_shards_are_fetched_at_a_time(hub, folder):
    for name in shards(3):
        hub.fault("GET", name, "pause")
    process = start(hub, folder, 3)
    until(lambda: len(hub.asked("GET")) == 4)
    process.kill()
    process.communicate()


def test_a_second_call_asks_the_hub_nothing_and_writes_nothing(hub, folder):
    fetch(hub, folder, 2)
    asked, times = len(hub.requests), {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    result = fetch(hub, folder, 2)
    assert (result.returncode, result.stderr, len(hub.requests)) == (0, "", asked)
    assert times == {path: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_missing_and_damaged_shards_alone_are_fetched_again(folder):
    with Hub({"main": shards(7)}) as hub:
        fetch(hub, folder, 7)
        damage = [b"", b"x" * 500, shard(3)[:-1], shard(4) + b"x", bytes(4) + shard(5)[4:]]
        for number, data in enumerate(damage, 1):
            (folder / f"fineweb_train_{number:06d}.bin").write_bytes(data)
        (folder / VAL).unlink()
        os.mkfifo(folder / VAL)
        hub.requests.clear()
        assert fetch(hub, folder, 7).returncode == 0
        assert {request.name for request in hub.asked("GET")} == set(shards(5))
    assert content(folder) == shards(7)


def test_the_other_variants_have_their_own_names_and_folders_from_any_directory_with_only_data_copied(tmp_path):
    copied = tmp_path / "data"
    shutil.copytree(DATA, copied, ignore=lambda _, names: [name for name in names if not name.endswith(".py")])
    for repo, prefix, place in [
        ("kjj0/fineweb10B-gpt2", "fineweb", "fineweb10B"),
        ("kjj0/fineweb100B-gpt2", "fineweb", "fineweb100B"),
        ("kjj0/finewebedu10B-gpt2", "finewebedu", "finewebedu10B"),
        ("somebody/pages-2B", "pages", "pages-2B"),
    ]:
        with Hub({"main": shards(1, prefix)}, repo=repo) as hub:
            line = command(1, "--repo", repo, script=copied / SCRIPT.name)
            subprocess.run(line, env=environment(hub, copied), cwd="/", check=True, capture_output=True)
        assert content(copied / place) == shards(1, prefix)


# ---- Interrupted, and several processes ------------------------------------------------------------------------------


def halfway(hub, folder):
    """A process that has the validation shard and half of shard 1, and hears nothing more."""
    hub.fault("GET", ONE, "pause")
    process = start(hub, folder, 1)
    until((folder / VAL).exists)
    until(lambda: hub.asked("GET", ONE) and any((folder / ".unfinished").rglob("*.incomplete")))
    hub.heal()
    hub.requests.clear()
    return process


def test_after_kill_9_the_next_call_fetches_only_what_is_missing_and_no_leftover_stays(hub, folder):
    process = halfway(hub, folder)
    process.kill()
    process.communicate()
    assert (folder / ".unfinished").exists()
    assert fetch(hub, folder, 1).returncode == 0
    assert content(folder) == shards(1)
    assert {request.name for request in hub.asked("GET")} == {ONE}


def test_after_ctrl_c_there_is_one_line_and_no_leftover(hub, folder):
    process = halfway(hub, folder)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 130
    assert stderr.splitlines()[1:] == ["cached_fineweb10B.py: interrupted; the same call again finishes the job"]
    assert content(folder) == shards(0)


def test_of_several_processes_one_fetches_and_the_others_wait(hub, folder):
    hub.fault("GET", ONE, FOREVER("slow"))
    processes = [start(hub, folder, 2) for _ in range(4)]
    errors = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0, 0], errors
    assert content(folder) == shards(2)
    assert sorted(request.name for request in hub.asked("GET")) == [ONE, TWO, VAL]
    assert sum("fetched" in error for error in errors) == 1


def test_when_the_fetching_process_is_killed_a_waiting_one_takes_over(hub, folder):
    first = halfway(hub, folder)
    second = start(hub, folder, 1)
    assert "waiting for it" in second.stderr.readline()
    first.kill()
    first.communicate()
    second.communicate(timeout=60)
    assert second.returncode == 0
    assert content(folder) == shards(1)


# ---- Faults of the hub and the network -------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["cut", "short", "other bytes", "408", "429", "503", "pause"])
def test_a_fault_that_passes_is_overcome_in_the_same_call(hub, folder, fault):
    hub.fault("GET", ONE, fault)
    result = fetch(hub, folder, 1, patch=QUICK, HF_HUB_DOWNLOAD_TIMEOUT="1")
    assert result.returncode == 0, result.stderr
    assert content(folder) == shards(1)


@pytest.mark.parametrize("fault", ["cut", "short", "other bytes", "503"])
def test_a_fault_that_stays_ends_in_a_line_and_what_is_wrong_gets_no_name(hub, folder, fault):
    hub.fault("GET", ONE, FOREVER(fault))
    assert_one_line(fetch(hub, folder, 1, patch=QUICK), ONE, "call again")
    assert set(content(folder)) <= {VAL}


def test_a_body_that_changes_between_two_requests_is_never_mixed(hub, folder):
    hub.versions["main"] = shards(1, tokens=100_000)
    hub.fault("GET", ONE, "cut", "other bytes")
    hub.fault("HEAD", ONE, "another etag")
    assert fetch(hub, folder, 1, patch=QUICK).returncode == 0
    assert content(folder) == shards(1, tokens=100_000)
    assert len(hub.asked("GET", ONE)) == 3


def test_a_body_without_end_is_cut_off(hub, folder):
    hub.fault("GET", ONE, "endless")
    assert_one_line(fetch(hub, folder, 1), "more bytes", "HF_ENDPOINT")
    assert set(content(folder)) <= {VAL}


@pytest.mark.parametrize(("kind", "fault"), [("HEAD", "trickle"), ("GET", "trickle"), ("GET", "drip")])
def test_a_later_file_that_only_drips_ends_in_a_line(hub, folder, kind, fault):
    hub.fault(kind, ONE, FOREVER(fault))
    assert_one_line(fetch(hub, folder, 1, patch="SILENT_SECONDS = 2"), "nothing has arrived for 2 s", "call again")
    assert set(content(folder)) <= {VAL}


def test_a_hub_that_refuses_connections_is_reported(folder):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert_one_line(fetch(url, folder, 1), url, "refused", "HF_ENDPOINT")
    assert not folder.exists()


@pytest.mark.parametrize("fault", ["silence", "trickle"])
def test_a_hub_that_never_answers_is_reported(hub, folder, fault):
    hub.fault("INFO", None, FOREVER(fault))
    assert_one_line(fetch(hub, folder, 1), hub.url, "no answer", "HF_ENDPOINT")
    assert len(hub.requests) == 1


@pytest.mark.parametrize("endpoint", ["hub.invalid", "http://[", "http://hub.invalid"])
def test_an_endpoint_that_is_none_is_reported_in_one_line(folder, endpoint):
    assert_one_line(fetch(endpoint, folder, 1), "HF_ENDPOINT")


def test_a_server_that_is_no_hub_is_reported(hub, folder):
    hub.fault("INFO", None, "no hub")
    assert_one_line(fetch(hub, folder, 1), hub.url, "HF_ENDPOINT")


def test_a_busy_hub_is_reported(hub, folder):
    hub.fault("INFO", None, "429")
    assert_one_line(fetch(hub, folder, 1), "answers 429", "call again")


@pytest.mark.parametrize("kind", ["HEAD", "GET"])
@pytest.mark.parametrize(("status", "word"), [("401", "HF_TOKEN"), ("403", "HF_TOKEN"), ("404", "--revision")])
def test_what_another_try_cannot_change_is_reported_at_once(hub, folder, kind, status, word):
    hub.fault(kind, ONE, FOREVER(status))
    assert_one_line(fetch(hub, folder, 1), ONE, status, word)
    assert len(hub.asked(kind, ONE)) == 1


def test_a_file_that_is_no_shard_never_gets_its_name(hub, folder):
    for wrong in (bytes(6000), struct.pack("<3i", 20240520, 2, 2488) + bytes(5988), shard(1)[:-2]):
        hub.versions["main"][ONE] = wrong
        assert_one_line(fetch(hub, folder, 1), ONE, "is no shard", "--repo")
        assert set(content(folder)) <= {VAL}


@pytest.mark.parametrize("password", ["secret", "se:cr@et", "secret/"])
def test_a_password_in_the_endpoint_is_never_printed(hub, folder, password):
    endpoint = hub.url.replace("//", f"//user:{password}@")
    results = [fetch(endpoint, folder, 9), fetch(endpoint, folder, 1)]
    hub.fault("INFO", None, "silence", "500")
    hub.fault("GET", TWO, FOREVER("cut"))
    results += [fetch(endpoint, folder, 2, patch="ANSWER_SECONDS = 1"), fetch(endpoint, folder, 2)]
    results += [fetch(endpoint, folder, 2, patch=QUICK), fetch(endpoint.replace("127", "no.127"), folder, 2)]
    for result in results:
        assert not re.search("se:?cr|et@|user", result.stdout + result.stderr), result.stderr
    assert [result.returncode for result in results[:2]] in ([2, 0], [2, 2])  # a slash ends the host's name


# ---- The disk and the terminal ---------------------------------------------------------------------------------------


def test_a_disk_that_is_too_small_is_reported_before_a_byte_is_fetched(hub, folder):
    result = fetch(hub, folder, 3, patch="shutil.disk_usage = lambda _: type('', (), {'free': 20_000})")
    assert_one_line(result, str(folder), "28,096 bytes", "20,000 free", "--dir")
    assert not hub.asked("GET")
    assert content(folder) == {}


def test_a_disk_that_fills_up_ends_in_a_line_and_the_next_call_finishes(hub, folder):
    limited = ["sh", "-c", 'ulimit -f 4; exec "$@"', "sh"]  # 2 KB: a file may not grow further
    assert_one_line(fetch(hub, folder, 1, prefix=limited), "File too large", "free some space")
    assert content(folder) == {}
    assert fetch(hub, folder, 1).returncode == 0
    assert content(folder) == shards(1)


def test_a_path_that_is_no_folder_is_reported(hub, tmp_path):
    (tmp_path / "file").write_text("")
    assert_one_line(fetch(hub, tmp_path / "file", 1), str(tmp_path / "file"))


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_make_no_difference(hub, folder, closed):
    prefix = ["sh", "-c", f'exec "$@" {closed}', "sh"]
    assert fetch(hub, folder, 1, prefix=prefix).returncode == 0
    assert content(folder) == shards(1)
    assert fetch(hub, folder, 9, prefix=prefix).returncode == 2
    assert fetch(hub, folder, 2, "--check", prefix=prefix).returncode == 1


def test_a_terminal_shows_one_bar_with_bytes_rate_and_time_left(hub, folder):
    hub.fault("GET", ONE, "slow")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 120, 0, 0))
    process = subprocess.Popen(command(2, "--dir", folder), env=environment(hub, folder), stderr=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
    os.close(ours)
    assert process.wait() == 0
    bars = [bar for bar in re.split(r"[\r\n]+", shown.decode()) if bar]
    assert all("%|" in bar for bar in bars)
    assert re.search(r"21\.1k/21\.1k \[\d\d:\d\d<\d\d:\d\d, .*B/s\]", bars[-1])


# ---- Settings --------------------------------------------------------------------------------------------------------


def test_revision_pins_a_version_and_replaces_shards_of_another(folder):
    with Hub({"main": shards(1), "v0": shards(1, seed=5)}) as hub:
        for version, revision in [("main", None), ("v0", "v0"), ("main", hub.commits["main"])]:
            hub.requests.clear()
            assert fetch(hub, folder, 1, *(["--revision", revision] if revision else [])).returncode == 0
            assert content(folder) == hub.versions[version]
            assert {request.name for request in hub.asked("GET")} == {VAL, ONE}
            assert {request.revision for request in hub.asked("HEAD")} == {hub.commits[version]}
        hub.requests.clear()
        assert fetch(hub, folder, 1, "--revision", "main").returncode == 0
        assert not hub.asked("GET")


def test_the_token_goes_to_the_hub_and_not_to_the_store(folder):
    with Hub({"main": shards(1)}, token="hf_right") as hub:
        assert_one_line(fetch(hub, folder, 1), "401", "HF_TOKEN")
        assert fetch(hub, folder, 1, HF_TOKEN="hf_right").returncode == 0
        assert {request.token for request in hub.asked("GET")} == {None}
    assert content(folder) == shards(1)


def test_shards_that_the_client_has_already_are_not_fetched_but_checked(hub, folder):
    client = f"import huggingface_hub as h; h.hf_hub_download('kjj0/fineweb10B-gpt2', {ONE!r}, repo_type='dataset')"
    subprocess.run([sys.executable, "-c", client], env=environment(hub, folder), check=True, capture_output=True)
    hub.requests.clear()
    assert fetch(hub, folder, 1).returncode == 0
    assert content(folder) == shards(1)
    assert {request.name for request in hub.asked("GET")} == {VAL}


def test_offline_nothing_is_asked_and_what_is_complete_is_used(hub, folder):
    fetch(hub, folder, 1)
    hub.requests.clear()
    assert fetch(hub, folder, 1, HF_HUB_OFFLINE="1").returncode == 0
    assert_one_line(fetch(hub, folder, 2, HF_HUB_OFFLINE="1"), "HF_HUB_OFFLINE")
    assert not hub.requests


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["x"], "'x'"),
        (["-1"], "0 or more"),
        (["4"], "000004"),
        (["--nonsense"], "--nonsense"),
        (["--repo", "some/body"], "number N"),
        (["1", "--repo", "a/b/c"], "a/b/c"),
        (["1", "--repo", "a/.."], "a/.."),
        (["1", "--repo", ""], "repo"),
        (["1", "--repo", "no/body"], "404"),
        (["1", "--revision", "nowhere"], "404"),
    ],
)
def test_a_wrong_argument_is_reported_in_one_line_and_leaves_no_folder(hub, tmp_path, args, word):
    copied = Path(shutil.copytree(DATA, tmp_path / "data", ignore=shutil.ignore_patterns("*.bin", "__pycache__")))
    before = sorted(copied.iterdir())
    line = [sys.executable, "-B", str(copied / SCRIPT.name), *args]
    result = subprocess.run(line, env=environment(hub, copied), capture_output=True, text=True, timeout=60)
    result.lines = result.stderr.splitlines()
    assert_one_line(result, word)
    assert sorted(copied.iterdir()) == before


# ---- --check ---------------------------------------------------------------------------------------------------------


def test_check_is_content_with_good_shards_and_asks_nobody(hub, folder):
    fetch(hub, folder, 3)
    hub.requests.clear()
    result = fetch(hub, folder, 3, "--check")
    assert (result.returncode, result.stderr, hub.requests) == (0, "", [])
    assert result.stdout == f"{folder}: 4 of 4 shards are good\n"


def test_check_lists_what_is_missing_or_bad_and_touches_nothing(folder):
    folder.mkdir()
    bad = {
        "fineweb_train_000002.bin": shard(2)[:-2],
        "fineweb_train_000003.bin": b"short",
        "fineweb_train_000004.bin": shard(4)[:4] + struct.pack("<i", 2) + shard(4)[8:],
        "fineweb_train_000005.bin": shard(5, tokens=0),
        "fineweb_train_000006.bin": shard(6)[:-2] + struct.pack("<H", 50257),
    }
    written = {VAL: shard(0)[:-2] + struct.pack("<H", 50256), ONE: shard(1), **bad}
    for name, data in written.items():
        (folder / name).write_bytes(data)
    os.mkfifo(folder / "fineweb_train_000007.bin")
    (folder / "fineweb_train_000008.bin").symlink_to("/dev/zero")
    result = fetch(NOWHERE, folder, "--check", 9)
    assert result.returncode == 1
    lines = result.stdout.splitlines()
    assert [line.split(":")[0] for line in lines[:-1]] == [f"fineweb_train_{number:06d}.bin" for number in range(2, 10)]
    assert [line.split(": ")[1].split(" ")[0] for line in lines[:-1]] == ["bad"] * 5 + ["no"] * 2 + ["missing"]
    assert "token 50257" in lines[4]
    assert "2 of 10" in lines[-1]
    assert {name: (folder / name).read_bytes() for name in written} == written
    assert len(list(folder.iterdir())) == 9


def test_check_of_a_folder_that_is_not_there_lists_all_104(folder):
    result = fetch(NOWHERE, folder, "--check")
    assert result.returncode == 1
    assert len(re.findall("missing", result.stdout)) == 104
    assert not folder.exists()
