"""The meshes of a number of workers, and how much of a step's work each of their groups has. Pure."""

from __future__ import annotations

from raysharded.actors.schedule import Schedule
from raysharded.errors import ConfigError
from raysharded.layout import Mesh


def block_of(mesh: Mesh, replica: int, num_microbatches: int) -> tuple[int, int]:
    """The contiguous microbatches start .. stop-1 of a replica."""
    return _schedule(mesh, num_microbatches).block(replica)


def rounds_per_step(mesh: Mesh, num_microbatches: int) -> int:
    """Rounds of forward and backward of the group that has most."""
    schedule = _schedule(mesh, num_microbatches)
    return max(schedule.num_rounds(replica) for replica in {0, mesh.replicas - 1})


def layouts_of(workers: int) -> list[Mesh]:
    """Every mesh of so many workers, flat first."""
    if workers < 1:
        raise ConfigError(f"workers={workers}: give 1 or more.")
    sizes = [n for n in range(1, int(workers**0.5) + 1) if workers % n == 0]
    replicas = sorted({*sizes, *(workers // n for n in sizes)})
    return [Mesh(replicas=n, shards=workers // n) for n in replicas]


def _schedule(mesh: Mesh, num_microbatches: int) -> Schedule:
    return Schedule(mode="sharded", num_microbatches=num_microbatches, mesh=mesh)
