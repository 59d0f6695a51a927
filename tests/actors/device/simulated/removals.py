"""Calls that order streams, in the engine and in FSDP2, found by the syntax tree, and a way to remove one of them."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from tests.actors.device.simulated.timeline import SimulatedEvent, Timeline

FSDP = "torch.distributed.fsdp._fully_shard"
MODULES = (
    "raysharded.actors.comm.host_group",
    "raysharded.actors.device.cuda",
    "raysharded.actors.device.device_errors",
    "raysharded.actors.device.device_waits",
    "raysharded.actors.reduction.tree_reducer",
    "raysharded.actors.shards.async_copy",
    "raysharded.actors.step.collation",
    f"{FSDP}._fsdp_collectives",
    f"{FSDP}._fsdp_param_group",
    f"{FSDP}._fsdp_state",
)
"""Modules with such calls. A test finds all others of the engine."""
ORDERING = (
    "wait_stream",
    "wait_event",
    "record",
    "record_event",
    "record_stream",
    "keep_for_current_stream",
    "synchronize",
)


_AFTER_COPY_IN = "before it is used the stream waits for the copy-in stream, which has waited for the same"
WITHOUT_EFFECT = {
    "cuda wait_for(self.record(stream))": "nobody uses the sum: the wait shows that the communicator is connected",
    "cuda self.record(stream)": "the same",
    "device_errors here.record(here.current_stream(device))": "nobody uses the sum: the wait shows that the GPU works",
    "_fsdp_param_group self.device_handle.Event().record()": "`record` returns None: nobody has the event",
    "_fsdp_param_group self.comm_ctx.all_gather_stream.wait_event(event)": _AFTER_COPY_IN,
    "_fsdp_state self._comm_ctx.all_gather_stream.wait_stream(current_stream)": _AFTER_COPY_IN,
    "_fsdp_state self._comm_ctx.all_gather_stream.wait_event(all_gather_state.event)": _AFTER_COPY_IN,
    "_fsdp_state self._device_handle.current_stream().wait_event(rs_state.event)": (
        "the stream has waited for what follows the event: each unit's end of its backward"
    ),
}
"""Calls that order nothing that their removal could show, each with the reason."""
NOT_REACHED: dict[str, tuple[str, ...]] = {
    "of CUDA itself, which the simulation replaces": (
        "cuda torch.cuda.synchronize(device)",
        "cuda event.record(stream)",
        "cuda tensor.record_stream(torch.cuda.current_stream(tensor.device))",
    ),
    "of FSDP2's sum over replicas: the engine has its own": (
        "_fsdp_collectives post_reduce_stream.record_event()",
        "_fsdp_collectives all_reduce_stream.wait_stream(reduce_scatter_stream)",
        "_fsdp_collectives all_reduce_stream.wait_stream(current_stream)",
        "_fsdp_collectives all_reduce_stream.record_event()",
        "_fsdp_param_group self.device_handle.current_stream().wait_event(self._post_reduce_event)",
        "_fsdp_param_group self.device_handle.current_stream().wait_event(self._all_reduce_state.event)",
    ),
    "of a backward that is not the last of its step for FSDP2: here each is": (
        "_fsdp_param_group self.device_handle.current_stream().wait_event(self._post_reduce_event)",
    ),
    "of parameters in host memory": (
        "_fsdp_collectives post_reduce_stream.record_event()",
        "_fsdp_param_group fsdp_param.grad_offload_event.synchronize()",
    ),
    "of parameters that are sharded over another mesh after forward": (
        "_fsdp_param_group self._reshard_after_forward_event.record()",
    ),
    "of parameters that are gathered and not used": (
        "_fsdp_param_group torch.accelerator.current_stream().wait_event(event)",
    ),
    "of `reset_iter_state`, after an error: a generation that fails drops its objects": (
        "_fsdp_param_group current_stream.wait_event(event)",
        "_fsdp_param_group current_stream.wait_event(self._post_reduce_event)",
        "_fsdp_param_group current_stream.wait_event(self._all_reduce_state.event)",
        "_fsdp_state current_stream.wait_event(ag_state.event)",
        "_fsdp_state current_stream.wait_event(rs_state.event)",
        "_fsdp_state current_stream.wait_event(event)",
    ),
    "of `set_post_optim_event`": (
        "_fsdp_state self._comm_ctx.all_gather_copy_in_stream.wait_event(event)",
        "_fsdp_state self._comm_ctx.all_gather_stream.wait_event(event)",
    ),
}
"""Use that the engine does not make, or the simulation -> the calls that no run reaches therefore.

A call that stands twice in a module may be here twice, or be reached in its other place."""


@dataclass(frozen=True, slots=True)
class Removal:
    """One call of a method of `ORDERING`, or of `wait_for`."""

    module: str
    line: int
    column: int
    text: str
    end_line: int

    @property
    def why_not_found(self) -> str:
        """Reason why no run can show it; empty if one should."""
        return WITHOUT_EFFECT.get(self.key, "")

    @property
    def key(self) -> str:
        """The module's last name and the call, which do not change with lines."""
        return f"{self.module.rpartition('.')[2]} {self.text}"

    @property
    def name(self) -> str:
        return f"{self.module.rpartition('.')[2]}:{self.line}:{self.column} {self.text}"


def unrecorded() -> SimulatedEvent:
    """An event that orders nothing."""
    return SimulatedEvent(Timeline())


def is_reached(removal: Removal, callers: Collection[tuple[str, int]]) -> bool:
    """True if the call is at one of these files and lines."""
    file = importlib.import_module(removal.module).__file__
    return any(name == file and removal.line <= line <= removal.end_line for name, line in callers)


def newly_unreached(unreached: Iterable[Removal]) -> list[str]:
    """Keys of calls that no run reaches, beyond those of `NOT_REACHED`."""
    known = Counter(key for keys in NOT_REACHED.values() for key in keys)
    return sorted((Counter(removal.key for removal in unreached) - known).elements())


def removals() -> list[Removal]:
    """All, in the order of modules and lines."""
    return [removal for module in MODULES for removal in removals_in(module)]


def removals_in(module: str) -> list[Removal]:
    """All of a module, in the order of its lines."""
    source = _source(module)
    found = [
        Removal(module, node.lineno, node.col_offset, ast.unparse(node), node.end_lineno or 0)
        for node in _ordering_calls(ast.parse(source))
    ]
    return sorted(found, key=lambda one: (one.line, one.column))


def remove(removal: Removal) -> None:
    """Give the function of this process that has the call the code without it."""
    function, code = without(removal)
    function.__code__ = code


def without(removal: Removal) -> tuple[FunctionType, CodeType]:
    """The function that has the call, and its code without it. Raises ValueError if no function has it."""
    module = importlib.import_module(removal.module)
    tree = _Without(removal).visit(ast.parse(_source(removal.module)))
    code = compile(ast.fix_missing_locations(tree), str(module.__file__), "exec", dont_inherit=True)
    for found in _functions(code):
        if found.co_firstlineno <= removal.line <= max(line for *_, line in found.co_lines() if line):
            return _function(module, found.co_qualname), found
    raise ValueError(f"{removal.name}: in no function")


class _Without(ast.NodeTransformer):
    """Removes one call; in its place is None, or an event that was not recorded."""

    def __init__(self, removal: Removal) -> None:
        self._removal = removal

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if (node.lineno, node.col_offset, ast.unparse(node)) != (
            self._removal.line,
            self._removal.column,
            self._removal.text,
        ):
            return self.generic_visit(node)
        gives_event = isinstance(node.func, ast.Attribute) and (
            node.func.attr == "record_event" or (node.func.attr == "record" and node.args)
        )
        text = f"__import__('importlib').import_module({__name__!r}).unrecorded()" if gives_event else "None"
        return ast.copy_location(ast.parse(text, mode="eval").body, node)


def _ordering_calls(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr=name)) if name in ORDERING:
                yield node
            case ast.Call(func=ast.Name(id="wait_for")):
                yield node


@cache
def _source(module: str) -> str:
    return inspect.getsource(importlib.import_module(module))


def _functions(code: CodeType) -> Iterator[CodeType]:
    """Functions of a module and of its classes, without those inside functions."""
    for found in code.co_consts:
        if isinstance(found, CodeType):
            if found.co_flags & inspect.CO_NEWLOCALS:
                yield found
            else:
                yield from _functions(found)


def _function(module: Any, name: str) -> FunctionType:
    found = module
    for part in name.split("."):
        found = vars(found)[part]
    if isinstance(found, property):
        found = found.fget
    found = inspect.unwrap(getattr(found, "__func__", found))
    assert isinstance(found, FunctionType)
    return found
