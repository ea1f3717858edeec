import gc
import signal
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from helpers import make_data, tiny_flags

import train_gpt

# Whoever runs the tests in the background may have them ignore Ctrl-C or SIGHUP, which what they start would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with the tiny shards."""
    return make_data(tmp_path)


@pytest.fixture
def shards(folder) -> list[str]:
    """The flags of a tiny run on the shards in the test's folder."""
    return tiny_flags()


@pytest.fixture
def train_here(monkeypatch, capsys):
    """The script's main() in this process, which has torch already; returns its exit code and output.

    Its arguments are a tiny run's with these changes; or, if there are only plain arguments, those and nothing else.
    """
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def run(folder: Path, *arguments: str, **changes) -> tuple[int, str, str]:
        monkeypatch.chdir(folder)
        try:
            code = train_gpt.main(
                list(arguments) if arguments and not changes else [*tiny_flags(**changes), *arguments]
            )
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            gc.collect()  # closes the log, and with it gives up the lock
        output = capsys.readouterr()
        return code, output.out, output.err

    yield run
    torch.set_num_threads(threads)
