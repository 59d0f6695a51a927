"""A run continues with another task, resumed or after a kill: correctly where that is possible, or it is refused."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle

import raysharded as rs
from raysharded.actors.optimizer.shard_optimizer import ShardOptimizer
from raysharded.checkpoint import open_storage
from raysharded.checkpoint.retention.catalog import newest_complete
from raysharded.data.order import sample_ids
from raysharded.errors import CheckpointError, InexactError
from raysharded.ids import WorkerId
from tests.actors.optimizer.test_shard_optimizer import Line, shard_optimizer
from tests.cases import tried_each_time
from tests.training.harness import Collector, log_into, make_driver, make_job, make_limits, train

WIDTH, MICROBATCHES, SEED = 4, 3, 5
LAST_BEFORE, STEPS = 3, 5
"""The last step of the first task, and all steps."""


class Net(nn.Module):
    """A net, perhaps with one layer more, of fewer rows than there are workers, and a buffer."""

    def __init__(self, *, more: bool = False, seldom: bool = False) -> None:
        """`seldom`: the further layer is not used in the first step of the second task."""
        super().__init__()
        self._seldom = seldom
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.more = nn.Linear(2, 2) if more else None
        for param in self.parameters():
            with torch.no_grad():
                param.copy_(torch.linspace(-0.5, 1.0, param.numel()).reshape(param.shape))
        if more:
            self.register_buffer("scale", torch.full((2,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(torch.tanh(self.body(x)))
        if self._seldom and torch.isin(x[:, 0], torch.stack(samples_of(LAST_BEFORE + 1))[:, 0]).any():
            return y
        return y if self.more is None else y + self.more(y) * self.get_buffer("scale")


Make = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def adamw(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.05, weight_decay=0.1)


def amsgrad(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.05, weight_decay=0.1, amsgrad=True)


def momentum(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def plain(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


def fused(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer whose bits on shards differ from those on the whole."""
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.1, fused=True)


def grouped(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with one group for each parameter, in reverse order."""
    return torch.optim.AdamW([{"params": [param]} for param in reversed(params)], lr=0.05, weight_decay=0.1)


class Lion(torch.optim.Optimizer):
    """As in Chen et al., Symbolic Discovery of Optimization Algorithms (2023). Its average has the name of AdamW's."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # never called with a closure
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    average = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                    param.sub_(group["lr"] * (0.9 * average + 0.1 * param.grad).sign())
                    average.mul_(0.99).add_(param.grad, alpha=0.01)


KEEPS: Mapping[Make, tuple[str, ...]] = {
    adamw: ("step", "exp_avg", "exp_avg_sq"),
    amsgrad: ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    grouped: ("step", "exp_avg", "exp_avg_sq"),
    momentum: ("momentum_buffer",),
    plain: (),
    Lion: ("exp_avg",),
}


class Variant:
    """One way to build a task: body frozen or not, in which dtype, with which optimizer."""

    def __init__(
        self,
        make: Make = adamw,
        *,
        frozen: bool = False,
        more: bool = False,
        seldom: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._make, self._frozen, self._more, self._seldom, self._dtype = make, frozen, more, seldom, dtype

    @property
    def keeps(self) -> tuple[str, ...]:
        """Names of the optimizer's state of a parameter."""
        return KEEPS[self._make]

    def model(self) -> nn.Module:
        net = Net(more=self._more, seldom=self._seldom).to(self._dtype)
        net.body.requires_grad_(not self._frozen)
        return net

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return self._make([param for param in model.parameters() if param.requires_grad])


class Changing(rs.Task):
    """Is built as the first variant, and as the second once a file exists: the last step of the first one makes it."""

    def __init__(self, folder: Path, before: Variant, after: Variant) -> None:
        self._file, self._variants = folder / "changed", (before, after)

    def variant(self) -> Variant:
        return self._variants[self._file.exists()]

    def build_model(self) -> nn.Module:
        return self.variant().model()

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return self.variant().optimizer(model)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
        weight = next(model.parameters())
        each = (model(batch.to(weight.dtype)) - 1).square()
        return rs.Loss(each.sum(), len(batch))

    def lr_scale(self, step: int) -> float:
        """Called when a step is applied."""
        if step >= LAST_BEFORE:
            self._file.touch()
        return 1.0


class ChangingAnew(Changing):
    """A `Changing` that is built anew in every generation, as all tasks with parallel styles are."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Mapping[str, ParallelStyle]:
        return {"head": ColwiseParallel()}


DATA = [torch.randn(WIDTH, generator=torch.Generator().manual_seed(index)) for index in range(40)]


def samples_of(step: int) -> list[torch.Tensor]:
    """The samples of a step, each of which is in one step alone."""
    size = 2 * MICROBATCHES
    return [DATA[int(index)] for index in sample_ids(SEED, np.arange((step - 1) * size, step * size), len(DATA))]


def in_plain_torch(before: Variant, after: Variant) -> list[float]:
    """The losses. Weights are kept, and so is the optimizer's state that the second keeps too, if both count steps."""
    losses: list[float] = []
    model, optimizer = before.model(), before.optimizer(before.model())
    values: Mapping[str, Any] = before.model().state_dict()
    kept: dict[str, dict[str, Any]] = {}
    for step in range(1, STEPS + 1):
        if step in (1, LAST_BEFORE + 1):
            variant = before if step == 1 else after
            model = variant.model()
            model.load_state_dict(values, strict=False)
            optimizer = variant.optimizer(model)
            for name, param in model.named_parameters():
                if param.requires_grad and kept.get(name) and ("step" in kept[name]) == ("step" in variant.keeps):
                    optimizer.state[param] = {k: v for k, v in kept[name].items() if k in variant.keeps}
        batch = torch.stack(samples_of(step))
        loss = (model(batch) - 1).square().sum() / len(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        values = model.state_dict()
        kept = {name: dict(optimizer.state[param]) for name, param in model.named_parameters()}
    return losses


def begun_and_resumed(url: str, before: Variant, after: Variant, log: Path, *, workers: int = 1) -> list[float]:
    """The losses of a run that is resumed with the other task."""
    listener = resumed(url, before, after, log, workers=workers)
    return [listener.numbers[step]["loss"] for step in range(1, STEPS + 1)]


def resumed(url: str, before: Variant, after: Variant, log: Path, *, workers: int = 1) -> Collector:
    """The journal of such a run."""
    task = Changing(Path(url).parent, before, after)
    listener = Collector()
    for steps in (LAST_BEFORE, STEPS):
        job = make_job(url, task=task, data=DATA, microbatches=MICROBATCHES, steps=steps)
        first = {WorkerId(worker): partial(log_into, str(log)) for worker in range(2 * workers)}
        driver = make_driver(job, make_limits(job, workers), listener, prepare=first)
        if steps == STEPS:
            driver.restore()
        driver.run()
    return listener


def killed(folder: Path, before: Variant, after: Variant, log: Path) -> list[float]:
    """The losses of a run that has the second task after a kill."""
    found = train(
        3,
        task=ChangingAnew(folder, before, after),
        data=DATA,
        microbatches=MICROBATCHES,
        steps=STEPS,
        kills=[(1, LAST_BEFORE + 1, "agree")],
        prepare=partial(log_into, str(log)),
    )
    return found.losses


CASES: dict[str, tuple[Variant, Variant, str, str]] = {
    "frozen": (
        Variant(),
        Variant(frozen=True),
        "for 2 parameters that are frozen now, and in no group, first 'body.bias': it is left out",
        "has frozen 2 parameters, first 'body.bias'",
    ),
    "thawed": (
        Variant(frozen=True),
        Variant(),
        "no optimizer state for 2 parameters, first 'body.bias'",
        "trains 2 parameters, first 'body.bias'",
    ),
    "other groups": (Variant(), Variant(grouped), "", ""),
    "AdamW, then SGD with momentum": (
        Variant(),
        Variant(momentum),
        "SGD counts no steps: another optimizer kept it. Its state for 4 parameters is left out, and SGD begins",
        "has the optimizer torch.optim.sgd.SGD, and had torch.optim.adamw.AdamW",
    ),
    "AdamW, then Lion": (
        Variant(),
        Variant(Lion),
        "has 'exp_avg', 'exp_avg_sq', 'step' of 'body.bias', and Lion counts no steps",
        "has the optimizer tests.training.test_changed_tasks.Lion, and had",
    ),
    "AdamW, then SGD": (
        Variant(),
        Variant(plain),
        "has 'exp_avg', 'exp_avg_sq', 'step' of 'body.bias' and of 3 other parameters, which SGD did not use in step 4",
        "has the optimizer torch.optim.sgd.SGD, and had torch.optim.adamw.AdamW",
    ),
    "with amsgrad, then without": (Variant(amsgrad), Variant(), "has 'max_exp_avg_sq' of 'body.bias'", ""),
    "with amsgrad, then without, and a layer that is used later": (
        Variant(amsgrad, more=True, seldom=True),
        Variant(more=True, seldom=True),
        "has 'max_exp_avg_sq' of 'body.bias'",
        "",
    ),
    "momentum, then none": (Variant(momentum), Variant(plain), "has 'momentum_buffer' of 'body.bias'", ""),
    "SGD, then AdamW": (Variant(plain), Variant(), "", "has the optimizer torch.optim.adamw.AdamW, and had"),
}
IN_KIND = [
    "frozen",
    "other groups",
    "AdamW, then SGD with momentum",
    "with amsgrad, then without, and a layer that is used later",
]
"""Cases that differ in kind."""
MORE = Variant(more=True)
REFUSED: dict[str, tuple[Variant, Variant, str]] = {
    "another dtype": (
        Variant(plain),
        Variant(plain, dtype=torch.float64),
        r"the parameter 'body.bias' is float32 \(4,\) in the state and float64 \(4,\) in the model \(4 such in all\)",
    ),
    "a narrower dtype": (Variant(), Variant(dtype=torch.bfloat16), r"is float32 .* in the state and bfloat16"),
    "momentum, then AdamW": (
        Variant(momentum),
        Variant(),
        r"AdamW misses 'exp_avg' in the state that was saved: for 'body.bias' that has 'momentum_buffer', and it keeps",
    ),
    "without amsgrad, then with": (Variant(), Variant(amsgrad), "AdamW misses 'max_exp_avg_sq'"),
}


def remarks(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


@cache
def resumed_in(name: str) -> tuple[list[float], list[str], set[str]]:
    """The losses and the remarks of a case's run that is resumed, and what its last checkpoint has of the optimizer."""
    before, after, _, _ = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        losses = begun_and_resumed(f"{folder}/run", before, after, log)
        newest = newest_complete(open_storage(f"{folder}/run")).checkpoint
        assert newest is not None
        return losses, remarks(log), {full for full in newest.tensors if full.startswith("optim.")}


@pytest.mark.procs
@pytest.mark.parametrize("name", tried_each_time(IN_KIND, CASES))
def test_a_run_is_resumed_with_another_task_as_in_plain_torch(name: str) -> None:
    before, after, said, _ = CASES[name]
    losses, lines, kept = resumed_in(name)
    assert losses == pytest.approx(in_plain_torch(before, after), rel=1e-5)
    changes = [line for line in lines if "no microbatch of step" not in line]
    assert [said in line for line in changes] == [True] * bool(said)
    trained = [name for name, param in after.model().named_parameters() if param.requires_grad]
    assert kept == {f"optim.{name}.{key}" for name in trained for key in after.keeps}


@pytest.mark.procs
@pytest.mark.parametrize("workers", tried_each_time([2], [1, 2, 3]))
def test_the_journal_has_what_differs_with_the_next_step_and_once(tmp_path: Path, workers: int) -> None:
    before = Variant(frozen=True)
    listener = resumed(f"{tmp_path}/run", before, MORE, tmp_path / "log", workers=workers)
    entries, losses = listener.entries, [listener.numbers[step]["loss"] for step in range(1, STEPS + 1)]
    assert losses == pytest.approx(in_plain_torch(before, MORE), rel=1e-5)
    found = [(fields["step"], text) for kind, fields in entries if kind == "step" for text in fields.get("remarks", ())]
    assert [step for step, _ in found] == [LAST_BEFORE + 1] * 2
    assert [text for _, text in found] == [line.partition("] ")[2] or line for line in remarks(tmp_path / "log")]
    added, begun = (text for _, text in found)
    assert "does not have 3 parameters or buffers of the model, first 'scale'" in added
    assert "no optimizer state for 4 parameters" in begun


@pytest.mark.procs
@pytest.mark.parametrize("name", tried_each_time(["AdamW, then SGD with momentum"], CASES))
def test_a_task_that_is_another_after_a_kill_trains_as_one_that_is_resumed(tmp_path: Path, name: str) -> None:
    before, after, _, said = CASES[name]
    log = tmp_path / "log"
    losses = killed(tmp_path, before, after, log)
    assert losses == resumed_in(name)[0]
    assert not said or [line for line in remarks(log) if said in line]


@pytest.mark.procs
@pytest.mark.parametrize("name", tried_each_time(["momentum, then AdamW"], REFUSED))
def test_what_cannot_be_continued_is_refused_by_the_first_parameter(tmp_path: Path, name: str) -> None:
    before, after, message = REFUSED[name]
    with pytest.raises(CheckpointError, match=message):
        begun_and_resumed(f"{tmp_path}/run", before, after, tmp_path / "log")


@pytest.mark.procs
@pytest.mark.parametrize("name", tried_each_time(["another dtype"], REFUSED))
def test_it_is_refused_after_a_kill_too(tmp_path: Path, name: str) -> None:
    before, after, message = REFUSED[name]
    with pytest.raises(CheckpointError, match=message):
        killed(tmp_path, before, after, tmp_path / "log")


@pytest.mark.long
@pytest.mark.procs
@pytest.mark.parametrize("workers", [1, 3])
def test_parameters_that_a_checkpoint_does_not_have_begin_as_in_a_new_run(tmp_path: Path, workers: int) -> None:
    log = tmp_path / "log"
    losses = begun_and_resumed(f"{tmp_path}/run", Variant(), MORE, log, workers=workers)
    assert losses == pytest.approx(in_plain_torch(Variant(), MORE), rel=1e-5)
    added, begun = remarks(log)
    assert "does not have 3 parameters or buffers of the model, first 'scale'" in added
    assert "no optimizer state for 2 parameters, first 'more.bias'" in begun


@pytest.mark.procs
def test_parameters_that_come_after_a_kill_are_refused_and_so_are_those_that_go(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"first 'model.more.bias' \(saved None, model \(2,\)"):
        killed(tmp_path, Variant(), MORE, tmp_path / "log")
    with pytest.raises(CheckpointError, match=r"first 'model.more.bias' \(saved \(2,\), model None"):
        begun_and_resumed(f"{tmp_path}/again/run", MORE, Variant(), tmp_path / "log")


@pytest.mark.procs
def test_an_optimizer_that_is_another_after_a_kill_is_tried(tmp_path: Path) -> None:
    with pytest.raises(InexactError, match=r"SGD with .*'fused': True.* gives other bits on a shard"):
        killed(tmp_path, Variant(momentum), Variant(fused), tmp_path / "log")


class Anchored(torch.optim.SGD):
    """Draws each parameter towards its first value, and never writes to that again."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                anchor = self.state[param].setdefault("anchor", param.detach().clone())
                param.data.sub_(0.1 * (param.grad + param.data - anchor))


class OfOnes(torch.optim.SGD):
    """Keeps a momentum of gradients that are all ones: no trial uses such gradients."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                change = param.grad
                if param.numel() and param.grad.eq(1.0).all():  # a trial has empty parts
                    change = self.state[param].setdefault("average", torch.zeros_like(param)).mul_(0.9).add_(param.grad)
                param.data.sub_(0.1 * change)


@pytest.mark.parametrize(("make", "key"), [(Anchored, "anchor"), (OfOnes, "average")])
def test_what_is_read_alone_and_what_a_trial_does_not_show_stays(
    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], key: str
) -> None:
    def stepped(optimizer: ShardOptimizer, model: nn.Module, step: int) -> set[str]:
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.apply(step, 1.0)
        return {name.rpartition(".")[2] for name in optimizer.state()}

    before, model = shard_optimizer(Line(make))
    before.try_out()
    assert stepped(before, model, 1) == {key}
    after, model = shard_optimizer(Line(make))
    after.try_out(say=lambda *remark: pytest.fail(f"{remark}"))
    after.load_state(before.state(), frozenset())
    assert stepped(after, model, 2) == {key}
