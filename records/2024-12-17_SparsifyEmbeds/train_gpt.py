"""Train a GPT as fast as the hardware allows, in one file that can be read from top to bottom.

    ./run.sh                                                  set up, get the data, train on what is here
    torchrun --standalone --nproc_per_node=8 train_gpt.py     the 8xH100 track: FineWeb to a loss of 3.28
    torchrun --standalone --nproc_per_node=3 train_gpt.py     the same run on any number of GPUs
    python train_gpt.py                                       one GPU; or, with none, the CPU track (LAPTOP below)
    python train_gpt.py --num_iterations 100 --seed 7         every setting is a flag; --help lists them

A run leaves logs/<id>.txt: this source, the machine, every setting, the data's fingerprint, and one line a step.
"""

import argparse
import contextlib
import errno
import glob
import hashlib
import json
import math
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import time
import traceback
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

# ----------------------------------------------------------------------------------------------------
# Settings: the defaults are the 8xH100 record, LAPTOP is what a run without a GPU changes
# ----------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Hyperparameters:
    # data
    train_files: str = "data/fineweb10B/fineweb_train_*.bin"  # training shards, read in the order of their names
    val_files: str = "data/fineweb10B/fineweb_val_*.bin"  # validation shard; of several, the first is used
    vocab_size: int = 50257  # number of different tokens; the head is padded to a multiple of 128
    document_token: int = 50256  # the token that starts a document
    # model
    num_layers: int = 12  # transformer blocks
    num_heads: int = 6  # query heads of each attention
    num_kv_heads: int = 0  # key and value heads, for grouped queries; 0 means as many as num_heads
    model_dim: int = 768  # width of the residual stream
    logit_softcap: float = 30.0  # logits are squashed by a tanh into plus or minus this
    # a step
    sequence_length: int = 65536  # tokens of one forward; documents are packed into it and kept apart by the mask
    batch_sequences: int = 8  # sequences of one step, dealt out to the processes in turn
    piece_length: int = 0  # make sequences of pieces this long from all over the shard; 0 means in the shard's order
    window_start: int = 128  # attention window in tokens at the first step
    window_end: int = 1856  # attention window in tokens at the last step; whole blocks of 128 are used
    # optimisation
    num_iterations: int = 1490  # training steps
    cooldown_frac: float = 600 / 1490  # the learning rates fall to zero over this last part of the steps
    embedding_lr: float = 0.6  # Adam's learning rate for the embedding tables
    head_lr: float = 0.008  # Adam's learning rate for the output head
    scalar_lr: float = 0.04  # Adam's learning rate for the mixing weights
    adam_beta1: float = 0.8  # Adam's decay of the mean gradient
    adam_beta2: float = 0.95  # Adam's decay of the mean squared gradient
    muon_lr: float = 0.05  # Muon's learning rate for the matrices inside the blocks
    momentum_start: float = 0.85  # Muon's momentum at the first step
    momentum_end: float = 0.95  # Muon's momentum from momentum_warmup on
    momentum_warmup: int = 300  # steps over which Muon's momentum grows
    ns_steps: int = 5  # Newton-Schulz steps of each orthogonalisation
    seed: int = 1  # of the initial weights
    # validation
    val_tokens: int = 10485760  # tokens of the validation shard that are used
    val_loss_every: int = 125  # steps between validations; 0 means only at the end
    target_loss: float = 3.28  # validation loss that this track asks for
    # machine
    dtype: str = "auto"  # of activations and products: bfloat16, float32, or auto (the faster on a CPU)
    compile: bool = True  # compile with torch.compile
    max_autotune: bool = False  # let Inductor try more kernels for many more minutes of compiling
    recompute: bool = False  # save memory: what is cheap is computed again in the backward instead of being kept
    warmup_steps: int = 10  # steps on made-up data before the clock starts; they leave no trace
    collective_timeout: int = 600  # seconds until a process that does not answer ends the run
    # survival
    log_dir: str = "logs"  # where the logs go
    checkpoint_dir: str = "checkpoints"  # where the checkpoints go
    save_every: int = 0  # steps between checkpoints, the last step included; 0 means none
    resume: str = ""  # checkpoint to go on from; latest means the newest in checkpoint_dir, if there is one
    resume_anyway: bool = False  # go on even if the checkpoint belongs to another model, data or script

LAPTOP = dict(
    train_files="data/embedded/embedded_train_*.bin",
    val_files="data/embedded/embedded_val_*.bin",
    vocab_size=257,
    document_token=256,
    num_layers=4,
    num_heads=2,
    model_dim=96,
    sequence_length=1024,
    batch_sequences=2,
    piece_length=256,
    window_start=256,
    window_end=256,
    num_iterations=800,
    cooldown_frac=0.5,
    embedding_lr=0.2,
    adam_beta1=0.9,
    adam_beta2=0.99,
    muon_lr=0.03,
    momentum_end=0.9,
    val_tokens=262144,
    val_loss_every=0,
    target_loss=1.04,
    compile=False,
    warmup_steps=1,
    save_every=800,
)

class UserError(Exception):
    """Something the user can put right: shown as one line, once, with exit code 2."""

def in_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]

class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError(f"{message} (--help lists every setting)")

def true_or_false(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"

def finite_number(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(text)
    return float(text)

def parse_settings(arguments: list[str], on_cpu: bool) -> Hyperparameters:
    """The settings of this run: the record's, LAPTOP's over them on a CPU, and the command line's over both."""
    source = Path(__file__).read_text(encoding="utf-8")
    meanings = dict(re.findall(r"^    (\w+): \w+ = .*?  # (.+)$", source, re.MULTILINE))
    about, usage = __doc__.split("\n", 1)
    parser = OneLineParser(description=about, epilog=usage, allow_abbrev=False, add_help=False,
                           formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--help", action="help", help="show this and exit")
    converters = {bool: true_or_false, float: finite_number, int: int, str: str}
    for field in fields(Hyperparameters):
        laptop = f"; {LAPTOP[field.name]} on a CPU" if field.name in LAPTOP else ""
        parser.add_argument(
            f"--{field.name}", type=converters[field.type], metavar=field.type.__name__,
            default=LAPTOP.get(field.name, field.default) if on_cpu else field.default,
            help=f"{meanings[field.name]} [{field.default}{laptop}]".replace("%", "%%"),
            **(dict(nargs="?", const=True) if field.type is bool else {}),
        )
    return Hyperparameters(**vars(parser.parse_args(arguments)))

def check_settings(settings: Hyperparameters, world_size: int) -> None:
    s, kv_heads = settings, settings.num_kv_heads or settings.num_heads
    for names, low, high in (
        ("num_layers num_heads model_dim sequence_length batch_sequences val_tokens num_iterations ns_steps", 1, 2**40),
        ("collective_timeout", 1, 10**6),
        ("piece_length num_kv_heads embedding_lr head_lr scalar_lr muon_lr momentum_warmup seed", 0, 2**40),
        ("val_loss_every warmup_steps save_every", 0, 2**40),
        ("vocab_size", 1, 65536),  # shards hold 16-bit tokens
        ("document_token", 0, s.vocab_size - 1),
        ("logit_softcap", 1e-3, 1e6),
        ("cooldown_frac", 0, 1),
        ("adam_beta1 adam_beta2 momentum_start momentum_end", 0, 0.99999),
        ("window_start", BLOCK, s.window_end),
    ):
        for name in names.split():
            if not low <= getattr(s, name) <= high:
                raise UserError(f"--{name} {getattr(s, name)}: must be from {low} to {high}")
    for holds, message in (
        (s.model_dim % (4 * s.num_heads) == 0, f"--model_dim {s.model_dim}: must be a multiple of 4 x num_heads"),
        (s.num_heads % kv_heads == 0, f"--num_kv_heads {kv_heads}: must divide num_heads ({s.num_heads})"),
        (s.sequence_length % BLOCK == 0,
         f"--sequence_length {s.sequence_length}: must be a multiple of the attention block, {BLOCK}"),
        (s.sequence_length % (s.piece_length or 1) == 0,
         f"--piece_length {s.piece_length}: must divide sequence_length ({s.sequence_length})"),
        (s.val_tokens % s.sequence_length == 0,
         f"--val_tokens {s.val_tokens}: must be a multiple of sequence_length ({s.sequence_length})"),
        (s.batch_sequences >= world_size,
         f"--batch_sequences {s.batch_sequences}: fewer sequences than processes; start at most {s.batch_sequences}"),
        (s.dtype in ("auto", "bfloat16", "float32"), f"--dtype {s.dtype}: must be auto, bfloat16 or float32"),
    ):
        if not holds:
            raise UserError(message)

# ----------------------------------------------------------------------------------------------------
# Muon: momentum whose matrices are made orthogonal, the work shared out over the processes
# ----------------------------------------------------------------------------------------------------

def newton_schulz(matrix: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """The matrix with its singular values driven to about 1 (0.7 to 1.2) and its singular vectors kept.

    The quintic's coefficients make small singular values grow as fast as possible rather than converge to
    exactly 1, which training does not need (Keller Jordan, 2024: https://kellerjordan.github.io/posts/muon).
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.to(dtype)
    x = x.T if tall else x  # the products below are as small as the shorter side
    x = x / (x.norm() + 1e-7)  # so that no singular value is above 1
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x

class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised by Newton-Schulz, for matrices.

    Parameters of one size are taken in chunks of one per process. Each process orthogonalises its own, so that it
    alone keeps that momentum, and the results are gathered while the next chunk is being computed. A parameter may
    carry its own learning-rate factor as an attribute, `lr_factor`.
    """

    def __init__(self, parameters, lr: float, momentum: float, ns_steps: int, world: "World", dtype: torch.dtype,
                 orthogonalise=newton_schulz):
        parameters = list(parameters)
        sizes = list(dict.fromkeys(p.numel() for p in parameters))
        groups = [dict(params=[p for p in parameters if p.numel() == size]) for size in sizes]
        super().__init__(groups, dict(lr=lr, momentum=momentum, ns_steps=ns_steps))
        self.world, self.dtype, self.orthogonalise = world, dtype, orthogonalise

    @torch.no_grad()
    def step(self) -> None:
        in_flight = None
        for group in self.param_groups:
            for chunk in self.chunks(group):
                if self.world.rank < len(chunk):
                    update = self.update_of(chunk[self.world.rank], group)
                else:  # the last chunk may be short; whoever has nothing to do sends zeros
                    update = chunk[0].new_zeros(chunk[0].numel(), dtype=self.dtype)
                if in_flight:
                    self.apply(*in_flight)
                in_flight = (group, chunk, *self.gather(update))
        if in_flight:
            self.apply(*in_flight)

    def chunks(self, group: dict) -> list[list[nn.Parameter]]:
        params, size = group["params"], self.world.size
        return [params[first:first + size] for first in range(0, len(params), size)]

    def update_of(self, param: nn.Parameter, group: dict) -> Tensor:
        state = self.state[param]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(param)
        average = state["momentum"].lerp_(param.grad, 1 - group["momentum"])
        nesterov = param.grad.lerp(average, group["momentum"])
        return self.orthogonalise(nesterov, group["ns_steps"], self.dtype).flatten()

    def gather(self, mine: Tensor) -> tuple[Tensor, dist.Work | None]:
        """Everybody's tensor in the order of the ranks, once the returned work is done."""
        if self.world.size == 1:
            return mine[None], None
        everybodys = mine.new_empty(self.world.size, *mine.shape)
        return everybodys, dist.all_gather_single(everybodys, mine[None].contiguous(), async_op=True)

    def apply(self, group: dict, chunk: list[nn.Parameter], updates: Tensor, work: dist.Work | None) -> None:
        if work:
            work.wait()
        for param, update in zip(chunk, updates, strict=False):
            rows, columns = param.shape
            rate = group["lr"] * max(1, rows / columns) ** 0.5 * getattr(param, "lr_factor", 1.0)
            param.add_(update.view_as(param), alpha=-rate)

    @torch.no_grad()
    def gathered_momentum(self) -> list[Tensor]:
        """The momentum of every parameter, collected from the processes that keep it."""
        momentum = []
        for group in self.param_groups:
            for chunk in self.chunks(group):
                mine = chunk[min(self.world.rank, len(chunk) - 1)]
                everybodys, work = self.gather(self.state[mine].get("momentum", torch.zeros_like(mine)).flatten())
                if work:
                    work.wait()
                momentum += [value.view_as(param) for param, value in zip(chunk, everybodys.cpu(), strict=False)]
        return momentum

    def load_momentum(self, momentum: list[Tensor]) -> None:
        """Take from `gathered_momentum`, of any number of processes, what this process keeps."""
        self.state.clear()
        params = [(chunk, i) for group in self.param_groups for chunk in self.chunks(group) for i in range(len(chunk))]
        for (chunk, i), value in zip(params, momentum, strict=True):
            if i == self.world.rank:
                self.state[chunk[i]]["momentum"] = value.to(chunk[i].device)

# ----------------------------------------------------------------------------------------------------
# Attention: which tokens see which, and the two ways of computing it
# ----------------------------------------------------------------------------------------------------

BLOCK = 128  # tokens; the window is counted in these

def flex_mask(documents: Tensor, window_blocks: Tensor) -> BlockMask:
    """A token sees itself and what came before it in its document, in the last `window_blocks` blocks.

    Built at the level of blocks, from the first and last document of each, so that a change of the window or of the
    documents is a change of values and never a recompile. Blocks that are visible as a whole are listed apart: no
    condition is evaluated inside them (public records of 2024-12-08 and 2024-12-10, by YouJiacheng and others).
    """
    def visible(batch, head, query, key):
        return (query >= key) & (documents[query] == documents[key])

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        count = blocks.sum(dim=-1, dtype=torch.int32)
        order = blocks.to(torch.int32).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
        return count[None, None].contiguous(), order[None, None].contiguous()

    first, last = documents.view(-1, BLOCK)[:, 0].contiguous(), documents.view(-1, BLOCK)[:, -1].contiguous()
    key_block = torch.arange(len(first), dtype=torch.int32, device=documents.device)
    query_block = key_block[:, None]
    in_window = (query_block >= key_block) & (query_block - key_block < window_blocks)
    some_visible = in_window & (first[:, None] <= last) & (first <= last[:, None])
    all_visible = in_window & (query_block > key_block) & (first[:, None] == last) & (first == last[:, None])
    return BlockMask.from_kv_blocks(
        *listed(some_visible & ~all_visible), *listed(all_visible), BLOCK_SIZE=BLOCK, mask_mod=visible,
    )

def gathered_mask(documents: Tensor, window_blocks: Tensor) -> Tensor:
    """The same for attention over gathered blocks: does query i of block n see key j of that block's window?"""
    window = min(int(window_blocks), len(documents) // BLOCK)
    key = torch.arange(window * BLOCK, device=documents.device)
    causal = key[-BLOCK:, None] >= key  # the block's queries are the last of its window
    return causal & (documents.view(-1, BLOCK, 1) == gather_window(documents, window, nothing=-1)[:, None])

def gather_window(x: Tensor, window_blocks: int, nothing: float = 0) -> Tensor:
    """For each block of the first dimension: the tokens of that block's window, those of the block itself last."""
    blocks = x.unflatten(0, (-1, BLOCK))
    padded = F.pad(blocks, (0, 0) * x.ndim + (window_blocks - 1, 0), value=nothing)
    return torch.cat([padded[i:i + len(blocks)] for i in range(window_blocks)], dim=1)

def attend(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, mask: BlockMask | Tensor) -> Tensor:
    """Attention under the mask; the only place where devices differ in what they compute.

    FlexAttention has no backward on a CPU. There, the keys and values of the window are copied beside each block of
    queries and the blocks become the batch: the cost grows with length times window, as FlexAttention's does.
    """
    if isinstance(mask, BlockMask):
        q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_THD, v_THD))
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)
    q_NHBD = q_THD.unflatten(0, (-1, BLOCK)).transpose(1, 2)
    k_NHWD, v_NHWD = (gather_window(x, mask.size(-1) // BLOCK).transpose(1, 2) for x in (k_THD, v_THD))
    y_NHBD = F.scaled_dot_product_attention(q_NHBD, k_NHWD, v_NHWD, attn_mask=mask[:, None], enable_gqa=True)
    return y_NHBD.transpose(1, 2).flatten(0, 1)

# ----------------------------------------------------------------------------------------------------
# Model: a GPT with value embeddings and U-net skips
# ----------------------------------------------------------------------------------------------------

def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))

def next_multiple_of(n: int, value: int) -> int:
    return math.ceil(value / n) * n

class CastedLinear(nn.Linear):
    """A linear map without bias, its float32 weights cast to the activations' dtype at use."""

    def __init__(self, in_features: int, out_features: int, start_at_zero: bool = False):
        super().__init__(in_features, out_features, bias=False)
        if start_at_zero:
            nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.type_as(x))

class Rotary(nn.Module):
    """Rotary positions on half of the pairs; the other half stays still and can carry what has no position."""

    def __init__(self, head_dim: int, max_length: int):
        super().__init__()
        turning = (1 / 1024) ** torch.linspace(0, 1, head_dim // 4)
        angle = torch.outer(torch.arange(max_length), torch.cat([turning, torch.zeros(head_dim // 4)]))
        self.register_buffer("cos", angle.cos()[:, None], persistent=False)
        self.register_buffer("sin", angle.sin()[:, None], persistent=False)

    def forward(self, x_THD: Tensor, start: int = 0) -> Tensor:
        cos, sin = (table[start:start + len(x_THD)] for table in (self.cos, self.sin))
        x1, x2 = x_THD.float().chunk(2, dim=-1)
        return torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin], dim=-1).type_as(x_THD)

class Attention(nn.Module):
    def __init__(self, model_dim: int, num_heads: int, num_kv_heads: int, rotary: Rotary):
        super().__init__()
        self.head_dim = model_dim // num_heads
        kv_dim = num_kv_heads * self.head_dim
        self.query = CastedLinear(model_dim, model_dim)
        self.key = CastedLinear(model_dim, kv_dim)
        self.value = CastedLinear(model_dim, kv_dim)
        self.value_mix = nn.Parameter(torch.tensor([0.5, 0.5]))
        self.rotary = rotary
        self.project = CastedLinear(model_dim, model_dim, start_at_zero=True)

    def forward(self, x_TC: Tensor, value_embedding: Tensor | None, mask: BlockMask | Tensor) -> Tensor:
        q, k, v = self.heads(x_TC, value_embedding)
        return self.project(attend(q, k, v, mask).flatten(1))

    def heads(self, x_TC: Tensor, value_embedding: Tensor | None, start: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (linear(x_TC).unflatten(-1, (-1, self.head_dim)) for linear in (self.query, self.key, self.value))
        q, k = self.rotary(norm(q), start), self.rotary(norm(k), start)
        mix = self.value_mix.type_as(v)
        v = mix[0] * v if value_embedding is None else mix[0] * v + mix[1] * value_embedding.view_as(v)
        return q, k, v

class MLP(nn.Module):
    def __init__(self, model_dim: int):
        super().__init__()
        self.expand = CastedLinear(model_dim, 4 * model_dim)
        self.project = CastedLinear(4 * model_dim, model_dim, start_at_zero=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(F.relu(self.expand(x)).square())  # ReLU squared: Primer, arXiv:2109.08668

class Block(nn.Module):
    def __init__(self, model_dim: int, attention: Attention | None):
        super().__init__()
        self.attention = attention
        self.mlp = MLP(model_dim)
        self.embedding_mix = nn.Parameter(torch.tensor([1.0, 0.0]))

    def forward(self, x: Tensor, x0: Tensor, value_embedding: Tensor | None, mask) -> Tensor:
        mix = self.embedding_mix.type_as(x)
        x = mix[0] * x + mix[1] * x0
        if self.attention is not None:
            x = x + self.attention(norm(x), value_embedding, mask)
        return x + self.mlp(norm(x))

class ValueEmbeddings(nn.Module):
    """Tables whose rows join the attention's values, shared by the first layers and the last ones."""

    def __init__(self, vocab_size: int, kv_dim: int, num_layers: int):
        super().__init__()
        self.num_layers = num_layers
        self.tables = nn.ModuleList(nn.Embedding(vocab_size, kv_dim) for _ in range(min(3, num_layers // 2)))

    def forward(self, inputs: Tensor, dtype: torch.dtype) -> list[Tensor | None]:
        rows = [table(inputs).to(dtype) for table in self.tables]
        return rows + [None] * (self.num_layers - 2 * len(rows)) + rows

@dataclass(frozen=True)
class GPTConfig:
    vocab_size: int
    document_token: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    model_dim: int
    max_length: int
    logit_softcap: float
    dtype: torch.dtype
    flex: bool

class GPT(nn.Module):
    """Maps a sequence of packed documents to its loss; the sequence is one forward, so there is no batch dimension."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        c, head_dim = config, config.model_dim // config.num_heads
        self.document_token, self.logit_softcap, self.dtype = c.document_token, c.logit_softcap, c.dtype
        self.make_mask = flex_mask if c.flex else gathered_mask
        self.embedding = nn.Embedding(c.vocab_size, c.model_dim)
        self.value_embeddings = ValueEmbeddings(c.vocab_size, c.num_kv_heads * head_dim, c.num_layers)
        rotary = Rotary(head_dim, c.max_length)
        self.blocks = nn.ModuleList(
            # layer 7 does without attention (public record of 2024-12-17, found by Koszarsky)
            Block(c.model_dim, Attention(c.model_dim, c.num_heads, c.num_kv_heads, rotary) if layer != 7 else None)
            for layer in range(c.num_layers)
        )
        self.skip_weights = nn.Parameter(torch.ones(c.num_layers // 2))
        self.head = CastedLinear(c.model_dim, next_multiple_of(128, c.vocab_size), start_at_zero=True)

    def forward(self, inputs: Tensor, targets: Tensor, window_blocks: Tensor, piece_length: int = 0) -> Tensor:
        starts = inputs == self.document_token
        if piece_length:  # a piece is kept apart from the others as a document is
            starts = starts | (torch.arange(len(inputs), device=inputs.device) % piece_length == 0)
        mask = self.make_mask(starts.cumsum(0), window_blocks)
        x = self.hidden(inputs, mask)
        return F.cross_entropy(self.logits(x), targets)

    def hidden(self, inputs: Tensor, mask: BlockMask | Tensor) -> Tensor:
        """The last layer's output, normed."""
        x = x0 = norm(self.embedding(inputs).to(self.dtype))
        value_embeddings = self.value_embeddings(inputs, self.dtype)
        skip_weights = self.skip_weights.type_as(x)
        depth, skips = len(skip_weights), []
        for layer, (block, value_embedding) in enumerate(zip(self.blocks, value_embeddings, strict=True)):
            if layer >= len(self.blocks) - depth:  # the second half takes back, in reverse order,
                x = x + skip_weights[depth - len(skips)] * skips.pop()
            x = block(x, x0, value_embedding, mask)
            if layer < depth:  # what the first half has left
                skips.append(x)
        return norm(x)

    def logits(self, x: Tensor) -> Tensor:
        logits = self.head(x)
        return (self.logit_softcap * torch.tanh(logits / self.logit_softcap)).float()

def build_model(settings: Hyperparameters, flex: bool = False) -> GPT:
    s = settings
    torch.manual_seed(s.seed)
    model = GPT(GPTConfig(
        s.vocab_size, s.document_token, s.num_layers, s.num_heads, s.num_kv_heads or s.num_heads, s.model_dim,
        s.sequence_length, s.logit_softcap, getattr(torch, s.dtype), flex,
    ))
    for module in model.modules():  # tables and mixing weights are held in bfloat16, matrices in float32
        if not isinstance(module, CastedLinear):
            for param in module.parameters(recurse=False):
                param.data = param.data.bfloat16()
    return model

# ----------------------------------------------------------------------------------------------------
# Data: shards of tokens, and the loader that deals their sequences out
# ----------------------------------------------------------------------------------------------------

HEADER_BYTES = 1024  # 256 little-endian int32: magic number, version, number of tokens, zeros
HOW_TO_GET_DATA = ("python data/cached_fineweb10B.py 10 fetches FineWeb, "
                   "python data/embedded_corpus.py makes the offline corpus")

def find_shards(pattern: str) -> list[str]:
    folder = os.path.dirname(pattern) or "."
    try:
        if not glob.has_magic(folder) and os.path.isdir(folder):
            os.listdir(folder)  # glob keeps quiet about a folder that it may not read
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror.lower()}; the data folder must be readable") from None
    paths = sorted(glob.glob(pattern))
    if not paths:
        raise UserError(f"no shards match {pattern}: {HOW_TO_GET_DATA}")
    return paths

class Shard:
    """A file of 16-bit tokens, read straight into memory from which a GPU can fetch, and checked."""

    def __init__(self, path: str, vocab_size: int, pinned: bool = False):
        self.path = path
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                header = np.frombuffer(file.read(HEADER_BYTES), "<i4", count=min(size, HEADER_BYTES) // 4)
                self.tokens = torch.empty(max(size - HEADER_BYTES, 0) // 2, dtype=torch.uint16, pin_memory=pinned)
                file.readinto(self.tokens.numpy())
        except OSError as error:
            raise UserError(f"{path}: {error.strerror.lower()}") from None
        if len(header) < HEADER_BYTES // 4:
            raise UserError(f"{path}: {size} bytes are too few for a shard's header; fetch it again")
        magic, version, count = (int(field) for field in header[:3])
        if magic != 20240520:
            raise UserError(f"{path}: magic number {magic}, not 20240520; this is no token shard")
        if version != 1:
            raise UserError(f"{path}: version {version}, but only version 1 can be read")
        if count < 1 or size != HEADER_BYTES + 2 * count:
            raise UserError(f"{path}: {size} bytes, but its header promises {count} tokens ({HEADER_BYTES + 2 * count} "
                            "bytes); it is truncated or damaged, fetch it again")
        largest = int(self.tokens.numpy().max())
        if largest >= vocab_size:
            raise UserError(f"{path}: token {largest} is outside the vocabulary of {vocab_size}")

    def __len__(self) -> int:
        return len(self.tokens)

    def sequence(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one forward; the targets are the inputs one token later."""
        tokens = self.tokens[start:start + length + 1].to(torch.int64)
        return tokens[:-1].to(torch.int32), tokens[1:]

class Loader:
    """Deals out the token stream: each step takes the next `batch_sequences` sequences, this process every size-th.

    So every number of processes trains on the same tokens in the same order. The next batch is read by a thread
    while the current one trains.
    """

    def __init__(self, paths: list[str], settings: Hyperparameters, world: "World"):
        self.paths, self.settings, self.world = paths, settings, world
        self.batch_tokens = settings.batch_sequences * settings.sequence_length
        self.shard = Shard(paths[0], settings.vocab_size, world.on_gpu)
        self.reader = ThreadPoolExecutor(1, initializer=lambda: world.on_gpu and torch.cuda.set_device(world.device))
        self.seek([0, 0])
        self.ahead.result()  # a fault in the first batch shows before anything is written

    def seek(self, position: list[int]) -> None:
        self.position = position  # of the batch that is handed out next: index of the shard, first token
        self.ahead = self.reader.submit(self.read, position)

    def next_batch(self, notice) -> list[tuple[Tensor, Tensor]]:
        sequences, wrapped, following = self.ahead.result()
        if wrapped:
            notice(f"all {len(self.paths)} training shards have been used: starting again with the first")
        self.seek(following)
        return [(inputs.to(self.world.device, non_blocking=True), targets.to(self.world.device, non_blocking=True))
                for inputs, targets in sequences]

    def read(self, position: list[int]) -> tuple[list[tuple[Tensor, Tensor]], bool, list[int]]:
        count = len(self.paths)
        for passed in range(count + 1):  # on to the next shard when the rest is smaller than a batch
            index, first = (position[0] + passed) % count, 0 if passed else position[1]
            self.open(index)
            if first + self.batch_tokens < len(self.shard):
                break
        else:
            raise UserError(f"no shard of {self.settings.train_files} holds a batch of {self.batch_tokens} tokens "
                            "(batch_sequences x sequence_length) and one more")
        wrapped = position[0] % count + passed >= count
        first_sequence = first // self.settings.sequence_length
        mine = range(first_sequence + self.world.rank, first_sequence + self.settings.batch_sequences, self.world.size)
        sequences = [self.sequence(number) for number in mine]
        if self.world.on_gpu:
            sequences = [(inputs.pin_memory(), targets.pin_memory()) for inputs, targets in sequences]
        return sequences, wrapped, [index, first + self.batch_tokens]

    def sequence(self, number: int) -> tuple[Tensor, Tensor]:
        """The shard's sequence of that number: in its order, or made of pieces scattered over it, each used once.

        Where documents are longer than a batch, a batch in the shard's order is about one document.
        """
        length = self.settings.piece_length or self.settings.sequence_length
        if not self.settings.piece_length:
            return self.shard.sequence(number * length, length)
        count, pieces = (len(self.shard) - 1) // length, self.settings.sequence_length // length
        stride = next(n for n in range(int(0.618 * count), 0, -1) if math.gcd(n, count) == 1)
        places = (piece * stride % count for piece in range(number * pieces, (number + 1) * pieces))
        inputs, targets = zip(*(self.shard.sequence(place * length, length) for place in places), strict=True)
        return torch.cat(inputs), torch.cat(targets)

    def open(self, index: int) -> None:
        if self.shard.path != self.paths[index]:
            self.shard = Shard(self.paths[index], self.settings.vocab_size, self.world.on_gpu)

def fingerprint(paths: list[str]) -> list[dict]:
    """What tells one set of shards from another: names, token counts, and a hash of each one's ends."""
    prints = []
    for path in paths:
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                ends = hashlib.sha256(file.read(HEADER_BYTES + 2**20))
                file.seek(max(file.tell(), size - 2**20))
                ends.update(file.read())
        except OSError as error:
            raise UserError(f"{path}: {error.strerror.lower()}") from None
        prints.append(dict(file=os.path.basename(path), tokens=(size - HEADER_BYTES) // 2, sha256=ends.hexdigest()))
    return prints

# ----------------------------------------------------------------------------------------------------
# Schedules: pure functions of where the run is
# ----------------------------------------------------------------------------------------------------

def learning_rate(progress: float, cooldown_frac: float) -> float:
    """Factor of every learning rate: 1, then in a straight line to 0 at the end."""
    return min(1.0, (1 - progress) / cooldown_frac) if cooldown_frac else 1.0

def window_in_blocks(progress: float, start: int, end: int) -> int:
    """The attention window, growing from `start` to `end` tokens in whole blocks (record of 2024-11-24, Koszarsky)."""
    return int((1 - progress) * start + progress * end) // BLOCK

def muon_momentum(step: int, warmup: int, start: float, end: float) -> float:
    part = min(step / warmup, 1) if warmup else 1
    return (1 - part) * start + part * end

# ----------------------------------------------------------------------------------------------------
# Run log: the file that proves a run, what the console shows of it, and the clock
# ----------------------------------------------------------------------------------------------------

RULE = "=" * 100

class RunLog:
    """The first process writes the log and the console; the others keep quiet.

    A line reaches the file at once, so that a killed run leaves a readable log. What a full disk does not take is
    tried again with the next line, and the run goes on.
    """

    def __init__(self, world: "World", path: Path, header: str):
        self.speaks, self.path, self.bar, self.unwritten = world.rank == 0, path, None, b""
        if not self.speaks:
            return
        is_new = not path.exists()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(path, "ab", buffering=0)
            if is_new and self.file.write(header.encode()) < len(header.encode()):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if is_new:
                with contextlib.suppress(OSError):
                    path.unlink()
            raise UserError(f"the log {path} cannot be written: {error.strerror.lower()}") from None

    def write(self, text: str) -> None:
        if not self.speaks:
            return
        was_failing, self.unwritten = bool(self.unwritten), self.unwritten + text.encode() + b"\n"
        try:
            while self.unwritten:
                self.unwritten = self.unwritten[self.file.write(self.unwritten):]
        except OSError as error:
            if not was_failing:
                self.say(f"the log cannot be written, the run goes on: {error.strerror.lower()}")

    def say(self, text: str) -> None:
        if self.speaks:
            with contextlib.suppress(OSError):  # the console may be a file on a full disk, too
                tqdm.write(text, file=sys.stdout)
                sys.stdout.flush()

    def note(self, text: str) -> None:
        self.write(text)
        self.say(text)

    def start_bar(self, first_step: int, settings: Hyperparameters) -> None:
        if self.speaks and sys.stderr.isatty():
            self.bar = tqdm(total=settings.num_iterations, initial=first_step, unit="step", leave=False)

    def step(self, step: int, loss: float, clock: "Clock", settings: Hyperparameters) -> None:
        line = f"step:{step}/{settings.num_iterations} train_loss:{loss:.6f} {clock.line(step)}"
        self.write(line)
        if self.bar is None:
            return self.say(line)
        speed = settings.batch_sequences * settings.sequence_length * step / clock.now()
        self.bar.set_postfix_str(f"loss {loss:.4f}, {speed:,.0f} tokens/s", refresh=False)
        self.bar.update()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()

class Clock:
    """Training time in seconds: stopped for validation and checkpoints, continued by a resumed run."""

    def __init__(self, on_gpu: bool, seconds: float = 0.0):
        self.on_gpu, self.seconds, self.started = on_gpu, seconds, None

    def start(self) -> None:
        self.wait_for_gpu()
        self.started = time.perf_counter()

    def stop(self) -> None:
        self.wait_for_gpu()
        self.seconds, self.started = self.now(), None

    def wait_for_gpu(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def now(self) -> float:
        return self.seconds + (0 if self.started is None else time.perf_counter() - self.started)

    def line(self, step: int) -> str:
        return f"train_time:{1000 * self.now():.0f}ms step_avg:{1000 * self.now() / max(step, 1):.2f}ms"

def describe_hardware(world: "World") -> str:
    if world.on_gpu:
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            return f"{torch.cuda.get_device_name(world.device)}\n{subprocess.check_output(['nvidia-smi'], text=True)}"
        return torch.cuda.get_device_name(world.device)
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, TypeError):
        model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]
    return f"{model}, {os.cpu_count()} cores, {torch.get_num_threads()} threads a process"

def peak_memory(world: "World") -> str:
    if world.on_gpu:
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return f"{allocated // 2**20} MiB allocated, {reserved // 2**20} MiB reserved"
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 2**10} MiB resident"

def log_header(source: str, settings: Hyperparameters, world: "World", data: list[dict]) -> str:
    facts = dict(python=sys.version.replace("\n", " "), torch=torch.__version__, cuda=torch.version.cuda,
                 hardware=describe_hardware(world), world_size=world.size, seed=settings.seed,
                 settings=json.dumps(asdict(settings)), data=json.dumps(data))
    return "\n".join([source.removesuffix("\n"), RULE, *(f"{name}: {fact}" for name, fact in facts.items()), RULE, ""])

# ----------------------------------------------------------------------------------------------------
# Processes: where this one is, its device, and how all of them end together
# ----------------------------------------------------------------------------------------------------

class World(NamedTuple):
    """What a process needs to know of its place."""
    rank: int
    size: int
    local_rank: int
    device: torch.device

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

def find_place() -> World:
    """This process's place: told by torchrun, or a world of one."""
    rank, size, local_rank = (int(os.environ.get(name, 0)) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    return World(rank, max(size, 1), local_rank, device)

def start_gpu(world: World) -> None:
    # Loses less memory to fragments; before anything else, as the first question to a GPU settles it.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > torch.cuda.device_count():
        raise UserError(f"more processes than GPUs on this machine ({torch.cuda.device_count()}): start one for each")
    name, capability = torch.cuda.get_device_name(world.device), torch.cuda.get_device_capability(world.device)
    if capability < (8, 0) or not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError(f"{name} (sm_{capability[0]}{capability[1]}) has no bfloat16: this script needs sm_80 or "
                        "newer, such as A100 or RTX 30; with CUDA_VISIBLE_DEVICES='' it trains on the CPU")
    torch.cuda.set_device(world.device)

def memory_advice(settings: Hyperparameters, world: World) -> str:
    """For a card that was too small: what is needed, by a rule that follows full-size rehearsals, and what fits."""
    s = settings
    with torch.device("meta"):
        weights = sum(param.numel() for param in build_model(s).parameters())

    def needed(length: int) -> float:
        kept = 15 if s.recompute else 19  # vectors a layer
        token = 2 * (kept * s.num_layers * s.model_dim + s.vocab_size)
        return (16 * weights + length * token) / 2**30

    length, sequences = s.sequence_length, s.batch_sequences
    card = torch.cuda.get_device_properties(world.device).total_memory / 2**30
    while needed(length) > 0.9 * card and length % (2 * BLOCK) == 0:
        length, sequences = length // 2, sequences * 2
    advice = f"--sequence_length {length} --batch_sequences {sequences} takes the same batch in {needed(length):.0f}"
    if length == s.sequence_length:
        advice = "it should fit: is another program using the card?"
    elif needed(length) > 0.9 * card:
        advice = "no sequence is short enough: choose fewer layers or a smaller model_dim"
    return (f"out of memory: --sequence_length {s.sequence_length} needs about {needed(s.sequence_length):.0f} GiB, "
            f"{torch.cuda.get_device_name(world.device)} has {card:.0f}; {advice}")

def connect(world: World, timeout: int) -> dist.Store | None:
    """Join the other processes. The store remains for what they have to say when collectives no longer work."""
    if world.size == 1:
        return None
    start_limit = timedelta(seconds=max(timeout, 300))  # one process may start much later than another
    store, _, _ = next(dist.rendezvous("env://", timeout=start_limit))
    # torchrun's store outlives a restart: what killed processes have left in it must not be taken for an answer.
    store = dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    store.set(f"here/{world.rank}", "")
    try:
        store.wait([f"here/{rank}" for rank in range(world.size)], start_limit)
    except dist.DistStoreError:
        raise UserError(f"rank {absent(world, store, 'here')} has not started") from None
    dist.init_process_group("nccl" if world.on_gpu else "gloo", store=store, rank=world.rank, world_size=world.size,
                            timeout=timedelta(seconds=timeout), device_id=world.device if world.on_gpu else None)
    dist.barrier()
    return store

def absent(world: World, store: dist.Store, word: str) -> str:
    """The ranks that have not left this word in the store."""
    return ", ".join(str(rank) for rank in range(world.size) if not store.check([f"{word}/{rank}"]))

def from_first_rank(name: str, value, world: World, store: dist.Store | None):
    """The first process's value, on all of them."""
    if store is None:
        return value
    if world.rank == 0:
        store.set(name, json.dumps(value))
    return json.loads(store.get(name))

def choose_dtype(settings: Hyperparameters, world: World, store: dist.Store | None) -> tuple[Hyperparameters, str]:
    """The settings with `auto` decided, and the reason in words."""
    if settings.dtype != "auto":
        return settings, "as asked"
    if world.on_gpu:
        return replace(settings, dtype="bfloat16"), "the GPU's fastest"

    def seconds(dtype: torch.dtype) -> float:
        x, times = torch.ones(512, 512, dtype=dtype), []
        for _ in range(8):
            start = time.perf_counter()
            x @ x
            times.append(time.perf_counter() - start)
        return min(times)

    # CPUs with bfloat16 instructions multiply twice as fast in it, others take three times as long
    speedup = from_first_rank("speedup", seconds(torch.float32) / seconds(torch.bfloat16), world, store)
    dtype = "bfloat16" if speedup > 1 else "float32"
    return replace(settings, dtype=dtype), f"bfloat16 runs at {speedup:.2g} times float32's speed here"

class Stopped(BaseException):
    """The end of a run before its last step, with the exit code that says why; no fault that others may catch."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code

class StopSignals:
    """Remembers Ctrl-C and SIGTERM until the step is finished; before the first step they end the run at once."""

    def __init__(self):
        self.received, self.patient = {signal.SIGINT: False, signal.SIGTERM: False}, False

    def listen(self) -> None:
        for number in self.received:
            signal.signal(number, self.receive)

    def receive(self, number: int, frame) -> None:
        self.received[number] = True
        if not self.patient:
            raise Stopped(f"stopped by {signal.Signals(number).name} before the first step", 128 + number)

def sum_beside(values: Tensor, world: World, timeout: int):
    """Sum a few values over the processes beside the device's other work; returns the function that waits for them.

    That function neither waits for the backward nor lets it wait, so the processor stays ahead of the GPU.
    """
    work = dist.all_reduce(values, async_op=True) if world.size > 1 else None
    if not world.on_gpu:
        return lambda: values.tolist() if work is None or work.wait() else None
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        if work:
            work.wait()
        on_host, arrival = values.to("cpu", non_blocking=True), stream.record_event()

    def wait() -> list[float]:
        deadline = time.monotonic() + timeout
        while not arrival.query():
            if time.monotonic() > deadline:
                raise TimeoutError(f"a collective took longer than {timeout} s")
            time.sleep(1e-4)
        return on_host.tolist()

    return wait

def is_collective(error: Exception) -> bool:
    """Did another process cause this error?"""
    return isinstance(error, dist.DistError | TimeoutError) or bool(re.search("gloo|pair closure", str(error)))

def roll_call(world: World, store: dist.Store, error: Exception) -> None:
    """After a failed collective: every process that waited in vain says so in the store, and one names the others.

    Only for a timeout. A process that has ended breaks the connections at once, and torchrun names the first to end.
    """
    store.set(f"waited/{world.rank}", "")
    time.sleep(1)
    if re.search("timed? ?out", str(error), re.IGNORECASE):
        deadline = time.monotonic() + 5
        while absent(world, store, "waited") and time.monotonic() < deadline:
            time.sleep(0.1)
        if store.add("speakers", 1) == 1:
            hung = absent(world, store, "waited") or "any other"
            print(f"train_gpt: no answer from rank {hung} within collective_timeout: hung or cut off", file=sys.stderr)

# ----------------------------------------------------------------------------------------------------
# Training: the model, its optimizers, and what one step does to them
# ----------------------------------------------------------------------------------------------------

class Trainer:
    """The model, its optimizers, and what one step does to them."""

    def __init__(self, settings: Hyperparameters, world: World):
        s = self.settings = settings
        self.world, self.signals = world, StopSignals()
        functorch_config.ban_recompute_materialized_backward = not s.recompute
        self.model = build_model(s, flex=s.compile and world.on_gpu).to(world.device)
        mode = "max-autotune-no-cudagraphs" if s.max_autotune else None
        self.forward = self.compiled = torch.compile(self.model, dynamic=False, mode=mode) if s.compile else self.model
        if world.size > 1:
            self.forward = DistributedDataParallel(self.compiled, device_ids=[world.device] if world.on_gpu else None,
                                                   gradient_as_bucket_view=True, forward_sync_buffers=False)
        embeddings = [self.model.embedding.weight, *self.model.value_embeddings.parameters()]
        matrices = [p for p in self.model.blocks.parameters() if p.ndim == 2]
        scalars = [p for p in self.model.parameters() if p.ndim < 2]
        betas = (s.adam_beta1, s.adam_beta2)
        self.adams = [
            torch.optim.Adam(embeddings, lr=s.embedding_lr, betas=betas, fused=True),
            torch.optim.Adam([self.model.head.weight], lr=s.head_lr, betas=betas, fused=True),
            # While the projections are zero the mixes have no gradient but rounding noise: eps keeps it from counting.
            torch.optim.Adam(scalars, lr=s.scalar_lr, betas=betas, eps=1e-5, fused=True),
        ]
        self.muon = Muon(matrices, s.muon_lr, s.momentum_start, s.ns_steps, world, getattr(torch, s.dtype),
                         torch.compile(newton_schulz, dynamic=False) if s.compile else newton_schulz)
        self.full_rates = [group["lr"] for group in self.groups()]
        self.window_blocks, self.window_now = torch.zeros((), dtype=torch.int32, device=world.device), 0

    def groups(self) -> list[dict]:
        """The optimizers' parameter groups; asked for anew each time, as loading a state replaces Adam's."""
        return [group for optimizer in (*self.adams, self.muon) for group in optimizer.param_groups]

    def set_schedules(self, step: int) -> None:
        s, progress = self.settings, step / self.settings.num_iterations
        window = window_in_blocks(progress, s.window_start, s.window_end)
        if window != self.window_now:  # the device is told only what is new
            self.window_now = window
            self.window_blocks.fill_(window)
        for group, full_rate in zip(self.groups(), self.full_rates, strict=True):
            group["lr"] = full_rate * learning_rate(progress, s.cooldown_frac)
        for group in self.muon.param_groups:
            group["momentum"] = muon_momentum(step, s.momentum_warmup, s.momentum_start, s.momentum_end)

    def backward(self, batch: list[tuple[Tensor, Tensor]], step: int) -> tuple[float, int]:
        """The gradient of the whole batch; returns its loss and, if any process was told to stop, an exit code."""
        self.set_schedules(step)
        report = torch.tensor([0.0, *self.signals.received.values()]).to(self.world.device, non_blocking=True)
        for inputs, targets in batch[:-1]:
            with self.forward.no_sync() if self.world.size > 1 else contextlib.nullcontext():
                self.share_of_loss(inputs, targets, report).backward()
        loss = self.share_of_loss(*batch[-1], report)
        read_report = sum_beside(report, self.world, self.settings.collective_timeout)
        loss.backward()
        batch_loss, interrupted, terminated = read_report()
        return batch_loss / self.world.size, 130 if interrupted else 143 if terminated else 0

    def share_of_loss(self, inputs: Tensor, targets: Tensor, report: Tensor) -> Tensor:
        """One sequence's loss, weighted so that the average over the processes is the average over the batch."""
        loss = self.forward(inputs, targets, self.window_blocks, self.settings.piece_length)
        loss = loss * (self.world.size / self.settings.batch_sequences)
        report[0] += loss.detach()
        return loss

    def update(self) -> None:
        for optimizer in (*self.adams, self.muon):
            optimizer.step()
        self.model.zero_grad(set_to_none=True)

    @torch.no_grad()
    def validate(self, shard: Shard, step: int) -> float:
        """The mean loss of the first `val_tokens` tokens, whose sequences are dealt out as in training."""
        self.set_schedules(step)
        length = self.settings.sequence_length
        count = self.settings.val_tokens // length
        total = torch.zeros((), device=self.world.device)
        for i in range(self.world.rank, count, self.world.size):
            inputs, targets = (x.to(self.world.device) for x in shard.sequence(i * length, length))
            total += self.compiled(inputs, targets, self.window_blocks)
        if self.world.size > 1:
            dist.all_reduce(total)
        return total.item() / count

    def warm_up(self) -> None:
        """Compile and run everything on made-up data, then put it back as it was, to the last bit."""
        s = self.settings
        weights = {name: value.to("cpu", copy=True) for name, value in self.model.state_dict().items()}
        tokens = torch.randint(s.vocab_size, (s.sequence_length,), generator=torch.Generator().manual_seed(0))
        made_up = tokens.to(self.world.device, torch.int32), tokens.to(self.world.device)
        mine = len(range(self.world.rank, s.batch_sequences, self.world.size))
        # Never without one among several processes: DDP settles the order in which it sums at its first backward.
        steps = max(s.warmup_steps, int(self.world.size > 1))
        for i in range(steps):
            self.backward([made_up] * mine, step=i * s.num_iterations // steps)
            self.update()
            with torch.no_grad():
                self.compiled(*made_up, self.window_blocks)
        self.model.load_state_dict(weights)
        for optimizer in (*self.adams, self.muon):
            optimizer.state.clear()

    def state(self) -> dict:
        """All that the next step depends on, whatever the number of processes; every process must take part."""
        return dict(model=self.model.state_dict(), adams=[adam.state_dict()["state"] for adam in self.adams],
                    muon=self.muon.gathered_momentum(), random=torch.get_rng_state())

    def load_state(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        for adam, adam_state in zip(self.adams, state["adams"], strict=True):
            adam.load_state_dict(dict(adam.state_dict(), state=adam_state))  # rates and betas: the settings'
        self.muon.load_momentum(state["muon"])
        torch.set_rng_state(state["random"])

# ----------------------------------------------------------------------------------------------------
# Checkpoints: saved whole or not at all, resumed exactly or not at all
# ----------------------------------------------------------------------------------------------------

# What a resumed run may change; every other setting must be as it was.
FREE_SETTINGS = {"train_files", "val_files", "val_loss_every", "val_tokens", "target_loss", "compile", "warmup_steps",
                 "max_autotune", "recompute", "collective_timeout", "log_dir", "checkpoint_dir", "save_every",
                 "resume", "resume_anyway"}

def by_age(path: Path) -> tuple[int, str]:
    return path.stat().st_mtime_ns, path.name

class Checkpoints:
    """Saves a run's checkpoints, keeps the last two, and knows which is the last good one."""

    def __init__(self, folder: Path, log: RunLog, last_good: str):
        self.folder, self.log, self.last_good, self.unproven = folder, log, last_good, None

    def save(self, checkpoint: dict) -> None:
        """Write under a temporary name, sync, rename: at any moment a whole checkpoint is there."""
        path, unfinished = self.folder / f"step_{checkpoint['step']:06d}.pt", self.folder / "unfinished.tmp"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(unfinished, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            unfinished.rename(path)
            folder = os.open(self.folder, os.O_RDONLY)
            os.fsync(folder)  # a name is safe only when its folder is
            os.close(folder)
            for old in sorted(self.folder.glob("step_*.pt"), key=by_age)[:-2]:
                old.unlink()
        except (OSError, RuntimeError) as error:  # torch's writer turns a full disk into a RuntimeError
            with contextlib.suppress(OSError):
                unfinished.unlink()
            self.log.note(f"no checkpoint at step {checkpoint['step']}, the run goes on: {in_one_line(error)}")
            return
        self.unproven = path
        self.log.note(f"saved {path}")

    def judge(self, loss: float) -> bool:
        """Is the loss finite? Then the weights that were last saved are good; if not, they are set aside."""
        if math.isfinite(loss):
            self.last_good, self.unproven = self.unproven or self.last_good, None
        elif self.unproven:  # no more to be found by --resume latest
            self.unproven.rename(self.unproven.with_suffix(".bad"))
        return math.isfinite(loss)

def newest_checkpoint(folder: str) -> str:
    return str(max(Path(folder).glob("*/step_*.pt"), key=by_age, default=""))

def load_checkpoint(settings: Hyperparameters, world: World, store: dist.Store | None, source: str,
                    data: list[dict]) -> dict:
    """The checkpoint that --resume names, empty for none; refused if it belongs to another run than this."""
    path = settings.resume
    if path == "latest":
        path = from_first_rank("latest", newest_checkpoint(settings.checkpoint_dir), world, store)
    if not path:
        return {}
    try:
        checkpoint = dict(torch.load(path, map_location="cpu", weights_only=True), path=path)
        then, now = checkpoint["settings"], asdict(settings)
        differences = [f"{name} was {then.get(name)!r} and is {now.get(name)!r}" for name in then | now
                       if name not in FREE_SETTINGS and then.get(name) != now.get(name)]
        if checkpoint["data"] != data:
            changed = [x["file"] for x in checkpoint["data"] + data if (x in data) != (x in checkpoint["data"])]
            differences.append(f"the data differs: {', '.join(dict.fromkeys(changed))}")
        if checkpoint["source"] != source:
            pairs = zip(checkpoint["source"].splitlines(), source.splitlines(), strict=False)
            first = next((number for number, (old, new) in enumerate(pairs, 1) if old != new), "the last")
            differences.append(f"the script differs from line {first} on")
    except Exception as error:
        raise UserError(f"--resume {path}: not a checkpoint that can be read: {in_one_line(error)}") from None
    if differences and not settings.resume_anyway:
        raise UserError(f"--resume {path}: {'; '.join(differences)} (--resume_anyway goes on)")
    return checkpoint

# ----------------------------------------------------------------------------------------------------
# The run: from the settings to the last step
# ----------------------------------------------------------------------------------------------------

def train(settings: Hyperparameters, world: World, store: dist.Store | None, source: str, dtype_reason: str) -> None:
    s = settings
    train_shards, val_shard = find_shards(s.train_files), Shard(find_shards(s.val_files)[0], s.vocab_size)
    if len(val_shard) <= s.val_tokens:
        raise UserError(f"--val_tokens {s.val_tokens}: {val_shard.path} holds {len(val_shard)}, and one more is needed")
    loader = Loader(train_shards, s, world)
    data = fingerprint([*train_shards, val_shard.path])
    resumed = load_checkpoint(s, world, store, source, data)
    run_id = from_first_rank("run_id", resumed.get("run_id") or str(uuid.uuid4()), world, store)
    log = RunLog(world, Path(s.log_dir) / f"{run_id}.txt", log_header(source, s, world, data))
    trainer = Trainer(s, world)
    weights = sum(p.numel() for p in trainer.model.parameters())
    machine = f"{world.size} x {describe_hardware(world).splitlines()[0]}"
    log.say(f"{machine}; {'compiled' if s.compile else 'eager'}\n"
            f"{s.dtype}: {dtype_reason}\n"
            f"{weights / 1e6:.1f}M weights in {s.num_layers} layers of width {s.model_dim}; "
            f"{s.num_iterations} steps of {s.batch_sequences} x {s.sequence_length} tokens\n"
            f"log: {log.path}")
    about = dict(run_id=run_id, settings=asdict(s), source=source, data=data)
    try:
        trainer.signals.listen()
        trainer.warm_up()
        if resumed:
            try:
                trainer.load_state(resumed.pop("state"))
            except (KeyError, ValueError, RuntimeError) as error:
                raise UserError(f"--resume {resumed['path']}: {in_one_line(error)}") from None
            loader.seek(resumed["loader"])
            log.note(f"resumed at step {resumed['step']} from {resumed['path']} on {machine}")
        loop(trainer, loader, val_shard, log, resumed, about)
    except Stopped as stop:
        log.note(str(stop))
        raise
    finally:
        trainer.signals.patient = True  # what comes now is short, and not to be interrupted
        log.close()

def loop(trainer: Trainer, loader: Loader, val_shard: Shard, log: RunLog, resumed: dict, about: dict) -> None:
    s, world = trainer.settings, trainer.world
    checkpoints = Checkpoints(Path(s.checkpoint_dir) / about["run_id"], log, resumed.get("path", "none"))
    first_step = resumed.get("step", 0)
    clock = Clock(world.on_gpu, resumed.get("train_time", 0.0))

    def stop_unless_finite(loss: float, step: int) -> None:
        if not checkpoints.judge(loss):
            rates = ", ".join(f"{rate:g}" for rate in dict.fromkeys(group["lr"] for group in trainer.groups()))
            raise Stopped(f"stopped at step {step}: the loss is {loss}; learning rates {rates}; "
                          f"last good checkpoint: {checkpoints.last_good}", exit_code=1)

    log.start_bar(first_step, s)
    trainer.signals.patient = True
    clock.start()
    for step in range(first_step, s.num_iterations + 1):
        if step == s.num_iterations or (s.val_loss_every and step % s.val_loss_every == 0):
            clock.stop()
            val_loss = trainer.validate(val_shard, step)
            log.note(f"step:{step}/{s.num_iterations} val_loss:{val_loss:.4f} {clock.line(step)}")
            stop_unless_finite(val_loss, step)
            clock.start()
        if step == s.num_iterations:
            break

        loss, stop_code = trainer.backward(loader.next_batch(log.note), step)
        done = step + 1
        stop_unless_finite(loss, done)
        trainer.update()
        log.step(done, loss, clock, s)

        if s.save_every and (stop_code or done % s.save_every == 0 or done == s.num_iterations):
            clock.stop()
            state = trainer.state()
            checkpoint = dict(about, step=done, train_time=clock.seconds, loader=loader.position, state=state)
            if world.rank == 0:
                checkpoints.save(checkpoint)
            clock.start()
        if stop_code:
            raise Stopped(f"stopped after step {done} by {signal.Signals(stop_code - 128).name}; "
                          f"last checkpoint: {checkpoints.unproven or checkpoints.last_good}", stop_code)
    log.close()
    log.write(f"peak memory: {peak_memory(world)}")
    reached = "reached" if val_loss <= s.target_loss else "not reached"
    log.say(f"validation loss {val_loss:.4f}, target {s.target_loss} {reached}; "
            f"{clock.now():.1f} s of training; {log.path}")

def main(arguments: list[str] | None = None) -> int:
    """Runs the training and returns the exit code: 0, 2 for what the user can put right, 130 or 143 for signals."""
    world, store = find_place(), None
    try:
        source = Path(__file__).read_text(encoding="utf-8")
        settings = parse_settings(sys.argv[1:] if arguments is None else arguments, on_cpu=not world.on_gpu)
        check_settings(settings, world.size)
        if world.on_gpu:
            start_gpu(world)
        store = connect(world, settings.collective_timeout)
        settings, dtype_reason = choose_dtype(settings, world, store)
        try:
            train(settings, world, store, source, dtype_reason)
        except torch.OutOfMemoryError:
            raise UserError(memory_advice(settings, world)) from None
        if store:
            dist.destroy_process_group()
        return 0
    except UserError as error:
        # All processes find the same fault: one speaks, the others wait for it, as torchrun ends all with the first.
        if store.add("complaints", 1) == 1 if store else world.local_rank == 0:
            print(f"train_gpt: {error}", file=sys.stderr)
        else:
            time.sleep(5)
        return 2
    except Stopped as stop:
        return stop.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if store and is_collective(error):
            with contextlib.suppress(dist.DistError):  # the store may have gone with torchrun
                roll_call(world, store, error)
        else:
            print(f"train_gpt: rank {world.rank} failed:\n{traceback.format_exc()}", file=sys.stderr)
        return 1

if __name__ == "__main__":
    code = main()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)  # at once, whatever a process that hangs has left unfinished
