"""Rehearses a training run on GPUs that are not there, and reports what would go wrong.

    python -m rehearsal                                 the current script at full size on 8 pretended H100s
    python -m rehearsal 2025-01-04_SoftCap              a record
    python -m rehearsal --processes 2 --num_layers 4    any setting of the script can be given
    python -m rehearsal --gpu_memory 24                 on cards of 24 GiB; --gpu_capability 8.6 for another kind
    python -m rehearsal --against SoftCap               what changes from the current script to a record
    python -m rehearsal --against --num_layers 10       or to other settings: those after --against are the other's

Exit code 0: nothing wrong. 1: something was found. 2: bad usage, or it cannot be done on this machine.
Losses and times in its logs mean nothing. Peak memory and kernel resources do; the time per step is predicted.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import NoReturn

from rehearsal import calibration, compare, launch, picture, predict, report
from rehearsal.launch import UserError, say

TRIALS = 3  # shorter sequences that are tried after a run out of memory


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, dict[str, str]]:
    parser = OneLineParser(
        prog="rehearse",
        usage="rehearse [record or script] [options] [--setting value ...] [--against [record or script] ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--processes", type=int, default=8, help="ranks (default: 8)")
    parser.add_argument("--gpu_memory", type=float, help="GiB of each card (default: 79.1, an H100)")
    parser.add_argument("--gpu_capability", help="compute capability of the cards (default: 9.0)")
    parser.add_argument("--output", type=Path, help="folder for logs and report.json (default: a new one)")
    parser.add_argument("--cache", type=Path, help="compile cache to use again; its kernels are all reported")
    parser.add_argument("--timeout", type=float, default=60, help="minutes until a run is given up (default: 60)")
    parser.add_argument("--fresh", action="store_true", help="rehearse again what has not changed since the last time")
    # The script comes first or not at all; argparse would take the value of an unknown setting for it.
    named, words = split_script(arguments)
    ours, rest = parser.parse_known_args(words)
    ours.script = named or str(launch.HERE.parent / "train_gpt.py")
    if not 1 <= ours.processes <= launch.MOST_CARDS:
        raise UserError(f"--processes {ours.processes}: must be from 1 to {launch.MOST_CARDS}")
    if ours.gpu_memory is not None and not 1 <= ours.gpu_memory <= launch.PLENTY_GIB:
        raise UserError(f"--gpu_memory {ours.gpu_memory:g}: must be from 1 to {launch.PLENTY_GIB} GiB")
    if ours.gpu_capability not in (None, *launch.CAPABILITIES):
        known = ", ".join(launch.CAPABILITIES)
        raise UserError(f"--gpu_capability {ours.gpu_capability}: must be one of {known}")
    if not ours.timeout > 0:
        raise UserError(f"--timeout {ours.timeout:g}: must be more than 0")
    return ours, pair_up(rest)


def split_script(words: list[str]) -> tuple[str, list[str]]:
    return (words[0], words[1:]) if words and not words[0].startswith("-") else ("", words)


def pair_up(words: list[str]) -> dict[str, str]:
    """['--a', '1', '--b=2'] -> {'a': '1', 'b': '2'}"""
    settings, words = {}, list(words)
    while words:
        name, equals, value = words.pop(0).partition("=")
        if not name.startswith("--") or not (equals or words):
            raise UserError(f"{name}: settings are given as --name value")
        settings[name[2:]] = value if equals else words.pop(0)
    return settings


def rehearse(ours: argparse.Namespace, given: dict[str, str]) -> dict:
    """The report of a rehearsal: of an earlier one, if nothing has changed since."""
    script = launch.find_script(ours.script)
    launch.check_settings(script, given)
    launch.set_up()
    card = launch.Card(max(8, ours.processes), ours.gpu_memory, ours.gpu_capability)
    stored = launch.stored_report(launch.fingerprint(script, given, ours.processes, card))
    if stored.exists() and not (ours.fresh or ours.cache):
        found = json.loads(stored.read_text())
        say(f"nothing has changed since the rehearsal of {found['when']}: its report (--fresh rehearses again)")
        if ours.output or not Path(found["folder"]).is_dir():  # a folder that somebody has removed is made again
            output = ours.output or launch.new_folder()
            output.mkdir(parents=True, exist_ok=True)
            write_files(found, output.resolve())
        return found
    found = run_and_collect(ours, script, given, card)
    if found["run"]["exit_code"] == 0:  # what went wrong may have been the machine's fault
        stored.parent.mkdir(parents=True, exist_ok=True)
        stored.write_text(json.dumps(found))
    return found


def run_and_collect(ours: argparse.Namespace, script: Path, given: dict[str, str], card: launch.Card) -> dict:
    output = (ours.output or launch.new_folder()).resolve()
    cache = (ours.cache or output / "cache").resolve()
    settings = launch.choose_settings(script, given, output / "data")

    def run(processes: int, name: str, on: launch.Card, changes: dict[str, str] | None = None) -> launch.Run:
        say(f"{name}, {processes} {'process' if processes == 1 else 'processes'}; follow it in {output / name}")
        chosen = settings | (changes or {})
        done = launch.run(script, chosen, processes, output / name, cache, on, ours.timeout * 60)
        say(f"{name} ended after {done.seconds:.0f} s")
        return done

    def find_what_fits(found: dict) -> None:
        def run_alone(name: str, on: launch.Card, chosen: dict) -> launch.Run:
            """One rank with one rank's share of the batch, which it may take one by one or in a row."""
            changes = {setting: str(value) for setting, value in chosen.items() if value}
            if "batch_sequences" in changes:
                changes["batch_sequences"] = str(math.ceil(int(changes["batch_sequences"]) / ours.processes))
            return run(1, name, on, changes)

        plenty = launch.Card(card.count, launch.PLENTY_GIB, card.capability)
        measured = run_alone("measuring", plenty, found["resolved"])
        report.explain_out_of_memory(found, report.collect(measured, script, settings, cache))
        same_batch, smaller_batch = (report.shorter_sequences(found, times)[:TRIALS] for times in (2, 1))
        for shorter in same_batch + smaller_batch:
            trial = run_alone("trying_{sequence_length}x{batch_sequences}".format(**shorter), card, shorter)
            if trial.exit_code == 0:
                peak = report.read_memory(trial)[0]["peak_allocated_bytes"]
                found["out_of_memory"]["fits"] = shorter | {
                    "peak_allocated_bytes": peak,
                    "smaller_batch": shorter in smaller_batch,
                }
                return

    found = report.collect(run(ours.processes, "rehearsal", card), script, settings, cache)
    if found["out_of_memory"]:
        find_what_fits(found)
    found["findings"] = report.findings(found)
    found |= {"given": given, "when": time.strftime("%Y-%m-%d %H:%M")}
    write_files(found, output)
    return found


def write_files(found: dict, output: Path) -> None:
    """report.json, and the predicted timeline as timeline.html and as timeline.json for Perfetto."""
    found["folder"] = str(output)
    (output / "report.json").write_text(json.dumps(found, indent=2))
    if found["prediction"]:
        stages = predict.stages_in(found["step"])
        stage = stages[len(stages) // 2]
        middle = predict.windows_of(stage)[stage["steps"] // 2]
        spans = predict.timeline(stage, middle, predict.CARDS[found["card"]])
        steps = "one step" if stage.get("counted_steps", 1) == 1 else f"{stage['counted_steps']} steps"
        title = f"Predicted: {steps} of {Path(found['script']).parent.name} on {found['processes']} x {found['card']}"
        (output / "timeline.html").write_text(picture.as_page(spans, title, calibration.in_one_line()))
        (output / "timeline.json").write_text(json.dumps(picture.as_trace(spans)))


def rehearse_against(arguments: list[str]) -> int:
    """Two rehearsals side by side: settings before --against are for both, those after it for the other alone."""
    at = arguments.index("--against")
    ours, given = parse_arguments(arguments[:at])
    script, words = split_script(arguments[at + 1 :])
    other = argparse.Namespace(**vars(ours))
    other.script = script or ours.script
    other_given = given | pair_up(words)
    if ours.output:
        other.output = ours.output / "against"
    if (other.script, other_given) == (ours.script, given):
        raise UserError("--against: name another script or other settings after it")
    launch.check_settings(launch.find_script(other.script), other_given)  # before anything runs
    both = [rehearse(ours, given), rehearse(other, other_given)]
    for name, found in zip("AB", both, strict=True):
        if not found["prediction"]:
            print(report.as_text(found))
            say(f"nothing to compare: {name} did not get through a step")
            return 1
    comparison = compare.of_reports(*both)
    (Path(both[0]["folder"]) / "comparison.json").write_text(json.dumps(comparison, indent=2))
    print(compare.as_text(comparison, calibration.in_one_line()))
    for name, found in zip("AB", both, strict=True):
        print(
            "\n".join(
                [
                    f"{name}: report.json and timeline.html in {found['folder']}",
                    *report.verdict_lines(found["findings"]),
                ]
            )
        )
    return 1 if any(found["findings"] for found in both) else 0


def main(arguments: list[str]) -> int:
    try:
        if "--against" in arguments:
            return rehearse_against(arguments)
        found = rehearse(*parse_arguments(arguments))
    except UserError as error:
        print(f"rehearse: {error}", file=sys.stderr)
        return 2
    print(report.as_text(found))
    return 1 if found["findings"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
