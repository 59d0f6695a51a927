"""Assembly of the parts that one worker trains with in one generation, from a task and its surroundings."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch

from raysharded.actors.built_objects import BuiltObjects
from raysharded.actors.comm.groups import Groups
from raysharded.actors.compilation.compiled_blocks import Compilation
from raysharded.actors.guards.inputs import vocabulary_remark
from raysharded.actors.guards.shard_memory import check_memory
from raysharded.actors.model.build import Wrapped
from raysharded.actors.model.modes import Modes
from raysharded.actors.model.sharded_model import ShardedModel
from raysharded.actors.numerics.step_consensus import MetricNames
from raysharded.actors.optimizer.loaded_state import TriedOptimizer
from raysharded.actors.optimizer.shard_optimizer import ShardOptimizer
from raysharded.actors.shards.device_state import DeviceState
from raysharded.actors.shards.mirror import SnapshotReplicator
from raysharded.actors.shards.position import RankPosition
from raysharded.actors.shards.saver import Saver
from raysharded.actors.shards.store import ShardStore
from raysharded.actors.step.collation import Collator
from raysharded.actors.step.evaluation import Evaluator
from raysharded.actors.step.forward_backward import Computer
from raysharded.actors.step.gradient import StepGradient
from raysharded.actors.step.pending_reports import Reports
from raysharded.actors.step.proofs.attribute_proof import AttributeProof
from raysharded.actors.step.proofs.audit import Audit
from raysharded.actors.step.proofs.evaluation_proof import EvaluationProof
from raysharded.actors.step.proofs.first_step_proof import Proof
from raysharded.actors.step.update import StepUpdate
from raysharded.actors.task_calls.process_state import STAYS_CHANGED, Left, put_back
from raysharded.actors.task_calls.remarks import Say
from raysharded.actors.telemetry.phases import Phases
from raysharded.checkpoint import Storage
from raysharded.data import Loader, MicrobatchLoader
from raysharded.protocol.job import Job
from raysharded.protocol.messages import FromMemory


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """Everything that a worker's training in one generation needs, besides what is built for it."""

    job: Job
    place: RankPosition
    groups: Groups
    store: ShardStore
    loader: Loader
    eval_loader: Loader | None
    device: torch.device
    in_phase: Phases
    say: Say
    compilation: Compilation | None
    """Compilations of this process, in exact mode; None in fast mode."""
    storage: Storage
    keeper: SnapshotReplicator
    saver: Saver
    reports: Reports
    probe: Callable[[str, int], None]
    calling_the_task: Callable[[], AbstractContextManager[None]]
    """A context in which no other thread calls the task's code."""
    boundary: threading.Event
    """Set to stop all workers after the step that the next agreement closes. Any thread."""
    save_asked: threading.Event
    """Set to request a checkpoint of all workers. Any thread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Parts of one worker's training. The model's state has no values yet: `restore` fills it."""

    sharded: ShardedModel
    optimizer: ShardOptimizer
    tried: TriedOptimizer
    names: MetricNames
    modes: Modes
    gradient: StepGradient
    evaluator: Evaluator
    live: DeviceState
    applying: StepUpdate
    audit: Audit
    proof: Proof
    attribute_proof: AttributeProof
    check_memory: Callable[[], None]
    """Check after the first forward: raises InexactError unless units gather the memory that the optimizer writes."""


def assemble(
    around: Surroundings,
    prepared: Wrapped | None,
    objects: BuiltObjects,
    *,
    is_new: bool,
    on_reduce: Callable[[], None],
) -> Parts:
    """Give the model its memory, and build everything that computes with it. Raises TaskError, InexactError.

    `prepared`: nodes of the model that are wrapped already. `objects`: those of this process; what is missing there is
    built. `is_new`: True if no step of this run was computed in memory before. `on_reduce`: called before each exchange
    of gradients.
    """
    job, place, groups, say = around.job, around.place, around.groups, around.say
    sharded = objects.attach(prepared, groups.axes(), place.spec.build_seed, around.device)
    _settle_process(around, "build_model", sharded.inventory.left)
    numbers = place.number_of("numbers")
    with put_back() as left:
        optimizer = ShardOptimizer(
            job.task,
            sharded.model,
            sharded.parameters,
            exact=job.engine.reduction == "exact",
            cuts=sharded.cuts,
            rates=place.spec.decisions.rates,
            numbers=numbers,
            built=objects.optimizer,
        )
    if objects.optimizer is None:
        objects.optimizer, objects.optimizer_left = optimizer.built, left
    _settle_process(around, "build_optimizer", objects.optimizer_left)
    modes = objects.modes(place.number_of("modes"))
    if not getattr(job.task, "sets_modes", False):
        modes.remark(type(job.task).__name__, say)
    if objects.registered is not None:
        modes.train()
        objects.registered.modes = modes
    objects.tried = tried = optimizer.try_out(objects.tried, say)
    draws = place.number_of("draws")
    computer = Computer(job.task, sharded.model, job.batch.seed, draws, watches_memory=not job.engine.compile)
    loader = around.loader if isinstance(around.loader, MicrobatchLoader) else None
    collation = loader.collation if loader is not None else None
    if collation is not None and draws == 1:  # Python's and NumPy's draws of a loss follow those of `collate`
        collation.refuse("the run began with a version whose losses depend on its draws")
    collator = Collator(
        job.task,
        around.device,
        job.batch.seed,
        collation,
        say,
        is_exact=job.engine.reduction == "exact",
        again=loader.samples_again if loader is not None and loader.lends_memory else None,
    )
    names = MetricNames(type(job.task).__name__, groups.state.max_int)
    gradient = StepGradient(
        job,
        sharded,
        optimizer,
        computer,
        collator,
        around.loader,
        names,
        around.in_phase,
        groups,
        place.hosts,
        modes,
        on_reduce=on_reduce,
        compares_forwards=not isinstance(place.spec.source, FromMemory),
        numbers=numbers,
        say=say,
        is_new=is_new,
        shifted=place.spec.shift,
    )
    is_proven = job.engine.reduction == "exact" and job.engine.prove_first_step
    every, sum_int64, is_loop = job.engine.audit_every_steps, groups.state.sum_int64, objects.registered is not None
    attributes = objects.attributes_of_model if is_loop else objects.attributes
    evaluator = Evaluator(
        job,
        modes,
        computer,
        collator,
        around.eval_loader,
        names,
        groups,
        gradient.units,
        EvaluationProof(place, sum_int64, around.device, is_exact=job.engine.reduction == "exact", is_of_loop=is_loop),
        computing=partial(gradient.rounds.computing, "loss"),
        numbers=numbers,
        say=say,
    )
    live = DeviceState(sharded, optimizer)
    for about, sentence in sharded.inventory.remarks.items():
        say(about, sentence)
    if is_new and (remark := vocabulary_remark(job.data, sharded.model)):
        say("vocabulary", remark)
    return Parts(
        sharded=sharded,
        optimizer=optimizer,
        tried=tried,
        names=names,
        modes=modes,
        gradient=gradient,
        evaluator=evaluator,
        live=live,
        applying=StepUpdate(
            job,
            optimizer,
            gradient,
            around.in_phase,
            sum_int64,
            unused=place.number_of("unused"),
            say=say if is_new else None,
        ),
        audit=Audit(every, gradient, live, around.store, place, sum_int64),
        proof=Proof(
            gradient,
            place,
            around.in_phase,
            sum_int64,
            around.device,
            audits=every is not None,
            say_of_loop=say if is_loop else None,
        ),
        attribute_proof=AttributeProof(
            gradient,
            attributes if is_proven else tuple,
            around.in_phase,
            sum_int64,
            say_of_loop=say if is_loop else None,
        ),
        check_memory=partial(check_memory, sharded, optimizer.written),
    )


def call_in_the_middle(sharded: ShardedModel, on_forward: Callable[[], None]) -> None:
    """Let `on_forward` be called in each forward, when half of the units have computed."""
    _, middle = sharded.hooks[len(sharded.hooks) // 2]
    middle.before_forward(lambda *_: on_forward())


def _settle_process(around: Surroundings, method: str, left: Left) -> None:
    """Keep, or report, the process settings that a method of the task left changed, by the run's rule."""
    if STAYS_CHANGED[around.place.number_of("modes")]:
        left.set_again()
    else:
        left.remark(f"{type(around.job.task).__name__}.{method}", around.say)
