"""Version number of the protocol between a driver, its workers and handles. Plain data: no class of raysharded.

To change a message, a call or its arguments, raise `PROTOCOL` (tests/golden/protocol.txt lists them all). Drivers and
workers with the same number work together, also across versions; otherwise they leave each other alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raysharded import __version__

PROTOCOL = 2
FIRST = 1
"""Protocol of raysharded 0.1, whose workers and drivers cannot be queried for it."""
ASK = "hello"
"""Method of workers that answers with a `greeting`."""


def greeting() -> dict[str, Any]:
    """Answer to `hello`: `protocol`, and the version of raysharded in words. Later versions may extend it."""
    return {"protocol": PROTOCOL, "raysharded": __version__}


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherVersion:
    """A worker or a driver of another protocol."""

    protocol: int
    raysharded: str
    """Version of raysharded; empty if it cannot be queried."""

    def __str__(self) -> str:
        version = f"raysharded {self.raysharded}" if self.raysharded else "raysharded 0.1"
        return f"{version} (protocol {self.protocol}; this is {__version__}, protocol {PROTOCOL})"


def other_version(answer: Mapping[str, Any] | None) -> OtherVersion | None:
    """The version that gave this answer to `hello`, if its protocol differs. An answer None means: no such method."""
    if answer is None:
        return OtherVersion(protocol=FIRST, raysharded="")
    protocol = int(answer["protocol"])
    if protocol == PROTOCOL:
        return None
    return OtherVersion(protocol=protocol, raysharded=str(answer.get("raysharded", "")))
