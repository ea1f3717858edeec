"""The attention of one forward and backward pass and nothing else, by FlexAttention or by torch's varlen_attn.

./run.sh rehearse rehearsal/attention_alone.py --processes 1 --against --attention varlen

Sizes and windows are those of ShardedLongShort in the middle of its run: long in 3 layers, short in 8.
"""

import argparse
import dataclasses
import json

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.attention.varlen import varlen_attn

BLOCK = 128
DOCUMENT = 690  # tokens on average
LONG = 7  # windows in blocks
SHORT = 3


@dataclasses.dataclass
class Hyperparameters:
    attention: str = "flex"  # or varlen
    kernel_options: str = "{}"  # of FlexAttention, as JSON: {"bwd_num_stages": 2}
    sequence_length: int = 49152
    batch_sequences: int = 1
    num_heads: int = 6
    head_dim: int = 128
    long_layers: int = 3
    short_layers: int = 8
    window_start: int = LONG * BLOCK
    window_end: int = LONG * BLOCK
    num_iterations: int = 4
    kernel_warmup_steps: int = 2


def document_mask(documents_T: Tensor, window_blocks: int) -> BlockMask:
    """Lists of blocks as train_gpt.py makes them, of the same shapes; which blocks they hold is data."""
    blocks = len(documents_T) // BLOCK
    counts = torch.full((1, 1, blocks), window_blocks, dtype=torch.int32, device="cuda")
    order = torch.zeros(1, 1, blocks, blocks, dtype=torch.int32, device="cuda")

    def document_causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents_T[query] == documents_T[key])

    return BlockMask.from_kv_blocks(
        counts, order, counts.clone(), order.clone(), BLOCK_SIZE=BLOCK, mask_mod=document_causal
    )


class Layers(nn.Module):
    def __init__(self, s: Hyperparameters):
        super().__init__()
        self.s, shape = s, (s.sequence_length, s.num_heads, s.head_dim)
        self.windows = [LONG] * s.long_layers + [SHORT] * s.short_layers
        self.qkv = nn.ParameterList(
            torch.zeros(3, *shape, dtype=torch.bfloat16, device="cuda") for _ in range(len(self.windows))
        )
        self.options = json.loads(s.kernel_options)

    def forward(self, documents_T: Tensor, starts: Tensor) -> list[Tensor]:
        masks = {window: document_mask(documents_T, window) for window in set(self.windows)}
        outputs = []
        for (q, k, v), window in zip(self.qkv, self.windows, strict=True):
            if self.s.attention == "flex":
                q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
                y = flex_attention(q, k, v, block_mask=masks[window], scale=0.12, kernel_options=self.options)
            else:  # as many tokens back as a window of blocks has on average
                length, back = self.s.sequence_length, window * BLOCK - BLOCK // 2
                y = varlen_attn(q, k, v, starts, starts, length, length, scale=0.12, window_size=(back, 0))
            outputs.append(y)
        return outputs


def main() -> None:
    parser = argparse.ArgumentParser()
    for field in dataclasses.fields(Hyperparameters):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    s = Hyperparameters(**vars(parser.parse_args()))
    layers = Layers(s)
    attend = torch.compile(layers, dynamic=False)
    documents_T = torch.arange(s.sequence_length, device="cuda") // DOCUMENT
    starts = torch.arange(0, s.sequence_length + DOCUMENT, DOCUMENT, dtype=torch.int32, device="cuda")

    def step() -> None:
        outputs = attend(documents_T, starts)
        torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
        layers.zero_grad()

    for _ in range(s.kernel_warmup_steps):
        step()
    torch.cuda.synchronize()
    for number in range(1, s.num_iterations + 1):
        step()
        print(f"step:{number}/{s.num_iterations} train_time:1ms step_avg:1.00ms", flush=True)


if __name__ == "__main__":
    main()
