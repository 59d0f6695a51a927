"""Changes that a `collate` makes to its samples in place, and that the next read of these samples has, too.

Samples that were made for one read may be changed. Samples that are the dataset's own memory would be others in the
next epoch, but only for the worker that has collated them. So the samples are copied before a call. If the call has
changed them, they are read once more. If that read has the change, batches are made of both, with equal draws: of all
samples, and of each one alone. Equal batches show that the change does not matter, as that of a list which is
padded to a fixed length.
"""

from __future__ import annotations

import copy
import operator
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from raysharded.data.access import generators
from raysharded.data.access.collation import collate_here
from raysharded.data.access.repeat_check import differ
from raysharded.errors import InexactError
from raysharded.ids import derive_seed

_CONSTANT = (int, float, complex, str, bytes, type(None))
_MOST_ALONE = 8
"""Samples of which a batch is made alone."""


def copies_before(samples: Sequence[Any]) -> list[Any]:
    """Copies of samples: of their containers, tensors and arrays, and of objects' attributes. Other objects stay."""
    known: dict[int, Any] = {}
    try:
        return [_copy(sample, known, is_in_object=False) for sample in samples]
    except Exception:  # noqa: BLE001 - the boundary to the user's classes: no change of these samples is seen
        return list(samples)


def are_changed(before: Sequence[Any], samples: Sequence[Any]) -> bool:
    """True if samples differ from their copies."""
    return any(_is_changed(one, other, is_in_object=False) for one, other in zip(before, samples, strict=True))


def require_passing_changes(
    name: str,
    collate: Callable[[list[Any]], Any],
    before: Sequence[Any],
    samples: Sequence[Any],
    again: Callable[[], Sequence[Any]],
    number: int,
) -> None:
    """Raise InexactError if a call of `collate` has changed samples that are read again, and other batches follow.

    `name`: of the function. `before`: `copies_before` of the samples. `again`: reads them once more. `number`: seed of
    the call. The generators stay.
    """
    if not are_changed(before, samples):
        return
    found = again()
    if not are_changed(before, found):
        return
    other = derive_seed(number, "changed samples")  # equal draws would hide a mask that is drawn for each call
    alone = [slice(place, place + 1) for place in range(min(len(before), _MOST_ALONE))]
    with generators.kept():
        for part in (slice(None), *alone):
            one, two = (_batch(collate, copies_before(each[part]), other) for each in (before, found))
            if differ(one, two):
                raise InexactError(
                    f"{name} changes its samples in place, and the dataset has them in its memory: the next epoch "
                    "reads changed ones, on this worker alone. Clone what is changed, as in "
                    'ids = sample["ids"].clone(), or let __getitem__ return copies.'
                )


def _batch(collate: Callable[[list[Any]], Any], samples: list[Any], number: int) -> Any:
    """The batch; the error's type where it cannot be made, as of one sample alone."""
    try:
        return collate_here(collate, samples, number).value
    except Exception as error:  # noqa: BLE001 - the boundary to the user's code
        return type(error).__name__


def _copy(value: Any, known: dict[int, Any], *, is_in_object: bool) -> Any:
    if isinstance(value, _CONSTANT):
        return value
    if id(value) in known:
        return known[id(value)]
    copied = value
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        copied = value.detach().clone().requires_grad_(value.requires_grad) if type(value) is torch.Tensor else value
    elif type(value) is np.ndarray:
        copied = value.copy()
    elif type(value) in (list, tuple):
        is_flat = all(issubclass(kind, _CONSTANT) for kind in set(map(type, value)))
        items = value if is_flat else (_copy(item, known, is_in_object=is_in_object) for item in value)
        copied = type(value)(items)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        copied = type(value)(*(_copy(item, known, is_in_object=is_in_object) for item in value))
    elif isinstance(value, MutableMapping):
        copied = copy.copy(value)
        for key, item in value.items():
            copied[key] = _copy(item, known, is_in_object=is_in_object)
    elif not is_in_object and (attributes := _attributes(value)):  # not those of objects within, which may lead far
        copied = object.__new__(type(value))
        for key, item in attributes.items():
            object.__setattr__(copied, key, _copy(item, known, is_in_object=True))
    known[id(value)] = copied
    return copied


def _is_changed(before: Any, value: Any, *, is_in_object: bool) -> bool:
    if before is value:
        return False
    one, other = _parts(before, is_in_object), _parts(value, is_in_object)
    if one is None or other is None:
        return differ(before, value)
    if list(one) != list(other):
        return True
    if all(map(operator.is_, one.values(), other.values())):  # a list of numbers, in a tenth of the time
        return False
    within = is_in_object or not isinstance(value, (MutableMapping, list, tuple))
    return any(_is_changed(one[key], other[key], is_in_object=within) for key in one)


def _parts(value: Any, is_in_object: bool) -> Mapping[Any, Any] | None:
    if isinstance(value, MutableMapping):
        return value
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    return None if is_in_object else _attributes(value) or None


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object of a plain class of the user's; empty for others."""
    kind = type(value)
    is_plain = kind.__new__ is object.__new__  # type: ignore[comparison-overlap]
    if not is_plain or kind.__module__ == "builtins" or hasattr(kind, "__del__"):
        return {}
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value) if hasattr(value, field.name)}
    return dict(getattr(value, "__dict__", {}))
