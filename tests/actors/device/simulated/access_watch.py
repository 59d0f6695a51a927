"""A dispatch mode that notes which storages each operation reads and writes, on the stream that is current.

Memory counts as the device's, except for page-locked memory. An operation on page-locked memory alone is the host's.
A copy that is not `non_blocking` has ended when it returns: it uses page-locked memory as the host does.
`item()` of a tensor waits for nothing: it may be one of the host's, such as the optimizer's number of steps. The engine
reads numbers of the device through page-locked memory.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.actors.device.simulated.timeline import Timeline

_OF_ENGINE = ("/raysharded/", "/_fully_shard/")


class AccessWatch(TorchDispatchMode):
    """Notes the accesses of the calling thread's operations in a timeline.

    gloo's threads inherit the mode. Their copies are a part of a collective, which counts as a whole.
    """

    def __init__(self, timeline: Timeline) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._timeline, self._thread = timeline, threading.get_ident()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if threading.get_ident() != self._thread or any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # a DTensor first becomes operations on its local tensors
        results = func(*args, **kwargs)
        self._note(func, args, kwargs, results)
        return results

    def _note(self, func: Any, args: Any, kwargs: Any, results: Any) -> None:
        timeline, schema = self._timeline, func._schema
        inputs = dict(_storages((args, kwargs)))
        outputs = dict(_storages(results))
        new = {key: storage for key, storage in outputs.items() if key not in inputs}
        if not inputs and not new:
            return
        what = f"{schema.name.partition('::')[2]} at {place()}"
        if _is_view(schema):
            return
        stream = timeline.current().launch()
        for storage in new.values():
            timeline.allocated(storage, what)
        is_of_host = bool(inputs) and all(map(timeline.is_page_locked, (inputs | new).values()))
        line = None if is_of_host else stream
        written = {key for key, _ in _storages(_written(schema, args, kwargs))} | new.keys()
        if not _marks_writes(schema):
            written |= outputs.keys()
        is_blocking = schema.name == "aten::copy_" and not (args[2:] or (kwargs.get("non_blocking"),))[0]
        for key, storage in (inputs | new).items():
            by_host = is_blocking and timeline.is_page_locked(storage)
            timeline.access(storage, None if by_host else line, what, writes=key in written)


def _storages(values: Any) -> Iterator[tuple[int, torch.UntypedStorage]]:
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.layout == torch.strided:
            storage = value.untyped_storage()
            yield storage._cdata, storage


def _is_view(schema: Any) -> bool:
    return any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns)


def _marks_writes(schema: Any) -> bool:
    """True if the schema has what is written: not for operations of FSDP2 and of collectives that return inputs."""
    return not schema.name.startswith(("fsdp::", "c10d::"))


def _written(schema: Any, args: Any, kwargs: Any) -> list[Any]:
    """Arguments that the operation writes."""
    found = []
    for place, argument in enumerate(schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        marked = argument.alias_info is not None and argument.alias_info.is_write
        if marked or (schema.name.startswith("c10d::") and "input" not in argument.name):
            found.append(value)
    return found


def place() -> str:
    """`file.py:12` of the innermost frame of the engine or of FSDP2."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if any(part in name for part in _OF_ENGINE) and "/tests/" not in name:
            return f"{name.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "the test"
