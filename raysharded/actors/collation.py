"""Samples that cannot be made one batch: which, of which microbatch, and why. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from raysharded.actors.explanations import without_tables
from raysharded.errors import TaskError, text_of, user_traceback

_MOST_NAMED = 8


def collation_error(error: BaseException, samples: Sequence[Any], where: str, ids: Sequence[int]) -> TaskError:
    """What is said when `default_collate` raised `error`. `where`: what the samples are; `ids`: their indices."""
    start, text = f"collating {where}, of {_named(ids)},", f"{type(error).__name__}: {without_tables(text_of(error))}"
    return TaskError(f"{start} raised {text}{_cause(samples, ids)}", user_traceback(error))


def _cause(samples: Sequence[Any], ids: Sequence[int]) -> str:
    for sample, index in zip(samples, ids, strict=False):
        for path, value in leaves("", sample):
            if value is None:
                what = f"has None at {path}" if path else "is None"
                return f". Sample {index} {what}: leave it out of the dataset, or give a value that stands for nothing."
    shapes: dict[str, tuple[int, torch.Size]] = {}
    for sample, index in zip(samples, ids, strict=False):
        for path, value in leaves("", sample):
            if isinstance(value, torch.Tensor):
                first, shape = shapes.setdefault(path, (index, value.shape))
                if value.shape != shape:
                    where = f" at {path}" if path else ""
                    return (
                        f". Sample {index} has the shape {tuple(value.shape)}{where} and sample {first} "
                        f"{tuple(shape)}: pad them to one shape in the dataset, or set microbatch_size=1."
                    )
    return ". Samples are tensors, arrays, numbers or text, or dicts, lists and tuples of them, all alike."


def leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What a sample is made of, by where it is."""
    match value:
        case Mapping():
            for key, item in value.items():
                yield from leaves(f"{path}[{key!r}]", item)
        case list() | tuple():
            for place, item in enumerate(value):
                yield from leaves(f"{path}[{place}]", item)
        case _ if hasattr(value, "__array__") and not isinstance(value, torch.Tensor):
            yield path, torch.empty(getattr(value, "shape", ()), device="meta")
        case _:
            yield path, value


def _named(ids: Sequence[int]) -> str:
    named = ", ".join(map(str, ids[:_MOST_NAMED])) + (", ..." if len(ids) > _MOST_NAMED else "")
    return f"sample {named}" if len(ids) == 1 else f"samples {named}"
