"""The number of the protocol between a driver, its workers and whoever attaches to a run. Plain data: no class of ours.

Whoever changes a message, a call or its arguments raises `PROTOCOL` (tests/golden/protocol.txt has them all). Drivers
and workers with the same number work together, whatever their versions; with another number they leave each other
alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raysharded import __version__

PROTOCOL = 2
FIRST = 1
"""Of raysharded 0.1, whose workers and drivers cannot be asked for it."""
ASK = "hello"
"""The method of workers that answers with a `greeting`."""


def greeting() -> dict[str, Any]:
    """`protocol`, and the version of raysharded in words: the answer to `hello`, which later versions may extend."""
    return {"protocol": PROTOCOL, "raysharded": __version__}


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherVersion:
    """A worker or a driver of another protocol."""

    protocol: int
    raysharded: str
    """Its version; empty if it cannot be asked."""

    def __str__(self) -> str:
        version = f"raysharded {self.raysharded}" if self.raysharded else "raysharded 0.1"
        return f"{version} (protocol {self.protocol}; this is {__version__}, protocol {PROTOCOL})"


def other_version(answer: Mapping[str, Any] | None) -> OtherVersion | None:
    """Whoever gave this answer to `hello`, if it has another protocol. None: it has no such method."""
    if answer is None:
        return OtherVersion(protocol=FIRST, raysharded="")
    protocol = int(answer["protocol"])
    if protocol == PROTOCOL:
        return None
    return OtherVersion(protocol=protocol, raysharded=str(answer.get("raysharded", "")))
