"""Train a Llama-like model over bytes with tensor parallelism inside groups of workers and FSDP2 across them.

    raysharded data pack --format text my_texts/ corpus/
    python examples/train_llama.py corpus/ runs/

Each pair of workers computes a microbatch together, each with half of the heads and of the feed-forward's width. Any
worker may be lost: its pair is formed anew from those that are left.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

import raysharded as rs

SEQ_LEN = 128
STEPS = 200


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
        # The number of heads is asked of the tensors: with tensor parallelism each worker has a part of them.
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

    def __init__(self, vocab_size: int, **sizes: int) -> None:
        self.vocab_size, self.sizes = vocab_size, sizes

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
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return rs.Loss(total, targets.numel())

    def lr_scale(self, step: int) -> float:
        return rs.warmup_cosine(step, warmup_steps=20, total_steps=STEPS)


def trainer(corpus: str, runs: str) -> rs.ElasticTrainer:
    data = rs.TokenDataset(corpus, seq_len=SEQ_LEN)
    return rs.ElasticTrainer(
        task=NextToken(data.vocab_size),
        data=data,
        batch=rs.BatchConfig(global_batch_size=16, microbatch_size=2, seed=0),
        scaling=rs.ScalingConfig(
            num_workers=(2, 4), tensor_parallel_degree=2, cpus_per_worker=0.5, use_gpu=torch.cuda.is_available()
        ),
        run=rs.RunConfig(
            name="llama",
            storage_path=runs,
            max_steps=STEPS,
            checkpoint=rs.CheckpointConfig(every_steps=50, keep_last=2),
        ),
    )


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    result = trainer(sys.argv[1], sys.argv[2]).fit()
    print(f"{result.steps} steps, fingerprint {result.fingerprint}, checkpoint {result.checkpoint}")
