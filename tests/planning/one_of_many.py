"""One rank of many, in one process: the real engine over torch's `fake` process groups, which send nothing.

`python -m tests.planning.one_of_many WORKERS:PER_NODE:DTYPE[:K+M] ...`: prints a JSON line for each, of the memory and
the messages of one worker's steady step. PER_NODE 0: nodes do not matter. K+M: parity, in place of mirrors. Others send
weights of 0 and small gradients.
"""

from __future__ import annotations

import datetime
import gc
import json
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

import raysharded as rs
from raysharded import numerics
from raysharded.actors.built_objects import BuiltObjects
from raysharded.actors.comm.device_mesh import DeviceMeshes
from raysharded.actors.comm.fsdp_collectives import AllGather, finish_plainly
from raysharded.actors.comm.groups import Groups
from raysharded.actors.comm.host_group import HostGroup
from raysharded.actors.reduction import tree_reducer
from raysharded.actors.shards.position import RankPosition
from raysharded.actors.shards.saver import Saver
from raysharded.actors.shards.store import ShardStore
from raysharded.actors.step.engine import Engine
from raysharded.actors.task_calls.remarks import Notes
from raysharded.actors.telemetry.phases import Phases
from raysharded.checkpoint import open_storage
from raysharded.data import MicrobatchLoader
from raysharded.ids import GenerationId, WorkerId
from raysharded.layout import Mesh
from raysharded.protocol.messages import FromStart, GenerationSpec
from tests.actors.fake_group import alone, fake_mesh
from tests.planning.observed import Watch, _before
from tests.training.harness import make_job

ROUNDS, RANK = 2, 0
STEPS = 4
"""The last of them is measured: as each power of two, it compares digests of gradients."""
_BETWEEN = "between phases"
VOCABULARY, WIDTH, LENGTH, LAYERS = 4096, 96, 16, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16 * WIDTH), nn.Linear(16 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class WideTask(rs.Task):
    """Its matrices have more rows than there are workers."""

    max_grad_norm = 1.0

    def build_model(self) -> nn.Module:
        return Net()

    def init_weights(self, module: nn.Module, generator: torch.Generator) -> None:
        for param in module.parameters(recurse=False):
            nn.init.normal_(param, std=0.02, generator=generator)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
        logits, targets = model(batch[:, :-1]), batch[:, 1:]
        each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return rs.Loss(each, targets.numel())


class OneOfMany(Groups):
    """Groups in which one rank believes that there are others."""

    def __init__(self, place: RankPosition, mesh: DeviceMesh) -> None:
        super().__init__(use_gpu=False)
        self.rank, self.mesh, self._of_data = RANK, place.mesh, mesh
        self._state = HostGroup(dist.group.WORLD, datetime.timedelta(seconds=60), finish_plainly)

    def axes(self) -> DeviceMeshes:
        return DeviceMeshes(data=self._of_data, alone=alone)

    def finish(self, work: Any) -> None:
        finish_plainly(work)


class Counting(Watch):
    """Counts the calls, too: exchanges of gradients, all-gathers, and agreements. Follows the peak of each phase."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()
        self.peaks: dict[str, int] = {}
        """Phase of the engine -> peak bytes since `restart`."""
        self._open = [_BETWEEN]
        in_phase = Phases.__call__

        @contextmanager
        def followed(phases: Phases, name: str) -> Iterator[None]:
            with in_phase(phases, name):
                self._turn_to(lambda: self._open.append(name))
                try:
                    yield
                finally:
                    self._turn_to(self._open.pop)

        setattr(Phases, "__call__", followed)  # noqa: B010 - a function for another
        _before(tree_reducer, "all_to_all", lambda *_, **__: self.calls.update(["exchanges"]))
        _before(AllGather, "__call__", lambda *_, **__: self.calls.update(["all-gathers"]))
        _before(
            HostGroup, "sum_int64", lambda _, values: self.calls.update(["agreements"] if values.numel() > 1 else [])
        )

    def restart(self) -> None:
        self.sent.clear()
        self.calls.clear()
        self.peaks.clear()
        self.follower.restart()

    def _turn_to(self, other: Callable[[], object]) -> None:
        """Note the peak of the open phase, and turn to another."""
        self.follower.now()
        self.peaks[self._open[-1]] = max(self.follower.peak, self.peaks.get(self._open[-1], 0))
        other()
        self.follower.restart()


def place_of(workers: int, per_node: int, engine: rs.EngineConfig) -> RankPosition:
    spec = GenerationSpec(
        generation=GenerationId(1),
        members=tuple(map(WorkerId, range(workers))),
        source=FromStart(),
        host="",
        port=0,
        prefix=f"of {workers}",
        nodes=tuple(rank // per_node for rank in range(workers)) if per_node else (),
        apart=layout_of(workers, per_node, engine).apart,
        numerics=numerics.newest(),
    )
    return RankPosition.of(spec, WorkerId(RANK), engine)


def layout_of(workers: int, per_node: int, engine: rs.EngineConfig) -> Mesh:
    """The mesh: with parity, the workers of a stripe are on different nodes."""
    return Mesh(shards=workers, apart=per_node if per_node and engine.redundancy else 1)


def engine_of(dtype: Any, parity: str = "") -> rs.EngineConfig:
    """`parity`: as in the cases of `main`."""
    redundancy = rs.Redundancy(parity=tuple(map(int, parity.split("+")))) if parity else None  # type: ignore[arg-type]
    return rs.EngineConfig(param_dtype=dtype, reduce_dtype=dtype, redundancy=redundancy)


def samples() -> list[torch.Tensor]:
    return [torch.arange(index, index + LENGTH + 1) % VOCABULARY for index in range(8)]


def observed(
    watch: Counting, workers: int, per_node: int, engine_config: rs.EngineConfig, folder: str
) -> dict[str, Any]:
    """The memory and the messages of the last step."""
    gc.collect()
    before = watch.follower.restart()
    count = ROUNDS * workers
    task, steps = WideTask(), STEPS + 1  # the last step of a run would write a checkpoint
    job = make_job(folder, task=task, engine=engine_config, data=samples(), microbatches=count, steps=steps)
    place, store, storage = place_of(workers, per_node, engine_config), ShardStore(), open_storage(folder)
    with fake_mesh(workers, RANK) as mesh:
        engine = Engine(
            job,
            place,
            OneOfMany(place, mesh),
            store,
            MicrobatchLoader(job.data, job.batch),
            None,
            storage,
            Saver(storage),
            torch.device("cpu"),
            probe=lambda *_: None,
            task_calls=threading.Lock(),
            notes=Notes(),
        )
        objects = BuiltObjects(job.task, job.engine)
        engine.prepare(None, objects)
        for _ in range(STEPS):
            watch.restart()
            engine._train(engine.next_step())
        peaks = {phase: most - before for phase, most in watch.peaks.items()}
        found = {"peaks": peaks, "sent": dict(watch.sent), "calls": dict(watch.calls)}
        engine.settle()  # a thread that still computes parity when the interpreter ends would abort the process
        objects.release()
    return found


def main(cases: list[str]) -> None:
    for found in each_observed(cases):
        print(json.dumps(found), flush=True)  # noqa: T201


def each_observed(cases: Sequence[str]) -> list[dict[str, Any]]:
    """The memory and the messages in each case. For a process that does nothing else afterwards."""
    watch = Counting()
    _before(HostGroup, "send", lambda _, data, *__: watch.sent.update(mirror=data.nbytes))
    _numbers_of_others()
    found = []
    for case in cases:
        workers, per_node, *engine = case.split(":")
        with tempfile.TemporaryDirectory() as folder:
            found.append({"case": case, **observed(watch, int(workers), int(per_node), engine_of(*engine), folder)})
    return found


def _numbers_of_others() -> None:
    """Let collectives leave numbers where the `fake` group leaves memory as it is: weights of 0, small gradients."""

    def fill(output: torch.Tensor, value: float) -> None:
        with _disable_current_modes():
            output.fill_(value)

    def gathered(original: Any, self: Any, *, output_tensor: torch.Tensor, **options: Any) -> None:
        original(self, output_tensor=output_tensor, **options)
        fill(output_tensor, 0.0)

    def exchanged(original: Any, received: torch.Tensor, *args: Any, **options: Any) -> None:
        original(received, *args, **options)
        fill(received, 2.0**-10)

    gather, exchange = AllGather.__call__, vars(tree_reducer)["all_to_all"]
    AllGather.__call__ = lambda self, **options: gathered(gather, self, **options)  # type: ignore[method-assign]
    vars(tree_reducer)["all_to_all"] = partial(exchanged, exchange)


if __name__ == "__main__":
    main(sys.argv[1:])
