"""Erasure codes over blocks of bytes: m parity blocks for k blocks of data, any k of which give the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from raysharded.errors import ConfigError
from raysharded.layout import Parity

Bytes = NDArray[np.uint8]


class ErasureCode(Protocol):
    """Blocks are numbered: data from 0 on, parity from k on. All blocks of a call have one length."""

    def encode(self, data: Sequence[Bytes], number: int, out: Bytes) -> None:
        """Compute parity block `number` from all k blocks of data, in order."""
        ...

    def decode(self, blocks: Mapping[int, Bytes], number: int, out: Bytes) -> None:
        """Compute data block `number`, which is not among the k blocks given by their numbers."""
        ...


def erasure_code(parity: Parity) -> ErasureCode:
    """The code for these numbers of blocks. Raises ConfigError if its library is not installed."""
    return _Xor() if parity.m == 1 else _ReedSolomon(parity)


class _Xor:
    """One parity block: the data blocks' exclusive or."""

    def encode(self, data: Sequence[Bytes], number: int, out: Bytes) -> None:
        _xor(data, out)

    def decode(self, blocks: Mapping[int, Bytes], number: int, out: Bytes) -> None:
        _xor(list(blocks.values()), out)


class _ReedSolomon:
    """A systematic Reed-Solomon code over GF(2^8), by zfec (after Rizzo: "Effective Erasure Codes for Reliable Computer
    Communication Protocols", 1997). It computes without the interpreter's lock."""

    def __init__(self, parity: Parity) -> None:
        try:
            import zfec
        except ImportError as error:
            raise ConfigError(
                f"Redundancy(parity=({parity.k}, {parity.m})) needs the package zfec on every worker: pip install "
                '"raysharded[parity]". (k, 1) needs nothing.'
            ) from error
        self._encoder: Any = zfec.Encoder(parity.k, parity.width)
        self._decoder: Any = zfec.Decoder(parity.k, parity.width)

    def encode(self, data: Sequence[Bytes], number: int, out: Bytes) -> None:
        (block,) = self._encoder.encode(list(data), [number])
        out[:] = np.frombuffer(block, np.uint8)

    def decode(self, blocks: Mapping[int, Bytes], number: int, out: Bytes) -> None:
        data = self._decoder.decode(list(blocks.values()), list(blocks))
        out[:] = np.frombuffer(data[number], np.uint8)


def _xor(blocks: Sequence[Bytes], out: Bytes) -> None:
    out[:] = blocks[0]
    for block in blocks[1:]:
        np.bitwise_xor(out, block, out=out)
