"""Segments of a journal with a signature, each of which follows the signed segment before it. Pure.

A signed segment begins with `{"hmac":"` and 64 digits: an HMAC-SHA256 of all bytes from byte 73 on. The rest of the
first line is a segment's head with two more fields. `place` is the run's name and the segment's storage key, and
`after` the signature of the signed segment before; it is empty in the first one of a run. The head of a signed segment
that begins to sign a journal has `unsigned` in place of `after`: the number of an older segment, and the digest of all
segments up to that one, which count from then on as they are.

Law: of the segments between two signed ones that count, none can be left out, replaced, moved or brought from another
run without being detected.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import orjson
from blake3 import blake3

from raysharded.checkpoint import SigningKey
from raysharded.checkpoint.format.signing import place_of
from raysharded.errors import RefusedCheckpoint
from raysharded.locations import join_url

T = TypeVar("T")
_HEAD = b'{"hmac":"'
_HEAD_END = len(_HEAD) + 64
ACCEPT = (
    "To continue the run as it is, give RunConfig(accept_unsigned=True), or `raysharded run --accept-unsigned`, once."
)
"""The remedy for a user who trusts a run that the key did not sign."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Predecessor of the next signed segment of a journal."""

    after: str = ""
    """Signature of the newest signed segment; empty if there is none."""
    unsigned: tuple[int, str] | None = None
    """Number of the newest segment and digest of all, if they are to count although they are not signed."""

    def fields(self) -> dict[str, Any]:
        """The link as fields of a segment's head."""
        return {"after": self.after} if self.unsigned is None else {"unsigned": list(self.unsigned)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked(Generic[T]):
    """A journal whose signatures were checked."""

    segments: Sequence[tuple[str, T]]
    """The kept values of the segments that count, each with its storage key, in order."""
    link: Link
    """Predecessor of the next signed segment."""
    is_unsigned: bool = False
    """Whether the segments count although the key signed none of them, and nobody has accepted that."""
    ignored: Sequence[str] = ()
    """Keys of segments with entries that no holder of the key wrote."""


def encode_signed(head: dict[str, Any], lines: Iterable[str], key: SigningKey, place: str, link: Link) -> bytes:
    """A segment's bytes. `head`: the fields of an unsigned one."""
    whole = json.dumps({**head, "place": place, **link.fields()}, separators=(",", ":"))
    rest = b'",' + "\n".join([whole[1:], *lines, ""]).encode()
    return _HEAD + key.sign(rest).encode("ascii") + rest


def link_after(segment: bytes) -> Link:
    """The link to this signed segment."""
    return Link(after=segment[len(_HEAD) : _HEAD_END].decode("ascii", "replace"))


def is_signed(segment: bytes) -> bool:
    """Whether a segment has a signature, by any key."""
    return segment.startswith(_HEAD)


def head_of(segment: bytes, key: SigningKey, place: str) -> dict[str, Any] | None:
    """The head of a segment that the key signed for this place; None for any other."""
    rest = memoryview(segment)[_HEAD_END:]  # not a copy
    if not is_signed(segment) or not key.verifies(segment[len(_HEAD) : _HEAD_END], rest):
        return None
    head: dict[str, Any] = orjson.loads(segment[: segment.index(b"\n")])
    return head if head.get("place") == place else None


@dataclass(kw_only=True, slots=True)
class Chain(Generic[T]):
    """The segments of the run at `url`, added in order, as far as they count. Of each it keeps what it is given."""

    key: SigningKey
    url: str
    _segments: list[tuple[str, T]] = field(default_factory=list)
    _counts: list[bool] = field(default_factory=list)
    """Whether each segment counts, as far as is known."""
    _have_entries: list[bool] = field(default_factory=list)
    _digests: dict[int, str] = field(default_factory=dict)
    """Number of a segment -> digest of all up to it."""
    _hash: Any = field(default_factory=blake3)
    _last: str = ""
    """Signature of the newest signed segment."""
    _foreign: str = ""
    """The first segment with any signature."""
    _problem: str = ""
    """The first place where the chain is broken."""

    def add(self, at: str, data: bytes, keep: Callable[[bool], T]) -> None:
        """Add the next segment, of which `keep` of whether the key signed it stays."""
        head = head_of(data, self.key, place_of(self.url, at))
        self._segments.append((at, keep(head is not None)))
        self._have_entries.append(data.find(b"\n", data.find(b"\n") + 1) >= 0)
        self._hash.update(f"{at}\n{len(data)}\n".encode())
        self._hash.update(data)
        self._digests[_number(at)] = self._hash.hexdigest()
        if is_signed(data):
            self._foreign = self._foreign or at
        self._counts.append(head is not None)
        if head is None:
            return
        if "unsigned" in head:
            self._accept(at, head["unsigned"])
        elif head.get("after") != self._last:
            self._break(at)
        self._last = link_after(data).after

    def _accept(self, at: str, stated: Any) -> None:
        """Let all segments count up to the one that a signed segment states."""
        number, digest = stated
        if self._digests.get(number) != digest:
            self._break(at)
            return
        self._problem = ""
        self._counts = [_number(key) <= number or key == at for key, _ in self._segments]

    def _break(self, at: str) -> None:
        self._problem = self._problem or (
            f"{join_url(self.url, at)} is signed, and the segments before it are not those that it follows: some were "
            "removed or replaced after they were written. Restore the run's folder journal/ from a copy."
        )

    def all(self) -> Checked[T]:
        """All segments as they are, accepted unless they count anyway. The next signed segment states that."""
        if self._last and not self._problem and not self._ignored():
            return self.checked()
        newest = self._segments[-1][0] if self._segments else ""
        link = Link(unsigned=(_number(newest), self._hash.hexdigest())) if newest else Link()
        return Checked(segments=tuple(self._segments), link=link)

    def checked(self) -> Checked[T]:
        """The segments that count.

        Raises RefusedCheckpoint if a signed segment does not follow the one before, or if all signatures are of another
        key.
        """
        if self._problem:
            raise RefusedCheckpoint(f"{self._problem} {ACCEPT}")
        if self._last or not self._segments:
            counting = [segment for segment, counts in zip(self._segments, self._counts, strict=True) if counts]
            return Checked(segments=counting, link=Link(after=self._last), ignored=self._ignored())
        if self._foreign:
            raise RefusedCheckpoint(
                f"{join_url(self.url, self._foreign)} is signed with another key than the one given, or elsewhere, and "
                "no segment of the journal with this one: it is refused. Give the key that its writers had. "
                f"{ACCEPT}"
            )
        link = Link(unsigned=(_number(self._segments[-1][0]), self._hash.hexdigest()))
        return Checked(segments=tuple(self._segments), link=link, is_unsigned=True)

    def _ignored(self) -> list[str]:
        each = zip(self._segments, self._counts, self._have_entries, strict=True)
        return [at for (at, _), counts, has_entries in each if not counts and has_entries]


def _number(at: str) -> int:
    return int(at.rpartition("/")[2].partition(".")[0])
