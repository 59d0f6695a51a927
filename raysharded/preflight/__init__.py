"""A trainer of one's own, tried before it is run: `raysharded check`, `ElasticTrainer.check`.

What it builds, what it is told and what it computes is compared between processes, between numbers of workers, and
with a run that loses a worker. Nothing is left behind, and no Ray is needed.
"""

from __future__ import annotations

from raysharded.preflight.checks import check
from raysharded.preflight.requirements import Needs
from raysharded.preflight.results import Check, Report

__all__ = ["Check", "Needs", "Report", "check"]
