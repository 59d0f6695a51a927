"""One small Ray for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray

from raysharded.display.raylet_output import quiet_raylet
from raysharded.ray_backend.cluster import start_local
from tests.ray.clusters import own_cluster as own_cluster
from tests.ray.leftovers import NUM_SLOTS


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A Ray with slots for 8 workers. It has the machine's address, as a cluster does that older versions reach."""
    with quiet_raylet():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "1")
            start_local(num_cpus=NUM_SLOTS)
        yield
        ray.shutdown()
