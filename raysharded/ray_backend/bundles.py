"""Workers in the bundles of a placement group: of the one that this process is in, if it captures children. Knows Ray.

Ray Tune gives every trial such a group: the trial has one bundle, and what it starts belongs into the others. At the
trial's end Ray Tune removes the group, and Ray ends the actors in it. The bundles are fixed: the run has as many
workers as fit there.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

import ray
from ray._private import state as ray_state
from ray.util.placement_group import PlacementGroup, get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raysharded.config import ScalingConfig
from raysharded.display.quantities import count
from raysharded.errors import ClusterError
from raysharded.ids import WorkerId
from raysharded.ray_backend.capacity import needs_of, refuse_the_impossible, warn_of_too_few
from raysharded.ray_backend.placement import Placing

_log = logging.getLogger("raysharded.driver")


class Bundles:
    """The bundles of a group as places for workers, with the methods of `raysharded.ray_backend.placement.Placing`.

    Ray chooses the bundle: the group's own strategy has decided on which nodes they are.
    """

    where = "the placement group of this process"

    def __init__(self, group: PlacementGroup, needs: Mapping[str, float]) -> None:
        """`needs`: resource -> amount of one worker."""
        self._group, self._needs = group, needs
        self._specs: list[dict[str, float]] = [dict(one) for one in group.bundle_specs]

    def strategy(self, worker: WorkerId, there: Mapping[WorkerId, str], unfit: Collection[str]) -> Any:
        """Ray's `scheduling_strategy`, the same for every worker."""
        return PlacementGroupSchedulingStrategy(self._group)

    def forget(self, worker: WorkerId) -> None:
        """Do nothing: Ray alone knows the worker's bundle."""

    def room(self) -> dict[str, int]:
        """Node id -> number of further workers that fit into the node's bundles now."""
        return {
            node: sum(
                self._fits({name: have.get(self._name(name, at), 0.0) for name in spec}) for at, spec in self._each
            )
            for node, have in ray_state.available_resources_per_node().items()
        }

    def resources(self) -> tuple[dict[str, float], dict[str, float]]:
        """(the group's resources, those that are free now)."""
        free = ray.available_resources()
        have = {name: sum(spec.get(name, 0.0) for spec in self._specs) for name in self._needs}
        return have, {name: free.get(self._name(name), 0.0) for name in self._needs}

    def limit(self) -> int:
        """Number of workers that fit beside this process, if nobody else uses the group."""
        return sum(
            self._fits({name: amount - self._own(name, at) for name, amount in spec.items()}) for at, spec in self._each
        )

    def refuse_the_impossible(self, scaling: ScalingConfig) -> None:
        """Raise ClusterError if the group is too small for the minimum of workers; warn of less than the maximum."""
        limit, needs = self.limit(), " and ".join(f"{amount:g} {name}" for name, amount in self._needs.items())
        if limit < scaling.min_workers:
            example = ", ".join(f'"{name}": {amount:g}' for name, amount in self._needs.items())
            workers = count(scaling.min_workers, "worker")
            raise ClusterError(
                f"the run needs at least {workers} with {needs} each. This process is in a placement group that "
                f"captures its children, {self}: it is enough for {limit} beside this process. Give the group a bundle "
                f"for each worker; with Ray Tune: tune.PlacementGroupFactory([the trial's bundle] + [{{{example}}}] * "
                f"{scaling.min_workers}). Or call start() in place of fit(): its workers are outside of the group."
            )
        if limit < scaling.max_workers:
            _log.warning(
                "the run has at most %d of %s: its workers are in the placement group of this process (%s), which does "
                "not grow with the cluster.",
                limit,
                count(scaling.max_workers, "worker"),
                self,
            )

    def __str__(self) -> str:
        specs = (" and ".join(f"{amount:g} {name}" for name, amount in spec.items()) for spec in self._specs)
        return f"{count(len(self._specs), 'bundle')}: {', '.join(specs)}"

    @property
    def _each(self) -> list[tuple[int, dict[str, float]]]:
        return list(enumerate(self._specs))

    def _name(self, resource: str, at: int | None = None) -> str:
        """Ray's name of a resource in the whole group, or in a bundle."""
        return f"{resource}_group_{'' if at is None else f'{at}_'}{self._group.id.hex()}"

    def _fits(self, have: Mapping[str, float]) -> int:
        """Number of workers for which these resources of one bundle are enough."""
        return min(
            (int(max(0.0, have.get(name, 0.0)) / amount + 1e-9) for name, amount in self._needs.items()), default=0
        )

    def _own(self, resource: str, at: int) -> float:
        """Amount that this process holds in a bundle. Ray lends the CPUs of a task that waits to its children."""
        context = ray.get_runtime_context()
        if resource == "CPU" and context.get_actor_id() is None:
            return 0.0
        held: Mapping[str, list[tuple[int, float]]] = context.worker.core_worker.resource_ids()
        return sum(amount for _, amount in held.get(self._name(resource, at), []))


def captured(needs: Mapping[str, float]) -> Bundles | None:
    """The bundles in which Ray would place what this process starts; None without a group that captures its children.

    `needs`: resource -> amount of one worker. In a task, Ray knows that in the thread that runs it alone.
    """
    worker: Any = ray._private.worker.global_worker
    group = get_current_placement_group() if worker.should_capture_child_tasks_in_placement_group else None
    return None if group is None else Bundles(group, needs)


def places(scaling: ScalingConfig, *, owns_cluster: bool) -> Placing | Bundles:
    """The places of a run's workers: the bundles that capture them, or else all nodes.

    Raises ClusterError if the minimum of workers does not fit there, and nothing can be added: in bundles, and on a
    cluster that was started here. Elsewhere that is a warning.
    """
    needs = needs_of(scaling)
    bundles = captured(needs)
    if bundles is not None:
        bundles.refuse_the_impossible(scaling)
        return bundles
    (refuse_the_impossible if owns_cluster else warn_of_too_few)(scaling)
    return Placing(scaling.shard_group_size or scaling.tensor_parallel_degree, needs)
