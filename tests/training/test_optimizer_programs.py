"""Optimizers of real programs: with hooks, patched steps and optimizers inside, equal at every size or refused."""

from __future__ import annotations

import copy
import functools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

import raysharded as rs
from raysharded.actors.optimizer.learning_rate import schedule_item
from raysharded.actors.optimizer.shard_optimizer import ShardOptimizer
from raysharded.errors import InexactError, TaskError
from tests.actors.optimizer.test_shard_optimizer import Line, shard_optimizer
from tests.cases import tried_each_time
from tests.training.harness import Outcome, SmallTask, train

Clip = Callable[[Optimizer], object]


def clip_by(params: Callable[[Optimizer], Iterable[torch.Tensor]], limit: float = 0.1) -> Callable[..., None]:
    def clip(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        nn.utils.clip_grad_norm_(params(optimizer), limit)

    return clip


def of_groups(optimizer: Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def stepped(optimizer: ShardOptimizer, model: nn.Module, steps: Sequence[int] = (1,), size: float = 1.0) -> None:
    for step in steps:
        for param in model.parameters():
            param.grad = torch.full_like(param, size)
        optimizer.apply(step, 1.0)


class Made(SmallTask):
    """A small model with an optimizer that a function makes from the model."""

    def __init__(self, make: Callable[[nn.Module], Optimizer]) -> None:
        self._make = make

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return self._make(model)


def outcomes(make: Callable[[nn.Module], Optimizer]) -> Iterator[Outcome]:
    """At 1 worker, and at 2 of which one is killed in the second step and replaced."""
    task = Made(make)
    run = functools.partial(train, task=task, microbatches=4, steps=3)
    yield run(1)
    yield run(2, kills=[(1, 2, "backward")])


# -- step hooks --


def test_a_hook_that_clips_its_optimizers_gradients_by_a_norm_is_refused_by_its_name() -> None:
    def make(params: Iterable[nn.Parameter]) -> Optimizer:
        optimizer = AdamW(params, lr=0.1)
        optimizer.register_step_pre_hook(clip_by(of_groups))
        return optimizer

    optimizer, _ = shard_optimizer(Line(make))
    with pytest.raises(
        InexactError,
        match=r"the step pre hook clip_by\.clip \(.*\) of AdamW gives other bits on a shard.*max_grad_norm",
    ):
        optimizer.try_out()


def clipped_by_its_model(model: nn.Module) -> Optimizer:
    optimizer = AdamW(model.parameters(), lr=1e-2)
    optimizer.register_step_pre_hook(clip_by(lambda _: model.parameters()))
    return optimizer


@pytest.mark.procs
@pytest.mark.parametrize("workers", tried_each_time([1], [1, 3]))
def test_a_hook_that_clips_the_models_gradients_is_refused_when_it_does(workers: int) -> None:
    with pytest.raises(InexactError, match=r"clip_by\.clip .* of AdamW changed gradients in step 1: .*max_grad_norm"):
        train(workers, task=Made(clipped_by_its_model), steps=1, microbatches=3)


class Reaching(rs.Task):
    """A linear model whose optimizer is made with the whole model."""

    def __init__(self, make: Callable[[nn.Module], Optimizer]) -> None:
        self._make = make

    def build_model(self) -> nn.Module:
        return nn.Linear(5, 3)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return self._make(model)


def test_a_clipping_is_refused_in_the_step_in_which_it_comes_to_its_limit() -> None:
    def make(model: nn.Module) -> Optimizer:
        optimizer = SGD(model.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(clip_by(lambda _: model.parameters(), limit=20.0))
        return optimizer

    optimizer, model = shard_optimizer(Reaching(make))
    optimizer.try_out()
    stepped(optimizer, model, range(1, 7))
    with pytest.raises(InexactError, match="changed gradients in step 7"):
        stepped(optimizer, model, [7], size=100.0)


def test_a_gradient_that_a_hook_replaces_is_refused() -> None:
    def make(model: nn.Module) -> Optimizer:
        def halve(*_: object) -> None:
            for param in model.parameters():
                param.grad = param.grad / 2 if param.grad is not None else None

        optimizer = SGD(model.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(halve)
        return optimizer

    optimizer, model = shard_optimizer(Reaching(make))
    optimizer.try_out()
    with pytest.raises(InexactError, match=r"halve .* changed gradients in step 1"):
        stepped(optimizer, model)


def clamped(params: Iterable[nn.Parameter]) -> Optimizer:
    def clamp(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        nn.utils.clip_grad_value_(of_groups(optimizer), 0.001)

    optimizer = AdamW(params, lr=0.01)
    optimizer.register_step_pre_hook(clamp)
    return optimizer


def test_a_hook_that_changes_each_element_of_a_gradient_by_itself_is_tried_and_continues() -> None:
    optimizer, model = shard_optimizer(Line(clamped))
    optimizer.try_out()
    stepped(optimizer, model, range(1, 5))


class Warming:
    """A hook with a separate step counter, by which it scales gradients."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.steps += 1
        for param in of_groups(optimizer):
            if param.grad is not None:
                param.grad.mul_(min(1.0, self.steps / 10))


def test_a_hook_that_counts_its_calls_is_refused_and_its_count_put_back() -> None:
    hook = Warming()

    def make(params: Iterable[nn.Parameter]) -> Optimizer:
        optimizer = SGD(params, lr=0.1)
        optimizer.register_step_pre_hook(hook)
        return optimizer

    optimizer, _ = shard_optimizer(Line(make))
    with pytest.raises(InexactError, match=r"the step pre hook Warming of SGD keeps hidden state"):
        optimizer.try_out()
    assert hook.steps == 0


class Seldom(SGD):
    """Shrinks the parameters in every `period`-th step, by a counter outside its state."""

    def __init__(self, params: Iterable[nn.Parameter], period: int, shrinks: bool = True) -> None:
        super().__init__(params, lr=0.1)
        self.period, self.shrinks, self.calls = period, shrinks, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.calls += 1
        if self.calls % self.period == 0 and self.shrinks:
            for param in of_groups(self):
                param.mul_(0.5)


@pytest.mark.parametrize("period", [10, 500, 1_000])
def test_an_optimizer_that_acts_seldom_by_a_counter_outside_its_state_is_refused(period: int) -> None:
    optimizer, _ = shard_optimizer(Line(lambda params: Seldom(params, period)))
    with pytest.raises(InexactError, match=r"Seldom changes self\.calls in its steps: a worker that joins"):
        optimizer.try_out()
    assert vars(optimizer.built.optimizer)["calls"] == 0


def test_a_counter_that_changes_nothing_continues() -> None:
    optimizer, model = shard_optimizer(Line(lambda params: Seldom(params, 10, shrinks=False)))
    optimizer.try_out()
    stepped(optimizer, model, range(1, 3))
    assert vars(optimizer.built.optimizer)["calls"] == 2


def test_an_index_that_grows_in_each_step_is_no_counter() -> None:
    class Listed(SGD):
        def __init__(self, params: Iterable[nn.Parameter]) -> None:
            super().__init__(params, lr=0.1)
            self.place, self.scales = 0, [1.0] * 64

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.scales[self.place] += 0.0
            self.place += 1
            super().step()

    optimizer, _ = shard_optimizer(Line(Listed))
    optimizer.try_out()


def test_a_hook_that_acts_seldom_by_a_closed_over_counter_is_refused() -> None:
    def make(params: Iterable[nn.Parameter]) -> Optimizer:
        count = 0

        def halve(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            nonlocal count
            if count % 10 == 0 and count:
                for param in of_groups(optimizer):
                    if param.grad is not None:
                        param.grad.mul_(0.5)
            count += 1

        optimizer = SGD(params, lr=0.1)
        optimizer.register_step_pre_hook(halve)
        return optimizer

    optimizer, _ = shard_optimizer(Line(make))
    with pytest.raises(InexactError, match=r"the step pre hook .*halve .* of SGD keeps hidden state"):
        optimizer.try_out()


def test_what_a_hook_has_closed_over_is_put_back() -> None:
    count, kept, twin = 0, {"norms": [1.0]}, nn.Linear(5, 3)

    def make(model: nn.Module) -> Optimizer:
        def note(*_: object) -> None:
            nonlocal count
            count += 1
            kept["norms"].append(0.0)
            with torch.no_grad():
                twin.weight.add_(1.0)

        optimizer = SGD(model.parameters(), lr=0.1)
        optimizer.register_step_post_hook(note)
        return optimizer

    before = twin.weight.detach().clone()
    optimizer, model = shard_optimizer(Reaching(make))
    optimizer.try_out()
    assert (count, kept) == (0, {"norms": [1.0]})
    assert torch.equal(twin.weight, before)
    stepped(optimizer, model, [1, 2])
    assert (count, kept) == (2, {"norms": [1.0, 0.0, 0.0]})


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_a_scheduler_that_a_hook_drives_is_refused_with_lr_scale(rate: Any) -> None:
    def make(model: nn.Module) -> Optimizer:
        optimizer = SGD(model.parameters(), lr=copy.deepcopy(rate))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
        return optimizer

    optimizer, model = shard_optimizer(Reaching(make))
    optimizer.try_out()
    with pytest.raises(TaskError, match=r"post hook .* of SGD changed the learning rate .* step 1.*Task\.lr_scale"):
        stepped(optimizer, model)


class WithTwin(nn.Module):
    """A linear model and a frozen average of it."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.average = nn.Linear(5, 3), nn.Linear(5, 3)
        self.average.requires_grad_(requires_grad=False)


class Averaged(rs.Task):
    def build_model(self) -> nn.Module:
        return WithTwin()

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        assert isinstance(model, WithTwin)
        optimizer = SGD(model.net.parameters(), lr=0.1)

        @torch.no_grad()
        def follow(*_: object) -> None:
            for mean, param in zip(model.average.parameters(), model.net.parameters(), strict=True):
                mean.lerp_(param, 0.5)

        optimizer.register_step_post_hook(follow)
        return optimizer


def test_a_hook_that_moves_a_frozen_average_continues() -> None:
    optimizer, model = shard_optimizer(Averaged())
    assert isinstance(model, WithTwin)
    optimizer.try_out()
    expected, before = model.average.weight.detach().clone(), model.net.weight.detach().clone()
    for step in range(1, 5):
        stepped(optimizer, model, [step])
        expected.lerp_(model.net.weight.detach(), 0.5)
    assert not torch.equal(model.net.weight, before)
    assert torch.equal(model.average.weight, expected)


def test_a_hook_that_changes_parameters_is_named_once() -> None:
    said: list[tuple[str, str]] = []

    def make(model: nn.Module) -> Optimizer:
        @torch.no_grad()
        def shrink(*_: object) -> None:
            for param in model.parameters():
                param.mul_(0.5)

        optimizer = SGD(model.parameters(), lr=0.1)
        optimizer.register_step_post_hook(shrink)
        return optimizer

    optimizer, model = shard_optimizer(Reaching(make))
    optimizer.try_out(say=lambda about, sentence: said.append((about, sentence)))
    stepped(optimizer, model, range(1, 5))
    ((_, sentence),) = said
    assert "make.shrink (" in sentence
    assert "of SGD changes parameters" in sentence


def with_a_clamp(model: nn.Module, limited: Callable[[], Iterable[tuple[torch.Tensor, float]]]) -> Optimizer:
    @torch.no_grad()
    def clamp(*_: object) -> None:
        for tensor, limit in limited():
            tensor.clamp_(-limit, limit)

    optimizer = AdamW(model.parameters(), lr=1e-2)
    optimizer.register_step_post_hook(clamp)
    return optimizer


def clamped_from_a_list(model: nn.Module) -> Optimizer:
    held = list(model.parameters())
    return with_a_clamp(model, lambda: ((param, 0.1) for param in held))


def clamped_by_keys(model: nn.Module) -> Optimizer:
    limits = dict.fromkeys(model.parameters(), 0.1)
    return with_a_clamp(model, limits.items)


def clamped_views(model: nn.Module) -> Optimizer:
    views = [param.data for param in model.parameters()]
    return with_a_clamp(model, lambda: ((view, 0.1) for view in views))


def clamped_by_ids(model: nn.Module) -> Optimizer:
    matrices = {id(param) for param in model.parameters() if param.dim() > 1}
    return with_a_clamp(model, lambda: ((param, 0.1) for param in model.parameters() if id(param) in matrices))


def clamped_by_one_id(model: nn.Module) -> Optimizer:
    first = id(next(model.parameters()))
    return with_a_clamp(model, lambda: ((param, 0.1) for param in model.parameters() if id(param) == first))


def clamped_by_weak_keys(model: nn.Module) -> Optimizer:
    limits = WeakTensorKeyDictionary(dict.fromkeys(model.parameters(), 0.1))
    return with_a_clamp(model, limits.items)


def clamped_by_attributes(model: nn.Module) -> Optimizer:
    for param in model.parameters():
        param.limit = 0.1  # type: ignore[attr-defined]
    return with_a_clamp(model, lambda: ((param, getattr(param, "limit", math.inf)) for param in model.parameters()))


def clamped_from_a_module(model: nn.Module) -> Optimizer:
    vars(model)["limited"] = list(model.parameters())
    return with_a_clamp(model, lambda: ((param, 0.1) for param in vars(model)["limited"]))


HOLDS: dict[Callable[[nn.Module], Optimizer], str] = {
    clamped_from_a_list: r"optimizer.*\.held\[0\]",
    clamped_by_keys: r"optimizer.*\.limited",
    clamped_views: r"optimizer.*\.views\[0\]",
    clamped_by_ids: r"optimizer.*\.matrices",
    clamped_by_one_id: r"optimizer.*\.first",
    clamped_by_weak_keys: r"optimizer.*\.limited\.data",
    clamped_by_attributes: r"model\.\w.*\.limit",
    clamped_from_a_module: r"model\[''\]\['limited'\]\[0\]",
}
"""Optimizers whose hooks hold parameters, each in another form, and the way to the first one."""


@pytest.mark.procs
@pytest.mark.parametrize("make", tried_each_time([clamped_by_keys], [clamped_by_keys, clamped_by_attributes]))
def test_a_hook_that_holds_parameters_changes_those_of_every_generation(make: Callable[[nn.Module], Optimizer]) -> None:
    alone, lost = outcomes(make)
    assert alone.numbers == lost.numbers
    assert alone.fingerprint == lost.fingerprint


@pytest.mark.parametrize(
    ("make", "way"),
    [
        *HOLDS.items(),
        (clipped_by_its_model, None),
        (lambda model: torch.optim.Adagrad(model.parameters()), None),
    ],
)
def test_parameters_that_an_optimizer_holds_outside_its_groups_are_found(
    make: Callable[[nn.Module], Optimizer], way: str | None
) -> None:
    optimizer, _ = shard_optimizer(Reaching(make))
    found = optimizer.built.holds_elsewhere
    assert found is None if way is None else re.fullmatch(way, found or "")


# -- schedules --


class Rated(SmallTask):
    """Its schedule is a function of (step, number of the call in this process)."""

    def __init__(self, rate: Callable[[int, int], float]) -> None:
        self._rate, self._calls = rate, 0

    def lr_scale(self, step: int) -> float:
        self._calls += 1
        return self._rate(step, self._calls)


def by_calls(_: int, call: int) -> float:
    return 1 / (1 + call)


def by_steps(step: int, _: int) -> float:
    return 1 / (1 + step)


def by_process(*_: int) -> float:
    return 1 / os.getpid()


def test_a_schedule_that_counts_its_calls_is_refused() -> None:
    with pytest.raises(TaskError, match=r"Rated\.lr_scale\(3\) returned 0\.5 in one call and 0\.333\d* in the next"):
        schedule_item(Rated(by_calls), 3)
    for rate, value in {by_steps: "0.25", lambda *_: math.nan: "invalid"}.items():
        assert schedule_item(Rated(rate), 3).about == value


@pytest.mark.procs
def test_workers_with_other_learning_rates_are_named_with_both() -> None:
    sentence = r"different learning rates with Rated\.lr_scale: worker 0 has schedule 'lr_scale\(1\)' \(.* worker 1"
    with pytest.raises(InexactError, match=sentence):
        train(2, task=Rated(by_process), steps=1, microbatches=2)


class RatedByStart(Rated):
    """Workers that start after a step have another rate, which does not change in a process."""

    def __init__(self, mark: Path) -> None:
        super().__init__(self._of_start)
        self._mark = mark
        self._is_late: bool | None = None

    def _of_start(self, step: int, _: int) -> float:
        self._is_late = self._mark.exists() if self._is_late is None else self._is_late
        if step == 2:
            self._mark.touch()
        return 0.5 if self._is_late else 1.0


@pytest.mark.procs
def test_a_joiner_with_another_learning_rate_is_named(tmp_path: Path) -> None:
    sentence = r"different learning rates with RatedByStart\.lr_scale: .*'lr_scale\(3\)'"
    with pytest.raises(InexactError, match=sentence):
        train(
            2,
            task=RatedByStart(tmp_path / "late"),
            steps=4,
            microbatches=2,
            kills=[(1, 3, "backward")],
            replacement_wait_s=60.0,
        )


# -- steps that were patched --


def test_a_patched_step_is_what_is_tried() -> None:
    def make(params: Iterable[nn.Parameter]) -> Optimizer:
        optimizer = SGD(params, lr=0.1)
        original = optimizer.step

        def step(closure: Any = None) -> Any:
            nn.utils.clip_grad_norm_(of_groups(optimizer), 0.1)
            return original(closure)

        optimizer.step = step  # type: ignore[method-assign]
        return optimizer

    optimizer, _ = shard_optimizer(Line(make))
    with pytest.raises(InexactError, match=r"SGD with .* gives other bits on a shard"):
        optimizer.try_out()


def test_a_patched_step_that_clips_the_model_is_refused_when_it_does() -> None:
    def make(model: nn.Module) -> Optimizer:
        optimizer = SGD(model.parameters(), lr=0.1)
        original = optimizer.step

        def step(closure: Any = None) -> Any:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            return original(closure)

        optimizer.step = step  # type: ignore[method-assign]
        return optimizer

    optimizer, model = shard_optimizer(Reaching(make))
    optimizer.try_out()
    with pytest.raises(InexactError, match=r"SGD\.step\(\) changed gradients in step 1"):
        stepped(optimizer, model)


# -- optimizers inside --


class Several(Optimizer):
    """Steps several optimizers, each with separate parameters; their groups are this one's, or copies."""

    def __init__(self, *optimizers: Optimizer, copies: bool) -> None:
        groups = [dict(group) if copies else group for one in optimizers for group in one.param_groups]
        super().__init__(groups, {})
        self.optimizers = optimizers

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # never called with a closure
        for one in self.optimizers:
            one.step()


class Followed(Optimizer):
    """Steps one optimizer, and pulls its parameters to a slow copy that it keeps."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # never called with a closure
        self.inner.step()
        for param in of_groups(self):
            if param.grad is not None:
                slow = self.state[param].setdefault("exp_avg", torch.zeros_like(param))  # a name that AdamW has, too
                param.lerp_(slow.lerp_(param, 0.5), 0.1)


def several(model: nn.Module, *, copies: bool) -> Optimizer:
    matrices = [param for param in model.parameters() if param.dim() > 1]
    vectors = [param for param in model.parameters() if param.dim() == 1]
    return Several(AdamW(matrices, lr=1e-2), SGD(vectors, lr=1e-2, momentum=0.9), copies=copies)


def followed(model: nn.Module) -> Optimizer:
    return Followed(AdamW(model.parameters(), lr=1e-2))


INSIDE: dict[str, Callable[[nn.Module], Optimizer]] = {
    "groups": functools.partial(several, copies=False),
    "copies": functools.partial(several, copies=True),
    "followed": followed,
}


@pytest.mark.procs
@pytest.mark.parametrize("kind", tried_each_time(["copies"], INSIDE))
def test_optimizers_inside_an_optimizer_are_equal_and_keep_their_momentum(kind: str) -> None:
    alone, lost = outcomes(INSIDE[kind])
    assert lost.bits == alone.bits


def test_the_schedule_reaches_the_groups_of_optimizers_inside() -> None:
    made: list[Several] = []

    def make(params: Iterable[nn.Parameter]) -> Optimizer:
        weight, bias = params
        made.append(Several(SGD([weight], lr=0.5), SGD([bias], lr=0.25), copies=True))
        return made[0]

    optimizer, model = shard_optimizer(Line(make, scales={1: 0.5}))
    optimizer.try_out()
    stepped(optimizer, model)
    assert [one.param_groups[0]["lr"] for one in made[0].optimizers] == [0.25, 0.125]


class Forgetting(Several):
    """Makes an inner optimizer with its first step."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(SGD(params, lr=0.1), copies=False)
        self.late: Optimizer | None = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # never called with a closure
        self.late = self.late or SGD(of_groups(self), lr=0.1, momentum=0.9)
        self.late.step()


def test_an_optimizer_that_makes_another_in_its_first_step_is_refused() -> None:
    optimizer, _ = shard_optimizer(Line(Forgetting))
    with pytest.raises(InexactError, match=r"Forgetting .*: a worker that joins"):
        optimizer.try_out()


# -- other things that the trial sees --


class Rms(SGD):
    """Records the size of its gradients, to log it."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for param in of_groups(self):
            if param.grad is not None:
                self.state[param]["rms"] = param.grad.square().mean().sqrt()


def test_state_that_is_another_number_on_a_shard_is_named() -> None:
    optimizer, _ = shard_optimizer(Line(lambda params: Rms(params, lr=0.1)))
    with pytest.raises(InexactError, match="keeps another 'rms' of a shard than of the whole tensor"):
        optimizer.try_out()


def test_an_optimizer_is_tried_at_a_separate_rate() -> None:
    optimizer, _ = shard_optimizer(Line(lambda params: AdamW(params, lr=0.0, fused=True)))
    with pytest.raises(InexactError, match="gives other bits on a shard"):
        optimizer.try_out()


class InTheThousandthStep(SGD):
    """Changes its rule late."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in of_groups(self):
            kept = self.state[param]
            kept["step"] = kept.get("step", 0) + 1
            if kept["step"] > 1000 and param.grad is not None:
                param.grad.div_(param.grad.norm())
        super().step(closure)


def test_a_rule_that_changes_in_a_later_step_is_tried() -> None:
    optimizer, _ = shard_optimizer(Line(lambda params: InTheThousandthStep(params, lr=0.1)))
    with pytest.raises(InexactError, match="gives other bits on a shard"):
        optimizer.try_out()


def test_a_step_that_wants_a_closure_is_refused_in_words_that_name_the_trial() -> None:
    optimizer, _ = shard_optimizer(Line(torch.optim.LBFGS))
    with pytest.raises(
        TaskError, match=r"LBFGS\.step\(\), tried before the run: it wants a closure .* whose step\(\) works without"
    ):
        optimizer.try_out()


class Elsewhere(SGD):
    """Steps parameters that it keeps outside of its groups."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self.own = list(params)
        super().__init__(self.own, lr=0.1)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.own:
            if param.grad is not None:
                param.data.sub_(param.grad, alpha=0.1)


def test_an_optimizer_that_steps_other_parameters_than_its_groups_is_refused() -> None:
    optimizer, _ = shard_optimizer(Line(Elsewhere))
    with pytest.raises(InexactError, match="a step of Elsewhere does not change the parameters of its groups"):
        optimizer.try_out()


class Assigning(Optimizer):
    """SGD; writes in place, or assigns new values."""

    def __init__(self, params: Any, *, assigns: bool) -> None:
        super().__init__(params, {"lr": 0.1})
        self._assigns = assigns

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # never called with a closure
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and self._assigns:
                    param.data = param.data - group["lr"] * param.grad
                elif param.grad is not None:
                    param.sub_(group["lr"] * param.grad)


class AssigningTask(SmallTask):
    def __init__(self, *, assigns: bool) -> None:
        self._assigns = assigns

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return Assigning(model.parameters(), assigns=self._assigns)


@functools.cache
def in_place() -> Outcome:
    return train(1, task=AssigningTask(assigns=False), steps=2)


@pytest.mark.parametrize("workers", tried_each_time([3], [1, 3]))
def test_an_optimizer_that_assigns_trains_as_one_that_writes_in_place(workers: int) -> None:
    assert train(workers, task=AssigningTask(assigns=True), steps=2).bits == in_place().bits
