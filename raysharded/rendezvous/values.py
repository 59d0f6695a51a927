"""The values of one generation in the rendezvous store, bounded. Used by the store's thread alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from raysharded.rendezvous.wire import DONE, Nonsense, pack


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Upper bounds of the store's memory and connections."""

    key_bytes: int = 1024
    value_bytes: int = 1 << 20
    keys: int = 65_536
    """Keys of one generation."""
    generation_bytes: int = 64 << 20
    """Keys and values of one generation."""
    strangers: int = 256
    """Connections that have not proven a secret yet; of more, the oldest is closed."""
    proof_s: float = 5.0
    """Time in which a connection must prove it."""
    vanished_s: float = 300.0
    """Time after which a connection is closed whose machine has vanished: nothing there acknowledges a packet."""


class Values:
    """The keys of one generation. Its members may wait for keys that do not exist yet."""

    def __init__(self, limits: Limits) -> None:
        self.members = 0
        """Connections of this generation."""
        self._limits, self._values, self._bytes = limits, dict[bytes, bytes](), 0
        self._awaited: dict[bytes, list[_Awaited]] = {}
        self._packed: tuple[list[bytes], bytes] = ([], b"")
        """The newest keys that a reply was made for, and that reply; none after a change of a value."""

    def set(self, key: bytes, value: bytes) -> None:
        """Raises Nonsense for more than the store holds, as `add` does."""
        limits, known = self._limits, self._values.get(key)
        if len(key) > limits.key_bytes or len(value) > limits.value_bytes:
            raise Nonsense(f"a key of {len(key)} bytes with a value of {len(value)}")
        grown = len(value) - len(known) if known is not None else len(key) + len(value)
        if self._bytes + grown > limits.generation_bytes or (known is None and len(self._values) >= limits.keys):
            raise Nonsense(f"more than {limits.keys} keys, or {limits.generation_bytes} bytes")
        self._values[key], self._bytes = value, self._bytes + grown
        self._packed = ([], b"")
        for awaited in self._awaited.pop(key, ()):
            awaited.missing.discard(key)
            if not awaited.missing and not awaited.future.done():
                awaited.future.set_result(None)

    def add(self, key: bytes, amount: bytes) -> bytes:
        """The sum of the key's number, 0 at first, and this one. Numbers are decimal text of 64 bits."""
        total = _number(self._values.get(key, b"0")) + _number(amount)
        self.set(key, str(total).encode())
        return self._values[key]

    def delete(self, key: bytes) -> bool:
        """True if the key existed."""
        value = self._values.pop(key, None)
        if value is None:
            return False
        self._bytes -= len(key) + len(value)
        self._packed = ([], b"")
        return True

    def have(self, keys: Iterable[bytes]) -> bool:
        return all(key in self._values for key in keys)

    def packed(self, keys: list[bytes]) -> bytes:
        """The reply with the values of these keys, which exist. Members wait for the same keys: they share one reply,
        as one each would take gigabytes for 1,000 members.
        """
        if self._packed[0] != keys or not self._packed[1]:
            self._packed = keys, pack([DONE, *(self._values[key] for key in keys)])
        return self._packed[1]

    def until_there(self, keys: Iterable[bytes]) -> asyncio.Future[None]:
        """A future that is done once each key has been set. Cancel it to wait no longer."""
        awaited = _Awaited({key for key in keys if key not in self._values})
        for key in awaited.missing:
            self._awaited.setdefault(key, []).append(awaited)
        awaited.future.add_done_callback(lambda _: self._forget(awaited))
        if not awaited.missing:
            awaited.future.set_result(None)
        return awaited.future

    def _forget(self, awaited: _Awaited) -> None:
        for key in awaited.missing:
            others = [one for one in self._awaited.get(key, ()) if one is not awaited]
            if others:
                self._awaited[key] = others
            else:
                self._awaited.pop(key, None)


class _Awaited:
    """Keys that a member waits for."""

    def __init__(self, missing: set[bytes]) -> None:
        self.missing = missing
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()


def _number(text: bytes) -> int:
    if len(text) > 20 or not text.removeprefix(b"-").isdigit():
        raise Nonsense(f"{text[:20]!r} where a number belongs")
    return int(text)
