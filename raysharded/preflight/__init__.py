"""Tests of a custom trainer before it is run: `raysharded check`, `ElasticTrainer.check`.

The trainer's model, inputs and numbers are compared between processes, between numbers of workers, and with a run that
loses a worker. No files remain, and no Ray is needed.
"""

from __future__ import annotations

from raysharded.preflight.checks import check
from raysharded.preflight.requirements import Needs
from raysharded.preflight.results import Check, Report

__all__ = ["Check", "Needs", "Report", "check"]
