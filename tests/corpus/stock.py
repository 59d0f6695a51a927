"""Models of transformers from custom configurations: a few thousand to a hundred thousand parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

import raysharded as rs
from tests.corpus.program import Measure, Program, adamw

VOCABULARY, LENGTH = 67, 11


class Stock(rs.Task):
    """Trains a model of transformers from a configuration."""

    max_grad_norm: float | None = 1.0

    def __init__(self, model: str, settings: Mapping[str, Any], measure: Measure, *, whole: bool = False) -> None:
        """`model`: the name of its class; `whole`: no unit but the root."""
        self.model, self.settings, self.measure, self.whole = model, dict(settings), measure, whole

    def build_model(self) -> nn.Module:
        import transformers

        made = getattr(transformers, self.model)
        model: nn.Module = made(made.config_class(**self.settings))
        return model

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return adamw(model)

    def loss(self, model: nn.Module, batch: Any) -> rs.Loss | torch.Tensor:
        return self.measure(model, batch)

    def wrap(self, model: nn.Module) -> list[nn.Module] | None:
        return [] if self.whole else None


def tokens_lost(logits: torch.Tensor, targets: torch.Tensor) -> rs.Loss:
    """The loss of each token that counts."""
    total = F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), ignore_index=-100, reduction="sum")
    return rs.Loss(total, (targets != -100).sum())


def next_token(model: nn.Module, batch: torch.Tensor) -> rs.Loss:
    """Loss of a decoder; every fifth token does not count."""
    targets = batch[:, 1:].masked_fill(batch[:, 1:] % 5 == 0, -100)
    return tokens_lost(model(input_ids=batch[:, :-1]).logits, targets)


def masked_token(model: nn.Module, batch: torch.Tensor, mask: int = 2) -> rs.Loss:
    """Loss of an encoder, with masks drawn here."""
    hidden = torch.rand(batch.shape) < 0.3
    targets = batch.masked_fill(~hidden, -100)
    return tokens_lost(model(input_ids=batch.masked_fill(hidden, mask)).logits, targets)


def second_half(model: nn.Module, batch: torch.Tensor) -> rs.Loss:
    """Loss of an encoder and a decoder: the second half of a text from its first."""
    half = batch.shape[1] // 2
    source, target = batch[:, :half], batch[:, half:]
    return tokens_lost(model(input_ids=source, decoder_input_ids=target[:, :-1]).logits, target[:, 1:])


def stock(
    model: str, settings: Mapping[str, Any], measure: Measure, data: Any, *, whole: bool = False, **others: Any
) -> Callable[[], Program]:
    """A function that makes a program of `Stock`; `others`: settings of the program."""
    return partial(_program, model, settings, measure, data, whole, others)


def _program(
    model: str, settings: Mapping[str, Any], measure: Measure, data: Any, whole: bool, others: Mapping[str, Any]
) -> Program:
    return Program(task=Stock(model, settings, measure, whole=whole), data=data, **others)
