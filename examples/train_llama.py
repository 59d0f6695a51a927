"""A Llama-like model over bytes, with tensor parallelism inside groups of workers and FSDP2 across them.

    raysharded data pack --format text my_texts/ corpus/
    raysharded run examples/train_llama.py:NextToken data.paths=corpus/ --config examples/train_llama.yaml

Each pair of workers computes a microbatch together, each with half of the heads and of the feed-forward's width. Any
worker may be lost: its pair is formed anew from those that are left.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

import raysharded as rs


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (Su et al., RoFormer, 2021) of [batch, heads, length, head_dim]."""
    half, length = x.shape[-1] // 2, x.shape[-2]
    frequencies = 10_000 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(length, device=x.device)[:, None] * frequencies
    cos, sin, (a, b) = angles.cos(), angles.sin(), x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).type_as(x)


class Block(nn.Module):
    """Attention with fewer heads for keys and values than for queries, and a gated feed-forward (SwiGLU)."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, kv_heads * self.head_dim, bias=False) for _ in range(2))
        self.o = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        normed = self.attention_norm(x)
        # The tensors give the number of heads: with tensor parallelism each worker has a part of them.
        q, k, v = (w(normed).view(batch, length, -1, self.head_dim).transpose(1, 2) for w in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, length, -1))
        normed = self.mlp_norm(x)
        y: torch.Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return y


class Llama(nn.Module):
    def __init__(self, vocab_size: int, width: int = 256, layers: int = 4, heads: int = 8, kv_heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class NextToken(rs.Task):
    max_grad_norm = 1.0

    def __init__(self, vocab_size: int, total_steps: int = 200, **sizes: int) -> None:
        self.vocab_size, self.total_steps, self.sizes = vocab_size, total_steps, sizes

    def build_model(self) -> nn.Module:
        return Llama(self.vocab_size, **self.sizes)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Mapping[str, ParallelStyle]:
        first = dict.fromkeys((f"blocks.*.{name}" for name in ("q", "k", "v", "gate", "up")), ColwiseParallel())
        second = dict.fromkeys(("blocks.*.o", "blocks.*.down"), RowwiseParallel())
        return {
            "tokens": RowwiseParallel(input_layouts=Replicate()),
            **first,
            **second,
            "head": ColwiseParallel(output_layouts=Replicate()),
        }

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
        logits, targets = model(batch[:, :-1]), batch[:, 1:]
        total = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        return rs.Loss(total, targets.numel())

    def lr_scale(self, step: int) -> float:
        return rs.warmup_cosine(step, warmup_steps=20, total_steps=self.total_steps)
