"""The three process-wide generators: Python's `random`, NumPy's, and torch's on the CPU.

torch is not loaded here: where no code has loaded it, no code draws from it.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

from raysharded.ids import derive_seed

States: TypeAlias = dict[str, Any]
"""Whole state of each generator, in its library's form. torch is absent where it is not loaded."""
Marks: TypeAlias = dict[str, object]
"""Mark of each generator, which differs once any code has drawn from it."""

_KEY_AND_PLACE_BYTES = 625 * 4
"""Size of the Mersenne Twister's state in C: 624 words, and the index among them."""


def seed(number: int, *, with_torch: bool = True) -> None:
    """Seed all three from a number; with `with_torch=False` only `random` and NumPy's. Takes 30 us on a CPU."""
    random.seed(derive_seed(number, "random"))
    seed_numpy(derive_seed(number, "numpy"))
    torch = sys.modules.get("torch")
    if with_torch and torch is not None:
        torch.default_generator.manual_seed(derive_seed(number, "torch"))


def seed_numpy(number: int) -> None:
    """Seed NumPy's generator, also where a program has replaced it by another kind."""
    bits = _bits()
    if isinstance(bits, np.random.MT19937):
        np.random.seed(np.array([number & 0xFFFFFFFF, number >> 32], dtype=np.uint32))  # drops its cached normal
    else:
        bits.state = type(bits)(number).state


def _bits() -> Any:
    """NumPy's bit generator, through a function that NumPy's stubs lack."""
    return vars(np.random)["get_bit_generator"]()


def states(*, with_torch: bool = True) -> States:
    """The whole state of each generator, for `restore`."""
    torch = sys.modules.get("torch")
    found: States = {"random": random.getstate(), "numpy": np.random.get_state(legacy=False)}
    if with_torch and torch is not None:
        found["torch"] = torch.default_generator.get_state()
    return found


def restore(before: States) -> None:
    """Restore the generators whose state `before` has."""
    random.setstate(before["random"])
    np.random.set_state(before["numpy"])
    if "torch" in before:
        sys.modules["torch"].default_generator.set_state(before["torch"])


def stand_at(before: States) -> bool:
    """True if `random` and NumPy's generator are in these states."""
    return random.getstate() == before["random"] and _same(np.random.get_state(legacy=False), before["numpy"])


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return np.array_equal(one, other)


@contextlib.contextmanager
def kept(*, with_torch: bool = True) -> Iterator[None]:
    """Restore at the end of the block the states at its beginning."""
    before = states(with_torch=with_torch)
    try:
        yield
    finally:
        restore(before)


def marks() -> Marks:
    """Marks that reveal later draws. They require that no normal of a pair is cached, such as after `seed`.

    A quarter of the time of `states`: NumPy's words are read in place.
    """
    torch, bits = sys.modules.get("torch"), _bits()
    found: Marks = {"random": random.getstate()}
    if isinstance(bits, np.random.MT19937):
        found["numpy"] = ctypes.string_at(bits.ctypes.state_address, _KEY_AND_PLACE_BYTES)
    else:
        found["numpy"] = repr(bits.state)
    if torch is not None:
        found["torch"] = torch.default_generator.get_state().numpy().tobytes()
    return found


def moved(before: Marks, after: Marks) -> list[str]:
    """The generators that have moved. One that was loaded in between does not count."""
    return [name for name, mark in after.items() if name in before and before[name] != mark]
