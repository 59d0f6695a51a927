"""The mesh of a generation: shard groups, each of which holds the whole state, cut over its workers."""

from __future__ import annotations

from dataclasses import dataclass

from raysharded.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """`replicas` shard groups of `shards` workers. Ranks go group by group: rank `r` is shard `r % shards` of replica
    `r // shards`. One replica is flat sharding. Raises ConfigError unless both are 1 or more.
    """

    replicas: int = 1
    shards: int

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.shards < 1:
            raise ConfigError(f"Mesh(replicas={self.replicas}, shards={self.shards}): both must be 1 or more.")

    @property
    def world_size(self) -> int:
        """The number of workers."""
        return self.replicas * self.shards

    def replica_of(self, rank: int) -> int:
        """The shard group that a rank is in."""
        return rank // self.shards

    def shard_of(self, rank: int) -> int:
        """Which of its group's shards a rank holds."""
        return rank % self.shards

    def group(self, replica: int) -> range:
        """The ranks of one shard group, by shard."""
        return range(replica * self.shards, (replica + 1) * self.shards)

    def holders(self, shard: int) -> range:
        """The ranks that hold one shard, by replica."""
        return range(shard, self.world_size, self.shards)

    def __str__(self) -> str:
        return f"{self.replicas}x{self.shards}"
