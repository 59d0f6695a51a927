"""A hold on a simulated run: the work of `raysharded.ownership.leadership.RunLeadership`, in simulated time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysharded.checkpoint import Claims
from raysharded.checkpoint.stored_claims import find_newest
from raysharded.errors import RunOwnedElsewhere, StaleGeneration
from raysharded.ids import GenerationId
from raysharded.ownership.leadership import AcquiredLease

if TYPE_CHECKING:
    from tests.driver.simulated import Cluster
    from tests.driver.simulated_driver import SimulatedDriver
    from tests.driver.simulated_workers import Worker

LEASE_S = 30.0


class SimulatedHold:
    """The hold of a driver, or of a worker that leads the last checkpoint. Others read it in place of a lease."""

    def __init__(
        self, cluster: Cluster, holder: SimulatedDriver | Worker, claims: Claims, *, ending: bool = False
    ) -> None:
        """`ending`: others wait for it instead of being refused."""
        self.cluster, self.holder, self.claims, self.ending = cluster, holder, claims, ending
        self.ended = False
        cluster.holds[claims.writer] = self

    @property
    def name(self) -> str:
        return self.claims.writer

    def acquire(self) -> AcquiredLease:
        """Follow a holder that ended, is known to be dead or has shown nothing for long."""
        cluster = self.cluster
        while True:
            _, owner = find_newest(cluster.storage)
            before = None if owner is None else cluster.holds.get(owner.writer)
            if before is not None:
                self._wait_for(before)
            cluster.pause(self.holder, cluster.delay())
            try:
                first = self.claims.own(1, owner)
            except StaleGeneration:
                continue
            cluster.owned(self)
            return AcquiredLease(first=GenerationId(first), before=owner.writer if owner else "", because="it is dead")

    def _wait_for(self, before: SimulatedHold) -> None:
        cluster = self.cluster
        seen_at = cluster.now
        while not before.ended and not cluster.is_known_to_be_dead(before.holder):
            if before.holder.awake:
                if not before.ending:
                    raise RunOwnedElsewhere(f"held by {before.name}")
                seen_at = cluster.now
            if cluster.now - seen_at > LEASE_S:
                return
            cluster.pause(self.holder, LEASE_S / 10)

    def is_sure(self) -> bool:
        return self.owns()

    def may_act(self) -> bool:
        return self.owns()

    def owns(self) -> bool:
        _, newest = find_newest(self.cluster.storage)
        return newest is None or newest.writer == self.name

    def end(self, timeout_s: float) -> None:
        self.ended = True
