"""The agreement that ends a step's microbatches, of one generation's workers."""

from __future__ import annotations

import torch

from raysharded.actors.model.param_layout import Replication
from raysharded.actors.numerics.grad_norm import NORM_WORDS, square_sum_words
from raysharded.actors.numerics.step_consensus import Agreed, Contribution, Flags, Pair, agree, microbatch_losses
from raysharded.actors.step.assembly import Parts, Surroundings
from raysharded.actors.step.gradient import Computed


class Agreement:
    """Agreements of one generation. Training thread only; all workers make the same calls together."""

    def __init__(self, around: Surroundings, parts: Parts) -> None:
        self._around, self._parts = around, parts
        self._used: tuple[bool, ...] = ()
        """For each parameter: True if the newest step used it."""
        self._newest: Contribution | None = None
        """The newest contribution, if its microbatches are recorded."""

    def contribution(self, computed: Computed) -> Contribution:
        """This worker's part of the agreement."""
        around, names = self._around, computed.results.metric_names or ()
        self._parts.names.agree("train", names)
        with around.in_phase("norm"):
            digits, finite = self._norm_words()
        speaks = around.place.tensor_rank == 0  # the others of its tensor parallel group computed the same
        values = computed.results.values()
        return Contribution(
            microbatches=computed.results.microbatches if speaks else (),
            values=values if speaks else values[:0],
            metric_names=names,
            norm_words=digits,
            read_digest=computed.read_digest if speaks else (0, 0),
            num_reads=computed.num_reads if speaks else 0,
            flags=Flags(
                non_finite_gradient=not finite,
                boundary=around.boundary.is_set(),
                save_busy=around.saver.busy,
                save_now=around.save_asked.is_set(),
            ),
            uses=computed.uses,
            presumed=self._used or (True,) * len(computed.uses),
        )

    def _norm_words(self) -> tuple[torch.Tensor, bool]:
        """Norm words of the gradients that this worker reports, and whether all of its gradients are finite."""
        words, finite = torch.zeros(NORM_WORDS, dtype=torch.int64), True
        for holders in Replication:
            own, own_finite = square_sum_words(self._parts.optimizer.gradients(holders))
            words = words + own if self._around.place.speaks_for(holders) else words
            finite = finite and own_finite
        return words, finite

    def agree(self, contribution: Contribution) -> Agreed:
        """The agreement of all workers."""
        around = self._around
        self._newest = contribution if around.job.records_microbatches else None
        agreed = agree(
            contribution,
            around.job.batch.num_microbatches,
            around.groups.state.sum_int64,
            numbers=around.place.number_of("numbers"),
        )
        self._used = agreed.used
        return agreed

    def exchange_microbatches(self) -> tuple[Pair, ...]:
        """(sum of the loss, weight) of each microbatch of the newest agreement."""
        assert self._newest is not None, "the workers have not agreed"
        around, own = self._around, self._newest
        with around.in_phase("agree"):
            return microbatch_losses(own, around.job.batch.num_microbatches, around.groups.state.sum_int64)
