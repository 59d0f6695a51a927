"""Plain data as JSON that comes back with its types: numbers, texts, and lists, tuples and dicts (by key) of them.

Where it is allowed, also bytes, arrays and tensors of any shape. Nothing is pickled.
"""

from __future__ import annotations

import base64
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from raysharded.data.access.transport import array_of, tensor_of
from raysharded.errors import TaskError

_NUMPY = (np.bool_, np.integer, np.float16, np.float32, np.float64)
KINDS = ("tuple", "dict", "Counter", "numpy", "tensor", "bytes", "array", "whole tensor")
"""Names of the forms that JSON lacks: each is a dict with this one key."""


AS_THEY_ARE = frozenset((type(None), bool, str, int, float))
"""Types whose values JSON keeps as they are."""


def plain(value: Any, path: str, refusal: str, *, whole: bool = False) -> Any:
    """A value as JSON that `restored` brings back with its types. Raises TaskError for what is not plain data.

    `path`: the way to the value; `refusal`: a sentence about what may be in it, both for the error. `whole`: True to
    take bytes, arrays and tensors, too.
    """
    if type(value) in AS_THEY_ARE or isinstance(value, str):
        return value
    if isinstance(value, _NUMPY):  # its type decides how later products are rounded
        return {"numpy": [value.dtype.name, value.item()]}
    torch = sys.modules.get("torch")
    is_tensor = torch is not None and isinstance(value, torch.Tensor)
    if is_tensor and not value.dim():
        return {"tensor": [str(value.dtype).removeprefix("torch."), value.item()]}
    if isinstance(value, (list, tuple)):
        items = [plain(one, f"{path}[{place}]", refusal, whole=whole) for place, one in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        pairs = [
            [plain(key, path, refusal), plain(one, f"{path}.{key}", refusal, whole=whole)] for key, one in value.items()
        ]
        return {
            "Counter" if isinstance(value, Counter) else "dict": sorted(pairs, key=lambda pair: json.dumps(pair[0]))
        }
    if whole and (is_tensor or isinstance(value, (bytes, bytearray, np.ndarray))):
        return _whole(value, is_tensor=is_tensor)
    kind = type(value).__name__
    shape = f" of shape {list(value.shape)}" if is_tensor else ""
    raise TaskError(f"{kind}{shape} at {path}: {refusal}")


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
    "tuple": lambda items: tuple(restored(one) for one in items),
    "dict": lambda pairs: {restored(key): restored(one) for key, one in pairs},
    "Counter": lambda pairs: Counter({restored(key): one for key, one in pairs}),
    "numpy": lambda pair: np.dtype(pair[0]).type(pair[1]),
    "tensor": lambda pair: _scalar(*pair),
    "bytes": base64.b64decode,
    "array": lambda told: _array(*told),
    "whole tensor": lambda told: tensor_of(
        np.frombuffer(bytearray(base64.b64decode(told[2])), np.uint8), told[0], tuple(told[1])
    ),
}


def restored(value: Any) -> Any:
    """The value that `plain` was given."""
    if isinstance(value, list):
        return [restored(one) for one in value]
    if isinstance(value, dict):
        ((kind, inner),) = value.items()
        return _MAKERS[kind](inner)
    return value
