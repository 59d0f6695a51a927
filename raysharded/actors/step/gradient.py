"""The gradient of one step: forward and backward of the microbatches, summed over all workers in the one order.

The loop over the microbatches is the caller's. `compute` and its like are generators: each yields collated batches. For
each batch the caller computes a loss and gives it to `backward`, before it takes the next one. So a computation that
is done again (audit, proof, search for a NaN) runs in the same loop as the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch

from raysharded.actors.comm import fsdp_collectives
from raysharded.actors.comm.groups import Groups
from raysharded.actors.guards.forwards import BufferWatch, UnitWatch, watching
from raysharded.actors.guards.inputs import InputWatch
from raysharded.actors.guards.outputs import OutputWatch
from raysharded.actors.guards.parameters import ParameterWatch
from raysharded.actors.model.modes import Modes
from raysharded.actors.model.param_layout import Replication
from raysharded.actors.model.sharded_model import ShardedModel, reduces_gradients
from raysharded.actors.numerics.microbatch_schedule import Schedule, microbatch_name
from raysharded.actors.numerics.step_consensus import MetricNames
from raysharded.actors.optimizer.shard_optimizer import ShardOptimizer
from raysharded.actors.reduction.gradient_exchange import Hosts
from raysharded.actors.reduction.tree_reducer import ReductionState, ScalarGradients, install
from raysharded.actors.step.collation import Collator
from raysharded.actors.step.forward_backward import Computer, Results, as_loss
from raysharded.actors.step.parameter_use import ParameterUse
from raysharded.actors.task_calls.remarks import Say
from raysharded.actors.task_calls.task_numbers import half_precision
from raysharded.actors.telemetry import position_record
from raysharded.actors.telemetry.phases import Phases
from raysharded.data import Loader, Microbatch
from raysharded.data.access.prefetch import num_ahead
from raysharded.data.ledger import Digest, add as add_digests
from raysharded.data.loader import MicrobatchKey
from raysharded.errors import InexactError, TaskError
from raysharded.protocol.job import Job
from raysharded.task import Loss

T = TypeVar("T")
Batches: TypeAlias = Generator[Any, None, T]
"""Collated batches; `StepGradient.backward` is called once for each, before the next one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Computed:
    """Results of this worker's microbatches, and what was read for them. The gradient stays with the parameters."""

    results: Results
    read_digest: Digest
    num_reads: int
    uses: tuple[bool, ...] = ()
    """Uses of the parameters, as from `ParameterUse.uses`."""


class StepGradient:
    """Gradients of one generation's steps. Training thread only; all workers make the same calls together."""

    def __init__(
        self,
        job: Job,
        sharded: ShardedModel,
        optimizer: ShardOptimizer,
        computer: Computer,
        collator: Collator,
        loader: Loader,
        names: MetricNames,
        phases: Phases,
        groups: Groups,
        hosts: Hosts,
        modes: Modes,
        *,
        on_reduce: Callable[[], None],
        compares_forwards: bool,
        numbers: int,
        say: Say,
        is_new: bool,
        shifted: tuple[int, int] = (0, 0),
    ) -> None:
        """`hosts`: shards of this worker's group on each host. `modes`: modes of the model's modules. `on_reduce`:
        called at each reduction of a unit, before anything is exchanged, or in fast mode when a backward begins.
        `compares_forwards`: compare the first forwards with the other workers'. `numbers`: the number of the rule.
        `say`: reports remarks. `is_new`: also remark on the inputs, as no step was done before. `shifted`:
        (step, shift): other workers compute the microbatches of this step, as with `compute_again`."""
        self._shifted, self._further = shifted, 0
        self._job, self._optimizer, self._computer, self._loader = job, optimizer, computer, loader
        self._collator, self._num_ahead = collator, num_ahead(job.engine.data_processes or 1)
        self._names, self._in_phase, self._numbers, self._say = names, phases, numbers, say
        self._model, self._root, self._modes = sharded.model, sharded.tree.root, modes
        self._exact, self._on_backward = job.engine.reduction == "exact", on_reduce
        mesh = groups.mesh.data
        schedule = Schedule(mode=job.engine.accumulation, num_microbatches=job.batch.num_microbatches, mesh=mesh)
        self.rounds = ReductionState(
            schedule=schedule,
            rank=groups.mesh.data_rank_of(groups.rank),
            replicas=groups.replicas,
            everyone=groups.everyone if sharded.cuts.replicated else None,
            hosts=hosts,
            on_reduce=on_reduce,
            finish=groups.finish,
            reducing=self._reducing,
        )
        if not job.use_gpu:
            fsdp_collectives.install(sharded.units, groups.finish, self._reducing)
        self.reducers = install(sharded.units, self.rounds, sharded.replicated_units) if self._exact else []
        self._scalars = ScalarGradients(sharded.parameters.values(), self.rounds, exact=self._exact)
        self.reducers += self._scalars.reducers
        sums = groups.state.sum_int64 if compares_forwards else None
        self.units = UnitWatch(sharded.units, sharded.hooks, sums) if self._exact else None
        """Watch of the forwards, also those of the evaluation."""
        self._parameters = ParameterWatch(self._model, sharded.hooks, sharded.marks.hooks, sharded.parameters)
        self.use = ParameterUse(sharded.units, sharded.parameters)
        self._trains_units = any(reduces_gradients(unit) for _, unit in sharded.units)
        self._outputs = OutputWatch(sharded.hooks, looks=not job.engine.compile)
        self._inputs = InputWatch(sharded.hooks, job.engine, say) if is_new else None
        self._buffers: BufferWatch | None = None
        self._padding_microbatch: Microbatch | None = None
        self.at: tuple[int, int | None, int] = (0, None, 0)  # step, microbatch (None: padding), samples
        self._results = Results("")
        self.where = ""  # source of the newest batch's loss, for errors
        self.forward: AbstractContextManager[None] | None = None
        """Context of the newest batch's forward, which `backward` ends; None outside."""

    def watch_buffers(self) -> None:
        """Call once the state is loaded: from then on a forward must not change a buffer."""
        self._buffers = BufferWatch(self._model) if self._exact else None

    def check_buffers(self, after: str, step: int) -> None:
        """Raise `InexactError`, in exact mode, if a forward changed a buffer."""
        if self._buffers is not None:
            self._buffers.check(after, step)

    def plan_reading(self, step: int) -> None:
        """Let this worker's microbatches of a step, and then those of the next ones, be read in the background."""
        steps = range(step, min(step + self._num_ahead, self._job.max_steps) + 1)
        keys = _upcoming(steps, self._num_ahead, lambda at: self.rounds.microbatches_shifted(self._shift_of(at)))
        if keys:
            self._loader.plan(keys)

    def compute(self, step: int) -> Batches[Computed]:
        """Compute the step's gradient and leave it with the parameters: each worker has its shard of the sum."""
        rounds = self.rounds
        rounds.shift = self._shift_of(step) + self._further
        self._results = results = Results(self._computer.name_of("train", step), self._names.of("train"), self._numbers)
        digest, num_reads = (0, 0), 0
        taken: Microbatch | None = None
        for reducer in self.reducers:
            reducer.reset()
        self._optimizer.clear_gradients()
        self.use.restart()
        for round_index in range(rounds.count):
            rounds.index = round_index
            index = rounds.microbatch(rounds.rank)
            self._in_phase.note_place(step, index)
            with self._in_phase("data"):
                if index is None:
                    taken = self._padding(step) if taken is None or taken.batch is not None else taken
                else:
                    taken = self._loader.load(step, index)
                    digest = add_digests(digest, taken.digest)
                    num_reads += taken.num_reads
                position_record.note_samples(taken.ids[: position_record.MOST_SAMPLES].tolist())
                batch = self._collator.training_batch(taken, is_padding=index is None)
            self._begin_forward(step, index, taken.num_samples)
            yield batch
            del batch
            if self.forward is not None:
                raise TaskError(f"{self.where}: call step.backward(loss) once for each microbatch.")
        self._in_phase.note_place(step)
        self.check_buffers("training", step)
        if self._inputs is not None:
            self._inputs.end()
            self._inputs = None
        self._outputs.end_first_step()
        if results.half:
            self._say("half precision", half_precision(self._computer.name_of("train", step), results.half))
        if not self._exact:
            with self._reducing():
                self._add_up_fast()
        return Computed(results=results, read_digest=digest, num_reads=num_reads, uses=self.use.uses())

    def _reducing(self) -> AbstractContextManager[None]:
        return self._in_phase("reduce")

    def _begin_forward(self, step: int, index: int | None, num_samples: int) -> None:
        self.at, place = (step, index, num_samples), -1 if index is None else index
        self.where = f"{self._computer.name_of('train', step)}, {microbatch_name(place)}"
        forward = self._in_forward(step, index, place)
        forward.__enter__()
        self.forward = forward

    @contextmanager
    def _in_forward(self, step: int, index: int | None, place: int) -> Iterator[None]:
        with self._in_phase("forward"):
            if self._exact:
                self._optimizer.clear_gradients()
            elif self._job.engine.accumulation == "local":
                self._root.set_requires_gradient_sync(self.rounds.is_last)  # type: ignore[operator]
            self._modes.train()
            self._outputs.forget()
            with (
                watching(self.units, "train", step, index),
                self.rounds.computing("loss"),
                self._computer.computing("train", step, place),
            ):
                yield

    def backward(self, value: Any) -> None:
        """Add the gradient of the newest batch's loss to the step's. `value`: as the result of `Task.loss`."""
        forward, (step, index, num_samples) = self.forward, self.at
        if forward is None:
            raise TaskError(f"{self.where}: step.backward(loss) was called twice; add the losses, and call it once.")
        loss = as_loss(value, num_samples, self.where)
        self.forward = None
        forward.__exit__(None, None, None)
        if loss.total.requires_grad:
            self._outputs.forget()
        self._results.note_names(loss)
        self._results.note_half(loss)
        if index is not None:
            self._results.add(index, loss)
        is_used = index is not None and loss.total.requires_grad
        with self._in_phase("backward"), self.rounds.computing("backward"), self.use.counting(is_used):
            self._backward(step, index, loss)

    def give_up(self, error: BaseException) -> None:
        """End what a forward has left open that raised this error. Idempotent."""
        forward, self.forward = self.forward, None
        if forward is not None:
            forward.__exit__(type(error), error, error.__traceback__)

    def _backward(self, step: int, index: int | None, loss: Loss) -> None:
        if not self._exact and loss.total.requires_grad:  # no reducer exists that would call it
            loss.total.register_hook(lambda _: self._on_backward())
        arrivals = self.use.arrivals
        if index is None:
            self._computer.backward(step, -1, loss, self._outputs, scale=1.0 if self._exact else 0.0)
        else:
            self._computer.backward(step, index, loss, self._outputs)
        if self._trains_units and self.use.arrivals == arrivals:
            self._outputs.refuse_lost(f"step {step}, {microbatch_name(-1 if index is None else index)}")
        self.use.note(self._scalars.params)
        self._scalars.reduce()
        calls = {reducer.calls for reducer in self.reducers}
        if len(calls) > 1:
            idle = min(self.reducers, key=lambda reducer: reducer.calls)
            raise InexactError(
                f"the parameters of {idle.name} got no gradient from a microbatch of step {step}: they take part in "
                "some forwards only. Use every block in every forward, or freeze the unused ones "
                "(requires_grad=False)."
            )

    def _add_up_fast(self) -> None:
        """Sum over the workers that hold the same; FSDP2 has added the gradients of a group."""
        self._scalars.fill()
        for group, holders in (
            (self.rounds.replicas, (Replication.ONE, Replication.TENSOR_GROUP)),
            (self.rounds.everyone, (Replication.EVERYONE,)),
        ):
            if group is not None:
                for gradient in self._optimizer.gradients(*holders):
                    group.all_reduce(gradient)

    def _padding(self, step: int) -> Microbatch:
        """A microbatch for a worker that had none yet in a step: another's, since a loss may need as many samples."""
        self._padding_microbatch = self._padding_microbatch or self._loader.load(step, 0)
        return self._padding_microbatch

    def local_gradients(self) -> list[torch.Tensor]:
        """This worker's shards of the newest sum, in a fixed order."""
        return self._optimizer.gradients()

    def compute_again(self, step: int, shift: int, watch: Callable[[int, torch.Tensor], None]) -> Batches[Computed]:
        """Like `compute`, but each worker computes what the one `shift` places further otherwise does: the same bits.

        `watch`: called with a microbatch and one unit's gradient of it, for each that this worker computes.
        """
        usual = self.rounds.on_gradient

        def both(index: int, gradient: torch.Tensor) -> None:
            if usual is not None:
                usual(index, gradient)
            watch(index, gradient)

        self._further, self.rounds.on_gradient = shift, both
        try:
            return (yield from self.compute(step))
        finally:
            self._further, self.rounds.on_gradient = 0, usual

    def _shift_of(self, step: int) -> int:
        return self._shifted[1] if step == self._shifted[0] else 0

    def compute_first_round_again(
        self, step: int, shift: int, watch: Callable[[int, torch.Tensor], None]
    ) -> Batches[Results]:
        """Like `compute_again`, for each worker's first microbatch alone; the step's gradient is unchanged."""
        self.rounds.first_alone = True
        try:
            with self._optimizer.keeping_gradients():
                return (yield from self.compute_again(step, shift, watch)).results
        finally:
            self.rounds.first_alone = False
            for reducer in self.reducers:
                reducer.reset()


def _upcoming(steps: range, num_ahead: int, microbatches_of: Callable[[int], list[int]]) -> list[MicrobatchKey]:
    """The microbatches of the first step, and at least `num_ahead` of those that follow; none without a step."""
    keys, needed = list[MicrobatchKey](), 0
    for step in steps:
        if step == steps.start or len(keys) < needed:
            keys += [(step, index) for index in microbatches_of(step)]
            needed = needed or len(keys) + num_ahead
    return keys
