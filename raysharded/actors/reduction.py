"""Gradient reduction in the one canonical order: FSDP2's reduce-scatter replaced by an exchange and a tree.

FSDP2 calls a unit's reducer once per backward with the unit's flattened gradient, one chunk per rank. The reducer
exchanges chunks and adds them along the tree of `tree.py`, carried across the rounds of a step. Only the last round
writes a result; what FSDP2 accumulates before is cleared by the engine. At world size 1 FSDP2 calls no reducer but
the all-reduce hook, which follows the same tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from raysharded.actors.build import reduces_gradients
from raysharded.actors.schedule import local_nodes, microbatch_of, num_rounds
from raysharded.actors.tree import TreeSum
from raysharded.config import Accumulation
from raysharded.errors import InexactError


@dataclass(slots=True)
class Rounds:
    """Where the step is; shared by the reducers of all units of one worker."""

    mode: Accumulation
    num_microbatches: int
    world_size: int
    rank: int
    index: int = 0
    on_reduce: Callable[[], None] = lambda: None
    """Called at each reduction, before anything is exchanged."""
    on_gradient: Callable[[int, torch.Tensor], None] | None = None
    """Called with a microbatch and one unit's gradient of it, before that is exchanged or added to any other."""
    shift: int = 0
    """Every worker computes what the one so many ranks after it has otherwise."""

    @property
    def is_last(self) -> bool:
        return self.index == num_rounds(self.num_microbatches, self.world_size) - 1

    def microbatch(self, rank: int) -> int | None:
        return microbatch_of(self.mode, self.num_microbatches, self.world_size, self.stands_for(rank), self.index)

    def stands_for(self, rank: int) -> int:
        """The rank whose microbatches `rank` computes."""
        return (rank + self.shift) % self.world_size


def _add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.add_(b)


class TreeReducer:
    """One FSDP2 unit's reducer. Called by the thread that runs backward, once per round."""

    def __init__(self, rounds: Rounds, name: str) -> None:
        self._rounds = rounds
        self.name = name or "the root"
        self._expected_numel: int | None = None
        self.calls = 0
        self.reset()

    def reset(self) -> None:
        """Forget a step that was not finished."""
        self._sum: TreeSum[torch.Tensor] = TreeSum(self._rounds.num_microbatches, _add)
        self._last_round = -1

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Part of FSDP2's `ReduceScatter` protocol."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Part of FSDP2's `ReduceScatter` protocol; `input_tensor` is [world_size * chunk], `output_tensor` [chunk]."""
        self._begin(input_tensor)
        if self._rounds.mode == "sharded":
            self._exchange_leaves(input_tensor, group)
        else:
            self._add_locally(input_tensor)
            if self._rounds.is_last:
                self._exchange_partial_sums(input_tensor, group)
        if self._rounds.is_last:
            output_tensor.copy_(self._sum.root())

    def at_world_size_one(self, reduce_output: torch.Tensor) -> None:
        """FSDP2's all-reduce hook: the whole gradient of a microbatch, replaced by the tree's sum in the last round."""
        self._begin(reduce_output)
        self._add_locally(reduce_output)
        if self._rounds.is_last:
            reduce_output.copy_(self._sum.root())

    def _begin(self, gradient: torch.Tensor) -> None:
        numel = gradient.numel()
        if self._last_round == self._rounds.index:
            raise InexactError(
                f"unit {self.name}: its gradients came twice in one microbatch. A block that a forward uses several "
                "times cannot be sharded as a unit of its own: let Task.wrap return the other blocks, so that its "
                "parent holds it."
            )
        if self._expected_numel is None:
            self._expected_numel = numel
        elif numel != self._expected_numel:
            raise InexactError(
                f"unit {self.name}: {numel} gradient elements in this microbatch, {self._expected_numel} before: "
                "some parameters are used by some microbatches only. Use every parameter in every forward, freeze the "
                "unused ones (requires_grad=False), or use a torch with FSDPModule.set_reduce_scatter_unused_params."
            )
        self._last_round = self._rounds.index
        self._rounds.on_reduce()
        leaf = self._rounds.microbatch(self._rounds.rank)
        if leaf is not None and self._rounds.on_gradient is not None:
            self._rounds.on_gradient(leaf, gradient)
        self.calls += 1

    def _exchange_leaves(self, gradient: torch.Tensor, group: dist.ProcessGroup) -> None:
        rounds = self._rounds
        chunk = gradient.numel() // rounds.world_size
        leaves = [rounds.microbatch(rank) for rank in range(rounds.world_size)]
        senders = [rank for rank, leaf in enumerate(leaves) if leaf is not None]
        received = gradient.new_empty((len(senders), chunk))
        if len(senders) == rounds.world_size:
            dist.all_to_all_single(received.view(-1), gradient, group=group)
        else:
            sends = leaves[rounds.rank] is not None
            dist.all_to_all_single(
                received.view(-1),
                gradient if sends else gradient[:0],
                output_split_sizes=[chunk if leaf is not None else 0 for leaf in leaves],
                input_split_sizes=[chunk if sends else 0] * rounds.world_size,
                group=group,
            )
        for row, rank in zip(received, senders, strict=True):
            leaf = leaves[rank]
            assert leaf is not None
            self._sum.add((0, leaf), _accumulator(row))
        if not rounds.is_last:
            self._sum.map_waiting(torch.clone)  # what is carried must not keep the whole exchange buffer alive

    def _add_locally(self, gradient: torch.Tensor) -> None:
        leaf = self._rounds.microbatch(self._rounds.rank)
        if gradient.is_cuda:  # allocated on another stream than the one that adds
            gradient.record_stream(torch.cuda.current_stream())
        if leaf is not None:
            self._sum.add((0, leaf), _accumulator(gradient))

    def _exchange_partial_sums(self, gradient: torch.Tensor, group: dist.ProcessGroup) -> None:
        rounds = self._rounds
        chunk = gradient.numel() // rounds.world_size
        world = rounds.world_size
        nodes = [local_nodes(rounds.num_microbatches, world, rounds.stands_for(rank)) for rank in range(world)]
        own = [value.view(rounds.world_size, chunk) for _, value in self._sum.pop_all()]
        like = _accumulator(gradient[:0])  # a worker may have no sum of its own
        send = _by_receiver(own) if own else like
        counts = [len(of_rank) for of_rank in nodes]
        received = like.new_empty((sum(counts), chunk))
        dist.all_to_all_single(
            received.view(-1),
            send,
            output_split_sizes=[count * chunk for count in counts],
            input_split_sizes=[len(own) * chunk] * rounds.world_size,
            group=group,
        )
        rows = iter(received)
        for of_rank in nodes:
            for node in of_rank:
                self._sum.add(node, next(rows))


def _by_receiver(sums: Sequence[torch.Tensor]) -> torch.Tensor:
    """Partial sums of [world_size, chunk] each, flat, with all that goes to one rank together."""
    return sums[0].reshape(-1) if len(sums) == 1 else torch.stack(list(sums), dim=1).view(-1)


def _accumulator(gradient: torch.Tensor) -> torch.Tensor:
    """Sums are kept in float32 at least, also where gradients travel in bfloat16.

    Otherwise the tensor itself: FSDP2 hands every gradient over in memory of its own and does not look at it again.
    """
    return gradient.float() if gradient.dtype in (torch.bfloat16, torch.float16) else gradient


def install(units: Sequence[tuple[str, FSDPModule]], rounds: Rounds) -> list[TreeReducer]:
    """Make every unit with gradients a plain sum along the tree; returns their reducers in the units' order."""
    reducers = []
    for name, unit in units:
        if not reduces_gradients(unit):
            continue
        reducer = TreeReducer(rounds, name)
        if rounds.world_size == 1:
            unit.set_all_reduce_hook(reducer.at_world_size_one)
        else:
            unit.set_custom_reduce_scatter(reducer)  # type: ignore[arg-type]  # its class is private, not a protocol
        reducers.append(reducer)
    return reducers
