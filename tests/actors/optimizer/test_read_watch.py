"""`build_optimizer` runs ahead of the weights: values that it reads, or writes, are refused by the parameter's name."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode
from torch.utils.flop_counter import FlopCounterMode

import raysharded as rs
from raysharded.actors.optimizer.built_optimizer import BuiltOptimizer
from raysharded.errors import TaskError
from raysharded.preflight.builds import build_of
from tests.forked import in_a_fork
from tests.training.harness import GptTask, train


class Made(GptTask):
    """A GPT with an optimizer that a function makes from the model."""

    def __init__(self, make: Callable[[nn.Module], Optimizer]) -> None:
        self._make = make

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return self._make(model)


def _after(act: Callable[[nn.Parameter], object]) -> Callable[[nn.Module], Optimizer]:
    """SGD, made once something was done with each parameter."""

    def make(model: nn.Module) -> Optimizer:
        held = [act(param) for param in model.parameters()]
        optimizer = SGD(model.parameters(), lr=0.1)
        vars(optimizer)["held"] = held
        return optimizer

    return make


READS: dict[str, Callable[[nn.Parameter], object]] = {
    "a mask": lambda param: param != 0,
    "an anchor": lambda param: param.detach().clone(),
    "a copy by deepcopy": copy.deepcopy,
    "a norm": lambda param: float(param.detach().norm()),
    "one element": lambda param: param.detach().flatten()[0].item(),
    "a float32 copy": lambda param: param.detach().double(),
    "a copy into another tensor": lambda param: torch.zeros_like(param).copy_(param.detach()),
    "a comparison": lambda param: torch.equal(param, param),
    "several in one operation": lambda param: torch._foreach_mul([param.detach()], 2.0),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_values_that_build_optimizer_reads_are_refused_by_name(read: Callable[[nn.Parameter], object]) -> None:
    task = Made(_after(read))
    with pytest.raises(TaskError, match=r"test_read_watch.py:\d+: the values of '[\w.]+' were read \(\w+\) in Made"):
        BuiltOptimizer.of(task, task.build_model())


@pytest.mark.procs
def test_a_mask_of_the_shards_of_a_run_is_refused() -> None:
    with pytest.raises(TaskError, match=r"were read \(ne\) in Made.build_optimizer.*optimizer.state\[parameter\]"):
        train(2, task=Made(_after(READS["a mask"])), steps=1, microbatches=2)


@pytest.mark.procs
def test_a_mask_of_the_first_step_in_the_state_gives_the_same_bits_at_every_size() -> None:
    """The way out that the message names."""
    alone, two = (train(workers, task=Made(_Pruned), steps=2, microbatches=2) for workers in (1, 2))
    assert alone.bits == two.bits


class _Pruned(SGD):
    """Keeps its zeros."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]  # never called with a closure
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if not state:
                        state["mask"] = (param != 0).to(param.dtype)
                    param.sub_(param.grad * state["mask"] * group["lr"])


def test_weights_that_build_optimizer_writes_are_refused() -> None:
    task = Made(_after(lambda param: param.data.mul_(0.5)))
    with pytest.raises(TaskError, match=r"mul_ of '[\w.]+' would be lost.*Task.init_weights"):
        BuiltOptimizer.of(task, task.build_model())


HARMLESS: dict[str, Callable[[nn.Parameter], object]] = {
    "views": lambda param: (param.detach().view(-1), param.data, param.unsqueeze(0), param.T if param.dim() > 1 else 0),
    "tensors of its shape": lambda param: (
        torch.zeros_like(param),
        torch.empty_like(param),
        torch.full_like(param, 2.0),
        torch.rand_like(param),
        param.new_zeros(3),
        torch.zeros(param.shape),
        torch.empty(0).resize_as_(param.detach()).zero_(),
        torch.zeros(1).expand_as(param),
    ),
    "shape reads": lambda param: (param.numel(), param.shape, param.dtype, param.is_contiguous(), param.stride()),
    "a text": lambda param: f"{param}",
    "a move to where it is": lambda param: (param.to(param.device), param.float(), param.contiguous(), param.cpu()),
    "a hook": lambda param: param.register_post_accumulate_grad_hook(lambda _: None),
    "a form without memory": lambda param: param.detach().to("meta"),
}


@pytest.mark.parametrize("act", HARMLESS.values(), ids=HARMLESS)
def test_what_reads_no_value_is_allowed(act: Callable[[nn.Parameter], object]) -> None:
    task = Made(_after(act))
    assert BuiltOptimizer.of(task, task.build_model()).optimizer.param_groups


OF_TORCH = [one for one in vars(torch.optim).values() if isinstance(one, type) and issubclass(one, Optimizer)]


@pytest.mark.parametrize("kind", [one for one in OF_TORCH if one is not Optimizer])
def test_the_constructors_of_all_optimizers_of_torch_read_nothing(kind: type[Optimizer]) -> None:
    task = Made(lambda model: kind([one for one in model.parameters() if one.dim() == 2], lr=0.1))  # type: ignore[call-arg]
    assert BuiltOptimizer.of(task, task.build_model()).optimizer.param_groups


def test_a_mode_that_build_optimizer_leaves_entered_stays_without_the_watch() -> None:
    mode = FlopCounterMode(display=False)

    def make(model: nn.Module) -> Optimizer:
        mode.__enter__()
        return SGD(model.parameters(), lr=0.1)

    task = Made(make)
    model = task.build_model()
    before = len(_get_current_dispatch_mode_stack())
    try:
        BuiltOptimizer.of(task, model)
        left = _get_current_dispatch_mode_stack()[before:]
        assert [type(one).__name__ for one in left] == ["_FlopCounterMode"]
    finally:
        mode.mod_tracker.__exit__(None, None, None)  # it hooks all modules of the process
        while len(_get_current_dispatch_mode_stack()) > before:
            _pop_mode()


class Anchored(GptTask):
    """Keeps a copy of the first weights."""

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return _after(READS["an anchor"])(model)


class Shaped(GptTask):
    """Makes tensors of the shapes of the parameters."""

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return _after(HARMLESS["tensors of its shape"])(model)


class Fails(GptTask):
    """Its optimizer cannot be made where the program is checked."""

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        raise ValueError("needs a GPU")


@pytest.mark.procs
def test_a_check_of_the_program_refuses_reads_and_no_other_error_of_the_method() -> None:
    for task in (Shaped(), Fails()):
        in_a_fork(build_of, task, rs.EngineConfig(), 1, 5)
    with pytest.raises(TaskError, match=r"were read \(clone\) in Anchored.build_optimizer"):
        in_a_fork(build_of, Anchored(), rs.EngineConfig(), 1, 5)
