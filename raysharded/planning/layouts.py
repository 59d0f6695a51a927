"""Layouts: replicas of shard groups, and which microbatches each of them computes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from raysharded.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Layout:
    """`replicas` shard groups of `shards` workers; rank r is shard r % shards of replica r // shards."""

    replicas: int
    shards: int

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.shards < 1:
            raise ConfigError(f"layout {self}: give at least 1 replica of at least 1 shard.")

    @property
    def workers(self) -> int:
        return self.replicas * self.shards

    def __str__(self) -> str:
        return f"{self.replicas}x{self.shards}"

    def block(self, replica: int, num_microbatches: int) -> tuple[int, int]:
        """The contiguous microbatches start .. stop-1 of a replica."""
        return num_microbatches * replica // self.replicas, num_microbatches * (replica + 1) // self.replicas

    def rounds(self, num_microbatches: int) -> int:
        """Rounds of forward and backward that every worker takes part in per step."""
        largest = -(-num_microbatches // self.replicas)
        return -(-largest // self.shards)


def layouts_of(workers: int) -> list[Layout]:
    """Every layout of so many workers, flat first."""
    if workers < 1:
        raise ConfigError(f"workers={workers}: give 1 or more.")
    sizes = [n for n in range(1, int(workers**0.5) + 1) if workers % n == 0]
    replicas = sorted({*sizes, *(workers // n for n in sizes)})
    return [Layout(replicas=n, shards=workers // n) for n in replicas]
