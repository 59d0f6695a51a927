"""Evaluation on held-out data: microbatches are dealt round-robin, so the numbers are the same at any size.

Evaluations, and a loop's own forwards, have no backward. FSDP2 frees some units' gathered parameters in the backward
alone, and would use them again in the next forward, though the parameters have changed meanwhile. `OtherForwards` frees
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree

from raysharded.actors.comm.groups import Groups
from raysharded.actors.guards.forwards import UnitWatch, watching
from raysharded.actors.model.modes import Modes
from raysharded.actors.model.sharded_model import ShardedModel
from raysharded.actors.numerics.grad_norm import NORM_WORDS
from raysharded.actors.numerics.microbatch_schedule import Schedule
from raysharded.actors.numerics.step_consensus import Contribution, Flags, MetricNames, agree
from raysharded.actors.shards.whole_tensors import gather_tensors
from raysharded.actors.step.collation import Collator
from raysharded.actors.step.forward_backward import Computer, Results
from raysharded.actors.task_calls.remarks import Say
from raysharded.actors.task_calls.task_numbers import half_precision
from raysharded.data import Loader
from raysharded.layout import Mesh
from raysharded.protocol.job import Job

Share = tuple[int | None, list[Any], range]
"""(microbatch, its samples, their indices); None: the worker only joins the collectives."""


def num_microbatches(num_samples: int, microbatch_size: int) -> int:
    """Number of microbatches; the last may be smaller."""
    return -(-num_samples // microbatch_size)


def shares(loader: Loader, num_samples: int, microbatch_size: int, *, rank: int, world_size: int) -> Iterator[Share]:
    """Shares of `rank`, round by round; every worker has as many rounds.

    A worker without a microbatch computes on the first one, without a result.
    """
    count = num_microbatches(num_samples, microbatch_size)
    schedule = Schedule(mode="sharded", num_microbatches=count, mesh=Mesh(shards=world_size))  # all as one group
    for round_index in range(schedule.num_rounds(0)):
        index = schedule.microbatch_of(rank, round_index)
        start = (index or 0) * microbatch_size
        ids = range(start, min(start + microbatch_size, num_samples))
        yield index, loader.load_range(ids.start, ids.stop), ids


def evaluate(
    modes: Modes,
    computer: Computer,
    collator: Collator,
    step: int,
    dealt: Iterator[Share],
    results: Results,
    units: UnitWatch | None,
) -> None:
    """Call the task's `evaluate` on every share, in eval mode, and collect the results."""
    modes.evaluate()
    with torch.no_grad():
        for index, samples, ids in dealt:
            batch = collator.batch(samples, ids, "evaluate", step, index or 0)
            with watching(units, "evaluate", step, index):
                loss = computer.evaluate(step, index or 0, batch, len(samples))
            results.note_names(loss)
            results.note_half(loss)
            if index is not None:
                results.add(index, loss)
    modes.train()


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
        *,
        numbers: int,
        say: Say,
    ) -> None:
        """`modes`: modes of the model's modules. `loader`: reads the held-out data. `units`: watches the forwards.
        `numbers`: the number of the rule. `say`: reports remarks."""
        self._job, self._modes, self._computer, self._loader = job, modes, computer, loader
        self._collator = collator
        self._names, self._groups, self._units = names, groups, units
        self._numbers, self._say = numbers, say

    def is_due(self, step: int) -> bool:
        """True if the model is to be evaluated after this step."""
        return self._job.evaluation is not None and step % self._job.evaluation.every_steps == 0

    def evaluate_due(self, step: int) -> dict[str, float]:
        """The loss and the task's metrics on the held-out data, the same on every worker."""
        assert self._job.evaluation is not None
        assert self._loader is not None
        return self.evaluate(step, self._loader, self._job.evaluation.num_samples)

    def evaluate(self, step: int, loader: Loader, num_samples: int) -> dict[str, float]:
        """As `evaluate_due`, on the first samples of other data."""
        groups, size = self._groups, self._job.batch.microbatch_size
        results = Results(self._computer.name_of("evaluate", step), self._names.of("evaluate"), self._numbers)
        mesh = groups.mesh
        rank, world_size = mesh.data_rank_of(groups.rank), mesh.data.world_size
        dealt = shares(loader, num_samples, size, rank=rank, world_size=world_size)
        evaluate(self._modes, self._computer, self._collator, step, dealt, results, self._units)
        if results.half:
            self._say("half precision", half_precision(self._computer.name_of("evaluate", step), results.half))
        self._names.agree("evaluate", results.metric_names or ())
        speaks = mesh.tensor_of(groups.rank) == 0  # the others of its tensor parallel group computed the same
        losses, metrics = results.pairs() if speaks else ({}, {})
        own = Contribution(
            losses=losses,
            metrics=metrics,
            metric_names=results.metric_names or (),
            norm_words=torch.zeros(NORM_WORDS, dtype=torch.int64),
            read_digest=(0, 0),
            num_reads=0,
            flags=Flags(),
        )
        agreed = agree(own, num_microbatches(num_samples, size), groups.state.sum_int64)
        return {"loss": agreed.loss, **agreed.averages()}

    def shared(self, loader: Loader, num_samples: int, batch_size: int) -> Iterator[tuple[list[int], list[Any]]]:
        """This worker's batches of these data, one for each round, not collated: the sizes by rank, and its samples.

        A rank has size 0 in a round in which it computes the first batch again, without a result.
        """
        world_size = self._groups.mesh.data.world_size
        count = num_microbatches(num_samples, batch_size)
        schedule = Schedule(mode="sharded", num_microbatches=count, mesh=Mesh(shards=world_size))
        own = shares(loader, num_samples, batch_size, rank=self._groups.rank, world_size=world_size)
        for number, (_, samples, _) in enumerate(own):
            places = [schedule.microbatch_of(rank, number) for rank in range(world_size)]
            yield [0 if at is None else min(batch_size, num_samples - at * batch_size) for at in places], samples

    def predict(
        self, step: int, compute: Callable[[Any], Any], loader: Loader, num_samples: int, batch_size: int
    ) -> list[Any]:
        """The outputs for each batch of the first samples of these data, in order, the same on every worker."""
        mesh = self._groups.mesh
        rank, world_size = mesh.data_rank_of(self._groups.rank), mesh.data.world_size
        speaks = mesh.tensor_of(self._groups.rank) == 0
        own: dict[str, torch.Tensor] = {}
        form: tuple[list[Any], Any] | None = None
        self._modes.evaluate()
        with torch.no_grad():
            for index, samples, ids in shares(loader, num_samples, batch_size, rank=rank, world_size=world_size):
                batch = self._collator.batch(samples, ids, "evaluate", step, index or 0)
                with watching(self._units, "evaluate", step, index):
                    output = self._computer.predict(step, index or 0, compute, batch)
                form = found, _ = _pytree.tree_flatten(output)
                if index is not None and speaks:
                    tensors = {place: one for place, one in enumerate(found) if isinstance(one, torch.Tensor)}
                    own |= {f"{index}.{place}": one.detach().cpu().contiguous() for place, one in tensors.items()}
        self._modes.train()
        assert form is not None, "there is a round for every worker"
        (leaves, spec), gathered = form, gather_tensors(own, self._groups.state)
        return [
            _pytree.tree_unflatten([gathered.get(f"{index}.{place}", leaf) for place, leaf in enumerate(leaves)], spec)
            for index in range(num_microbatches(num_samples, batch_size))
        ]
