"""Load targets: a state taken apart into entries, with the tensors and values to be filled, and put together again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from raysharded.checkpoint.format.manifest import Manifest
from raysharded.checkpoint.state_dict import tree
from raysharded.checkpoint.state_dict.entries import Entry, ModuleEntry, entry_of
from raysharded.checkpoint.state_dict.matching import Slot
from raysharded.checkpoint.state_dict.optimizers import Blank
from raysharded.checkpoint.state_dict.shard_boxes import held_of
from raysharded.checkpoint.state_dict.staging import torch_dtype
from raysharded.errors import ConfigError


def entries_of(into: Any) -> dict[tree.Path, Entry]:
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
class Answers:
    """Parts of a checkpoint, other than tensors, that apply to the load target."""

    values: Mapping[tree.Path, tree.Tree]
    emptied: frozenset[tree.Path]
    """Paths that the checkpoint records as empty. The target's contents there are removed."""


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """The load target: its entries by key, or one under the empty path, and the tensors and values in them."""

    entries: Mapping[tree.Path, Entry]
    flat: tree.Flat
    paths: Mapping[str, tree.Path]
    """Paths of the tensors, by name."""

    @staticmethod
    def of(entries: Mapping[tree.Path, Entry], manifest: Manifest) -> LoadTarget:
        """The target for a load of a checkpoint. Raises CorruptCheckpoint if the checkpoint's tree is malformed."""
        if manifest.tree is not None:
            tree.unflatten(manifest.tree, lambda _: None)
        states = {path: entry.to_fill(_blank(manifest, path)) for path, entry in entries.items()}
        whole = states[()] if () in states else {path[0]: state for path, state in states.items()}
        flat = tree.flatten(whole)
        return LoadTarget(entries, flat, {name: path for path, name, _ in tree.leaves(flat.tree) if name is not None})

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

    def is_optional(self, path: tree.Path, *, without_tree: bool = False) -> bool:
        """As the entry's, for a path in the target."""
        top = self.top(path)
        return self.entries[top].is_optional(path[len(top) :], without_tree=without_tree)

    def required(self, absent: Iterable[tree.Path], without_tree: Iterable[tree.Path]) -> list[tree.Path]:
        """Those of the paths that a checkpoint lacks, `absent`, that it must have.

        `without_tree`: paths in the entries that it has, if it has no tree.
        """
        there = {self.top(path) for path in without_tree}
        return [path for path in absent if not self.is_optional(path, without_tree=self.top(path) in there)]

    def emptied(self, wanted: Iterable[tree.Path], stored: Mapping[tree.Path, Any]) -> frozenset[tree.Path]:
        """Paths at or above the wanted ones at which the checkpoint records that there is nothing.

        `stored`: the checkpoint's leaves by path.
        """
        empty = {path for key, entry in self.entries.items() for path in entry.left_out(key, stored)}
        return frozenset(found for path in wanted for found in above(path, empty))

    def differences(self, stored: Mapping[tree.Path, Any]) -> list[str]:
        """Sentences on why the checkpoint's values, by path, do not fit."""
        return [said for key, entry in self.entries.items() for said in entry.differences(key, stored)]

    def slots(self) -> list[Slot]:
        return [
            _slot(tree.name_of(self.top(self.paths[name])), tensor, (name, *self.other_names(self.paths[name])))
            for name, tensor in self.flat.tensors.items()
        ]

    @property
    def scopes(self) -> list[str]:
        """Names of the checkpoint's parts that the target covers; "" for all of it."""
        return [tree.name_of(path) for path in self.entries]

    def with_answers(self, answers: Answers, found: Sequence[str]) -> Any:
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


def stored_values(target: LoadTarget, stored: tree.Tree, inside: tree.Path) -> tuple[list[str], list[str]]:
    """The names of values in a checkpoint's tree: (those with a place in the target, those without).

    `inside`: path of `stored` in the whole tree. Values in parts that the target lacks are in neither; those that it
    may lack have a place.
    """
    paths = [path for path, name, _ in tree.leaves(stored) if name is None and target.top(path) in target.entries]
    without = set(tree.values_without_place(target.flat.tree, stored, target.may_be_whole))
    without = {path for path in paths if path in without and not target.is_optional(path)}
    placed = [path for path in paths if path not in without]
    return [tree.name_of((*inside, *p)) for p in placed], [tree.name_of((*inside, *p)) for p in paths if p in without]


def _blank(manifest: Manifest, entry: tree.Path) -> Blank:
    """A function that makes blank copies of the checkpoint's contents for the entry at a path."""

    def blank(path: tree.Path, device: torch.device) -> Any:
        def make(name: str) -> torch.Tensor:
            info = manifest.tensors[name]
            return torch.empty(info.shape, dtype=torch_dtype(info.dtype), device=device)

        if manifest.tree is None:
            return None
        part = tree.part_at(manifest.tree, (*entry, *path))
        return None if part is None else tree.unflatten(part, make)

    return blank


def _slot(part: str, tensor: torch.Tensor, names: tuple[str, ...]) -> Slot:
    held = held_of(names[0], tensor)
    local = held.local
    begin = (local.untyped_storage()._cdata, local.storage_offset(), tuple(local.shape), local.stride())
    memory = (begin, local.dtype, local.is_conj(), local.is_neg(), held.shape, held.parts)
    return Slot(names=names, part=part, held=held, memory=memory)


def _by_key(paths: Iterable[tree.Path]) -> dict[tree.Key, list[tree.Path]]:
    """Map from each first key to the rests of the paths that begin with it."""
    found: dict[tree.Key, list[tree.Path]] = defaultdict(list)
    for key, *rest in paths:
        found[key].append(tuple(rest))
    return found


def above(path: tree.Path, places: AbstractSet[tree.Path]) -> list[tree.Path]:
    """The places that are equal to the path or above it."""
    return [path[:depth] for depth in range(len(path) + 1) if path[:depth] in places] if places else []
