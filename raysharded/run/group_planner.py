"""The groups that a run's workers form: as configured, or planned from a worker's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raysharded.config import ScalingConfig
    from raysharded.driver.state.mesh_choice import Grouping
    from raysharded.planning.memory.footprint import Setting
    from raysharded.run.spec import RunSpec


class GroupPlanner:
    """Plans the groups of one run. Keeps its measurements of the task: each takes seconds."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._measured: dict[int, Setting] = {}
        """Tensor parallel degree -> the task as planned with that degree."""

    def grouping(self, scaling: ScalingConfig | None = None) -> Grouping | None:
        """Sizes of shard groups and tensor parallel groups; None for one flat group.

        `scaling`: the configuration (None: the run's). The state fits on a group's number of workers, and on the run's
        minimum. It is not spread over fewer than the smaller of these two numbers.
        """
        from raysharded.driver.state.mesh_choice import Grouping

        scaling = scaling or self._spec.scaling
        shards, tensor = scaling.shard_group_size, scaling.tensor_parallel_degree
        if shards is None and tensor == 1:
            return None
        grouping = Grouping(
            shards=shards,
            tensor=tensor,
            least_shards=scaling.min_workers if shards is None else min(shards, scaling.min_workers),
            least_workers=scaling.min_workers,
            num_microbatches=self._spec.batch.num_microbatches,
        )
        if scaling.memory_per_worker is None or shards is None:
            return grouping
        from raysharded.planning.search import with_plan

        return with_plan(grouping, self._setting(tensor), scaling)

    def check_memory(self) -> None:
        """Raise ConfigError if no mesh that the run may begin in fits `ScalingConfig.memory_per_worker`."""
        scaling = self._spec.scaling
        if scaling.memory_per_worker is None:
            return
        from raysharded.planning.search import refuse_what_fits_nowhere

        shards = scaling.shard_group_size
        least = None if shards is None else min(shards, scaling.min_workers)
        refuse_what_fits_nowhere(self._setting(scaling.tensor_parallel_degree), scaling, least)

    def _setting(self, degree: int) -> Setting:
        """The task as planned with a tensor parallel degree."""
        if degree not in self._measured:
            from raysharded.planning.plans import setting_of_task

            spec = self._spec
            self._measured[degree] = setting_of_task(
                spec.task,
                spec.data,
                spec.batch,
                spec.engine,
                on_gpu=spec.scaling.use_gpu,
                checkpoints=spec.run.checkpoint.writes_meanwhile,
                degree=degree,
            )
        return self._measured[degree]
