"""After a change of the membership the model, its modules, hooks and optimizer are the same Python objects."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.callback import callback_handler
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import raysharded as rs
from raysharded.actors.built_objects import BuiltObjects
from raysharded.actors.comm.groups import Groups
from raysharded.actors.compilation.compiled_blocks import Compilation
from raysharded.actors.in_place.fsdp_tree import FsdpTree
from raysharded.actors.model.sharded_model import ShardedModel, local_of
from raysharded.actors.optimizer.shard_optimizer import ShardOptimizer
from raysharded.actors.step import engine
from raysharded.actors.step.assembly import Parts
from raysharded.rendezvous.server import RendezvousStore
from tests import patches
from tests.cases import tried_each_time
from tests.training.harness import SEQUENCE, Gpt, GptTask, SmallTask, train
from tests.training.test_generations import where
from tests.training.test_optimizer_programs import HOLDS, Made

SETTLED = 5


@pytest.fixture
def store() -> Iterator[RendezvousStore]:
    served = RendezvousStore("127.0.0.1")
    gc.collect()
    gc.freeze()  # and never thawed: counting, and collections of later tests, would walk through older objects
    yield served
    served.close()


class Gru(Gpt):
    """With a module that keeps a list of its weights, a scalar, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(16, 16, batch_first=True)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.norm.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions * self.ramp[:, None]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(self.gru(x)[0] * self.scale))
        return logits


class GruTask(GptTask):
    def build_model(self) -> nn.Module:
        return Gru()

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)


class Generations:
    """Generations of one worker, one after another, over the same objects; each does a step from the same weights."""

    def __init__(self, store: RendezvousStore, task: rs.Task, config: rs.EngineConfig) -> None:
        self._store, self._task, self._config = store, task, config
        self.objects, self.number = BuiltObjects(task, config), 0
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self._values = {name: value.detach() for name, value in task.build_model().named_parameters()}

    def step(self) -> tuple[ShardedModel, ShardOptimizer, dict[str, torch.Tensor]]:
        """The next generation, a step of it, and the parameters after the step. Call `end` when done with them."""
        self.number += 1
        self._groups, cpu = Groups(use_gpu=False), torch.device("cpu")
        self._groups.form(where(self._store, f"{self._store.port}/g{self.number}"))
        sharded = self.objects.attach(None, self._groups.axes(), 0, cpu)
        optimizer = ShardOptimizer(
            self._task,
            sharded.model,
            sharded.parameters,
            exact=True,
            cuts=sharded.cuts,
            built=self.objects.optimizer,
        )
        self.objects.optimizer = optimizer.built
        with torch.no_grad():
            for name, param in sharded.parameters.items():
                local_of(param).copy_(self._values[name])
            for value in sharded.persistent_buffers.values():
                value.fill_(0.5)
        sharded.model.train()
        torch.manual_seed(2)
        batch = torch.arange(2 * (SEQUENCE + 1)).view(2, -1) % 67
        loss = self._task.loss(sharded.model, batch)
        assert isinstance(loss, rs.Loss)
        loss.total.backward()
        optimizer.apply(1, 1.0)
        return sharded, optimizer, {name: local_of(p).clone() for name, p in sharded.parameters.items()}

    def end(self) -> None:
        self.objects.release()
        self._groups.close()


def alive(*kinds: type) -> int:
    """The number of objects of these classes, the model's parameters without memory aside."""
    gc.collect()
    return sum(isinstance(one, kinds) for one in gc.get_objects())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize(("recomputes", "changes"), [(False, 50), (True, 12)], ids=["kept", "recomputed"])
def test_after_fifty_changes_all_objects_are_the_same_and_nothing_older_is_alive(
    store: RendezvousStore, recomputes: bool, changes: int
) -> None:
    generations = Generations(store, GruTask(), rs.EngineConfig(activation_checkpointing=recomputes))
    calls: list[str] = []
    ids: Any = None
    bits: dict[str, torch.Tensor] = {}
    resident = 0
    for number in range(changes):
        sharded, optimizer, after = generations.step()
        model = sharded.model
        if not number:
            ids = [id(module) for module in model.modules()], id(optimizer.built.optimizer)
            bits = after
            norm = next(module for name, module in model.named_modules() if name.endswith("norm_1"))
            norm.register_forward_pre_hook(lambda *_: calls.append("before"))
            norm.register_forward_hook(lambda *_: calls.append("after"))
        else:
            assert calls == ["before", "after"] * (2 if recomputes else 1)
        calls.clear()
        assert ids == ([id(module) for module in model.modules()], id(optimizer.built.optimizer))
        assert not any(isinstance(module, FSDPModule) for module in model.modules())
        assert all(torch.equal(after[name], value) for name, value in bits.items())
        assert alive(FsdpTree) == 1
        del sharded, optimizer, after
        generations.end()
        assert alive(FsdpTree, FSDPModule, DTensor) == 0
        assert all(param.is_meta for param in model.parameters())
        if number == SETTLED:
            resident = resident_bytes()
    assert resident_bytes() <= 1.02 * resident


def test_blocks_are_compiled_in_the_first_generation_alone(
    store: RendezvousStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, compiled = nn.Module.compile, list[str]()
    monkeypatch.setattr(nn.Module, "compile", lambda block: usual(block, backend="aot_eager"))  # a quick compiler
    callback_handler.register_start_callback(lambda event: compiled.append(event.compile_id))
    Compilation(rs.EngineConfig(compile=True, max_compiled_shapes=4), torch.device("cpu")).settle()
    generations = Generations(store, SmallTask(), rs.EngineConfig(compile=True))
    first: dict[str, torch.Tensor] = {}
    for number in range(4):
        sharded, optimizer, after = generations.step()
        if not number:
            first, after_first = after, len(compiled)
            assert after_first > 0
        assert len(compiled) == after_first
        assert all(torch.equal(after[name], value) for name, value in first.items())
        del sharded, optimizer, after
        generations.end()
        assert alive(FsdpTree, FSDPModule, DTensor) == 0


@pytest.mark.parametrize("make", HOLDS)
def test_a_hook_that_refers_to_parameters_in_any_form_does_the_same_in_every_generation(
    store: RendezvousStore, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    generations = Generations(store, Made(make), rs.EngineConfig())
    first: dict[str, torch.Tensor] = {}
    for _ in range(3):
        *_, after = generations.step()
        generations.end()
        first = first or after
        assert all(torch.equal(after[name], value) for name, value in first.items())


def count_older(file: Path) -> None:
    """In a worker's process: write down what is alive of older generations whenever the next one gets its memory."""
    assemble = vars(engine)["assemble"]

    def counting(*args: Any, **named: Any) -> Parts:
        found = sum(isinstance(one, (FsdpTree, FSDPModule, DTensor, engine.Engine)) for one in gc.get_objects())
        with file.open("a") as lines:
            lines.write(f"{found - 1}\n")  # the new engine
        found_parts: Parts = assemble(*args, **named)
        return found_parts

    patches.replace(engine, "assemble", counting)


@pytest.mark.procs
@pytest.mark.parametrize("phases", tried_each_time(["backward apply"], ["backward apply", "forward agree"]))
def test_an_aborted_generation_is_freed_before_the_next_one_gets_its_memory(tmp_path: Path, phases: str) -> None:
    """A worker is lost in each phase, of two steps."""
    first, second = phases.split()
    file, kills = tmp_path / "older", [(1, 2, first), (2, 3, second)]
    train(3, task=SmallTask(), steps=3, microbatches=4, kills=kills, prepare=functools.partial(count_older, file))
    assert len(file.read_text().split()) >= 6  # of three workers, of two that are left, and of the last one
    assert set(file.read_text().split()) == {"0"}
