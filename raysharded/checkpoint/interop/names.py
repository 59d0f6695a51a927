"""Name maps: names of raysharded's tensors in another format. Pure.

A map is either an object or a list of rules. An object maps raysharded names to other names, and can be inverted; null
leaves a tensor out. A rule is a pair of a regular expression and a replacement (or null); the first rule that matches a
whole name is used. A name that nothing matches is left out. A missing tensor in an object is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from raysharded.display.quantities import count
from raysharded.errors import CheckpointError
from raysharded.locations import require_file

_MOST_TOLD = 20
_TRAINER_PREFIXES = ("model.", "buffer.", "constant.", "optim.", "number.")


@dataclass(frozen=True, kw_only=True, slots=True)
class NameMap:
    """Map from raysharded names to other names, or the reverse for an import."""

    exact: Mapping[str, str | None] | None = None
    rules: tuple[tuple[re.Pattern[str], str | None], ...] = ()

    @staticmethod
    def of(value: Any, where: str = "the name map") -> NameMap:
        """A map from JSON: an object of names, or an array of [pattern, replacement].

        Raises CheckpointError for anything else.
        """
        if isinstance(value, Mapping):
            if all(type(k) is str and (v is None or type(v) is str) for k, v in value.items()):
                return NameMap(exact=dict(value))
        elif isinstance(value, (list, tuple)) and all(_is_rule(rule) for rule in value):
            _refuse_stars(value, where)
            try:
                return NameMap(rules=tuple((re.compile(pattern), new) for pattern, new in value))
            except re.error as error:
                raise CheckpointError(f"{where}: {error.pattern!r} is not a regular expression ({error}).") from None
        raise CheckpointError(
            f'{where}: give an object {{"our name": "their name" or null}} or an array of ["pattern", "replacement" '
            "or null]."
        )

    @staticmethod
    def from_file(path: str) -> NameMap:
        """A map from a JSON file. Raises CheckpointError if it cannot be read."""
        try:
            require_file(path)
            with open(path, encoding="utf-8") as file:
                return NameMap.of(json.load(file), path)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"the name map {path} cannot be read: {error}.") from error

    def inverse(self) -> NameMap:
        """The inverse map. Raises CheckpointError for rules, and if two names collide."""
        if self.exact is None:
            raise CheckpointError("rules cannot be inverted: give rules from the source's names to ours.")
        back = {theirs: ours for ours, theirs in self.exact.items() if theirs is not None}
        if len(back) != sum(theirs is not None for theirs in self.exact.values()):
            raise CheckpointError("the name map gives two tensors one name, and cannot be inverted.")
        return NameMap(exact=back)

    def __call__(self, name: str) -> str | None:
        """The new name; None: leave the tensor out. Raises CheckpointError for a replacement without its group."""
        if self.exact is not None:
            return self.exact.get(name)
        for pattern, new in self.rules:
            match = pattern.fullmatch(name)
            if match is not None:
                return None if new is None else _expanded(match, new)
        return None

    def require(self, names: Collection[str], *, spare: tuple[str, ...] = ()) -> None:
        """Raise CheckpointError if an object names missing tensors, except for names that end in `spare`."""
        there = set(names)
        lost = [name for name in self.exact or () if name not in there and not (spare and name.endswith(spare))]
        if lost:
            more = f" and {len(lost) - _MOST_TOLD} more" if len(lost) > _MOST_TOLD else ""
            raise CheckpointError(
                f"the name map names {count(len(lost), 'missing tensor')}: {', '.join(map(repr, lost[:_MOST_TOLD]))}"
                f"{more}. There are {len(there)}, first {list(names)[:3]}. An object's names are whole names; patterns "
                "are given as an array."
            )

    def apply(self, names: Iterable[str]) -> dict[str, str]:
        """Map from old to new names, without tensors that are left out. Raises CheckpointError if two names collide."""
        found: dict[str, str] = {}
        taken: dict[str, str] = {}
        for name in names:
            new = self(name)
            if new is None:
                continue
            if new in taken:
                raise CheckpointError(
                    f"tensors {taken[new]!r} and {name!r} would both be called {new!r}. Give a name map that keeps "
                    "them apart."
                )
            taken[new] = name
            found[name] = new
        return found


EVERYTHING = NameMap(rules=((re.compile(r"(.*)", re.DOTALL), r"\1"),))
"""Map of all names to themselves."""
MODEL_ONLY = NameMap(rules=((re.compile(r"(?:model|buffer)\.(.*)", re.DOTALL), r"\1"),))
"""Map of a training state's model: `model.x` becomes `x`, the rest is left out."""
INTO_MODEL = NameMap(rules=((re.compile(r"(.*)", re.DOTALL), r"model.\1"),))
"""Map of a model's names to those in a training state."""


def is_trainers(names: Iterable[str]) -> bool:
    """Whether the names are those of a state that the trainer saved."""
    return all(name.startswith(_TRAINER_PREFIXES) for name in names)


def chosen(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """The names that any of the patterns match; all names without patterns.

    Raises CheckpointError if a pattern matches no name.
    """
    every, wanted = list(names), list(patterns)
    for pattern in wanted:
        if not any(matches(name, pattern) for name in every):
            raise CheckpointError(
                f"no tensor is called {pattern!r}; the first of {count(len(every), 'tensor')}: {every[:3]}."
            )
    return [name for name in every if not wanted or any(matches(name, pattern) for pattern in wanted)]


def matches(name: str, pattern: str) -> bool:
    """Whether the pattern is the name, or matches it as in a shell."""
    return name == pattern or fnmatchcase(name, pattern)


def _is_rule(rule: Any) -> bool:
    return (
        isinstance(rule, (list, tuple))
        and len(rule) == 2
        and type(rule[0]) is str
        and (rule[1] is None or type(rule[1]) is str)
    )


def _refuse_stars(rules: Iterable[Any], where: str) -> None:
    """Reject a `*` in a replacement: it shows that the pattern was meant as a shell pattern."""
    for pattern, new in rules:
        if new is not None and "*" in new:
            raise CheckpointError(
                f"{where}: the replacement {new!r} of {pattern!r} has a '*', which would be in the name. Patterns are "
                r'regular expressions: a group goes in by its number, as in ["model\\.(.*)", "\\1"].'
            )


def _expanded(match: re.Match[str], new: str) -> str:
    try:
        return match.expand(new)
    except (re.error, IndexError) as error:
        raise CheckpointError(f"the name map's replacement {new!r} does not fit its pattern: {error}.") from None
