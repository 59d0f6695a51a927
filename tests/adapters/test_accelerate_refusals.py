"""Settings and calls of an `Accelerator` that a session cannot keep are refused by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import raysharded as rs
from raysharded.adapters.accelerate import elastic
from raysharded.adapters.accelerate_parts import require_loader, require_supported
from raysharded.errors import ConfigError, TaskError

BATCH = rs.BatchConfig(global_batch_size=8, microbatch_size=2)
DATA: Any = [torch.ones(3)] * 8


@pytest.fixture(autouse=True)
def _new_state() -> Iterator[None]:
    """accelerate keeps the first settings of a process."""
    _forget()
    yield
    _forget()


def _forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def made(**settings: Any) -> Any:
    """An accelerator ahead of the first step of a session."""
    session: Any = SimpleNamespace(batch=BATCH, step=None, max_steps=4, _task=SimpleNamespace())
    return elastic(Accelerator, session)(cpu=True, **settings)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"mixed_precision": "bf16"}, r"mixed_precision='bf16'\): give EngineConfig\(param_dtype"),
        ({"gradient_accumulation_steps": 3}, r"gradient_accumulation_steps=3\): a step of the run has 4 microbatches"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_setting_that_cannot_be_kept_is_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        made(**settings)


@pytest.mark.parametrize("kind", [kind for kind in DistributedType if kind != DistributedType.NO], ids=str)
def test_each_launch_and_plugin_of_accelerate_is_refused(kind: DistributedType) -> None:
    launched = SimpleNamespace(distributed_type=kind, mixed_precision="no", gradient_accumulation_steps=1)
    with pytest.raises(
        ConfigError, match=rf"a part of {kind.value}: start the script with python, not with accelerate"
    ):
        require_supported(launched, BATCH)


def test_usual_settings_are_accepted() -> None:
    for accumulated in (1, 2, 4):
        assert made(gradient_accumulation_steps=accumulated).gradient_accumulation_steps == accumulated


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from DATA


@pytest.mark.parametrize(
    ("loader", "named"),
    [
        (lambda: DataLoader(Endless(), batch_size=2), "the training data need a length and items"),
        (
            lambda: DataLoader(DATA, batch_size=2, sampler=DistributedSampler(DATA, num_replicas=1, rank=0)),
            r"sampler=DistributedSampler\(\.\.\.\)\): the order of samples belongs to the run",
        ),
        (lambda: DataLoader(DATA, batch_size=4), r"batch_size=4\) and BatchConfig\(microbatch_size=2\) are one thing"),
    ],
    ids=["no length", "sampler", "batch_size"],
)
def test_training_data_that_cannot_be_kept_are_refused(loader: Callable[[], DataLoader[Any]], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        require_loader(loader(), BATCH)


def test_prepare_takes_everything_in_one_call() -> None:
    model, data = nn.Linear(3, 1), DataLoader(DATA, batch_size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parts in ((model, optimizer), (model, data), (optimizer, data), (model, nn.Linear(3, 1), optimizer, data)):
        with pytest.raises(ConfigError, match=r"accelerator\.prepare\(\.\.\.\): call it once, with one model"):
            made().prepare(*parts)
    prepared = made()
    prepared._train = data
    with pytest.raises(ConfigError, match=r"accelerator\.prepare\(\.\.\.\): call it once"):
        prepared.prepare(model, optimizer, data)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda it: it.clip_grad_value_([], 1.0), r"clip_grad_value_: change gradients in a hook"),
        (lambda it: it.clip_grad_norm_([], 1.0, norm_type=1), r"clip_grad_norm_\(norm_type=1\): a session clips the 2"),
        (lambda it: it.gather_for_metrics(["text"]), r"gather_for_metrics: a session gathers tensors alone"),
        (lambda it: it.gather_for_metrics(torch.ones(1), use_gather_object=True), "a session gathers tensors alone"),
        (lambda it: it.gather({"number": 1}), "a session gathers tensors alone"),
    ],
    ids=["clip_grad_value_", "norm_type", "text", "use_gather_object", "a number"],
)
def test_a_call_that_cannot_be_kept_is_refused(call: Callable[[Any], Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        call(made())


def test_a_loop_in_another_form_is_refused_with_the_lines_to_write() -> None:
    with pytest.raises(TaskError, match=r"write `for epoch in accelerator\.epochs\(num_epochs\)` around the loop"):
        next(made().microbatches())
    with pytest.raises(TaskError, match=r"belongs into `with accelerator\.accumulate\(model\):`"):
        made().backward(torch.ones(()))
