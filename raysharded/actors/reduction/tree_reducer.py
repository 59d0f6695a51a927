"""Gradient reduction in the one canonical order: an exchange and a tree replace FSDP2's reduce-scatter.

FSDP2 calls a unit's reducer once per backward with the unit's flattened gradient, one chunk per rank. The reducer
exchanges chunks and adds them along the tree of `numerics/summation_tree.py`, across the rounds of a step. Only the
last round writes a result, for which replicas exchange their partial sums. The engine clears what FSDP2 accumulates
before. In a shard group of one worker FSDP2 calls only the all-reduce hook, which follows the same tree.

FSDP2 does not reduce the gradients of scalar parameters: a backward leaves them with the parameters. They are added
along the same tree, like those of a unit that every worker has whole. The last round leaves their sum there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from raysharded.actors.comm.fsdp_collectives import Finish, Reducing, all_to_all, finish_plainly
from raysharded.actors.device.accelerator import accelerator
from raysharded.actors.model.sharded_model import reduces_gradients
from raysharded.actors.numerics.microbatch_schedule import Schedule
from raysharded.actors.numerics.summation_tree import Node, TreeSum
from raysharded.actors.reduction.gradient_exchange import Exchange, Hosts, accumulator, add
from raysharded.actors.reduction.replica_sum import ReplicaGroup, sum_over_replicas
from raysharded.errors import InexactError
from raysharded.layout import Mesh

ROOT = "the root"
"""Name of the unit of everything outside other units, in errors."""


@dataclass(slots=True)
class ReductionState:
    """Progress of the step, shared by the reducers of all units of one worker."""

    schedule: Schedule
    """Schedule over the data shards; a tensor parallel group counts as one."""
    rank: int
    """Rank of this worker's data shard."""
    replicas: ReplicaGroup | None = None
    """The workers that hold this worker's shard; None if it is the only one."""
    everyone: ReplicaGroup | None = None
    """All workers, which hold what is replicated; None if there is only one."""
    hosts: Hosts = ()
    """Shards of this worker's group on each host; empty: hosts do not matter."""
    index: int = 0
    on_reduce: Callable[[], None] = lambda: None
    """Called at each reduction, before anything is exchanged."""
    on_gradient: Callable[[int, torch.Tensor], None] | None = None
    """Called with a microbatch and its gradient of one unit, before that is exchanged or added."""
    reducing: Reducing = nullcontext
    finish: Finish = finish_plainly
    shift: int = 0
    """Each worker computes the microbatches of the worker this many places further."""
    _computes: Literal["loss", "backward"] | None = None
    first_alone: bool = False
    """True to compute only the first round, without a result: groups may have different numbers of rounds."""

    @contextmanager
    def computing(self, what: Literal["loss", "backward"]) -> Iterator[None]:
        """A context around a microbatch's loss, which may compute gradients of its inputs alone, or its backward."""
        self._computes = what
        try:
            yield
        finally:
            self._computes = None

    def require_backward(self, name: str) -> None:
        """Raise InexactError for a gradient of a unit that comes from a backward of the user's own."""
        if self._computes != "backward":
            raise InexactError(
                f"a gradient of the parameters of {name} came behind the microbatches, where it would be lost. Add up "
                "all losses of a microbatch, and call backward once; compute what is no loss under torch.no_grad()."
            )

    def is_for_inputs(self, gradient: torch.Tensor, name: str) -> bool:
        """True if a unit's gradient comes while the loss is computed: then only inputs may have gradients.

        Raises InexactError if the gradient is not zero.
        """
        if self._computes == "loss" and bool(gradient.any()):
            raise InexactError(
                f"a gradient of the parameters of {name} came while the loss was computed. raysharded calls backward "
                "itself, once for each microbatch, when the loss has returned: do not call backward() in it, return "
                "the sum of everything to train on. torch.autograd.grad is allowed for inputs alone."
            )
        return self._computes == "loss"

    @property
    def mesh(self) -> Mesh:
        return self.schedule.mesh

    @property
    def exchange(self) -> Exchange:
        mesh = self.mesh
        shard = mesh.shard_of(self.rank)
        return Exchange(num_leaves=self.num_microbatches, shards=mesh.shards, shard=shard, hosts=self.hosts)

    @property
    def num_microbatches(self) -> int:
        return self.schedule.num_microbatches

    @property
    def group(self) -> range:
        """The ranks of this worker's shard group, by shard."""
        return self.mesh.group(self.mesh.replica_of(self.rank))

    @property
    def count(self) -> int:
        """Number of rounds of this worker's group in the step."""
        if self.first_alone:
            return 1
        return self.schedule.num_rounds(self.mesh.replica_of(self.acting_rank(self.rank)))

    @property
    def is_last(self) -> bool:
        """True if the step's sum is written in this round."""
        return self.index == self.count - 1 and not self.first_alone

    def microbatch(self, rank: int) -> int | None:
        return self.schedule.microbatch_of(self.acting_rank(rank), self.index)

    def microbatches_shifted(self, shift: int) -> list[int]:
        """This worker's microbatches of a step with such a shift, in order."""
        before, self.shift = self.shift, shift
        rank = self.acting_rank(self.rank)
        found = [self.schedule.microbatch_of(rank, index) for index in range(self.count)]
        self.shift = before
        return [index for index in found if index is not None]

    def acting_rank(self, rank: int) -> int:
        """The rank whose microbatches `rank` computes.

        It is a rank of the same group, or, for a shift of a group's size and more, of another group: then one whole
        group acts for another.
        """
        mesh = self.mesh
        shard = (mesh.shard_of(rank) + self.shift) % mesh.shards
        replica = (mesh.replica_of(rank) + self.shift // mesh.shards) % mesh.replicas
        return mesh.group(replica)[shard]


class TreeReducer:
    """One FSDP2 unit's reducer. The thread that runs backward calls it once per round."""

    def __init__(self, rounds: ReductionState, name: str, *, replicated: bool = False) -> None:
        """`replicated`: True if every worker has the whole unit."""
        self._rounds, self._replicated = rounds, replicated
        self.name = name or ROOT
        self._expected_numel: int | None = None
        self.calls = 0
        self.reset()

    @property
    def _way_out(self) -> str:
        if self.name == ROOT:
            return "Call the model once in the loss, with all inputs of a microbatch together (torch.cat)."
        return (
            "A block that a forward uses several times, or a model that the loss calls several times, cannot be "
            "sharded in such units: let Task.wrap return the other blocks, or [], so that their parent holds them."
        )

    def reset(self) -> None:
        """Drop an unfinished step."""
        self._sum: TreeSum[torch.Tensor] = TreeSum(self._rounds.num_microbatches, add)
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
        """Part of FSDP2's `ReduceScatter` protocol; `input_tensor` is [shards * chunk], `output_tensor` [chunk]."""
        if self._rounds.is_for_inputs(input_tensor, self.name):
            output_tensor.zero_()
            return
        self._begin(input_tensor)
        with self._rounds.reducing():
            if self._rounds.schedule.mode == "sharded":
                self._exchange_leaves(input_tensor, group)
            else:
                self._add_locally(input_tensor)
                if self._rounds.is_last:
                    self._exchange_partial_sums(input_tensor, group)
            if self._rounds.is_last:
                self._write_total(output_tensor)

    def all_reduce_hook(self, reduce_output: torch.Tensor) -> None:
        """FSDP2's all-reduce hook: the last round replaces a microbatch's whole gradient by the tree's sum."""
        if self._rounds.is_for_inputs(reduce_output, self.name):
            return
        self._begin(reduce_output)
        with self._rounds.reducing():
            self._add_locally(reduce_output)
            if self._rounds.is_last:
                self._write_total(reduce_output)

    def _write_total(self, output: torch.Tensor) -> None:
        rounds, mesh = self._rounds, self._rounds.mesh
        holders = rounds.everyone if self._replicated else rounds.replicas
        if holders is None:
            output.copy_(self._sum.root())
            return
        if self._replicated:
            sums = [rounds.schedule.sums_of_rank(rounds.acting_rank(rank)) for rank in range(mesh.world_size)]
        else:
            first = [mesh.group(replica)[0] for replica in range(mesh.replicas)]
            sums = [rounds.schedule.sums_of_replica(mesh.replica_of(rounds.acting_rank(rank))) for rank in first]
        sum_over_replicas(holders, self._sum, sums, output, accumulator(output[:0]).dtype)

    def _begin(self, gradient: torch.Tensor) -> None:
        numel = gradient.numel()
        self._rounds.require_backward(self.name)
        if self._last_round == self._rounds.index:
            raise InexactError(f"unit {self.name}: its gradients came twice in one microbatch. {self._way_out}")
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
        """Exchange all gradients of the round in their own dtype, and add those of this worker's shard."""
        rounds = self._rounds
        leaves = [rounds.microbatch(rank) for rank in rounds.group]
        nodes: list[list[Node]] = [[] if leaf is None else [(0, leaf)] for leaf in leaves]
        own = [] if rounds.microbatch(rounds.rank) is None else [gradient]
        self._exchange(own, nodes, gradient, group, gradient[:0])
        if not rounds.is_last:
            self._sum.map_waiting(torch.clone)  # carried terms must not keep the whole exchange buffer alive

    def _add_locally(self, gradient: torch.Tensor) -> None:
        leaf = self._rounds.microbatch(self._rounds.rank)
        if accelerator().has(gradient.device):  # allocated on another stream than the one that adds
            accelerator().keep_for_current_stream(gradient)
        if leaf is not None:
            self._sum.add((0, leaf), accumulator(gradient))

    def _exchange_partial_sums(self, gradient: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Exchange what each worker has added up in the step."""
        rounds = self._rounds
        nodes = [rounds.schedule.sums_of_rank(rounds.acting_rank(rank)) for rank in rounds.group]
        own = [value for _, value in self._sum.pop_all()]
        self._exchange(own, nodes, gradient, group, accumulator(gradient[:0]))

    def _exchange(
        self,
        own: Sequence[torch.Tensor],
        nodes: Sequence[Sequence[Node]],
        gradient: torch.Tensor,
        group: dist.ProcessGroup,
        like: torch.Tensor,
    ) -> None:
        exchange, chunk = self._rounds.exchange, gradient.numel() // self._rounds.mesh.shards
        send = partial(all_to_all, group=group, finish=self._rounds.finish)
        for node, values in exchange.terms(send, own, nodes, chunk, like):
            self._sum.add(node, accumulator(values))


def install(
    units: Sequence[tuple[str, FSDPModule]], rounds: ReductionState, replicated: Collection[str] = ()
) -> list[TreeReducer]:
    """Let every unit with gradients sum along the tree; returns the reducers in the units' order.

    `replicated`: names of the units that every worker has whole.
    """
    reducers = []
    for name, unit in units:
        if not reduces_gradients(unit):
            continue
        reducer = TreeReducer(rounds, name, replicated=name in replicated)
        if rounds.mesh.shards == 1 or name in replicated:
            unit.set_all_reduce_hook(reducer.all_reduce_hook)
        else:
            unit.set_custom_reduce_scatter(reducer)  # type: ignore[arg-type]  # its class is private, not a protocol
        reducers.append(reducer)
    return reducers


class ScalarGradients:
    """Gradients of the scalar parameters of one generation's model on one worker. Training thread only."""

    def __init__(self, parameters: Iterable[nn.Parameter], rounds: ReductionState, *, exact: bool) -> None:
        """`parameters`: all of the model's, in the same order on every worker."""
        self.params = [param for param in parameters if not param.dim() and param.requires_grad]
        self._rounds = rounds
        self.reducers = [TreeReducer(rounds, "the scalar parameters", replicated=True)] if self.params and exact else []

    def reduce(self) -> None:
        """Add the gradients of a microbatch whose backward is done; every worker must call it in every round."""
        for reducer in self.reducers:
            flat = self._flat()
            reducer.all_reduce_hook(flat)
            if self._rounds.is_last:
                for place, param in enumerate(self.params):
                    param.grad = flat[place].to(param.dtype)

    def fill(self) -> None:
        """Give each parameter a gradient, 0 where this worker's microbatches did not use it."""
        for param in self.params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)

    def _flat(self) -> torch.Tensor:
        """The gradients in separate memory, in the widest of their dtypes."""
        dtype = self.params[0].dtype
        for param in self.params[1:]:
            dtype = torch.promote_types(dtype, param.dtype)
        flat = torch.zeros(len(self.params), dtype=dtype, device=self.params[0].device)
        for place, param in enumerate(self.params):
            if param.grad is not None:
                flat[place] = param.grad
        return flat
