"""Train a GPT as fast as the hardware allows, in one file that you can read from top to bottom.

    ./run.sh                                                 set up, get the data, train on what is here
    torchrun --standalone --nproc_per_node=8 train_gpt.py    the 8xH100 track: FineWeb to a validation loss of 3.28
    python train_gpt.py --num_iterations 100 --seed 7        one GPU, or the CPU track; every setting is a flag

The recipe is that of GPT-2, as nanoGPT and llm.c train it. Published: 45 minutes on 8 H100s (llm.c).
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
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).read_text(encoding="utf-8")  # for the log; read at once, before anybody edits the file
try:
    import numpy as np
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import Tensor, nn
    from torch.nn.parallel import DistributedDataParallel
    from tqdm import tqdm
except ImportError as error:
    sys.exit(f"train_gpt: {error}: use ./run.sh, or activate the environment that it made: . .venv/bin/activate")

# ---- Settings: the 8xH100 record's values, and the CPU track's where they differ -------------------------------------
ANY = "True"  # the rule of a setting that may have any value


class UserError(Exception):
    """Ends a run with one line: UserError(message, exit code). Without a code it is 2: something the user can fix."""


def setting(default, meaning: str, rule: tuple | str, cpu=None, free: bool = False):
    """All about one setting. `rule` is its range, or what must hold. A resumed run may change it only if it is free."""
    return field(default=default, metadata=dict(meaning=meaning, rule=rule, cpu=cpu, free=free))


@dataclass(frozen=True)
class Settings:
    train_files: str = setting("data/fineweb10B/*train*.bin", "training data", ANY, "data/embedded/*train*.bin", True)
    val_files: str = setting("data/fineweb10B/*val*.bin", "validation data", ANY, "data/embedded/*val*.bin", True)
    vocab_size: int = setting(50257, "number of different tokens", (1, 65536), cpu=257)
    num_layers: int = setting(12, "transformer blocks", (1, 1000), cpu=3)
    num_heads: int = setting(12, "heads per attention layer", (1, 1000), cpu=2)
    model_dim: int = setting(768, "width of the model", "model_dim % num_heads == 0 < model_dim", cpu=128)
    context_length: int = setting(1024, "tokens per window, into which sequences are cut", (1, 2**24), cpu=256)
    sequence_length: int = setting(
        65536, "tokens per sequence", "sequence_length in range(context_length, 2**24, context_length)", cpu=1024
    )
    batch_sequences: int = setting(8, "sequences per step", "processes <= batch_sequences < 2**24", cpu=2)
    num_iterations: int = setting(19073, "training steps", (1, 999_999), cpu=10000)
    lr_warmup: int = setting(256, "steps over which the learning rate grows", (0, 10**6), cpu=335)
    lr: float = setting(0.0018, "AdamW's learning rate", (0, 1e6), cpu=0.006)
    weight_decay: float = setting(0.1, "AdamW's decay of the matrices and tables", (0, 1e6))
    adam_beta1: float = setting(0.9, "Adam's decay of the mean gradient", (0, 0.99999))
    adam_beta2: float = setting(0.95, "Adam's decay of the mean squared gradient", (0, 0.99999))
    gradient_clip: float = setting(1.0, "largest norm of the gradient; 0: no limit", (0, 1e6))
    seed: int = setting(1, "seed of the initial weights", (0, 2**62))
    val_tokens: int = setting(10485760, "to validate on", "val_tokens % sequence_length == 0 < val_tokens", 2**18, True)
    val_loss_every: int = setting(125, "steps between validations; 0: only at the end", (0, 10**6), cpu=1000, free=True)
    target_loss: float = setting(3.28, "validation loss to reach; 0: none", (0, 1e6), cpu=1.04, free=True)
    dtype: str = setting("auto", "dtype of matrix products", "dtype in ('auto', 'bfloat16', 'float32')", free=True)
    compile: bool = setting(True, "use torch.compile", ANY, cpu=False, free=True)
    max_autotune: bool = setting(False, "let Inductor try more kernels; takes many minutes more", ANY, free=True)
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
            world = world._replace(device=torch.device("cuda", local_rank))
            torch.cuda.set_device(world.device)
            if torch.cuda.get_device_capability() < (8, 0):
                raise ValueError(f"{torch.cuda.get_device_name()} has no bfloat16; sm_80 or newer is needed")
        if world.size > 1:
            limit, attempt = timedelta(seconds=timeout), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = dist.PrefixStore(attempt, next(dist.rendezvous("env://", timeout=limit))[0])  # it outlives restarts
            backend, device = ("nccl", world.device) if world.on_gpu else ("gloo", None)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit, device_id=device)
        return world
    except Exception as error:
        raise UserError(f"cannot start: {one_line(error)} (CUDA_VISIBLE_DEVICES='' trains on the CPU)") from None


# ---- Data: memory-mapped shards of tokens, and the loader that deals out their sequences -----------------------------
class Shard:
    """A memory-mapped file: a header of 256 int32 (20240520, 1, number of tokens, zeros), then 16-bit tokens."""

    def __init__(self, path: str, vocab_size: int):
        self.path, self.vocab_size = path, vocab_size
        header = np.fromfile(path, "<i4", 256) if os.path.isfile(path) else []
        if len(header) < 256 or header[0] != 20240520 or header[1] != 1:
            raise UserError(f"{path}: no token shard; data/cached_fineweb10B.py and data/embedded_corpus.py make them")
        self.size = os.path.getsize(path)
        if header[2] < 1 or self.size != 1024 + 2 * int(header[2]):
            raise UserError(f"{path}: {self.size} bytes do not fit its {header[2]} tokens; fetch or make it again")
        self.tokens = np.memmap(path, dtype="<u2", mode="r", offset=1024)

    def read(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        """`length` inputs from token `start` on, and their targets: the tokens that follow each of them."""
        if os.path.getsize(self.path) != self.size:  # reading beyond the end of a mapped file kills the process
            raise UserError(f"{self.path}: its size changed while it was in use")
        tokens = torch.from_numpy(self.tokens[start : start + length + 1].astype(np.int64))
        if tokens.max() >= self.vocab_size:
            raise UserError(f"{self.path}: token {tokens.max()} is outside the vocabulary of {self.vocab_size}")
        return tokens[:-1].to(torch.int32), tokens[1:]

    def fingerprint(self) -> dict:
        ends = hashlib.sha256(self.tokens[: 2**19].tobytes() + self.tokens[-(2**19) :].tobytes())  # a MiB of each
        return dict(file=os.path.basename(self.path), tokens=len(self.tokens), sha256=ends.hexdigest())


class DistributedDataLoader:
    """Deals out the token stream: a step takes the next `batch_sequences` sequences, sequence i goes to rank i % size.
    So any number of processes trains on the same tokens. On a CPU, a process's sequences share one forward pass."""

    def __init__(self, s: Settings, world: World):
        self.s, self.world = s, world
        self.shards = [Shard(path, s.vocab_size) for path in sorted(glob.glob(s.train_files)) or [s.train_files]]
        self.position = [0, 0]  # of the next batch: [shard number, first token]; the number grows beyond the last shard
        self.batch_tokens = s.batch_sequences * s.sequence_length
        if max(len(shard.tokens) for shard in self.shards) <= self.batch_tokens:
            raise UserError(f"no shard of {s.train_files} has the {self.batch_tokens} + 1 tokens of a batch")

    def next_batch(self) -> list[tuple[Tensor, Tensor]]:
        """This process's micro-batches of the next step: (inputs, targets), on its device."""
        number, first = self.position
        while first + self.batch_tokens >= len(self.shards[number % len(self.shards)].tokens):
            number, first = number + 1, 0  # what is left of the shard is smaller than a batch
        shard, length = self.shards[number % len(self.shards)], self.s.sequence_length
        mine = range(self.world.rank, self.s.batch_sequences, self.world.size)
        batch = [shard.read(first + i * length, length) for i in mine]
        self.position = [number, first + self.batch_tokens]
        if self.world.on_gpu:
            return [tuple(x.to(self.world.device) for x in pair) for pair in batch]
        return [tuple(torch.cat(parts) for parts in zip(*batch, strict=True))]


# ---- Model: GPT-2 ----------------------------------------------------------------------------------------------------
class CastedLinear(nn.Linear):
    """A linear map; its float32 weights are cast to the activations' dtype at use."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.type_as(x), self.bias.type_as(x))


class LayerNorm(nn.LayerNorm):
    """Computed in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).type_as(x)


# Shape suffixes: N windows, T tokens per window, C channels of the model.
class CausalSelfAttention(nn.Module):
    def __init__(self, model_dim: int, num_heads: int):
        super().__init__()
        self.head_dim = model_dim // num_heads
        self.query = CastedLinear(model_dim, model_dim)
        self.key = CastedLinear(model_dim, model_dim)
        self.value = CastedLinear(model_dim, model_dim)
        self.project = CastedLinear(model_dim, model_dim)

    def forward(self, x_NTC: Tensor) -> Tensor:
        maps = self.query, self.key, self.value
        weight, bias = (torch.cat([getattr(m, name) for m in maps]).type_as(x_NTC) for name in ("weight", "bias"))
        q, k, v = F.linear(x_NTC, weight, bias).unflatten(-1, (-1, self.head_dim)).transpose(1, 2).chunk(3, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.project(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, model_dim: int):
        super().__init__()
        self.expand = CastedLinear(model_dim, 4 * model_dim)
        self.project = CastedLinear(4 * model_dim, model_dim)

    def forward(self, x_NTC: Tensor) -> Tensor:
        return self.project(F.gelu(self.expand(x_NTC), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, model_dim: int, attention: CausalSelfAttention):
        super().__init__()
        self.attention_norm = LayerNorm(model_dim)
        self.attention = attention
        self.mlp_norm = LayerNorm(model_dim)
        self.mlp = MLP(model_dim)

    def forward(self, x_NTC: Tensor) -> Tensor:
        x_NTC = x_NTC + self.attention(self.attention_norm(x_NTC))
        return x_NTC + self.mlp(self.mlp_norm(x_NTC))


@dataclass(frozen=True)
class GPTConfig:
    """The settings that make the model."""

    vocab_size: int
    num_layers: int
    num_heads: int
    model_dim: int
    context_length: int
    dtype: str


class GPT(nn.Module):
    """Maps sequences, cut into windows, to their mean loss. A token sees those before it in its window, whatever their
    document (GPT-2: Radford and others, 2019)."""

    def __init__(self, s: GPTConfig):
        super().__init__()
        self.s, self.dtype = s, getattr(torch, s.dtype)
        rows = math.ceil(s.vocab_size / 128) * 128  # padded, for the matrix products
        self.embedding = nn.Embedding(rows, s.model_dim)
        self.positions = nn.Embedding(s.context_length, s.model_dim)
        self.blocks = nn.ModuleList(
            Block(s.model_dim, CausalSelfAttention(s.model_dim, s.num_heads)) for _ in range(s.num_layers)
        )
        self.last_norm = LayerNorm(s.model_dim)
        for name, param in self.named_parameters():
            if param.ndim == 2:  # what is added to the residual stream starts smaller the more layers add to it
                layers_that_add = 2 * s.num_layers if "project" in name else 1
                nn.init.normal_(param, std=0.02 / layers_that_add**0.5)
            elif name.endswith("bias"):
                nn.init.zeros_(param)

    def forward(self, inputs_T: Tensor, targets_T: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(self.hidden(inputs_T)), targets_T)

    def hidden(self, inputs_T: Tensor) -> Tensor:
        """The output of the last layer, normed."""
        x_NTC = self.embedding(inputs_T.view(-1, self.s.context_length)) + self.positions.weight
        x_NTC = x_NTC.to(self.dtype)
        for block in self.blocks:
            x_NTC = block(x_NTC)
        return self.last_norm(x_NTC).flatten(0, 1)

    def logits(self, x_TC: Tensor) -> Tensor:
        """Logits in float32; the head is the embedding's table."""
        return F.linear(x_TC, self.embedding.weight.type_as(x_TC)).float()


# ---- Optimizers and schedules: AdamW for everything ------------------------------------------------------------------
def lr_factor(step: int, steps: int, warmup: int) -> float:
    """What the learning rate is multiplied by: up to 1 in a straight line, then down to 0 along half a cosine wave."""
    if step < warmup:
        return (step + 1) / warmup
    return (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2


# ---- The step: forward and backward pass, update, validation, kernel warm-up -----------------------------------------
class Trainer:
    """The model, its optimizer, and what a step does to them."""

    def __init__(self, s: Settings, world: World):
        self.s, self.world = s, world
        torch._inductor.config.max_autotune = s.max_autotune
        torch._functorch.config.ban_recompute_materialized_backward = not s.recompute
        torch._dynamo.config.optimize_ddp = True  # cut the graph where DDP reduces: communication overlaps
        torch.manual_seed(s.seed)
        config = GPTConfig(**{f.name: getattr(s, f.name) for f in fields(GPTConfig)})
        self.model = GPT(config).to(world.device)
        self.loss = torch.compile(self.model, dynamic=False) if s.compile else self.model  # both return the loss
        self.ddp_loss = self.loss
        if world.size > 1:
            self.ddp_loss = DistributedDataParallel(self.loss, forward_sync_buffers=False)
        matrices, others = ([p for p in self.model.parameters() if (p.ndim == 2) == kind] for kind in (True, False))
        groups = [dict(params=matrices, weight_decay=s.weight_decay), dict(params=others, weight_decay=0.0)]
        self.adam = torch.optim.AdamW(groups, lr=s.lr, betas=(s.adam_beta1, s.adam_beta2), fused=True)
        self.groups = self.adam.param_groups
        self.full_rates = [group["lr"] for group in self.groups]
        self.side_stream = torch.cuda.Stream() if world.on_gpu else None

    def backward(self, batch: list[tuple[Tensor, Tensor]], step: int, stop: bool = False) -> tuple[float, bool]:
        """Leave the batch's gradient in the parameters; returns its loss, and whether any process wants to stop."""
        report = torch.tensor([0.0, stop]).to(self.world.device, non_blocking=True)
        for i, (inputs, targets) in enumerate(batch):
            last = i == len(batch) - 1
            with nullcontext() if self.world.size == 1 or last else self.ddp_loss.no_sync():
                loss = self.ddp_loss(inputs, targets)
                # DDP averages over the processes; with this weight, that is the average over the tokens of the batch.
                loss = loss * (len(inputs) * self.world.size / (self.s.batch_sequences * self.s.sequence_length))
                report[0] += loss.detach()
                if last:  # sum the report during the backward pass: the host reads it while the GPU is still busy
                    summing = dist.all_reduce(report, async_op=True) if self.world.size > 1 else None
                    if self.world.on_gpu:
                        self.side_stream.wait_stream(torch.cuda.current_stream())
                loss.backward()
        with torch.cuda.stream(self.side_stream):  # None on a CPU
            if summing:
                summing.wait()
            total, stopping = report.tolist()
        if not math.isfinite(total):
            raise UserError(f"the loss of step {step + 1} is {total}: lower the learning rates, or resume earlier", 1)
        return total / self.world.size, stopping > 0

    def update(self, step: int) -> None:
        """One step of the optimizer at this step's learning rate."""
        if self.s.gradient_clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.s.gradient_clip)
        factor = lr_factor(step, self.s.num_iterations, self.s.lr_warmup)
        for group, full_rate in zip(self.groups, self.full_rates, strict=True):
            group["lr"] = full_rate * factor
        self.adam.step()
        self.model.zero_grad(set_to_none=True)

    @torch.no_grad()
    def validate(self, shard: Shard) -> float:
        """The mean loss of the first `val_tokens` tokens."""
        length, total = self.s.sequence_length, torch.zeros((), device=self.world.device)
        for i in range(self.world.rank, self.s.val_tokens // length, self.world.size):
            inputs, targets = (x.to(self.world.device) for x in shard.read(i * length, length))
            total += self.loss(inputs, targets)
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
            with torch.no_grad():
                tokens = made_up[0][: self.s.sequence_length]
                self.loss(tokens.to(torch.int32), tokens)
        self.model.load_state_dict(weights)
        for state in self.adam.state.values():
            for name in state.keys() & {"step", "exp_avg", "exp_avg_sq"}:
                state[name].zero_()
        if self.world.on_gpu:
            torch.cuda.synchronize()  # before the clock starts

    def state(self) -> dict:
        """All that the next step depends on, for any number of processes; every process must take part."""
        names = {param: name for name, param in self.model.named_parameters()}
        adam = {f"{names[p]}.{key}": value for p, state in self.adam.state.items() for key, value in state.items()}
        return dict(model=self.model.state_dict(), adam=adam)

    def load_state(self, saved: dict) -> None:  # after warm_up: before its first step Adam has no state to load into
        for part, tensors in self.state().items():
            for name in tensors | saved[part]:
                new, old = (x.get(name, torch.empty(0)) for x in (tensors, saved[part]))
                if (new.shape, new.dtype) != (old.shape, old.dtype):
                    raise UserError(f"the checkpoint's {part} {name} does not fit this model")
                new.copy_(old)


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
        self.world, self.stop, self.stop_time, self.stepping, self.launcher = world, None, math.inf, False, os.getppid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup does with SIGHUP
                signal.signal(number, self.on_signal)
        self.saved = read_checkpoint(flags.get("resume", ""), flags.get("checkpoint_dir", Settings.checkpoint_dir))
        self.s = s = make_settings(flags, world.size, world.on_gpu, self.saved.get("settings"))
        self.loader = DistributedDataLoader(s, world)
        self.val_shard = Shard((sorted(glob.glob(s.val_files)) or [s.val_files])[0], s.vocab_size)
        if len(self.val_shard.tokens) <= s.val_tokens:
            raise UserError(f"--val_tokens {s.val_tokens}: {self.val_shard.path} has {len(self.val_shard.tokens) - 1}")
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
                val_loss = trainer.validate(self.val_shard)
                log.note(f"step:{step}/{n} val_loss:{val_loss:.4f} {log.times(step)}")
                if not math.isfinite(val_loss):
                    raise UserError(f"the validation loss of step {step} is {val_loss}: lower the learning rates", 1)
                log.started = time.perf_counter()
            if step < n:
                try:  # read ahead: with bad data the run can still save
                    next_position, next_batch = self.loader.position, self.loader.next_batch()
                except (UserError, OSError) as error:
                    self.stop = error
                if "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != self.launcher:  # do not outlive the job
                    self.stop = self.stop or UserError("torchrun is gone", 1)
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
        ending, code = "out of memory: halve --sequence_length and double --batch_sequences, or --recompute true", 2
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
