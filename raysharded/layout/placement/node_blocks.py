"""Consecutive ranks for the workers of one node: of whole tensor parallel groups, or of the whole node.

The workers of a tensor parallel group communicate within every layer. Workers are first divided into blocks. These get
the places that are worth the most, and then the workers of each block the ranks within it that are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from itertools import accumulate

import numpy as np

from raysharded.ids import WorkerId
from raysharded.layout.mesh import Mesh
from raysharded.layout.placement.assignment import NOWHERE, assign
from raysharded.layout.placement.node_spread import place_together
from raysharded.layout.placement.overlaps import Gains

Block = tuple[WorkerId, ...]


def in_blocks(
    orders: Sequence[tuple[WorkerId, ...]],
    nodes: Mapping[WorkerId, str],
    workers: Sequence[WorkerId],
    gains: Gains,
    mesh: Mesh,
    *,
    runs: bool,
    max_looks: int,
) -> tuple[WorkerId, ...]:
    """Workers by rank of `mesh`, in blocks of workers of one node.

    `orders`: orders by shard (see `keep_together`), of which the first is worth the most of `gains`. `workers`: the
    numbering of workers in `gains`. `max_looks`: the limit of each search, as in `assign`.

    Laws: as many tensor parallel groups as possible are within one node. With `runs` (and one replica) all of a node's
    workers follow each other, except those beyond whole groups. With several replicas each is on as few nodes as
    `place_together` finds. Workers that `nodes` does not name are on one node together.
    """
    blocks = _divided(orders[0], nodes, mesh, runs)
    search = _Search(workers, gains, mesh, max_looks)
    if mesh.replicas > 1:
        return search.replicated(_sequences(blocks, orders[:1])[0], nodes)
    best: tuple[tuple[int, int], list[Block]] | None = None
    for sequence in _sequences(blocks, orders):
        placed = search.placed(sequence, [len(block) for block in sequence])
        order = [worker for block in placed for worker in block]
        value = (-_mirrors_at_home(order, nodes, mesh.apart) if runs else 0, search.worth(placed))
        if best is None or value > best[0]:
            best = (value, placed)
    assert best is not None
    firsts = accumulate((len(block) for block in best[1]), initial=0)
    return tuple(
        worker for block, first in zip(best[1], firsts, strict=False) for worker in search.ranked(block, first)
    )


class _Search:
    """Search for places by their value."""

    def __init__(self, workers: Sequence[WorkerId], gains: Gains, mesh: Mesh, max_looks: int) -> None:
        self._number = {worker: number for number, worker in enumerate(workers)}
        self._gains, self._mesh, self._max_looks = gains, mesh, max_looks
        self._of_worker = gains.by_worker(len(workers))

    def placed(self, blocks: Sequence[Block], lengths: Sequence[int]) -> list[Block]:
        """The blocks by place, one for each replica; place `i` has `lengths[i]` shards.

        A block has as many workers as its place has shards. It stays in its given place if nothing is to be gained.
        """
        replicas = self._mesh.replicas
        worth = self._worth(blocks, lengths)
        found = self._assigned(worth, [number // replicas for number in range(len(blocks))], lengths, replicas)
        at: list[list[Block]] = [[] for _ in lengths]
        left: list[Block] = []
        for block, place in zip(blocks, found, strict=True):
            if place != NOWHERE:
                at[place].append(block)
        for number, (block, place) in enumerate(zip(blocks, found, strict=True)):
            if place == NOWHERE:
                here = at[number // replicas]
                (here if len(here) < replicas else left).append(block)
        for block in left:
            here = next(at[i] for i, n in enumerate(lengths) if len(at[i]) < replicas and n == len(block))
            here.append(block)
        return [block for here in at for block in here]

    def worth(self, placed: Sequence[Block]) -> int:
        """Value of blocks in their places, for one replica, if the workers of each get the best of its ranks."""
        rows = self._worth(placed, [len(block) for block in placed])
        return sum(dict(row).get(place, 0) for place, row in enumerate(rows))

    def ranked(self, block: Block, first: int) -> tuple[WorkerId, ...]:
        """The workers of a block in the best order for the shards from `first` on."""
        rows = [
            [
                (shard - first, nbytes)
                for shard, nbytes in self._of_worker[self._number[worker]]
                if 0 <= shard - first < len(block)
            ]
            for worker in block
        ]
        found = self._assigned(rows, range(len(block)), block, 1)
        at = {place: worker for worker, place in zip(block, found, strict=True) if place != NOWHERE}
        rest = iter([worker for worker, place in zip(block, found, strict=True) if place == NOWHERE])
        return tuple(at[place] if place in at else next(rest) for place in range(len(block)))

    def replicated(self, blocks: Sequence[Block], nodes: Mapping[WorkerId, str]) -> tuple[WorkerId, ...]:
        """Workers by rank: the order of tensor parallel groups whose replicas are on the fewest nodes."""
        replicas, tensor = self._mesh.replicas, self._mesh.tensor
        shards = len(blocks) // replicas
        by_node = sorted(blocks, key=lambda block: (nodes.get(block[0], ""), block))
        orders = [
            self.placed(blocks, [tensor] * shards),
            [one for shard in range(shards) for one in by_node[shard::shards]],
        ]
        block_of = {block[0]: block for block in blocks}
        heads = place_together([tuple(block[0] for block in order) for order in orders], nodes, replicas)
        return tuple(
            worker
            for number, head in enumerate(heads)
            for worker in self.ranked(block_of[head], number % shards * tensor)
        )

    def _assigned(
        self, worth: Sequence[Sequence[tuple[int, int]]], given: Sequence[int], places: Sized, capacity: int
    ) -> Sequence[int]:
        """The places that are worth the most, or the given ones if no others are worth more."""
        found = assign(worth, [capacity] * len(places), self._max_looks)
        if found is None:
            return given
        value, now = (
            sum(dict(row).get(place, 0) for row, place in zip(worth, chosen, strict=True)) for chosen in (found, given)
        )
        return found if value > now else given

    def _worth(self, blocks: Sequence[Block], lengths: Sequence[int]) -> list[list[tuple[int, int]]]:
        """(place, bytes) of each block, if each of its workers gets the best of the place's ranks: an upper bound."""
        block_of = np.zeros(len(self._number), np.int64)
        for number, block in enumerate(blocks):
            block_of[[self._number[worker] for worker in block]] = number
        places = np.repeat(np.arange(len(lengths)), lengths)
        worker, shard = np.divmod(self._gains.key, self._gains.shards)
        key, first = np.unique(worker * len(lengths) + places[shard], return_index=True)
        most = np.maximum.reduceat(self._gains.nbytes, first) if len(first) else self._gains.nbytes
        worker, place = np.divmod(key, len(lengths))
        size = np.array([len(block) for block in blocks])
        fits = size[block_of[worker]] == np.asarray(lengths)[place]
        key, where = np.unique((block_of[worker] * len(lengths) + place)[fits], return_inverse=True)
        nbytes = np.bincount(where, most[fits], len(key)).astype(np.int64)
        return Gains(shards=len(lengths), key=key, nbytes=nbytes).by_worker(len(blocks))


def _divided(order: Sequence[WorkerId], nodes: Mapping[WorkerId, str], mesh: Mesh, runs: bool) -> list[Block]:
    """Blocks of whole tensor parallel groups: one for each, or with `runs` one for all of a node."""
    shard_of = {worker: number // mesh.replicas for number, worker in enumerate(order)}
    on_node: dict[str, list[WorkerId]] = {}
    for worker in order:
        on_node.setdefault(nodes.get(worker, ""), []).append(worker)
    blocks: list[Block] = []
    scattered: list[WorkerId] = []
    for members in on_node.values():
        groups, rest = _groups(members, shard_of, mesh.tensor)
        blocks += [tuple(worker for group in groups for worker in group)] if runs and groups else groups
        scattered += rest
    return blocks + _groups(scattered, shard_of, mesh.tensor)[0]


def _groups(
    members: Iterable[WorkerId], shard_of: Mapping[WorkerId, int], tensor: int
) -> tuple[list[Block], list[WorkerId]]:
    """Groups of `tensor` workers, and the workers left over.

    Workers whose shards are of one group are together, as far as possible.
    """
    of_group: dict[int, list[tuple[int, int, WorkerId]]] = {}
    nth: dict[int, int] = {}
    for worker in members:
        shard = shard_of[worker]
        nth[shard] = nth.get(shard, -1) + 1  # with several replicas a group has one worker of each shard
        of_group.setdefault(shard // tensor, []).append((nth[shard], shard, worker))
    whole: list[WorkerId] = []
    rest: list[tuple[int, WorkerId]] = []
    for some in of_group.values():
        some.sort()
        behind = len(some) // tensor * tensor
        whole += [worker for _, _, worker in some[:behind]]
        rest += [(shard, worker) for _, shard, worker in some[behind:]]
    left = [worker for _, worker in sorted(rest)]
    behind = len(left) // tensor * tensor
    whole += left[:behind]
    return [tuple(whole[first : first + tensor]) for first in range(0, len(whole), tensor)], left[behind:]


def _sequences(blocks: Sequence[Block], orders: Sequence[tuple[WorkerId, ...]]) -> list[list[Block]]:
    """The blocks by their workers' places in each order; only one of several with the same lengths at each place."""
    found: dict[tuple[int, ...], list[Block]] = {}
    for order in orders:
        rank = {worker: number for number, worker in enumerate(order)}
        middle = {block: sum(rank[worker] for worker in block) / len(block) for block in blocks}
        sequence = sorted(blocks, key=lambda block: (middle[block], block))
        found.setdefault(tuple(len(block) for block in sequence), sequence)
    return list(found.values())


def _mirrors_at_home(order: Sequence[WorkerId], nodes: Mapping[WorkerId, str], apart: int) -> int:
    """Number of workers on one node with the worker whose mirror they hold."""
    where = [nodes.get(worker, "") for worker in order]
    return sum(node == where[(rank - apart) % len(where)] for rank, node in enumerate(where))
