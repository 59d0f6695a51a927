"""Who sends what: one source for every segment of every buffer of the target."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raysharded.layout.plan import MIRROR_BUFFER, STORAGE, Copy, Target
from raysharded.layout.segments import Segments

LOST = -2
"""In `Candidates.holder`: this copy does not have it."""
_ROUNDS = 61  # a prime: no common period with the pieces of a rank
_SWEEPS = 4


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Candidates:
    """Per (copy, segment) who could send it to the segment's receiver, and from the buffer of which rank.

    The columns are all segments for the first of the target's `buffers`, then all for the next.
    """

    receiver: NDArray[np.int64]
    """Per column the worker that needs the segment."""
    holder: NDArray[np.int64]
    """(copies, columns): a worker, `STORAGE` or `LOST`."""
    rank: NDArray[np.int64]
    """(copies, columns): the rank in that copy's layout."""
    weight: NDArray[np.int64]
    """Per column its bytes, over all tensors of the class."""


def find_candidates(
    segments: Segments, copies: Sequence[Copy], size_index: Sequence[int], target: Target
) -> Candidates:
    """The candidates for every buffer of `target`; `size_index[c]` is the row of `segments.owner` of copy `c`.

    What is replicated is in every buffer of a copy: a receiver that holds one is its own candidate, the others are
    dealt out over the holders.
    """
    content = segments.owner[0]
    columns = [_receivers(target, kind, replica)[content] for kind, replica in target.buffers]
    receiver = np.concatenate(columns)
    holder = np.empty((len(copies), len(receiver)), np.int64)
    rank = np.empty_like(holder)
    n, total = segments.first_replicated, len(content)
    for c, copy in enumerate(copies):
        holders = _holders(copy)
        for k, needed_by in enumerate(columns):
            part = slice(k * total, (k + 1) * total)
            rank[c, part] = segments.owner[size_index[c]]
            rank[c, part][n:] = _replica_ranks(holders, needed_by[n:], content[n:])
            holder[c, part] = holders[rank[c, part]]
    weight = np.tile(segments.weight, len(columns))
    return Candidates(receiver=receiver, holder=holder, rank=rank, weight=weight)


def choose_copies(candidates: Candidates) -> NDArray[np.int64]:
    """Per column the copy to take it from: the receiver's own, else a peer's, else storage's; -1 when nobody has it."""
    holder = candidates.holder
    choice = np.full(holder.shape[1], -1, np.int64)
    if len(holder) == 0:
        return choice
    in_memory = holder >= 0
    options = in_memory.sum(axis=0)
    for c in range(len(holder) - 1, -1, -1):
        choice[(holder[c] == STORAGE) & (options == 0)] = c
    for c in range(len(holder) - 1, -1, -1):
        choice[holder[c] == candidates.receiver] = c
    remote = (choice < 0) & (options > 0)
    senders = np.unique(holder[in_memory])
    sender = np.where(in_memory, np.searchsorted(senders, holder), len(senders))
    forced, free = np.flatnonzero(remote & (options == 1)), np.flatnonzero(remote & (options > 1))
    choice[forced] = in_memory[:, forced].argmax(axis=0)
    load = np.bincount(sender[choice[forced], forced], candidates.weight[forced], len(senders))
    choice[free] = _share(sender[:, free], candidates.weight[free], load.astype(np.float64))
    return choice


def _share(sender: NDArray[np.int64], weight: NDArray[np.int64], load: NDArray[np.float64]) -> NDArray[np.int64]:
    """Per column one of its senders, so that the largest load is small.

    `sender` is (copies, columns), with `len(load)` for "not this copy". Each column goes to the candidate with the
    least to send (greedy list scheduling: Graham, "Bounds on Multiprocessing Timing Anomalies", 1969), and the columns
    are gone through again, as best responses, so that a load is passed on along the ring of mirrors. A few columns
    move at a time, those of a residue class, which come from all over the state.
    """
    n = sender.shape[1]
    order = np.argsort(np.arange(n) % _ROUNDS, kind="stable")
    sender, weight = sender[:, order], weight[order]
    choice = np.full(n, -1, np.int64)
    cost = np.append(load, np.inf)
    edges = np.searchsorted(np.arange(n)[order] % _ROUNDS, np.arange(_ROUNDS + 1))
    for sweep in range(_SWEEPS):
        for first, behind in itertools.pairwise(edges.tolist()):
            at = np.arange(behind - first)
            options, bytes_ = sender[:, first:behind], weight[first:behind]
            if sweep:
                cost -= np.bincount(options[choice[first:behind], at], bytes_, len(cost))
            best = cost[options].argmin(axis=0)
            cost += np.bincount(options[best, at], bytes_, len(cost))
            choice[first:behind] = best
    result = np.empty_like(choice)
    result[order] = choice
    return result


def wire_bytes_of(candidates: Candidates) -> int:
    """The bytes that must go from worker to worker, whoever of several peers sends them."""
    holder = candidates.holder
    remote = (holder >= 0).any(axis=0) & ~(holder == candidates.receiver).any(axis=0)
    return int(candidates.weight[remote].sum())


def _receivers(target: Target, kind: int, replica: int) -> NDArray[np.int64]:
    """Per shard the worker of the replica that keeps it in its buffer `kind` (the inverse of `mirror_of`)."""
    workers = np.asarray(target.workers, np.int64)[list(target.mesh.group(replica))]
    return np.roll(workers, -1) if kind == MIRROR_BUFFER else workers


def _holders(copy: Copy) -> NDArray[np.int64]:
    if copy.medium == "storage":
        return np.full(copy.world_size, STORAGE, np.int64)
    return np.array([LOST if holder is None else holder for holder in copy.holders], np.int64)


def _replica_ranks(
    holders: NDArray[np.int64], receiver: NDArray[np.int64], turn: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Per receiver a rank that still has its buffer: one it holds itself if it can."""
    alive = np.flatnonzero(holders != LOST)
    if len(alive) == 0:
        return np.zeros_like(receiver)
    ranks = alive[turn % len(alive)]
    by_id = alive[np.argsort(holders[alive], kind="stable")]
    near = by_id[np.minimum(np.searchsorted(holders[by_id], receiver), len(by_id) - 1)]
    return np.where(holders[near] == receiver, near, ranks)
