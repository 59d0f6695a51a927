"""Faults and workers for tests, ours and yours."""

from raysharded.testing.chaos import Chaos
from raysharded.testing.faults import Fault, FaultPlan

__all__ = ["Chaos", "Fault", "FaultPlan"]
