"""The header of a log: settings, seed, data and hardware."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from records.logs import Lines, Log, rules
from records.terminal import brief

HEADER_LINE = re.compile(rb"\n(python|torch|cuda|hardware|world_size|seed|settings|data):([^\n]*)")
LONGEST_JSON = 2_000_000  # bytes; a header with ten thousand shards is about as long
GPU_ROW = re.compile(rb"\|\s{1,9}\d{1,4}\s{1,9}(\S.{0,80}?)\s{1,40}(?:On|Off|N/A|WDDM|TCC|MCDM)\s{1,9}\|")
GPU_WORDS = re.compile(rb"([^\n]{1,200}?) with world_size=(\d{1,6})\b")  # NVIDIA H100 80GB HBM3 with world_size=8


def read_header(log: Log, data: bytes, start: int, body: int) -> None:
    """Take `key: value` lines up to the next line of `=` or the first step, whichever comes first."""
    rule = next(rules(data, body), None)
    end = rule[0] if rule else len(data)
    first_step = data.find(b"\nstep:", body, end)
    end = first_step if first_step >= 0 else end
    header = {}
    for match in HEADER_LINE.finditer(data, body, end):
        header.setdefault(match[1].decode(), (match[2].strip(), match.start() + 1))
    lines = Lines(data)

    def complain(key: str, problem: str) -> None:
        log.complaints.append((lines.at(header[key][1]), problem))

    def text_of(key: str) -> str | None:
        return brief(header[key][0][:1000].decode(errors="replace")) if key in header else None

    def read_json(key: str, kind: type):
        if key not in header:
            return None
        text = header[key][0]
        try:
            value = json.loads(text) if len(text) <= LONGEST_JSON else None
            if isinstance(value, kind):
                return value
            problem = f"is not a JSON {'object' if kind is dict else 'list'}"
        except (ValueError, RecursionError) as error:
            problem = f"is not JSON: {error}"
        complain(key, f"'{key}' {problem}")
        return None

    log.settings = read_json("settings", dict)
    if log.settings is not None and "target_loss" in log.settings:
        log.target = number(log.settings["target_loss"])
        if log.target is None:
            complain("settings", f"target_loss is {brief(repr(log.settings['target_loss']), 40)}, no number")
    log.seed = text_of("seed")
    if log.seed is None and log.settings and "seed" in log.settings:
        log.seed = brief(str(log.settings["seed"]))
    named, world_size = text_of("hardware"), text_of("world_size")
    log.hardware = describe_hardware(named, world_size, gpus_of(data, start, body))
    if named and world_size:
        log.machine = f"{world_size} x {named}"
    shards = read_json("data", list)
    if shards:
        log.data, log.data_files = fingerprint(shards)


def number(value: object) -> float | None:
    try:
        value = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return None
    return value if math.isfinite(value) else None


def gpus_of(data: bytes, start: int, body: int) -> list[tuple[str, int]]:
    """[(name, how many)] as nvidia-smi or the script itself prints it, in front of the source or behind it."""
    for first, last in (0, start), (body, len(data)):
        rows = [match[1] for line in table_rows(data, first, last) if (match := GPU_ROW.match(line))]
        if rows:
            return [(gpu.decode(errors="replace"), count) for gpu, count in sorted(Counter(rows).items())]
        place = data.find(b" with world_size=", first, last)
        if place >= 0:
            begin = max(data.rfind(b"\n", first, place), place - 200) + 1
            if match := GPU_WORDS.match(data, begin):
                words = match[1].decode(errors="replace")
                name = "NVIDIA" + words.partition("NVIDIA")[2] if "NVIDIA" in words else words.rpartition(":")[2]
                return [(name.strip(), int(match[2]))]
    return []


def table_rows(data: bytes, first: int, last: int) -> Iterator[bytes]:
    """The lines that start with a bar, as those of nvidia-smi's table do."""
    at = data.find(b"\n|", first, last)
    while at >= 0:
        yield data[at + 1 : at + 200]
        at = data.find(b"\n|", at + 1, last)


def describe_hardware(named: str | None, world_size: str | None, gpus: list[tuple[str, int]]) -> str | None:
    """One line that is equal for equal machines: nvidia-smi's dates and temperatures are not part of it.

    Where all GPUs are alike it counts those that the run used, however the log lists them; of a CPU it counts threads,
    however a script divides them among processes.
    """
    if len(gpus) == 1:
        name, count = gpus[0]
        return f"{world_size or count} x {name}"
    if named and named.startswith("NVIDIA ") and world_size and not gpus:
        return f"{world_size} x {named}"
    if not gpus and (of_cpu := re.fullmatch(r"(.*, \d+ cores), (\d{1,6}) threads per process", named or "")):
        processes = int(world_size) if re.fullmatch("[0-9]{1,6}", world_size or "") else 1
        return f"{of_cpu[1]}, {int(of_cpu[2]) * processes} threads"
    told = ", ".join(f"{count} x {name}" for name, count in gpus) or named
    return f"{told}, world size {world_size}" if told and world_size else told


def fingerprint(shards: list) -> tuple[str, list[str]]:
    """(short hash, file names) of the data. The folder that the shards lie in is no part of what they are."""
    shards = [{**s, "file": Path(str(s.get("file", ""))).name} if isinstance(s, dict) else s for s in shards]
    text = json.dumps(sorted(shards, key=str), sort_keys=True)
    return sha256(text.encode(errors="replace")).hexdigest()[:8], [s["file"] for s in shards if isinstance(s, dict)]
