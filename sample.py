"""Text from a checkpoint of train_gpt.py.

    python sample.py                                                     the newest checkpoint, from an empty document
    python sample.py latest --prompt 'def forward(' --tokens 200         go on from a prompt
    python sample.py checkpoints/<run>/step_000600.pt --temperature 0    always the likeliest token
"""

import codecs
import os
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train_gpt import (
    BLOCK,
    GPT,
    Attention,
    Hyperparameters,
    OneLineParser,
    UserError,
    build_model,
    finite_number,
    in_one_line,
    newest_checkpoint,
    next_multiple_of,
    window_in_blocks,
)

# ----------------------------------------------------------------------------------------------------
# Tokens: text in, bytes out
# ----------------------------------------------------------------------------------------------------

class ByteTokens:
    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogateescape"))

    def decode(self, token: int) -> bytes:
        return bytes([token])

class Gpt2Tokens:
    def __init__(self):
        try:
            import tiktoken
        except ImportError:
            raise UserError("this checkpoint's tokens are GPT-2's, which need tiktoken: pip install tiktoken") from None
        try:
            self.encoding = tiktoken.get_encoding("gpt2")
        except Exception as error:
            raise UserError("tiktoken could not fetch GPT-2's tokens, for which it needs the network once: "
                            f"{type(error).__name__}") from None

    def encode(self, text: str) -> list[int]:
        return self.encoding.encode_ordinary(text)

    def decode(self, token: int) -> bytes:
        return self.encoding.decode_single_token_bytes(token)

def tokens_of(settings: Hyperparameters) -> ByteTokens | Gpt2Tokens:
    kinds = {(257, 256): ByteTokens, (50257, 50256): Gpt2Tokens}
    vocabulary = settings.vocab_size, settings.document_token
    if vocabulary not in kinds:
        raise UserError(f"a vocabulary of {vocabulary[0]} tokens is neither bytes (257) nor GPT-2's (50257)")
    return kinds[vocabulary]()

# ----------------------------------------------------------------------------------------------------
# Model: reads token by token, and remembers what it needs of the tokens before
# ----------------------------------------------------------------------------------------------------

class CachedAttention(nn.Module):
    """Takes a trained attention's place and keeps the window's keys and values: a token costs no more than the window.

    The tokens of one call belong to one block, so that they all see the same blocks, as in training.
    """

    def __init__(self, attention: Attention, window_blocks: int):
        super().__init__()
        self.attention, self.window_blocks = attention, window_blocks
        self.keys = self.values = None

    def forward(self, x_TC: Tensor, value_embedding: Tensor | None, start: int) -> Tensor:
        q, k, v = self.attention.heads(x_TC, value_embedding, start)
        first_seen = max(0, (start // BLOCK - self.window_blocks + 1) * BLOCK)
        seen = start + len(x_TC) - first_seen
        self.keys = k if self.keys is None else torch.cat([self.keys, k])[-seen:]
        self.values = v if self.values is None else torch.cat([self.values, v])[-seen:]
        causal = torch.ones(len(x_TC), seen, dtype=torch.bool, device=q.device).tril(seen - len(x_TC))
        q, k, v = (heads_THD.transpose(0, 1)[None] for heads_THD in (q, self.keys, self.values))
        y_THD = F.scaled_dot_product_attention(q, k, v, attn_mask=causal, enable_gqa=True)[0].transpose(0, 1)
        return self.attention.project(y_THD.flatten(1))

class Reader:
    """A model that reads one document piece by piece."""

    def __init__(self, model: GPT, window_blocks: int):
        self.model, self.length = model.eval(), 0
        for block in model.blocks:
            if block.attention is not None:
                block.attention = CachedAttention(block.attention, window_blocks)

    @torch.inference_mode()
    def read(self, tokens: list[int]) -> Tensor:
        """Go on reading, and return the logits of what follows."""
        rest = torch.tensor(tokens, device=self.model.head.weight.device)
        while len(rest):
            piece, rest = rest.tensor_split([BLOCK - self.length % BLOCK])
            x_TC = self.model.hidden(piece, self.length)  # a cached attention takes the position in the mask's place
            self.length += len(piece)
        return self.model.logits(x_TC[-1])

def read_checkpoint(path: str) -> dict:
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)  # runs no code of the file's
        unlike = {field.name for field in fields(Hyperparameters)} ^ checkpoint["settings"].keys()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror.lower()}") from None
    except Exception as error:  # torch's advice would be to trust the file
        raise UserError(f"{path}: not a checkpoint, or a damaged one ({type(error).__name__})") from None
    if unlike:
        raise UserError(f"{path}: a checkpoint of another script than train_gpt.py, as its settings show "
                        f"({', '.join(sorted(unlike))}); give the path of one of its own")
    return checkpoint

def load_reader(path: str, length: int) -> tuple[Reader, Hyperparameters]:
    """The checkpoint's model, ready for a text of this length, with the attention window of the checkpoint's step."""
    checkpoint = read_checkpoint(path)
    try:
        settings, step = Hyperparameters(**checkpoint["settings"]), checkpoint["step"]
        model = build_model(replace(settings, sequence_length=next_multiple_of(BLOCK, length)))
        model.load_state_dict(checkpoint["state"]["model"])
    except Exception as error:
        raise UserError(f"{path}: not a checkpoint of this train_gpt.py: {in_one_line(error)}") from None
    if sum(param.numel() for param in model.parameters()) < 1e7:
        torch.set_num_threads(1)  # a token's products are too small to share: threads would wait for each other
    window = window_in_blocks(step / settings.num_iterations, settings.window_start, settings.window_end)
    return Reader(model.to("cuda" if torch.cuda.is_available() else "cpu"), window), settings

# ----------------------------------------------------------------------------------------------------
# Sampling
# ----------------------------------------------------------------------------------------------------

def choose(logits: Tensor, temperature: float, top_k: int, random: torch.Generator) -> int:
    """One token: drawn from the `top_k` likeliest (0: from all), or at temperature 0 the likeliest."""
    if temperature == 0:
        return int(logits.argmax())
    likeliest, tokens = logits.topk(min(top_k or len(logits), len(logits)))
    drawn = torch.multinomial(F.softmax(likeliest / temperature, dim=-1), 1, generator=random)
    return int(tokens[drawn])

def continuation(reader: Reader, settings: Hyperparameters, prompt: list[int], count: int, temperature: float,
                 top_k: int, seed: int) -> Iterator[int]:
    """Up to `count` tokens after the prompt; fewer if a new document starts."""
    random = torch.Generator().manual_seed(seed)
    latest = [settings.document_token, *prompt]
    for _ in range(count):
        logits = reader.read(latest)[:settings.vocab_size].cpu()  # the tables' padding is no token
        token = choose(logits, temperature, top_k, random)
        if token == settings.document_token:
            return
        yield token
        latest = [token]

def parse(arguments: list[str] | None):
    about, usage = __doc__.split("\n", 1)
    parser = OneLineParser(description=about, epilog=usage, allow_abbrev=False,
                           formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default="latest", help="a file, or latest for the newest [latest]")
    parser.add_argument("--prompt", default="", help="what the text starts with; nothing means a new document")
    parser.add_argument("--tokens", type=int, default=200, help="tokens to add at most [200]")
    parser.add_argument("--temperature", type=finite_number, default=0.8, help="below 1 is bolder in the likely [0.8]")
    parser.add_argument("--top_k", type=int, default=50, help="draw from this many likeliest tokens, 0: all [50]")
    parser.add_argument("--seed", type=int, default=1, help="of the draws [1]")
    parser.add_argument("--checkpoint_dir", default="checkpoints", help="where latest is looked for [checkpoints]")
    options = parser.parse_args(arguments)
    for name, low, high in ("tokens", 1, 10**7), ("temperature", 0, 1e6), ("top_k", 0, 10**6), ("seed", 0, 2**63):
        if not low <= getattr(options, name) <= high:
            raise UserError(f"--{name} {getattr(options, name)}: must be from {low} to {high}")
    return options

def main(arguments: list[str] | None = None) -> int:
    try:
        options = parse(arguments)
        path = newest_checkpoint(options.checkpoint_dir) if options.checkpoint == "latest" else options.checkpoint
        if not path:
            raise UserError(f"no checkpoint in {options.checkpoint_dir}: train with --save_every first")
        # Every prompt has fewer tokens than bytes, or as many.
        length = 1 + len(options.prompt.encode("utf-8", "surrogateescape")) + options.tokens
        reader, settings = load_reader(path, length)
        tokens = tokens_of(settings)
        prompt = tokens.encode(options.prompt)
        added = continuation(reader, settings, prompt, options.tokens, options.temperature, options.top_k, options.seed)
        text = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a character may be spread over tokens
        for token in chain(prompt, added):
            print(text.decode(tokens.decode(token)), end="", flush=True)
        print(text.decode(b"", final=True))
        return 0
    except UserError as error:
        print(f"sample: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read the text has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is left in the buffer
        return 0
    except KeyboardInterrupt:
        return 130

if __name__ == "__main__":
    sys.exit(main())
