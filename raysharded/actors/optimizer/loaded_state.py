"""What an optimizer was given of an earlier one, which may have been another: of another class, or of other parameters.

What it does not use would else stay with it, and in every checkpoint. It is told by two signs together: the optimizer
does not keep such a thing when it is tried, and leaves it as it was in the first step of its parameter. One that counts
no steps uses nothing of one that did.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from raysharded.actors.model.inventory import group_items
from raysharded.actors.optimizer.inner_optimizers import OptimizerParts
from raysharded.actors.optimizer.trial import Verdict
from raysharded.actors.task_calls.remarks import Say

_COUNT = "step"
"""What torch's optimizers, and those made after them, call the number of steps of a parameter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerKind:
    """An optimizer as it was built, without the values of tensors."""

    classes: tuple[str, ...]
    """Of all parts, the outermost first."""
    groups: tuple[str, ...]
    """Their settings and parameters, as other workers are told."""
    trained: frozenset[str]
    """The names of the parameters that it has and that are not frozen."""

    @classmethod
    def of(cls, parts: OptimizerParts, names: Mapping[int, str]) -> OptimizerKind:
        """`names`: by id of the parameter."""
        return cls(
            classes=tuple(f"{type(one).__module__}.{type(one).__qualname__}" for one in parts.all),
            groups=tuple(item.about for item in group_items(parts.groups, names)),
            trained=frozenset(names[id(param)] for held in parts.lists for param in held if param.requires_grad),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TriedOptimizer:
    """What a trial found of an optimizer of this kind."""

    kind: OptimizerKind
    verdict: Verdict
    keeps: Mapping[str, frozenset[str]]
    """What it keeps of each parameter that could be tried, by name."""


@dataclass(frozen=True, slots=True)
class _AsLoaded:
    value: Any
    version: int

    @classmethod
    def of(cls, value: Any) -> _AsLoaded:
        return cls(value, value._version if isinstance(value, torch.Tensor) else 0)

    def is_still(self, value: Any) -> bool:
        """True if nobody has written to it since."""
        if isinstance(value, torch.Tensor):
            return value is self.value and value._version == self.version
        return type(value) is type(self.value) and bool(value == self.value)


class LoadedState:
    """What was loaded into one optimizer."""

    def __init__(self, parts: OptimizerParts, keeps: Mapping[str, frozenset[str]]) -> None:
        """`keeps`: what the optimizer kept of each parameter when it was tried, by name."""
        self._parts, self._keeps = parts, keeps
        self._keys: dict[str, set[str]] = {}
        self._strange: dict[str, dict[str, _AsLoaded]] = {}
        """What it did not keep then."""

    @property
    def parameters(self) -> Collection[str]:
        """Of which there is something."""
        return self._keys.keys()

    @property
    def is_strange(self) -> bool:
        """True as long as there is something that the optimizer did not keep when it was tried, and may not use."""
        return bool(self._strange)

    def of_others(self, kept: Iterable[str]) -> dict[str, set[str]]:
        """Of `<parameter>.<key>` the parameters, with their keys, whose steps another optimizer counted.

        This one counts none. What has one name in both, as the average of AdamW and of Lion, is not the same.
        """
        found: dict[str, set[str]] = {}
        for name, _, key in (full_name.rpartition(".") for full_name in kept):
            found.setdefault(name, set()).add(key)
        return {
            name: keys
            for name, keys in found.items()
            if _COUNT in keys and self._keeps.get(name) and _COUNT not in self._keeps[name]
        }

    def note(self, name: str, key: str, value: Any) -> None:
        """It has this of a parameter now."""
        self._keys.setdefault(name, set()).add(key)
        if name in self._keeps and key not in self._keeps[name]:
            self._strange.setdefault(name, {})[key] = _AsLoaded.of(value)

    def begun(self, trained: Collection[str]) -> list[str]:
        """Of these parameters, those of which there is nothing, while there is something of others, and the optimizer
        keeps something."""
        if not self._keys:
            return []
        return [name for name in trained if name not in self._keys and self._keeps.get(name)]

    def leave_out_unused(self, stepped: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
        """Forget what the optimizer does not use of these parameters, after its first step of them: name -> keys."""
        found: dict[str, list[str]] = {}
        for name in self._strange.keys() & stepped.keys():
            now = self._parts.kept_of(stepped[name])
            for key, before in sorted(self._strange.pop(name).items()):
                if key in now and before.is_still(now[key]):
                    self._parts.drop(stepped[name], key)
                    found.setdefault(name, []).append(key)
        return dict(sorted(found.items()))

    def describe_first(self) -> str:
        """The first parameter of which it has something that the optimizer did not keep when it was tried, or not all
        of what it kept, for errors; empty if there is none."""
        for name, keys in sorted(self._keys.items()):
            if name in self._keeps and keys != self._keeps[name]:
                return f": of {name!r} that has {listed(keys)}, and it keeps {listed(self._keeps[name]) or 'nothing'}"
        return ""


def remark_begun(begun: Collection[str], say: Say) -> None:
    """`begun`: the parameters of which a checkpoint has no state of the optimizer, in order."""
    if begun:
        first = next(iter(begun))
        say(
            "begun parameters",
            f"the saved state has nothing that the optimizer keeps of {len(begun)} parameters, first {first!r}: they "
            "were frozen or not there until now, or no step has used them. What it keeps begins with their next use.",
        )


def remark_added(added: Collection[str], say: Say) -> None:
    """`added`: the parameters and buffers of the model that a checkpoint does not have, by their names in the state."""
    if added:
        say(
            "added parameters",
            f"the saved state does not have {len(added)} parameters or buffers of the model, first "
            f"{min(added).partition('.')[2]!r}: they begin with the values that a new run would begin with.",
        )


def remark_left_out(left_out: Collection[str], say: Say) -> None:
    """`left_out`: the parameters whose optimizer state was left out, as the optimizer does not have them any more."""
    if left_out:
        first = min(left_out)
        say(
            "frozen parameters",
            f"the state has what an optimizer kept of {len(left_out)} parameters that are frozen now, and in no group, "
            f"first {first!r}: it is left out from here on, and of later checkpoints.",
        )


def remark_others(optimizer: str, others: Mapping[str, Collection[str]], say: Say) -> None:
    """`others`: as of `LoadedState.of_others`."""
    if others:
        name = min(others)
        say(
            "state of another optimizer",
            f"the state has {listed(others[name])} of {name!r}, and {optimizer} counts no steps: another optimizer "
            f"kept it. What that kept of {len(others)} parameters is left out, and {optimizer} begins anew with them.",
        )


def remark_unused(optimizer: str, step: int, unused: Mapping[str, Sequence[str]], say: Say) -> None:
    """`unused`: parameter -> what a step of the optimizer did not use of what was loaded."""
    if unused:
        name, keys = next(iter(unused.items()))
        others = f" and of {len(unused) - 1} other parameters" if len(unused) > 1 else ""
        say(
            "state of another optimizer",
            f"the state that was loaded has {listed(keys)} of {name!r}{others}, which {optimizer} did not use in step "
            f"{step}: it is another optimizer's. It is left out from here on, and of later checkpoints.",
        )


def remark_changed(before: OptimizerKind, now: OptimizerKind, say: Say) -> None:
    """`before`: of the generation before."""
    told = []
    if before.classes != now.classes:
        told.append(f"has the optimizer {now.classes[0]}, and had {before.classes[0]}")
    for what, names in {"trains": now.trained - before.trained, "has frozen": before.trained - now.trained}.items():
        if names:
            told.append(f"{what} {len(names)} parameters, first {min(names)!r}")
    if told:
        say(
            "changed task",
            f"the task now {', and '.join(told)}, otherwise than in the generation before: build_model and "
            "build_optimizer do not do the same every time that they are called.",
        )


def listed(names: Collection[str]) -> str:
    """For people: in order, each in quotes."""
    return ", ".join(map(repr, sorted(names)))
