"""Shares of several senders in bytes that only they have, so that the largest load is small."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_SWEEPS = 400
_MIN_SWEEPS = 10
_WORK = 8_000_000
"""Limit of sweeps times options: about a second. Thousands of groups reach `_SWEEPS`, a hundred thousand do not."""
_MAX_BLOCKS = 64
_TOLERANCE = 1000
"""The search ends when a sweep changes no share by more than this part of the mean load."""
_FULL = 1 << 50
"""A load in bytes that no sender has."""


def balance(demand: NDArray[np.int64], options: NDArray[np.int64], load: NDArray[np.int64]) -> NDArray[np.int64]:
    """(groups, options): the bytes of each group that each of its options sends.

    `options[g]` are the senders that have the `demand[g]` bytes of group `g`, each once; -1 for none. Sender `s` sends
    `load[s]` bytes in addition.

    Laws: the shares of a group with an option add up to its demand. None is negative. The largest load of a sender is
    within 10% of the least possible (tested against it), except for the rounding of a share.

    One block of groups after the other gets what is best for each group if the others stay as they are: the loads of
    its options are filled up like vessels. This lowers the sum of the squares of the loads, whose minimum also has the
    least maximum. The groups of a block have few senders in common. Where they do, each takes that part of the step
    (Richtárik and Takáč, "Parallel coordinate descent methods for big data optimization", 2016). An excess moves from
    neighbour to neighbour. None need go far, as a sender passes on at most what it has. All numbers are integers: every
    worker must get the same result.
    """
    if options.size == 0:
        return np.zeros(options.shape, np.int64)
    shares = _even_shares(demand, options)
    rows = np.flatnonzero((demand > 0) & ((options >= 0).sum(axis=1) > 1))
    total = np.append(load, 0) + _loads(options, shares, len(load))
    enough = max(1, int(demand.sum()) // (max(1, len(load)) * _TOLERANCE))
    blocks = _blocks(demand, options, shares, rows, len(load))
    for _ in range(max(_MIN_SWEEPS, min(_SWEEPS, _WORK // max(1, len(rows) * options.shape[1])))):
        if max((block.fill(total) for block in blocks), default=0) <= enough:
            break
    for block in blocks:
        shares[block.rows] = block.share
    return shares


class _Block:
    """Some of the groups, by row."""

    def __init__(
        self,
        rows: NDArray[np.intp],
        demand: NDArray[np.int64],
        options: NDArray[np.int64],
        share: NDArray[np.int64],
        num_senders: int,
    ) -> None:
        self.rows, self.share = rows, share
        self._demand, self._num_senders = demand, num_senders
        self._valid = options >= 0
        self._sender = np.where(self._valid, options, num_senders)  # an index beyond all senders, whose load is full
        in_common = np.bincount(self._sender[self._valid], minlength=num_senders + 1)
        self._damping = in_common[self._sender].max(axis=1, initial=1)[:, None]
        self._groups = np.arange(len(rows))

    def fill(self, total: NDArray[np.int64]) -> int:
        """Improve the shares and update `total`, the loads of all senders. Returns the largest change left to make."""
        others = np.where(self._valid, total[self._sender] - self.share, _FULL)
        wanted = _filled(others, self._demand) - self.share
        change = wanted // self._damping
        change[self._groups, others.argmin(axis=1)] -= change.sum(axis=1)
        self.share = self.share + change
        total += _loads(self._sender, change, self._num_senders)
        return int(np.abs(wanted).max())


def _blocks(
    demand: NDArray[np.int64],
    options: NDArray[np.int64],
    shares: NDArray[np.int64],
    rows: NDArray[np.intp],
    num_senders: int,
) -> list[_Block]:
    """The groups of `rows`, dealt out to as many blocks as one sender has groups: neighbours are separated."""
    who = options[rows]
    num = min(_MAX_BLOCKS, int(np.bincount(who[who >= 0], minlength=1).max()))
    dealt = [rows[i::num] for i in range(num)]
    return [_Block(part, demand[part], options[part], shares[part], num_senders) for part in dealt if len(part)]


def _even_shares(demand: NDArray[np.int64], options: NDArray[np.int64]) -> NDArray[np.int64]:
    """Equal shares of each group's options; the first also has the remainder."""
    valid = options >= 0
    count = valid.sum(axis=1)
    shares = np.where(valid, (demand // np.maximum(count, 1))[:, None], 0)
    shares[np.arange(len(demand)), valid.argmax(axis=1)] += np.where(count > 0, demand - shares.sum(axis=1), 0)
    return shares


def _loads(sender: NDArray[np.int64], share: NDArray[np.int64], num_senders: int) -> NDArray[np.int64]:
    """(senders + 1,): the load of each sender; float64 adds integers of this size exactly."""
    of_all = np.where(sender >= 0, sender, num_senders).ravel()
    total: NDArray[np.int64] = np.bincount(of_all, share.ravel(), num_senders + 1).astype(np.int64)
    return total


def _filled(load: NDArray[np.int64], amount: NDArray[np.int64]) -> NDArray[np.int64]:
    """(groups, options): amounts that flow into vessels filled to `load` until all that got any are equally high."""
    if load.shape[1] == 2:  # a snapshot and its mirror: by far the most usual case
        first = np.clip((amount + load[:, 1] - load[:, 0]) // 2, 0, amount)
        return np.stack([first, amount - first], axis=1)
    ordered = np.sort(load, axis=1)
    num = np.arange(1, load.shape[1] + 1)
    levels = (np.cumsum(ordered, axis=1) + amount[:, None]) // num
    used = np.maximum((levels >= ordered).sum(axis=1), 1)
    level = levels[np.arange(len(load)), used - 1]
    into: NDArray[np.int64] = np.maximum(level[:, None] - load, 0)
    into[np.arange(len(load)), load.argmin(axis=1)] += amount - into.sum(axis=1)
    return into
