"""Evaluation on held-out data: microbatches are dealt round-robin, so the numbers are the same at any size.

Evaluations, and a loop's own forwards, have no backward. FSDP2 frees some units' gathered parameters in the backward
alone, and would use them again in the next forward, though the parameters have changed meanwhile. `OtherForwards` frees
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils import _pytree

from raysharded.actors.comm.groups import Groups
from raysharded.actors.device.device_waits import copy_on_host, numbers_of
from raysharded.actors.guards.forwards import UnitWatch, watching
from raysharded.actors.model.modes import Modes
from raysharded.actors.model.sharded_model import ShardedModel
from raysharded.actors.numerics.bit_digest import bits_of, combined, tensor_digest
from raysharded.actors.numerics.grad_norm import NORM_WORDS
from raysharded.actors.numerics.microbatch_schedule import Schedule
from raysharded.actors.numerics.step_consensus import Contribution, Flags, MetricNames, agree
from raysharded.actors.shards.whole_tensors import gather_tensors
from raysharded.actors.step.collation import Collator
from raysharded.actors.step.forward_backward import Computer, Results
from raysharded.actors.step.proofs.evaluation_proof import EvaluationProof
from raysharded.actors.task_calls.remarks import Say
from raysharded.actors.task_calls.task_numbers import half_precision
from raysharded.data import Loader, MicrobatchLoader
from raysharded.data.access.prefetch import num_ahead
from raysharded.layout import Mesh
from raysharded.protocol.job import Job

T = TypeVar("T")
Share = tuple[int | None, list[Any], range]
"""(microbatch, its samples, their indices); None: the worker only joins the collectives."""
_NUM_AHEAD = num_ahead(1)


def num_microbatches(num_samples: int, microbatch_size: int) -> int:
    """Number of microbatches; the last may be smaller."""
    return -(-num_samples // microbatch_size)


class Dealt:
    """The microbatches of held-out samples, dealt round-robin to the workers as one group.

    A worker without a microbatch in a round computes on the first one, without a result.
    """

    def __init__(self, loader: Loader, num_samples: int, microbatch_size: int, *, rank: int, world_size: int) -> None:
        self._loader, self._num_samples, self._size = loader, num_samples, microbatch_size
        self._rank, self._world_size = rank, world_size
        self.count = num_microbatches(num_samples, microbatch_size)
        """Number of microbatches."""
        self._schedule = Schedule(mode="sharded", num_microbatches=self.count, mesh=Mesh(shards=world_size))

    def shares(self) -> Iterator[Share]:
        """Shares of this worker, round by round; every worker has as many rounds. They are read ahead."""
        for number in range(self._schedule.num_rounds(0)):
            self.plan(number)
            yield self._share(self._rank, number)

    def plan(self, first: int = 0) -> None:
        """Let this worker's samples of a round, and of those that follow, be read in the background."""
        rounds = range(first, min(first + 1 + _NUM_AHEAD, self._schedule.num_rounds(0)))
        own = [self._ids(self._schedule.microbatch_of(self._rank, number)) for number in rounds]
        self._loader.plan_ranges([(ids.start, ids.stop) for ids in own])

    def first_share(self, places: int) -> Share:
        """The first share of the worker this many places further."""
        return self._share((self._rank + places) % self._world_size, 0)

    def again(self, ids: range) -> Callable[[], list[Any]] | None:
        """A function that reads samples once more; None if they are not the dataset's own memory."""
        loader = self._loader
        if not isinstance(loader, MicrobatchLoader) or not loader.lends_memory:
            return None
        return partial(loader.load_range, ids.start, ids.stop)

    def sizes(self) -> Iterator[list[int]]:
        """For each round the number of samples by rank; 0: none that count."""
        for number in range(self._schedule.num_rounds(0)):
            places = [self._schedule.microbatch_of(rank, number) for rank in range(self._world_size)]
            yield [0 if at is None else min(self._size, self._num_samples - at * self._size) for at in places]

    def _share(self, rank: int, number: int) -> Share:
        index = self._schedule.microbatch_of(rank, number)
        ids = self._ids(index)
        return index, self._loader.load_range(ids.start, ids.stop), ids

    def _ids(self, index: int | None) -> range:
        """Samples of a microbatch; None: of the one that padding computes."""
        start = (index or 0) * self._size
        return range(start, min(start + self._size, self._num_samples))


class OtherForwards:
    """The forwards of one generation's model that are of no microbatch of a step. Training thread only."""

    def __init__(self, sharded: ShardedModel, is_in_microbatch: Callable[[], bool], *, watch: bool) -> None:
        """`watch`: True where a loop may call the model by itself."""
        self._sharded, self._is_in_microbatch = sharded, is_in_microbatch
        self.on_own: Callable[[], None] | None = None
        """Called ahead of a forward that a loop does outside of microbatches and evaluations."""
        self._is_evaluating = False
        if watch:
            _, root = sharded.hooks[-1]
            root.before_gather(self._begin)
            root.at_end(self._end)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context in which forwards are those of an evaluation."""
        self._is_evaluating = True
        try:
            yield
            self._sharded.drop_gathered()
        finally:
            self._is_evaluating = False

    def _begin(self, *_: Any) -> None:
        if self._is_own() and self.on_own is not None:
            self.on_own()

    def _end(self, *_: Any) -> None:
        if self._is_own():
            self._sharded.drop_gathered()

    def _is_own(self) -> bool:
        return not (self._is_evaluating or self._is_in_microbatch())


class Evaluator:
    """Evaluation of one generation's model. Training thread only; all workers make the same calls together."""

    def __init__(
        self,
        job: Job,
        modes: Modes,
        computer: Computer,
        collator: Collator,
        loader: Loader | None,
        names: MetricNames,
        groups: Groups,
        units: UnitWatch | None,
        proof: EvaluationProof,
        *,
        computing: Callable[[], AbstractContextManager[None]],
        numbers: int,
        say: Say,
    ) -> None:
        """`modes`: modes of the model's modules. `loader`: reads the held-out data. `units`: watches the forwards.
        `computing`: a context in which only inputs may have gradients. `numbers`: the number of the rule. `say`:
        reports remarks."""
        self._job, self._modes, self._computer, self._loader = job, modes, computer, loader
        self._collator, self._proof = collator, proof
        self._names, self._groups, self._units = names, groups, units
        self._computing, self._numbers, self._say = computing, numbers, say
        self.on_microbatch: Callable[[int, int], None] = lambda *_: None
        """Called with (step, microbatch) ahead of each held-out microbatch; computing one again does so, too."""

    def is_due(self, step: int) -> bool:
        """True if the model is to be evaluated after this step."""
        return self._job.evaluation is not None and step % self._job.evaluation.every_steps == 0

    def where(self, step: int) -> str:
        """Name of an evaluation for errors."""
        return self._computer.name_of("evaluate", step)

    def plan_reading(self, step: int) -> None:
        """Let held-out data be read in the background, if the model is to be evaluated after this step."""
        if self.is_due(step):
            assert self._job.evaluation is not None
            assert self._loader is not None
            self._dealt(self._loader, self._job.evaluation.num_samples, self._job.batch.microbatch_size).plan()

    def evaluate_due(self, step: int) -> dict[str, float]:
        """The loss and the task's metrics on the held-out data, the same on every worker."""
        assert self._job.evaluation is not None
        assert self._loader is not None
        return self.evaluate(step, self._loader, self._job.evaluation.num_samples)

    def evaluate(self, step: int, loader: Loader, num_samples: int, name: str = "") -> dict[str, float]:
        """As `evaluate_due`, on the first samples of other data. `name`: of one of several evaluations.

        Raises InexactError if a microbatch that is computed again has other results.
        """
        groups, dealt = self._groups, self._dealt(loader, num_samples, self._job.batch.microbatch_size)

        def compute(share: Share, results: Results) -> None:
            index, samples, _ = share
            loss = self._called(
                dealt, share, step, name, lambda at, batch: self._computer.evaluate(step, at, batch, len(samples))
            )
            results.note_names(loss)
            results.note_half(loss)
            if index is not None:
                results.add(index, loss)

        def first_again(places: int) -> dict[int, int]:
            again = self._results(step)
            compute(dealt.first_share(places), again)
            return _digests(again, most=1)

        results = self._results(step)
        with self._modes.evaluating(), torch.no_grad():
            for share in dealt.shares():
                compute(share, results)
            if self._proof.is_due():
                self._proof.check(self._computer.name_of("evaluate", step), _digests(results, most=1), first_again)
        if results.half:
            self._say("half precision", half_precision(self._computer.name_of("evaluate", step), results.half))
        self._names.agree("evaluate", results.metric_names or ())
        values = results.values()
        own = Contribution(
            microbatches=results.microbatches if self._speaks else (),
            values=values if self._speaks else values[:0],
            metric_names=results.metric_names or (),
            norm_words=torch.zeros(NORM_WORDS, dtype=torch.int64),
            read_digest=(0, 0),
            num_reads=0,
            flags=Flags(),
        )
        agreed = agree(own, dealt.count, groups.state.sum_int64, numbers=self._numbers)
        return {"loss": agreed.loss, **agreed.averages()}

    def shared(self, loader: Loader, num_samples: int, batch_size: int) -> Iterator[tuple[list[int], list[Any]]]:
        """This worker's batches of these data, one for each round, not collated: the sizes by rank, and its samples.

        A rank has size 0 in a round in which it computes the first batch again, without a result.
        """
        dealt = self._dealt(loader, num_samples, batch_size)
        for sizes, (_, samples, _) in zip(dealt.sizes(), dealt.shares(), strict=True):
            yield sizes, samples

    def predict(
        self, step: int, compute: Callable[[Any], Any], loader: Loader, num_samples: int, batch_size: int
    ) -> list[Any]:
        """The outputs for each batch of the first samples of these data, in order, the same on every worker.

        Raises InexactError if a batch that is computed again has other outputs.
        """
        dealt = self._dealt(loader, num_samples, batch_size)
        own: dict[str, torch.Tensor] = {}
        form: tuple[list[Any], Any] | None = None

        def tensors_of(share: Share) -> dict[int, torch.Tensor]:
            nonlocal form
            output = self._called(
                dealt, share, step, "", lambda at, batch: self._computer.predict(step, at, compute, batch)
            )
            form = found, _ = _pytree.tree_flatten(output)
            return {place: one for place, one in enumerate(found) if isinstance(one, torch.Tensor)}

        def first_again(places: int) -> dict[int, int]:
            share = dealt.first_share(places)
            return _digest_of(share, tensors_of(share))

        first: dict[int, int] | None = None
        is_due = self._proof.is_due()
        with self._modes.evaluating(), torch.no_grad():
            for share in dealt.shares():
                index, tensors = share[0], tensors_of(share)
                if is_due and first is None:
                    first = _digest_of(share, tensors)
                if index is not None and self._speaks:
                    own |= {f"{index}.{place}": copy_on_host(one) for place, one in tensors.items()}
            if first is not None:
                self._proof.check(f"the outputs for held-out data in step {step}", first, first_again)
        assert form is not None, "there is a round for every worker"
        (leaves, spec), gathered = form, gather_tensors(own, self._groups.state)
        return [
            _pytree.tree_unflatten([gathered.get(f"{index}.{place}", leaf) for place, leaf in enumerate(leaves)], spec)
            for index in range(dealt.count)
        ]

    @property
    def _speaks(self) -> bool:
        """False for workers whose tensor parallel group has another one that computes the same."""
        return self._groups.mesh.tensor_of(self._groups.rank) == 0

    def _dealt(self, loader: Loader, num_samples: int, microbatch_size: int) -> Dealt:
        groups = self._groups
        rank, world_size = groups.mesh.data_rank_of(groups.rank), groups.mesh.data.world_size
        return Dealt(loader, num_samples, microbatch_size, rank=rank, world_size=world_size)

    def _results(self, step: int) -> Results:
        return Results(self._computer.name_of("evaluate", step), self._names.of("evaluate"), self._numbers)

    def _called(self, dealt: Dealt, share: Share, step: int, name: str, compute: Callable[[int, Any], T]) -> T:
        """The result of `compute(microbatch, batch)`, a forward that is watched."""
        index, samples, ids = share
        batch = self._collator.held_out_batch(samples, ids, step, index or 0, dealt.again(ids))
        with watching(self._units, "evaluate", step, index, name), self._computing():
            self.on_microbatch(step, index or 0)
            return compute(index or 0, batch)


def _digests(results: Results, *, most: int) -> dict[int, int]:
    """Microbatch -> digest of its loss and metrics, for the first ones of this worker."""
    values = results.values()[:most].tolist()
    return {index: combined(map(bits_of, row)) for index, row in zip(results.microbatches, values, strict=False)}


def _digest_of(share: Share, tensors: dict[int, torch.Tensor]) -> dict[int, int]:
    index, _, _ = share
    return {} if index is None else {index: combined(numbers_of(map(tensor_digest, tensors.values())))}
