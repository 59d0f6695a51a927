"""Values that constructors draw and keep are the same on every worker, and for as long as a run lives."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import raysharded as rs
from raysharded import numerics
from raysharded.actors.model.build import build_units_of
from raysharded.actors.model.constants import check_movable, constants_of, differing
from raysharded.actors.model.construction import construct
from raysharded.actors.model.drawn_constants import drawn_first
from raysharded.actors.model.init_weights import first_build
from raysharded.actors.model.inventory import inventory_of
from raysharded.checkpoint import open_checkpoint, open_storage
from raysharded.checkpoint.retention.catalog import list_checkpoints, newest_complete
from raysharded.checkpoint.retention.forks.fork import fork
from raysharded.data.access import generators
from raysharded.driver.state.state import State
from raysharded.errors import CheckpointError, InexactError, TaskError
from raysharded.ids import WorkerId, derive_seed
from raysharded.journal.log import read
from tests.training.harness import VOCABULARY, Collector, Outcome, make_driver, make_job, make_limits, samples, train

WIDTH = 8


class Net(nn.Module):
    """A few weights, and the values that the task's constructor gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.mixed(self.embedding(tokens))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        out: torch.Tensor = self.head(x)
        return out


class Tables:
    """A custom object that holds a tensor."""

    def __init__(self) -> None:
        self.low = [torch.rand(WIDTH)]


class Drawn(Net):
    """One of each kind of value that a constructor may draw and keep."""

    def __init__(self) -> None:
        super().__init__()
        self._table = torch.randn(WIDTH, WIDTH)
        self.register_buffer("fourier", torch.randn(WIDTH), persistent=False)
        self.places = torch.randperm(WIDTH)
        self.array = np.random.permutation(WIDTH)
        self.order = list(range(WIDTH))
        random.shuffle(self.order)
        self.pair = (random.random(), random.random())
        self.factor = random.uniform(0.5, 1.5)
        self.tables = {"of": Tables()}
        unseeded = np.random.default_rng()
        self.register_buffer("noise", torch.from_numpy(unseeded.standard_normal(WIDTH)).float(), persistent=False)

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        x = (x @ self._table)[..., self.places][..., torch.from_numpy(self.array)][..., self.order]
        assert isinstance(self.fourier, torch.Tensor)
        return x * self.fourier * self.factor * self.pair[0] + self.tables["of"].low[0] * self.pair[1]


class NetTask(rs.Task):
    """Trains the model that a function returns."""

    def __init__(self, make: Callable[[], nn.Module] = Net) -> None:
        self._make = make

    def build_model(self) -> nn.Module:
        return self._make()

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
        tokens = batch.reshape(batch.shape[0], -1)
        logits = model(tokens[:, :-1]).flatten(0, 1)
        total = nn.functional.cross_entropy(logits, tokens[:, 1:].reshape(-1), reduction="sum")
        return rs.Loss(total, tokens[:, 1:].numel())


def scramble() -> None:
    """Generators in other states, as in a process that is not forked from the others' server."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(os.getpid())


def run(workers: int, task: rs.Task, **settings: Any) -> Outcome:
    return train(workers, task=task, microbatches=3, steps=3, prepare=scramble, **settings)


@functools.cache
def alone() -> Outcome:
    return run(1, NetTask(Seeded))


class Seeded(Drawn):
    """`Drawn` without the values that no seed decides, so that two runs can be compared."""

    def __init__(self) -> None:
        super().__init__()
        del self.noise


@pytest.mark.procs
def test_what_a_constructor_draws_is_drawn_once_at_every_size_and_after_a_loss() -> None:
    assert run(2, NetTask(Seeded), kills=[(1, 2, "backward")]).bits == alone().bits


@pytest.mark.procs
def test_a_constructor_that_goes_another_way_in_each_process_is_refused_in_one_sentence() -> None:
    with pytest.raises(InexactError) as caught:
        run(2, NetTask(Unordered))
    said = str(caught.value)
    assert said.startswith("workers built different models with NetTask.build_model and build_optimizer: worker 0 has ")
    assert "parameter 'parts." in said
    assert said.endswith("has another order in each process: go through sorted(...).")


class Unordered(Net):
    """Goes through a set of names, whose order is that of hashes, which differ from process to process."""

    def __init__(self) -> None:
        super().__init__()
        names = ["a", "b", "c", "d", "e", "f"]
        random.Random(os.getpid()).shuffle(names)
        self.parts = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in names})

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        for name in "abcdef":
            x = self.parts[name](x)
        return x


class Anchor(Net):
    """Keeps a copy of a weight where the model does not show it."""

    def __init__(self, keep: Callable[[nn.Module, torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]) -> None:
        super().__init__()
        self._use = keep(self, self.head.weight[:WIDTH].detach().clone())

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        return self._use(x)


def as_attribute(module: nn.Module, kept: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    module.start = kept
    return lambda x: x @ kept


def in_a_list_of_a_dict(module: nn.Module, kept: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    module.kept = {"of": [kept]}  # type: ignore[assignment]  # that is the fault
    return lambda x: x


def in_a_closure(module: nn.Module, kept: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    module.register_forward_hook(lambda _module, _args, out: out + kept.sum())
    return lambda x: x


@pytest.mark.parametrize(
    ("keep", "path"),
    [(as_attribute, "start"), (in_a_list_of_a_dict, "kept['of'][0]"), (in_a_closure, "_forward_hooks[0].kept")],
)
def test_a_tensor_without_memory_is_refused_by_name(keep: Any, path: str) -> None:
    with pytest.raises(TaskError) as caught:
        build_units_of(NetTask(functools.partial(Anchor, keep)), rs.EngineConfig(), None)
    assert str(caught.value).startswith(f"{path!r} of the model is a tensor that has no values")


HIDDEN: dict[int, torch.Tensor] = {}
"""A global, which no walk through a model reaches."""


def out_of_sight(module: nn.Module, kept: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    HIDDEN[0] = kept if kept.is_meta else HIDDEN[0]  # the build that gives the first weights has values
    return multiplied_by_what_is_hidden


def multiplied_by_what_is_hidden(x: torch.Tensor) -> torch.Tensor:
    return x @ HIDDEN[0].T


class InEvaluation(NetTask):
    def evaluate(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
        multiplied_by_what_is_hidden(torch.ones(2, WIDTH))
        return self.loss(model, batch)


@pytest.mark.procs
def test_an_operand_without_memory_in_the_first_forward_is_an_error_that_names_the_module() -> None:
    with pytest.raises(
        TaskError, match=r"NetTask.loss in step 1, microbatch 0 used a tensor of shape \[8, 8\] in the "
    ):
        run(1, NetTask(functools.partial(Anchor, out_of_sight)))


@pytest.mark.procs
def test_an_operand_without_memory_in_the_first_evaluation_is_an_error() -> None:
    evaluation = rs.EvalConfig(data=samples()[:2], every_steps=1, num_samples=2)
    with pytest.raises(
        TaskError, match=r"InEvaluation.evaluate in step 1, microbatch 0 used a tensor of shape \[8, 8\]"
    ):
        run(1, InEvaluation(functools.partial(Anchor, unused)), evaluation=evaluation)


def unused(module: nn.Module, kept: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    out_of_sight(module, kept)
    return torch.nn.functional.relu


def with_data_assigned() -> Net:
    net = Net()
    net.blocks[0].weight.data = torch.eye(WIDTH) * torch.rand(1)
    return net


def with_a_value_asked_for() -> Net:
    net = Net()
    if net.head.weight.std().item() > 0:
        nn.init.constant_(net.head.bias, 0.5)
    return net


def with_a_parametrization() -> Net:
    net = Net()
    nn.utils.parametrizations.orthogonal(net.blocks[1])
    return net


def with_embeddings_resized() -> Net:
    net = Net()
    before = net.embedding.weight
    new = nn.Embedding(VOCABULARY + 3, WIDTH)
    mean, deviation = before.mean(0), before.std().item()
    with torch.no_grad():
        new.weight[:VOCABULARY] = before
        new.weight[VOCABULARY:] = mean + deviation * torch.randn(3, WIDTH)
    net.embedding = new
    return net


def with_a_lazy_layer_that_was_called() -> Net:
    net = Net()
    net.blocks.append(nn.LazyLinear(WIDTH))
    net.blocks[2](torch.zeros(1, WIDTH))
    return net


def with_a_product_of_a_weight() -> Net:
    net = Net()
    nn.init.constant_(net.head.bias, float(torch.ones(1, VOCABULARY) @ net.head.weight.detach()[:, :1]))
    return net


IDIOMS = (
    with_a_product_of_a_weight,
    with_data_assigned,
    with_a_value_asked_for,
    with_a_parametrization,
    with_embeddings_resized,
    with_a_lazy_layer_that_was_called,
)


@pytest.mark.parametrize("make", IDIOMS)
def test_what_needs_values_while_it_is_built_is_built_and_starts_as_unsharded(make: Callable[[], Net]) -> None:
    units = build_units_of(NetTask(make), rs.EngineConfig(), None)
    assert all(param.is_meta for param in units.model.parameters())
    before = torch.random.get_rng_state()
    (first,) = first_build(NetTask(make), 5).tensors()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(derive_seed(5, "initial weights"))
    plain = dict(make().named_parameters())
    assert {f"model.{name}" for name in plain} == {name for name in first if name.startswith("model.")}
    for name, param in plain.items():
        assert torch.equal(first[f"model.{name}"], param.detach())


def test_a_build_with_memory_for_all_is_reported_with_its_reason_and_size() -> None:
    remarks = build_units_of(NetTask(with_a_value_asked_for), rs.EngineConfig(), None).inventory.remarks
    (sentence,) = remarks.values()
    assert sentence.startswith("NetTask.build_model needs values of its parameters while it runs (RuntimeError: ")
    assert "a meta tensor of shape [] was computed with" in sentence
    assert "0 MiB of parameters" in sentence
    assert build_units_of(NetTask(), rs.EngineConfig(), None).inventory.remarks == {}


def test_what_build_model_itself_does_wrong_is_what_it_raises_with_real_parameters() -> None:
    def make() -> Net:
        net = Net()
        raise KeyError(f"{net.head.weight.sum().item() == 0}")

    with pytest.raises(KeyError, match="False"):
        construct(NetTask(make), 0)


def test_a_model_is_not_built_with_memory_for_all_because_of_a_fault_that_has_nothing_to_do_with_it() -> None:
    built: list[Net] = []

    def make() -> Net:
        built.append(Net())
        raise KeyError("width")

    with pytest.raises(KeyError, match="width"):
        construct(NetTask(make), 0)
    assert len(built) == 1


def test_a_lazy_module_is_refused_in_one_sentence() -> None:
    def make() -> Net:
        net = Net()
        net.blocks.append(nn.LazyLinear(WIDTH))
        return net

    with pytest.raises(TaskError, match=r"'weight' of 'blocks.2' has no shape: .* Give the module its sizes, or call"):
        construct(NetTask(make), 0)


def test_what_a_hook_computes_from_weights_before_each_forward_is_no_constant() -> None:
    net = Net()
    with pytest.warns(FutureWarning, match="weight_norm"):
        nn.utils.weight_norm(net.blocks[0])
    assert isinstance(vars(net.blocks[0])["weight"], torch.Tensor)
    assert constants_of(net) == {}
    lstm = nn.Sequential(nn.LSTM(WIDTH, WIDTH), nn.TransformerEncoderLayer(WIDTH, 2))
    assert constants_of(lstm, with_numbers=True).keys() == constants_of(lstm, with_numbers=True).keys()
    assert constants_of(lstm) == {}


def test_what_is_drawn_is_put_where_another_build_has_it() -> None:
    task = NetTask(Drawn)
    here = inventory_of(task, construct(task, 7))
    first = first_build(task, 5)
    drawn = drawn_first(task, first, here, 7)
    assert drawn.keys() == {
        "_table",
        "fourier",
        "places",
        "array",
        "order",
        "pair",
        "factor",
        "tables['of'].low[0]",
        "noise",
    }
    for path, value in drawn.items():
        write = here.constants[path].write
        assert write is not None
        write(value)
    other = construct(task, 7).model
    assert isinstance(other, Drawn)
    assert isinstance(first.model, Drawn)
    assert other.order != first.model.order


def test_a_counter_is_no_draw_and_a_constructor_that_draws_nothing_has_nothing_to_carry() -> None:
    numbers = iter(range(1000))

    def counted() -> Net:
        net = Net()
        net.number = next(numbers)  # type: ignore[assignment]  # a plain attribute
        net.table = torch.arange(4)
        net.drawn = random.random()  # type: ignore[assignment]  # a plain attribute
        return net

    for make, expected in ((counted, {"drawn"}), (Net, set())):
        task = NetTask(make)
        here = inventory_of(task, construct(task, 7))
        assert drawn_first(task, first_build(task, 5), here, 7).keys() == expected


def test_what_is_drawn_and_cannot_be_handed_on_is_refused_by_name() -> None:
    def make(length: int) -> Net:
        net = Net()
        net.some = torch.rand(length)
        return net

    first, here = (constants_of(make(length)) for length in (3, 4))
    with pytest.raises(TaskError, match=r"'some' of the model is another one each time that NetTask.build_model is "):
        check_movable(NetTask(), differing(first, here), here)


def test_generators_of_the_process_are_where_they_were_after_a_build() -> None:
    before = generators.states()
    one, other = (construct(NetTask(Drawn), 7).model for _ in range(2))
    assert generators.stand_at(before)
    assert torch.equal(torch.random.get_rng_state(), before["torch"])
    assert differing(constants_of(one, with_numbers=True), constants_of(other, with_numbers=True)).keys() == {"noise"}


def with_a_layer_or_without() -> Net:
    """The build that gives the first weights has memory, and the others have none: a real cause would be random."""
    net = Net()
    if not net.head.weight.is_meta:
        net.more = nn.Linear(WIDTH, WIDTH)
    return net


@pytest.mark.procs
def test_a_constructor_that_makes_other_layers_each_time_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"has 2 tensors that the model has not, first 'model\.more\.bias'"):
        run(1, NetTask(with_a_layer_or_without))


# -- checkpoints --


def trained(url: str, task: rs.Task, steps: int, workers: int = 1, *, seed: int = 5, **limits: Any) -> State:
    """A run of so many steps, resumed where it was."""
    job = make_job(url, task=task, microbatches=3, steps=steps)
    job = replace(job, batch=replace(job.batch, seed=seed))
    driver = make_driver(
        job,
        make_limits(job, workers, **limits),
        Collector(),
        prepare={WorkerId(worker): scramble for worker in range(workers)},
        metadata={"batch": asdict(job.batch)},
    )
    driver.restore()
    return driver.run()


@pytest.mark.procs
def test_what_was_drawn_is_in_the_checkpoint_at_another_size_and_in_a_fork_with_another_seed(tmp_path: Path) -> None:
    task, url, forked = NetTask(Seeded), f"{tmp_path}/run", f"{tmp_path}/forked"
    trained(url, task, 1)
    (ref,) = list_checkpoints(open_storage(url))
    drawn = {name for name in open_checkpoint(open_storage(url), ref.prefix).tensors if name.startswith("constant.")}
    assert drawn == {
        f"constant.{path}"
        for path in ("_table", "fourier", "places", "array", "order", "pair", "factor", "tables['of'].low[0]")
    }
    fork(open_storage(url), ref, open_storage(forked))
    assert trained(url, task, 3, workers=2).result_fingerprint == alone().fingerprint

    state = trained(forked, task, 2, seed=6)
    assert state.build_seed == 5
    newest = newest_complete(open_storage(forked)).checkpoint
    assert newest is not None
    assert (newest.manifest.metadata["build_seed"], newest.manifest.metadata["batch"]["seed"]) == (5, 6)
    assert trained(forked, task, 2, seed=6).build_seed == 5


@pytest.mark.procs
def test_a_run_from_before_what_was_drawn_was_kept_is_refused_where_it_draws_unless_that_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{tmp_path}/run"
    with monkeypatch.context() as patch:
        patch.setattr(numerics, "newest", lambda: numerics.kept(""))
        trained(url, NetTask(Net), 1)
    trained(url, NetTask(Net), 2)  # it draws nothing: it continues unchanged
    with pytest.raises(InexactError) as caught:
        trained(url, NetTask(Seeded), 3)
    assert str(caught.value).startswith("NetTask.build_model draws '_table', and the checkpoint of step 2 does not")
    assert "RunConfig(accept_arithmetic=True)" in str(caught.value)
    trained(url, NetTask(Seeded), 3, accept_arithmetic=True)
    (accepted,) = [entry for entry in read(open_storage(url)) if entry["kind"] == "arithmetic"]
    assert (accepted["from_step"], accepted["changes"]) == (3, {"build": ["1", "2"]})
    trained(url, NetTask(Seeded), 4)
