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
QUICK = "PAUSES = (0.01, 0.02, 0.03)"  # for faults that last


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
    """The command line; with a patch, the same script with a constant changed."""
    if not patch:
        return [sys.executable, str(script), *map(str, args)]
    lines = f"import sys; sys.path.insert(0, {str(DATA)!r}); import cached_fineweb10B as it; it.{patch}; "
    return [sys.executable, "-c", lines + "it.run_script(it.main)", *map(str, args)]


def fetch(hub, folder, *args, patch=None, **env):
    """Call the script to its end: the result, with the lines of stderr."""
    line = command(*args, "--dir", folder, patch=patch)
    result = subprocess.run(line, env=environment(hub, folder, **env), capture_output=True, text=True, timeout=60)
    result.lines = result.stderr.splitlines()
    return result


def start(hub, folder, *args, **env):
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command(*args, "--dir", folder), env=environment(hub, folder, **env), **pipes)


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def content(folder):
    """Everything in the folder, hidden files too."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_one_line(result, *words, code=2):
    """The last line says it; lines before it may only tell of the fetch and of further tries."""
    assert result.returncode == code, result.stderr
    assert not [line for line in result.lines[:-1] if not re.match("fetching |.*trying again in", line)], result.stderr
    for word in words:
        assert word in result.lines[-1]


# ---------------------------------------------------------------------------------------------------------------------
# Fetching
# ---------------------------------------------------------------------------------------------------------------------


def test_n_gets_the_validation_shard_and_the_first_n_training_shards_and_leaves_nothing_else(hub, folder):
    result = fetch(hub, folder, 2)
    assert result.returncode == 0, result.stderr
    assert content(folder) == shards(2)


def test_without_n_all_103_training_shards_are_fetched(folder):
    with Hub({"main": shards(103, tokens=10)}) as hub:
        assert fetch(hub, folder).returncode == 0
    assert content(folder) == shards(103, tokens=10)


def test_several_shards_are_fetched_at_a_time(hub, folder):
    for name in shards(3):
        hub.fault("GET", name, "silence in body")
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
        hub.requests.clear()
        assert fetch(hub, folder, 7).returncode == 0
        assert {request.name for request in hub.asked("GET")} == set(shards(5))
    assert content(folder) == shards(7)


def test_small_files_that_the_hub_serves_itself_arrive_too(folder):
    with Hub({"main": shards(2)}, direct=True) as hub:
        hub.fault("GET", ONE, "cut")
        assert fetch(hub, folder, 2).returncode == 0
    assert content(folder) == shards(2)


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


# ---------------------------------------------------------------------------------------------------------------------
# Interrupted
# ---------------------------------------------------------------------------------------------------------------------


def halfway(hub, folder):
    """A process that has half of shard 1 and hears nothing more."""
    hub.fault("GET", ONE, "silence in body")
    process = start(hub, folder, 1)
    half = len(shard(1)) // 2
    until(lambda: any(path.stat().st_size == half for path in folder.glob(f".{ONE}.*.partial")))
    until((folder / VAL).exists)
    assert not (folder / ONE).exists()
    hub.heal()
    hub.requests.clear()
    return process


def test_after_kill_9_the_next_call_goes_on_where_it_stopped_and_no_orphan_stays(hub, folder):
    process = halfway(hub, folder)
    process.kill()
    process.communicate()
    assert fetch(hub, folder, 1).returncode == 0
    assert content(folder) == shards(1)
    assert [request.range for request in hub.asked("GET")] == [f"bytes={len(shard(1)) // 2}-"]


def test_after_ctrl_c_there_is_one_line_and_the_next_call_goes_on_where_it_stopped(hub, folder):
    process = halfway(hub, folder)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 130
    assert [line for line in stderr.splitlines() if not line.startswith("fetching")] == [
        "cached_fineweb10B.py: interrupted; the same call again finishes the job"
    ]
    assert fetch(hub, folder, 1).returncode == 0
    assert content(folder) == shards(1)
    assert [request.range for request in hub.asked("GET")] == [f"bytes={len(shard(1)) // 2}-"]


def test_after_kill_9_a_call_for_fewer_shards_removes_the_orphan_without_the_hub(hub, folder):
    process = halfway(hub, folder)
    process.kill()
    process.communicate()
    assert fetch(hub, folder, 0).returncode == 0
    assert content(folder) == shards(0)
    assert not hub.requests


def test_a_partial_file_of_another_version_is_never_continued(hub, folder):
    process = halfway(hub, folder)
    process.kill()
    process.communicate()
    hub.versions["main"] = shards(1, seed=7)
    (folder / VAL).unlink()
    assert fetch(hub, folder, 1).returncode == 0
    assert content(folder) == shards(1, seed=7)
    assert {request.range for request in hub.asked("GET")} == {None}


@pytest.mark.parametrize("fault", ["cut", "short"])
def test_a_cut_connection_and_a_short_body_are_continued_in_the_same_call(hub, folder, fault):
    hub.fault("GET", ONE, fault)
    result = fetch(hub, folder, 1)
    assert result.returncode == 0
    assert "trying again in 1 s" in result.stderr
    assert content(folder) == shards(1)
    assert [request.range for request in hub.asked("GET", ONE)] == [None, f"bytes={len(shard(1)) // 2}-"]


def test_a_store_that_ignores_ranges_costs_time_but_no_byte(hub, folder):
    hub.fault("GET", ONE, "cut", "no ranges")
    assert fetch(hub, folder, 1).returncode == 0
    assert content(folder) == shards(1)
    assert len(hub.asked("GET", ONE)) == 2


def test_a_store_that_always_breaks_off_at_the_same_byte_ends_in_a_line(hub, folder):
    hub.fault("GET", ONE, FOREVER("cut without ranges"))
    assert_one_line(fetch(hub, folder, 1, patch=QUICK), ONE, "call again")
    assert len(hub.asked("GET", ONE)) == 4  # three pauses, although every try brought bytes


def test_wrong_bytes_of_the_right_length_never_get_the_name_and_are_fetched_anew(hub, folder):
    hub.fault("GET", ONE, "other bytes")
    result = fetch(hub, folder, 1, patch=QUICK)
    assert "sha256" in result.stderr
    assert content(folder) == shards(1)


def test_a_file_that_is_no_shard_never_gets_its_name(hub, folder):
    for wrong in (bytes(6000), struct.pack("<3i", 20240520, 2, 2488) + bytes(5988), shard(1)[:-2]):
        hub.versions["main"][ONE] = wrong
        result = fetch(hub, folder, 1)
        assert_one_line(result, ONE, "is no shard", "--repo")
        assert not [name for name in content(folder) if ONE in name]


# ---------------------------------------------------------------------------------------------------------------------
# Faults of the hub, the network and the disk
# ---------------------------------------------------------------------------------------------------------------------


def test_a_hub_that_refuses_connections_is_reported_within_ten_seconds(folder):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        began = time.monotonic()
        result = fetch(f"http://127.0.0.1:{unused.getsockname()[1]}", folder, 1)
    assert time.monotonic() - began < 10
    assert_one_line(result, "cannot reach http://127.0.0.1", "HF_ENDPOINT")


def test_a_hub_that_never_answers_is_reported_within_ten_seconds(hub, folder):
    hub.fault("HEAD", VAL, "silence", "trickle")
    began = time.monotonic()
    both = [start(hub, folder / name, 1) for name in ("one", "two")]
    for process in both:
        _, stderr = process.communicate(timeout=30)
        assert time.monotonic() - began < 10
        assert process.returncode == 2
        assert re.fullmatch(rf"cached_fineweb10B.py: cannot reach {hub.url}: no answer .* HF_ENDPOINT\n", stderr)
    assert len(hub.requests) == 2


@pytest.mark.parametrize("endpoint", ["hub.invalid", "http://[", "http://hub.invalid"])
def test_an_endpoint_that_is_none_is_reported_in_one_line(folder, endpoint):
    assert_one_line(fetch(endpoint, folder, 1), "HF_ENDPOINT")


def test_silence_in_the_middle_of_a_body_ends_in_a_line(hub, folder):
    hub.fault("GET", ONE, FOREVER("silence"))
    result = fetch(hub, folder, 1, patch="PAUSES = (0.01,)", HF_HUB_DOWNLOAD_TIMEOUT="1")
    assert_one_line(result, ONE, "timed out", "call again")


def test_silence_in_the_middle_of_a_body_is_overcome_if_it_passes(hub, folder):
    hub.fault("GET", ONE, "silence in body")
    assert fetch(hub, folder, 1, patch=QUICK, HF_HUB_DOWNLOAD_TIMEOUT="1").returncode == 0
    assert content(folder) == shards(1)


@pytest.mark.parametrize("method", ["HEAD", "GET"])
@pytest.mark.parametrize(("status", "word"), [("401", "HF_TOKEN"), ("404", "--revision")])
def test_what_patience_cannot_mend_is_reported_at_once(hub, folder, method, status, word):
    hub.fault(method, ONE, FOREVER(status))
    result = fetch(hub, folder, 1)
    assert_one_line(result, ONE, status, word)
    assert len(hub.asked(method, ONE)) == 1


def test_a_shard_revision_or_repository_that_is_not_there_is_reported(hub, folder):
    assert_one_line(fetch(hub, folder, 4), "fineweb_train_000004.bin", "404", "check N, --repo and --revision")
    assert_one_line(fetch(hub, folder, 1, "--revision", "nowhere"), "nowhere", "404", "--revision")
    assert_one_line(fetch(hub, folder, 1, "--repo", "no/fineweb10B"), "no/fineweb10B", "404", "--repo")


@pytest.mark.parametrize(("method", "status"), [("HEAD", "429"), ("HEAD", "500"), ("GET", "429"), ("GET", "503")])
def test_a_busy_hub_is_asked_again_until_it_answers(hub, folder, method, status):
    hub.fault(method, ONE, status, status)
    result = fetch(hub, folder, 1, patch=QUICK)
    assert result.returncode == 0, result.stderr
    assert content(folder) == shards(1)
    assert len(hub.asked(method, ONE)) == 3


def test_the_pauses_grow(hub, folder):
    hub.fault("GET", ONE, "500", "429")
    result = fetch(hub, folder, 1)
    assert re.findall(r"answers (\d+); trying again in (\d+) s", result.stderr) == [("500", "1"), ("429", "2")]
    assert content(folder) == shards(1)


def test_retry_after_is_honoured_up_to_a_bound(hub, folder):
    hub.retry_after = 2
    hub.fault("GET", ONE, "429")
    assert "trying again in 2 s" in fetch(hub, folder, 1).stderr
    hub.retry_after = 86400
    hub.fault("GET", TWO, "429")
    assert "trying again in 1 s" in fetch(hub, folder, 2, patch="LONGEST_PAUSE = 1").stderr
    assert content(folder) == shards(2)


@pytest.mark.parametrize(("method", "name"), [("HEAD", VAL), ("HEAD", ONE), ("GET", ONE)])
def test_a_hub_that_stays_busy_ends_in_a_line(hub, folder, method, name):
    status = "429" if name == ONE else "500"
    hub.fault(method, name, FOREVER(status))
    result = fetch(hub, folder, 1, patch=QUICK)
    assert_one_line(result, name, f"answers {status}", "call again")
    assert len(result.lines) >= 4


def test_a_server_that_is_no_hub_is_reported(hub, folder):
    hub.fault("HEAD", VAL, FOREVER("no commit"))
    assert_one_line(fetch(hub, folder, 1), VAL, "HF_ENDPOINT")


def test_a_disk_that_is_too_small_is_reported_before_a_byte_is_fetched(hub, folder):
    result = fetch(hub, folder, 3, patch="shutil.disk_usage = lambda _: type('', (), {'free': 20_000})")
    assert_one_line(result, str(folder), "28,096 bytes", "20,000 free", "--dir")
    assert not hub.asked("GET")
    assert content(folder) == {}


def test_a_disk_that_fills_up_ends_in_a_line_and_the_next_call_finishes(hub, folder):
    process = halfway(hub, folder)
    process.kill()
    process.communicate()
    (partial,) = folder.glob(f".{ONE}.*.partial")
    partial.unlink()
    partial.symlink_to("/dev/full")
    assert_one_line(fetch(hub, folder, 1), partial.name, "No space left on device", "free some space")
    partial.unlink()
    assert fetch(hub, folder, 1).returncode == 0
    assert content(folder) == shards(1)


def test_a_file_size_limit_ends_in_a_line(hub, folder):
    line = ["sh", "-c", 'ulimit -f 4; exec "$@"', "sh", *command(1, "--dir", folder)]
    result = subprocess.run(line, env=environment(hub, folder), capture_output=True, text=True)
    result.lines = result.stderr.splitlines()
    assert_one_line(result, ".partial", "File too large", "free some space")


def test_a_path_that_is_no_folder_is_reported(hub, tmp_path):
    (tmp_path / "file").write_text("")
    assert_one_line(fetch(hub, tmp_path / "file", 1), str(tmp_path / "file"))


# ---------------------------------------------------------------------------------------------------------------------
# Several processes
# ---------------------------------------------------------------------------------------------------------------------


def test_of_several_processes_one_fetches_and_the_others_wait(hub, folder):
    hub.fault("GET", ONE, FOREVER("slow"))
    processes = [start(hub, folder, 2) for _ in range(4)]
    errors = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0, 0], errors
    assert content(folder) == shards(2)
    assert sorted(request.name for request in hub.asked("GET")) == [ONE, TWO, VAL]
    assert sorted(error.count("waiting for it") for error in errors) == [0, 1, 1, 1]


def test_when_the_fetching_process_is_killed_a_waiting_one_takes_over(hub, folder):
    hub.fault("GET", ONE, "silence in body")
    first = start(hub, folder, 1)
    until(lambda: hub.asked("GET", ONE))
    second = start(hub, folder, 1)
    assert "waiting for it" in second.stderr.readline()
    first.kill()
    first.communicate()
    second.communicate(timeout=60)
    assert second.returncode == 0
    assert content(folder) == shards(1)


# ---------------------------------------------------------------------------------------------------------------------
# Settings
# ---------------------------------------------------------------------------------------------------------------------


def test_revision_pins_a_version_and_replaces_shards_of_another(folder):
    with Hub({"main": shards(1), "v0": shards(1, seed=5)}) as hub:
        for version, revision in [("main", None), ("v0", "v0"), ("main", hub.commits["main"])]:
            hub.requests.clear()
            assert fetch(hub, folder, 1, *(["--revision", revision] if revision else [])).returncode == 0
            assert content(folder) == hub.versions[version]
            assert {request.name for request in hub.asked("GET")} == {VAL, ONE}
        hub.requests.clear()
        assert fetch(hub, folder, 1, "--revision", "main").returncode == 0
        assert not hub.asked("GET")


def test_all_shards_of_a_call_are_of_one_commit_whatever_is_pushed_meanwhile(hub, folder):
    fetch(hub, folder, 3)
    redirected = [request for request in hub.requests if request.method == "GET" and request.place == "hub"]
    assert {request.name: request.revision for request in redirected} == dict.fromkeys(shards(3), hub.commits["main"])


def test_the_token_goes_to_the_hub_and_not_to_the_store(folder):
    with Hub({"main": shards(1)}, token="hf_right") as hub:
        assert_one_line(fetch(hub, folder, 1), "401", "HF_TOKEN")
        assert_one_line(fetch(hub, folder, 1, HF_TOKEN="hf_wrong"), "401", "HF_TOKEN")
        assert fetch(hub, folder, 1, HF_TOKEN="hf_right").returncode == 0
        assert {request.token for request in hub.asked("GET")} == {None}
    assert content(folder) == shards(1)


def test_hf_home_holds_the_token_and_shards_that_the_client_has_already(hub, folder, tmp_path):
    hub.token = "hf_home"
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "token").write_text("hf_home")
    client = f"import huggingface_hub as h; h.hf_hub_download('kjj0/fineweb10B-gpt2', {ONE!r}, repo_type='dataset')"
    subprocess.run([sys.executable, "-c", client], env=environment(hub, folder), check=True, capture_output=True)
    hub.requests.clear()
    assert fetch(hub, folder, 1).returncode == 0
    assert content(folder) == shards(1)
    assert {request.name for request in hub.asked("GET")} == {VAL}
    shutil.rmtree(folder)
    assert_one_line(fetch(hub, folder, 1, HF_HUB_OFFLINE="1"), VAL, "HF_HUB_OFFLINE")
    folder.joinpath(VAL).write_bytes(shard(0))
    assert fetch(hub, folder, 1, HF_HUB_OFFLINE="1").returncode == 0
    assert content(folder) == shards(1)


def test_offline_nothing_is_asked_and_what_is_complete_is_used(hub, folder):
    fetch(hub, folder, 1)
    hub.requests.clear()
    assert fetch(hub, folder, 1, HF_HUB_OFFLINE="1").returncode == 0
    assert fetch(hub, folder, 1, "--revision", "main", HF_HUB_OFFLINE="1").returncode == 0
    assert_one_line(fetch(hub, folder, 2, HF_HUB_OFFLINE="1"), TWO, "HF_HUB_OFFLINE")
    assert not hub.requests


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["x"], "'x'"),
        (["-1"], "-1"),
        (["104"], "103"),
        (["--nonsense"], "--nonsense"),
        (["--repo", "some/body"], "give N"),
        (["1", "--repo", "a/b/c"], "a/b/c"),
        (["1", "--repo", ""], "--repo"),
    ],
)
def test_a_wrong_argument_is_reported_in_one_line(folder, args, word):
    assert_one_line(fetch("http://127.0.0.1:9", folder, *args), word)
    assert not folder.exists() or content(folder) == {}


# ---------------------------------------------------------------------------------------------------------------------
# --check and progress
# ---------------------------------------------------------------------------------------------------------------------


def check(folder, *args):
    return fetch("http://127.0.0.1:9", folder, "--check", *args)


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
    result = check(folder, 7)
    assert result.returncode == 1
    lines = result.stdout.splitlines()
    assert [line.split(":")[0] for line in lines[:-1]] == [*bad, "fineweb_train_000007.bin"]
    assert ["missing" in line for line in lines[:-1]] == [False] * 5 + [True]
    assert "token 50257" in lines[4]
    assert "2 of 8" in lines[-1]
    assert content(folder) == written


def test_check_of_a_folder_that_is_not_there_lists_all_104(folder):
    result = check(folder)
    assert result.returncode == 1
    assert len(re.findall("missing", result.stdout)) == 104
    assert not folder.exists()


def test_a_terminal_shows_one_bar_with_bytes_tokens_and_time_left(hub, folder):
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
    bars = [bar for bar in re.split(r"[\r\n]+", shown.decode()) if "%|" in bar]
    assert re.search(r"21\.1k/21\.1k \[\d\d:\d\d<\d\d:\d\d, .*B/s, 0M of 0M tokens\]", bars[-1])


def test_without_a_terminal_progress_is_an_occasional_plain_line(hub, folder):
    hub.fault("GET", ONE, "slow")
    result = fetch(hub, folder, 2, patch="PLAIN_LINE_SECONDS = 0.3")
    plain = [line for line in result.lines if re.match(r"\d+%, .* of 21\.1k, .*B/s, .* left, .* tokens$", line)]
    assert plain
    assert "\r" not in result.stderr
    assert len(result.lines) == len(plain) + 1
