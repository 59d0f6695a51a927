"""Constants that a constructor drew: those of the build that gave the first weights, for as long as the run lives.

A build without memory draws other numbers than a whole one, as its parameters draw nothing, and a generator without a
seed never draws the same twice. So the two builds that the start of a run makes are compared: what differs between them
becomes part of the state.
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
    """Those of a run's first build that are others in this worker's, by path, with their values. Raises TaskError for
    what cannot be handed on. `seed`: of the run's constructors."""
    found = differing(constants_of(first.model, with_numbers=here.drew), here.constants)
    found = _without_counters(task, found, here.constants, seed)
    check_movable(task, found, here.constants)
    return found


def refuse_drawn(task: Task, here: Inventory, seed: int, step: int, carried: Collection[str]) -> None:
    """Raise InexactError if the constructor draws what is not `carried` by the state: for a run that began before what
    is drawn was part of it."""
    again = construct(task, seed + 1)
    found = differing(constants_of(again.model, with_numbers=again.drew or here.drew), here.constants)
    found = _without_counters(task, found, here.constants, seed)
    found = {path: value for path, value in found.items() if path not in carried}
    if found:
        raise InexactError(
            f"{type(task).__name__}.build_model draws {min(found)!r}, and the checkpoint of step {step} does not have "
            "what it drew: it was written by a version of raysharded in which every build drew anew. The run would go "
            "on with other numbers there. Let it, which its report then says: RunConfig(accept_arithmetic=True), or "
            "`raysharded run --accept-arithmetic`; or begin a run of another name."
        )


def _without_counters(
    task: Task, found: Mapping[str, torch.Tensor], here: Constants, seed: int
) -> dict[str, torch.Tensor]:
    """Without numbers that are others in each build under the same seed: they count, or are no constants."""
    numbers = _numbers(found, here)
    if numbers:
        again = differing(constants_of(construct(task, seed).model, with_numbers=True), here)
        numbers &= again.keys()
    return {path: value for path, value in found.items() if path not in numbers}


def _numbers(paths: Collection[str], here: Constants) -> set[str]:
    return {path for path in paths if here[path].is_number}
