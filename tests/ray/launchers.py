"""A launcher without a driver: for tests of the launcher itself."""

from __future__ import annotations

import raysharded as rs
from raysharded.protocol.job import Job
from raysharded.protocol.session import DriverSession
from raysharded.protocol.worker_launcher import LeadershipCheck
from raysharded.ray_backend.ray_launcher import RayLauncher

TERMS = DriverSession(
    driver="driver",
    epoch=1,
    run_name="engine",
    global_batch_size=16,
    metadata={},
    signed=False,
    lease_s=300.0,
    orphan_wait_s=1.0,
)


class Owner:
    """A driver's hold on a run that nobody else wants."""

    def is_sure(self) -> bool:
        return True

    def may_act(self) -> bool:
        return True


def make_launcher(job: Job, leadership: LeadershipCheck | None = None) -> RayLauncher:
    """The launcher of a driver that owns the run."""
    launcher = RayLauncher(job, rs.ScalingConfig(num_workers=1), owns_cluster=False)
    launcher.enter(TERMS, leadership or Owner())
    return launcher
