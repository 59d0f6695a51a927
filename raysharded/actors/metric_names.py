"""The task's metrics by name: the same on every worker, since what is agreed on is laid out by them."""

from __future__ import annotations

from collections.abc import Callable

from raysharded.errors import TaskError
from raysharded.ids import derive_seed


class MetricNames:
    """The names of one generation, for each purpose: training, evaluation."""

    def __init__(self, task_name: str, max_over_workers: Callable[[int], int]) -> None:
        self._task_name, self._max = task_name, max_over_workers
        self._names: dict[str, tuple[str, ...]] = {}

    def of(self, purpose: str) -> tuple[str, ...] | None:
        """What was agreed on; None before that."""
        return self._names.get(purpose)

    def agree(self, purpose: str, own: tuple[str, ...]) -> None:
        """Compare this worker's names with the others', once; every worker must call it. Raises TaskError."""
        if purpose in self._names:
            return
        seed = derive_seed(*own)
        if self._max(seed) != -self._max(-seed):
            raise TaskError(
                f"{self._task_name} gave other metrics on this worker than on others (here {list(own)}); give the same "
                "names for every microbatch."
            )
        self._names[purpose] = own
