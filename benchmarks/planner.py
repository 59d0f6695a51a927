"""The planner's time for large models: the order of ranks, which the driver chooses once, and each worker's own plan.
Nothing is moved.

python -m benchmarks.planner [--runs 5] [--only 7B] [--whole] [--json PATH]

A case loses workers, spread over the world, or is joined by some. They hold snapshots and, where there are no replicas,
mirrors. A node has 8 of them, with consecutive ranks, and mirrors are on the next node, as the driver places them. With
tensor parallelism, whose groups are on one node, a whole node is lost.

One JSON line per case, with medians; the cases alternate, so that all of them meet the same state of the machine.
`ready_s` is the wait of a change: the order, and then a plan, which all workers make at once. With `--whole` also the
plan of all workers, up to some millions of rows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from raysharded.ids import WorkerId
from raysharded.layout import (
    Copy,
    Plan,
    StateSpec,
    Target,
    TensorSpec,
    count_wire_bytes,
    make_plan,
    mirror_of,
    order_workers,
    strips_of,
    tensor_specs,
)
from raysharded.testing.llama import LLAMA_1B, LLAMA_7B, LLAMA_70B, LLAMA_405B

PER_NODE = 8
MODELS = {"1B": LLAMA_1B, "7B": LLAMA_7B, "70B": LLAMA_70B, "405B": LLAMA_405B}
MAX_WHOLE = 2 * 10**6
"""Tensors times workers: about a third of the rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A model's workers become fewer, or more."""

    model: str
    before: int
    after: int
    replicas_before: int = 1
    replicas_after: int = 1
    mirrors: bool = True
    tensor_before: int = 1
    tensor_after: int = 1

    @property
    def spec(self) -> StateSpec:
        whole = MODELS[self.model].state
        return in_strips(whole) if self.tensor_after > 1 else whole

    @property
    def apart(self) -> int:
        """As `Mesh.apart`: mirrors are on the next node."""
        return PER_NODE if self.replicas_after == 1 else 1

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """The workers before the change, by rank: node by node."""
        return tuple(WorkerId(number) for number in range(self.before))

    @property
    def nodes(self) -> dict[WorkerId, str]:
        return {WorkerId(number): f"node {number // PER_NODE}" for number in range(max(self.before, self.after))}

    @property
    def joiners(self) -> tuple[WorkerId, ...]:
        return tuple(WorkerId(number) for number in range(self.before, self.after))

    @property
    def lost(self) -> frozenset[WorkerId]:
        """The lost workers, all over the world and of all places in a node; with tensor parallelism those in the
        middle."""
        count = max(0, self.before - self.after)
        if self.tensor_after > 1:
            return frozenset(map(WorkerId, range(self.before // 2, self.before // 2 + count)))
        return frozenset(WorkerId(i * self.before // count + i % PER_NODE) for i in range(count))


CHANGES = (
    Change(model="7B", before=64, after=60),
    Change(model="7B", before=256, after=248),
    Change(model="7B", before=1024, after=1016),
    Change(model="7B", before=1016, after=1024, mirrors=False),
    Change(model="7B", before=1024, after=1016, replicas_before=128, replicas_after=127),
    Change(model="7B", before=1024, after=896, replicas_before=128, replicas_after=64),
    Change(model="7B", before=1024, after=1016, tensor_before=8, tensor_after=8),
    Change(model="7B", before=1024, after=1016, tensor_before=4, tensor_after=8),
    Change(model="7B", before=1024, after=960, replicas_before=16, replicas_after=15, tensor_before=8, tensor_after=8),
    Change(model="405B", before=1024, after=1016),
    Change(model="405B", before=8192, after=8184),
    Change(model="405B", before=8184, after=8192, mirrors=False),
    Change(model="405B", before=8192, after=8064, replicas_before=64, replicas_after=63),
    Change(model="405B", before=8192, after=8184, tensor_before=8, tensor_after=8),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Figures of one run of a change: seconds, bytes and rows."""

    order_s: float
    worker_s: float
    """The plan of one worker."""
    count_s: float
    """Time for counting the bytes on the wire."""
    whole_s: float | None
    rows_of_worker: int
    wire_of_state: float
    """Bytes on the wire, in sizes of the state."""
    received_of_shard: float
    """Bytes that the one worker receives, in sizes of its shard."""
    mirrors_at_home: int
    """Workers that keep the mirror of a worker on the same node; 0 without mirrors."""
    split_groups: int
    """Tensor parallel groups that span several nodes."""
    largest_sender: float | None
    """The largest sender's bytes over the mean of all senders, in the whole plan."""


def in_strips(spec: StateSpec) -> StateSpec:
    """The state under a Llama's tensor parallelism: the linears that write to the residual stream are cut by columns,
    other matrices by rows."""
    entries: list[TensorSpec] = []
    for tensor in spec.tensors:
        dim = None if len(tensor.shape) < 2 else int(tensor.name.endswith((".o", ".down")))
        strips = strips_of(tensor.shape[1], PER_NODE) if dim else 1
        entries += tensor_specs(
            tensor.name, tensor.dtype, tensor.shape, replicated=tensor.replicated, tensor_dim=dim, strips=strips
        )
    return StateSpec(tensors=tuple(entries))


def copies_of(change: Change) -> tuple[Copy, ...]:
    """The copies that the survivors have in memory."""
    lost = change.lost
    alive = [None if worker in lost else worker for worker in change.workers]
    shards = change.before // change.replicas_before
    groups = [tuple(alive[first : first + shards]) for first in range(0, change.before, shards)]
    tensor = change.tensor_before
    snapshots = tuple(Copy(medium="snapshot", world_size=shards, holders=group, tensor=tensor) for group in groups)
    if change.replicas_before > 1 or not change.mirrors:
        return snapshots
    keeper = {mirror_of(rank, shards, change.apart): alive[rank] for rank in range(shards)}
    holders = tuple(keeper[rank] for rank in range(shards))
    return (*snapshots, Copy(medium="mirror", world_size=shards, holders=holders, tensor=tensor))


def measure(change: Change, run: int, *, whole: bool) -> Figures:
    """Plan one change, for another worker in each run."""
    spec, copies, nodes, lost = change.spec, copies_of(change), change.nodes, change.lost
    survivors = [worker for worker in change.workers if worker not in lost]
    began = time.perf_counter()
    replicas, tensor, apart = change.replicas_after, change.tensor_after, change.apart
    order = order_workers(spec, copies, survivors, change.joiners, change.mirrors, nodes, replicas, tensor, apart)
    ordered = time.perf_counter()
    target = Target(workers=order, mirrors=change.mirrors, replicas=replicas, tensor=tensor, apart=apart)
    worker = order[(2 * run + 1) * len(order) // 16 % len(order)]
    planning = time.perf_counter()
    plan = make_plan(spec, copies, target, worker=worker)
    planned = time.perf_counter()
    wire_bytes = count_wire_bytes(spec, copies, target)
    counted = time.perf_counter()
    if not isinstance(plan, Plan):
        raise SystemExit(f"{change}: {plan}")
    figures = Figures(
        order_s=ordered - began,
        worker_s=planned - planning,
        count_s=counted - planned,
        whole_s=None,
        rows_of_worker=len(plan),
        wire_of_state=wire_bytes / spec.total_bytes,
        received_of_shard=plan.receives(worker).total_bytes * target.mesh.shards / spec.total_bytes,
        mirrors_at_home=mirrors_at_home(order, change),
        split_groups=sum(
            len({nodes[worker] for worker in order[first : first + tensor]}) > 1
            for first in range(0, len(order), tensor)
        ),
        largest_sender=None,
    )
    return whole_plan(figures, change, copies, target) if whole else figures


def mirrors_at_home(order: Sequence[WorkerId], change: Change) -> int:
    """See `Figures.mirrors_at_home`."""
    if change.replicas_after > 1 or not change.mirrors:
        return 0
    nodes = change.nodes
    kept = [order[mirror_of(rank, len(order), change.apart)] for rank in range(len(order))]
    return sum(nodes[worker] == nodes[other] for worker, other in zip(order, kept, strict=True))


def whole_plan(figures: Figures, change: Change, copies: Sequence[Copy], target: Target) -> Figures:
    """The figures, with those of the plan of all workers."""
    spec = change.spec
    if len(spec.tensors) * change.after > MAX_WHOLE:
        return figures
    began = time.perf_counter()
    plan = make_plan(spec, copies, target)
    whole_s = time.perf_counter() - began
    assert isinstance(plan, Plan)
    remote = plan.src_worker != plan.dst_worker
    load = np.bincount(plan.src_worker[remote], plan.nbytes[remote])
    largest = float(load.max() * np.count_nonzero(load) / load.sum()) if load.any() else None
    return replace(figures, whole_s=whole_s, largest_sender=largest)


def median(runs: Sequence[Figures]) -> dict[str, float | None]:
    """The median of each figure, rounded; also of the time until all is planned."""
    found: dict[str, float | None] = {}
    for name in Figures.__dataclass_fields__:
        values = [getattr(one, name) for one in runs if getattr(one, name) is not None]
        found[name] = round(statistics.median(values), 4) if values else None
    return {"ready_s": round(statistics.median(one.order_s + one.worker_s for one in runs), 4)} | found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", choices=sorted(MODELS))
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    changes = [change for change in CHANGES if options.only in (None, change.model)]
    runs: dict[Change, list[Figures]] = {change: [] for change in changes}
    for run in range(options.runs):
        for change in changes:
            runs[change].append(measure(change, run, whole=options.whole and run == 0))
    load = [round(one, 1) for one in os.getloadavg()]
    results = [asdict(change) | median(found) | {"machine_load": load} for change, found in runs.items()]
    for result in results:
        print(json.dumps(result))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
