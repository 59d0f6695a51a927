"""The mesh of a generation: shard groups, each of which holds the whole state, cut over its workers."""

from __future__ import annotations

from dataclasses import dataclass

from raysharded.display.quantities import count
from raysharded.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """`replicas` shard groups of `shards` workers. One replica is flat sharding.

    Ranks go group by group: rank `r` is shard `r % shards` of replica `r // shards`.

    With tensor parallelism every `tensor` consecutive shards are one tensor parallel group, whose workers compute the
    same microbatches together. Shard `s` of a group is tensor rank `s % tensor` of its data shard `s // tensor`.

    Raises ConfigError unless all are 1 or more and `shards` is a multiple of `tensor`.
    """

    replicas: int = 1
    shards: int
    tensor: int = 1
    apart: int = 1
    """Distance of mirrors: shard `s` holds the mirror of shard `s - apart`."""

    def __post_init__(self) -> None:
        if min(self.replicas, self.shards, self.tensor, self.apart) < 1:
            raise ConfigError(f"{self!r}: all must be 1 or more.")
        if self.shards % self.tensor:
            raise ConfigError(f"{self!r}: the shards of a group must be a multiple of the tensor parallel degree.")

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self.replicas * self.shards

    @property
    def data(self) -> Mesh:
        """The mesh with each tensor parallel group as one rank: its ranks compute different microbatches."""
        return Mesh(replicas=self.replicas, shards=self.shards // self.tensor)

    def data_rank_of(self, rank: int) -> int:
        """Rank in `data` of a rank's tensor parallel group."""
        return rank // self.tensor

    def tensor_of(self, rank: int) -> int:
        """Position of a rank in its tensor parallel group."""
        return rank % self.tensor

    def replica_of(self, rank: int) -> int:
        """Shard group of a rank."""
        return rank // self.shards

    def shard_of(self, rank: int) -> int:
        """Shard of its group that a rank holds."""
        return rank % self.shards

    def group(self, replica: int) -> range:
        """The ranks of one shard group, by shard."""
        return range(replica * self.shards, (replica + 1) * self.shards)

    def holders(self, shard: int) -> range:
        """The ranks that hold one shard, by replica."""
        return range(shard, self.world_size, self.shards)

    def __str__(self) -> str:
        data = f"{self.replicas}x{self.shards // self.tensor}"
        return data if self.tensor == 1 else f"{data}x{self.tensor}"


def mesh_of(replicas: int, shards: int, tensor: int) -> Mesh:
    """A mesh whose mirrors are in another tensor parallel group, if there is one."""
    return Mesh(replicas=replicas, shards=shards, tensor=tensor, apart=tensor if shards > tensor else 1)


def layouts_of(workers: int, degree: int = 1) -> list[Mesh]:
    """Every mesh of this many workers with this tensor parallel degree, flat first.

    Raises ConfigError if there is none.
    """
    if workers < 1:
        raise ConfigError(f"workers={workers}: give 1 or more.")
    if degree < 1:
        raise ConfigError(f"a tensor parallel degree of {degree}: give 1 or more.")
    if workers % degree:
        few = workers // degree * degree
        raise ConfigError(
            f"{count(workers, 'worker')} {'is' if workers == 1 else 'are'} not a multiple of the tensor parallel "
            f"degree {degree}; take {f'{few} or ' if few else ''}{few + degree}."
        )
    groups = workers // degree
    sizes = [n for n in range(1, int(groups**0.5) + 1) if groups % n == 0]
    replicas = sorted({*sizes, *(groups // n for n in sizes)})
    return [mesh_of(n, workers // n, degree) for n in replicas]
