from __future__ import annotations

import os

import pytest
import ray

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


@ray.remote
def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


def test_a_worker_of_a_ray_that_we_start_has_the_priority_of_who_started_it() -> None:
    assert ray.get(niceness.remote()) == os.getpriority(os.PRIO_PROCESS, 0)
    assert "RAY_worker_niceness" not in os.environ, "nor is it left to processes that have nothing to do with this Ray"
