"""Identifiers of workers and generations, and seeds derived from names."""

from __future__ import annotations

import hashlib
from typing import NewType

WorkerId = NewType("WorkerId", int)
"""A worker's number, unique within the run and never reused."""

GenerationId = NewType("GenerationId", int)
"""A membership's number; it only grows within a run, also across drivers."""


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part and on their order, identical on every machine.

    >>> derive_seed(0, "dropout", 7) == derive_seed(0, "dropout", 7)
    True
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
