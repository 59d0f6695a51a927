"""Models whose memory is planned and then measured."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

import raysharded as rs
from raysharded.planning.models.hf_config import LlamaShape
from raysharded.planning.models.llama import Llama
from tests.training.harness import SEQUENCE, VOCABULARY, GptTask


class Odd(nn.Module):
    """Rows that divide by nothing, a parameter of one row, a frozen one, and blocks of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 29)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(29, wide), nn.Tanh(), nn.Linear(wide, 29)) for wide in (7, 101, 53)]
        )
        self.shift = nn.Parameter(torch.zeros(1, 29))
        self.fixed = nn.Parameter(torch.ones(5, 29), requires_grad=False)
        self.head = nn.Linear(29, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * self.fixed.mean(0)
        for block in self.blocks:
            x = x + block(x)
        logits: torch.Tensor = self.head(x + self.shift)
        return logits


class OddTask(GptTask):
    """SGD with momentum."""

    def build_model(self) -> nn.Module:
        return Odd()

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2, momentum=0.9)


TINY_LLAMA = LlamaShape(
    vocabulary=VOCABULARY, width=24, layers=3, heads=4, key_value_heads=2, head_width=6, hidden=52, tied=False
)


class LlamaTask(GptTask):
    """A small Llama-like model."""

    def build_model(self) -> nn.Module:
        return Llama(TINY_LLAMA, max_length=SEQUENCE)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
        logits, targets = model(batch[:, :-1]), batch[:, 1:]
        total = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        return rs.Loss(total, targets.numel())
