"""Exchange of gradients in a shard group.

Each worker has some nodes of the tree for all shards, and gets those of all workers for its own shard.

Workers on one host first add up their nodes, each for some of the shards. Only sums that they cannot add any further
leave the host, in the dtype of sums. With `n` workers on each host whose leaves are a whole subtree, one sum leaves for
`n` gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from raysharded.actors.numerics.summation_tree import Node, TreeSum, coalesce_nodes

AllToAll = Callable[[torch.Tensor, torch.Tensor, list[int] | None, list[int] | None], object]
"""(received, send, elements from each rank, elements to each rank) of flat tensors; None: equal numbers."""
Hosts = tuple[tuple[int, ...], ...]
"""The shards of a group on each host, ascending."""
Terms = Iterator[tuple[Node, torch.Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """One worker's position in its shard group. All workers of the group make the same exchanges at the same time."""

    num_leaves: int
    """Number of the tree's leaves."""
    shards: int
    shard: int
    """This worker's shard."""
    hosts: Hosts = ()
    """All shards, each once; empty: no worker adds for others."""

    def terms(
        self,
        all_to_all: AllToAll,
        own: Sequence[torch.Tensor],
        nodes: Sequence[Sequence[Node]],
        chunk: int,
        like: torch.Tensor,
    ) -> Terms:
        """Terms of the sum for this worker's shard: nodes with their values.

        `own`: this worker's nodes from left to right, each flat with `chunk` elements per shard. `nodes[s]`: the nodes
        of shard `s`'s worker. `like`: an empty tensor of their dtype, on their device.
        """
        everyone = range(self.shards)
        if not self.hosts:
            return _deliver(all_to_all, own, [chunk] * self.shards, nodes, chunk, like)
        host = next(host for host in self.hosts if self.shard in host)
        parts = {shard: _part(host, shard, self.shards) for shard in host}
        mine = parts[self.shard]
        lengths = [len(parts.get(shard, ())) * chunk for shard in everyone]
        of_host = [nodes[shard] if shard in parts else () for shard in everyone]
        sums = self._summed(_deliver(all_to_all, own, lengths, of_host, len(mine) * chunk, like))
        lengths = [chunk if shard in mine else 0 for shard in everyone]
        of_helpers = self._sums_of_helpers(nodes)
        return _deliver(all_to_all, sums, lengths, of_helpers, chunk, accumulator(like))

    def _summed(self, terms: Terms) -> list[torch.Tensor]:
        """The sums of terms that cannot be added any further. None is kept but those, which may be memory of terms."""
        total: TreeSum[torch.Tensor] = TreeSum(self.num_leaves, add)
        for node, values in terms:
            total.add(node, accumulator(values))
        return [values for _, values in total.pop_all()]

    def _sums_of_helpers(self, nodes: Sequence[Sequence[Node]]) -> list[Sequence[Node]]:
        """Nodes that each shard's worker has added up for this worker, by shard."""
        found: list[Sequence[Node]] = [()] * self.shards
        for host in self.hosts:
            helper = next(shard for shard in host if self.shard in _part(host, shard, self.shards))
            found[helper] = coalesce_nodes((node for shard in host for node in nodes[shard]), self.num_leaves)
        return found


def hosts_of(nodes: Sequence[int]) -> Hosts:
    """The hosts of a shard group whose shard `s` is on node `nodes[s]`; empty if no worker would add for others."""
    on: dict[int, list[int]] = {}
    for shard, node in enumerate(nodes):
        on.setdefault(node, []).append(shard)
    return tuple(map(tuple, on.values())) if 1 < len(on) < len(nodes) else ()


def _part(host: Sequence[int], shard: int, shards: int) -> range:
    """Shards for which the worker of `shard` adds up its host's nodes."""
    place, count = host.index(shard), len(host)
    return range(shards * place // count, shards * (place + 1) // count)


def _deliver(
    all_to_all: AllToAll,
    own: Sequence[torch.Tensor],
    lengths: Sequence[int],
    nodes: Sequence[Sequence[Node]],
    own_length: int,
    like: torch.Tensor,
) -> Terms:
    """Send each worker its part of every tensor of `own`; the terms received from all.

    `lengths[s]`: elements for shard `s`, in order. `own_length`: elements of each received node.
    """
    counts = [len(of_shard) for of_shard in nodes]
    received = like.new_empty((sum(counts), own_length))
    in_sizes, out_sizes = [len(own) * length for length in lengths], [count * own_length for count in counts]
    is_even = in_sizes[0] > 0 and len({*in_sizes, *out_sizes}) == 1  # with empty parts some pass sizes, so all must
    send = _by_receiver(own, lengths) if own else like
    all_to_all(received.view(-1), send, None if is_even else out_sizes, None if is_even else in_sizes)
    arrived = [node for of_shard in nodes for node in of_shard]
    if accumulator(like).dtype != like.dtype:  # the copies in the sums' dtype are made one by one
        return zip(arrived, received, strict=True)
    return add_siblings(arrived, received)


def add_siblings(nodes: Sequence[Node], rows: torch.Tensor) -> Terms:
    """The nodes that remain of these, with their values, once all neighbours that are siblings are added in place.

    `rows` is [nodes, elements]. A whole level of neighbours is one operation: for a device, launching an addition costs
    more than the addition. The sums are those of `TreeSum`.
    """
    left = [(node, row) for row, node in enumerate(nodes)]
    while True:
        pairs = [place for place in range(len(left) - 1) if _are_siblings(left[place][0], left[place + 1][0])]
        if not pairs:
            return iter([(node, rows[row]) for node, row in left])
        for even, odd in _evenly_spaced([(left[place][1], left[place + 1][1]) for place in pairs]):
            rows[even].add_(rows[odd])
        parents = {place: (left[place][0][0] + 1, left[place][0][1] >> 1) for place in pairs}
        absorbed = {place + 1 for place in pairs}
        left = [(parents.get(place, node), row) for place, (node, row) in enumerate(left) if place not in absorbed]


def _are_siblings(one: Node, next_one: Node) -> bool:
    return one[0] == next_one[0] and one[1] % 2 == 0 and next_one[1] == one[1] + 1


def _evenly_spaced(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[slice, slice]]:
    """Row numbers in pairs, ascending, as pairs of slices: the fewest whose rows have one distance each."""
    begin = 0
    while begin < len(pairs):
        first, second = pairs[begin]
        end, step = begin + 1, 0
        while end < len(pairs) and pairs[end][1] - pairs[end][0] == second - first:
            distance = pairs[end][0] - pairs[end - 1][0]
            if step not in (0, distance):
                break
            step, end = distance, end + 1
        length = (end - begin - 1) * (step or 1) + 1
        yield slice(first, first + length, step or 1), slice(second, second + length, step or 1)
        begin = end


def _by_receiver(own: Sequence[torch.Tensor], lengths: Sequence[int]) -> torch.Tensor:
    """A flat tensor in which all parts for one worker are contiguous."""
    if len(own) == 1:
        return own[0].reshape(-1)
    parts = [values.reshape(-1).split(list(lengths)) for values in own]
    return torch.cat([of_own[shard] for shard in range(len(lengths)) for of_own in parts])


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Sum in place: every term owns its memory."""
    return a.add_(b)


def accumulator(gradient: torch.Tensor) -> torch.Tensor:
    """A tensor for sums: float32 at least, also where gradients travel in bfloat16.

    Otherwise the tensor itself: FSDP2 passes every gradient in separate memory and does not read it again.
    """
    return gradient.float() if gradient.dtype in (torch.bfloat16, torch.float16) else gradient
