"""Loading of a checkpoint into modules, optimizers and nested dicts of tensors, in any layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version

from raysharded.checkpoint.format.manifest import TensorInfo
from raysharded.checkpoint.reader import Checkpoint
from raysharded.checkpoint.sharded_io.coordinator import Coordinator
from raysharded.checkpoint.sharded_io.fill import fill, require_all_well
from raysharded.checkpoint.state_dict import tree
from raysharded.checkpoint.state_dict.load_target import Answers, LoadTarget, above, entries_of, stored_values
from raysharded.checkpoint.state_dict.matching import Chosen, Match, match, renamed_parts, require, without_any_place
from raysharded.checkpoint.state_dict.shared_tensors import apart, overlaps, put_in_place, require_equal
from raysharded.checkpoint.state_dict.staging import torch_dtype
from raysharded.locations import join_url


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
    entries = entries_of(into)
    try:
        target = LoadTarget.of(entries, checkpoint.manifest)
        matched, answers = _match(checkpoint, target, options)
        matched = _of_all_ranks(matched, coordinator)
        require(matched, strict=options.strict, where=join_url(checkpoint.storage.url, checkpoint.prefix))
        untied = apart(matched.found, matched.ties)
        pairs = overlaps(untied)
        wanted = apart(untied, {name for pair in pairs for name in pair})
        fill(checkpoint, wanted, coordinator, group)
        require_equal(wanted, matched.ties)
        put_in_place(wanted, untied, pairs)
        increment_version([target.flat.tensors[one.name] for one in matched.found.values()])  # as after `copy_`
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


def _match(checkpoint: Checkpoint, target: LoadTarget, options: Options) -> tuple[Match, Answers]:
    """The pair (matched tensors, the checkpoint's other contents), in view of this rank alone."""
    tensors, chosen, stored, paths = checkpoint.tensors, options.chosen, checkpoint.manifest.tree, target.paths
    slots = target.slots()
    model = None if stored is None else tree.part_at(stored, ("model",))
    renamed = renamed_parts(slots, tensors, nested=[] if model is None else [""])
    inside: tree.Path = () if model is None or "" not in renamed else ("model",)
    own = {"dict": []} if stored is None else model if inside else stored
    parts = dict(tree.value_parts(target.flat.tree, own, target.may_be_whole))
    known = [*tensors, *(slot.name for slot in slots), *map(tree.name_of, parts)]
    chosen.require_all(known, others=[name for slot in slots for name in slot.names[1:]])
    parts = {path: part for path, part in parts.items() if chosen.takes(tree.name_of(path))}
    told = {} if stored is None else {path: value for path, _, value in tree.leaves(stored)}
    emptied = target.emptied([*parts, *(paths[slot.name] for slot in slots if chosen.takes(*slot.names))], told)
    slots = [slot for slot in slots if not above(paths[slot.name], emptied)]
    parts = {path: part for path, part in parts.items() if not above(path, emptied)}
    numbers = {path: name for path, part in parts.items() if part is None for name in _number(tensors, target, path)}
    values = {path: part for path, part in parts.items() if part is not None}
    values |= {path: {"value": _read_number(checkpoint, name)} for path, name in numbers.items()}
    placed, without_place = stored_values(target, own, inside)
    matched = match(
        slots,
        tensors,
        target.scopes,
        used=numbers.values(),
        without_place=without_place,
        renamed=renamed,
        chosen=chosen,
        cast=options.cast,
    )
    found = [*(paths[held.name] for held in matched.found.values()), *numbers]
    absent = [*(paths[name] for name in matched.missing), *(path for path in parts if path not in values)]
    there = [] if stored is not None else [*found, *absent] if _is_trainers(checkpoint) else found
    matched = replace(
        matched,
        missing=tuple(tree.name_of(path) for path in target.required(absent, there)),
        unfit=(*matched.unfit, *target.differences(told)),
        placed=matched.placed.union(placed),
    )
    return matched, Answers(values=values, emptied=emptied)


def _is_trainers(checkpoint: Checkpoint) -> bool:
    """True for a checkpoint without a tree that raysharded's trainer wrote. Only its workers have generations."""
    return checkpoint.manifest.tree is None and checkpoint.manifest.generation > 0


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


def _number(tensors: Mapping[str, TensorInfo], target: LoadTarget, path: tree.Path) -> list[str]:
    """A list with the zero-dimensional tensor in which the trainer stored the number at a path; [] if there is none."""
    names = (tree.name_of(path), *target.other_names(path))
    return [name for name in names if name in tensors and tensors[name].shape == ()][:1]


def _read_number(checkpoint: Checkpoint, name: str) -> bool | int | float:
    dtype = torch_dtype(checkpoint.manifest.tensors[name].dtype)
    number: bool | int | float = torch.from_numpy(checkpoint.read(name, (), ())).view(dtype).item()
    return number
