"""The findings about a task without a device: its units, its optimizer's state, and the tensors that it keeps alive."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import raysharded as rs
from raysharded.actors.model.build import build_on_meta, find_units
from raysharded.errors import TaskError
from raysharded.planning.models.shapes import Slot, Transient
from raysharded.planning.tracing.measurement import measure
from raysharded.planning.tracing.tensor_lifetimes import MemoryFollower
from tests.actors.fake_group import build
from tests.planning.models import LlamaTask, OddTask
from tests.training.harness import GptTask, Tokens

SAMPLES = [Tokens()[0], Tokens()[1]]


@pytest.mark.parametrize("task", [GptTask(), OddTask(), LlamaTask()], ids=["gpt", "odd", "llama"])
def test_units_are_those_of_fsdp2(task: rs.Task) -> None:
    shapes, _ = measure(task, rs.EngineConfig(), SAMPLES)
    sharded = build(task)
    assert {unit.name for unit in shapes.units} == {name for name, _ in sharded.units}
    assert {p.name: (p.shape, p.trainable) for p in shapes.parameters} == {
        name: (tuple(param.shape), param.requires_grad) for name, param in sharded.parameters.items()
    }
    assert {b.name for b in shapes.buffers if b.persistent} == set(sharded.persistent_buffers)
    names = {id(param): name for name, param in sharded.parameters.items()}
    left = set(names)
    for name, unit in sharded.units:  # inner ones first: their parameters are not the outer ones'
        assert isinstance(unit, nn.Module)
        held = left.intersection(map(id, unit.parameters()))
        (ours,) = (each for each in shapes.units if each.name == name)
        assert {names[param] for param in held} == {param.name for param in ours.parameters}
        left -= held
    assert not left


def test_a_buffer_outside_the_state_may_have_any_dtype() -> None:
    class Rotated(OddTask):
        def build_model(self) -> nn.Module:
            model = super().build_model()
            model.register_buffer("rotations", torch.ones(29, dtype=torch.complex64), persistent=False)
            return model

    shapes, _ = measure(Rotated(), rs.EngineConfig(), SAMPLES)
    assert (shapes.buffer_bytes, "buffer.rotations" in {t.name for t in shapes.state.tensors}) == (29 * 8, False)


def test_the_optimizers_state_is_what_it_keeps() -> None:
    shapes, _ = measure(GptTask(), rs.EngineConfig(), SAMPLES)
    step = Slot(key="step", dtype="float32", scalar=True)
    moments = [Slot(key=key, dtype="float32") for key in ("exp_avg", "exp_avg_sq")]
    assert all(set(p.slots) == {step, *moments} for p in shapes.parameters)
    assert shapes.transient == Transient(of_largest=8.0, of_all=0.0)
    shapes, _ = measure(OddTask(), rs.EngineConfig(), SAMPLES)
    assert {p.slots for p in shapes.parameters if p.trainable} == {(Slot(key="momentum_buffer", dtype="float32"),)}
    assert [p.slots for p in shapes.parameters if not p.trainable] == [()]
    shapes, _ = measure(LlamaTask(), rs.EngineConfig(), SAMPLES)
    assert shapes.transient.of_all >= 4.0  # foreach=True


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("task", [GptTask(), OddTask(), LlamaTask()], ids=["gpt", "odd", "llama"])
def test_fake_tensors_take_what_real_ones_take(task: rs.Task, checkpointing: bool) -> None:
    engine = rs.EngineConfig(activation_checkpointing=checkpointing)
    shapes, trace = measure(task, engine, SAMPLES)
    model = build_on_meta(task, engine, 0).model
    find_units(task, engine, model)
    model = model.to_empty(device="cpu")
    batch = torch.stack([torch.as_tensor(sample) for sample in SAMPLES])
    follower = MemoryFollower()
    with follower:
        follower.ignore([*model.parameters(), *model.buffers()])
        follower.follow(batch)
        loss = task.loss(model, batch)
        assert isinstance(loss, rs.Loss)
        assert follower.peak == max(phase.peak for phase in trace.phases if not phase.backward)
        loss.total.backward()
    expected = done = 0  # without FSDP2 the gradients of units that are done stay
    for phase in trace.phases:
        expected = max(expected, phase.peak + done)
        if phase.ends_unit:
            done += sum(p.size_bytes for p in shapes.units[phase.unit].parameters if p.trainable)
    assert follower.peak == expected


def test_nothing_is_allocated_and_random_state_stays() -> None:
    class Large(GptTask):
        def build_model(self) -> nn.Module:
            return nn.Sequential(nn.Embedding(67, 1 << 15), nn.Linear(1 << 15, 1 << 15), nn.Linear(1 << 15, 67))

        def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = model(batch).float().sum()
            return loss

    before = torch.get_rng_state()
    shapes, trace = measure(Large(), rs.EngineConfig(), SAMPLES)
    assert shapes.size_bytes > 4 << 30
    assert trace.peak > 4 << 30  # the whole gradient
    assert torch.equal(before, torch.get_rng_state())


def test_a_loss_that_inspects_values_is_refused() -> None:
    class Looks(GptTask):
        def loss(self, model: nn.Module, batch: torch.Tensor) -> Any:
            return super().loss(model, batch) if batch.sum().item() > 0 else None

    with pytest.raises(TaskError, match=r"Looks\.loss reads the values of tensors"):
        measure(Looks(), rs.EngineConfig(), SAMPLES)


def test_a_loss_that_fails_is_the_tasks_error() -> None:
    class Fails(GptTask):
        def loss(self, model: nn.Module, batch: torch.Tensor) -> Any:
            return model(batch[:, :-1]) @ batch

    with pytest.raises(TaskError, match=r"Fails\.loss raised RuntimeError: ") as error:
        measure(Fails(), rs.EngineConfig(), SAMPLES)
    assert "test_measuring.py" in error.value.user_traceback
