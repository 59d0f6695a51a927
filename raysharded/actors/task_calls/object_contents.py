"""Contents of an object, such as an optimizer with its hooks or a model: walked through, and restored after a trial.

The walk follows containers, attributes, closures of functions, and owners of bound methods. It does not follow modules'
own machinery, classes, and objects of libraries that communicate with others (loggers, threads, trackers).
"""

from __future__ import annotations

import random
import types
from collections import deque
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

_PLAIN = (bool, int, float, complex, str, bytes, type, type(None), types.ModuleType, types.CodeType, torch.dtype)
_LEFT_ALONE = frozenset(
    (
        *("_io", "_thread", "asyncio", "concurrent", "io", "logging", "multiprocessing", "queue", "socket", "ssl"),
        *("subprocess", "threading", "comet_ml", "mlflow", "neptune", "ray", "tensorboard", "tensorboardX", "wandb"),
    )
)
"""Packages whose objects may be in use elsewhere."""
_OF_TORCH_LEFT_ALONE = ("torch.distributed", "torch._C", "torch.utils.tensorboard", "torch.cuda")
_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every module has."""
_MOST_OBJECTS = 20_000
_MOST_BYTES = 64 << 20
"""Most bytes of one tensor or array that is copied: larger ones are data, or separate models."""
_MOST_BYTES_IN_ALL = 256 << 20


class NotFollowed:
    """Base of objects that are skipped, with all that they hold."""


def reachable(
    root: object, *, most: int = _MOST_OBJECTS, without: Collection[object] = (), numbers: Collection[int] = ()
) -> Iterator[tuple[str, object]]:
    """Everything that an object holds, itself first, each once, with its path as written in Python.

    Of more than `most` objects only the nearest are returned. Numbers, texts and the like are left out, besides the
    integers in `numbers`. So are the objects in `without`, with what they hold.
    """
    left: deque[tuple[str, object]] = deque([("", root)])
    seen: dict[int, object] = {id(one): one for one in without}
    most += len(seen)
    while left and len(seen) < most:
        path, found = left.popleft()
        if id(found) in seen or _is_skipped(found, numbers) or _is_left_alone(found):
            continue
        seen[id(found)] = found
        yield path, found
        left.extend((path + step, one) for step, one in _held_by(found) if not _is_skipped(one, numbers))


def _is_skipped(found: object, numbers: Collection[int]) -> bool:
    return isinstance(found, _PLAIN) and (type(found) is not int or found not in numbers)


def own_attributes(module: nn.Module) -> dict[str, object]:
    """Attributes and forward hooks of a module, without its parameters, buffers and modules."""
    own = {name: one for name, one in vars(module).items() if name not in _OF_MODULES}
    hooks = {name: list(vars(module)[name].values()) for name in ("_forward_pre_hooks", "_forward_hooks")}
    return own | {name: held for name, held in hooks.items() if held}


def _is_left_alone(found: object) -> bool:
    if isinstance(found, NotFollowed):
        return True
    name = type(found).__module__ or ""
    if name.partition(".")[0] in _LEFT_ALONE:
        return True
    return name.startswith(_OF_TORCH_LEFT_ALONE) and not isinstance(found, (torch.Tensor, nn.Module, torch.Generator))


def is_in_use_elsewhere(found: object) -> bool:
    """True for an object that a thread may use: it is one of such a package, inherits from one, or holds one."""
    held = getattr(found, "__dict__", {}).values()
    return any(_is_left_alone(one) for one in (found, *held)) or any(
        (base.__module__ or "").partition(".")[0] in _LEFT_ALONE for base in type(found).__mro__
    )


def _held_by(found: object) -> Iterator[tuple[str, object]]:
    match found:
        case torch.Tensor() | np.ndarray():
            return
        case dict():
            yield from ((f"[{key!r}]" if isinstance(key, (str, int)) else "[...]", one) for key, one in found.items())
        case list() | tuple() | deque():
            yield from ((f"[{place}]", one) for place, one in enumerate(found))
        case set() | frozenset():
            yield from (("", one) for one in found)
        case partial():
            yield from (("", one) for one in (found.func, *found.args, *found.keywords.values()))
        case types.MethodType():
            yield from (("", found.__func__), ("", found.__self__))
        case types.BuiltinMethodType() | types.MethodWrapperType():  # such as `held.items` of a dict
            yield "", found.__self__
        case types.FunctionType():
            yield from (
                (f".{name}", cell) for name, cell in zip(found.__code__.co_freevars, _cells(found), strict=True)
            )
            yield from (("", one) for one in (found.__defaults__, found.__kwdefaults__, found.__dict__))
        case types.CellType():
            yield from (("", one) for one in _contents(found))
        case nn.Module():
            yield from ((f".{name}", one) for name, one in found.named_parameters(recurse=False))
            yield from ((f".{name}", one) for name, one in found.named_buffers(recurse=False))
            yield from ((f".{name}", one) for name, one in found.named_children())
            yield from ((f".{name}", one) for name, one in vars(found).items() if name not in _OF_MODULES)
            for kind in ("_forward_pre_hooks", "_forward_hooks"):
                hooks = vars(found)[kind].values()
                yield from ((f".{kind}[{place}]", hook) for place, hook in enumerate(hooks))
            return
    if hasattr(found, "__dict__") and not isinstance(found, (types.FunctionType, types.MethodType)):
        yield from ((f".{name}", one) for name, one in vars(found).items())
    for name in _slots_of(found):
        if hasattr(found, name):
            yield f".{name}", getattr(found, name)


def _cells(function: types.FunctionType) -> tuple[types.CellType, ...]:
    return function.__closure__ or ()


def _contents(cell: types.CellType) -> Iterator[object]:
    try:
        yield cell.cell_contents
    except ValueError:  # an empty cell
        return


def _slots_of(found: object) -> tuple[str, ...]:
    names: list[str] = []
    for base in type(found).__mro__:
        slots = vars(base).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return tuple(name for name in names if not name.startswith("__"))


class NumberPlace(NamedTuple):
    """A place that holds a whole number: an attribute, an element of a dict or a list, or a closure's variable."""

    get: Callable[[], object]
    """The number; another object, or an error, once the place has changed."""
    put: Callable[[int], None]

    def value(self) -> int | None:
        """The number now; None if there is none."""
        try:
            found = self.get()
        except (AttributeError, LookupError, ValueError):
            return None
        return found if type(found) is int else None


def number_places(root: object, *, without: Collection[object] = ()) -> list[NumberPlace]:
    """The places of all whole numbers that can be reached from an object. `without`: objects to skip, with what they
    hold."""
    places: list[NumberPlace] = []
    found: Any
    for _, found in reachable(root, without=without):
        keys: Collection[Any] = ()
        match found:
            case dict():
                keys = found.keys()
            case list() | deque():
                keys = range(len(found))
        places += [NumberPlace(partial(found.__getitem__, key), partial(found.__setitem__, key)) for key in keys]
        in_cell = ("cell_contents",) if isinstance(found, types.CellType) else ()
        attributes = [*(_attributes_of(found) or ()), *_slots_of(found), *in_cell]
        places += [NumberPlace(partial(getattr, found, one), partial(setattr, found, one)) for one in attributes]
    return [place for place in places if place.value() is not None]


class SavedContents:
    """Contents of everything that can be reached from an object, which can be restored repeatedly.

    Excluded are tensors in `without`, and tensors and arrays of more than 64 MB, or beyond 256 MB in all. So is what an
    object of another library hides from Python. Unchanged containers are not written to: others may use them.
    """

    def __init__(self, root: object, *, without: Collection[torch.Tensor] = ()) -> None:
        left_out = {id(tensor) for tensor in without}
        self._restores: list[Callable[[], None]] = []
        left_bytes = _MOST_BYTES_IN_ALL
        for _, found in reachable(root):
            size = _bytes_of(found)
            if id(found) not in left_out and size <= min(_MOST_BYTES, left_bytes):
                left_bytes -= size
                restore = _restoring(found)
                if restore is not None:
                    self._restores.append(restore)

    def put_back(self) -> None:
        """Restore the contents of everything."""
        for restore in self._restores:
            restore()


def _restoring(found: object) -> Callable[[], None] | None:
    """A function that restores an object's own contents, not those of what it holds; None for what cannot change."""
    match found:
        case torch.Tensor():
            is_written = not found.is_meta and not any(s == 0 < n - 1 for n, s in _sizes_and_strides(found))
            return partial(_fill, found, found.detach().clone()) if is_written else None
        case np.ndarray():
            return partial(found.__setitem__, ..., found.copy()) if found.flags.writeable else None
        case torch.Generator():
            return partial(_set_generator, found, found.get_state())
        case random.Random():
            return partial(found.setstate, found.getstate())
        case np.random.Generator():
            return partial(setattr, found.bit_generator, "state", found.bit_generator.state)
        case dict():
            return partial(_put_items, found, dict(found), _attributes_of(found))
        case list() | deque():
            return partial(_put_elements, found, list(found))
        case set():
            return partial(_put_members, found, set(found))
        case types.CellType():
            return partial(_put_in_cell, found, list(_contents(found)))
        case nn.Module():
            return partial(_put_in_module, found, dict(vars(found)), dict(found._buffers))
        case _:
            kept = _attributes_of(found)
            slots = {name: getattr(found, name) for name in _slots_of(found) if hasattr(found, name)}
            return partial(_put_attributes, found, kept, slots) if kept is not None or slots else None


def _attributes_of(found: object) -> dict[str, Any] | None:
    return dict(vars(found)) if hasattr(found, "__dict__") and not isinstance(found, types.MethodType) else None


def _bytes_of(found: object) -> int:
    match found:
        case torch.Tensor():
            return found.numel() * found.element_size()
        case np.ndarray():
            return found.nbytes
        case _:
            return 0


def _sizes_and_strides(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    return zip(tensor.shape, tensor.stride(), strict=True) if tensor.layout is torch.strided else iter(())


def _fill(tensor: torch.Tensor, values: torch.Tensor) -> None:
    if tensor.shape != values.shape:
        tensor.data = values.clone()
    else:
        tensor.detach().copy_(values)


def _set_generator(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


def _put_items(found: dict[Any, Any], items: dict[Any, Any], attributes: dict[str, Any] | None) -> None:
    if not _are_the_same(found, items):
        found.clear()
        found.update(items)
    if attributes is not None:
        _put_attributes(found, attributes, {})


def _are_the_same(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    """True for the same objects under the same keys, in the same order."""
    return list(now) == list(before) and all(now[key] is value for key, value in before.items())


def _put_elements(found: list[Any] | deque[Any], elements: list[Any]) -> None:
    if len(found) != len(elements) or any(one is not other for one, other in zip(found, elements, strict=True)):
        found.clear()
        found.extend(elements)


def _put_members(found: set[Any], members: set[Any]) -> None:
    if found != members:
        found.clear()
        found.update(members)


def _put_in_cell(cell: types.CellType, contents: list[Any]) -> None:
    if contents:
        cell.cell_contents = contents[0]


def _put_in_module(module: nn.Module, attributes: dict[str, Any], buffers: dict[str, Any]) -> None:
    _put_attributes(module, attributes, {})
    if not _are_the_same(module._buffers, buffers):
        module._buffers.clear()
        module._buffers.update(buffers)


def _put_attributes(found: object, attributes: dict[str, Any] | None, slots: dict[str, Any]) -> None:
    if attributes is not None and not _are_the_same(vars(found), attributes):
        vars(found).clear()
        vars(found).update(attributes)
    for name, value in slots.items():
        object.__setattr__(found, name, value)
