"""What each rank gave, in words; and that all must give the same. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from raysharded.errors import CheckpointError

_MAX_RANKS = 16
_MAX_THINGS = 4


def require_same(what: str, given: Sequence[object]) -> None:
    """Raises CheckpointError unless all ranks gave the same; `given` has each rank's, and `what` says what, as "uri".

    What is given is told whole: of two long paths the end may be what differs.
    """
    if any(one != given[0] for one in given):
        raise CheckpointError(
            f"the ranks give different {what}: {by_rank((rank, str(one)) for rank, one in enumerate(given))}. Every "
            "rank must make the same calls, with the same arguments."
        )


def by_rank(given: Iterable[tuple[int, str]]) -> str:
    """Of (rank, what it gave), lowest rank first: "3 on ranks 0, 2 and [4] on rank 1"."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, what in given:
        ranks[what].append(rank)
    if len(ranks) == 1:  # they differ beyond what is shown of them
        return " and ".join(f"{what}, another one on each, on {_some(own)}" for what, own in ranks.items())
    said = [f"{what} on {_some(own)}" for what, own in ranks.items()]
    more = f" and {len(said) - _MAX_THINGS} other things elsewhere" if len(said) > _MAX_THINGS else ""
    return " and ".join(said[:_MAX_THINGS]) + more


def listed(ranks: Sequence[int]) -> str:
    """As "0, 1, 2 and 5 more"."""
    told = ", ".join(map(str, ranks[:_MAX_RANKS]))
    return told if len(ranks) <= _MAX_RANKS else f"{told} and {len(ranks) - _MAX_RANKS} more"


def _some(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed(ranks)}"
