"""Driver actors that Ray restarts, which a run's storage does not show."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from raysharded.errors import ClusterError

if TYPE_CHECKING:
    from raysharded.report.overview import RunOverview


def with_restart(run: RunOverview) -> RunOverview:
    """The overview, with the state `restarting` if Ray restarts the run's driver actor.

    Queries the Ray cluster that is found, and only if the run lost such a driver; otherwise it loads no Ray.
    """
    if not run.lost_actor:
        return run
    from raysharded.ray_backend import cluster
    from raysharded.ray_backend.driver_actors import host_name, host_of

    try:
        if not cluster.find_cluster(log_to_driver=False) or host_of(host_name(run.name, run.url)) is None:
            return run
    except ClusterError:
        return run
    return replace(run, state="restarting", lost_actor=False)
