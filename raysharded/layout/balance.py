"""How much each of several senders contributes to what only they have, so that the largest load is small."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_SWEEPS = 400
_TOLERANCE = 1000
"""Done when a sweep changes no share by more than this part of the mean load."""
_FULL = 1 << 50
"""A load of bytes that no sender has."""


def balance(demand: NDArray[np.int64], options: NDArray[np.int64], load: NDArray[np.int64]) -> NDArray[np.int64]:
    """(groups, options): the bytes of each group that each of its options sends.

    `options[g]` are the senders that have the `demand[g]` bytes of group `g`, each once; -1 for none. Sender `s` sends
    `load[s]` bytes besides.

    Laws: the shares of a group with an option add up to its demand; none is negative; the largest load of a sender is
    within 10% of the least possible (tested against it), but for what a share is rounded to.

    All groups at once move towards what would be best for each if the others stayed as they are: the loads of its
    options filled up like vessels. This lowers the sum of the squares of the loads, whose least value has the least
    maximum too. A sender of several groups takes that part of each step, which makes steps at once as good as one
    by one (Richtárik and Takáč, "Parallel coordinate descent methods for big data optimization", 2016). An excess moves
    from neighbour to neighbour; none need go far, for a sender passes on at most what it has. In integers: every
    worker must come to the same.
    """
    shares = np.zeros(options.shape, np.int64)
    num_senders = len(load)
    active = np.flatnonzero((demand > 0) & (options >= 0).any(axis=1))
    if len(active) == 0:
        return shares
    who, need = options[active], demand[active]
    valid = who >= 0
    sender = np.where(valid, who, num_senders)  # one more, which is full
    count = valid.sum(axis=1)
    share = np.where(valid, (need // count)[:, None], 0)
    share[np.arange(len(need)), valid.argmax(axis=1)] += need - share.sum(axis=1)
    of_choice = count > 1
    groups_of = np.bincount(sender[of_choice].ravel(), minlength=num_senders + 1)
    groups_of[num_senders] = 0
    damping = groups_of[sender].max(axis=1, initial=1)[:, None]
    enough = max(1, int(need.sum()) // (num_senders * _TOLERANCE))
    rows = np.flatnonzero(of_choice)
    sender, valid, need, damping, changing = sender[rows], valid[rows], need[rows], damping[rows], share[rows]
    fixed = np.delete(np.arange(len(share)), rows)
    forced = np.append(load, 0) + _loads(who[fixed], share[fixed], num_senders)
    for _ in range(_SWEEPS if len(rows) else 0):
        total = forced + _loads(sender, changing, num_senders)
        others = np.where(valid, total[sender] - changing, _FULL)
        change = (_filled(others, need) - changing) // damping
        change[np.arange(len(rows)), others.argmin(axis=1)] -= change.sum(axis=1)
        changing = changing + change
        if np.abs(change).max() * int(damping.max()) <= enough:
            break
    share[rows] = changing
    shares[active] = share
    return shares


def _loads(sender: NDArray[np.int64], share: NDArray[np.int64], num_senders: int) -> NDArray[np.int64]:
    """(senders + 1,): float64 adds integers of this size exactly."""
    of_all = np.where(sender >= 0, sender, num_senders).ravel()
    total: NDArray[np.int64] = np.bincount(of_all, share.ravel(), num_senders + 1).astype(np.int64)
    return total


def _filled(load: NDArray[np.int64], amount: NDArray[np.int64]) -> NDArray[np.int64]:
    """(groups, options) what flows into vessels filled to `load` until all that got any are equally high.

    What does not divide goes to the lowest.
    """
    ordered = np.sort(load, axis=1)
    num = np.arange(1, load.shape[1] + 1)
    levels = (np.cumsum(ordered, axis=1) + amount[:, None]) // num
    used = np.maximum((levels >= ordered).sum(axis=1), 1)
    level = levels[np.arange(len(load)), used - 1]
    into: NDArray[np.int64] = np.maximum(level[:, None] - load, 0)
    into[np.arange(len(load)), load.argmin(axis=1)] += amount - into.sum(axis=1)
    return into
