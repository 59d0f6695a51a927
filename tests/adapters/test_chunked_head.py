"""The loss of a head in chunks: its gradients, and its memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from raysharded.adapters.chunked_head import in_chunks

BATCH, LENGTH, WIDTH, VOCABULARY = 2, 12, 8, 1000


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.head(self.body(inputs))


def loss_of(head: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(head(hidden).flatten(0, 1), labels.flatten(), reduction="sum")


def computed(num_chunks: int) -> tuple[float, list[torch.Tensor], int]:
    """Loss, gradients, and the largest number of elements that the forward has kept for the backward."""
    torch.manual_seed(0)
    model, inputs = Model().double(), torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    labels = torch.randint(VOCABULARY, (BATCH, LENGTH))
    kept: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor), in_chunks(model.head, num_chunks, loss_of, labels):
        loss = model(inputs)
    largest = max(kept)
    loss.backward()
    assert model(inputs).shape == (BATCH, LENGTH, VOCABULARY)  # the head is as it was
    return loss.item(), [param.grad for param in model.parameters() if param.grad is not None], largest


@pytest.mark.parametrize("num_chunks", [2, 3, 12])
def test_chunks_have_the_gradients_of_the_whole_and_keep_no_logits(num_chunks: int) -> None:
    loss, gradients, largest = computed(num_chunks)
    wanted, whole, most = computed(1)
    assert loss == pytest.approx(wanted, rel=1e-12)
    assert len(gradients) == 3
    for one, other in zip(gradients, whole, strict=True):
        torch.testing.assert_close(one, other)
    assert most >= BATCH * LENGTH * VOCABULARY
    assert largest <= BATCH * LENGTH * WIDTH + VOCABULARY * WIDTH


def test_a_sequence_that_cannot_be_cut_is_refused_and_the_head_stays_as_it_is() -> None:
    with pytest.raises(ValueError, match=r"a sequence of 12 tokens cannot be cut into 5 equal chunks"):
        computed(5)
