"""Train a GPT as fast as the hardware allows, in one file that you can read from top to bottom.

    ./run.sh                                                 set up, get the data, train on what is here
    torchrun --standalone --nproc_per_node=8 train_gpt.py    the 8xH100 track: FineWeb to a validation loss of 3.28
    python train_gpt.py --num_iterations 100 --seed 7        one GPU, or the CPU track; every setting is a flag

The recipe is the public record of 2025-08-23. Published: 2.81 minutes on 8 H100s, loss 3.2772.
A run writes logs/<id>.txt: this source, the machine, every setting, the data's fingerprint, one line per step.
"""

import argparse
import atexit
import difflib
import fcntl
import glob
import hashlib
import json
import math
import os
import signal
import sys
import time
import uuid
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

SOURCE, LAUNCHER = Path(__file__).read_text(encoding="utf-8"), os.getppid()  # at once, before either changes
try:
    import numpy as np
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import Tensor, nn
    from torch.nn.attention.flex_attention import BlockMask, flex_attention
    from tqdm import tqdm
except ImportError as error:
    sys.exit(f"train_gpt: {error}: use ./run.sh, or activate the environment that it made: . .venv/bin/activate")

# ---- Settings: the 8xH100 record's values, and the CPU track's where they differ -------------------------------------
BLOCK = 128  # tokens; attention windows are counted in blocks
ANY = "True"  # the rule of a setting that may have any value


class UserError(Exception):
    """Ends a run with one line: UserError(message, exit code). Without a code it is 2: something the user can fix."""


def setting(default, meaning: str, rule: tuple | str, cpu=None, free: bool = False):
    """All about one setting. `rule` is its range, or what must hold. A resumed run may change it only if it is free."""
    return field(default=default, metadata=dict(meaning=meaning, rule=rule, cpu=cpu, free=free))


@dataclass(frozen=True)
class Settings:
    train_files: str = setting("data/fineweb10B/*train*.bin", "training data", ANY, "data/embedded/*train*.bin", True)
    val_files: str = setting("data/fineweb10B/*val*.bin", "validation: 1st file", ANY, "data/embedded/*val*.bin", True)
    vocab_size: int = setting(50257, "number of different tokens", (1, 65536), cpu=257)
    document_token: int = setting(50256, "it starts a document", "0 <= document_token < vocab_size", cpu=256)
    num_layers: int = setting(12, "transformer blocks, an even number", "num_layers in range(2, 1000, 2)", cpu=4)
    num_heads: int = setting(6, "heads per attention layer", (1, 1000), cpu=2)
    model_dim: int = setting(768, "width of the model", "model_dim % (4 * num_heads) == 0 < model_dim", cpu=96)
    logit_softcap: float = setting(15.0, "a sigmoid keeps the logits between 0 and twice this", (1e-3, 1e6))
    attention_scale: float = setting(0.12, "factor of the products of queries and keys", (1e-6, 1e3), cpu=0.144)
    gate_channels: int = setting(12, "channels that gate attention's output", "1 <= gate_channels <= model_dim")
    sequence_length: int = setting(49152, "tokens per sequence", "sequence_length in range(128, 2**24, 128)", cpu=1024)
    batch_sequences: int = setting(8, "sequences per step", "processes <= batch_sequences < 2**24", cpu=2)
    window_start: int = setting(128, "window in tokens at the first step", "128 <= window_start <= window_end", cpu=256)
    window_end: int = setting(1856, "attention window at the last step, in tokens", (BLOCK, 2**24), cpu=256)
    num_iterations: int = setting(1695, "training steps", (1, 999_999), cpu=900)
    cooldown_frac: float = setting(0.45, "last part of the steps: learning rates fall", (0, 1), cpu=0.5)
    final_lr: float = setting(0.1, "what is left of the learning rates at the end, as a factor", (0, 1))
    embedding_lr: float = setting(0.6, "Adam's learning rate for the embedding tables", (0, 1e6), cpu=0.2)
    head_lr: float = setting(0.008, "Adam's learning rate for the output head", (0, 1e6))
    gate_lr: float = setting(0.008, "Adam's learning rate for attention's gates", (0, 1e6))
    scalar_lr: float = setting(0.04, "Adam's learning rate for the mixing weights", (0, 1e6))
    adam_beta1: float = setting(0.8, "Adam's decay of the mean gradient; gates: 0.9", (0, 0.99999), cpu=0.9)
    adam_beta2: float = setting(0.95, "Adam's decay of the mean squared gradient; gates: 0.99", (0, 0.99999), cpu=0.99)
    adam_eps: float = setting(1e-10, "Adam's eps, for gradients that are summed over a batch", (1e-30, 1))
    scalar_eps: float = setting(1e-10, "the same for the mixing weights", (1e-30, 1), cpu=0.02)
    muon_lr: float = setting(0.05, "Muon's learning rate for the matrices in the blocks", (0, 1e6), cpu=0.03)
    momentum_start: float = setting(0.85, "Muon's momentum at the first step", (0, 0.99999))
    momentum_end: float = setting(0.95, "Muon's momentum after its warm-up", (0, 0.99999), cpu=0.9)
    momentum_warmup: int = setting(300, "steps over which Muon's momentum grows", (0, 10**6))
    ns_steps: int = setting(5, "Newton-Schulz iterations per orthogonalization", (1, 100))
    seed: int = setting(1, "seed of the initial weights", (0, 2**62))
    val_sequence_length: int = setting(262144, "in tokens", "val_sequence_length in range(128, 2**24, 128)", 8192, True)
    val_tokens: int = setting(10485760, "in total", "val_tokens % val_sequence_length == 0 < val_tokens", 2**18, True)
    val_loss_every: int = setting(125, "steps between validations; 0: only at the end", (0, 10**6), cpu=150, free=True)
    target_loss: float = setting(3.28, "validation loss to reach; 0: none", (0, 1e6), cpu=1.04, free=True)
    dtype: str = setting("auto", "dtype of matrix products", "dtype in ('auto', 'bfloat16', 'float32')", free=True)
    fp8_head: bool = setting(True, "train the head in FP8", "model_dim % 16 == 0 or not fp8_head", cpu=False, free=True)
    bfloat16_embeddings: bool = setting(True, "hold the embedding tables in bfloat16", ANY, cpu=False)
    compile: bool = setting(True, "use torch.compile, and with it FlexAttention on a GPU", ANY, cpu=False, free=True)
    coordinate_descent: bool = setting(False, "tune Inductor's kernels; takes many minutes more", ANY, free=True)
    recompute: bool = setting(False, "save memory: recompute cheap operations in the backward pass", ANY, free=True)
    kernel_warmup_steps: int = setting(10, "steps on made-up data before the clock starts", (1, 1000), cpu=1, free=True)
    collective_timeout: int = setting(600, "seconds to wait for another process", (1, 10**6), free=True)
    log_dir: str = setting("logs", "folder for logs", ANY, free=True)
    checkpoint_dir: str = setting("checkpoints", "folder for checkpoints", ANY, free=True)
    save_every: int = setting(0, "steps between saves, and at the end; 0: only when stopped", (0, 10**6), 10**6, True)
    resume: str = setting("", "checkpoint to continue; latest: of the run that saved last, if any", ANY, free=True)


def parse_flags(arguments: list[str]) -> dict:
    """The settings that the command line gives, and only those."""
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False, exit_on_error=False)
    for f in fields(Settings):
        cpu = "" if f.metadata["cpu"] is None else f"; on a CPU {f.metadata['cpu']}"
        kind = dict(type=json.loads, choices=(True, False)) if f.type is bool else dict(type=f.type)
        parser.add_argument(f"--{f.name}", metavar="", help=f"{f.metadata['meaning']} [{f.default}{cpu}]", **kind)
    try:
        given, unknown = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError(f"{error} (--help lists every setting; a switch is true or false)") from None
    if unknown:
        near = difflib.get_close_matches(unknown[0].partition("=")[0], [f"--{f.name}" for f in fields(Settings)], 1)
        raise UserError(f"{unknown[0]}: not a setting; {f'did you mean {near[0]}?' if near else '--help lists them'}")
    return {name: value for name, value in vars(given).items() if value is not None}


def make_settings(flags: dict, processes: int, on_gpu: bool, saved: dict | None = None) -> Settings:
    """A run's settings: the flags, over the track's values or over those of the checkpoint that the run continues."""
    about, base = {f.name: f.metadata for f in fields(Settings)}, saved or {}
    if saved is None:
        base = {} if on_gpu else {name: about[name]["cpu"] for name in about if about[name]["cpu"] is not None}
        base |= {"target_loss": 0.0} if "val_files" in flags else {}  # the track's target is for the track's data
    elif about.keys() != saved.keys():
        raise UserError(f"another script's checkpoint: it differs in {', '.join(sorted(about.keys() ^ saved.keys()))}")
    elif fixed := [name for name in flags if not about[name]["free"] and flags[name] != saved[name]]:
        raise UserError(f"--{fixed[0]} {flags[fixed[0]]}: a resumed run cannot change it, it was {saved[fixed[0]]}")
    s = Settings(**base | flags | {"resume": ""})  # of no use to a run that continues this one
    if s.dtype == "auto":  # bfloat16 where the hardware multiplies it faster than float32, as GPUs from sm_80 on do
        fast = on_gpu or any(torch.cpu.get_capabilities().get(name) for name in ("avx512_bf16", "amx_bf16"))
        s = replace(s, dtype="bfloat16" if fast else "float32")
    if on_gpu and torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):  # no FP8 in hardware
        s = replace(s, fp8_head=False)
    for name, value in asdict(s).items():
        rule = about[name]["rule"]
        rule = rule if isinstance(rule, str) else f"{rule[0]} <= {name} <= {rule[1]}"
        if not eval(rule, {**asdict(s), "processes": processes}):
            raise UserError(f"--{name} {value}: this must hold: {rule}")
    return s


# ---- The process's place: rank, device, and the connection to the other processes ------------------------------------
def one_line(text: object) -> str:
    return " ".join(str(text).splitlines())[:400]


class World(NamedTuple):
    rank: int
    size: int
    device: torch.device

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


def join_world(timeout: int) -> World:
    """This process's place, from torchrun or as a world of one; its GPU is ready, the other processes are connected."""
    try:
        rank, size, local_rank = (int(os.environ.get(name, 0)) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        world = World(rank, max(size, 1), torch.device("cpu"))
        if not 0 <= rank < world.size:
            raise ValueError(f"RANK={rank} with WORLD_SIZE={size}")
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""  # by the user; if not, an unusable GPU is an error
        if torch.cuda.is_available() or (not hidden and os.popen("nvidia-smi -L 2>/dev/null").read()):
            old_name = os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
            os.environ.setdefault("PYTORCH_ALLOC_CONF", old_name or "expandable_segments:True")  # fewer fragments
            world = world._replace(device=torch.device("cuda", local_rank))
            torch.cuda.set_device(world.device)
            torch.empty(1, device=world.device, requires_grad=True).backward()  # CUDA context for autograd's thread too
            if torch.cuda.get_device_capability() < (8, 0):
                raise ValueError(f"{torch.cuda.get_device_name()} has no bfloat16; sm_80 or newer is needed")
        if world.size > 1:
            limit, attempt = timedelta(seconds=timeout), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = dist.PrefixStore(attempt, next(dist.rendezvous("env://", timeout=limit))[0])  # it outlives restarts
            backend, device = ("nccl", world.device) if world.on_gpu else ("gloo", None)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit, device_id=device)
            dist.barrier()
        return world
    except Exception as error:
        raise UserError(f"cannot start: {one_line(error)} (CUDA_VISIBLE_DEVICES='' trains on the CPU)") from None


# ---- Data: shards of tokens, and the loader that deals out their sequences -------------------------------------------
class Shard:
    """A file: a header of 256 int32 (20240520, 1, number of tokens, zeros), then 16-bit tokens."""

    def __init__(self, path: str, vocab_size: int):
        self.path, self.vocab_size = path, vocab_size
        header = np.fromfile(path, "<i4", 256) if os.path.isfile(path) else []
        if len(header) < 256 or header[0] != 20240520 or header[1] != 1:
            raise UserError(f"{path}: no token shard; data/cached_fineweb10B.py and data/embedded_corpus.py make them")
        self.file, self.length, size = open(path, "rb"), int(header[2]), os.path.getsize(path)
        if self.length < 1 or size != 1024 + 2 * self.length:
            raise UserError(f"{path}: {size} bytes do not fit its {self.length} tokens; fetch or make it again")

    def bytes(self, first: int, end: int) -> bytes:  # read, not mapped: a mapped file that shrinks kills the process
        return os.pread(self.file.fileno(), 2 * (end - first), 1024 + 2 * first)

    def read(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Inputs, the tokens of this span but for the last one, and targets, the tokens after each."""
        tokens = self.bytes(first, end)
        if os.path.getsize(self.path) != 1024 + 2 * self.length:
            raise UserError(f"{self.path}: its size changed while it was in use")
        tokens = torch.from_numpy(np.frombuffer(tokens, "<u2").astype(np.int64))
        if tokens.max() >= self.vocab_size:
            raise UserError(f"{self.path}: token {tokens.max()} is outside the vocabulary of {self.vocab_size}")
        return tokens[:-1].to(torch.int32), tokens[1:]

    def find(self, token: int, first: int) -> int:
        """Where `token` comes next, from `first` on; the shard's length if it does not."""
        for start in range(first, self.length, 2**14):
            if len(found := (self.read(start, start + 2**14 + 1)[0] == token).nonzero()):
                return start + int(found[0])
        return self.length

    def fingerprint(self) -> dict:
        ends = self.bytes(0, 2**19) + self.bytes(max(0, self.length - 2**19), self.length)  # a MiB of each
        return dict(file=os.path.basename(self.path), tokens=self.length, sha256=hashlib.sha256(ends).hexdigest())


class DistributedDataLoader:
    """Deals out sequences that start at a document (public record of 2025-07-13). A step takes the next
    `batch_sequences`, sequence i goes to rank i % size: any number of processes trains on the same tokens.

        documents    |   0   |     1     |2|        3        |    4    |   5   |
        sequences    |------ 0 ------|   |------ 1 ------|   |------ 2 ------|
    """

    def __init__(self, s: Settings, world: World):
        self.s, self.world = s, world
        self.shards = [Shard(path, s.vocab_size) for path in sorted(glob.glob(s.train_files)) or [s.train_files]]
        self.position = [0, 0]  # of the next batch: [shard number, first token]; the number grows beyond the last shard
        self.find_batch()  # or say now that there is none

    def find_batch(self) -> tuple[int, list[int]]:
        """The shard number and the starts of the next batch, which lies in one shard."""
        (number, first), length, count = self.position, self.s.sequence_length, self.s.batch_sequences
        for _ in range(len(self.shards) + 1):
            shard, starts = self.shards[number % len(self.shards)], []
            end = shard.length - length  # the last token is a target only
            while len(starts) < count and (start := shard.find(self.s.document_token, first)) < end:
                starts, first = [*starts, start], start + length + 1
            if len(starts) == count:
                return number, starts
            number, first = number + 1, 0
        raise UserError(f"{self.s.train_files}: no shard has {count} x {length} tokens that start at a document")

    def next_batch(self) -> list[tuple[Tensor, Tensor]]:
        """This process's sequences of the next step: (inputs, targets), on its device."""
        (number, starts), length = self.find_batch(), self.s.sequence_length
        shard, mine = self.shards[number % len(self.shards)], starts[self.world.rank :: self.world.size]
        batch = [shard.read(start, start + length + 1) for start in mine]
        self.position = [number, starts[-1] + length + 1]
        if self.world.on_gpu:
            batch = [[x.pin_memory().to(self.world.device, non_blocking=True) for x in pair] for pair in batch]
        return batch


# ---- Attention: who sees whom, and two ways to compute it ------------------------------------------------------------
# Shapes: T tokens, V vocabulary, C channels, F in MLPs, H heads, D per head, N blocks of B, W per window
# A token sees itself and the tokens before it that are in its document and in the last `window_blocks` blocks. For a
# sequence of 7 blocks, two documents that meet inside block 3, and a window of 3 blocks (rows: queries, columns: keys):
#         0 1 2 3 4 5 6
#     0   /
#     1   # /                # full: every pair of tokens is visible, no mask is evaluated
#     2   # # /              / partial: the mask decides token by token
#     3   . / / /            . or blank: not computed
#     4   . . . / /
#     5   . . . / # /
#     6   . . . . # # /


class Packing(NamedTuple):
    """How documents are packed into a sequence. A mask is FlexAttention's; or, for gathered blocks, 0 or -inf."""

    documents_T: Tensor  # number of each token's document, growing; for ideas that need more than the masks
    short: BlockMask | Tensor  # the mask with half of the window, for most layers
    long: BlockMask | Tensor  # with the whole one, for a few


def document_block_mask(documents_T: Tensor, window_blocks: Tensor) -> BlockMask:
    """FlexAttention's mask, built from the first and last document of each block: a new window is a new value, and
    nothing is compiled again (YouJiacheng and others, public records of 2024-12-08 and 2024-12-10)."""
    first, last = documents_T.view(-1, BLOCK)[:, 0].contiguous(), documents_T.view(-1, BLOCK)[:, -1].contiguous()
    block = torch.arange(len(first), dtype=torch.int32, device=documents_T.device)

    def document_causal(batch, head, query, key):
        return (query >= key) & (documents_T[query] == documents_T[key])

    def list_blocks(visible_NN: Tensor) -> tuple[Tensor, Tensor]:  # by counting: a kernel that sorts compiles too long
        place_NN = visible_NN.cumsum(dim=-1) * visible_NN  # from 1 on; blocks that are not visible share place 0
        order = block.new_zeros(len(block), len(block) + 1).scatter_(1, place_NN, block.expand_as(place_NN))[:, 1:]
        return visible_NN.sum(dim=-1, dtype=torch.int32)[None, None], order[None, None].contiguous()

    back = block[:, None] - block
    near, inside = (back >= 0) & (back < window_blocks), (back > 0) & (back < window_blocks)
    some_visible = near & (first[:, None] <= last) & (first <= last[:, None])
    all_visible = inside & (first[:, None] == last) & (first == last[:, None])
    partial, full = list_blocks(some_visible & ~all_visible), list_blocks(all_visible)
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=BLOCK, mask_mod=document_causal)


def gather_window(x_NHBD: Tensor, window_blocks: int) -> Tensor:
    """For each block, the tokens of its window in a row, those of the block itself last; zeros before the start."""
    padded = F.pad(x_NHBD, (0, 0) * 3 + (window_blocks - 1, 0))
    return torch.cat([padded[i : i + len(x_NHBD)] for i in range(window_blocks)], dim=2)


@torch.compiler.disable  # shapes that depend on the window's value cannot be compiled
def gathered_bias(documents_T: Tensor, window_blocks: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    """The same mask for attention over gathered blocks: 0 where query B of a block sees key W of its window."""
    documents = documents_T.view(-1, 1, BLOCK, 1) + 1  # so that 0, which gather_window pads with, is no document
    seen_NHBW = documents == gather_window(documents, min(int(window_blocks), len(documents))).mT
    key = torch.arange(seen_NHBW.size(-1), device=documents_T.device)
    seen_NHBW &= key[-BLOCK:, None] >= key  # the block's queries are the last of its window
    bias = torch.zeros_like(seen_NHBW, dtype=dtype).masked_fill_(~seen_NHBW, -math.inf)
    return bias.expand(-1, num_heads, -1, -1).flatten(0, 1)


def attend(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, mask: BlockMask | Tensor, scale: float) -> Tensor:
    """Attention under the mask. With torch.compile on a GPU: FlexAttention. Otherwise each block of queries gets a
    copy of its window's keys and values, and blocks form the batch: this cost, too, grows with length x window."""
    if isinstance(mask, BlockMask):
        q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_THD, v_THD))
        return flex_attention(q, k, v, block_mask=mask, scale=scale)[0].transpose(0, 1)
    q, k, v = (x.unflatten(0, (-1, BLOCK)).transpose(1, 2) for x in (q_THD, k_THD, v_THD))  # each NHBD
    k, v = (gather_window(x, mask.size(-1) // BLOCK).flatten(0, 1) for x in (k, v))
    scores = torch.baddbmm(mask, q.flatten(0, 1), k.mT, alpha=scale)
    y_NHBD = (scores.softmax(dim=-1) @ v).unflatten(0, (-1, q_THD.size(1)))
    return y_NHBD.transpose(1, 2).flatten(0, 1)


# ---- Model: a GPT with value embeddings and U-net skips --------------------------------------------------------------
def norm(x: Tensor) -> Tensor:  # scales each row to a root mean square of 1
    if x.is_cpu and not torch.compiler.is_compiling():  # torch's fused weight norm: fewer passes over memory
        y, sizes = torch._weight_norm_interface(x.flatten(0, -2), x.new_full((x[..., 0].numel(), 1), x.size(-1) ** 0.5))
        if sizes.all():  # of a row of zeros it would make NaN
            return y.view_as(x)
    return x * (math.sqrt(x.size(-1)) / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=1e-3))


def matrices(count: int, rows: int, columns: int) -> nn.Parameter:
    """Matrices in one parameter. The last starts at zero, the others with a standard deviation of 0.5 / sqrt(rows)."""
    weights = torch.empty(count, rows, columns).uniform_(-1, 1) * math.sqrt(0.75 / rows)
    weights[-1] = 0
    return nn.Parameter(weights)


class Rotary(nn.Module):
    """Rotary positions on half of the channel pairs (i, i + D/2); the others do not turn (YouJiacheng, 2024-12-17)."""

    def __init__(self, s: Settings):
        super().__init__()
        head_dim, dtype = s.model_dim // s.num_heads, getattr(torch, s.dtype)
        frequencies = 1024 ** -np.linspace(0, 1, head_dim // 4)
        position = torch.arange(max(s.sequence_length, s.val_sequence_length), dtype=torch.float32)
        angle_TD = torch.outer(position, torch.tensor([*frequencies, *0 * frequencies]).to(position))
        cos_TD, sin_TD = angle_TD.cos(), angle_TD.sin()
        cos_sin = torch.stack([cos_TD.repeat(1, 2), torch.cat([sin_TD, -sin_TD], 1)])[:, :, None]
        self.register_buffer("cos_sin", cos_sin.to(dtype), persistent=False)

    def forward(self, x_THD: Tensor) -> Tensor:
        cos_T1D, sin_T1D = self.cos_sin[:, : len(x_THD)]
        return torch.addcmul(x_THD * cos_T1D, x_THD.roll(x_THD.size(-1) // 2, dims=-1), sin_T1D)


class CausalSelfAttention(nn.Module):
    rates = 1, 1, 1, 1  # factors of Muon's learning rate, one for each matrix

    def __init__(self, s: Settings, rotary: Rotary, layer: int):
        super().__init__()
        self.s, self.rotary, self.long = s, rotary, layer in (0, s.num_layers // 3, s.num_layers - 1)
        self.weights = matrices(4, s.model_dim, s.model_dim)  # query, key, value, project
        self.value_mix = nn.Parameter(torch.tensor([0.5, 0.5]))
        self.gate = nn.Parameter(torch.zeros(s.num_heads, s.gate_channels))

    def forward(self, x_TC: Tensor, value_embedding_TC: Tensor | None, packing: Packing) -> Tensor:
        qkv_weights, (project,) = self.weights.type_as(x_TC).split([3, 1])
        qkv = F.linear(x_TC, qkv_weights.flatten(0, 1)).unflatten(-1, (3 * self.s.num_heads, -1))
        qk, v = qkv.split([2 * self.s.num_heads, self.s.num_heads], dim=1)
        q, k = self.rotary(norm(qk)).chunk(2, dim=1)
        own, embedded = self.value_mix
        v = own * v if value_embedding_TC is None else own * v + embedded * value_embedding_TC.view_as(v)
        y_THD = attend(q, k, v, packing.long if self.long else packing.short, self.s.attention_scale)
        gate_TH = torch.sigmoid(F.linear(x_TC[:, : self.s.gate_channels], self.gate.type_as(x_TC)))
        return F.linear((y_THD * gate_TH[..., None]).flatten(1), project)


class MLP(nn.Module):
    rates = 2, 1  # factors of Muon's learning rate: sqrt(outputs / inputs), at least 1

    def __init__(self, model_dim: int):
        super().__init__()
        self.weights = matrices(2, model_dim, 4 * model_dim)  # expand, project

    def forward(self, x_TC: Tensor) -> Tensor:
        expand_CF, project_CF = self.weights.type_as(x_TC)
        return F.relu(x_TC @ expand_CF).square() @ project_CF.mT  # ReLU squared: Primer, arXiv:2109.08668


class Block(nn.Module):
    def __init__(self, model_dim: int, attention: CausalSelfAttention | None):
        super().__init__()
        self.attention = attention
        self.mlp = MLP(model_dim)
        self.embedding_mix = nn.Parameter(torch.tensor([1.0, 0.0]))

    def forward(self, x_TC: Tensor, x0_TC: Tensor, value_embedding_TC: Tensor | None, packing: Packing) -> Tensor:
        own, embedded = self.embedding_mix
        x_TC = own * x_TC + embedded * x0_TC
        if self.attention is not None:
            x_TC = x_TC + self.attention(norm(x_TC), value_embedding_TC, packing)
        return x_TC + self.mlp(norm(x_TC))


def fp8_product(a_MK: Tensor, b_NK: Tensor, scale: float, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """scale * a @ b.mT, summed in float32, or `fast` with fewer digits. The hardware sums over the last dimensions."""
    scale, one = (torch.full((), x, dtype=torch.float32, device=a_MK.device) for x in (scale, 1))
    return torch._scaled_mm(a_MK, b_NK.mT, scale_a=scale, scale_b=one, out_dtype=dtype, use_fast_accum=fast)


class Fp8Linear(torch.autograd.Function):
    """x @ w.mT and its gradients by products in FP8, twice as fast as bfloat16's (public record of 2025-01-13).
    Scales fill e4m3's range, +-448: a channel of x, which is normed, is at most sqrt(C); weights are clamped at 0.875.
    A logit's gradient is at most 1, as the loss is a sum over tokens; it needs e5m2's range more than digits."""

    @staticmethod
    def forward(ctx, x_TC: Tensor, w_VC: Tensor) -> Tensor:
        ctx.scales = x_scale, w_scale, _ = x_TC.size(-1) ** 0.5 / 448, 2**-9, 1 / 448  # of x, w and the gradient
        x8_TC = (x_TC / x_scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        w8_VC = (w_VC / w_scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        ctx.save_for_backward(x8_TC, w8_VC)
        return fp8_product(x8_TC, w8_VC, x_scale * w_scale, x_TC.dtype, fast=True)

    @staticmethod
    def backward(ctx, gradient_TV: Tensor) -> tuple[Tensor, Tensor]:
        (x8_TC, w8_VC), (x_scale, w_scale, g_scale) = ctx.saved_tensors, ctx.scales
        g8_TV = (gradient_TV / g_scale).to(torch.float8_e5m2)
        dx_TC = fp8_product(g8_TV, w8_VC.mT.contiguous(), g_scale * w_scale, gradient_TV.dtype)
        dw_VC = fp8_product(g8_TV.mT.contiguous(), x8_TC.mT.contiguous(), g_scale * x_scale, torch.float32)
        return dx_TC, dw_VC


class GPT(nn.Module):
    """Maps packed documents to their mean loss. For 12 layers:

        layer             0    1    2    3    4    5    6    7    8    9    10   11
        attention window  long .    .    .    long .    .    -    .    .    .    long    (.: half as long; -: none)
        value embedding   0    1    2    -    -    -    -    -    -    0    1    2
        U-net skip        a    b    c    d    e    f  + f  + e  + d  + c  + b  + a

    The U-net's second half adds the first half's outputs, in reverse order, each times a learned weight. (Value
    embeddings: Grad62304977 and others. U-net: Brendan Hogan Rappazzo. Layer 7 without attention: YouJiacheng.)
    """

    def __init__(self, s: Settings, use_flex: bool):
        super().__init__()
        self.s, self.use_flex, self.dtype = s, use_flex, getattr(torch, s.dtype)
        rows = math.ceil(s.vocab_size / 128) * 128  # padded, for the matrix products
        self.embedding = nn.Embedding(rows, s.model_dim)
        self.value_embedding = nn.ModuleList(nn.Embedding(rows, s.model_dim) for _ in range(min(3, s.num_layers // 2)))
        self.rotary = Rotary(s)
        self.blocks = nn.ModuleList(
            Block(s.model_dim, CausalSelfAttention(s, self.rotary, layer) if layer != 7 else None)
            for layer in range(s.num_layers)
        )
        self.skip_weights = nn.Parameter(torch.ones(s.num_layers // 2))
        self.head = nn.Linear(s.model_dim, rows, bias=False)
        nn.init.zeros_(self.head.weight)
        for table in (self.embedding, self.value_embedding):
            table.to(torch.bfloat16 if s.bfloat16_embeddings else torch.float32)

    def forward(self, inputs_T: Tensor, targets_T: Tensor, window_blocks: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(self.hidden(inputs_T, window_blocks)), targets_T)

    def pack(self, inputs_T: Tensor, window_blocks: Tensor) -> Packing:
        if inputs_T.ndim != 1 or len(inputs_T) % BLOCK:
            raise ValueError(f"inputs must be one row of whole blocks of {BLOCK} tokens, not {tuple(inputs_T.shape)}")
        documents_T = (inputs_T == self.s.document_token).cumsum(0)
        make_mask = document_block_mask if self.use_flex else gathered_bias
        extra = () if self.use_flex else (self.s.num_heads, self.dtype)
        windows = (window_blocks // 2).clamp(min=1), window_blocks
        return Packing(documents_T, *(make_mask(documents_T, window, *extra) for window in windows))

    def hidden(self, inputs_T: Tensor, window_blocks: Tensor) -> Tensor:
        """The output of the last layer, normed."""
        packing = self.pack(inputs_T, window_blocks)
        x = x0 = norm(self.embedding(inputs_T).to(self.dtype))
        rows, outputs = [table(inputs_T).to(self.dtype) for table in self.value_embedding], []
        value_embeddings, half = [*rows, *[None] * (len(self.blocks) - 2 * len(rows)), *rows], len(self.blocks) // 2
        for layer in range(half):
            x = self.blocks[layer](x, x0, value_embeddings[layer], packing)
            outputs.append(x)
        for layer, weight in enumerate(self.skip_weights, half):
            x = x + weight * outputs.pop()
            x = self.blocks[layer](x, x0, value_embeddings[layer], packing)
        return norm(x)

    def logits(self, x_TC: Tensor) -> Tensor:
        """Logits in float32 with a softcap c (Gemma 2, arXiv:2408.00118): 2c sigmoid(2z / c) = c tanh(z / c) + c."""
        w, training = self.head.weight, torch.is_grad_enabled()
        z_TV = Fp8Linear.apply(x_TC, w) if self.s.fp8_head and training else F.linear(x_TC, w.type_as(x_TC))
        return 2 * self.s.logit_softcap * torch.sigmoid(z_TV.float() * (2 / self.s.logit_softcap))


# ---- Optimizers and schedules: Muon for the blocks' matrices, Adam for the rest --------------------------------------
class Share:
    """Parameters stacked along their first dimension; a row is a table's row, a matrix, or a number. Each process
    updates a share of the rows: it gets their summed gradient (reduce-scatter), updates them, gathers the others.

        row          0 1 2 | 3 4 5 | 6 - -      7 rows, 3 processes; -: padding, which stays zero
        updated by     0       1       2

    The parameters become views of the stack. Where it is small, every process updates all of it: `split` is false.
    """

    def __init__(self, name: str, params: list[nn.Parameter], world: World, split: bool = True):
        self.name, self.params, self.world, self.in_flight = name, params, world, None
        self.parts, self.number = (world.size, world.rank) if split else (1, 0)
        self.sizes, self.rows = [len(param) for param in params], sum(len(param) for param in params)
        self.stack = self.padded([param.detach() for param in params])
        for param, rows in zip(params, self.stack[: self.rows].split(self.sizes), strict=True):
            param.data = rows
        self.mine = self.part(self.stack)  # a view, too

    def padded(self, rows: list[Tensor]) -> Tensor:
        """These rows in one tensor that splits into equal parts."""
        if len(rows) == 1 and self.rows % self.parts == 0:
            return rows[0]
        return torch.cat([*rows, rows[0].new_zeros(-self.rows % self.parts, *rows[0].shape[1:])])

    def part(self, stack: Tensor) -> Tensor:
        return stack.chunk(self.parts)[self.number]

    def gather(self, part: Tensor) -> Tensor:
        """What the processes have, one after the other."""
        whole = part.new_empty(self.parts * len(part), *part.shape[1:]) if self.parts > 1 else part
        if self.parts > 1:
            dist.all_gather_single(whole, part)
        return whole

    def take_gradient(self) -> None:
        """Start the gradient's sum over the processes."""
        gradient = self.padded([param.grad for param in self.params])
        self.gradient = torch.empty_like(self.mine) if self.parts > 1 else gradient
        if self.parts > 1:
            self.in_flight = dist.reduce_scatter_single(self.gradient, gradient, async_op=True)
        elif self.world.size > 1:
            self.in_flight = dist.all_reduce(gradient, async_op=True)

    def finish(self, step: int, factor: float) -> None:
        """Update this process's share and start to gather the others'."""
        self.wait()
        self.update(step, factor)
        self.gradient = None
        if self.parts > 1:
            self.in_flight = dist.all_gather_single(self.stack, self.mine, async_op=True)

    def wait(self) -> None:
        if self.in_flight:
            self.in_flight.wait()
        self.in_flight = None


def lr_factor(step: int, s: Settings) -> float:
    """What every learning rate is multiplied by: 1, then over the cooldown, in a straight line, down to `final_lr`."""
    left = min(1.0, (1 - step / s.num_iterations) / s.cooldown_frac) if s.cooldown_frac else 1.0
    return left + (1 - left) * s.final_lr


def window_in_blocks(progress: float, start: int, end: int) -> int:
    """The attention window grows from `start` to `end` tokens, in whole blocks (fernbear, record of 2024-11-24)."""
    return int((1 - progress) * start + progress * end) // BLOCK


def muon_momentum(step: int, s: Settings) -> float:  # it grows over the first steps
    grown = min(step / s.momentum_warmup, 1) if s.momentum_warmup else 1
    return s.momentum_start + grown * (s.momentum_end - s.momentum_start)


def adam_update(weights, gradient, mean, square, rate, correction1, correction2, beta1, beta2, eps) -> None:
    mean.lerp_(gradient, 1 - beta1)
    square.lerp_(gradient.square(), 1 - beta2)
    weights.sub_(rate * (mean / correction1) / ((square / correction2).sqrt() + eps))


class Adam(Share):
    def __init__(self, name, params, world: World, s: Settings, lr: float, betas, eps: float, split=True):
        super().__init__(name, params, world, split)
        self.lr, self.betas, self.eps = lr, betas, eps
        self.state = dict(mean=torch.zeros_like(self.mine), square=torch.zeros_like(self.mine))
        self.compute = torch.compile(adam_update, dynamic=False) if s.compile else adam_update

    def update(self, step: int, factor: float) -> None:
        numbers = torch.tensor([self.lr * factor, *(1 - beta ** (step + 1) for beta in self.betas)])
        self.compute(self.mine, self.gradient, *self.state.values(), *numbers, *self.betas, self.eps)


def newton_schulz(x: Tensor, steps: int) -> Tensor:
    """Matrices with the same singular vectors and every singular value near 1: between 0.7 and 1.2, which is enough.

    The coefficients let small ones grow as fast as possible (Keller Jordan, https://kellerjordan.github.io/posts/muon).
    For matrices with no more rows than columns.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)  # now no singular value is above 1
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)  # a x + (b gram + c gram²) x
    return x


def muon_update(weights, gradient, momentum, rates, lr, beta, ns_steps, dtype) -> None:
    """Nesterov momentum, orthogonalized by Newton-Schulz: Muon."""
    momentum.lerp_(gradient, 1 - beta)
    update = newton_schulz(gradient.lerp(momentum, beta).to(dtype), ns_steps).float()
    weights.sub_(update * (lr * rates))


class Muon(Share):  # the matrices of one kind of layer, as one batch
    def __init__(self, name: str, layers: list[nn.Module], world: World, s: Settings):
        super().__init__(name, [layer.weights for layer in layers], world)
        rates = torch.tensor([rate for layer in layers for rate in layer.rates], device=world.device)
        self.s, self.dtype, self.rates = s, getattr(torch, s.dtype), self.part(self.padded([rates]))[:, None, None]
        self.state = dict(momentum=torch.zeros_like(self.mine))
        self.compute = torch.compile(muon_update, dynamic=False) if s.compile else muon_update

    def update(self, step: int, factor: float) -> None:
        numbers = torch.tensor([self.s.muon_lr * factor, muon_momentum(step, self.s)])
        self.compute(self.mine, self.gradient, *self.state.values(), self.rates, *numbers, self.s.ns_steps, self.dtype)


# ---- The step: forward and backward pass, update, validation, kernel warm-up -----------------------------------------
def prepare_thread(cores: int, kept: list[Tensor]) -> None:
    """Set the thread's cores, and avoid page faults: with run.sh's malloc settings a thread has heaps of 64 MiB, which
    glibc returns when empty. So each of eight keeps a small tensor at its end; the large one before it is freed."""
    torch.set_num_threads(cores)
    kept += [torch.empty(size, dtype=torch.uint8) for size in 8 * [(64 << 20) - (400 << 10), 256 << 10]][1::2]


class Trainer:
    """The model, its optimizers, and what a step does to them."""

    def __init__(self, s: Settings, world: World):
        self.s, self.world = s, world
        torch._inductor.config.coordinate_descent_tuning = s.coordinate_descent
        torch._functorch.config.ban_recompute_materialized_backward = not s.recompute
        torch.manual_seed(s.seed)  # the same on every process: so all start from the same weights
        self.model = GPT(s, use_flex=s.compile and world.on_gpu).to(world.device)
        options = None if world.on_gpu else dict(cpp_wrapper=True)  # on a CPU: let threads run at the same time
        self.loss = torch.compile(self.model, dynamic=False, options=options) if s.compile else self.model
        self.params = dict(self.model.named_parameters())
        tables = {name: p for name, p in self.params.items() if "embedding." in name}  # not embedding_mix
        gates = [p for name, p in self.params.items() if name.endswith("gate")]
        scalars = [p for p in self.params.values() if p.ndim == 1]
        betas, eps = (s.adam_beta1, s.adam_beta2), s.adam_eps
        self.shares = [
            *(Adam(name, [p], world, s, s.embedding_lr, betas, eps) for name, p in tables.items()),
            Adam("head", [self.model.head.weight], world, s, s.head_lr, betas, eps),
            Adam("gates", gates, world, s, s.gate_lr, (0.9, 0.99), eps, split=False),
            Adam("scalars", scalars, world, s, s.scalar_lr, betas, s.scalar_eps, split=False),
            Muon("attention", [block.attention for block in self.model.blocks if block.attention], world, s),
            Muon("mlp", [block.mlp for block in self.model.blocks], world, s),
        ]
        assert sum(len(share.params) for share in self.shares) == len(self.params), "a parameter has no optimizer"
        self.window_blocks = torch.zeros((), dtype=torch.int32, device=world.device)
        self.side_stream = torch.cuda.Stream() if world.on_gpu else None
        self.map, cores, sequences = map, torch.get_num_threads(), math.ceil(s.batch_sequences / world.size)
        if not world.on_gpu:  # a thread per sequence: faster than all cores together for each small operation
            threads, each = min(cores, sequences), max(1, cores // sequences)
            self.map = ThreadPoolExecutor(threads, initializer=prepare_thread, initargs=(each, [])).map
            torch.set_num_threads(1)  # of the main thread: its helpers would wait busily, beside the others

    def set_window(self, step: int) -> None:
        self.window_blocks.fill_(window_in_blocks(step / self.s.num_iterations, self.s.window_start, self.s.window_end))

    def gradients(self, sequence: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """A sequence's loss and its gradients, as sums over tokens: FP8's scales then fit any batch and world."""
        loss = self.loss(*sequence, self.window_blocks) * len(sequence[0])
        if self.world.on_gpu:  # the side stream can read the loss from here on, beside the backward pass
            self.side_stream.wait_stream(torch.cuda.current_stream())
        return loss.detach(), torch.autograd.grad(loss, tuple(self.params.values()))

    def backward(self, batch: list[tuple[Tensor, Tensor]], step: int, stop: bool = False) -> tuple[float, bool]:
        """Leave the gradient of this process's sequences in the parameters. Returns the batch's mean loss, and whether
        any process wants to stop; the host reads both while the GPU is busy with the backward pass."""
        self.set_window(step)
        losses, gradients = [], None
        for loss, more in self.map(self.gradients, batch):  # added in order, whichever thread ends first
            losses, gradients = [*losses, loss], torch._foreach_add(gradients, more) if gradients else more
        for param, gradient in zip(self.params.values(), gradients, strict=True):
            param.grad = gradient
        with torch.cuda.stream(self.side_stream):  # None on a CPU
            report = torch.stack([sum(losses), torch.tensor(float(stop), device=self.world.device)])
            if self.world.size > 1:
                dist.all_reduce(report)
            total, stopping = report.tolist()
        if not math.isfinite(total):
            raise UserError(f"the loss of step {step + 1} is {total}: lower the learning rates, or resume earlier", 1)
        return total / (self.s.batch_sequences * self.s.sequence_length), stopping > 0

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the shares. All sums over processes start before the first update, and the tables are gathered beside
        Muon."""
        factor = lr_factor(step, self.s)
        for share in self.shares:
            share.take_gradient()  # in one order on all processes
        run, order = (map, self.shares) if self.world.size > 1 else (self.map, self.shares[::-1])  # the longest first
        list(run(lambda share: share.finish(step, factor), order))
        for share in self.shares:
            share.wait()
        self.model.zero_grad()

    @torch.no_grad()
    def validation_loss(self, sequence: tuple[Tensor, Tensor]) -> Tensor:
        return self.loss(*(x.to(self.world.device) for x in sequence), self.window_blocks)

    def validate(self, shard: Shard, step: int) -> float:
        """The mean loss of the first `val_tokens` tokens, with this step's window."""
        self.set_window(step)
        length, total = self.s.val_sequence_length, torch.zeros((), device=self.world.device)
        mine = range(self.world.rank, self.s.val_tokens // length, self.world.size)
        total += sum(self.map(self.validation_loss, (shard.read(i * length, (i + 1) * length + 1) for i in mine)))
        if self.world.size > 1:
            dist.all_reduce(total)
        return total.item() * length / self.s.val_tokens

    def warm_up(self, batch: list[tuple[Tensor, Tensor]]) -> None:
        """Compile and run every kernel on made-up tokens, then put everything back, to the last bit."""
        weights = {name: value.to("cpu", copy=True) for name, value in self.model.state_dict().items()}
        random = torch.Generator().manual_seed(0)
        made_up = [torch.randint(self.s.vocab_size, x.shape, generator=random).to(x.device) for x, _ in batch]
        for i in range(self.s.kernel_warmup_steps):
            step = i * self.s.num_iterations // self.s.kernel_warmup_steps
            self.backward([(tokens.to(torch.int32), tokens) for tokens in made_up], step)
            self.update(step)
            tokens = torch.randint(self.s.vocab_size, (self.s.val_sequence_length,), generator=random)
            list(self.map(self.validation_loss, [(tokens.to(torch.int32), tokens)]))
        self.model.load_state_dict(weights)
        for share in self.shares:
            torch._foreach_zero_(list(share.state.values()))
        if self.world.on_gpu:
            torch.cuda.synchronize()  # before the clock starts

    def state(self) -> dict:
        """All that the next step depends on, for any number of processes; every process must take part."""
        state = dict(model=self.model.state_dict(), optimizers={})
        for share in self.shares:
            for key, value in share.state.items():
                state["optimizers"][f"{share.name}.{key}"] = share.gather(value)[: share.rows]
        return state

    def load_state(self, saved: dict) -> None:
        for part, tensors in self.state().items():
            for name in tensors | saved[part]:
                new, old = (x.get(name, torch.empty(0)) for x in (tensors, saved[part]))
                if (new.shape, new.dtype) != (old.shape, old.dtype):
                    raise UserError(f"the checkpoint's {part} {name} does not fit this model")
        self.model.load_state_dict(saved["model"])
        for share in self.shares:
            for key, value in share.state.items():
                value.copy_(share.part(share.padded([saved["optimizers"][f"{share.name}.{key}"]])))


# ---- The record of the run: clock, log, checkpoints ------------------------------------------------------------------
class RunLog:
    """logs/<id>.txt, the console and the clock, by rank 0. A line starts with its newline: torn ones spoil no other."""

    def __init__(self, path: Path, facts: dict, world: World):
        self.path, self.world, self.lost_bytes, self.shown, self.seconds, self.started = path, world, 0, 0.0, 0.0, 0.0
        about = [f"{name}: {fact}" for name, fact in facts.items()]
        header = "\n".join([SOURCE.removesuffix("\n"), "=" * 100, *about, "=" * 100]).encode()
        if world.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(path, "ab", buffering=0)
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"{path}: another process writes this run's log") from None
            if self.file.tell() == 0 and self.file.write(header) < len(header):
                path.unlink()
                raise UserError(f"{path}: no room for the log")

    def note(self, text: str, often: bool = False) -> None:
        """One line for the file and the console: there, if `often`, at most one per second, and none beside a bar."""
        if self.world.rank == 0:
            line = ("\n" + one_line(text)).encode(errors="backslashreplace")
            self.lost_bytes += len(line)
            with suppress(OSError):  # a full disk does not end the run
                self.lost_bytes -= self.file.write(line)
            try:
                if not often or (time.monotonic() - self.shown > 1 and not sys.stderr.isatty()):
                    self.shown = time.monotonic()
                    tqdm.write(line.decode().strip(), file=sys.stdout)
                    sys.stdout.flush()
            except OSError:  # a closed pipe, or a file on a full disk: the rest goes nowhere
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def stop_clock(self) -> None:
        if self.world.on_gpu:
            torch.cuda.synchronize()
        self.seconds, self.started = self.seconds + time.perf_counter() - self.started, 0.0  # 0.0: stopped

    def times(self, step: int) -> str:
        milliseconds = 1000 * (self.seconds + (time.perf_counter() - self.started if self.started else 0))
        return f"train_time:{milliseconds:.0f}ms step_avg:{milliseconds / max(step, 1):.2f}ms"


def read_checkpoint(path: str, folder: str) -> dict:
    """A checkpoint, or with `latest` the last step of the run that saved last, if any. Nothing in it is executed."""
    if path == "latest":
        saves = sorted(Path(folder).glob("*/step_*.pt"), key=lambda save: save.stat().st_mtime_ns)
        path = str(max(saves[-1].parent.glob("step_*.pt"))) if saves else ""
    if not path:
        return {}
    try:
        with zipfile.ZipFile(path if os.path.isfile(path) else "") as archive:
            if damaged := archive.testzip():
                raise ValueError(f"wrong checksum in {damaged}")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        names = ("settings", "source", "data", "step", "position", "seconds", "state")
        return {x: checkpoint[x] for x in names} | dict(path=path, run_id=str(uuid.UUID(checkpoint["run_id"])))
    except Exception as error:
        raise UserError(f"--resume {path}: not a checkpoint, or a damaged one ({one_line(error)[:100]})") from None


# ---- The run: from the settings to the last line ---------------------------------------------------------------------
class Run:
    """One run. Settings, checkpoint, data and log are opened and checked before anything is computed."""

    def __init__(self, world: World, flags: dict):
        self.world, self.stop, self.stop_time, self.stepping = world, None, math.inf, False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup does with SIGHUP
                signal.signal(number, self.on_signal)
        self.saved = read_checkpoint(flags.get("resume", ""), flags.get("checkpoint_dir", Settings.checkpoint_dir))
        self.s = s = make_settings(flags, world.size, world.on_gpu, self.saved.get("settings"))
        self.loader = DistributedDataLoader(s, world)
        self.val_shard = Shard((sorted(glob.glob(s.val_files)) or [s.val_files])[0], s.vocab_size)
        if self.val_shard.length <= s.val_tokens:
            raise UserError(f"--val_tokens {s.val_tokens}: {self.val_shard.path} has {self.val_shard.length - 1}")
        data = [shard.fingerprint() for shard in [*self.loader.shards, self.val_shard]] if world.rank == 0 else []
        if world.rank == 0 and self.saved.get("data", data) != data:
            raise UserError(f"--resume {self.saved['path']}: that run used other shards")
        run_id = self.saved.get("run_id", str(uuid.uuid4()))  # only rank 0 uses it
        self.about, self.folder = dict(run_id=run_id, source=SOURCE, data=data), Path(s.checkpoint_dir) / run_id
        name = torch.cuda.get_device_name() if world.on_gpu else torch.cpu.get_capabilities().get("cpu_name", "CPU")
        self.hardware = f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads per process"
        facts = dict(python=sys.version, torch=torch.__version__, cuda=torch.version.cuda, hardware=self.hardware)
        facts |= dict(world_size=world.size, seed=s.seed, settings=json.dumps(asdict(s)), data=json.dumps(data))
        facts |= dict(smi=os.popen("nvidia-smi").read()) if world.on_gpu and world.rank == 0 else {}
        if s.save_every and world.rank == 0:  # find out now, not at the first save, whether it is writable
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "first.tmp").touch()
        self.log = RunLog(Path(s.log_dir) / f"{run_id}.txt", facts, world)

    def on_signal(self, number: int, frame) -> None:
        """A signal lets the run save first. A second one ends it at once, and so does one before the first step."""
        again = self.stop and time.monotonic() - self.stop_time > 1  # torchrun repeats the terminal's Ctrl-C
        self.stop, self.stop_time = self.stop or UserError(signal.Signals(number).name, 128 + number), time.monotonic()
        if again or not self.stepping:
            raise self.stop

    def train(self) -> None:
        s, log, saved, self.trainer, first_step = self.s, self.log, self.saved, Trainer(self.s, self.world), 0
        parameters = sum(parameter.numel() for parameter in self.trainer.model.parameters())
        log.note(f"device   {self.world.size} x {self.hardware}; {s.dtype}, {'compiled' if s.compile else 'eager'}")
        log.note(f"model    {s.num_layers} layers of width {s.model_dim}, {parameters:,} parameters")
        log.note(f"head     trained in {'FP8' if s.fp8_head else s.dtype}")
        log.note(f"steps    {s.num_iterations} of {s.batch_sequences} x {s.sequence_length} tokens")
        log.note(f"data     {s.train_files}, validation on {s.val_tokens:,} tokens of {s.val_files}")
        log.note(f"target   {f'validation loss {s.target_loss}' if s.target_loss else 'none'}")
        log.note(f"log      {log.path}")
        self.trainer.warm_up(DistributedDataLoader(s, self.world).next_batch())  # only its shapes count
        if saved:
            self.trainer.load_state(saved["state"])
            first_step, self.loader.position, log.seconds = saved["step"], saved["position"], saved["seconds"]
            log.note(f"resumed at step {first_step} from {saved['path']} on {self.world.size} x {self.hardware}")
            changes = [f"{x} {saved['settings'][x]} -> {y}" for x, y in asdict(s).items() if saved["settings"][x] != y]
            for change in changes + ["the script"] * (saved["source"] != SOURCE):
                log.note(f"changed on resume: {change}")
        val_loss, track = self.loop(first_step), make_settings({}, 1, self.world.on_gpu).num_iterations
        verdict = f"; target {s.target_loss} {'not ' * (not val_loss <= s.target_loss)}reached" if s.target_loss else ""
        log.note(f"validation loss {val_loss:.4f} after {s.num_iterations} of the track's {track} steps{verdict}")
        if self.world.on_gpu:
            allocated, reserved = torch.cuda.max_memory_allocated() >> 20, torch.cuda.max_memory_reserved() >> 20
            log.note(f"peak memory: {allocated} MiB allocated, {reserved} MiB reserved")

    def loop(self, first_step: int) -> float:
        s, n, trainer, log, stopping = self.s, self.s.num_iterations, self.trainer, self.log, False
        position, batch, self.stepping = self.loader.position, self.loader.next_batch(), True
        bar = tqdm(range(first_step, n + 1), leave=False, disable=self.world.rank > 0 or None)  # None: not if piped
        log.started = time.perf_counter()
        for step in bar:
            if step == n or (s.val_loss_every and step % s.val_loss_every == 0):
                log.stop_clock()
                val_loss = trainer.validate(self.val_shard, step)
                log.note(f"step:{step}/{n} val_loss:{val_loss:.4f} {log.times(step)}")
                if not math.isfinite(val_loss):
                    raise UserError(f"the validation loss of step {step} is {val_loss}: lower the learning rates", 1)
                log.started = time.perf_counter()
            if step < n:
                try:  # read ahead: with bad data the run can still save
                    next_position, next_batch = self.loader.position, self.loader.next_batch()
                except (UserError, OSError) as error:
                    self.stop = error
                if "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != LAUNCHER:  # do not outlive the job
                    self.stop = self.stop or UserError("its launcher is gone", 1)
                loss, stopping = trainer.backward(batch, step, self.stop is not None)
            if stopping or (s.save_every and step > first_step and (step % s.save_every == 0 or step == n)):
                log.stop_clock()
                self.save(step, position)  # before the update: these weights have given a finite loss
                log.started = time.perf_counter()
            if stopping:
                reasons = [self.stop] * self.world.size
                if self.world.size > 1:  # all end for the same reason, and none of them until rank 0 has saved
                    dist.all_gather_object(reasons, self.stop)
                raise next(filter(None, reasons))
            if step == n:
                return val_loss
            trainer.update(step)
            bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
            log.note(f"step:{step + 1}/{n} train_loss:{loss:.6f} {log.times(step + 1)}", often=True)
            position, batch = next_position, next_batch

    def save(self, step: int, position: list[int]) -> None:
        """Write under another name, sync, rename: a checkpoint is there whole or not at all. The last two are kept."""
        state = self.trainer.state()
        if self.world.rank > 0:
            return
        path, unfinished = self.folder / f"step_{step:06d}.pt", self.folder / f"{uuid.uuid4()}.tmp"
        progress = dict(settings=asdict(self.s), step=step, position=position, seconds=self.log.seconds, state=state)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(unfinished, "wb") as file:
                torch.save(self.about | progress, file)
                os.fsync(file.fileno())
            unfinished.rename(path)
            for old in [*sorted(set(self.folder.glob("step_*.pt")) - {path})[:-1], *self.folder.glob("*.tmp")]:
                old.unlink()
            self.log.note(f"saved; to go on from here: --resume {path}")
        except (OSError, RuntimeError) as error:  # RuntimeError: torch's writer met a full disk
            reason = error if isinstance(error, OSError) else error.__context__ or error
            self.log.note(f"no checkpoint at step {step}: {one_line(reason)}")
        finally:
            unfinished.unlink(missing_ok=True)


def main(arguments: list[str] | None = None) -> int:
    """Train. The exit code is 0, 1 for a failure, 2 for what the user can fix, or 128 + n for signal n."""
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # if closed
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the run listens, Ctrl-C ends any wait for other processes
    run = None
    try:
        flags = parse_flags(sys.argv[1:] if arguments is None else arguments)
        world = join_world(flags.get("collective_timeout", Settings.collective_timeout))
        run = Run(world, flags)
        run.train()
        ending, code = ("finished, but this log lacks lines: full disk", 1) if run.log.lost_bytes else ("finished", 0)
    except (UserError, OSError) as error:
        ending, code = (*error.args, 2)[:2] if isinstance(error, UserError) else (error, 2)
    except torch.OutOfMemoryError:
        hint = "halve --sequence_length and double --batch_sequences, halve --val_sequence_length, or --recompute true"
        ending, code = f"out of memory: {hint}", 2
    except Exception as error:
        ending, code = f"{type(error).__name__}: {error}", 1
        sys.excepthook(*sys.exc_info())  # prints the traceback
    if run:
        run.log.note(f"ended: {ending}")
    if code == 2:  # print once what all ranks report: the others sleep, and torchrun ends them when local rank 0 exits
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(5 if os.environ.get("LOCAL_RANK", "0") != "0" else 0)
        with suppress(OSError):  # a closed pipe, or a file on a full disk
            print(f"train_gpt: {one_line(ending)}", file=sys.stderr)
    return code


if __name__ == "__main__":
    if (code := main()) == 0:
        atexit._run_exitfuncs()  # what profilers and trackers have registered
        sys.stdout.flush()
    os._exit(code)  # at once: threads that wait for other processes would hold up or abort the interpreter's own end
