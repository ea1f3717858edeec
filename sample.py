"""Text from a checkpoint of train_gpt.py, by the script's own forward pass.

    python sample.py                                                     the newest checkpoint, from an empty document
    python sample.py latest --prompt 'def forward(' --tokens 200         go on from a prompt
    python sample.py checkpoints/<run>/step_000600.pt --temperature 0    always the likeliest token
    python sample.py --script records/2025-01-04_SoftCap/train_gpt.py    a record's checkpoint

Nothing of the model is written a second time here, and no keys and values are cached: each token costs a forward pass
over the last tokens, so that the text is the trained model's whatever idea is in the script.
"""

import argparse
import ast
import codecs
import importlib.util
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

try:
    import torch
    import torch.nn.functional as F
    from torch import Tensor
except ImportError as error:
    sys.exit(f"sample: {error}: activate the environment that ./run.sh made: . .venv/bin/activate")

HERE = Path(__file__).resolve().parent


class UserError(Exception):
    """Something the user can fix, reported in one line."""


def warn(text: str) -> None:
    print(f"sample: {text}", file=sys.stderr)


# ---- The script and the checkpoint: they must belong together --------------------------------------------------------
def load_script(path: Path) -> ModuleType:
    try:
        spec = importlib.util.spec_from_file_location("train_gpt", path)
        script = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = script  # dataclasses look their module up
        spec.loader.exec_module(script)
        return script
    except Exception as error:
        raise UserError(f"--script {path}: not a training script ({type(error).__name__}: {error})") from None


def definitions(source: str) -> dict[str, str]:
    """The code of each definition, or other statement, at a script's top level, without comments and docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body[0] = ast.Pass()
    return {getattr(node, "name", ast.unparse(node)[:40]): ast.unparse(node) for node in tree.body}


def compare_sources(trained: str, path: Path, chosen: bool) -> None:
    """Say what differs between the script that trained the checkpoint and the one at `path`. Only a script that the
    user chose may differ in its code."""
    present = path.read_text(encoding="utf-8")
    if present == trained:
        return
    old, new = definitions(trained), definitions(present)
    changed = [name for name in old | new if old.get(name) != new.get(name)]
    if not changed:
        return warn(f"only comments differ between {path} and the script that trained this checkpoint")
    named = [name for name in changed if name.isidentifier()] or ["statements at its top level"]
    more = f" and {len(named) - 5} more" * (len(named) > 5)
    what = f"the script that trained this checkpoint differs from {path} in {', '.join(named[:5])}{more}"
    if chosen:
        return warn(what)
    same = [record for record in sorted(HERE.glob("records/*/train_gpt.py")) if record.read_text() == trained]
    choice = same[0] if same else f"{path} to take it all the same, or --script PATH for another"
    raise UserError(f"{what}; add --script {choice}")


class Model:
    """A checkpoint's model and all that its forward pass needs."""

    def __init__(self, checkpoint: str, folder: str, script_path: Path, chosen: bool):
        script = load_script(script_path)
        try:
            saved = script.read_checkpoint(checkpoint, folder)
            if not saved:
                raise UserError(f"no checkpoint in {Path(folder).absolute()}: train with --save_every, or say where")
            compare_sources(saved["source"], script_path, chosen)
            self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            self.s = s = script.make_settings({"compile": False}, 1, self.device.type == "cuda", saved["settings"])
            self.document_token = getattr(s, "document_token", s.vocab_size - 1)
            trainer = script.Trainer(s, script.World(0, 1, self.device))
            self.gpt = trainer.model.eval()
            self.gpt.load_state_dict(saved["state"]["model"])
            self.block = s.context_length if hasattr(s, "context_length") else script.BLOCK
            length, reach = s.sequence_length, s.num_layers * getattr(s, "window_end", s.sequence_length)
            if hasattr(trainer, "set_window"):
                trainer.set_window(saved["step"])
            elif hasattr(trainer, "set_stage"):
                trainer.set_stage(saved["step"])
                length = max(stage.length for stage in trainer.stages)
                # A key has something of the token before it, and so has the embedding.
                reach = s.num_layers * (trainer.stage.long * self.block + 1) + 1
            # What the forward pass takes beside inputs and targets has the same name in the trainer: the windows.
            self.more = [getattr(trainer, name) for name in list(inspect.signature(self.gpt.forward).parameters)[2:]]
            # The last token, wherever in its block, depends on no more blocks, and never saw more in training.
            self.max_blocks = min(-(-reach // self.block) + 1, length // self.block)
            self.check()
        except UserError:
            raise
        except Exception as error:  # whatever is odd in a checkpoint, or a script that is built differently
            told = " ".join(str(error).removeprefix("--resume ").split())[:300]
            name = f" ({type(error).__name__})".replace(" (UserError)", "")
            raise UserError(f"{checkpoint} with {script_path}: {told}{name}") from None

    def hidden(self, inputs: Tensor) -> Tensor:
        """The last layer's output for whole blocks of tokens, in one row."""
        return self.gpt.hidden(inputs, *self.more).flatten(0, -2)

    @torch.inference_mode()
    def check(self) -> None:
        """The logits used here must be those that the script's loss is made of."""
        tokens = torch.arange(self.block + 1, device=self.device) % self.s.vocab_size
        loss = self.gpt(tokens[:-1], tokens[1:], *self.more).item()
        same = F.cross_entropy(self.gpt.logits(self.hidden(tokens[:-1])), tokens[1:]).item()
        if not abs(loss) < float("inf"):
            raise UserError("the checkpoint's weights are not finite: take an earlier one")
        if abs(loss - same) > 0.001 * abs(loss):
            what = "its forward pass does more than hidden and logits, which is all that sample.py knows"
            raise UserError(f"the script's loss ({loss:.4f}) is not that of its logits ({same:.4f}): {what}")

    @torch.inference_mode()
    def next_logits(self, tokens: list[int]) -> Tensor:
        """The logits of what follows a text, from its last blocks: they start at a block's start, as windows do."""
        first = max(0, -(-len(tokens) // self.block) - self.max_blocks) * self.block
        padding = -len(tokens) % self.block  # no token sees what comes after it
        inputs = torch.tensor(tokens[first:] + [self.document_token] * padding, device=self.device)
        last = self.hidden(inputs)[len(tokens) - first - 1]
        return self.gpt.logits(last)[: self.s.vocab_size].cpu()  # the rest is padding


# ---- Text: tokens, and how the next one is drawn ---------------------------------------------------------------------
def tokenizer(vocab_size: int) -> tuple[Callable[[str], list[int]], Callable[[int], bytes]]:
    """How to turn text into tokens, and a token into bytes."""
    if vocab_size == 257:
        return (lambda text: list(text.encode("utf-8", "surrogateescape"))), (lambda token: bytes([token]))
    if vocab_size != 50257:
        raise UserError(f"a vocabulary of {vocab_size} tokens is neither bytes (257) nor GPT-2's (50257)")
    try:
        import tiktoken

        gpt2 = tiktoken.get_encoding("gpt2")
    except ImportError:
        raise UserError("this checkpoint's tokens are GPT-2's, which need tiktoken: pip install tiktoken") from None
    except Exception as error:
        raise UserError(f"tiktoken needs the network once, for GPT-2's tokens: {type(error).__name__}") from None
    return gpt2.encode_ordinary, gpt2.decode_single_token_bytes


def choose(logits: Tensor, temperature: float, top_k: int, random: torch.Generator) -> int:
    """One token: drawn from the `top_k` likeliest (0: from all), or at temperature 0 the likeliest."""
    if temperature == 0:
        return int(logits.argmax())
    likeliest, tokens = logits.double().topk(min(top_k or len(logits), len(logits)))
    probabilities = F.softmax((likeliest - likeliest[0]) / temperature, dim=-1)  # no overflow, however small
    return int(tokens[torch.multinomial(probabilities, 1, generator=random)])


def continuation(model: Model, prompt: list[int], options: argparse.Namespace) -> Iterator[int]:
    """The tokens that follow the prompt, up to a new document."""
    random = torch.Generator().manual_seed(options.seed)
    text = [model.document_token, *prompt]
    for _ in range(options.tokens):
        text.append(choose(model.next_logits(text), options.temperature, options.top_k, random))
        if text[-1] == model.document_token:
            return
        yield text[-1]


# ---- The command -----------------------------------------------------------------------------------------------------
def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("checkpoint", nargs="?", default="latest", help="a file, or latest for the newest [latest]")
    parser.add_argument("--prompt", default="", help="what the text starts with; nothing means a new document")
    parser.add_argument("--tokens", type=int, default=200, help="tokens to add at most [200]")
    parser.add_argument("--temperature", type=float, default=0.8, help="below 1 prefers what is likely [0.8]")
    parser.add_argument("--top_k", type=int, default=50, help="draw from this many likeliest tokens, 0: all [50]")
    parser.add_argument("--seed", type=int, default=1, help="of the draws [1]")
    parser.add_argument("--checkpoint_dir", default="checkpoints", help="where latest is looked for [checkpoints]")
    parser.add_argument("--script", type=Path, help="the script that trained it [train_gpt.py beside sample.py]")
    try:
        options, unknown = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError(f"{error} (--help lists every option)") from None
    if unknown:
        raise UserError(f"{unknown[0]}: not an option (--help lists them)")
    for name, low, high in ("tokens", 1, 10**7), ("temperature", 0, 1e6), ("top_k", 0, 10**6), ("seed", 0, 2**63 - 1):
        if not low <= getattr(options, name) <= high:
            raise UserError(f"--{name} {getattr(options, name)}: must be from {low} to {high}")
    return options


def main(arguments: list[str] | None = None) -> int:
    try:
        options = parse(arguments)
        script = options.script or HERE / "train_gpt.py"
        model = Model(options.checkpoint, options.checkpoint_dir, script, chosen=options.script is not None)
        encode, decode = tokenizer(model.s.vocab_size)
        prompt = encode(options.prompt)
        text = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a character may be spread over tokens
        for token in itertools.chain(prompt, continuation(model, prompt, options)):
            print(text.decode(decode(token)), end="", flush=True)
        print(text.decode(b"", final=True))
        return 0
    except UserError as error:
        warn(str(error))
        return 2
    except BrokenPipeError:  # whoever read the text has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is left in the buffer
        return 0
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
