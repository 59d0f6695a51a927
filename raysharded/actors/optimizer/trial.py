"""A trial of the task's optimizer on random tensors, before a run depends on it.

Some kernels round differently in their vector tails, at the end of a shard. The trial compares steps on shards of odd
lengths with steps on the whole: the parameters and the state. A worker's part may also be empty, or be the only one
whose gradient is zero, or large.

A worker that takes another's place builds the optimizer anew and has only the per-parameter state; in a session it has
the numbers in the groups, too. The trial compares steps of one optimizer with steps of one that is rebuilt before each.
It uses the task's own object, first without its step hooks, then with them. Numbers outside the state that grow by one
in each step are counters, which begin anew in a joiner: with such, steps are also compared with steps of other counts.

A hook that reaches the model through its closure does not change these tensors: see `step_hooks.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from raysharded.actors.optimizer.inner_optimizers import StandIns, bits_of, remembered, stand_ins
from raysharded.actors.optimizer.registered_state import RegisteredState
from raysharded.actors.optimizer.step_hooks import HookCalls
from raysharded.actors.optimizer.trial_outcomes import Difference, Outcome, cloned, difference, types
from raysharded.actors.optimizer.trial_tensors import Marks, TrialStep, at_odd_offset, likes_of, representatives
from raysharded.actors.task_calls.explanations import explanation
from raysharded.actors.task_calls.object_contents import NumberPlace, number_places
from raysharded.actors.task_calls.task_errors import task_error
from raysharded.errors import TaskError, is_ctrl_c, text_of, user_traceback

_RATE = 0.01
"""Learning rate that is tried in addition to the group's own, which may be 0 at the time."""


_STEPS = (
    TrialStep(),
    TrialStep(own_rate=True),
    TrialStep(size=1e4),
    TrialStep(count=10, own_rate=True),
    TrialStep(size=1e-3),
    TrialStep(count=1_000),
    TrialStep(own_rate=True),
    TrialStep(count=100_000),
)
_STEPS_WITH_HOOKS = _STEPS[:3]
_UNEVEN_STEPS = (TrialStep(zero=True), TrialStep(large=True), TrialStep(zero=True), TrialStep())
"""Steps in which a part of each parameter has another kind of gradient than the rest."""
_LATER_STEPS = (
    TrialStep(count=10),
    TrialStep(),
    TrialStep(count=1_000),
    TrialStep(),
    TrialStep(count=100_000),
    TrialStep(),
)
"""Steps that are compared for counters outside the state: most rules act at such a count, or just behind it."""


Cause: TypeAlias = Literal["cut", "zero", "large", "empty"]
"""Causes of other results on shards: any cut; a part whose gradient is zero, or large; a part without elements."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The first difference that a trial found."""

    kind: Literal["made anew", "idle", "late", "turned", "shape", "marks", "key"] | Cause
    """On a shard; from a rebuilt optimizer; parameters unchanged; state late; state that has changed its type; state
    shaped unlike its parameter; on parameters with attributes; a key of state that is no name."""
    what: str = ""
    """State that differs, if it is state; empty: the parameters."""
    hooks: tuple[str, ...] = ()
    """Step hooks that cause the difference; empty: the optimizer itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Result of the trial of an optimizer."""

    cut: Finding | None = None
    """Difference if the steps depend on how the parameters are cut; None if they do not."""
    kept: Finding | None = None
    """Difference if another worker could not continue with the state; None if it can."""
    elementwise: frozenset[int] = frozenset()
    """Keys, as in `HookCalls`, of the step and hooks that changed gradients, with the same result on shards."""
    keeps: Mapping[int, frozenset[str]] = field(default_factory=dict)
    """State keys of a parameter, by the parameter's id; parameters that could not be tried are missing."""


def try_out(
    optimizer: torch.optim.Optimizer,
    hooks: HookCalls,
    *,
    without: Collection[torch.Tensor] = (),
    keeps_groups: bool = False,
    registered: Collection[object] = (),
    marks: Marks = MappingProxyType({}),
) -> Verdict:
    """Try an optimizer as a run would use it. Afterwards it, and all that its hooks hold, is restored.

    `hooks`: the optimizer's hooks. `without`: the parameters of the model, whose values may be lost. `keeps_groups`:
    True if a worker that joins gets the numbers in the groups. `registered`: objects that it gets, too. `marks`:
    attributes that the optimizer's parameters have in the model, and not here. Raises TaskError if a step cannot be
    tried.
    """
    trial = partial(_Trial, keeps_groups=keeps_groups, registered=registered)
    with stand_ins(optimizer, without=without) as standing:
        with hooks.left_out() as changing:
            found = trial(standing, hooks, _STEPS, marks=marks).verdict()
        elementwise = frozenset(changing)
        if hooks.names and not found.cut and not found.kept:
            try:
                with hooks.noted() as changing:
                    with_hooks = trial(standing, hooks, _STEPS_WITH_HOOKS).verdict()
            except TaskError:  # hooks may need gradients of the real model: the run watches them
                return Verdict(elementwise=elementwise)  # hooks may also keep state that could not be tried
            names = tuple(hooks.names.values())
            keeps = {param: keys | with_hooks.keeps.get(param, frozenset()) for param, keys in found.keeps.items()}
            found = Verdict(cut=_by(with_hooks.cut, names), kept=_by(with_hooks.kept, names), keeps=keeps)
            elementwise |= changing
    return replace(found, elementwise=elementwise)


def _by(found: Finding | None, hooks: tuple[str, ...]) -> Finding | None:
    return None if found is None else Finding(kind=found.kind, what=found.what, hooks=hooks)


class _Trial:
    def __init__(
        self,
        standing: StandIns,
        hooks: HookCalls,
        steps: Sequence[TrialStep],
        *,
        keeps_groups: bool,
        registered: Collection[object],
        marks: Marks = MappingProxyType({}),
    ) -> None:
        self._standing, self._hooks, self._steps, self._marks = standing, hooks, steps, marks
        self._groups = RegisteredState(standing.parts.groups, {}) if keeps_groups else None
        """Numbers in the groups, as a session keeps them."""
        self._kept_elsewhere = [*(standing.parts.groups if keeps_groups else ()), *registered]
        self._optimizer = standing.parts.outermost
        self._likes = likes_of(standing, marks)
        self._tried = representatives(self._likes, steps)
        self._changed: list[str] = []
        """Names of values outside the per-parameter state that the steps change."""
        self._counters: list[NumberPlace] = []
        """Numbers outside the state that each step raises by one."""
        self._unnamed: object = None

    def verdict(self) -> Verdict:
        whole = self._made([[slice(None)] for _ in self._tried], notes=True)
        if self._unnamed is not None:
            return Verdict(kept=Finding(kind="key", what=repr(self._unnamed)))
        found = self._idle(whole) or self._reshaped(whole)
        if found is not None:
            return Verdict(kept=found)
        changed = self._changed
        kept = self._late(whole) or self._made_anew(whole, changed) or self._counting(changed) or self._marked(whole)
        return Verdict(cut=self._cut(whole), kept=kept, keeps=self._keeps(whole))

    def _keeps(self, whole: Outcome) -> dict[int, frozenset[str]]:
        keys = {
            self._likes[id(tensors.param)].like: frozenset(types(kept))
            for tensors, (kept,) in zip(self._tried, whole.kept, strict=True)
        }
        return {number: keys[one.like] for number, one in self._likes.items()}

    def _idle(self, whole: Outcome) -> Finding | None:
        for tensors, (param,) in zip(self._tried, whole.params, strict=True):
            if tensors.param.requires_grad and bits_of(param) == bits_of(tensors.start):
                return Finding(kind="idle")
        return None

    def _reshaped(self, whole: Outcome) -> Finding | None:
        for (param,), (kept,) in zip(whole.params, whole.kept, strict=True):
            for key, value in kept.items():
                if isinstance(value, torch.Tensor) and value.dim() and value.shape != param.shape:
                    shapes = f"of a parameter of shape {tuple(param.shape)} in the shape {tuple(value.shape)}"
                    return Finding(kind="shape", what=f"{key!r} {shapes}")
        return None

    def _cut(self, whole: Outcome) -> Finding | None:
        """Compare the whole with two workers' shards, which hold alternate parts."""
        found = difference(whole, self._halves([tensors.cuts for tensors in self._tried], self._steps))
        return self._uneven() if found is None else Finding(kind="cut", what=found.key)

    def _uneven(self) -> Finding | None:
        """Compare where the parts' gradients are unlike: zero or large in one part alone, and with an empty part."""
        every = [[*tensors.cuts, tensors.empty] for tensors in self._tried]
        with suppress(TaskError):
            if self._uneven_difference(every, _UNEVEN_STEPS) is None:
                return None
        cuts = [tensors.cuts for tensors in self._tried]
        causes: dict[Cause, tuple[list[list[tuple[int, int]]], Sequence[TrialStep]]] = {
            "zero": (cuts, [replace(step, large=False) for step in _UNEVEN_STEPS]),
            "large": (cuts, [replace(step, zero=False) for step in _UNEVEN_STEPS]),
            "empty": (every, [TrialStep() for _ in _UNEVEN_STEPS]),
        }
        for kind, (parts, steps) in causes.items():
            with suppress(TaskError):  # a step that raises for such a part ends a run, and changes no bit
                if (found := self._uneven_difference(parts, steps)) is not None:
                    return Finding(kind=kind, what=found.key)
        return None

    def _uneven_difference(
        self, cuts: Sequence[Sequence[tuple[int, int]]], steps: Sequence[TrialStep]
    ) -> Difference | None:
        whole = self._made([[slice(None)] for _ in self._tried], steps=steps)
        return difference(whole, self._halves(cuts, steps))

    def _halves(self, cuts: Sequence[Sequence[tuple[int, int]]], steps: Sequence[TrialStep]) -> list[Outcome]:
        """Results of two workers, which hold alternate parts of each parameter. `cuts`: the parts, by parameter."""
        return [
            self._made([[slice(*cut) for cut in of_it[first::2]] for of_it in cuts], steps=steps) for first in (0, 1)
        ]

    def _late(self, whole: Outcome) -> Finding | None:
        for (first,), (kept,) in zip(whole.first_types, whole.kept, strict=True):
            now = types(kept)
            if late := sorted(now.keys() ^ first.keys()):
                return Finding(kind="late", what=late[0])
            if turned := sorted(key for key, kind in now.items() if first[key] != kind):
                what = f"{turned[0]!r} of its state from {first[turned[0]]} into {now[turned[0]]}"
                return Finding(kind="turned", what=what)
        return None

    def _made_anew(self, usual: Outcome, changed: Sequence[str]) -> Finding | None:
        different = Finding(kind="made anew", what=changed[0] if changed else "")
        try:
            anew = self._made([[slice(None)] for _ in self._tried], anew=True)
        except TaskError:  # any code may fail, in its own way, without the state that it kept
            return different
        return None if bits_of([usual.params, usual.kept]) == bits_of([anew.params, anew.kept]) else different

    def _counting(self, changed: Sequence[str]) -> Finding | None:
        """Compare steps at other values of the counters outside the state with steps at their own."""
        if not self._counters:
            return None
        parts = [[slice(None)] for _ in self._tried]
        try:
            usual = self._made(parts, steps=_LATER_STEPS)
            later = self._made(parts, steps=_LATER_STEPS, counts=True)
        except TaskError:  # the number is no count: an index, for example
            return None
        if bits_of([usual.params, usual.kept]) == bits_of([later.params, later.kept]):
            return None
        return Finding(kind="made anew", what=changed[0] if changed else "")

    def _marked(self, usual: Outcome) -> Finding | None:
        """Compare with steps on parameters that have the attributes of the model's."""
        names = sorted({key for tensors in self._tried for key in self._marks.get(id(tensors.param), ())})
        if not names:
            return None
        different = Finding(kind="marks", what=", ".join(map(repr, names)))
        try:
            marked = self._made([[slice(None)] for _ in self._tried], marked=True)
        except TaskError:  # they select another rule, which needs more than there is here
            return different
        return None if bits_of([usual.params, usual.kept]) == bits_of([marked.params, marked.kept]) else different

    def _made(
        self,
        parts: Sequence[Sequence[slice]],
        *,
        steps: Sequence[TrialStep] | None = None,
        anew: bool = False,
        notes: bool = False,
        counts: bool = False,
        marked: bool = False,
    ) -> Outcome:
        """Make all steps on these parts of each parameter.

        `steps`: others than the trial's. `anew`: rebuild the optimizer before each step. `notes`: also record what it
        keeps elsewhere. `counts`: also set the counters outside the state. `marked`: on parameters with attributes.
        """
        stand_ins = [
            [nn.Parameter(tensors.start[part].clone(), requires_grad=tensors.param.requires_grad) for part in of_it]
            for tensors, of_it in zip(self._tried, parts, strict=True)
        ]
        for tensors, ones in zip(self._tried, stand_ins, strict=True):
            for one in ones if marked else ():
                vars(one).update(self._marks.get(id(tensors.param), {}))
        parts_of = self._standing.parts
        self._standing.give({id(t.param): ones for t, ones in zip(self._tried, stand_ins, strict=True)})
        rates = [group["lr"] for group in parts_of.groups if "lr" in group]
        rates = [rate.clone() if isinstance(rate, torch.Tensor) else rate for rate in rates]
        first_types: list[list[dict[str, str]]] = []
        keeps_groups = self._groups is not None
        before = remembered(self._optimizer, keeps_groups=keeps_groups) if notes else {}
        if notes:
            self._counters = number_places(self._optimizer, without=self._kept_elsewhere)
        for number, step in enumerate(self._steps if steps is None else steps):
            if anew:
                kept = None if self._groups is None else self._groups.text()
                self._standing.make_anew()
                if self._groups is not None and kept is not None:
                    self._groups.load(kept)
            self._set_rates(rates if step.own_rate else [_RATE] * len(rates))
            for tensors, ones, of_it in zip(self._tried, stand_ins, parts, strict=True):
                for place, (one, part) in enumerate(zip(ones, of_it, strict=True)):
                    if one.requires_grad:
                        gradient = tensors.gradient(number, step)
                        one.grad = at_odd_offset(gradient[part], place)
                    if step.count is not None:
                        _set_counts(parts_of.counts(one), step.count)
            if counts and step.count is not None:
                for counter in self._counters:
                    counter.put(step.count - 1)  # the step makes it the count
            raised = [(counter, counter.value()) for counter in self._counters] if notes else []
            self._step()
            if notes:
                self._counters = [counter for counter, was in raised if was is not None and counter.value() == was + 1]
            if not number:
                first_types = [[types(parts_of.kept_of(one)) for one in ones] for ones in stand_ins]
        if notes:
            unnamed = (parts_of.unnamed(one) for ones in stand_ins for one in ones)
            self._unnamed = next((key for key in unnamed if key is not None), None)
            now = remembered(self._optimizer, keeps_groups=keeps_groups)
            self._changed = sorted(name for name, value in now.items() if before.get(name) != value)
        return Outcome(
            params=[[one.detach() for one in ones] for ones in stand_ins],
            kept=[[cloned(parts_of.kept_of(one)) for one in ones] for ones in stand_ins],
            first_types=first_types,
        )

    def _set_rates(self, rates: Sequence[Any]) -> None:
        groups = [group for group in self._standing.parts.groups if "lr" in group]
        for group, rate in zip(groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(float(rate))
            else:
                group["lr"] = float(rate)

    def _step(self) -> None:
        try:
            self._hooks.stepping(self._optimizer.step)
        except BaseException as error:  # the boundary to the user's code, which may call sys.exit()
            if is_ctrl_c(error):
                raise
            name = type(self._optimizer).__name__
            if explanation(error, "step") is not None:
                raise task_error(f"{name}.step(), tried before the run", error, "step") from error
            raise TaskError(
                f"{name}.step() raised {type(error).__name__} when raysharded tried it on random tensors before the "
                f"run: {text_of(error)}. It must work without arguments, and change the parameters of its groups "
                "(param_groups) by their .grad alone.",
                user_traceback(error),
            ) from error


def _set_counts(counts: Any, count: int) -> None:
    for kept, key in list(counts):
        if isinstance(kept[key], torch.Tensor):
            kept[key].fill_(count)
        else:
            kept[key] = type(kept[key])(count)
