"""Parameters that no microbatch of a step uses are left alone, as in plain torch: at every size, through every loss."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

import raysharded as rs
from raysharded import numerics
from raysharded.actors.numerics.column_sums import OnGrid, Words
from raysharded.data.order import sample_ids
from raysharded.errors import TaskError
from raysharded.ids import WorkerId
from raysharded.task import Strategy
from raysharded.testing import Fault
from tests.cases import tried_each_time
from tests.training.harness import A_CHANGE, Collector, Outcome, log_into, make_driver, make_job, make_limits, train
from tests.training.llama import LlamaTask

pytestmark = pytest.mark.procs

WIDTH, SAMPLES, MICROBATCHES, STEPS, SEED = 4, 40, 2, 4, 5
MARKS: dict[int, tuple[int, ...]] = {0: (1, 3), 1: (3,), 2: (), 3: (4,)}
"""Block -> the steps in which one microbatch, the first, uses its extra weight."""
NEVER = ("pooler.weight", "pooler.bias", "blocks.2.extra")


def ids_of(step: int) -> list[int]:
    """The samples of a step, in their order."""
    size = 2 * MICROBATCHES
    found: list[int] = sample_ids(SEED, np.arange((step - 1) * size, step * size), SAMPLES).tolist()
    return found


class Marked:
    """Numbers, and for each block a mark for the use of its extra weight."""

    def __init__(self) -> None:
        self._marks = {block: {ids_of(step)[1] for step in steps} for block, steps in MARKS.items()}

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        values = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return torch.cat([values, torch.tensor([float(index in marked) for marked in self._marks.values()])])


class Block(nn.Module):
    """A weight that is always used, and one of fewer rows than workers that is used where it is marked."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, WIDTH * WIDTH).reshape(WIDTH, WIDTH))
        self.extra = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH).reshape(1, WIDTH))

    def forward(self, x: torch.Tensor, mark: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x + torch.tanh(x @ self.weight.T)
        if mark.any():
            y = y + x * self.extra
        return y, sizes_of(self.weight, self.extra)


class Net(nn.Module):
    """With a pooler that is not called, as many a stock model has one; a weight whose gradient is always zero; a frozen
    one; and one that belongs also to a module that is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.linspace(-0.5, 1.0, WIDTH * WIDTH).reshape(WIDTH, WIDTH))
        self.blocks = nn.ModuleList([Block() for _ in MARKS])
        self.pooler = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.pooler.weight.copy_(torch.linspace(1.0, 2.0, WIDTH * WIDTH).reshape(WIDTH, WIDTH))
            self.pooler.bias.fill_(1.0)
        self.zeroed = nn.Parameter(torch.ones(2, WIDTH))
        self.still = nn.Parameter(torch.full((1, WIDTH), 1.5), requires_grad=False)
        self.again = nn.Linear(WIDTH, WIDTH, bias=False)
        self.again.weight = self.first

    def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        x, marks = batch[:, :WIDTH] @ self.first.T * self.still + 0 * self.zeroed.sum(), batch[:, WIDTH:]
        own = {name: param for name, param in self.named_parameters() if not name.startswith("blocks")}
        sizes = dict(zip(own, sizes_of(*own.values()), strict=True))
        for place, block in enumerate(self.blocks):
            x, of_block = block(x, marks[:, place])
            sizes |= dict(zip((f"blocks.{place}.weight", f"blocks.{place}.extra"), of_block, strict=True))
        return x, sizes


def sizes_of(*params: torch.Tensor) -> torch.Tensor:
    """Sums of squares; no gradient is taken of them."""
    return torch.stack([param.detach().double().square().sum() for param in params])


def adamw(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.05, weight_decay=0.5)


def momentum(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.5)


class Conditional(rs.Task):
    """The sizes of the parameters after each step are metrics of its evaluation."""

    def __init__(
        self,
        make: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer] = adamw,
        strategies: dict[str, Strategy] | None = None,
    ) -> None:
        self._make, self._strategies = make, strategies or {}

    def build_model(self) -> nn.Module:
        return Net()

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return self._make(model.parameters())

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
        y, sizes = model(batch)
        return rs.Loss((y - 1).square().sum(), len(batch), {name: (size, 1) for name, size in sizes.items()})

    def strategy(self, name: str, module: nn.Module) -> Strategy | None:
        return self._strategies.get(name)


@cache
def marked() -> list[torch.Tensor]:
    """The samples, which a thread of the worker reads."""
    made = Marked()
    return [made[index] for index in range(SAMPLES)]


def trained(workers: int, **settings: Any) -> Outcome:
    data = marked()
    evaluation = rs.EvalConfig(data=data, every_steps=1, num_samples=2)
    given = {"task": Conditional(), "data": data, "microbatches": MICROBATCHES, "steps": STEPS}
    return train(workers, evaluation=evaluation, **{**given, **settings})


@cache
def reference() -> Outcome:
    return trained(1)


def sizes_in(outcome: Outcome) -> list[dict[str, float]]:
    """Sizes of the parameters after each step."""
    return [{k: v for k, v in numbers["evaluation"].items() if k != "loss"} for numbers in outcome.numbers]


def by_hand(task: Conditional) -> list[dict[str, float]]:
    """The sizes in plain torch: one process, nothing sharded."""
    model, data, found = task.build_model(), Marked(), []
    optimizer = task.build_optimizer(model)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        for start in range(0, 2 * MICROBATCHES, 2):
            batch = torch.stack([data[index] for index in ids_of(step)[start : start + 2]])
            (task.loss(model, batch).total / (2 * MICROBATCHES)).backward()
        optimizer.step()
        found.append({name: float(sizes_of(param)) for name, param in model.named_parameters()})
    return found


def assert_same(outcome: Outcome, expected: Outcome) -> None:
    """Assert that the result equals that of one worker, to the bit."""
    for step, (sizes, wanted) in enumerate(zip(sizes_in(outcome), sizes_in(expected), strict=True), 1):
        assert sizes == wanted, f"the parameters after step {step} are not those of one worker"
    assert outcome.bits == expected.bits


def assert_as_in_plain_torch(outcome: Outcome, task: Conditional) -> None:
    untouched = {name: float(sizes_of(param)) for name, param in Net().named_parameters()}
    for step, (sizes, expected) in enumerate(zip(sizes_in(outcome), by_hand(task), strict=True), 1):
        assert sizes == pytest.approx(expected, rel=1e-6), f"step {step}"
        assert {name: sizes[name] for name in NEVER} == {name: untouched[name] for name in NEVER}, f"step {step}"
    assert sizes["blocks.1.extra"] != untouched["blocks.1.extra"], "it was used in step 3"
    assert sizes["zeroed"] < untouched["zeroed"], "a gradient of zeros is one: it decays"


@pytest.mark.parametrize("make", tried_each_time([adamw], [adamw, momentum]))
def test_what_no_microbatch_used_is_left_alone_as_in_plain_torch(make: Any) -> None:
    task = Conditional(make)
    assert_as_in_plain_torch(reference() if make is adamw else trained(1, task=task), task)


@pytest.mark.long  # in the test below three workers do the first three steps
def test_three_workers_one_of_which_computes_what_does_not_count_leave_the_same_alone() -> None:
    """The uncounted worker computes on the samples of step 1 in every step; they use weights that the others do not use
    in the steps 2 and 4."""
    assert_same(trained(3), reference())


@pytest.mark.parametrize("phase", tried_each_time(["snapshot"], ["backward", "apply", "snapshot"]))
@pytest.mark.parametrize("worker", tried_each_time([1], [0, 1]))
def test_a_worker_may_be_lost_in_the_step_that_uses_a_parameter_first(phase: str, worker: int) -> None:
    assert_same(trained(3, kills=[(worker, 3, phase)]), reference())


class Slow(Conditional):
    """Slow enough that a worker that is ready joins while there are steps left."""

    def lr_scale(self, step: int) -> float:
        time.sleep(0.1)
        return super().lr_scale(step)


class Unmarked(Marked):
    """No microbatch uses an extra weight."""

    def __init__(self) -> None:
        self._marks = {block: set() for block in MARKS}


def note_second_sums(file: str) -> None:
    """In a worker's process: a line in the file for each second sum of an agreement."""
    wide = OnGrid._wide

    def noted(own: OnGrid) -> Words:
        with Path(file).open("a") as lines:
            lines.write("second\n")
        return wide(own)

    setattr(OnGrid, "_wide", noted)  # noqa: B010 - mypy takes a function for no method


def test_a_worker_without_a_microbatch_presumes_the_parameters_of_the_step_before(tmp_path: Path) -> None:
    """In the first step it presumes all, and some are never used: that step alone has a second sum."""
    noted = tmp_path / "sums"
    data = Unmarked()
    trained(3, data=[data[index] for index in range(SAMPLES)], steps=2, prepare=partial(note_second_sums, str(noted)))
    assert noted.read_text().split() == ["second"] * 3


def test_a_worker_may_join_just_after_the_step_that_uses_a_parameter_first() -> None:
    wait = Fault(worker=WorkerId(0), step=4, phase="forward", kind="wait", until=A_CHANGE)
    engine = rs.EngineConfig(prepare_changes=False)
    outcome = trained(3, kills=[(1, 1, "data")], faults=[wait], task=Slow(), steps=7, engine=engine)
    workers = [fields["workers"] for fields in outcome.of("step")]
    assert 2 in workers
    assert workers[-1] == 3, "worker 3 was ready in step 4"
    assert_same(outcome, trained(1, steps=7))


SETTINGS: dict[str, dict[str, Any]] = {
    "added locally": {"engine": rs.EngineConfig(accumulation="local", reshard_after_forward=False)},
    "units that all have whole": {
        "task": Conditional(strategies={"blocks.0": "replicate", "blocks.1": "replicate", "blocks.2": "gradients"})
    },
    "replicas": {"workers": 4, "shards": 2},
    "activations computed again": {"engine": rs.EngineConfig(activation_checkpointing=True)},
    "parity": {
        "workers": 4,
        "engine": rs.EngineConfig(redundancy=rs.Redundancy(parity=(2, 1))),
        "kills": [(2, 3, "snapshot")],
    },
}


@pytest.mark.parametrize("name", tried_each_time(["added locally"], list(SETTINGS)))
def test_it_is_the_same_however_the_state_lies(name: str) -> None:
    settings = {"workers": 3, **SETTINGS[name]}
    assert_same(trained(**settings), reference())


@pytest.mark.parametrize("accumulation", tried_each_time(["local"], ["sharded", "local"]))
def test_fast_mode_leaves_the_same_alone(accumulation: Any) -> None:
    engine = rs.EngineConfig(reduction="fast", accumulation=accumulation)
    assert_as_in_plain_torch(trained(2, engine=engine), Conditional())


def gone_on_with(url: str, workers: int, steps: int, **settings: Any) -> tuple[Collector, str | None]:
    """A run, from its newest checkpoint on."""
    data = marked()
    evaluation = rs.EvalConfig(data=data, every_steps=1, num_samples=2)
    job = make_job(
        url,
        task=Conditional(),
        data=data,
        microbatches=MICROBATCHES,
        steps=steps,
        evaluation=evaluation,
        **settings,
    )
    listener = Collector()
    driver = make_driver(job, make_limits(job, workers), listener)
    driver.restore()
    return listener, driver.run().result_fingerprint


@pytest.mark.parametrize("stopped_after", tried_each_time([2], [2, 3]))
def test_a_run_is_resumed_just_before_and_just_after_a_parameter_is_first_used(
    tmp_path: Path, stopped_after: int
) -> None:
    gone_on_with(f"{tmp_path}/run", 2, stopped_after)
    listener, fingerprint = gone_on_with(f"{tmp_path}/run", 1, STEPS)
    expected = reference()
    assert fingerprint == expected.fingerprint
    left = {step: repr(numbers) for step, numbers in enumerate(expected.numbers, 1) if step > stopped_after}
    assert {step: repr(numbers) for step, numbers in listener.numbers.items()} == left


def test_a_run_that_began_under_the_first_number_continues_with_gradients_of_zeros(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:
        before.setattr(numerics, "newest", partial(numerics.kept, ""))
        begun, _ = gone_on_with(f"{tmp_path}/run", 1, 1)
    listener, _ = gone_on_with(f"{tmp_path}/run", 1, 2)
    first, second = (found.numbers[step]["evaluation"] for found, step in ((begun, 1), (listener, 2)))
    untouched = {name: float(sizes_of(param)) for name, param in Net().named_parameters()}
    for name in NEVER:
        assert untouched[name] > first[name] > second[name], f"{name} decays"


def test_what_the_first_step_does_not_use_is_named_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    trained(2, steps=2, kills=[(0, 2, "backward")], prepare=partial(log_into, str(log)))
    (said,) = [line for line in log.read_text().splitlines() if "used" in line]
    assert said.startswith(
        "no microbatch of step 1 used 5 of the parameters, first 'blocks.1.extra': a parameter is left"
    )


class Careless(torch.optim.Optimizer):
    """Assumes that each parameter has a gradient."""

    def __init__(self, params: Iterator[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # never called with a closure
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.requires_grad):
                param.add_(param.grad.sign(), alpha=-group["lr"])


def test_an_optimizer_that_needs_a_gradient_of_each_parameter_gets_the_name_of_the_one_without() -> None:
    said = r"Careless\.step raised AttributeError: .* 5 parameters without gradient, .*extra'"
    with pytest.raises(TaskError, match=said):
        trained(1, task=Conditional(Careless), steps=1)


class WithPooler(LlamaTask):
    """Cut by tensor parallelism, with two unused weights: one that is cut, and one that is not."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.pooler, model.other = nn.Linear(8, 8), nn.Linear(8, 3)
        return model

    def parallelize(self, model: Any, mesh: Any) -> Any:
        return {**super().parallelize(model, mesh), "pooler": ColwiseParallel()}

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)


@pytest.mark.long
def test_tensor_parallel_groups_leave_the_same_alone() -> None:
    settings: dict[str, Any] = {"task": WithPooler(), "microbatches": 3, "steps": 2, "tensor": 2}
    one = train(2, shards=2, **settings)
    assert train(4, shards=4, kills=[(1, 2, "backward")], least_shards=2, **settings).bits == one.bits
