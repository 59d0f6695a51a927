"""The benchmarks' workload in plain torch, for the peers: their environments have no raysharded.

The same shapes, first weights, samples, dropout and learning rates as `benchmarks.workload`, so that the losses are the
same too, but for the last digits: the order in which a sum is taken differs.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from torch.distributed.fsdp import fully_shard

VOCABULARY = 257
SEQ_LEN = 128
GLOBAL_BATCH_SIZE = 16
MICROBATCH_SIZE = 2
NUM_MICROBATCHES = GLOBAL_BATCH_SIZE // MICROBATCH_SIZE
SEED = 0
DROPOUT = 0.1
LEARNING_RATE = 1e-3
MAX_GRAD_NORM = 1.0
_WARMUP_STEPS, _TOTAL_STEPS, _FINAL_SCALE = 10, 1000, 0.1


class Block(nn.Module):
    """Attention and feed-forward with norms before them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_norm = nn.LayerNorm(width)
        self.feed_in = nn.Linear(width, 4 * width)
        self.feed_out = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + F.dropout(self.attention_out(attended), DROPOUT, self.training)
        hidden = F.gelu(self.feed_in(self.feed_norm(x)))
        return x + F.dropout(self.feed_out(hidden), DROPOUT, self.training)


class GPT(nn.Module):
    """Byte ids [batch, length] to logits [batch, length, vocabulary]."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(SEQ_LEN, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def build_model(layers: int = 6, width: int = 256, heads: int = 4) -> GPT:
    """The model with its first weights; 5M parameters unless another shape is requested."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_seed(SEED, "initial weights"))
        return GPT(layers, width, heads)


def shape(text: str) -> tuple[int, int, int]:
    """Layers, width and heads of `6,256,4`, as the peers' programs take them."""
    layers, width, heads = (int(part) for part in text.split(","))
    return layers, width, heads


def shard(model: GPT) -> GPT:
    """FSDP2 over all processes of the default group: every block, and the remaining modules."""
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices alone."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95))


def learning_rate(step: int) -> float:
    """Learning rate of optimizer step `step`, from 1 on: a warm-up, then a cosine."""
    if step < _WARMUP_STEPS:
        return LEARNING_RATE * (step / _WARMUP_STEPS)
    progress = min(1.0, (step - _WARMUP_STEPS) / (_TOTAL_STEPS - _WARMUP_STEPS))
    return LEARNING_RATE * (_FINAL_SCALE + (1 - _FINAL_SCALE) * 0.5 * (1 + math.cos(math.pi * progress)))


class Samples:
    """The samples of a run, in its order: a table of ids, so that a step's are a function of its number alone."""

    def __init__(self, order: str | Path) -> None:
        """`order`: a file of `benchmarks.workload.write_order`, int64 [samples]."""
        self._order: npt.NDArray[np.int64] = np.load(order, mmap_mode="r")

    def ids(self, step: int, microbatch: int) -> list[int]:
        """Sample ids of logical microbatch `microbatch` (from 0 on) of step `step` (from 1 on)."""
        first = (step - 1) * GLOBAL_BATCH_SIZE + microbatch * MICROBATCH_SIZE
        found: list[int] = self._order[first : first + MICROBATCH_SIZE].tolist()
        if len(found) < MICROBATCH_SIZE:
            raise IndexError(f"step {step} is beyond the {len(self._order)} samples of the order that was written")
        return found

    def load(self, ids: list[int]) -> torch.Tensor:
        """The bytes of these samples, [samples, SEQ_LEN + 1]."""
        return torch.stack([torch.from_numpy(sample(one)) for one in ids])


def sample(index: int) -> npt.NDArray[np.int64]:
    """A random walk over bytes, int64 [SEQ_LEN + 1], a pure function of its index."""
    steps = np.random.default_rng(index).integers(-2, 3, SEQ_LEN + 1)
    return np.asarray(np.cumsum(steps) % 256, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Done:
    """One process's part of a step: the mean loss of its samples, and their ids. NaN and none if it had none."""

    loss: float
    samples: list[int]


def compute(
    model: nn.Module,
    samples: Samples,
    step: int,
    microbatches: list[int],
    *,
    scale: float,
    idle_rounds: int = 0,
) -> Done:
    """Forward and backward of these microbatches of a step: the gradients of `scale` times each one's mean loss add up.

    `idle_rounds`: so many more rounds that count nothing, as FSDP2's collectives need all processes every time.
    """
    ids: list[int] = []
    losses: list[float] = []
    rounds = microbatches + [0] * idle_rounds
    for number, microbatch in enumerate(rounds):
        counts = number < len(microbatches)
        torch.manual_seed(_seed(SEED, "train", step, microbatch))
        own = samples.ids(step, microbatch)
        batch = samples.load(own)
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), batch[:, 1:].reshape(-1))
        (loss * (scale if counts else 0.0)).backward()
        if counts:
            ids += own
            losses.append(loss.item())
    return Done(sum(losses) / len(losses) if losses else math.nan, ids)


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    samples: Samples,
    step: int,
    rank: int,
    world_size: int,
) -> Done:
    """One step of a sharded model (`shard`) at any number of processes: round-robin over the microbatches."""
    own = list(range(rank, NUM_MICROBATCHES, world_size))
    idle = -(-NUM_MICROBATCHES // world_size) - len(own)
    scale = world_size / NUM_MICROBATCHES  # FSDP2 takes the mean over the processes
    done = compute(model, samples, step, own, scale=scale, idle_rounds=idle)
    update(model, optimizer, step)
    return done


def update(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Clip, set the learning rate, take the optimizer's step, clear the gradients."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step)
    optimizer.step()
    optimizer.zero_grad()


def _seed(*parts: int | str) -> int:
    """As `raysharded.ids.derive_seed`."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
