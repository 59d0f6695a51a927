"""Merging of all ranks' trees into one, which the manifest keeps. Pure.

Ranks may have different keys, like the stages of a pipeline. Where several ranks have a key, their values must be
equal: no rank takes precedence. One list is merged by rule: the names of a parameter group in an optimizer's state,
`param_groups[N]["params"]`, of which each stage has its part.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence

from raysharded.checkpoint.format.manifest import shown
from raysharded.checkpoint.state_dict.tree import Key, Path, Tree, unflatten, where
from raysharded.errors import CheckpointError

_MAX_RANKS = 16
_MAX_THINGS = 4


def require_same(what: str, given: Sequence[object]) -> None:
    """Raise CheckpointError unless all ranks gave the same value. `what` names it in the error, such as "uris".

    `given` has each rank's value. Values are shown in full: of two long paths only the end may differ.
    """
    if any(one != given[0] for one in given):
        raise CheckpointError(
            f"the ranks give different {what}: {by_rank((rank, str(one)) for rank, one in enumerate(given))}. Every "
            "rank must make the same calls, with the same arguments."
        )


def by_rank(given: Iterable[tuple[int, str]]) -> str:
    """Text for pairs (rank, value), lowest rank first: "3 on ranks 0, 2 and [4] on rank 1"."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, what in given:
        ranks[what].append(rank)
    if len(ranks) == 1:  # they differ beyond what is shown of them
        return " and ".join(f"{what}, different on each, on {_some(own)}" for what, own in ranks.items())
    said = [f"{what} on {_some(own)}" for what, own in ranks.items()]
    more = f" and {len(said) - _MAX_THINGS} other things elsewhere" if len(said) > _MAX_THINGS else ""
    return " and ".join(said[:_MAX_THINGS]) + more


def listed(ranks: Sequence[int]) -> str:
    """Ranks as text, such as "0, 1, 2 and 5 more"."""
    told = ", ".join(map(str, ranks[:_MAX_RANKS]))
    return told if len(ranks) <= _MAX_RANKS else f"{told} and {len(ranks) - _MAX_RANKS} more"


def _some(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed(ranks)}"


_MAX_PLACES = 8
"""Maximum number of differences that one error spells out."""

_Given = Sequence[tuple[int, Tree]]
"""Trees of some ranks at one path: (rank, tree), lowest rank first."""


def merge(trees: Sequence[Tree]) -> Tree:
    """One tree with everything that any rank has. `trees` has each rank's tree.

    Values are equal if Python's == considers them so; the lowest rank's is kept. Raises CheckpointError with the places
    where ranks differ, their values there, and the ranks.
    """
    differences: list[tuple[Path, _Given]] = []
    whole = _merged(list(enumerate(trees)), (), differences)
    if differences:
        told = "; ".join(_told(path, given) for path, given in differences[:_MAX_PLACES])
        more = f"; and {len(differences) - _MAX_PLACES} more places" if len(differences) > _MAX_PLACES else ""
        key = differences[0][0][-1] if differences[0][0] else "part"
        raise CheckpointError(
            f"the states of the ranks differ: {told}{more}. Give each rank's value its own key, as "
            f'{{f"{key}.{{rank}}": ...}}, and everything else equal on every rank.'
        )
    return whole


def _merged(given: _Given, path: Path, differences: list[tuple[Path, _Given]]) -> Tree:
    (_, first), *others = given
    if all(tree == first for _, tree in others):
        return first
    kinds = {kind for _, tree in given for kind in tree}
    if kinds == {"dict"}:
        below: dict[Key, list[tuple[int, Tree]]] = defaultdict(list)
        for rank, tree in given:
            for key, child in tree["dict"]:
                below[key].append((rank, child))
        return {"dict": [[key, _merged(some, (*path, key), differences)] for key, some in below.items()]}
    if kinds in ({"list"}, {"tuple"}):
        (kind,) = kinds
        columns = [tree[kind] for _, tree in given]
        if _are_parameter_names(path, columns):
            return {kind: list({item["value"]: item for item in itertools.chain(*columns)}.values())}
        if len({len(column) for column in columns}) == 1:
            ranks = [rank for rank, _ in given]
            rows = [list(zip(ranks, row, strict=True)) for row in zip(*columns, strict=True)]
            return {kind: [_merged(row, (*path, at), differences) for at, row in enumerate(rows)]}
    differences.append((path, given))
    return first


def _are_parameter_names(path: Path, columns: Iterable[Sequence[Tree]]) -> bool:
    """Whether these are the names of a parameter group, without duplicates on any rank."""
    if len(path) < 3 or (path[-3], path[-1]) != ("param_groups", "params") or type(path[-2]) is not int:
        return False
    names = [[item.get("value") for item in column] for column in columns]
    return all(type(name) is str for own in names for name in own) and all(len(set(own)) == len(own) for own in names)


def _told(path: Path, given: _Given) -> str:
    return f"{where(path)} is {by_rank((rank, _described(tree)) for rank, tree in given)}"


def _described(tree: Tree) -> str:
    (kind,) = tree
    if kind == "tensor":
        return "a tensor"
    if kind == "dict":
        return f"a dict of {len(tree[kind])}"
    return shown(unflatten(tree, lambda _: "(a tensor)"))
