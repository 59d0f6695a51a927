"""Trains a tiny GPT with the real driver and real worker processes; returns every number that it reported."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

import raysharded as rs
from raysharded.actors.process import environment
from raysharded.actors.step.engine import Engine
from raysharded.checkpoint import SigningKey, Storage, open_storage
from raysharded.checkpoint.retention.policy import Keep
from raysharded.clock import SystemClock
from raysharded.config import OnNonFinite
from raysharded.driver.checkpoints.committer import RunFiles
from raysharded.driver.driver import Driver, Listener
from raysharded.driver.state.driver_config import DriverConfig
from raysharded.driver.state.mesh_choice import Grouping
from raysharded.ids import WorkerId
from raysharded.layout import parity_of
from raysharded.ownership.leadership import LeaseTerms
from raysharded.protocol.job import Job
from raysharded.task import TrainFunction
from raysharded.testing import Fault, FaultPlan
from raysharded.testing.faults import READY
from raysharded.testing.processes import ProcessLauncher
from tests import patches

A_CHANGE = WorkerId(99)
"""For `Fault(until=)` of worker 0 in `train`, the first member: it waits until the driver wants another generation
after this step. Then a worker that was started in a lost one's place is ready, and the change is prepared. To wait
until that worker is ready would be too little: the run may be over before it joins."""
VOCABULARY, WIDTH, SEQUENCE, HEADS = 67, 16, 8, 2  # few of these divide by the numbers of workers that are tried


class Block(nn.Module):
    """A pre-norm transformer block with dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.gains = nn.Parameter(torch.ones(3, 1))  # fewer rows than workers
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(batch, length, width)))
        y: torch.Tensor = x + self.gains.mean() * self.dropout(self.down(F.gelu(self.up(self.norm_2(x)))))
        return y


class Gpt(nn.Module):
    """Blocks between an embedding and a head that share one weight; positions are a persistent buffer."""

    positions: torch.Tensor
    ramp: torch.Tensor

    def __init__(self, layers: int = 1, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("positions", 0.1 * torch.randn(SEQUENCE, WIDTH))
        self.register_buffer("ramp", torch.linspace(1.0, 2.0, SEQUENCE), persistent=False)
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions * self.ramp[:, None]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class GptTask(rs.Task):
    """AdamW, clipping, dropout, a learning rate schedule, weight decay for matrices alone, and two metrics."""

    max_grad_norm: float | None = 0.7

    def build_model(self) -> nn.Module:
        return Gpt()

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        matrices = [param for param in model.parameters() if param.requires_grad and param.dim() > 1]
        vectors = [param for param in model.parameters() if param.requires_grad and param.dim() == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 3e-3, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-2)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss | torch.Tensor:
        logits, targets = model(batch[:, :-1]), batch[:, 1:]
        counts = targets % 5 != 0  # masked tokens: every microbatch weighs something else
        each = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
        total = (each * counts.flatten()).sum()
        hits = (logits.argmax(-1) == targets).sum()
        return rs.Loss(
            total, counts.sum(), {"accuracy": (hits, targets.numel()), "logit": (logits.float().sum(), logits.numel())}
        )

    def lr_scale(self, step: int) -> float:
        return rs.warmup_cosine(step, warmup_steps=2, total_steps=10)


class TwoBlocksTask(GptTask):
    """As `GptTask` with two blocks, whose parameters have equal shapes and are gathered one block ahead."""

    def build_model(self) -> nn.Module:
        return Gpt(2)


class Small(nn.Module):
    """One layer between an embedding and a head that share one weight, with dropout, a persistent buffer, and a
    parameter of fewer rows than workers."""

    positions: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("positions", 0.1 * torch.randn(SEQUENCE, WIDTH))
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.gains = nn.Parameter(torch.ones(3, 1))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions
        for block in self.blocks:
            x = x + self.gains.mean() * self.dropout(torch.tanh(block(x)))
        logits: torch.Tensor = self.head(x)
        return logits


class SmallTask(GptTask):
    """As `GptTask` with a model that starts and steps in half the time: where the model does not matter."""

    def build_model(self) -> nn.Module:
        return Small()


class Tokens:
    """A map-style dataset of random tokens."""

    def __init__(self, num_samples: int = 301) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Any:
        return np.random.default_rng(index).integers(0, VOCABULARY, SEQUENCE + 1)


@cache
def samples() -> list[Any]:
    """The samples of `Tokens()`. A thread of the worker reads a list; a custom dataset is read in a process, which
    takes as long to start as a step."""
    tokens = Tokens()
    return [tokens[index] for index in range(len(tokens))]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The results of a run. `numbers` and `fingerprint` must not depend on the number of workers."""

    numbers: tuple[Mapping[str, Any], ...]
    """Per step: loss, weight, gradient_norm, lr, digest, reads, and metrics and evaluation if there are any."""
    fingerprint: str | None
    entries: tuple[tuple[str, Mapping[str, Any]], ...]
    """The journal as (kind, fields)."""

    @property
    def bits(self) -> tuple[str, str | None]:
        """All that must be equal, with NaN equal to NaN."""
        return repr(self.numbers), self.fingerprint

    def of(self, kind: str) -> list[Mapping[str, Any]]:
        """Fields of the journal's entries of a kind."""
        return [fields for found, fields in self.entries if found == kind]

    @property
    def losses(self) -> list[float]:
        """The losses by step."""
        return [numbers["loss"] for numbers in self.numbers]


@dataclass(slots=True)
class Collector:
    """Collects the journal; a step that was recomputed after a loss must give the same numbers again."""

    entries: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    numbers: dict[int, Mapping[str, Any]] = field(default_factory=dict)

    def __call__(self, kind: str, fields: dict[str, Any]) -> None:
        self.entries.append((kind, dict(fields)))
        if kind == "step":
            numbers = {k: v for k, v in fields.items() if k not in ("generation", "workers", "seconds", "remarks")}
            assert repr(self.numbers.setdefault(fields["step"], numbers)) == repr(numbers)  # NaN is NaN
        elif kind in ("rewind", "corruption"):
            kept = fields["to_step"] if kind == "rewind" else fields["verified_step"]
            self.numbers = {step: numbers for step, numbers in self.numbers.items() if step <= kept}


def train(
    workers: int,
    *,
    task: rs.Task | None = None,
    microbatches: int = 5,
    steps: int = 3,
    engine: rs.EngineConfig | None = None,
    evaluation: rs.EvalConfig | None = None,
    data: Any = None,
    kills: Sequence[tuple[int, int, str]] = (),
    faults: Sequence[Fault] = (),
    losses: int = 0,
    hang_timeout_s: float = 60.0,
    use_gpu: bool = False,
    save_every: int | None = None,
    on_non_finite: OnNonFinite = "stop",
    max_skipped_steps: int = 10,
    shards: int | None = None,
    least_shards: int | None = None,
    tensor: int = 1,
    nodes: str = "",
    prepare: Callable[[], None] | Mapping[WorkerId, Callable[[], None]] | None = None,
    retries: int = 0,
    done: int | None = None,
    read_patience_s: float = 60.0,
    records_microbatches: bool = False,
    replacement_wait_s: float = 0.0,
) -> Outcome:
    """Train from the start with so many workers, in groups of `shards` if that is given and of not fewer than
    `least_shards`, with a tensor parallel degree of `tensor`; raises the error that the run failed with. `nodes`: a
    letter for the node that each worker believes to be on. `prepare`: called first in every worker's process, or in
    those of these workers, if `nodes` is not given.

    `kills`: (worker, step, phase) of every worker to kill; `faults`: others; that all of them strike is checked.
    `losses`: the workers that may be lost besides those. `retries`: of a step whose task raised. `done`: the step that
    a loop makes the last one. `read_patience_s`: as of `Job`, long enough for a busy machine. `replacement_wait_s`: as
    of `ScalingConfig`.
    """
    with tempfile.TemporaryDirectory() as folder:
        killed = [Fault(worker=WorkerId(worker), step=step, phase=phase) for worker, step, phase in kills]
        plan = FaultPlan(faults=(*killed, *faults), folder=folder)
        losses += sum(fault.kind != "wait" for fault in plan.faults)
        job = make_job(
            f"{folder}/run",
            task=task,
            microbatches=microbatches,
            steps=steps,
            engine=engine,
            evaluation=evaluation,
            data=data,
            use_gpu=use_gpu,
            save_every=save_every,
            faults=plan if plan.faults else None,
            on_non_finite=on_non_finite,
            read_patience_s=read_patience_s,
            records_microbatches=records_microbatches,
        )
        limits = make_limits(
            job,
            workers,
            min_workers=1 if losses else workers,
            max_worker_losses=losses,
            hang_timeout_s=hang_timeout_s,
            max_skipped_steps=max_skipped_steps,
            task_error_retries=retries,
            grouping=grouped(job, shards, least_shards, tensor),
            replacement_wait_s=replacement_wait_s,
            join_wait_s=60.0,  # all begin together, on a busy machine too: or else a fault's worker may come too late
        )
        listener = Collector()
        first: dict[WorkerId, Callable[[], None]] = {}
        if isinstance(prepare, Mapping):
            first |= prepare
        elif prepare is not None:
            first = {WorkerId(worker): prepare for worker in range(workers + losses)}
        first |= {WorkerId(worker): partial(believe_to_be_on, node) for worker, node in enumerate(nodes)}
        for fault in plan.faults:
            if fault.until == A_CHANGE:
                first[fault.worker] = partial(_mark_changes, folder, first.get(fault.worker))
        state = make_driver(job, limits, listener, prepare=first).run()
        assert all(plan.fired(fault) for fault in plan.faults)
    last = done or steps
    assert sorted(listener.numbers) == list(range(1, last + 1))
    return Outcome(
        numbers=tuple(listener.numbers[step] for step in range(1, last + 1)),
        fingerprint=state.result_fingerprint,
        entries=tuple(listener.entries),
    )


def _mark_changes(folder: str, others: Callable[[], None] | None) -> None:
    """In a worker's process: leave the mark that a fault waits for when the driver requests a boundary."""
    if others is not None:
        others()
    request = Engine.request_boundary

    def marked(engine: Engine) -> None:
        request(engine)
        Path(folder, f"{READY}-worker{A_CHANGE}").touch()

    setattr(Engine, "request_boundary", marked)  # noqa: B010 - mypy refuses to assign to a method


def believe_to_be_on(node: str) -> None:
    """Give the process of a worker the name of its node."""
    patches.replace(environment, "node_id", lambda: node)


def log_into(file: str) -> None:
    """In a worker's process: also log into this file."""
    logging.getLogger("raysharded.worker").addHandler(logging.FileHandler(file))


def make_job(
    url: str,
    *,
    task: rs.Task | None = None,
    microbatches: int = 5,
    steps: int = 3,
    engine: rs.EngineConfig | None = None,
    evaluation: rs.EvalConfig | None = None,
    data: Any = None,
    use_gpu: bool = False,
    save_every: int | None = None,
    faults: FaultPlan | None = None,
    grace_s: float = 25.0,
    on_non_finite: OnNonFinite = "stop",
    read_patience_s: float = 60.0,
    records_microbatches: bool = False,
) -> Job:
    """A run in the folder at `url`."""
    return Job(
        run_name="engine",
        run_url=url,
        task=task or GptTask(),
        data=data or samples(),
        batch=rs.BatchConfig(global_batch_size=2 * microbatches, microbatch_size=2, seed=5),
        engine=engine or rs.EngineConfig(),
        evaluation=evaluation,
        max_steps=steps,
        save_every_steps=save_every,
        save_at_end=True,
        use_gpu=use_gpu,
        num_threads=1,
        collective_timeout_s=60.0,
        grace_s=grace_s,
        on_non_finite=on_non_finite,
        read_patience_s=read_patience_s,
        records_microbatches=records_microbatches,
        faults=faults,
    )


def grouped(job: Job, shards: int | None, least_shards: int | None = None, tensor: int = 1) -> Grouping | None:
    """Shard groups of this size, and of not fewer than so many workers, with this tensor parallel degree."""
    if shards is None and tensor == 1:
        return None
    least = least_shards or shards or 1
    microbatches = job.batch.num_microbatches
    return Grouping(shards=shards, least_shards=least, num_microbatches=microbatches, tensor=tensor)


def make_limits(job: Job, workers: int, **limits: Any) -> DriverConfig:
    """Limits of a run with so many workers that tolerates nothing, except for the fields of `limits`."""
    defaults: dict[str, Any] = {
        "min_workers": workers,
        "max_workers": workers,
        "max_steps": job.max_steps,
        "exact": job.engine.reduction == "exact",
        "mirrors": job.engine.mirrors,
        "parity": parity_of(job.engine.redundancy),
        "save_at_end": True,
        "start_timeout_s": 60.0,
        "hang_timeout_s": 60.0,  # enough on a busy machine; tests of hangs set theirs
        "stopping_patience_s": max(3.0, min(20.0, limits.get("hang_timeout_s", 60.0))),
        "replacement_wait_s": 0.0,
        "prepare_within_s": 20.0,
        "max_worker_losses": 0,
        "task_error_retries": 0,
        "progress_timeout_s": 60.0,
        "rewind": job.on_non_finite == "rewind",
        "save_every_steps": job.save_every_steps if job.on_non_finite == "rewind" else None,
        "global_batch_size": job.batch.global_batch_size,
        "proves_first_step": job.engine.prove_first_step and job.engine.reduction == "exact",
    }
    return DriverConfig(**(defaults | limits))


def files_of(job: Job, storage: Storage | None = None, **others: Any) -> RunFiles:
    """The run's files, with one checkpoint kept; `others`: other values of the fields."""
    return RunFiles(
        name=job.run_name,
        storage=storage or open_storage(job.run_url),
        global_batch_size=job.batch.global_batch_size,
        **{"keep": Keep(last=1), "metadata": {}, **others},
    )


def make_driver(
    job: Job,
    limits: DriverConfig,
    listen: Listener,
    *,
    storage: Storage | None = None,
    keep: Keep | None = None,
    key: SigningKey | None = None,
    metadata: Mapping[str, Any] | None = None,
    take_over: bool = False,
    record_events: bool = False,
    prepare: Mapping[WorkerId, Callable[[], None]] | None = None,
    on_storage: Mapping[str, Any] | None = None,
    function_s: float = 20.0,
) -> Driver:
    """The driver of a run whose workers are processes; `storage`: the driver's own view of the run's folder; `prepare`:
    called first in a worker's process; `on_storage`: other fields of `RunFiles`; `function_s`: time of a training
    function at its end."""
    others = {"keep": keep or Keep(last=1), "metadata": metadata or {}, "key": key, **(on_storage or {})}
    files = files_of(job, storage, **others)
    lease = LeaseTerms(take_over=take_over)
    launcher = ProcessLauncher(job, prepare=prepare)
    end = {"function_s": function_s} if isinstance(job.task, TrainFunction) else {}
    return Driver(limits, launcher, files, SystemClock(), listen, lease, record_events=record_events, **end)
