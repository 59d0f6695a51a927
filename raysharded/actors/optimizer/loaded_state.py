"""State that an optimizer loads from an earlier one, which may have had another class or other parameters.

Entries that the optimizer does not use would otherwise stay in its state and in every checkpoint. An entry is unused if
two signs agree: the optimizer does not make it in its trial, and leaves it unchanged in the parameter's first step. An
optimizer that counts no steps uses nothing from one that counts them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from raysharded.actors.model.inventory import group_items
from raysharded.actors.optimizer.inner_optimizers import REGISTERED, OptimizerParts
from raysharded.actors.optimizer.trial import Verdict
from raysharded.actors.task_calls.remarks import Say

_COUNT = "step"
"""Key of the step count in the state of torch's optimizers, and of those modelled after them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerKind:
    """An optimizer as it was built, without the values of tensors."""

    classes: tuple[str, ...]
    """Classes of all parts, the outermost first."""
    groups: tuple[str, ...]
    """Settings and parameters of the groups, in the form that workers exchange."""
    trained: frozenset[str]
    """Names of the optimizer's parameters that are not frozen."""

    @classmethod
    def of(cls, parts: OptimizerParts, names: Mapping[int, str]) -> OptimizerKind:
        """`names`: parameter names by the parameter's id."""
        return cls(
            classes=tuple(f"{type(one).__module__}.{type(one).__qualname__}" for one in parts.all),
            groups=tuple(item.about for item in group_items(parts.groups, names)),
            trained=frozenset(names[id(param)] for held in parts.lists for param in held if param.requires_grad),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TriedOptimizer:
    """Result of the trial of an optimizer of this kind."""

    kind: OptimizerKind
    verdict: Verdict
    keeps: Mapping[str, frozenset[str]]
    """State keys of each parameter that could be tried, by name."""


@dataclass(frozen=True, slots=True)
class _AsLoaded:
    value: Any
    version: int

    @classmethod
    def of(cls, value: Any) -> _AsLoaded:
        return cls(value, value._version if isinstance(value, torch.Tensor) else 0)

    def is_still(self, value: Any) -> bool:
        """True if the value is unchanged since."""
        if isinstance(value, torch.Tensor):
            return value is self.value and value._version == self.version
        return type(value) is type(self.value) and bool(value == self.value)


class LoadedState:
    """State that was loaded into one optimizer."""

    def __init__(self, parts: OptimizerParts, keeps: Mapping[str, frozenset[str]]) -> None:
        """`keeps`: the state keys that the optimizer made for each parameter in its trial, by name."""
        self._parts, self._keeps = parts, keeps
        self._keys: dict[str, set[str]] = {}
        self._strange: dict[str, dict[str, _AsLoaded]] = {}
        """Loaded entries that the optimizer did not make in its trial."""
        self.num_left_out: dict[str, int] = {}
        """Number of entries that were left out for a parameter, by name."""

    @property
    def parameters(self) -> Collection[str]:
        """Names of the parameters that have loaded state."""
        return self._keys.keys()

    @property
    def is_strange(self) -> bool:
        """True while entries remain that the optimizer did not make in its trial, and may not use."""
        return bool(self._strange)

    def of_others(self, kept: Iterable[str]) -> dict[str, set[str]]:
        """Parameters of the names `<parameter>.<key>` whose steps another optimizer counted, with their keys.

        The current optimizer counts none. An entry of the same name in both, such as the average of AdamW and Lion, has
        another meaning.
        """
        found: dict[str, set[str]] = {}
        for name, _, key in (full_name.rpartition(".") for full_name in kept):
            if not is_registered(key):
                found.setdefault(name, set()).add(key)
        return {
            name: keys
            for name, keys in found.items()
            if _COUNT in keys and self._keeps.get(name) and _COUNT not in self._keeps[name]
        }

    def note(self, name: str, key: str, value: Any) -> None:
        """Record that the optimizer now has this entry for a parameter."""
        if is_registered(key):
            return
        self._keys.setdefault(name, set()).add(key)
        if name in self._keeps and key not in self._keeps[name]:
            self._strange.setdefault(name, {})[key] = _AsLoaded.of(value)

    def begun(self, trained: Collection[str]) -> list[str]:
        """Trained parameters without loaded state for which the optimizer keeps state; empty if nothing was loaded."""
        if not self._keys:
            return []
        return [name for name in trained if name not in self._keys and self._keeps.get(name)]

    def leave_out_unused(self, stepped: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
        """Drop loaded entries that the first step of these parameters did not use: name -> keys."""
        found: dict[str, list[str]] = {}
        for name in self._strange.keys() & stepped.keys():
            now = self._parts.kept_of(stepped[name])
            for key, before in sorted(self._strange.pop(name).items()):
                if key in now and before.is_still(now[key]):
                    self._parts.drop(stepped[name], key)
                    found.setdefault(name, []).append(key)
        self.num_left_out |= {name: len(keys) for name, keys in found.items()}
        return dict(sorted(found.items()))

    def describe_first(self) -> str:
        """The first parameter whose loaded keys differ from those of the optimizer's trial, for errors.

        Empty if there is none.
        """
        for name, keys in sorted(self._keys.items()):
            if name in self._keeps and keys != self._keeps[name]:
                return f": for {name!r} that has {listed(keys)}, and it keeps {listed(self._keeps[name]) or 'nothing'}"
        return ""


def is_registered(key: str) -> bool:
    """True for state that a user's loop has registered, not an optimizer's."""
    return key.startswith(f"{REGISTERED}:")


def not_registered(key: str) -> str:
    """Sentence on state that a user's loop has registered, and the present one has not."""
    name = key.removeprefix(f"{REGISTERED}:")
    return (
        f"the saved state has tensors that were registered as {name!r}, and this program registers none of that name. "
        f"Register them: session.shard(model, optimizer, {name}=raysharded.ParameterTensors())."
    )


def remark_begun(begun: Collection[str], say: Say) -> None:
    """Report parameters without optimizer state in a checkpoint. `begun`: their names, in order."""
    if begun:
        first = next(iter(begun))
        say(
            "begun parameters",
            f"the saved state has no optimizer state for {len(begun)} parameters, first {first!r}: they were frozen or "
            "missing until now, or no step has used them. Their state begins with their next use.",
        )


def remark_added(added: Collection[str], say: Say) -> None:
    """Report parameters and buffers of the model that a checkpoint lacks. `added`: their names in the state."""
    if added:
        say(
            "added parameters",
            f"the saved state does not have {len(added)} parameters or buffers of the model, first "
            f"{min(added).partition('.')[2]!r}: they begin with the values that a new run would begin with.",
        )


def remark_left_out(left_out: Collection[str], say: Say) -> None:
    """Report dropped optimizer state. `left_out`: parameters that the optimizer no longer has."""
    if left_out:
        first = min(left_out)
        say(
            "frozen parameters",
            f"the state has optimizer state for {len(left_out)} parameters that are frozen now, and in no group, "
            f"first {first!r}: it is left out from here on, and of later checkpoints.",
        )


def remark_others(optimizer: str, others: Mapping[str, Collection[str]], say: Say) -> None:
    """Report state that another optimizer made. `others`: as from `LoadedState.of_others`."""
    if others:
        name = min(others)
        say(
            "state of another optimizer",
            f"the state has {listed(others[name])} of {name!r}, and {optimizer} counts no steps: another optimizer "
            f"kept it. Its state for {len(others)} parameters is left out, and {optimizer} begins anew with them.",
        )


def remark_unused(optimizer: str, step: int, unused: Mapping[str, Sequence[str]], say: Say) -> None:
    """Report loaded entries that a step did not use. `unused`: parameter -> keys."""
    if unused:
        name, keys = next(iter(unused.items()))
        others = f" and of {len(unused) - 1} other parameters" if len(unused) > 1 else ""
        say(
            "state of another optimizer",
            f"the state that was loaded has {listed(keys)} of {name!r}{others}, which {optimizer} did not use in step "
            f"{step}: it is another optimizer's. It is left out from here on, and of later checkpoints.",
        )


def remark_changed(before: OptimizerKind, now: OptimizerKind, say: Say) -> None:
    """Report changes of the optimizer. `before`: the optimizer of the previous generation."""
    told = []
    if before.classes != now.classes:
        told.append(f"has the optimizer {now.classes[0]}, and had {before.classes[0]}")
    for what, names in {"trains": now.trained - before.trained, "has frozen": before.trained - now.trained}.items():
        if names:
            told.append(f"{what} {len(names)} parameters, first {min(names)!r}")
    if told:
        say(
            "changed task",
            f"the task now {', and '.join(told)}, unlike in the previous generation: build_model or build_optimizer "
            "does not do the same in every call.",
        )


def listed(names: Collection[str]) -> str:
    """Names in order, each in quotes, for messages."""
    return ", ".join(map(repr, sorted(names)))
