"""Errors of a broken process group, told from those of a task's code, which may have wrapped them. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from raysharded.errors import CollectiveAborted, text_of


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and all that it was raised from or because of: a task may wrap what its model raises."""
    left, seen = [error], set[int]()
    while left:
        found = left.pop()
        if id(found) not in seen:
            seen.add(id(found))
            yield found
            left += [cause for cause in (found.__context__, found.__cause__) if cause is not None]


def is_collective_failure(error: BaseException) -> bool:
    """Whether an error comes from a broken process group, however the task wrapped it."""
    return any(_is_of_a_collective(cause) for cause in causes(error))


def _is_of_a_collective(error: BaseException) -> bool:
    """gloo gives plain RuntimeErrors, others DistErrors."""
    if isinstance(error, (CollectiveAborted, torch.distributed.DistError)):
        return True
    return isinstance(error, RuntimeError) and "third_party/gloo" in text_of(error)  # gloo names its source line
