"""Matching of a checkpoint's tensors to the tensors to be filled, and the differences. Pure."""

from __future__ import annotations

import difflib
import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from raysharded.checkpoint.format.manifest import TensorInfo
from raysharded.checkpoint.state_dict.shard_boxes import Held
from raysharded.errors import CheckpointError, ConfigError

_MOST_SHOWN = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """A tensor to be filled."""

    names: tuple[str, ...]
    """Possible names in the checkpoint. The first is the name in the load target."""
    part: str
    """Name of the part of the load target that it belongs to. All tensors of a part have their first names in the
    checkpoint, or all have one of the others."""
    held: Held
    memory: object
    """Identity of the memory, equal for two slots that are one tensor under two names."""

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """The tensors that fit, by the checkpoint's names, and the differences."""

    found: dict[str, Held]
    ties: Mapping[str, str] = field(default_factory=dict)
    """Map from a name in `found` to the one before it that is the same tensor in the load target."""
    missing: tuple[str, ...] = ()
    """Names to be filled that the checkpoint lacks."""
    unexpected: tuple[str, ...] = ()
    """Names of tensors and values in the checkpoint that have no place in the load target."""
    placed: frozenset[str] = frozenset()
    """Names of tensors and values in the checkpoint that have a place in it."""
    unfit: tuple[str, ...] = ()
    """Sentences about differences of shape or structure, and about complex numbers without a place."""
    unconverted: tuple[str, ...] = ()
    """Sentences about differences of dtype."""


def match(
    slots: Sequence[Slot],
    tensors: Mapping[str, TensorInfo],
    scopes: Sequence[str],
    *,
    used: Collection[str] = (),
    without_place: Sequence[str] = (),
    renamed: Collection[str] = (),
    chosen: Chosen,
    cast: bool,
) -> Match:
    """Match slots to a checkpoint's tensors.

    `scopes`: names of the checkpoint's parts in which every tensor and value must have a place to go; "" is all of it.
    Names in `used` have one, values in `without_place` have none. Slots of the parts in `renamed` are looked for under
    their other names. Where a tensor was found under another name than its first, that name's part replaces "".
    """
    found: dict[str, Held] = {}
    filled: dict[object, str] = {}
    ties: dict[str, str] = {}
    absent: list[Slot] = []
    elsewhere: set[str] = set()
    names = _names_to_try(slots, renamed)
    for slot in slots:
        if not chosen.takes(*slot.names):
            continue
        name = next((name for name in names[slot.name] if name in tensors), None)
        if name is None:
            absent.append(slot)
            continue
        if name != slot.name:
            elsewhere |= {other.partition(".")[0] for other in slot.names[1:]}
        found[name] = slot.held
        if filled.setdefault(slot.memory, name) != name:
            ties[name] = filled[slot.memory]
    inside = (*(scope for scope in scopes if scope or not elsewhere), *elsewhere)
    known = {*found, *used}
    return Match(
        found=found,
        ties=ties,
        missing=tuple(slot.name for slot in absent if slot.memory not in filled),
        unexpected=tuple(
            name
            for name in (*(name for name in tensors if name not in known), *without_place)
            if _is_in(name, inside) and chosen.takes(name)
        ),
        placed=frozenset(known),
        unfit=tuple(said for name, held in found.items() for said in _unfit(name, tensors[name], held)),
        unconverted=tuple(said for n, held in found.items() for said in _unconverted(n, tensors[n], held) if not cast),
    )


def renamed_parts(slots: Sequence[Slot], tensors: Collection[str], nested: Collection[str]) -> set[str]:
    """Parts of the load target whose slots have their other names in the checkpoint, and not their first.

    These are the ones of whose slots more are found under the other names, or as many if they are in `nested`.
    """
    parts: dict[str, list[Slot]] = defaultdict(list)
    for slot in slots:
        parts[slot.part].append(slot)
    renamed: set[str] = set()
    for part, own in parts.items():
        firsts = sum(slot.name in tensors for slot in own)
        others = sum(any(name in tensors for name in slot.names[1:]) for slot in own)
        if others > firsts or (others == firsts and part in nested):
            renamed.add(part)
    return renamed


def _names_to_try(slots: Sequence[Slot], renamed: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Names under which to look for each slot's tensor, by the slot's name."""
    others = {slot.name: slot.names[1:] if slot.part in renamed else () for slot in slots}
    taken = {name for name, other in others.items() if not other}
    return {name: tuple(n for n in other if n not in taken) if other else (name,) for name, other in others.items()}


def without_any_place(suspects: Sequence[Sequence[str]], placed: Sequence[Collection[str]]) -> list[str]:
    """Names that have no place on any rank, of those that one rank or more suspects. Both are by rank."""
    somewhere = set().union(*placed)
    return [name for name in dict.fromkeys(itertools.chain(*suspects)) if name not in somewhere]


def require(matched: Match, *, strict: bool, where: str) -> None:
    """Raise CheckpointError with all differences; missing and unexpected names count only if `strict`."""
    parts = [("do not fit", (*matched.unfit, *matched.unconverted))]
    if strict:
        parts += [("are not in the checkpoint", matched.missing), ("have no place to go", matched.unexpected)]
    said = [f"{len(items)} {what}: {_listed(items)}" for what, items in parts if items]
    if said:
        raise CheckpointError(
            f"{where} does not fit what it is loaded into. {'; '.join(said)}. {_remedy(matched, strict=strict)}."
        )


def _remedy(matched: Match, *, strict: bool) -> str:
    """The remedies for the kinds of differences that occur."""
    remedies = ["convert dtypes with cast=True"] if matched.unconverted else []
    if strict and (matched.missing or matched.unexpected):
        remedies.append("ignore what is missing on either side with strict=False")
    if matched.unfit:
        remedies.append(
            "leave out what does not fit by choosing the rest with names=[...], or load into what was saved"
        )
    text = ", and ".join(remedies)
    return text[:1].upper() + text[1:]


@dataclass(frozen=True, slots=True)
class Chosen:
    """Names and shell patterns (`*`, `?`, `[...]`) of tensors. None chooses everything."""

    patterns: tuple[str, ...] | None

    @staticmethod
    def of(names: str | Sequence[str] | None) -> Chosen:
        if names is None:
            return Chosen(None)
        given = (names,) if isinstance(names, str) or not isinstance(names, Iterable) else names
        patterns = tuple(sorted(given, key=str) if isinstance(given, AbstractSet) else given)  # the same on every rank
        if not all(isinstance(pattern, str) for pattern in patterns):
            raise ConfigError(f"names={names!r}: give a name or a pattern, or a list of them, as text.")
        return Chosen(patterns)

    def takes(self, *names: str) -> bool:
        """Whether any of these names of one tensor is chosen."""
        if self.patterns is None:
            return True
        return any(name == pattern or fnmatchcase(name, pattern) for pattern in self.patterns for name in names)

    def require_all(self, known: Sequence[str], others: Sequence[str] = ()) -> None:
        """Raise CheckpointError for a pattern without a match in `known` and `others` (names for the same tensors)."""
        for pattern in self.patterns or ():
            if not any(Chosen((pattern,)).takes(name) for name in (*known, *others)):
                names = list(dict.fromkeys(known))
                raise CheckpointError(
                    f"names: {pattern!r} matches no name. There are {len(names)} names, such as "
                    f"{_listed(_like(pattern, names))}."
                )


def _is_in(name: str, scopes: Iterable[str]) -> bool:
    return any(scope in ("", name) or name.startswith(f"{scope}.") for scope in scopes)


def _unfit(name: str, info: TensorInfo, held: Held) -> list[str]:
    if info.shape != held.shape:
        return [f"{name} has shape {list(info.shape)} and not {list(held.shape)}"]
    if _is_complex(info.dtype) and not _is_complex(held.dtype):
        return [f"{name} is {info.dtype}, and {held.dtype} has no imaginary part"]
    return []


def _is_complex(dtype: str) -> bool:
    return dtype.startswith("complex")


def _unconverted(name: str, info: TensorInfo, held: Held) -> list[str]:
    different = info.dtype != held.dtype and not _unfit(name, info, held)
    return [f"{name} is {info.dtype} and not {held.dtype}"] if different else []


def _like(pattern: str, known: Sequence[str]) -> list[str]:
    """Names similar to the pattern; if there are none, any names."""
    heads = {name[: len(pattern)]: name for name in known} | {name: name for name in known}
    close = difflib.get_close_matches(pattern, heads, n=5, cutoff=0.7)
    return list(dict.fromkeys(heads[head] for head in close)) or sorted(known)[:5]


def _listed(items: Sequence[Any]) -> str:
    shown = ", ".join(map(str, items[:_MOST_SHOWN]))
    return shown if len(items) <= _MOST_SHOWN else f"{shown} and {len(items) - _MOST_SHOWN} more"
