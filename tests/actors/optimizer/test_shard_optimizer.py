"""The optimizer over shards: bits that do not show the cut, or a refusal that names the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import raysharded as rs
from raysharded.actors.optimizer.inner_optimizers import stand_ins
from raysharded.actors.optimizer.shard_optimizer import ShardOptimizer
from raysharded.actors.optimizer.step_hooks import HookCalls
from raysharded.actors.optimizer.trial import try_out
from raysharded.actors.optimizer.trial_tensors import TrialStep, likes_of, representatives
from raysharded.errors import CheckpointError, InexactError, TaskError
from tests.training.harness import GptTask, SmallTask, samples, train

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Signs(torch.optim.Optimizer):
    """Element-wise; counts its steps in a Python int and keeps a decay as a Python float."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # never called with a closure
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["count"] = state.get("count", 0) + 1
                    state["decay"] = state.get("decay", 1.0) * 0.9
                    param.sub_(param.grad.sign() * group["lr"] * state["decay"])


class MatricesByNorm(Signs):
    """As Muon and its kin: matrices by a rule that sees the whole matrix, vectors element by element."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # never called with a closure
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    scale = param.grad.norm() if param.dim() > 1 else 1.0
                    param.sub_(param.grad / scale * group["lr"])


class Line(rs.Task):
    """A linear model with a chosen optimizer and schedule."""

    def __init__(self, make: Make, scales: dict[int, float] | None = None) -> None:
        self._make, self._scales = make, scales or {}

    def build_model(self) -> nn.Module:
        return nn.Linear(5, 3)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return self._make(model.parameters())

    def lr_scale(self, step: int) -> float:
        return self._scales.get(step, 1.0)


def shard_optimizer(task: rs.Task, *, exact: bool = True) -> tuple[ShardOptimizer, nn.Module]:
    torch.manual_seed(0)
    model = task.build_model()
    return ShardOptimizer(task, model, dict(model.named_parameters()), exact=exact), model


ELEMENTWISE: dict[str, Make] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "AdamW, foreach": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
    "Adam, amsgrad": lambda params: torch.optim.Adam(params, lr=0.1, amsgrad=True, weight_decay=0.1),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "SGD, momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
    "SGD, nesterov": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "a user's own": Signs,
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_element_wise_optimizers_pass_the_check(name: str) -> None:
    optimizer, _ = shard_optimizer(Line(ELEMENTWISE[name]))
    optimizer.try_out()


def test_fused_sgd_on_the_cpu_is_refused_with_the_setting_that_passes() -> None:
    fused, _ = shard_optimizer(
        Line(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True))
    )
    with pytest.raises(InexactError, match=r"SGD with .*'fused': True.* Pass foreach=True, fused=False"):
        fused.try_out()


@pytest.mark.parametrize("make", [torch.optim.Adafactor, MatricesByNorm])
def test_optimizers_that_see_whole_tensors_are_refused(make: Make) -> None:
    optimizer, _ = shard_optimizer(Line(make))
    with pytest.raises(InexactError, match=r"gives other bits on a shard than on the whole tensor|in the shape"):
        optimizer.try_out()


@pytest.mark.parametrize("rate", [None, "fast"])
def test_an_optimizer_without_a_learning_rate_is_refused_before_its_first_step(rate: Any) -> None:
    def make(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(params, lr=0.1)
        optimizer.param_groups[0]["lr"] = rate  # as Adafactor of transformers has with relative_step
        return optimizer

    with pytest.raises(TaskError, match=r"build_optimizer: parameter group 0 of SGD has lr=.*\. Give it a number"):
        shard_optimizer(Line(make))


class Remembers(torch.optim.SGD):
    """Divides its learning rate by the number of its steps, which it keeps somewhere."""

    def __init__(self, params: Iterable[nn.Parameter], where: str) -> None:
        super().__init__(params, lr=0.1)
        self.where, self.steps, self.running = where, 0, torch.zeros(2)

    def count(self) -> float:
        match self.where:
            case "group":
                self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
                return float(self.param_groups[0]["k"])
            case "state":
                self.state["k"] = self.state.get("k", 0) + 1  # type: ignore[index, call-overload]  # as some do
                return float(self.state["k"])  # type: ignore[index]
            case "attribute":
                self.steps += 1
                return float(self.steps)
            case "several":
                self.steps += 1
                self.running += 1
                return float(self.steps + self.running[0])
            case _:
                self.running += 1
                return float(self.running[0])

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        lr = self.param_groups[0]["lr"] / self.count()
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param.data.add_(param.grad, alpha=-lr)


def stepped(make: Make) -> ShardOptimizer:
    optimizer, model = shard_optimizer(Line(make))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.apply(1, 1.0)
    return optimizer


def test_the_state_of_another_optimizer_is_named_when_it_does_not_do() -> None:
    saved = stepped(ELEMENTWISE["AdamW"])
    other, model = shard_optimizer(Line(torch.optim.RMSprop))
    other.load_state(saved.state(), saved.number_names())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with pytest.raises(CheckpointError, match=r"RMSprop misses 'square_avg' in the state that was saved"):
        other.apply(2, 1.0)


def test_the_state_of_a_parameter_that_the_optimizer_does_not_have_is_refused_by_name() -> None:
    saved = stepped(ELEMENTWISE["AdamW"])
    own, _ = shard_optimizer(Line(ELEMENTWISE["AdamW"]))
    values = {f"more.{name}": value for name, value in saved.state().items()}
    with pytest.raises(CheckpointError, match=r"of 'more\..*', which is in no group of this AdamW"):
        own.load_state(values, frozenset())


class Harmless(torch.optim.AdamW):
    """Keeps its parameters in a list, counts its steps and remembers a number; none of it changes a step."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, lr=0.1)
        self.everything = [param for group in self.param_groups for param in group["params"]]
        self.calls = 0
        self.last_norm: float | None = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.calls += 1
        self.last_norm = sum(float(param.detach().norm()) for group in self.param_groups for param in group["params"])
        self.newest = self.last_norm


def test_what_an_optimizer_remembers_and_does_not_use_is_its_own_affair() -> None:
    optimizer, _ = shard_optimizer(Line(Harmless))
    optimizer.try_out()


class HarmlessTask(GptTask):
    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return Harmless(model.parameters())


@pytest.mark.procs
def test_an_optimizer_that_keeps_its_parameters_in_a_list_trains_on_two_workers() -> None:
    assert len(train(2, task=HarmlessTask(), steps=2).losses) == 2


class Late(torch.optim.SGD):
    """Averages its parameters from a later step on."""

    def __init__(self, params: Iterable[nn.Parameter], first: int) -> None:
        super().__init__(params, lr=0.1)
        self.first = first

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            kept = self.state[param]
            kept["n"] = kept.get("n", 0) + 1
            if kept["n"] >= self.first:
                kept.setdefault("mean", param.detach().clone())
        super().step(closure)


@pytest.mark.parametrize(
    ("where", "named"),
    [
        ("group", "'k' of its groups"),
        ("state", r"state\['k'\]"),
        ("attribute", "self.steps"),
        ("tensor", "self.running"),
        ("several", "self.running"),
    ],
)
def test_what_an_optimizer_remembers_elsewhere_than_in_its_parameters_state_is_named(where: str, named: str) -> None:
    optimizer, _ = shard_optimizer(Line(lambda params: Remembers(params, where)))
    with pytest.raises(InexactError, match=f"Remembers changes {named} in its steps"):
        optimizer.try_out()
    assert vars(optimizer._optimizer)["steps"] == 0
    assert not vars(optimizer._optimizer)["running"].any()


def test_numbers_in_the_groups_are_none_of_it_where_a_session_hands_them_on() -> None:
    counting, remembering = (shard_optimizer(Line(partial(Remembers, where=where)))[0] for where in ("group", "state"))
    for optimizer in (counting, remembering):
        optimizer.built.keeps_groups = True
    counting.try_out()
    assert "k" not in counting._optimizer.param_groups[0]
    with pytest.raises(InexactError, match=r"Remembers changes state\['k'\] in its steps"):
        remembering.try_out()


def test_state_that_is_made_after_the_first_step_is_named() -> None:
    optimizer, _ = shard_optimizer(Line(lambda params: Late(params, 3)))
    with pytest.raises(InexactError, match=r"Late makes 'mean' of its state after its first step"):
        optimizer.try_out()


class LateTask(SmallTask):
    """Its optimizer makes state after the last check."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return Late(model.parameters(), 10)


@pytest.mark.procs
def test_state_that_is_made_long_after_the_first_step_ends_the_run() -> None:
    with pytest.raises(InexactError, match=r"the optimizer's state of .* has other keys"):
        train(2, task=LateTask(), data=samples(), microbatches=2, steps=12)


class Common(torch.optim.SGD):
    """Its parameters have one tensor in common, which counts their steps; the first one moves it."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        first, *others = params = [param for group in self.param_groups for param in group["params"]]
        count = self.state[first].setdefault("count", torch.zeros(()))
        for param in others:
            self.state[param].setdefault("count", count)
        count += 1
        for param in params:
            param.grad.div_(self.state[param]["count"])
        super().step(closure)


class Twins(torch.optim.SGD):
    """Keeps a view of each parameter's memory, and moves the parameter through it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault("twin", param.detach()).sub_(param.grad, alpha=group["lr"])


class Vectors(Line):
    """A model of two parameters of one shape."""

    def build_model(self) -> nn.Module:
        return nn.ParameterList([torch.ones(3), torch.zeros(3)])


@pytest.mark.parametrize("task", [Line, Vectors])
@pytest.mark.parametrize("made", [Common, Twins])
def test_state_that_shares_its_memory_is_refused(made: type[torch.optim.SGD], task: type[Line]) -> None:
    optimizer, _ = shard_optimizer(task(lambda params: made(params, lr=0.1)))
    with pytest.raises(InexactError, match=rf"{made.__name__} .*: a worker that joins, or takes another's place"):
        optimizer.try_out()


class Keyed(torch.optim.SGD):
    """Keeps an average of its gradients under a key."""

    def __init__(self, params: Iterable[nn.Parameter], key: Any) -> None:
        super().__init__(params, lr=0.1)
        self.key = key

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault(self.key, torch.zeros_like(param)).lerp_(param.grad, 0.1)


@pytest.mark.parametrize("key", [0, "a.b", "a:b"])
def test_a_key_of_state_that_is_no_name_is_refused(key: Any) -> None:
    optimizer, _ = shard_optimizer(Line(partial(Keyed, key=key)))
    with pytest.raises(InexactError, match=rf"Keyed keeps state of a parameter under {key!r}: that has no name"):
        optimizer.try_out()
    shard_optimizer(Line(partial(Keyed, key="a_b")))[0].try_out()


class Scaled(torch.optim.SGD):
    """Scales a parameter's gradient by an attribute of the parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.grad.mul_(getattr(param, "lr_mul", 1.0))
        super().step(closure)


class Whole(Scaled):
    """Steps parameters with an attribute by a rule that is missing here."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if any(hasattr(param, "lr_mul") for group in self.param_groups for param in group["params"]):
            raise RuntimeError("a process group is missing")
        super().step(closure)


class Marked(Vectors):
    """A model of which the second parameter has an attribute."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        vars(model.get_parameter("1"))["lr_mul"] = 2.0
        return model


@pytest.mark.parametrize("made", [Scaled, Whole])
def test_a_step_that_reads_attributes_of_parameters_is_refused_by_their_names(made: type[torch.optim.SGD]) -> None:
    optimizer, _ = shard_optimizer(Marked(lambda params: made(params, lr=0.1)))
    with pytest.raises(
        InexactError, match=rf"a step of {made.__name__} depends on attributes .* \('lr_mul'\): it steps"
    ):
        optimizer.try_out()
    for task in (Marked(ELEMENTWISE["AdamW"]), Vectors(lambda params: made(params, lr=0.1))):
        shard_optimizer(task)[0].try_out()


class Fading(torch.optim.SGD):
    """Scales its gradients by a number that is whole until the rate has one of these values."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, first: float, until: float) -> None:
        super().__init__(params, lr=lr)
        self.first, self.fades_at = first, until

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                kept = self.state[param]
                kept.setdefault("scale", self.first)
                if group["lr"] == self.fades_at:
                    kept["scale"] *= 0.5
                if param.grad is not None:
                    param.grad.mul_(kept["scale"])
        super().step(closure)


def test_state_that_changes_its_type_is_named_with_both() -> None:
    optimizer, _ = shard_optimizer(Line(lambda params: Fading(params, 0.1, 1, 0.1)))
    with pytest.raises(InexactError, match=r"Fading turns 'scale' of its state from int into float after its first"):
        optimizer.try_out()
    fraction, _ = shard_optimizer(Line(lambda params: Fading(params, 0.1, 1.0, 0.1)))
    fraction.try_out()


class FadingTask(GptTask):
    """Its optimizer's number becomes a fraction in the second step, at a rate that no trial has."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return Fading(model.parameters(), 0.5, 1, 0.125)

    def lr_scale(self, step: int) -> float:
        return 0.25 if step == 2 else 1.0


@pytest.mark.procs
def test_state_that_changes_its_type_after_its_trial_ends_the_run() -> None:
    sentence = r"scale' of the state was a number of int64 at first, and is a number of float64 now"
    with pytest.raises(InexactError, match=sentence):
        train(1, task=FadingTask(), steps=3, microbatches=2)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_torchs_optimizers_keep_what_they_remember_where_it_is_handed_on(name: str) -> None:
    optimizer, _ = shard_optimizer(Line(ELEMENTWISE[name]))
    optimizer.try_out()
    assert optimizer.state() == {}


def test_an_optimizer_that_takes_matrices_alone_is_refused_too() -> None:
    def make(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Muon([param for param in params if param.dim() == 2], lr=0.1)

    class Matrix(Line):
        def build_model(self) -> nn.Module:
            return nn.Linear(5, 3, bias=False)

    optimizer, _ = shard_optimizer(Matrix(make))
    with pytest.raises(InexactError, match="Muon"):
        optimizer.try_out()


def test_one_bad_group_is_enough_to_be_refused() -> None:
    weight, bias = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    bad: dict[str, Any] = {"params": [bias], "momentum": 0.9, "weight_decay": 0.1, "fused": True}
    groups: list[dict[str, Any]] = [{"params": [weight]}, bad]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    assert try_out(optimizer, HookCalls(optimizer)).cut is not None


def test_the_check_leaves_the_optimizer_as_it_was() -> None:
    optimizer, model = shard_optimizer(Line(ELEMENTWISE["AdamW"]))
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer.try_out()
    assert optimizer.state() == {}
    assert all(torch.equal(param.detach(), before[name]) for name, param in model.named_parameters())


@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_learning_rate_is_a_function_of_the_step_alone(as_tensor: bool) -> None:
    def make(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=torch.tensor(0.5) if as_tensor else 0.5)

    optimizer, model = shard_optimizer(Line(make, scales={1: 0.5, 2: 0.25, 3: 2.0}))
    learned = []
    for step in (1, 2, 3, 3):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        before = next(model.parameters()).detach().clone()
        rate = optimizer.apply(step, 1.0)
        assert torch.allclose(before - next(model.parameters()).detach(), torch.tensor(rate))
        learned.append(rate)
    assert learned == [0.25, 0.125, 1.0, 1.0]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_state_that_was_put_away_and_loaded_continues_with_the_same_bits(name: str) -> None:
    task = Line(ELEMENTWISE[name])
    (one, model), (other, twin) = shard_optimizer(task), shard_optimizer(task)
    numbers = frozenset[str]()
    for step in range(1, 5):
        for index, (param, of_twin) in enumerate(zip(model.parameters(), twin.parameters(), strict=True)):
            param.grad = torch.full_like(param, 0.1 * step - 0.3 * index)
            of_twin.grad = param.grad.clone()
        if step == 3:  # the twin takes over from the state that the first saved
            with torch.no_grad():
                for param, of_twin in zip(model.parameters(), twin.parameters(), strict=True):
                    of_twin.copy_(param)
            numbers = one.number_names()
            other.load_state({key: value.clone() for key, value in one.state().items()}, numbers)
        one.apply(step, 0.7)
        if step >= 3:
            other.apply(step, 0.7)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert one.state().keys() == other.state().keys()
    assert all(torch.equal(value, other.state()[key]) for key, value in one.state().items())
    assert numbers == other.number_names()
    assert (len(numbers) == 4) == (name == "a user's own")


def test_a_trainable_parameter_that_no_group_has_is_named() -> None:
    with pytest.raises(TaskError, match=r"1 trainable parameters are in no group of the optimizer, first 'bias'"):
        shard_optimizer(Line(lambda params: torch.optim.SGD(list(params)[:1], lr=0.1)))


def test_a_parameter_from_elsewhere_is_refused() -> None:
    stranger = nn.Parameter(torch.ones(7))
    with pytest.raises(TaskError, match=r"a parameter of shape \(7,\) that is not in the model"):
        shard_optimizer(Line(lambda params: torch.optim.SGD([*params, stranger], lr=0.1)))


class Shrinking:
    """A step hook that halves gradients in each tenth step, by a count that a loop may register."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.steps += 1
        for group in optimizer.param_groups:
            for param in group["params"] if self.steps % 10 == 0 else ():
                param.grad.mul_(0.5)


@pytest.mark.parametrize("is_registered", [False, True])
def test_a_counter_is_no_hidden_state_if_it_is_registered(is_registered: bool) -> None:
    optimizer, hook = torch.optim.SGD(nn.Linear(5, 3).parameters(), lr=0.1), Shrinking()
    optimizer.register_step_pre_hook(hook)
    verdict = try_out(optimizer, HookCalls(optimizer), keeps_groups=True, registered=[hook] if is_registered else [])
    assert (verdict.kept is None) is is_registered


@pytest.mark.parametrize(("different", "tried"), [(3, 3), (40, 2)])
def test_parameters_with_an_attribute_of_each_are_not_all_tried(different: int, tried: int) -> None:
    params = [nn.Parameter(torch.zeros(4, 3)) for _ in range(40)]
    marks = {id(param): {"rank": number % different} for number, param in enumerate(params)}
    with stand_ins(torch.optim.SGD(params, lr=0.1)) as standing:
        assert len(representatives(likes_of(standing, marks), [TrialStep()])) == tried


def test_state_that_is_left_out_counts_as_kept_and_a_deleted_entry_does_not() -> None:
    def stepped(optimizer: ShardOptimizer, model: nn.Module) -> dict[str, int]:
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.apply(1, 1.0)
        return optimizer.num_tensors()

    before, its_model = shard_optimizer(Line(ELEMENTWISE["Adam, amsgrad"]))
    kept = stepped(before, its_model)
    after, model = shard_optimizer(Line(ELEMENTWISE["AdamW"]))
    after.try_out()
    after.load_state(before.state(), before.number_names())
    assert after.num_tensors() == kept == dict.fromkeys(("weight", "bias"), 4)
    assert stepped(after, model) == kept
    assert not [name for name in after.state() if "max_exp_avg_sq" in name]
    del after.built.optimizer.state[after.written["bias"]]["exp_avg"]
    assert after.num_tensors() == {"weight": 4, "bias": 3}
