"""Faults and workers for tests, in this project and in yours."""

from raysharded.testing.chaos import Chaos, chaos_for
from raysharded.testing.faults import Fault, FaultPlan

__all__ = ["Chaos", "Fault", "FaultPlan", "chaos_for"]
