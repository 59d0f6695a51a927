"""One worker's training in one generation. Knows torch, and no Ray.

A step: compute (forward and backward of the microbatches, gradients reduced in the canonical order), agree (one small
sum over all workers), apply (clip, optimizer), snapshot (copy to host memory and start the mirror's transfer). The
agreement of step `s` also commits step `s - 1`: it is reached only by workers whose mirrors of `s - 1` are complete.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from raysharded.actors.agreement import Agreed, Contribution, Flags, agree
from raysharded.actors.build import BufferWatch, UnitWatch, build_sharded
from raysharded.actors.compute import Computer, Results
from raysharded.actors.evaluation import evaluate, num_microbatches, shares
from raysharded.actors.live import LiveState
from raysharded.actors.mirror import Mirror
from raysharded.actors.norm import NORM_WORDS, square_sum_words
from raysharded.actors.optimizer import ShardOptimizer
from raysharded.actors.process_group import Groups
from raysharded.actors.reduction import Rounds, install
from raysharded.actors.restore import Place, Restored, restore
from raysharded.actors.saver import Saver
from raysharded.actors.schedule import microbatch_of, num_rounds
from raysharded.actors.shards import ShardBuffer, ShardStore
from raysharded.checkpoint import Storage
from raysharded.data import Loader
from raysharded.data.ledger import add as add_digests
from raysharded.driver.messages import Job, StepReport, StopReason
from raysharded.errors import CollectiveAborted, InexactError, NonFiniteLoss, TaskError
from raysharded.ids import derive_seed
from raysharded.layout import StateSpec
from raysharded.task import Loss

_REPORTS_KEPT = 512
_CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_


class Engine:
    """The model of one generation on one worker, and its training loop.

    One thread trains; `request_boundary` is for others.
    """

    def __init__(
        self,
        job: Job,
        place: Place,
        groups: Groups,
        store: ShardStore,
        loader: Loader,
        eval_loader: Loader | None,
        storage: Storage,
        saver: Saver,
        device: torch.device,
        probe: Callable[[str, int], None],
    ) -> None:
        self._job, self._place, self._groups, self._store = job, place, groups, store
        self._loader, self._eval_loader, self._storage, self._saver = loader, eval_loader, storage, saver
        self._device = device
        self._probe = probe
        self.step = place.spec.source.step
        self.phase = "build"
        self.reports: deque[StepReport] = deque(maxlen=_REPORTS_KEPT)
        self.news = threading.Condition()
        """Notified when a report was added."""
        self._mirror: Mirror | None = None
        self._padding_samples: list[object] = []
        self._padding_size = job.batch.microbatch_size if job.engine.compile else 1
        """Samples: the fewest, or a whole microbatch where kernels are made for shapes."""
        self._boundary = threading.Event()
        self._seconds: dict[str, float] = {}
        self._exact = job.engine.reduction == "exact"
        self._spec: StateSpec | None = None
        self._metric_names: dict[str, tuple[str, ...]] = {}

    # -- before training --

    def prepare(self) -> Restored:
        """Build the model for this generation and give it its state."""
        job, groups = self._job, self._groups
        with self._in_phase("build"):
            sharded = build_sharded(job.task, job.engine, groups.mesh(), self._device)
            self._optimizer = ShardOptimizer(job.task, sharded.model, sharded.parameters, exact=self._exact)
            self._model = sharded.model
            self._rounds = Rounds(
                mode=job.engine.accumulation,
                num_microbatches=job.batch.num_microbatches,
                world_size=groups.world_size,
                rank=groups.rank,
                on_reduce=lambda: self._probe("backward", self.step + 1),
            )
            self._reducers = install(sharded.units, self._rounds) if self._exact else []
            self._units = UnitWatch(sharded.units) if self._exact else None
            self._computer = Computer(job.task, sharded.model, self._device, job.batch.seed)
            self._live = LiveState(sharded, self._optimizer, groups.rank, groups.world_size)
            middle = sharded.units[len(sharded.units) // 2][1]
            assert isinstance(middle, torch.nn.Module)
            middle.register_forward_pre_hook(lambda *_: self._probe("forward", self.step + 1))
        with self._in_phase("reshard"):
            self._mirror = Mirror(self._place, groups, self._store)
            restored = restore(
                self._place,
                job,
                self._live,
                self._store,
                self._storage,
                groups,
                lambda p: self._probe(p, self.step + 1),
            )
        with self._in_phase("load"):
            self._live.load_from(restored.own.data, restored.own.spec, restored.own.pieces)
            self._spec = restored.own.spec if self.step else None
            self._buffers = BufferWatch(self._model) if self._exact else None
            groups.barrier()
        return restored

    def check_optimizer(self) -> None:
        """Refuse, in exact mode, an optimizer whose bits depend on the sharding."""
        if self._exact:
            self._optimizer.check_elementwise()

    @property
    def preparation_seconds(self) -> dict[str, float]:
        """Phase -> seconds of `prepare`."""
        return dict(self._seconds)

    def _join_mirror(self) -> None:
        assert self._mirror is not None
        self._mirror.join()

    def settle(self) -> None:
        """After an abort: return when nothing is written into this worker's buffers any more."""
        if self._mirror is not None:
            self._mirror.settle()

    def request_boundary(self) -> None:
        """Ask all workers, through the next agreement, to stop after the step it closes. Any thread."""
        self._boundary.set()

    # -- training --

    def run(self) -> StopReason:
        """Train to the end, or to a boundary that the driver asked for; the last step is committed on return."""
        self._plan_reading()
        if self.step >= self._job.max_steps and self._job.saves_at(self.step):
            own = self._store.find(self.step, self._place.spec.generation, "snapshot")
            self._save(own)
        while self.step < self._job.max_steps:
            agreed = self._one_step(self.step + 1)
            if agreed.flags.boundary and self.step < self._job.max_steps:
                self._commit_last()
                return StopReason.BOUNDARY
        self._commit_last()
        return StopReason.FINISHED

    def _one_step(self, step: int) -> Agreed:
        self._seconds = {}
        contribution = self._compute(step)
        with self._in_phase("mirror"):
            self._join_mirror()
        self._probe("agree", step)
        with self._in_phase("agree"):
            agreed = agree(contribution, self._job.batch.num_microbatches, self._groups.sum_int64)
        self._check_finite(step, agreed)
        with self._in_phase("apply"):
            lr = self._apply(step, agreed)
        self.step = step
        evaluation = self._evaluate_if_due(step)
        with self._in_phase("snapshot"):
            save_started = self._snapshot(step, agreed)
        self._report(step, agreed, lr, evaluation, save_started)
        return agreed

    def _compute(self, step: int) -> Contribution:
        job, rounds = self._job, self._rounds
        results = Results(self._metric_names.get("train"))
        digest, num_reads = (0, 0), 0
        for reducer in self._reducers:
            reducer.reset()
        self._optimizer.clear_gradients()
        for round_index in range(num_rounds(job.batch.num_microbatches, rounds.world_size)):
            rounds.index = round_index
            index = rounds.microbatch(rounds.rank)
            with self._in_phase("data"):
                if index is None:
                    samples = self._padding()
                else:
                    microbatch = self._loader.load(step, index)
                    samples = microbatch.samples
                    digest = add_digests(digest, microbatch.digest)
                    num_reads += microbatch.num_reads
                batch = self._computer.batch(samples)
            with self._in_phase("forward"):
                loss = self._forward(step, index, batch, len(samples))
            results.note_names(loss, job.task)
            if index is not None:
                results.add(index, loss)
            with self._in_phase("backward"):
                self._backward(step, index, loss)
        self._agree_on_metrics("train", results)
        self._plan_reading(after=step)
        with self._in_phase("norm"):
            digits, finite = square_sum_words(self._optimizer.gradients())
        losses, metrics = results.pairs()
        return Contribution(
            losses=losses,
            metrics=metrics,
            metric_names=results.metric_names or (),
            norm_words=digits,
            read_digest=digest,
            num_reads=num_reads,
            flags=Flags(non_finite_gradient=not finite, boundary=self._boundary.is_set(), save_busy=self._saver.busy),
        )

    def _forward(self, step: int, index: int | None, batch: object, num_samples: int) -> Loss:
        if self._exact:
            self._optimizer.clear_gradients()
        elif self._job.engine.accumulation == "local":
            self._model.set_requires_gradient_sync(self._rounds.is_last)  # type: ignore[operator]
        self._model.train()
        if self._units is not None:
            self._units.begin()
        loss = self._computer.loss("train", step, -1 if index is None else index, batch, num_samples)
        if self._units is not None:
            self._units.check(f"step {step}, microbatch {index}")
        if self._buffers is not None and self._rounds.index == 0:
            self._buffers.check()
        return loss

    def _backward(self, step: int, index: int | None, loss: Loss) -> None:
        if index is None:
            self._computer.backward(step, -1, loss, scale=1.0 if self._exact else 0.0)
        else:
            self._computer.backward(step, index, loss)
        calls = {reducer.calls for reducer in self._reducers}
        if len(calls) > 1:
            idle = min(self._reducers, key=lambda reducer: reducer.calls)
            raise InexactError(
                f"the parameters of {idle.name} got no gradient from a microbatch of step {step}: they take part in "
                "some forwards only. Use every block in every forward, or freeze the unused ones "
                "(requires_grad=False)."
            )

    def _padding(self) -> list[object]:
        """What a worker without a microbatch computes on."""
        self._padding_samples = self._padding_samples or self._loader.load_range(0, 1) * self._padding_size
        return self._padding_samples

    def _check_finite(self, step: int, agreed: Agreed) -> None:
        if not math.isfinite(agreed.loss_sum) or agreed.flags.non_finite_gradient:
            what = f"the loss is {agreed.loss}" if not math.isfinite(agreed.loss_sum) else "the gradient is not finite"
            raise NonFiniteLoss(
                f"step {step}: {what}. It will be the same at every try, since computation is reproducible: lower the "
                "learning rate, set max_grad_norm, or look at the data of this step; then resume from the newest "
                "checkpoint."
            )
        if not agreed.weight > 0:
            raise TaskError(
                f"step {step}: the weights of all microbatches add up to {agreed.weight}; a step needs items to "
                "average over."
            )

    def _apply(self, step: int, agreed: Agreed) -> float:
        self._probe("apply", step)
        scale = 1.0 / agreed.weight
        limit = self._job.task.max_grad_norm
        if limit is not None:
            scale *= min(1.0, limit / (agreed.gradient_norm / agreed.weight + _CLIP_EPSILON))
        return self._optimizer.apply(step, scale)

    def _snapshot(self, step: int, agreed: Agreed) -> bool:
        if self._spec is None:
            self._spec = self._live.spec()
        place = self._place
        own = self._store.begin(step, place.spec.generation, "snapshot", place.spec.world_size, place.rank, self._spec)
        self._live.copy_to(own.data, own.spec, own.pieces)
        own.complete = True
        self._probe("snapshot", step)
        assert self._mirror is not None
        self._mirror.start(own)
        if not self._job.saves_at(step) or (agreed.flags.save_busy and step < self._job.max_steps):
            return False
        self._save(own)
        return True

    def _save(self, own: ShardBuffer) -> None:
        while self._saver.busy:  # the last step's checkpoint waits for the one before
            if self._groups.aborted:
                raise CollectiveAborted("aborted while waiting for the checkpoint before")
            time.sleep(0.01)
        self._saver.begin(own, self._place.spec.generation)

    def _commit_last(self) -> None:
        with self._in_phase("commit"):
            self._join_mirror()
            self._groups.barrier()

    # -- evaluation --

    def _evaluate_if_due(self, step: int) -> dict[str, float]:
        evaluation = self._job.evaluation
        if evaluation is None or self._eval_loader is None or step % evaluation.every_steps:
            return {}
        with self._in_phase("evaluate"):
            return self._evaluate(self._eval_loader, step, evaluation.num_samples)

    def _evaluate(self, loader: Loader, step: int, num_samples: int) -> dict[str, float]:
        groups, size = self._groups, self._job.batch.microbatch_size
        results = Results(self._metric_names.get("evaluate"))
        padding = loader.load_range(0, 1) * self._padding_size
        dealt = shares(loader, num_samples, size, rank=groups.rank, world_size=groups.world_size, padding=padding)
        evaluate(self._model, self._computer, self._job.task, step, dealt, results)
        self._agree_on_metrics("evaluate", results)
        losses, metrics = results.pairs()
        own = Contribution(
            losses=losses,
            metrics=metrics,
            metric_names=results.metric_names or (),
            norm_words=torch.zeros(NORM_WORDS, dtype=torch.int64),
            read_digest=(0, 0),
            num_reads=0,
            flags=Flags(),
        )
        agreed = agree(own, num_microbatches(num_samples, size), groups.sum_int64)
        return {"loss": agreed.loss, **agreed.averages()}

    def _agree_on_metrics(self, purpose: str, results: Results) -> None:
        """Once per generation: the length of what is agreed on depends on the metrics' names."""
        names = results.metric_names or ()
        if purpose in self._metric_names:
            return
        own = derive_seed(*names)
        if self._groups.max_int(own) != -self._groups.max_int(-own):
            raise TaskError(
                f"{type(self._job.task).__name__} gave other metrics on this worker than on others (here "
                f"{list(names)}); give the same names for every microbatch."
            )
        self._metric_names[purpose] = names

    # -- bookkeeping --

    def _plan_reading(self, after: int | None = None) -> None:
        step = self.step + 1 if after is None else after + 1
        if step > self._job.max_steps:
            return
        batch, groups, mode = self._job.batch, self._groups, self._job.engine.accumulation
        indices = [
            microbatch_of(mode, batch.num_microbatches, groups.world_size, groups.rank, round_index)
            for round_index in range(num_rounds(batch.num_microbatches, groups.world_size))
        ]
        self._loader.plan([(step, index) for index in indices if index is not None])

    def _report(self, step: int, agreed: Agreed, lr: float, evaluation: dict[str, float], save_started: bool) -> None:
        report = StepReport(
            generation=self._place.spec.generation,
            step=step,
            world_size=self._groups.world_size,
            loss=agreed.loss,
            weight=agreed.weight,
            metrics=agreed.averages(),
            evaluation=evaluation,
            gradient_norm=agreed.gradient_norm / agreed.weight,
            lr=lr,
            read_digest=agreed.read_digest,
            num_reads=agreed.num_reads,
            seconds=dict(self._seconds),
            finished_at=time.time(),
            save_started=save_started,
        )
        with self.news:
            self.reports.append(report)
            self.news.notify_all()

    @contextmanager
    def _in_phase(self, name: str) -> Iterator[None]:
        if self._groups.aborted:
            raise CollectiveAborted(f"generation {self._place.spec.generation} was aborted before {name}")
        self.phase = name
        started = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started
