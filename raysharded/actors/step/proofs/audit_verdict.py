"""Pure decisions about who computed wrong numbers, from several workers' results for the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

Times = Sequence[tuple[int, int]]
"""(rank, digest) of each computation of one thing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """Result of a comparison."""

    culprits: frozenset[int] = frozenset()
    """Ranks that are to blame; if two disagree and each repeats its result, both."""
    microbatches: tuple[int, ...] = ()
    """Microbatches whose results differ."""
    involved: frozenset[int] = frozenset()
    """All ranks that computed one of these microbatches."""
    inconsistent: frozenset[int] = frozenset()
    """Ranks that got two different results for one microbatch."""


def differing(times: Mapping[int, Times]) -> tuple[int, ...]:
    """Microbatches whose results are not all equal."""
    return tuple(sorted(index for index, of_it in times.items() if len({digest for _, digest in of_it}) > 1))


def judge(times: Mapping[int, Times]) -> Judgement:
    """Ranks to blame, from all results of all microbatches.

    A rank that gets two different results is to blame. Otherwise ranks that most others contradict are. Without a
    majority all that disagree are, unless one of them is to blame anyway.
    """
    wrong = differing(times)
    inconsistent: set[int] = set()
    outvoted: set[int] = set()
    undecided: list[frozenset[int]] = []
    for index in wrong:
        of_rank: dict[int, set[int]] = {}
        for rank, digest in times[index]:
            of_rank.setdefault(rank, set()).add(digest)
        here = {rank for rank, digests in of_rank.items() if len(digests) > 1}
        inconsistent |= here
        if not here:
            minority = _minority({rank: next(iter(digests)) for rank, digests in of_rank.items()})
            outvoted |= minority or set()
            undecided += [frozenset(of_rank)] if minority is None else []
    culprits = inconsistent | outvoted
    for ranks in undecided:
        if not ranks & culprits:
            culprits = culprits | ranks
    return Judgement(
        culprits=frozenset(culprits),
        microbatches=wrong,
        involved=frozenset(rank for index in wrong for rank, _ in times[index]),
        inconsistent=frozenset(inconsistent),
    )


def judge_newcomers(times: Mapping[int, Times], newcomers: Collection[int]) -> Judgement:
    """Judge like `judge`, but presume that ranks which have computed nothing before are wrong.

    A newcomer that an older rank contradicts is to blame, even if all others are newcomers, too: they may be of one new
    kind. If the older ranks contradict each other, or themselves, or do not exist, `judge` decides.
    """
    judgement = judge(times)
    old = {index: [(rank, digest) for rank, digest in of_it if rank not in newcomers] for index, of_it in times.items()}
    if differing(old) or not any(old.values()):
        return judgement
    right = {index: of_it[0][1] for index, of_it in old.items() if of_it}
    contradicted = {
        rank for index, digest in right.items() for rank, own in times[index] if rank in newcomers and own != digest
    }
    among_newcomers = judge({index: of_it for index, of_it in times.items() if index not in right})
    culprits = contradicted | judgement.inconsistent
    undecided = among_newcomers.culprits if not among_newcomers.involved & culprits else frozenset()
    return replace(judgement, culprits=frozenset(culprits | undecided))


def _minority(digest_of: Mapping[int, int]) -> set[int] | None:
    """Ranks without the most frequent result; None if no result has more votes than every other."""
    (digest, votes), *others = Counter(digest_of.values()).most_common()
    if others and others[0][1] == votes:
        return None
    return {rank for rank, own in digest_of.items() if own != digest}


def wrong_copies(copies: Mapping[int, Mapping[int, int]]) -> frozenset[int]:
    """Ranks whose memory holds a wrong copy. `copies`: shard -> holder of each copy -> digest.

    Every shard has two copies in each replica: on its worker's device (holder `rank`) and in its host memory (`~rank`,
    which is negative). With one replica its mirror holder has a third. Without a majority all holders are named.
    """
    culprits: set[int] = set()
    for digests in copies.values():
        if len(set(digests.values())) > 1:
            minority = _minority(digests)
            culprits |= {holder if holder >= 0 else ~holder for holder in (minority or digests.keys())}
    return frozenset(culprits)


def is_unreproducible(judgement: Judgement, ranks: Collection[int]) -> bool:
    """True if the computation is at fault, not a worker: of several workers, none gets the same twice."""
    return len(ranks) > 1 and judgement.inconsistent >= frozenset(ranks)
