"""A small training script for the rehearsal's own tests: the outside of train_gpt.py, and faults on request.

torchrun --standalone --nproc_per_node=2 stand_in.py --train_files 'x/*_train_*.bin' --fault graph_break
"""

import argparse
import dataclasses
import glob
import json
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.parallel import DistributedDataParallel

FAULTS = ("none", "graph_break", "recompile", "wrong_size", "wrong_card", "deprecated", "crash")


@dataclasses.dataclass
class Hyperparameters:
    train_files: str = ""
    val_files: str = ""
    vocab_size: int = 50304
    num_layers: int = 2
    num_heads: int = 2
    model_dim: int = 128
    sequence_length: int = 2048
    batch_sequences: int = 8
    in_a_row: int = 0  # 1: a rank takes all its sequences in one forward
    own_optimizer: int = 0  # 1: plain gradient descent without an optimizer of torch's, and a wait before the clock
    num_iterations: int = 3
    val_tokens: int = 16384
    val_loss_every: int = 2
    save_every: int = 0
    fault: str = "none"


class Block(nn.Module):
    def __init__(self, dim: int, num_heads: int, breaks_graph: bool):
        super().__init__()
        self.num_heads = num_heads
        self.breaks_graph = breaks_graph
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x, mask):
        B, T, _ = x.shape
        q, k, v = self.qkv(F.rms_norm(x, (x.size(-1),))).view(B, T, 3 * self.num_heads, -1).transpose(1, 2).chunk(3, 1)
        y = flex_attention(q, k, v, block_mask=mask)
        if self.breaks_graph:
            torch._dynamo.graph_break()
        x = x + self.out(y.transpose(1, 2).reshape(B, T, -1))
        return x + self.down(F.relu(self.up(F.rms_norm(x, (x.size(-1),)))).square())


class GPT(nn.Module):
    def __init__(self, settings: Hyperparameters):
        super().__init__()
        self.embed = nn.Embedding(settings.vocab_size, settings.model_dim)
        breaks_graph = settings.fault == "graph_break"
        self.blocks = nn.ModuleList(
            Block(settings.model_dim, settings.num_heads, breaks_graph and i == 0) for i in range(settings.num_layers)
        )
        self.head = nn.Linear(settings.model_dim, settings.vocab_size, bias=False)
        self.temperature = 1.0

    def forward(self, tokens, targets, mask):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
        logits = self.head(x).float() * self.temperature
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


class GatheredSGD(torch.optim.Optimizer):
    """Like Muon in its traffic: every rank sends one matrix of its own to all others."""

    def __init__(self, params, lr: float):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self):
        for param in (p for group in self.param_groups for p in group["params"]):
            update = param.grad.bfloat16() @ param.grad.bfloat16().T @ param.grad.bfloat16()
            gathered = torch.empty(dist.get_world_size(), *update.shape, dtype=update.dtype, device=update.device)
            dist.all_gather_single(gathered, update)
            param.add_(gathered[0], alpha=-self.param_groups[0]["lr"])


def read_settings() -> Hyperparameters:
    parser = argparse.ArgumentParser()
    for field in dataclasses.fields(Hyperparameters):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    settings = Hyperparameters(**vars(parser.parse_args()))
    assert settings.fault in FAULTS, f"unknown fault {settings.fault}"
    return settings


def batches(pattern: str, length: int):
    tokens = np.memmap(sorted(glob.glob(pattern))[0], dtype=np.uint16, mode="r", offset=1024)
    for start in range(0, len(tokens) - length - 1, length):
        piece = torch.from_numpy(tokens[start : start + length + 1].astype(np.int64)).cuda(non_blocking=True)
        yield piece[None, :-1].int(), piece[None, 1:]


def causal_blocks(length: int, visible) -> BlockMask:
    """All blocks up to the diagonal; built from block numbers, because a mask of all pairs would not fit in memory."""
    blocks = torch.arange(length // 128, dtype=torch.int32, device="cuda")
    return BlockMask.from_kv_blocks(
        (blocks + 1)[None, None], blocks.expand(1, 1, len(blocks), -1).contiguous(), mask_mod=visible
    )


def seed_fault(settings: Hyperparameters, step: int, model: GPT):
    rank = dist.get_rank()
    if settings.fault == "recompile" and step == 2:
        model.temperature = 0.5  # a Python number that the compiled graph has built in
    if settings.fault == "wrong_size" and step == 2:
        dist.all_reduce(torch.zeros(16 if rank == 1 else 8, device="cuda"))
    if settings.fault == "wrong_card" and step == 1:
        model.head.weight.grad = torch.zeros_like(model.head.weight, device="cuda:0")  # right on rank 0 only
    if settings.fault == "deprecated" and step == 1:
        torch.cuda.amp.autocast()
    if settings.fault == "crash" and step == 2:
        raise ValueError(f"seeded crash on rank {rank}")


def main():
    settings = read_settings()
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as train_gpt.py does
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank, size = dist.get_rank(), dist.get_world_size()

    def say(line: str):
        if rank == 0:
            print(line, flush=True)

    say(json.dumps(dataclasses.asdict(settings)))
    window = torch.tensor(128, device="cuda")

    def visible(b, h, q, k):
        return (q >= k) & (q - k < window)

    model = GPT(settings).cuda().bfloat16()
    ddp = DistributedDataParallel(torch.compile(model), device_ids=[torch.cuda.current_device()])
    if not settings.own_optimizer:
        adam = torch.optim.Adam([model.embed.weight, model.head.weight], fused=True)
        gathered = GatheredSGD(list(model.blocks.parameters()), lr=0.01)
    forwards, length = len(range(rank, settings.batch_sequences, size)), settings.sequence_length
    if settings.in_a_row:
        forwards, length = 1, forwards * length
    train_mask, val_mask = causal_blocks(length, visible), causal_blocks(settings.sequence_length, visible)
    train = batches(settings.train_files, length)

    def train_step():
        for _ in range(forwards):
            ddp(*next(train), train_mask).backward()
        if settings.own_optimizer:
            with torch.no_grad():
                for param in model.parameters():
                    param.sub_(param.grad, alpha=0.01)
        else:
            adam.step()
            gathered.step()
        model.zero_grad(set_to_none=True)

    def validate():
        torch.cuda.synchronize()  # as a script that stops its clock
        with torch.no_grad():
            for i, (inputs, targets) in enumerate(batches(settings.val_files, settings.sequence_length)):
                if i * settings.sequence_length >= settings.val_tokens:
                    break
                loss = ddp(inputs, targets, val_mask)
        dist.all_reduce(loss)
        return loss.item()

    train_step()  # the warm-up
    validate()
    if settings.own_optimizer:
        torch.cuda.synchronize()
    for step in range(settings.num_iterations + 1):
        if step % settings.val_loss_every == 0 or step == settings.num_iterations:
            say(f"step:{step}/{settings.num_iterations} val_loss:{validate():.4f} train_time:1ms step_avg:1.00ms")
        if step == settings.num_iterations:
            break
        window.fill_(128 * (step + 1))
        seed_fault(settings, step, model)
        train_step()
        if settings.save_every and rank == 0 and step + 1 == settings.num_iterations:
            torch.save(model.state_dict(), f"step_{step + 1}.pt")
        say(f"step:{step + 1}/{settings.num_iterations} train_time:1ms step_avg:1.00ms")
    say(f"peak memory: {torch.cuda.max_memory_allocated() // 2**20} MiB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
