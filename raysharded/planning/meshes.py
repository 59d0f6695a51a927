"""The meshes of a number of workers, and the number of rounds of their groups. Pure."""

from __future__ import annotations

from raysharded.actors.numerics.microbatch_schedule import Schedule
from raysharded.display.quantities import count
from raysharded.errors import ConfigError
from raysharded.layout import Mesh


def mesh_of(replicas: int, shards: int, tensor: int) -> Mesh:
    """A mesh whose mirrors are in another tensor parallel group, if there is one."""
    return Mesh(replicas=replicas, shards=shards, tensor=tensor, apart=tensor if shards > tensor else 1)


def rounds_per_step(mesh: Mesh, num_microbatches: int) -> int:
    """Rounds of forward and backward of the group that has most."""
    schedule = Schedule(mode="sharded", num_microbatches=num_microbatches, mesh=mesh.data)
    return schedule.num_rounds(mesh.replicas - 1)  # blocks are balanced, so the last one is among the longest


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
