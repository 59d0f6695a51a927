"""Loading of a checkpoint into modules, optimizers and nested dicts of tensors, in any layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raysharded.checkpoint.format.manifest import TensorInfo
from raysharded.checkpoint.reader import Checkpoint
from raysharded.checkpoint.sharded_io.coordinator import Coordinator
from raysharded.checkpoint.sharded_io.fill import fill, require_all_well
from raysharded.checkpoint.state_dict import tree
from raysharded.checkpoint.state_dict.entries import Entry, ModuleEntry, entry_of
from raysharded.checkpoint.state_dict.matching import Chosen, Match, Slot, match, require, without_any_place
from raysharded.checkpoint.state_dict.optimizers import Blank
from raysharded.checkpoint.state_dict.shard_boxes import held_of
from raysharded.checkpoint.state_dict.shared_tensors import apart, overlaps, put_in_place, require_equal
from raysharded.checkpoint.state_dict.staging import torch_dtype
from raysharded.errors import ConfigError
from raysharded.locations import join_url

_EMPTY: tree.Tree = {"dict": []}


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """Result of a load."""

    step: int
    """The optimizer step of the checkpoint."""
    digest: str
    """Digest of the checkpoint."""
    missing: tuple[str, ...]
    """Names of tensors and values in this rank's load target that the checkpoint lacks. They are unchanged."""
    unexpected: tuple[str, ...]
    """Names of tensors and values in the checkpoint that have no place in any rank's load target.

    Parts of its top level that the target lacks are not listed.
    """
    state: Any
    """The load target with the checkpoint's numbers, text and other values. Tensors are the same objects."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Metadata that `save` got besides the state."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Position of the run in its data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Options of a load."""

    chosen: Chosen
    strict: bool
    cast: bool

    def to_json(self) -> dict[str, Any]:
        """The options that all ranks must share, keyed by their names in errors."""
        patterns = self.chosen.patterns
        names = None if patterns is None else list(patterns)
        return {"names": names, "values of strict": self.strict, "values of cast": self.cast}


def load_into(
    checkpoint: Checkpoint, into: Any, options: Options, coordinator: Coordinator, group: dist.ProcessGroup | None
) -> Loaded:
    """Fill `into` from the checkpoint.

    All ranks must call it, in `guarded`. An error of one is an error of all.
    """
    entries = _entries_of(into)
    try:
        target = _Target.of(entries, checkpoint)
        matched, answers = _match(checkpoint, target, options)
        matched = _of_all_ranks(matched, coordinator)
        require(matched, strict=options.strict, where=join_url(checkpoint.storage.url, checkpoint.prefix))
        untied = apart(matched.found, matched.ties)
        pairs = overlaps(untied)
        wanted = apart(untied, {name for pair in pairs for name in pair})
        fill(checkpoint, wanted, coordinator, group)
        require_equal(wanted, matched.ties)
        put_in_place(wanted, untied, pairs)
        state = target.with_answers(answers, [one.name for one in matched.found.values()])
        require_all_well(coordinator)
    except BaseException:
        for entry in entries.values():
            entry.undo()
        raise
    return Loaded(
        step=checkpoint.step,
        digest=checkpoint.digest,
        missing=matched.missing,
        unexpected=matched.unexpected,
        state=state,
        metadata=checkpoint.manifest.metadata,
        data=checkpoint.manifest.data,
    )


def _entries_of(into: Any) -> dict[tree.Path, Entry]:
    """The entries of the load target by key, or one under the empty path."""
    if isinstance(into, nn.Module):
        return {(): ModuleEntry(into)}
    if not isinstance(into, Mapping):
        raise ConfigError(
            f"a {type(into).__qualname__} cannot be loaded into. Give a module, a dict of tensors (nested as it "
            "was saved), or {'model': module, 'optimizer': optimizer}."
        )
    return {(key,): entry_of(into, key) for key in into}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answers:
    """Parts of a checkpoint, other than tensors, that apply to the load target."""

    values: Mapping[tree.Path, tree.Tree]
    emptied: frozenset[tree.Path]
    """Paths that the checkpoint records as empty. The target's contents there are removed."""


@dataclass(frozen=True, slots=True)
class _Target:
    """The load target: its entries by key, or one under the empty path, and the tensors and values in them."""

    entries: Mapping[tree.Path, Entry]
    flat: tree.Flat
    paths: Mapping[str, tree.Path]
    """Paths of the tensors, by name."""

    @staticmethod
    def of(entries: Mapping[tree.Path, Entry], checkpoint: Checkpoint) -> _Target:
        if checkpoint.manifest.tree is not None:
            tree.unflatten(checkpoint.manifest.tree, lambda _: None)  # raises if it is malformed
        states = {path: entry.to_fill(_blank(checkpoint, path)) for path, entry in entries.items()}
        whole = states[()] if () in states else {path[0]: state for path, state in states.items()}
        flat = tree.flatten(whole)
        return _Target(entries, flat, {name: path for path, name, _ in tree.leaves(flat.tree) if name is not None})

    def top(self, path: tree.Path) -> tree.Path:
        """Path of the entry for the tensor or value at the path."""
        return () if () in self.entries else path[:1]

    def other_names(self, path: tree.Path) -> tuple[str, ...]:
        """Names that the trainer would use for the tensor or value at the path."""
        top = self.top(path)
        return self.entries[top].other_names(top, tree.name_of(path[len(top) :]))

    def may_be_whole(self, path: tree.Path) -> bool:
        """True if a part at the path, without tensors, is taken as it was stored."""
        top = self.top(path)
        return top in self.entries and len(path) >= len(top) + self.entries[top].levels

    def is_optional(self, path: tree.Path, without_tree: Collection[tree.Path] = ()) -> bool:
        """True if the checkpoint and the target need not both have the value at the path.

        `without_tree`: paths of the entries of which a checkpoint without a tree has tensors.
        """
        top = self.top(path)
        return self.entries[top].is_optional(path[len(top) :], without_tree=top in without_tree)

    def slots(self) -> list[Slot]:
        return [
            _slot(tree.name_of(self.top(self.paths[name])), tensor, (name, *self.other_names(self.paths[name])))
            for name, tensor in self.flat.tensors.items()
        ]

    @property
    def scopes(self) -> list[str]:
        """Names of the checkpoint's parts that the target covers; "" for all of it."""
        return [tree.name_of(path) for path in self.entries]

    def with_answers(self, answers: _Answers, found: Sequence[str]) -> Any:
        """The target's state with the answers in place of its parts. `found` names the tensors that were filled."""
        state = tree.unflatten(tree.replaced(self.flat.tree, answers.values), self.flat.tensors.__getitem__)
        names = set(found)
        filled = [*answers.values, *(path for name, path in self.paths.items() if name in names)]

        if () in self.entries:
            return self.entries[()].apply(state, filled, answers.emptied)
        inside, emptied = _by_key(filled), _by_key(answers.emptied)
        return {
            key: self.entries[key,].apply(value, inside.get(key, []), set(emptied.get(key, [])))
            for key, value in state.items()
        }


def _blank(checkpoint: Checkpoint, entry: tree.Path) -> Blank:
    """A function that makes blank copies of the checkpoint's contents for the entry at a path."""
    manifest = checkpoint.manifest

    def blank(path: tree.Path, device: torch.device) -> Any:
        def make(name: str) -> torch.Tensor:
            info = manifest.tensors[name]
            return torch.empty(info.shape, dtype=torch_dtype(info.dtype), device=device)

        if manifest.tree is None:
            return None
        part = tree.part_at(manifest.tree, (*entry, *path))
        return None if part is None else tree.unflatten(part, make)

    return blank


def _by_key(paths: Iterable[tree.Path]) -> dict[tree.Key, list[tree.Path]]:
    """Map from each first key to the rests of the paths that begin with it."""
    found: dict[tree.Key, list[tree.Path]] = defaultdict(list)
    for key, *rest in paths:
        found[key].append(tuple(rest))
    return found


def _match(checkpoint: Checkpoint, target: _Target, options: Options) -> tuple[Match, _Answers]:
    """The pair (matched tensors, the checkpoint's other contents), in view of this rank alone."""
    tensors, chosen, stored, paths = checkpoint.tensors, options.chosen, checkpoint.manifest.tree, target.paths
    slots = target.slots()
    parts = dict(tree.value_parts(target.flat.tree, _EMPTY if stored is None else stored, target.may_be_whole))
    known = [*tensors, *(slot.name for slot in slots), *map(tree.name_of, parts)]
    chosen.require_all(known, others=[name for slot in slots for name in slot.names[1:]])
    parts = {path: part for path, part in parts.items() if chosen.takes(tree.name_of(path))}
    told = {} if stored is None else {path: value for path, _, value in tree.leaves(stored)}
    empty = {path for key, entry in target.entries.items() for path in entry.left_out(key, told)}
    wanted = [*parts, *(paths[slot.name] for slot in slots if chosen.takes(*slot.names))]
    emptied = frozenset(found for path in wanted for found in _above(path, empty))
    slots = [slot for slot in slots if not _above(paths[slot.name], emptied)]
    parts = {path: part for path, part in parts.items() if not _above(path, emptied)}
    numbers = {path: name for path, part in parts.items() if part is None for name in _number(tensors, target, path)}
    values = {path: part for path, part in parts.items() if part is not None}
    values |= {path: {"value": _read_number(checkpoint, name)} for path, name in numbers.items()}
    placed, without_place = _stored_values(target, stored)
    matched = match(
        slots,
        tensors,
        target.scopes,
        used=numbers.values(),
        without_place=without_place,
        nested=[""] if _is_model_inside(stored) else [],
        chosen=chosen,
        cast=options.cast,
    )
    absent = [*(paths[name] for name in matched.missing), *(path for path in parts if path not in values)]
    found = {target.top(path) for path in (*(paths[held.name] for held in matched.found.values()), *numbers)}
    needed = (path for path in absent if not target.is_optional(path, found if stored is None else ()))
    differences = [said for key, entry in target.entries.items() for said in entry.differences(key, told)]
    matched = replace(
        matched,
        missing=tuple(map(tree.name_of, needed)),
        unfit=(*matched.unfit, *differences),
        placed=matched.placed.union(placed),
    )
    return matched, _Answers(values=values, emptied=emptied)


def _stored_values(target: _Target, stored: tree.Tree | None) -> tuple[list[str], list[str]]:
    """The names of a checkpoint's values (that have a place in the target, that have none).

    Values in parts that the target lacks have neither, and those of which it may lack any have a place.
    """
    if stored is None:
        return [], []
    inside = [path for path, name, _ in tree.leaves(stored) if name is None and target.top(path) in target.entries]
    without = set(tree.values_without_place(target.flat.tree, stored, target.may_be_whole))
    without = {path for path in without if target.top(path) in target.entries and not target.is_optional(path)}
    names = [(tree.name_of(path), path in without) for path in inside]
    return [name for name, is_without in names if not is_without], [name for name, is_without in names if is_without]


def _is_model_inside(stored: tree.Tree | None) -> bool:
    """True if the checkpoint has a dict under "model", as that of {"model": module}."""
    return stored is not None and "dict" in (tree.part_at(stored, ("model",)) or ())


def _of_all_ranks(matched: Match, coordinator: Coordinator) -> Match:
    """The match with the unexpected names of all ranks for which no rank has a place. All ranks must call it."""
    suspects = coordinator.gather(list(matched.unexpected))
    names = None if suspects is None else without_any_place(suspects, ())
    named = coordinator.scatter(None if names is None else [names] * coordinator.world_size)
    if not named:
        return matched
    placed = coordinator.gather([name for name in named if name in matched.placed])
    left = None if placed is None else without_any_place([named], placed)
    return replace(
        matched, unexpected=tuple(coordinator.scatter(None if left is None else [left] * coordinator.world_size))
    )


def _above(path: tree.Path, places: AbstractSet[tree.Path]) -> list[tree.Path]:
    """The places that are equal to the path or above it."""
    return [path[:depth] for depth in range(len(path) + 1) if path[:depth] in places] if places else []


def _slot(part: str, tensor: torch.Tensor, names: tuple[str, ...]) -> Slot:
    held = held_of(names[0], tensor)
    local = held.local
    begin = (local.untyped_storage()._cdata, local.storage_offset(), tuple(local.shape), local.stride())
    memory = (begin, local.dtype, local.is_conj(), local.is_neg(), held.shape, held.parts)
    return Slot(names=names, part=part, held=held, memory=memory)


def _number(tensors: Mapping[str, TensorInfo], target: _Target, path: tree.Path) -> list[str]:
    """A list with the zero-dimensional tensor in which the trainer stored the number at a path; [] if there is none."""
    names = (tree.name_of(path), *target.other_names(path))
    return [name for name in names if name in tensors and tensors[name].shape == ()][:1]


def _read_number(checkpoint: Checkpoint, name: str) -> bool | int | float:
    dtype = torch_dtype(checkpoint.manifest.tensors[name].dtype)
    number: bool | int | float = torch.from_numpy(checkpoint.read(name, (), ())).view(dtype).item()
    return number
