"""A small GPT over bytes, as a raysharded task."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from raysharded.task import Loss, Task, warmup_cosine

VOCABULARY = 257
"""256 bytes, and the end-of-document token."""


class Block(nn.Module):
    """Pre-norm attention and feed-forward; [batch, length, width] in and out."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
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
        x = x + F.dropout(self.attention_out(attended), self.dropout, self.training)
        hidden = F.gelu(self.feed_in(self.feed_norm(x)))
        return x + F.dropout(self.feed_out(hidden), self.dropout, self.training)


class GPT(nn.Module):
    """Token ids [batch, length] to logits [batch, length, vocabulary]; input and output embeddings are tied."""

    def __init__(self, layers: int, width: int, heads: int, seq_len: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(seq_len, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
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


class ByteGPT(Task):
    """Next-byte prediction with AdamW, warm-up and cosine; weight decay on matrices only."""

    max_grad_norm = 1.0

    def __init__(
        self,
        *,
        layers: int = 6,
        width: int = 256,
        heads: int = 4,
        seq_len: int = 128,
        dropout: float = 0.1,
        lr: float = 1e-3,
        warmup_steps: int = 10,
        total_steps: int = 1000,
    ) -> None:
        self.shape = (layers, width, heads, seq_len, dropout)
        self.lr = lr
        self.warmup_steps = warmup_steps
        self.total_steps = total_steps

    def build_model(self) -> nn.Module:
        return GPT(*self.shape)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        vectors = [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95))

    def loss(self, model: nn.Module, batch: torch.Tensor) -> Loss:
        logits, targets = model(batch[:, :-1]), batch[:, 1:]
        total = F.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1), reduction="sum")
        return Loss(total, targets.numel())

    def lr_scale(self, step: int) -> float:
        return warmup_cosine(step, warmup_steps=self.warmup_steps, total_steps=self.total_steps)
