"""The meshes of a number of workers, and how many rounds their groups take. Pure."""

from __future__ import annotations

from raysharded.actors.schedule import Schedule
from raysharded.errors import ConfigError
from raysharded.layout import Mesh


def rounds_per_step(mesh: Mesh, num_microbatches: int) -> int:
    """Rounds of forward and backward of the group that has most."""
    schedule = Schedule(mode="sharded", num_microbatches=num_microbatches, mesh=mesh)
    return schedule.num_rounds(mesh.replicas - 1)  # of blocks that are as balanced as can be the last is a longest


def layouts_of(workers: int) -> list[Mesh]:
    """Every mesh of so many workers, flat first."""
    if workers < 1:
        raise ConfigError(f"workers={workers}: give 1 or more.")
    sizes = [n for n in range(1, int(workers**0.5) + 1) if workers % n == 0]
    replicas = sorted({*sizes, *(workers // n for n in sizes)})
    return [Mesh(replicas=n, shards=workers // n) for n in replicas]
