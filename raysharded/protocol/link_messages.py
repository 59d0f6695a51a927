"""Messages about the links between workers: frozen values, no torch, no Ray."""

from __future__ import annotations

from dataclasses import dataclass, field

from raysharded.ids import WorkerId


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkCheck:
    """A test of the links between workers: each connects to the others of its pairs, and answers them."""

    number: int
    pairs: tuple[tuple[WorkerId, WorkerId], ...]
    host: str
    port: int
    prefix: str
    """Prefix of the rendezvous at which they meet; `secret` as in `GenerationSpec`."""
    secret: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkReport:
    """The links of a worker that are broken."""

    number: int
    failed: tuple[WorkerId, ...]
    """Workers that came to the rendezvous, and could not be reached."""
