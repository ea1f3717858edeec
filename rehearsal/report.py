"""The report of a rehearsal: what was read, what is wrong with it, and how to say so."""

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from rehearsal import calibration, elsewhere, launch, predict, readings, steps

GIB = 2**30
LISTED = 8  # lines of a list before the rest is summed up
LASTING = ("parameters", "gradients", "optimizer state")  # memory that a shorter sequence does not save
BLOCK = 128  # FlexAttention's block: sequence lengths are multiples of it


# ---- Collecting ------------------------------------------------------------------------------------------------------


def collect(run: launch.Run, script: Path, settings: dict[str, str], cache: Path) -> dict:
    resolved = {**readings.settings_of(script.read_text()), **settings}
    stages = readings.stages_of(resolved)
    logs = read_logs(run, warmup_steps(resolved, run.processes))
    traffic = {rank: readings.read_traffic(text) for rank, text in texts(run, "collectives").items()}
    largest = max(stages, key=lambda stage: stage.length, default=None)
    typical = {rank: readings.typical_steps(of_stage(found.steps, largest, stages)) for rank, found in traffic.items()}
    memory = read_memory(run)
    kernels = readings.read_kernels(cache, launch.cuobjdump())
    leader = logs.get(0, readings.RankLog())
    errors = {rank: log.error for rank, log in logs.items() if log.error}
    failures = readings.read_failures((run.folder / "torchrun.log").read_text(errors="replace"))
    return {
        "script": str(script),
        "processes": run.processes,
        "settings": settings,
        "device": next((m["device"] for m in memory.values()), None),
        "run": {
            "exit_code": run.exit_code,
            "last_step": leader.last_step,
            "steps": leader.steps,
            "validations": leader.validations,
            "checkpoints": run.checkpoints,
            "errors": errors,
            "first_error": readings.first_fault(errors, failures),
            "asked": {name: resolved.get(name) for name in ("num_iterations", "val_loss_every", "save_every")},
        },
        "compiled": {"kernels": len(kernels), "architectures": sorted({k.architecture for k in kernels})},
        "graph_breaks": merged(logs, "graph_breaks"),
        "recompiles": merged(logs, "recompiles"),
        "deprecations": merged(logs, "deprecations"),
        "memory": {
            "per_rank": {
                r: {k: m[k] for k in ("peak_allocated_bytes", "peak_reserved_bytes")} for r, m in memory.items()
            },
            "holders": memory.get(0, {}).get("holders", []),
        },
        "out_of_memory": next(
            ({"rank": r, **m["out_of_memory"]} for r, m in memory.items() if m["out_of_memory"]), None
        ),
        "collectives": summarise_traffic(typical.get(0, []))
        | {
            "in_all": len(traffic[0].all) if 0 in traffic else 0,
            "mismatch": next((log.mismatch for log in logs.values() if log.mismatch), "")
            or readings.first_difference(traffic, all_ended=run.exit_code == 0),
        },
        "flops": summarise_flops(typical, resolved | ({"sequence_length": largest.length} if largest else {})),
        "step": (step := count_step(run, cache, script, resolved)),
        "card": (card := card_of(kernels)),
        "prediction": predict.predict(step, predict.CARDS[card]) if step and card else None,
        "extrapolation": elsewhere.tables(step) if step and card == "H100" else None,
        "spilling_kernels": readings.spills_of(kernels, launched_kernels(run)),
        "resolved": {name: resolved.get(name) for name in ("sequence_length", "batch_sequences")},
    }


def texts(run: launch.Run, suffix: str) -> dict[int, str]:
    files = {int(path.stem.removeprefix("rank")): path for path in run.folder.glob(f"rank*.{suffix}")}
    return {rank: files[rank].read_text(errors="replace") for rank in sorted(files)}


def warmup_steps(resolved: dict, processes: int) -> int | None:
    """As the script counts them: never none among several processes; for each stage. None if it has no such setting."""
    steps = resolved.get("kernel_warmup_steps", resolved.get("warmup_steps"))
    stages = {stage.first_step for stage in readings.stages_of(resolved)}
    return None if steps is None else max(int(steps), int(processes > 1)) * max(1, len(stages))


def read_logs(run: launch.Run, warmup_steps: int | None) -> dict[int, readings.RankLog]:
    logs: dict[int, readings.RankLog] = {}
    for rank, text in texts(run, "log").items():
        logs[rank] = readings.read_log(text, logs.get(0), warmup_steps)
    return logs


def read_memory(run: launch.Run) -> dict[int, dict]:
    return {rank: json.loads(text) for rank, text in texts(run, "json").items()}


def merged(logs: dict[int, readings.RankLog], name: str) -> list[dict]:
    return [asdict(found) for found in readings.merge_found({r: getattr(log, name) for r, log in logs.items()})]


def of_stage(steps: list[readings.Step], stage: readings.Stage | None, stages: list[readings.Stage]) -> list:
    """The steps of that stage of the run, which are after those of the warm-up; all if the run has no stages."""
    if stage is None:
        return steps
    first = max(0, len(steps) - stages[-1].first_step - stages[-1].steps + stage.first_step)
    return steps[first : first + stage.steps]


def summarise_traffic(typical: list[readings.Step]) -> dict:
    """Rank 0's collectives in a step; if only several together repeat, on average."""
    kinds: Counter = Counter()
    sizes: Counter = Counter()
    for kind, _, dtype, size in (collective for step in typical for collective in step.collectives):
        kinds[f"{kind} {dtype}"] += 1 / len(typical)
        sizes[f"{kind} {dtype}"] += size / len(typical)
    return {
        "per_step": sum(kinds.values()),
        "bytes_per_step": sum(sizes.values()),
        "kinds": [{"kind": kind, "count": kinds[kind], "bytes": sizes[kind]} for kind in kinds],
    }


def summarise_flops(of_ranks: dict[int, list[readings.Step]], resolved: dict) -> dict:
    """Matrix products only, as they were asked of cuBLAS; attention is a bound, its mask is data."""
    typical = [step for steps in of_ranks.values() for step in steps]
    model = sum(step.model_flops / len(steps) for steps in of_ranks.values() for step in steps)
    optimizer = sum(step.optimizer_flops / len(steps) for steps in of_ranks.values() for step in steps)
    flops = {
        "model_matmul_per_step": model,
        "optimizer_matmul_per_step": optimizer,
        "model_matmul_per_token": None,
        "attention_per_token_at_most": None,
        # nothing tells the two apart in a script that validates before each step and never waits for the GPU
        "with_validation": (
            str(resolved.get("val_loss_every")) == "1" and bool(typical) and not any(step.timed for step in typical)
        ),
    }
    tokens = int(resolved.get("sequence_length") or 0) * int(resolved.get("batch_sequences") or 0)
    if tokens:
        flops["model_matmul_per_token"] = model / tokens
    window, width, layers = (resolved.get(name) for name in ("window_end", "model_dim", "num_layers"))
    if window and width and layers:
        flops["attention_per_token_at_most"] = 12 * int(window) * int(width) * int(layers)
    return flops


def count_step(run: launch.Run, cache: Path, script: Path, resolved: dict) -> dict | None:
    """What rank 0 does in a step, and what of the script's settings a prediction needs; None if it never did one."""
    path = run.folder / "rank0.steps"
    if run.exit_code != 0 or not path.exists():
        return None
    rehearsed = [stage for stage in readings.stages_of(resolved) if stage.steps]
    try:
        counted = steps.count(path.read_text(), cache, steps.vocabulary_of(resolved), rehearsed)
    except (ValueError, KeyError, IndexError) as error:  # of a kernel as no script has had it yet; all else stands
        launch.say(f"no time is predicted: a step's counts are not understood ({type(error).__name__}: {error})")
        return None
    if not counted:
        return None
    known = readings.settings_of(script.read_text())
    sequences, whole_run = int(resolved.get("batch_sequences") or 0), int(known.get("num_iterations") or 1)
    common = {"ranks": run.processes, "longest_document": resolved.get("max_document")}
    if not rehearsed:
        length = int(resolved.get("sequence_length") or 0)
        window = [int(resolved.get(name) or length) for name in ("window_start", "window_end")]
        return counted[0] | common | {"tokens": length * sequences, "steps": whole_run, "window_tokens": window}
    # a rehearsal's own steps are fewer: those of the whole run are in the script's table, or in the user's
    own = str(known["stages"])
    table = own if resolved["stages"] == launch.few_steps_per_stage(own)["stages"] else resolved["stages"]
    whole = readings.stages_of(resolved | {"stages": table, "num_iterations": whole_run})
    steps_of = [there.steps for here, there in zip(readings.stages_of(resolved), whole, strict=True) if here.steps]
    stages = [
        counts | common | {"tokens": s.length * sequences, "window_blocks": [s.short, s.long], "steps": of_run}
        for counts, s, of_run in zip(counted, rehearsed, steps_of, strict=True)
    ]
    return common | {"stages": stages, "steps": whole_run, "tokens": max(stage["tokens"] for stage in stages)}


def launched_kernels(run: launch.Run) -> set[str]:
    return {kernel["cache_hash"] for text in texts(run, "steps").values() for kernel in steps.kernels_in(text).values()}


def card_of(kernels: list[readings.Kernel]) -> str | None:
    """The card of predict.CARDS for which the kernels were compiled."""
    names = {"sm_90": "H100", "sm_80": "A100", "sm_89": "4090", "sm_100": "B200"}
    return next((names[kernel.architecture] for kernel in kernels if kernel.architecture in names), None)


def explain_out_of_memory(found: dict, unlimited: dict) -> None:
    """Adds what the run would have needed and what would have held it, from a run on a card without limit."""
    oom, peaks = found["out_of_memory"], unlimited["memory"]["per_rank"].values()
    # allocated, not reserved: with no limit in sight the allocator keeps what it would otherwise give back
    oom["needed_bytes"] = max((peak["peak_allocated_bytes"] for peak in peaks), default=None)
    oom["holders"] = unlimited["memory"]["holders"]


def shorter_sequences(found: dict, times: int) -> list[dict[str, int]]:
    """Settings worth a try, longest first: half the sequence and twice (`times`) as many, and again.

    Only the lasting part of the need does not shrink with the sequence. That is an estimate, and fragmentation can
    prove it wrong, so each of these has to be tried. It is wrong for a script that takes all its sequences in one
    forward: that needs half the sequence and not more of them.
    """
    oom = found["out_of_memory"]
    length, batch = (int(found["resolved"][name] or 0) for name in ("sequence_length", "batch_sequences"))
    if not (oom.get("needed_bytes") and length and batch):
        return []
    lasting = sum(holder["bytes"] for holder in oom["holders"] if holder["holder"] in LASTING)
    candidates, shrinking = [], oom["needed_bytes"] - lasting
    while length % (2 * BLOCK) == 0:
        length, batch, shrinking = length // 2, batch * times, shrinking / 2
        if lasting + shrinking < oom["total_bytes"]:
            candidates.append({"sequence_length": length, "batch_sequences": batch})
    return candidates


# ---- Judging ---------------------------------------------------------------------------------------------------------


def findings(found: dict) -> list[dict]:
    """What a person has to act on, each with its kind and one line."""
    judged = []

    def add(kind: str, text: str) -> None:
        judged.append({"kind": kind, "text": text})

    oom = found["out_of_memory"]
    if oom:
        add("out_of_memory", out_of_memory_line(oom))
    if found["collectives"]["mismatch"]:
        add("collective_mismatch", found["collectives"]["mismatch"])
    run = found["run"]
    if run["exit_code"] != 0 and not judged:
        first = run["first_error"] or "no message; see the logs"
        how = "did not end in time" if run["exit_code"] is None else f"ended with exit code {run['exit_code']}"
        add("failed", f"{how} at step {run['last_step']}: {first}")
    if run["exit_code"] == 0:
        for text in missing(run):
            add("incomplete", text)
    for entry in found["graph_breaks"]:
        add("graph_break", f"{entry['place']}: {entry['reason']}")
    for entry in found["recompiles"]:
        if entry["after_warmup"]:
            add("recompile", f"after the warm-up: {entry['place']}: {entry['reason']}")
    for entry in found["deprecations"]:
        add("deprecation", f"{entry['place']}: {entry['reason']}")
    for kernel in found["spilling_kernels"]:
        if kernel["runs"] and attention_pass(kernel["name"]) == "attention forward":
            add("attention_spills", f"{kernel['name']} spills {kernel['stack_bytes']} bytes")
    if not found["compiled"]["kernels"] and run["exit_code"] == 0:
        add("not_compiled", "no kernel was compiled")
    return judged


def missing(run: dict) -> list[str]:
    """What a run was asked for and has not done, although it ended well."""
    asked, lines = run["asked"], []
    steps = int(asked["num_iterations"] or run["steps"])
    if run["last_step"] != steps:
        lines.append(f"the last step in the log is {run['last_step']} of {steps}")
    if asked["val_loss_every"] is not None and not run["validations"]:  # 0: one at the end
        lines.append(f"no validation in the log, with --val_loss_every {asked['val_loss_every']}")
    if int(asked["save_every"] or 0) and not run["checkpoints"]:
        lines.append(f"no checkpoint was saved, with --save_every {asked['save_every']}")
    return lines


def out_of_memory_line(oom: dict) -> str:
    line = (
        f"rank {oom['rank']} asked for {gib(oom['asked_bytes'])} with {gib(oom['allocated_bytes'])} allocated "
        f"on a card of {gib(oom['total_bytes'])}"
    )
    if oom.get("needed_bytes"):
        line += f"; the run needs {gib(oom['needed_bytes'])}"
    if fits := oom.get("fits"):
        line += (
            f"; --sequence_length {fits['sequence_length']} --batch_sequences {fits['batch_sequences']} "
            f"fits{', with a smaller batch and' if fits['smaller_batch'] else ', with'} a peak of "
            f"{gib(fits['peak_allocated_bytes'])}"
        )
    return line


# ---- Saying ----------------------------------------------------------------------------------------------------------


def gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.2f} MiB"


def as_text(found: dict) -> str:
    run, compiled = found["run"], found["compiled"]
    lines = [
        f"Rehearsal of {found['script']}: {found['processes']} x {found['device'] or 'no device'}",
        "Nothing was computed: losses and times in its logs mean nothing.",
        "",
    ]
    lines += [
        f"run           exit code {run['exit_code']}, step {run['last_step']}/{run['steps']}, "
        f"{run['validations']} validations, {run['checkpoints']} checkpoints"
    ]
    lines += [f"compiled      {compiled['kernels']} kernels for {', '.join(compiled['architectures']) or 'nothing'}"]
    lines += [f"graph breaks  {len(found['graph_breaks']) or 'none'}"]
    late = sum(entry["after_warmup"] for entry in found["recompiles"])
    lines += [f"recompiles    {late or 'none'} after the warm-up, {len(found['recompiles']) - late} in it"]
    lines += [f"deprecations  {len(found['deprecations']) or 'none'}"]
    lines += memory_lines(found["memory"]) + collective_lines(found["collectives"], found["processes"])
    lines += flops_lines(found["flops"]) + kernel_lines(found["spilling_kernels"])
    lines += ["", *prediction_lines(found["prediction"]), *extrapolation_lines(found["extrapolation"])]
    lines += ["", *verdict_lines(found["findings"]), f"logs, report.json and timeline.html in {found['folder']}"]
    return "\n".join(lines)


def memory_lines(memory: dict) -> list[str]:
    peaks = memory["per_rank"]
    if not peaks:
        return ["peak memory   unknown: no rank lived to say"]
    allocated, reserved = (
        over_ranks({rank: peak[f"peak_{kind}_bytes"] for rank, peak in peaks.items()})
        for kind in ("allocated", "reserved")
    )
    lines = [f"peak memory   allocated {allocated}; reserved {reserved}; held on rank 0 by"]
    return lines + holder_lines(memory["holders"])


def over_ranks(sizes: dict[int, int]) -> str:
    """'30.45 GiB on ranks 0-7', or the lowest and the highest with their ranks."""

    def told(size: int) -> str:
        return f"{gib(size)} on {named([rank for rank in sizes if gib(sizes[rank]) == gib(size)])}"

    lowest, highest = told(min(sizes.values())), told(max(sizes.values()))
    return highest if lowest == highest else f"{lowest} to {highest}"


def named(ranks: list[int]) -> str:
    """[0, 1, 2, 5] -> 'ranks 0-2, 5'"""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ("ranks " if len(ranks) > 1 else "rank ") + ", ".join(
        str(first) if first == last else f"{first}-{last}" for first, last in spans
    )


def holder_lines(holders: list[dict]) -> list[str]:
    """One line for each holder, with the largest of what it holds."""
    totals: Counter = Counter()
    for entry in holders:
        totals[entry["holder"]] += entry["bytes"]
    lines = []
    for holder, total in totals.most_common():
        lines.append(f"    {gib(total):>11}  {holder}")
        details = [entry for entry in holders if entry["holder"] == holder and entry["detail"]]
        for entry in [entry for entry in details if entry["bytes"] > total / 10][:3]:
            times = f"{entry['blocks']} x " if entry["blocks"] > 1 else ""
            lines.append(f"                 {gib(entry['bytes']):>11}  {times}{entry['detail']}")
    return lines


def collective_lines(collectives: dict, processes: int) -> list[str]:
    order = ", DIFFERENT between ranks" if collectives["mismatch"] else ""
    if not order and not collectives["in_all"]:
        return ["collectives   none"]
    if not order and processes > 1:
        order = f", same order on all {processes} ranks"
    lines = [
        f"collectives   {collectives['per_step']:g} per step, {gib(collectives['bytes_per_step'])} per rank{order}"
    ]
    return lines + [f"    {kind['count']:>11g}  {kind['kind']}, {gib(kind['bytes'])}" for kind in collectives["kinds"]]


def flops_lines(flops: dict) -> list[str]:
    per_token = flops["model_matmul_per_token"]
    attention = flops["attention_per_token_at_most"]
    lines = [
        f"FLOPs         {flops['model_matmul_per_step']:.3e} per step in the model's matrix products"
        + (f", {per_token:.3e} per token" if per_token else "")
    ]
    if attention:
        lines.append(f"              attention adds at most {attention:.3e} per token at the widest window")
    if flops["with_validation"]:
        lines.append("              with a validation in each step, in the collectives too: --val_loss_every is 1")
    return [
        *lines,
        f"              {flops['optimizer_matmul_per_step']:.3e} per step in the optimizers, over all ranks",
    ]


def attention_pass(kernel: str) -> str:
    """'attention forward', 'attention backward', or nothing; the name also holds what else was fused into a kernel."""
    template = "flex_attention" in kernel and kernel.startswith("triton_tem")
    return f"attention {'backward' if 'flex_attention_backward' in kernel else 'forward'}" if template else ""


def kernel_lines(kernels: list[dict]) -> list[str]:
    running = [kernel for kernel in kernels if kernel["runs"]]
    lines = [f"spills        {len(running) or 'no'} kernels that run"]
    alike: Counter = Counter()
    for kernel in running:
        others, name = kernel["spill_free_alternatives"], attention_pass(kernel["name"]) or kernel["name"][:60]
        alike[
            f"    {kernel['stack_bytes']:>5} bytes  {name} ({kernel['registers']} registers, "
            f"{kernel['warps']} warps), {others or 'no'} configuration{'s' * (others != 1)} without"
        ] += 1
    lines += [f"{line}, {times} kernels" if times > 1 else line for line, times in alike.most_common(LISTED)]
    if len(alike) > LISTED:
        lines.append(f"                 and {len(alike) - LISTED} more kinds")
    if rejected := [kernel for kernel in kernels if not kernel["runs"]]:
        most = max(kernel["stack_bytes"] for kernel in rejected)
        lines.append(f"              {len(rejected)} configurations that spill up to {most} bytes were tried and left")
    return lines


def prediction_lines(prediction: dict | None) -> list[str]:
    if not prediction:
        return ["predicted     no time: no whole step was seen, or there are no rates for this card"]
    columns = {name: prediction[name] for name in ("first", "middle", "last")}
    if prediction["stages"]:
        columns = {f"stage {i}": column for i, column in enumerate(prediction["stages"], start=1)}
    columns = columns | {"run": prediction["run"]}

    def window(column: dict) -> str:
        return (
            f"{column['window']}"
            if isinstance(column["window"], (int, float))
            else "{}, {}".format(*column["window"][:2])
        )

    lines = [
        f"predicted     milliseconds per step on {prediction['cards']} x {prediction['card']}",
        f"    {'':<26}" + "".join(f"{name:>9}" for name in columns),
        f"    {'window, in blocks of 128':<26}" + "".join(f"{window(column):>9}" for column in columns.values()),
    ]
    if prediction["stages"]:
        told = "".join(f"{stage['steps']:>9}" for stage in prediction["stages"])
        lines.append(f"    {'steps':<26}{told}{prediction['steps']:>9}")
    columns = list(columns.values())
    for part in predict.PARTS:
        name = "collectives, not hidden" if part == "collectives" else part
        lines.append(f"    {name:<26}" + "".join(f"{column['parts_ms'][part]:9.1f}" for column in columns))
    lines.append(f"    {'step':<26}" + "".join(f"{column['ms']:9.1f}" for column in columns))
    lines.append(
        f"    predicted: {prediction['minutes']:.2f} minutes for {prediction['steps']} steps, "
        f"{prediction['tokens_per_second'] / 1e6:.2f} million tokens per second, "
        f"{prediction['flop_utilisation']:.1%} of the peak FLOPs"
    )
    return [*lines, f"    {calibration.in_one_line()}"]


def extrapolation_lines(tables: dict | None) -> list[str]:
    if not tables:
        return []
    cards = ", ".join(f"{name} {ms:.0f}" for name, ms in tables["cards_ms"].items())
    numbers = ", ".join(f"{number}: {ms:.0f}" for number, ms in tables["numbers_ms"].items())
    lines = [f"    extrapolated to other cards, ms per step: {cards}"]
    return [*lines, f"    extrapolated to other numbers of H100s, the batch kept: {numbers}"] if numbers else lines


def verdict_lines(judged: list[dict]) -> list[str]:
    if not judged:
        return ["Nothing wrong was found."]
    return [f"FOUND {len(judged)}:", *(f"  {entry['kind']}: {entry['text']}" for entry in judged), ""]
