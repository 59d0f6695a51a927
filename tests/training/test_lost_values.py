"""A model that is changed between two starts of a run keeps the values that its constructor drew, or is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle

import raysharded as rs
from raysharded.errors import CheckpointError
from raysharded.ids import WorkerId
from tests.cases import tried_each_time
from tests.training.harness import VOCABULARY, Collector, make_driver, make_job, make_limits, train
from tests.training.test_construction import scramble

pytestmark = pytest.mark.procs

LENGTH, WIDTH = 8, 4
LAST_BEFORE, STEPS = 2, 4
"""The last step of the first model, and all steps."""
Put = Callable[[nn.Module], None]
"""Gives a model its features; the module's `where` is their name."""


class Net(nn.Module):
    """Random Fourier features, kept as the variant does, between tokens and a head."""

    def __init__(self, put: Put) -> None:
        super().__init__()
        self.where = "features"
        put(self)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        features = getattr(self, self.where)
        out: torch.Tensor = self.head(torch.cos(tokens[:, :, None].float() * features[: tokens.shape[1]]))
        return out


def drawn() -> torch.Tensor:
    return torch.randn(LENGTH, WIDTH)


def seeded() -> torch.Tensor:
    return torch.randn(LENGTH, WIDTH, generator=torch.Generator().manual_seed(7))


def computed() -> torch.Tensor:
    return torch.outer(torch.arange(1.0, LENGTH + 1), torch.linspace(0.1, 1.0, WIDTH))


def attribute(make: Callable[[], torch.Tensor], where: str = "features") -> Put:
    def put(net: nn.Module) -> None:
        net.where = where  # type: ignore[assignment]
        setattr(net, where, make())

    return put


def buffer(make: Callable[[], torch.Tensor], where: str = "features", *, persistent: bool = True) -> Put:
    def put(net: nn.Module) -> None:
        net.where = where  # type: ignore[assignment]
        net.register_buffer(where, make(), persistent=persistent)

    return put


def beside(put: Put, more: Put) -> Put:
    """Both, of which the second is not used."""

    def both(net: nn.Module) -> None:
        more(net)
        put(net)

    return both


def no_features(net: nn.Module) -> None:
    net.where = "ones"  # type: ignore[assignment]
    net.ones = torch.ones(LENGTH, WIDTH)


class Changing(rs.Task):
    """Has the first variant, and the second one once a file exists: the last step of the first one makes it."""

    def __init__(self, folder: Path, before: Put, after: Put) -> None:
        self._file, self._variants = folder / "changed", (before, after)

    def build_model(self) -> nn.Module:
        return Net(self._variants[self._file.exists()])

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
        logits, targets = model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].reshape(-1)
        return rs.Loss(nn.functional.cross_entropy(logits, targets, reduction="sum"), targets.numel())

    def lr_scale(self, step: int) -> float:
        """Called when a step is applied."""
        if step >= LAST_BEFORE:
            self._file.touch()
        return 1.0


class ChangingAnew(Changing):
    """A `Changing` that is built anew in every generation, as all tasks with parallel styles are."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Mapping[str, ParallelStyle]:
        return {"head": ColwiseParallel()}


def begun_and_resumed(folder: Path, before: Put, after: Put, *, workers: int = 1) -> list[Mapping[str, Any]]:
    """The numbers of a run that is resumed twice: with the other model, and with that one once more."""
    folder.mkdir(exist_ok=True)
    task, listener = Changing(folder, before, after), Collector()
    for steps in (LAST_BEFORE, STEPS - 1, STEPS):
        job = make_job(f"{folder}/run", task=task, microbatches=3, steps=steps)
        driver = make_driver(
            job,
            make_limits(job, workers),
            listener,
            prepare={WorkerId(worker): scramble for worker in range(2 * workers)},
        )
        if steps > LAST_BEFORE:
            driver.restore()
        driver.run()
    return [listener.numbers[step] for step in range(1, STEPS + 1)]


LOST: dict[str, tuple[Put, Put, str]] = {
    "an attribute, renamed": (attribute(drawn), attribute(drawn, "table"), "the drawn constant 'features'"),
    "a buffer, persistent no more": (buffer(drawn), buffer(drawn, persistent=False), "the buffer 'features'"),
    "a buffer, renamed": (buffer(drawn), buffer(lambda: 2 * drawn(), "table"), "the buffer 'features'"),
    "a buffer, computed otherwise": (buffer(computed), attribute(seeded), "the buffer 'features'"),
    "a buffer, without its module": (buffer(computed), no_features, "the buffer 'features'"),
    "ones, by chance those of another name": (
        beside(buffer(computed), buffer(lambda: torch.ones(3), "counts")),
        beside(buffer(computed), attribute(lambda: torch.ones(3), "scales")),
        "the buffer 'counts'",
    ),
}
KEPT: dict[str, tuple[Put, Put]] = {
    "a computed buffer, persistent no more": (buffer(computed), buffer(computed, persistent=False)),
    "a computed buffer, renamed": (buffer(computed), buffer(computed, "table", persistent=False)),
    "a buffer of a fixed seed, as an attribute": (buffer(seeded), attribute(seeded, "table")),
    "ones, persistent no more": (
        beside(buffer(computed), buffer(lambda: torch.ones(3), "scales")),
        beside(buffer(computed), buffer(lambda: torch.ones(3), "scales", persistent=False)),
    ),
    "a drawn attribute, as a buffer": (attribute(drawn), buffer(drawn)),
    "a drawn buffer, renamed": (buffer(drawn), buffer(drawn, "table")),
    "a drawn buffer, beside a new one": (buffer(drawn), beside(buffer(drawn), attribute(drawn, "table"))),
}


@pytest.mark.long  # two of them are refused in the last test
@pytest.mark.parametrize("name", LOST)
def test_a_resumed_run_whose_model_lost_a_drawn_value_is_refused(tmp_path: Path, name: str) -> None:
    before, after, said = LOST[name]
    with pytest.raises(CheckpointError, match=f"the saved state has {said}, float32 .*neither a place for it"):
        begun_and_resumed(tmp_path, before, after)


@pytest.mark.parametrize(
    "name", tried_each_time(["a drawn attribute, as a buffer", "a computed buffer, renamed"], KEPT)
)
def test_a_resumed_run_whose_model_has_the_value_elsewhere_continues_with_the_same_numbers(
    tmp_path: Path, name: str
) -> None:
    before, after = KEPT[name]
    (tmp_path / "unchanged").mkdir()
    task = Changing(tmp_path / "unchanged", before, before)
    unchanged = train(1, task=task, microbatches=3, steps=STEPS, prepare=scramble)
    assert begun_and_resumed(tmp_path / "changed", before, after) == list(unchanged.numbers)


def test_it_is_refused_on_all_workers_and_after_a_kill(tmp_path: Path) -> None:
    before, after, said = LOST["a buffer, persistent no more"]
    with pytest.raises(CheckpointError, match=f"the saved state has {said}, float32 .*neither a place for it"):
        begun_and_resumed(tmp_path, before, after, workers=2)
    before, after, said = LOST["an attribute, renamed"]
    again = tmp_path / "killed"
    again.mkdir()
    with pytest.raises(CheckpointError, match=f"the saved state has {said}, float32 .*neither a place for it"):
        train(
            2,
            task=ChangingAnew(again, before, after),
            microbatches=3,
            steps=STEPS,
            kills=[(1, LAST_BEFORE + 1, "agree")],
        )
