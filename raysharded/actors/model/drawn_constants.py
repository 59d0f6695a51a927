"""Constants that a constructor drew: the whole run keeps those of the build that gave the first weights.

A build without memory draws other numbers than a whole one, as its parameters draw nothing. A generator without a seed
never draws the same twice. So the start of a run compares its two builds: constants that differ between them become
part of the state.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from raysharded.actors.model.constants import Constants, check_movable, constants_of, differing
from raysharded.actors.model.construction import construct
from raysharded.actors.model.init_weights import FirstBuild
from raysharded.actors.model.inventory import Inventory
from raysharded.errors import InexactError
from raysharded.task import Task


def drawn_first(task: Task, first: FirstBuild, here: Inventory, seed: int) -> dict[str, torch.Tensor]:
    """Path -> value of the constants of a run's first build that differ in this worker's.

    Raises TaskError for constants that cannot be handed on. `seed`: the seed of the run's constructors.
    """
    found = differing(constants_of(first.model, with_numbers=here.drew), here.constants)
    found = _without_counters(task, found, here.constants, seed)
    check_movable(task, found, here.constants)
    return found


def refuse_drawn(task: Task, here: Inventory, seed: int, step: int, carried: Collection[str]) -> None:
    """Raise InexactError if the constructor draws constants that are not `carried` by the state.

    For a run that began before drawn constants were part of the state.
    """
    again = construct(task, seed + 1)
    found = differing(constants_of(again.model, with_numbers=again.drew or here.drew), here.constants)
    found = _without_counters(task, found, here.constants, seed)
    found = {path: value for path, value in found.items() if path not in carried}
    if found:
        raise InexactError(
            f"{type(task).__name__}.build_model draws {min(found)!r}, and the checkpoint of step {step} does not have "
            "the drawn value: it was written by a version of raysharded in which every build drew anew. The run would "
            "continue with other numbers there. Accept this, which the run's report then states, with "
            "RunConfig(accept_arithmetic=True) or `raysharded run --accept-arithmetic`; or start a run with another "
            "name."
        )


def _without_counters(
    task: Task, found: Mapping[str, torch.Tensor], here: Constants, seed: int
) -> dict[str, torch.Tensor]:
    """Drop numbers that differ between builds with the same seed: they are counters, or not constants."""
    numbers = _numbers(found, here)
    if numbers:
        again = differing(constants_of(construct(task, seed).model, with_numbers=True), here)
        numbers &= again.keys()
    return {path: value for path, value in found.items() if path not in numbers}


def _numbers(paths: Collection[str], here: Constants) -> set[str]:
    return {path for path in paths if here[path].is_number}
