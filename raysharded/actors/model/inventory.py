"""Inventory of a worker's build, item by item, and its comparison with the other workers' inventories.

Workers exchange parts of parameters by place and name, and a wrong sum looks like a right one. So differing models must
be found before training. The comparison covers names, shapes, dtypes, frozen and tied parameters, in order. It covers
values that do not come with the state, modes, and the optimizer's groups. It also covers the first state, which each
worker draws by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from raysharded.actors.comm.host_group import HostGroup
from raysharded.actors.model.constants import Constants, constants_of, refuse_without_memory
from raysharded.actors.model.construction import Construction
from raysharded.actors.numerics.bit_digest import some_of
from raysharded.actors.task_calls.process_state import Left
from raysharded.errors import InexactError
from raysharded.ids import WorkerId
from raysharded.task import Task

Kind: TypeAlias = Literal["parameter", "buffer", "constant", "module", "group", "schedule", "first value"]
_WHOLE_BYTES = 1 << 20
"""A constant of up to this size is compared whole; of a larger one, some elements are."""
_SOME_BYTES = 1 << 15
"""Size up to which a tensor of the first state is compared whole."""
_TEXT_BYTES = 512
"""Bytes of an item's text that workers exchange."""
_ELSEWHERE = "Look for what differs between processes: a generator without a seed, a clock, a file, the environment."
_CAUSES: Mapping[str, str] = {
    "parameter": "A constructor that goes through a set has another order in each process: go through sorted(...).",
    "buffer": _ELSEWHERE,
    "constant": _ELSEWHERE,
    "module": _ELSEWHERE,
    "group": "A group that is made of a set has another order in each process: go through sorted(...).",
    "schedule": "Compute it from the step's number alone: a worker that joins has made no calls before.",
    "first value": _ELSEWHERE,
}


@dataclass(frozen=True, slots=True)
class Item:
    """One built object."""

    kind: Kind
    name: str
    about: str
    """The item's shape, dtype and the like."""
    value: str = ""
    """Digest of the item's values; may be empty."""

    @property
    def text(self) -> str:
        """The item as people read it."""
        value = f", values {self.value}" if self.value else ""
        return f"{self.kind} {self.name!r} ({self.about}{value})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """Results of one build of the model, except its parameters' memory."""

    constants: Constants = field(default_factory=dict)
    items: tuple[Item, ...] = ()
    drew: bool = False
    """True if the constructor moved one of the process's generators."""
    remarks: Mapping[str, str] = field(default_factory=dict)
    """Subject -> the sentence that a user should read once."""
    left: Left = field(default_factory=Left)
    """The process's settings that the constructor left changed."""

    def items_without(self, carried: Collection[str]) -> Iterator[Item]:
        """All items; without the values of the `carried` constants, which come with the state."""
        for item in self.items:
            known = item.kind == "constant" and item.name in carried
            yield Item(item.kind, item.name, item.about) if known else item


def inventory_of(task: Task, built: Construction) -> Inventory:
    """Inventory of a model that is not wrapped yet. Raises TaskError for a constant without memory."""
    constants = constants_of(built.model, with_numbers=built.drew)
    refuse_without_memory(task, constants)
    return Inventory(
        constants=constants,
        items=tuple(_items(built.model, constants)),
        drew=built.drew,
        remarks=built.remarks(task),
        left=built.left,
    )


def _items(model: nn.Module, constants: Constants) -> Iterator[Item]:
    first: dict[int, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(param), name)
        tied = f", tied to {other!r}" if other != name else ""
        yield Item("parameter", name, f"{_kind_of(param)}{'' if param.requires_grad else ', frozen'}{tied}")
    loose = {id(buffer) for module in model.modules() for buffer in _not_persistent(module)}
    for name, buffer in model.named_buffers():
        if id(buffer) not in loose:
            yield Item("buffer", name, _kind_of(buffer))  # its values come with the state
    for name, constant in constants.items():
        if not constant.is_number:
            yield Item("constant", name, _kind_of(constant.value), value_digest(constant.value))
    for name, module in model.named_modules():
        if not module.training:
            yield Item("module", name, "in eval mode")


def _not_persistent(module: nn.Module) -> Iterator[torch.Tensor]:
    for name in module._non_persistent_buffers_set:
        buffer = module._buffers.get(name)
        if buffer is not None:
            yield buffer


def _kind_of(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def first_value(name: str, tensor: torch.Tensor) -> Item:
    """A tensor of the first state as an item, under its name there; of a large one, some elements are compared."""
    return Item("first value", name, _kind_of(tensor), value_digest(tensor, whole_bytes=_SOME_BYTES))


def value_digest(tensor: torch.Tensor, *, whole_bytes: int = _WHOLE_BYTES) -> str:
    """Digest of a tensor's elements: of all if it has up to `whole_bytes`, of some otherwise.

    12 hexadecimal digits; empty for a tensor that has no memory, is not strided, or is quantized.
    """
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_quantized:
        return ""
    large = tensor.numel() * tensor.element_size() > whole_bytes
    some = some_of(tensor) if large else tensor.detach().reshape(-1).resolve_conj().resolve_neg()
    return blake2b(some.cpu().contiguous().view(torch.uint8).numpy().tobytes(), digest_size=6).hexdigest()


def group_items(groups: Iterable[Mapping[str, Any]], names: Mapping[int, str]) -> Iterator[Item]:
    """Items for an optimizer's groups as built. `names`: id of a parameter -> its name."""
    for number, group in enumerate(groups):
        rest = {key: value for key, value in group.items() if key != "params"}
        about = ", ".join(f"{key} {_plain(value)}" for key, value in sorted(rest.items()))
        yield Item("group", f"{number}", about)
        for param in group["params"]:
            yield Item("group", f"{number}", f"parameter {names.get(id(param), '?')!r}")


def _plain(value: Any) -> str:
    """A setting as text that is equal in every process."""
    if isinstance(value, torch.Tensor):
        return str(value.tolist()) if value.numel() < 10 else _kind_of(value)
    if isinstance(value, (list, tuple)):
        return str([_plain(one) for one in value])
    return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def compare(items: Sequence[Item], members: Sequence[WorkerId], task: str, group: HostGroup) -> None:
    """Raise InexactError, on every worker, if the workers' items differ. Every member must call it.

    Costs two all-reduces of one number if they are equal.
    """
    found = find_difference([item.text for item in items], len(members), group)
    if found is None:
        return
    kinds: tuple[Kind, ...] = tuple(item.kind for item in items)
    kind = kinds[min(found.place, len(kinds) - 1)]
    one, other = (f"worker {members[0]}", found.first), (f"worker {members[found.rank]}", found.other)
    raise InexactError(told_apart(task, kind, one, other))


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first place at which the workers' texts differ."""

    place: int
    rank: int
    """Rank of the first worker whose text differs from that of rank 0."""
    first: str
    """The text of rank 0."""
    other: str
    """The text of `rank`."""


def find_difference(texts: Sequence[str], world_size: int, group: HostGroup) -> Difference | None:
    """The first difference between the workers' texts; None if they are equal. Every member must call it."""
    whole = _digest("\n".join(texts))
    if group.max_int(whole) == -group.max_int(-whole):
        return None
    place = _first_difference(texts, group)
    told = _told(texts[place] if place < len(texts) else "nothing", group, world_size)
    rank = next((rank for rank, text in enumerate(told) if text != told[0]), 0)
    return Difference(place=place, rank=rank, first=told[0], other=told[rank])


def told_apart(task: str, kind: str, one: tuple[str, str], other: tuple[str, str]) -> str:
    """Sentence on two processes that built different items, with the usual cause.

    `one`, `other`: (the process's name, the text of its item).
    """
    what = f"{task}.lr_scale" if kind == "schedule" else f"{task}.build_model and build_optimizer"
    things = "learning rates" if kind == "schedule" else "models"
    return (
        f"workers built different {things} with {what}: {one[0]} has {one[1]} where "
        f"{other[0]} has {other[1]}. {_CAUSES.get(kind, _ELSEWHERE)}"
    )


def _first_difference(texts: Sequence[str], group: HostGroup) -> int:
    """The first place at which the workers' texts differ. One must exist."""
    low, high = 0, group.max_int(len(texts))  # the first `low` are equal everywhere, the first `high` are not
    while high - low > 1:
        middle = (low + high) // 2
        own = _digest("\n".join([*texts, *[""] * high][:middle]))
        if group.max_int(own) == -group.max_int(-own):
            low = middle
        else:
            high = middle
    return low


def _told(text: str, group: HostGroup, world_size: int) -> list[str]:
    """Every worker's text, by rank."""
    rows = torch.zeros(world_size, _TEXT_BYTES, dtype=torch.uint8)
    own = text.encode()[:_TEXT_BYTES]
    rows[group.rank, : len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    summed = group.sum_int64(rows.view(torch.int64)).view(torch.uint8)
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in summed]


def _digest(text: str) -> int:
    """A 63-bit digest of a text."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
