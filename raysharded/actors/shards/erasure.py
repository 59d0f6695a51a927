"""Erasure codes over blocks of bytes: m parity blocks for k data blocks. Any k blocks give the data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from raysharded.errors import ConfigError
from raysharded.layout import Parity

Bytes = NDArray[np.uint8]
_CHUNK = 1 << 17
"""Bytes of each block that are computed at once: they fit in a core's cache, and need no fresh pages."""

_BLOCKS = 256
"""Largest number of blocks, data and parity, in a code over GF(2^8)."""


class ErasureCode(Protocol):
    """A code. Blocks are numbered: data from 0 on, parity from k on. All blocks of a call have one length."""

    def encode(self, data: Sequence[Bytes], parity: Sequence[Bytes]) -> None:
        """Compute all m parity blocks from all k blocks of data, in order."""
        ...

    def decode(self, blocks: Mapping[int, Bytes], number: int, out: Bytes) -> None:
        """Compute data block `number`, which is not among the k blocks given by their numbers."""
        ...


def erasure_code(parity: Parity) -> ErasureCode:
    """The code for these numbers of blocks. Raises ConfigError if its library is not installed."""
    if parity.m == 1:
        return _Xor()
    zfec = _zfec(parity)
    number = _differing_row(zfec, parity.k) if parity.m == 2 else None
    return _ReedSolomon(zfec, parity) if number is None else _XorAndReedSolomon(zfec, parity.k, number)


class _Xor:
    """One parity block: the exclusive or of the data blocks."""

    def encode(self, data: Sequence[Bytes], parity: Sequence[Bytes]) -> None:
        for at in _chunks(parity[0]):
            _xor([block[at] for block in data], parity[0][at])

    def decode(self, blocks: Mapping[int, Bytes], number: int, out: Bytes) -> None:
        for at in _chunks(out):
            _xor([block[at] for block in blocks.values()], out[at])


class _ReedSolomon:
    """A systematic Reed-Solomon code over GF(2^8), by zfec. It computes without the interpreter's lock.

    Source: Rizzo, "Effective Erasure Codes for Reliable Computer Communication Protocols", 1997.
    """

    def __init__(self, zfec: Any, parity: Parity) -> None:
        self._encoder: Any = zfec.Encoder(parity.k, parity.width)
        self._decoder: Any = zfec.Decoder(parity.k, parity.width)
        self._numbers = list(range(parity.k, parity.width))

    def encode(self, data: Sequence[Bytes], parity: Sequence[Bytes]) -> None:
        for at in _chunks(parity[0]):
            for block, out in zip(self._encoder.encode([d[at] for d in data], self._numbers), parity, strict=True):
                out[at] = np.frombuffer(block, np.uint8)

    def decode(self, blocks: Mapping[int, Bytes], number: int, out: Bytes) -> None:
        for at in _chunks(out):
            data = self._decoder.decode([block[at] for block in blocks.values()], list(blocks))
            out[at] = np.frombuffer(data[number], np.uint8)


class _XorAndReedSolomon:
    """Two parity blocks, as in RAID 6 (Anvin: "The Mathematics of RAID-6").

    One is the exclusive or, which costs little. The other is a block of a Reed-Solomon code by zfec whose coefficients
    all differ. Two lost data blocks are the unknowns of two equations that weigh them differently, so any k blocks give
    the data. It takes half the time of two blocks by zfec.
    """

    def __init__(self, zfec: Any, k: int, number: int) -> None:
        """`number`: number of the block in zfec's code."""
        self._k, self._number = k, number
        self._encoder: Any = zfec.Encoder(k, _BLOCKS)
        self._decoder: Any = zfec.Decoder(k, _BLOCKS)
        every = np.arange(256, dtype=np.uint8)
        zeros = np.zeros(256, np.uint8)
        self._times = [
            np.frombuffer(self._weigh([every if i == j else zeros for j in range(k)]), np.uint8) for i in range(k)
        ]
        """Products of every byte with the coefficient of each data block."""

    def encode(self, data: Sequence[Bytes], parity: Sequence[Bytes]) -> None:
        plain, weighed = parity
        for at in _chunks(plain):
            chunk = [block[at] for block in data]
            _xor(chunk, plain[at])
            weighed[at] = np.frombuffer(self._weigh(chunk), np.uint8)

    def decode(self, blocks: Mapping[int, Bytes], number: int, out: Bytes) -> None:
        for at in _chunks(out):
            out[at] = self._decoded({n: block[at] for n, block in blocks.items()}, number)

    def _decoded(self, blocks: Mapping[int, Bytes], number: int) -> Bytes:
        k = self._k
        missing = [n for n in range(k) if n not in blocks]
        if k + 1 not in blocks:
            return _sum(list(blocks.values()))
        if len(missing) == 1:
            numbers = [self._number if n == k + 1 else n for n in blocks]
            return np.frombuffer(self._decoder.decode(list(blocks.values()), numbers)[number], np.uint8)
        (other,) = (n for n in missing if n != number)
        nothing = np.zeros_like(blocks[k])
        known = [blocks.get(n, nothing) for n in range(k)]
        plain = _sum([*known, blocks[k]])
        weighed = np.frombuffer(self._weigh(known), np.uint8) ^ blocks[k + 1]
        difference = self._times[number] ^ self._times[other]  # a permutation: the coefficients differ
        undo = np.argsort(difference).astype(np.uint8)
        found: Bytes = undo[weighed ^ self._times[other][plain]]
        return found

    def _weigh(self, data: list[Bytes]) -> bytes:
        block: bytes = self._encoder.encode(data, [self._number])[0]
        return block


def _differing_row(zfec: Any, k: int) -> int | None:
    """A parity block of zfec's code with k different coefficients; None if it has none, as for large k."""
    units = list(np.eye(k, dtype=np.uint8))
    rows = zfec.Encoder(k, _BLOCKS).encode(units, list(range(k, _BLOCKS)))
    return next((number for number, row in enumerate(rows, k) if len(set(row)) == k), None)


def _zfec(parity: Parity) -> Any:
    try:
        import zfec
    except ImportError as error:
        raise ConfigError(
            f"Redundancy(parity=({parity.k}, {parity.m})) needs the package zfec on every worker: pip install "
            '"raysharded[parity]". (k, 1) needs nothing.'
        ) from error
    return zfec


def _chunks(block: Bytes) -> Iterator[slice]:
    for start in range(0, len(block), _CHUNK):
        yield slice(start, start + _CHUNK)


def _xor(blocks: Sequence[Bytes], out: Bytes) -> None:
    if len(blocks) == 1:
        out[:] = blocks[0]
        return
    np.bitwise_xor(blocks[0], blocks[1], out=out)
    for block in blocks[2:]:
        np.bitwise_xor(out, block, out=out)


def _sum(blocks: Sequence[Bytes]) -> Bytes:
    out = np.empty_like(blocks[0])
    _xor(blocks, out)
    return out
