"""The demo: a small GPT loses workers while it trains, and ends with the same weights."""

from __future__ import annotations

from raysharded.demo.run import run_demo

__all__ = ["run_demo"]
