"""What the files of a rehearsal say: logs, collectives, kernels. Text in, plain values out."""

import ast
import json
import math
import re
import signal
import subprocess
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

OPTIMIZER_MARK = "[rehearsal] Optimizer "
WAIT_MARK = "[rehearsal] Waited for the GPU"
WARNED_FROM = "[rehearsal] warned from "
STEP_LINE = re.compile(r"^step:(\d+)/(\d+) .*train_time:")
VALIDATION_LINE = re.compile(r"^step:\d+/\d+ val_loss:")
DYNAMO_LINE = re.compile(r"\[(\d+/\d+)(?:_\d+)?\] \[__(graph_breaks|recompiles)\] ?(.*)$")
GRAPH_BREAK = re.compile(r"^Graph break (?:in|from) .*? at (.+:\d+)")
FALLEN_BACK = re.compile(r"^torch\.compile will skip tracing the frame (\S+) \((.+) line (\d+)\)")
RECOMPILE = re.compile(r"^Recompiling function (\S+) in (.+:\d+)")
RECOMPILE_LIMIT = re.compile(r"\[(\d+/\d+)(?:_\d+)?\] torch\._dynamo hit config\.(\w+ \(\d+\))")
LIMITED_FUNCTION = re.compile(r"   function: '(.*)' \((.+:\d+)\)$")
PYTHON_WARNING = re.compile(r"^(?:\[rank\d+\]:\s?)?(\S.*?:\d+): (\w*Warning): (.*)$")
NATIVE_WARNING = re.compile(r"^(?:\[rank\d+\]:\s?)?\[W\d.*?\] (?:Warning: )?(.*)$")
MISMATCH = re.compile(
    r"Rank (\d+) is running collective: CollectiveFingerPrint\((.*?)TensorDtypes=(\w+).*?"
    r"but Rank (\d+) is running collective: CollectiveFingerPrint\((.*?)TensorDtypes=(\w+)"
)
RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")
TRACEBACK = "Traceback (most recent call last):"
CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
ERROR = re.compile(r"^(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt)\b")  # without a traceback: a syntax error
CONSEQUENCE = re.compile(r"Dist\w*Error|NCCL|[Gg]loo|[Cc]onnection (?:was )?(?:closed|reset)|pair closure|SIGTERM")
TORCHRUN_FAILURE = re.compile(r"^ +rank +: (\d+) .*\n +exitcode +: (-?\d+) ", re.MULTILINE)
USER_ERROR = re.compile(r"^train_gpt: (?!rank \d+ failed:$)(.*)$")  # that line has a traceback below it


# ---- The log of a rank -----------------------------------------------------------------------------------------------


@dataclass
class Found:
    """A graph break, a recompile or a warning: where it is, why, and whether the clock was running."""

    place: str
    reason: str
    compile_id: str = ""
    after_warmup: bool = False
    ranks: list[int] = field(default_factory=list)


@dataclass
class RankLog:
    graph_breaks: list[Found] = field(default_factory=list)
    recompiles: list[Found] = field(default_factory=list)
    deprecations: list[Found] = field(default_factory=list)
    last_step: int = 0
    steps: int = 0
    validations: int = 0
    error: str = ""
    mismatch: str = ""
    warmup_marks: int | None = None  # optimizer steps before the clock started; None if it never did


def marks_of_warmup(lines: list[str]) -> tuple[int | None, int]:
    """How many optimizer marks belong to the warm-up, and from which line on the clock runs for certain."""
    optimizers = {line.split()[2] for line in lines if line.startswith(OPTIMIZER_MARK)}
    marks = 0
    for number, line in enumerate(lines):
        if line.startswith(OPTIMIZER_MARK):
            marks += 1
        elif found := STEP_LINE.match(line):
            steps_done = int(found[1])
            return max(0, marks - steps_done * len(optimizers)), number
    return None, len(lines)


def end_of_warmup(lines: list[str], warmup_steps: int) -> int:
    """The line with which the warm-up ends, from the rank's own marks.

    After its last optimizer step it may still run a forward without gradients. Then the script waits for the GPU, as
    it starts the clock; without such a wait, the last optimizer step itself is the end.
    """
    marks = [number for number, line in enumerate(lines) if line.startswith(OPTIMIZER_MARK)]
    optimizers = {lines[number].split()[2] for number in marks}
    of_warmup = warmup_steps * len(optimizers)
    if len(marks) < of_warmup or (warmup_steps and not marks):
        return len(lines)
    last = marks[of_warmup - 1] if of_warmup else -1
    next_step = marks[of_warmup] if of_warmup < len(marks) else len(lines)
    waits = (number for number in range(last + 1, next_step) if lines[number].startswith(WAIT_MARK))
    return next(waits, last)


def first_error(lines: list[str]) -> str:
    """What the script said to the user, or the last exception of the first chain of tracebacks."""
    error, in_traceback, chained = "", False, False
    for line in (RANK_PREFIX.sub("", line) for line in lines):
        if line.startswith(TRACEBACK):
            in_traceback = not error or chained
        elif line.startswith(CHAINED):
            chained = True
        elif in_traceback and line[:1].strip():  # its other lines are indented
            error, in_traceback, chained = line, False, False
        elif not error and (found := USER_ERROR.match(line)):
            error = found[1]
        elif not error and ERROR.match(line):
            error = line
    return error


def read_failures(torchrun_log: str) -> dict[int, int]:
    """Exit codes of the ranks that failed, the one first that torchrun saw first."""
    others, _, root_cause = torchrun_log.partition("Root Cause")
    return {int(rank): int(code) for rank, code in TORCHRUN_FAILURE.findall(root_cause + "\n" + others)}


def first_fault(errors: dict[int, str], failures: dict[int, int]) -> str:
    """The error that led to the others: a rank's fault rather than a lost connection, the earliest of these."""
    told = {
        rank: f"killed by {signal.Signals(-code).name}"
        for rank, code in failures.items()
        if code < 0 and code != -signal.SIGTERM
    } | errors  # torchrun itself ends the others by SIGTERM
    root_cause = next(iter(failures), None)
    ranks = sorted(told, key=lambda rank: (bool(CONSEQUENCE.search(told[rank])), rank != root_cause, rank))
    return f"rank {ranks[0]}: {told[ranks[0]]}" if ranks else ""


def dynamo_note(lines: list[str], number: int, kind: str) -> str:
    """The reason in the lines below the first one of a graph break or recompile."""
    reasons = []
    for line in lines[number + 1 : number + 40]:
        found = DYNAMO_LINE.search(line)
        if not found or found[2] != kind or GRAPH_BREAK.match(found[3]) or RECOMPILE.match(found[3]):
            break
        reasons.append(found[3].strip())
    if kind == "recompiles":
        guards = [r.split("# ")[0].strip("- ") for r in reasons if re.match(r"- \d+/\d+: ", r)]
        return "; ".join(" ".join(guard.split()) for guard in guards)
    explained = [r.partition(": ")[2] for r in reasons if r.startswith("Explanation: ")]
    return explained[0] if explained else " ".join(reasons[:1]).removeprefix("Graph Break Reason: ")


def deprecation(lines: list[str], number: int) -> Found | None:
    if found := PYTHON_WARNING.match(lines[number]):
        place, category, reason = found.groups()
        hidden = category in ("DeprecationWarning", "PendingDeprecationWarning") and "site-packages" in place
        if hidden or not (category == "FutureWarning" or "deprecat" in reason.lower()):
            return None
        below = next((line for line in lines[number + 1 : number + 4] if line.startswith(WARNED_FROM)), "")
        return Found(below.removeprefix(WARNED_FROM).strip() or place, reason)
    if (found := NATIVE_WARNING.match(lines[number])) and "deprecat" in found[1].lower():
        return Found("torch", found[1])
    return None


def mismatch_note(line: str) -> str:
    found = MISMATCH.search(line)
    if not found:
        return line.strip()

    def told(fingerprint: str, dtype: str) -> str:
        kind, shape = re.search(r"OpType=(\w+)", fingerprint), re.search(r"TensorShape=(\[.*?\])", fingerprint)
        return f"{kind[1] if kind else '?'} of {shape[1] if shape else '?'} {dtype}"

    return f"rank {found[1]} runs {told(found[2], found[3])}, but rank {found[4]} runs {told(found[5], found[6])}"


def read_log(text: str, leader: RankLog | None = None, warmup_steps: int | None = None) -> RankLog:
    """Reads one rank's log.

    With the number of the script's warm-up steps, each rank's own marks say where they end. Without it the first line
    of a step does; only rank 0 prints these, so the others go by its reading.
    """
    lines = text.splitlines()
    log = RankLog(error=first_error(lines))
    known = {}
    if warmup_steps is not None:
        clock_line = end_of_warmup(lines, warmup_steps)
    elif leader:
        log.warmup_marks, clock_line = leader.warmup_marks, len(lines)
        known = {found.compile_id: found.after_warmup for found in leader.recompiles}
    else:
        log.warmup_marks, clock_line = marks_of_warmup(lines)
    marks = 0
    for number, line in enumerate(lines):
        marks += line.startswith(OPTIMIZER_MARK)
        after = number > clock_line or (log.warmup_marks is not None and marks > log.warmup_marks)
        if dynamo := DYNAMO_LINE.search(line):
            compile_id, kind, message = dynamo.groups()
            if found := GRAPH_BREAK.match(message):
                log.graph_breaks.append(Found(found[1], dynamo_note(lines, number, kind), compile_id, after))
            elif found := FALLEN_BACK.match(message):
                reason = f"{found[1]} falls back to eager"
                log.graph_breaks.append(Found(f"{found[2]}:{found[3]}", reason, compile_id, after))
            elif found := RECOMPILE.match(message):
                reason = dynamo_note(lines, number, kind)
                place = f"{found[1]} ({found[2]})"
                log.recompiles.append(Found(place, reason, compile_id, known.get(compile_id, after)))
        elif limit := RECOMPILE_LIMIT.search(line):
            found = LIMITED_FUNCTION.search("".join(lines[number + 1 : number + 2]))
            name, place = found.groups() if found else ("a function", "torch")
            reason = f"{name} falls back to eager, it hit torch._dynamo.config.{limit[2]}"
            log.graph_breaks.append(Found(place, reason, limit[1], after))
        elif found := deprecation(lines, number):
            log.deprecations.append(found)
        elif found := STEP_LINE.match(line):
            log.last_step, log.steps = int(found[1]), int(found[2])
            log.validations += bool(VALIDATION_LINE.match(line))
        elif "Detected mismatch between collectives" in line:
            log.mismatch = mismatch_note(line)
    return log


def merge_found(of_ranks: dict[int, list[Found]]) -> list[Found]:
    """The same finding on several ranks becomes one that names them."""
    merged: dict[tuple, Found] = {}
    for rank, all_found in of_ranks.items():
        for found in all_found:
            key = (found.place, found.reason, found.after_warmup)
            entry = merged.setdefault(key, Found(**{**asdict(found), "ranks": []}))
            if rank not in entry.ranks:
                entry.ranks.append(rank)
    return list(merged.values())


# ---- Collectives and matrix products, step by step -------------------------------------------------------------------


@dataclass
class Step:
    collectives: list[tuple[str, int, str, int]] = field(default_factory=list)  # kind, elements, dtype, bytes
    model_flops: int = 0
    optimizer_flops: int = 0
    timed: bool = False  # the script has waited for the GPU before it, to start its clock
    disturbed: bool = False  # it has also waited since the step before: a validation or a checkpoint may be in it

    @property
    def bytes(self) -> int:
        return sum(collective[3] for collective in self.collectives)


@dataclass
class Traffic:
    steps: list[Step] = field(default_factory=list)  # the first one holds the start-up too
    all: list[tuple] = field(default_factory=list)  # every collective, also those between the steps


def read_traffic(text: str) -> Traffic:
    """Cuts the trace into steps. A step ends with the last optimizer mark before an optimizer's turn comes again.

    It begins there too, or where the script last waited for the GPU: a validation stops the clock, and is left out.
    """
    traffic, steps = Traffic(), []
    collectives, flops, seen, waited, disturbed = [], 0, set(), False, False  # since the last mark
    for line in text.splitlines():
        words = line.split()
        if words[:1] == ["Wait"] and len(words) == 2:
            collectives, flops, waited, disturbed = [], int(words[1]), True, True
        elif words[:1] == ["Optimizer"] and len(words) == 4:
            optimizer, flops_before, flops_after = map(int, words[1:])
            if not steps or optimizer in seen:
                steps.append(Step(timed=waited))
                seen = set()
            seen.add(optimizer)
            steps[-1].disturbed |= disturbed
            steps[-1].collectives += collectives
            steps[-1].model_flops += flops_before - flops
            steps[-1].optimizer_flops += flops_after - flops_before
            collectives, flops, disturbed = [], flops_after, False
        elif len(words) == 4 and words[1].isdigit() and words[3].isdigit():
            collectives.append((words[0], int(words[1]), words[2], int(words[3])))
            traffic.all.append(collectives[-1])
    traffic.steps = steps
    return traffic


def repeating(shapes: list, undisturbed: list[bool]) -> list[int]:
    """The numbers of the steps after which everything repeats: one, or several if an optimizer leaves out some steps.

    They are the last of the longest series of undisturbed steps in a row; none if there is no such step.
    """
    series: list[list[int]] = [[]]
    for number, calm in enumerate(undisturbed):
        if calm:
            series[-1].append(number)
        else:
            series.append([])
    longest = max(reversed(series), key=len)
    for period in range(1, len(longest)):
        if all(shapes[longest[i]] == shapes[longest[i - period]] for i in range(period, len(longest))):
            return longest[-period:]
    return longest


def typical_steps(steps: list[Step]) -> list[Step]:
    """The steps of one period, with the clock running and undisturbed. In a script that never waits for the GPU it is
    the step that occurs most often, and is smallest: not the first one (start-up), and without a validation before it
    if there is one without."""
    shapes = [(tuple(step.collectives), step.model_flops, step.optimizer_flops) for step in steps]
    if calm := repeating(shapes, [step.timed and not step.disturbed for step in steps]):
        return [steps[number] for number in calm]
    eligible = [step for step in steps if step.timed] or steps[1:] or steps
    if not eligible:
        return []
    found = Counter(tuple(step.collectives) for step in eligible)
    most_common = max(found, key=lambda collectives: (found[collectives], -len(collectives)))
    alike = [step for step in eligible if tuple(step.collectives) == most_common]
    flops = Counter(step.model_flops for step in alike)
    usual = max(flops, key=lambda count: (flops[count], -count))
    return [next(step for step in alike if step.model_flops == usual)]


def first_difference(of_ranks: dict[int, Traffic], all_ended: bool = True) -> str:
    """One line about the first collective in which a rank differs from rank 0, or nothing.

    Ranks that were stopped by another's crash have run fewer collectives; that alone is no difference.
    """
    reference = of_ranks[0].all if 0 in of_ranks else []
    for rank, sequence in ((rank, traffic.all) for rank, traffic in of_ranks.items()):
        for number, (ours, theirs) in enumerate(zip(reference, sequence, strict=False)):
            if ours != theirs:
                return f"collective {number}: rank 0 runs {told(ours)}, rank {rank} runs {told(theirs)}"
        if all_ended and len(sequence) != len(reference):
            return f"rank 0 runs {len(reference)} collectives, rank {rank} runs {len(sequence)}"
    return ""


def told(collective: tuple[str, int, str, int]) -> str:
    kind, elements, dtype, size = collective
    return f"{kind} of {elements} {dtype} ({size} bytes)"


# ---- Kernels ---------------------------------------------------------------------------------------------------------

RESOURCES = re.compile(r"Function (\S+):\s*\n\s*REG:(\d+) STACK:(\d+) SHARED:(\d+)")
LOCAL_ARRAY = re.compile(r"\.local\s.*__local_depot\d+\[(\d+)\]")
SOURCE_FILE = re.compile(r'\.file\s+1 "(.*?)"')


@dataclass(frozen=True)
class Kernel:
    name: str
    registers: int
    stack_bytes: int  # more than none: registers spill into memory; what the code itself keeps there is left out
    shared_bytes: int
    warps: int
    stages: int
    architecture: str
    source: str = ""  # the same for all configurations of a kernel
    cache_hash: str = ""  # differs between them


def parse_kernel(resource_usage: str, metadata: dict, ptx: str = "", cache_hash: str = "") -> Kernel | None:
    found = RESOURCES.search(resource_usage)
    if not found:
        return None
    target = metadata.get("target") or {}
    kept = sum(-(-int(size) // 8) * 8 for size in LOCAL_ARRAY.findall(ptx))  # sine and cosine do, for huge angles
    source = SOURCE_FILE.search(ptx)
    return Kernel(
        name=found[1],
        registers=int(found[2]),
        stack_bytes=max(0, int(found[3]) - kept),
        shared_bytes=metadata.get("shared", int(found[4])),
        warps=metadata.get("num_warps", 0),
        stages=metadata.get("num_stages") or 0,
        architecture=f"sm_{target.get('arch', '?')}",
        source=source[1] if source else "",
        cache_hash=cache_hash,
    )


def read_kernels(cache: Path, cuobjdump: Path) -> list[Kernel]:
    """Every kernel that Triton compiled into this cache, those that spill most first."""
    kernels = set()
    for cubin in cache.rglob("*.cubin"):
        usage = subprocess.run([cuobjdump, "--dump-resource-usage", cubin], capture_output=True, text=True).stdout
        description = cubin.with_suffix(".json")
        metadata = json.loads(description.read_text()) if description.exists() else {}
        ptx = cubin.with_suffix(".ptx")
        text = ptx.read_text() if ptx.exists() else ""
        if kernel := parse_kernel(usage, metadata, text, cubin.parent.name):
            kernels.add(kernel)
    return sorted(kernels, key=lambda kernel: (-kernel.stack_bytes, kernel.name, kernel.warps))


def spills_of(kernels: list[Kernel], launched: set[str]) -> list[dict]:
    """The kernels that spill, those first that a step runs, each with how many of its configurations would not.

    Without a step to know from, all are taken for running.
    """
    spilling = []
    for kernel in (kernel for kernel in kernels if kernel.stack_bytes):
        others = [k for k in kernels if k.source == kernel.source and k is not kernel and kernel.source]
        spilling.append(
            {
                **{name: value for name, value in asdict(kernel).items() if name not in ("source", "cache_hash")},
                "runs": not launched or kernel.cache_hash in launched,
                "spill_free_alternatives": sum(not other.stack_bytes for other in others),
            }
        )
    return sorted(spilling, key=lambda kernel: not kernel["runs"])


# ---- The script ------------------------------------------------------------------------------------------------------


def settings_of(source: str) -> dict:
    """The fields of the script's settings class and their defaults, read from its text without running it."""
    tree = ast.parse(source)
    named = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            named[node.targets[0].id] = constant(node.value, named)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            fields = {f.target.id: constant(f.value, named) for f in node.body if isinstance(f, ast.AnnAssign)}
            if node.name == "Hyperparameters" or {"num_iterations", "train_files"} <= set(fields):
                return fields
    return {}


def constant(expression: ast.expr | None, named: dict) -> object:
    """The value of 64 * 1024, of a constant's name and the like, or of a call's first argument; else None."""
    if isinstance(expression, ast.Call):
        words = {word.arg: word.value for word in expression.keywords}
        expression = expression.args[0] if expression.args else words.get("default")
    try:
        return eval(compile(ast.Expression(expression), "setting", "eval"), {"__builtins__": {}, **named})
    except Exception:
        return None


STAGE_COLUMNS = 5  # steps, sequence length and learning rate as factors, short and long window in blocks


@dataclass(frozen=True)
class Stage:
    """A part of a run with a sequence length and attention windows of its own."""

    first_step: int
    steps: int
    length: int  # of a sequence, in tokens
    short: int  # windows, in blocks
    long: int


def stage_rows(table: str) -> list[list[str]]:
    words = table.split()
    return [words[i : i + STAGE_COLUMNS] for i in range(0, len(words), STAGE_COLUMNS)]


def stages_of(settings: dict) -> list[Stage]:
    """The stages of a run with these settings, from the script's table; none if it has no table.

    A row's steps are its share of the run. Some may have none: the last row is for the last validation.
    """
    rows = [list(map(float, row)) for row in stage_rows(str(settings.get("stages") or ""))]
    if not rows:
        return []
    total, run, unit = sum(row[0] for row in rows), int(settings["num_iterations"]), int(settings["sequence_length"])
    first = [math.ceil(run * sum(row[0] for row in rows[:i]) / total) for i in range(len(rows) + 1)]
    return [
        Stage(first[i], first[i + 1] - first[i], round(length * unit), int(short), int(long))
        for i, (_, length, _, short, long) in enumerate(rows)
    ]
