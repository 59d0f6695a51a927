"""What holds for every test."""

from __future__ import annotations

import os

from hypothesis import settings

# Several ranks share a few cores, and bits are compared between runs: one thread each, set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")
