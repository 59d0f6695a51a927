"""Plain data as JSON that comes back with its types: numbers, texts, and lists, tuples and dicts (by key) of them.

Where it is allowed, also bytes, arrays and tensors of any shape. Nothing is pickled.
"""

from __future__ import annotations

import base64
import json
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import numpy as np

from raysharded.data.access.transport import array_of, tensor_of
from raysharded.errors import TaskError

_NUMPY = (np.bool_, np.integer, np.float16, np.float32, np.float64)
KINDS = ("tuple", "dict", "Counter", "numpy", "tensor", "bytes", "array", "whole tensor")
"""Names of the forms that JSON lacks: each is a dict with this one key."""


AS_THEY_ARE = frozenset((type(None), bool, str, int, float))
"""Types whose values JSON keeps as they are."""
_COME_BACK = frozenset((np.str_, list, tuple, dict, OrderedDict, Counter, MappingProxyType))
"""Types whose values come back as these, or as the plain values that behave alike."""
_IS_ORDERED = -1
"""First place in the order of an OrderedDict."""


def plain(
    value: Any, path: str, refusal: str, *, whole: bool = False, orders: list[Sequence[int]] | None = None
) -> Any:
    """A value as JSON that `restored` brings back with its types. Raises TaskError for what is not plain data.

    `path`: the way to the value; `refusal`: a sentence about what may be in it, both for the error. `whole`: True to
    take bytes, arrays and tensors, too, and subclasses of the plain types, which come back as these; otherwise they are
    refused. `orders`: if given, entries of dicts are sorted by key, so that the JSON is the same in any order; the
    order that `restored` needs is added for each dict.
    """
    if type(value) in AS_THEY_ARE or (isinstance(value, str) and whole):
        return value
    if not whole and type(value) not in _COME_BACK:
        _refuse_subclass(value, path)
    if isinstance(value, np.str_):
        return str(value)
    if isinstance(value, _NUMPY):  # its type decides how later products are rounded
        return {"numpy": [value.dtype.name, value.item()]}
    torch = sys.modules.get("torch")
    is_tensor = torch is not None and isinstance(value, torch.Tensor)
    if is_tensor and not value.dim():
        return {"tensor": [str(value.dtype).removeprefix("torch."), value.item()]}
    if isinstance(value, (list, tuple)):
        items = [plain(one, f"{path}[{at}]", refusal, whole=whole, orders=orders) for at, one in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        inner: list[list[Sequence[int]] | None] = [None if orders is None else [] for _ in value]
        pairs = [
            [
                key if whole and isinstance(key, str) else plain(key, path, refusal),
                plain(one, f"{path}.{key}", refusal, whole=whole, orders=own),
            ]
            for (key, one), own in zip(value.items(), inner, strict=True)
        ]
        if orders is not None:
            pairs = _sorted(pairs, inner, orders, is_ordered=isinstance(value, OrderedDict))
        return {"Counter" if isinstance(value, Counter) else "dict": pairs}
    if whole and (is_tensor or isinstance(value, (bytes, bytearray, np.ndarray))):
        return _whole(value, is_tensor=is_tensor)
    kind = type(value).__name__
    shape = f" of shape {list(value.shape)}" if is_tensor else ""
    raise TaskError(f"{kind}{shape} at {path}: {refusal}")


def _refuse_subclass(value: Any, path: str) -> None:
    """Raise TaskError for what would come back as an object of another class, and behave otherwise."""
    kind = type(value)
    if isinstance(value, Enum):
        raise TaskError(
            f"{kind.__name__} at {path}: an Enum would come back as its value, which `is` another object. Give its "
            ".value in state_dict(), and make the Enum of it in load_state_dict()."
        )
    kinds: Mapping[type, type] = {str: str, list: list, tuple: tuple, Mapping: dict}
    base = next((base for one, base in kinds.items() if isinstance(value, one)), None)
    if base is not None and kind is not getattr(sys.modules.get("torch"), "Size", None):
        raise TaskError(
            f"{kind.__name__} at {path}: it would come back as a plain {base.__name__}. Give {base.__name__}(...) of "
            f"it in state_dict(), and make the {kind.__name__} of that in load_state_dict()."
        )


def _sorted(
    pairs: list[list[Any]],
    inner: list[list[Sequence[int]] | None],
    orders: list[Sequence[int]],
    *,
    is_ordered: bool,
) -> list[list[Any]]:
    """The entries by the text of their keys. Adds the former place of each one, or no places if none has moved.

    `inner`: the orders of what is in each entry, which are added behind. `is_ordered`: of an OrderedDict, which is
    noted ahead of the places.
    """
    texts, places = [json.dumps(key) for key, _ in pairs], [*range(len(pairs))]
    by_text = sorted(places, key=texts.__getitem__)
    orders.append([*([_IS_ORDERED] if is_ordered else []), *([] if by_text == places else by_text)])
    for place in by_text:
        orders += inner[place] or ()
    return [pairs[place] for place in by_text]


def _whole(value: Any, *, is_tensor: bool) -> Any:
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": base64.b64encode(value).decode()}
    if is_tensor:
        data = array_of(value.detach().cpu()).tobytes()
        return {"whole tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), _text(data)]}
    return {"array": [value.dtype.str, list(value.shape), _text(value.tobytes())]}


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _array(dtype: str, shape: list[int], data: str) -> Any:
    return np.frombuffer(bytearray(base64.b64decode(data)), np.dtype(dtype)).reshape(shape)


def _scalar(dtype: str, value: Any) -> Any:
    import torch

    return torch.tensor(value, dtype=getattr(torch, dtype))


_MAKERS: Mapping[str, Callable[[Any], Any]] = {
    "numpy": lambda pair: np.dtype(pair[0]).type(pair[1]),
    "tensor": lambda pair: _scalar(*pair),
    "bytes": base64.b64decode,
    "array": lambda told: _array(*told),
    "whole tensor": lambda told: tensor_of(
        np.frombuffer(bytearray(base64.b64decode(told[2])), np.uint8), told[0], tuple(told[1])
    ),
}


def restored(value: Any, orders: Iterator[Sequence[int]] | None = None) -> Any:
    """The value that `plain` was given. `orders`: as it has added them; dicts that are missing there stay as stored."""
    if isinstance(value, list):
        return [restored(one, orders) for one in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "tuple":
        return tuple(restored(one, orders) for one in inner)
    if kind not in ("dict", "Counter"):
        return _MAKERS[kind](inner)
    places = () if orders is None else next(orders, ())
    is_ordered = bool(places) and places[0] == _IS_ORDERED
    places = places[1:] if is_ordered else places
    items = [(restored(key), restored(one, orders)) for key, one in inner]
    if places:
        items = [item for _, item in sorted(zip(places, items, strict=True), key=itemgetter(0))]
    return Counter(dict(items)) if kind == "Counter" else OrderedDict(items) if is_ordered else dict(items)
