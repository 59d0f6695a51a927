"""Programs that FSDP2 alone does not accept: equal at every size, and equal to plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

import raysharded as rs
from raysharded.actors.model.init_weights import first_build
from raysharded.actors.model.unsharded_params import refuse_spread_scalars
from raysharded.actors.optimizer.shard_optimizer import ShardOptimizer
from raysharded.checkpoint import list_checkpoints, open_checkpoint, open_storage
from raysharded.data.order import sample_ids
from raysharded.errors import ConfigError
from raysharded.task import Strategy
from tests.actors.fake_group import build, fake_mesh
from tests.cases import tried_each_time
from tests.training.error_tasks import WIDTH, Net, Regression, rows
from tests.training.harness import Collector, Outcome, make_driver, make_job, make_limits, train
from tests.training.llama import LlamaTask

pytestmark = pytest.mark.procs
MICROBATCHES, STEPS, SEED = 5, 3, 5


class Residual(nn.Module):
    """A block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Stages(Regression):
    """Stages of blocks: a list of lists, one of dicts, and modules without a forward that blocks are assigned to."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList([nn.ModuleList([Residual() for _ in range(2)]) for _ in range(2)])
            self.named = nn.ModuleList([nn.ModuleDict({"block": Residual(), "none": nn.Identity()})])
            self.down = nn.ModuleList([nn.Module()])
            self.down[0].block = nn.ModuleList([Residual()])
            self.down[0].sample = nn.Sequential(Residual(), nn.Linear(WIDTH, WIDTH))
            self.head = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for stage in self.stages:
                for block in stage:  # type: ignore[attr-defined]
                    x = block(x)
            x = self.named[0]["none"](self.named[0]["block"](x))  # type: ignore[index]
            x = self.down[0].sample(self.down[0].block[0](x))  # type: ignore[operator, index]
            y: torch.Tensor = self.head(x)
            return y

    def build_model(self) -> nn.Module:
        return self.Model()


class Scalars(Regression):
    """A scalar that the loss reads outside of the model's forward, one that units share, one in each unit, one that
    only some microbatches use, and a frozen one; with a gradient hook, weight decay and moments."""

    class Block(nn.Module):
        def __init__(self, shared: nn.Parameter) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.shared, self.gain = shared, nn.Parameter(torch.tensor(0.7))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.linear(x * self.shared)) * self.gain

    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            shared = nn.Parameter(torch.tensor(1.3))
            self.layers = nn.ModuleList([Scalars.Block(shared) for _ in range(2)])
            self.temperature = nn.Parameter(torch.tensor(1.5))
            self.temperature.register_hook(torch.neg)
            self.sometimes = nn.Parameter(torch.tensor(0.9))
            self.frozen = nn.Parameter(torch.tensor(2.0), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = super().forward(x) * self.frozen
            return y * self.sometimes if float(x[0, 0]) > 0.9 else y

    def build_model(self) -> nn.Module:
        return self.Model()

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        scalars = [param for param in model.parameters() if not param.dim()]
        assert len(scalars) == 6, "they have the shape that the task gave them"
        others = [param for param in model.parameters() if param.dim()]
        groups: list[dict[str, Any]] = [{"params": scalars, "weight_decay": 0.5}, {"params": others}]
        return torch.optim.AdamW(groups, lr=0.05)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
        y: torch.Tensor = model(batch)
        temperature = model.temperature
        assert isinstance(temperature, torch.Tensor)
        return rs.Loss((y * temperature.exp() - batch).square().sum(), len(batch))


class ScalarsAlone(Regression):
    """A line: two scalars and nothing else."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slope, self.offset = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.slope * x + self.offset

    def build_model(self) -> nn.Module:
        return self.Model()


class ChannelsLast(Regression):
    """A convolution in channels_last, and a weight that is kept transposed."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 3, 3, padding=1)
            self.weight = nn.Parameter(torch.randn(4, WIDTH).t())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            image = x[:, None, None, :].expand(-1, 2, 4, -1).to(memory_format=torch.channels_last)
            y: torch.Tensor = self.conv(image)
            return y @ self.weight

    def build_model(self) -> nn.Module:
        model = self.Model()
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model


class Adversarial(Regression):
    """Computes the input's gradient first, and trains on the input that it moved."""

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        x = batch.clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(model(x).square().mean(), x)
        y: torch.Tensor = model(batch + 0.1 * slope.sign())
        return y.square().mean()


class Attacked(Adversarial):
    """Computes gradients of its inputs in evaluations, too."""

    def evaluate(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return self.loss(model, batch)


class Nothing(Regression):
    """Some microbatches have nothing to learn from, and a loss without a graph."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.05)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
        y: torch.Tensor = model(batch)
        if float(batch[0, 0]) < 0:
            return rs.Loss(torch.zeros(()), 0)
        return rs.Loss(y.square().sum(), len(batch))


PROGRAMS: Sequence[type[Regression]] = (Stages, Scalars, ScalarsAlone, ChannelsLast, Adversarial, Nothing)


def trained(workers: int, task: Any, **settings: Any) -> Outcome:
    return train(workers, task=task(), data=rows(), microbatches=MICROBATCHES, steps=STEPS, **settings)


@cache
def reference(task: Any) -> Outcome:
    """One worker's outcome."""
    return trained(1, task)


def by_hand(task: rs.Task) -> list[float]:
    """The losses of plain torch: one process, nothing sharded, the same first weights and samples."""
    model, data = task.build_model(), rows()
    with torch.no_grad():
        for tensors in first_build(task, SEED).tensors():
            for name, param in model.named_parameters():
                param.copy_(tensors[f"model.{name}"])
    optimizer, losses = task.build_optimizer(model), []
    size = 2 * MICROBATCHES
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        ids = sample_ids(SEED, np.arange((step - 1) * size, step * size), len(data)).tolist()
        total = weight = 0.0
        for start in range(0, size, 2):
            loss = task.loss(model, torch.stack([data[index] for index in ids[start : start + 2]]))
            loss = loss if isinstance(loss, rs.Loss) else rs.Loss(loss * 2, 2)
            total, weight = total + float(loss.total.detach()), weight + float(loss.weight)
            if loss.total.requires_grad:
                loss.total.backward()
        for param in model.parameters():
            if param.grad is not None:
                param.grad /= weight
        optimizer.step()
        losses.append(total / weight)
    return losses


@pytest.mark.parametrize("task", PROGRAMS)
def test_the_losses_are_those_of_plain_torch(task: Any) -> None:
    losses = reference(task).losses
    assert losses == pytest.approx(by_hand(task()), rel=2e-6)
    assert len(set(losses)) == STEPS


@pytest.mark.parametrize("task", tried_each_time([Scalars], PROGRAMS))
def test_three_workers_of_which_one_is_lost_give_the_same_bits(task: Any) -> None:
    assert trained(3, task, kills=[(1, 2, "backward")]).bits == reference(task).bits


@pytest.mark.long
@pytest.mark.parametrize("task", PROGRAMS)
def test_one_worker_that_is_lost_alone_costs_no_bit(task: Any) -> None:
    assert trained(1, task, kills=[(0, 2, "backward")]).bits == reference(task).bits


@pytest.mark.long
@pytest.mark.parametrize("task", PROGRAMS)
@pytest.mark.parametrize(
    "settings",
    [
        {"workers": 3},
        {"workers": 4, "shards": 2},
        {"workers": 3, "engine": rs.EngineConfig(accumulation="local", reshard_after_forward=False)},
        {"workers": 2, "engine": rs.EngineConfig(activation_checkpointing=True), "kills": [(0, 3, "apply")]},
        {"workers": 6},
        {"workers": 3, "engine": rs.EngineConfig(audit_every_steps=1)},
        {"workers": 4, "engine": rs.EngineConfig(redundancy=rs.Redundancy(parity=(2, 1))), "kills": [(1, 2, "apply")]},
    ],
    ids=str,
)
def test_other_layouts_give_the_same_bits(task: Any, settings: dict[str, Any]) -> None:
    assert trained(task=task, **settings).bits == reference(task).bits


def test_the_blocks_of_lists_in_lists_are_units() -> None:
    assert [name for name, _ in build(Stages()).units] == [
        *("stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"),
        *("named.0.block", "down.0.block.0", "down.0.sample", ""),
    ]


def test_units_that_a_task_chooses_need_a_forward() -> None:
    class Chosen(Stages):
        def wrap(self, model: nn.Module) -> list[nn.Module]:
            return [model.get_submodule("down.0")]

    with pytest.raises(ConfigError, match=r"Chosen\.wrap returned a Module, which has no forward.*the blocks in it"):
        build(Chosen())


def test_blocks_that_share_a_scalar_alone_stay_units() -> None:
    built = build(Scalars())
    assert [name for name, _ in built.units] == ["layers.0", "layers.1", ""]
    assert built.model.get_submodule("layers.0").shared is built.model.get_submodule("layers.1").shared
    assert built.cuts.replicated == {"layers.0.shared", "layers.0.gain", "layers.1.gain", *BESIDE}


BESIDE = ("temperature", "sometimes", "frozen")


class Replicated(Scalars):
    """A unit that every worker also has whole."""

    def strategy(self, name: str, module: nn.Module) -> Strategy | None:
        return "replicate" if name == "layers.0" else None


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_unit_may_be_replicated_beside_scalars(world_size: int) -> None:
    assert trained(world_size, Replicated).bits == reference(Scalars).bits


class Parallel(LlamaTask):
    """Scalars together with weights that are cut; the loss reads one scalar."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.temperature = nn.Parameter(torch.tensor(0.3))
        return model

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
        loss = super().loss(model, batch)
        assert isinstance(loss, rs.Loss)
        return rs.Loss(loss.total * model.get_parameter("temperature").exp(), loss.weight, loss.metrics)


@pytest.mark.long
def test_scalars_beside_tensor_parallelism() -> None:
    settings: dict[str, Any] = {"task": Parallel(), "microbatches": 4, "steps": 2}
    group = train(2, tensor=2, **settings)
    assert group.losses == pytest.approx(train(1, **settings).losses, rel=1e-5)
    assert train(4, tensor=2, kills=[(3, 1, "backward")], **settings).bits == group.bits


def test_a_scalar_that_a_parallel_style_spreads_is_refused() -> None:
    with fake_mesh(2) as mesh:
        model = nn.Linear(2, 2)
        whole = DTensor.from_local(torch.zeros(()), mesh, [Replicate()], run_check=False)
        model.gain = nn.Parameter(whole)
        with pytest.raises(ConfigError, match=r"Scalars\.parallelize spreads the parameter 'gain'.*the shape \(1,\)"):
            refuse_spread_scalars(Scalars(), model)


def test_what_an_optimizer_keeps_of_a_scalar_lies_with_it_but_for_its_count_of_steps() -> None:
    built, far = build(Scalars(), world_size=1), torch.device("meta")
    optimizer = ShardOptimizer(Scalars(), built.model, built.parameters, exact=True, cuts=built.cuts)
    assert optimizer.step_device("temperature.exp_avg", far) == far
    assert optimizer.step_device("temperature.step", far) == torch.device("cpu")
    assert optimizer.step_device("head.weight.step", far) == torch.device("cpu")


def test_fast_mode_adds_the_gradients_of_scalars_too() -> None:
    engine = rs.EngineConfig(reduction="fast", prove_first_step=False)
    assert trained(2, Scalars, engine=engine).losses == pytest.approx(by_hand(Scalars()), rel=1e-5)


def test_checkpoints_have_scalars_in_the_shape_of_the_task_and_are_resumed_at_another_size(tmp_path: Path) -> None:
    url = f"{tmp_path}/run"

    def job(steps: int) -> Any:
        return make_job(url, task=Scalars(), data=rows(), microbatches=MICROBATCHES, steps=steps)

    make_driver(job(2), make_limits(job(2), 2), Collector()).run()
    (ref,) = list_checkpoints(open_storage(url))
    tensors = open_checkpoint(open_storage(url), ref.prefix).tensors
    scalar = {name: info.shape for name, info in tensors.items() if "temperature" in name or "shared" in name}
    assert scalar == {
        **{f"model.{name}": () for name in ("temperature", "layers.0.shared")},
        **{
            f"optim.{name}.{key}": ()
            for name in ("temperature", "layers.0.shared")
            for key in ("exp_avg", "exp_avg_sq", "step")
        },
    }
    driver = make_driver(job(STEPS), make_limits(job(STEPS), 1), Collector())
    driver.restore()
    assert driver.run().result_fingerprint == reference(Scalars).fingerprint


@pytest.mark.procs
def test_an_evaluation_may_take_gradients_of_its_inputs() -> None:
    evaluation = rs.EvalConfig(data=rows(), every_steps=1, num_samples=7)
    alone, two = (trained(workers, Attacked, evaluation=evaluation) for workers in (1, 2))
    assert alone.bits == two.bits
    assert all(numbers["evaluation"]["loss"] > 0 for numbers in alone.numbers)
    assert alone.fingerprint == reference(Adversarial).fingerprint
