"""Faults and workers for tests, ours and yours."""

from raysharded.testing.faults import Fault, FaultPlan

__all__ = ["Fault", "FaultPlan"]
