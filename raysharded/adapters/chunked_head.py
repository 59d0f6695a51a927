"""A language model's head and loss in chunks of the sequence, so that the logits of one chunk live at a time.

All chunks are parts of one forward of the model, and of one backward: the head's gradient comes once in a microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


@contextmanager
def in_chunks(head: nn.Module, num_chunks: int, loss_of: Callable[..., Any], *given: torch.Tensor) -> Iterator[None]:
    """A context in which the head, called with hidden states `[batch, sequence, ...]`, returns the summed loss.

    `loss_of(head, hidden, *given)`: the summed loss of a chunk. `given`: labels, and what else is cut like the hidden
    states, `[batch, sequence]`. With more than one chunk, backward computes the logits of each again. Raises ValueError
    for a sequence that cannot be cut into so many equal chunks.
    """
    whole = head.forward

    def total(hidden: torch.Tensor) -> Any:
        if num_chunks == 1:
            return loss_of(whole, hidden, *given)
        if hidden.shape[1] % num_chunks:
            raise ValueError(f"a sequence of {hidden.shape[1]} tokens cannot be cut into {num_chunks} equal chunks.")
        chunks = zip(*(each.chunk(num_chunks, dim=1) for each in (hidden, *given)), strict=True)
        return sum(checkpoint(loss_of, whole, *chunk, use_reentrant=False) for chunk in chunks)

    head.forward = total
    try:
        yield
    finally:
        del head.forward  # of this object: that of its class is there again
