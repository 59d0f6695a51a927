"""Sources of every segment of every buffer of the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raysharded.layout.reshard.balance import balance
from raysharded.layout.reshard.holdings import NOBODY, Holdings, without_repeats
from raysharded.layout.reshard.plan import MIRROR_BUFFER, STORAGE, Copy, Target
from raysharded.layout.reshard.segments import Layout, Segments
from raysharded.layout.reshard.split import Stripes, split

_NO_COPY = np.iinfo(np.int64).max


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pieces:
    """Transfers, in bulk.

    Piece `i`: the bytes `start[i] <= byte < start[i] + nbytes[i]` of the tensors `first[i] .. behind[i]` of a class
    (counted within it, behind excluded). They go from the buffer of rank `rank[i]` in copy `copy[i]`, which `sender[i]`
    has (`STORAGE`: storage), to the buffer of column `column[i]`, which `receiver[i]` has.

    Columns are all slots (see `Segments`) for the first of the target's `buffers`, then all for the next.
    """

    column: NDArray[np.int64]
    receiver: NDArray[np.int64]
    sender: NDArray[np.int64]
    copy: NDArray[np.int64]
    rank: NDArray[np.int64]
    first: NDArray[np.int64]
    behind: NDArray[np.int64]
    start: NDArray[np.int64]
    nbytes: NDArray[np.int64]

    def take(self, rows: NDArray[np.bool_]) -> Pieces:
        """The pieces for which `rows` is true."""
        return Pieces(**{name: getattr(self, name)[rows] for name in Pieces.__dataclass_fields__})


def in_memory(segments: Segments, holdings: Holdings) -> NDArray[np.bool_]:
    """Whether any worker has each segment. Replicated tensors are in every buffer."""
    found = np.zeros(len(segments.cls), np.bool_)
    for family in holdings.families:
        alive = (family.holder != NOBODY).any(axis=1)
        n = segments.first_replicated
        found[:n] |= alive[segments.owner[family.row, :n]]
        found[n:] |= alive.any()
    return found


def choose_sources(
    segments: Segments,
    holdings: Holdings,
    copies: Sequence[Copy],
    layouts: Sequence[Layout],
    layout_index: Sequence[int],
    target: Target,
) -> Pieces:
    """The pieces that fill every column: from the receiver's own buffers, else from peers, else from storage.

    Each segment must be in memory or in storage. The earliest of several copies is used, but peers share the bytes that
    they have in common. The copies are laid out as in `holdings_of`, and `segments` cut at these layouts.
    """
    table = np.stack([_receivers(target, kind, replica) for kind, replica in target.buffers])
    receiver = table[:, segments.slot_rank].ravel()
    segment = np.tile(segments.slot, len(table))
    number = holdings.numbers(table.ravel()).reshape(table.shape)[:, segments.slot_rank].ravel()
    copy, rank = _own(segments, holdings, segment, number)
    sender = receiver.copy()
    held = in_memory(segments, holdings)[segment]
    stored = np.flatnonzero(~held)
    if len(stored):
        copy[stored] = first = next(c for c, copy in enumerate(copies) if copy.medium == "storage")
        layout = layouts[layout_index[first]]
        part = segments.owner[layout_index[first], segment[stored]]
        rank[stored] = layout.rank_of(part, 0) % layout.world_size
        sender[stored] = STORAGE
    remote = held & (copy == _NO_COPY)
    replicated = segment >= segments.first_replicated
    dealt = np.flatnonzero(remote & replicated)
    load = np.zeros(len(holdings.workers), np.int64)
    if len(dealt):
        dealer, copy[dealt], rank[dealt] = _deal(holdings, len(dealt))
        sender[dealt] = holdings.workers[dealer]
        np.add.at(load, dealer, segments.weight[segment[dealt]])
    whole = np.flatnonzero(copy != _NO_COPY)
    in_one = segment[whole]
    pieces = Pieces(
        column=whole,
        receiver=receiver[whole],
        sender=sender[whole],
        copy=copy[whole],
        rank=rank[whole],
        first=np.zeros_like(whole),
        behind=segments.members[segments.cls[in_one]],
        start=segments.start[in_one],
        nbytes=segments.nbytes[in_one],
    )
    shared = np.flatnonzero(remote & ~replicated)
    if len(shared) == 0:
        return pieces
    parts = _share(segments, holdings, shared, segment[shared], receiver[shared], load)
    return Pieces(
        **{name: np.concatenate([getattr(pieces, name), getattr(parts, name)]) for name in Pieces.__dataclass_fields__}
    )


def _own(
    segments: Segments, holdings: Holdings, segment: NDArray[np.int64], number: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each column the first copy by which the receiver has it (`_NO_COPY`: it has not), and the rank."""
    copy, rank = np.full(len(segment), _NO_COPY), np.zeros(len(segment), np.int64)
    replicated = segment >= segments.first_replicated
    for family in holdings.families:
        owner = segments.owner[family.row, segment]
        for held, held_by, held_as in zip(family.held.T, family.held_by.T, family.held_as.T, strict=True):
            has, by = held[number], held_by[number]
            better = np.flatnonzero(((has == owner) | (replicated & (has != NOBODY))) & (by < copy))
            copy[better], rank[better] = by[better], held_as[number[better]]
    return copy, rank


def _deal(holdings: Holdings, num: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(worker's number, copy, rank) of `num` sources of replicated tensors: the holders in turn."""
    found = [np.nonzero(family.holder.T != NOBODY) for family in holdings.families]
    families = list(zip(holdings.families, found, strict=True))
    worker = np.concatenate([family.holder[part, column] for family, (column, part) in families])
    copy = np.concatenate([family.copy[column] for family, (column, _) in families])
    ranks = np.concatenate([family.rank_of(part, column) for family, (column, part) in families])
    turn = np.sort(np.unique(worker, return_index=True)[1])
    turn = turn[np.arange(num) % len(turn)]
    return worker[turn], copy[turn], ranks[turn]


def _share(
    segments: Segments,
    holdings: Holdings,
    column: NDArray[np.int64],
    segment: NDArray[np.int64],
    receiver: NDArray[np.int64],
    load: NDArray[np.int64],
) -> Pieces:
    """The columns that only peers have, divided between them; `load`: bytes that they send anyway.

    Columns that the same peers have are one group, a run of bytes that is divided once.
    """
    group_of, options = _groups(segments, holdings)
    weight = segments.weight[segment]
    demand = np.bincount(group_of[segment], weight, len(options)).astype(np.int64)
    shares = balance(demand, options, load)
    order = np.argsort(group_of[segment], kind="stable")
    column, segment, receiver = column[order], segment[order], receiver[order]
    count = segments.members[segments.cls[segment]]
    parts = split(Stripes(start=segments.start[segment], nbytes=segments.nbytes[segment], count=count), shares)
    of = segment[parts.stripe]
    copy = np.concatenate([family.copy for family in holdings.families])[parts.option]
    return Pieces(
        column=column[parts.stripe],
        receiver=receiver[parts.stripe],
        sender=holdings.workers[options[group_of[of], parts.option]],
        copy=copy,
        rank=_ranks(segments, holdings, of, parts.option),
        first=parts.first,
        behind=parts.behind,
        start=parts.start,
        nbytes=parts.nbytes,
    )


def _ranks(
    segments: Segments, holdings: Holdings, segment: NDArray[np.int64], option: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Rank whose buffer has a segment in an option; options are the columns of all families, one after the other."""
    rank = np.zeros(len(segment), np.int64)
    before = 0
    for family in holdings.families:
        rows = np.flatnonzero((option >= before) & (option < before + len(family.copy)))
        rank[rows] = family.rank_of(segments.owner[family.row, segment[rows]], option[rows] - before)
        before += len(family.copy)
    return rank


def _groups(segments: Segments, holdings: Holdings) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Group of each segment of a cut class, and its workers' numbers: (groups, columns of all families)."""
    owners = [segments.owner[family.row, : segments.first_replicated] for family in holdings.families]
    if len(owners) == 1:
        return owners[0], holdings.families[0].holder
    group, first = np.zeros(segments.first_replicated, np.int64), np.zeros(1, np.int64)
    for family, owner in zip(holdings.families, owners, strict=True):
        _, first, group = np.unique(group * len(family.holder) + owner, return_index=True, return_inverse=True)
    held = [family.holder[owner[first]] for family, owner in zip(holdings.families, owners, strict=True)]
    return group, without_repeats(np.concatenate(held, axis=1))


def _receivers(target: Target, kind: int, replica: int) -> NDArray[np.int64]:
    """For each shard the worker of the replica that holds it in its buffer `kind` (the inverse of `mirror_of`)."""
    workers = np.asarray(target.workers, np.int64)[list(target.mesh.group(replica))]
    return np.roll(workers, -target.apart) if kind == MIRROR_BUFFER else workers
