"""The ideas of a record, and how to leave each of them out: ideas.toml beside its script.

["key offset"]                              an idea, left out
settings = { key_offset = "none" }          by settings,
replace = [["old text", "new text"]]        and by replacing what stands in the script exactly once;
steps = 0.83                                as a factor, if a run without it has to have fewer or more steps;
unseen = "no FP8 on a CPU"                  or not at all, for this reason
"""

import re
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from records.terminal import UserError, brief, shown

IDEAS = "ideas.toml"


class Variant(NamedTuple):
    """A script to run, without an idea or as it is: then the idea is ""."""

    idea: str
    steps: int
    source: str
    settings: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return f"without {self.idea}" if self.idea else f"unchanged, {self.steps} steps"

    @property
    def sha256(self) -> str:
        return sha256("\0".join([self.source, *self.settings]).encode()).hexdigest()


def read_ideas(path: Path) -> dict[str, dict]:
    try:
        import tomllib

        return tomllib.loads(path.read_text())
    except ImportError:
        raise UserError("ablate needs Python 3.11, which reads TOML") from None
    except ValueError as error:
        raise UserError(f"{shown(path)}: {error}") from None


def leave_out(name: str, idea: dict, full: Variant) -> Variant:
    """The script without an idea."""
    source = full.source
    try:
        settings, texts, factor = ({"settings": {}, "replace": [], "steps": 1} | idea).values()
        for old, new in texts:
            if (times := source.count(old)) != 1:
                text = brief(old.strip(), 60)
                raise UserError(f"{IDEAS}: {name}: {text!r} stands {times} times in the script, not once")
            source = source.replace(old, new)
        flags = tuple(f"--{key}={str(x).lower() if isinstance(x, bool) else x}" for key, x in settings.items())
        if source == full.source and not flags:
            raise ValueError
        return Variant(name, round(full.steps * factor), source, flags)
    except (ValueError, TypeError, AttributeError):
        form = "settings = { name = value } or replace = [[old, new]], and perhaps steps; or unseen"
        raise UserError(f"{IDEAS}: {name}: must have {form}") from None


def steps_of_track(source: str) -> int:
    """The CPU track's number of steps, as it stands in the script's settings."""
    found = re.search(r"^ +num_iterations: int = setting\((\d+)(?:.*\bcpu=(\d+))?", source, re.MULTILINE)
    if not found:
        raise UserError("the script does not say how many steps the CPU track has; give --steps")
    return int(found[2] or found[1])
