"""The three generators that a process has for all of its code: Python's `random`, NumPy's and torch's on the CPU.

torch is not loaded here: where nobody has loaded it, nobody draws from it.
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
"""Generator -> its whole state, as that library has it; torch is missing where it is not loaded."""
Marks: TypeAlias = dict[str, object]
"""Generator -> what differs once somebody has drawn from it."""

_KEY_AND_PLACE_BYTES = 625 * 4
"""Of the Mersenne Twister's state in C: 624 words, and the place among them."""


def seed(number: int, *, with_torch: bool = True) -> None:
    """Put all three where this number says; `with_torch=False`: `random` and NumPy's alone. On CPUs: 30 us."""
    random.seed(derive_seed(number, "random"))
    seed_numpy(derive_seed(number, "numpy"))
    torch = sys.modules.get("torch")
    if with_torch and torch is not None:
        torch.default_generator.manual_seed(derive_seed(number, "torch"))


def seed_numpy(number: int) -> None:
    """The same for NumPy's, also where somebody has given it another kind of generator."""
    bits = _bits()
    if isinstance(bits, np.random.MT19937):
        np.random.seed(np.array([number & 0xFFFFFFFF, number >> 32], dtype=np.uint32))  # its cached normal is gone, too
    else:
        bits.state = type(bits)(number).state


def _bits() -> Any:
    """NumPy's stubs do not have the function."""
    return vars(np.random)["get_bit_generator"]()


def states(*, with_torch: bool = True) -> States:
    """The whole state of each, for `restore`."""
    torch = sys.modules.get("torch")
    found: States = {"random": random.getstate(), "numpy": np.random.get_state(legacy=False)}
    if with_torch and torch is not None:
        found["torch"] = torch.default_generator.get_state()
    return found


def restore(before: States) -> None:
    """Put back those that it has."""
    random.setstate(before["random"])
    np.random.set_state(before["numpy"])
    if "torch" in before:
        sys.modules["torch"].default_generator.set_state(before["torch"])


def stand_at(before: States) -> bool:
    """True if `random` and NumPy's are where they were."""
    return random.getstate() == before["random"] and _same(np.random.get_state(legacy=False), before["numpy"])


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return np.array_equal(one, other)


@contextlib.contextmanager
def kept(*, with_torch: bool = True) -> Iterator[None]:
    """Put back at its end what was there at its beginning."""
    before = states(with_torch=with_torch)
    try:
        yield
    finally:
        restore(before)


def marks() -> Marks:
    """Enough to see later who has moved, where nothing was left over of a pair of normals: say after `seed`.

    A quarter of the time of `states`: NumPy's words are read where they lie.
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
    """The generators that stand elsewhere; one that was loaded in between does not count."""
    return [name for name, mark in after.items() if name in before and before[name] != mark]
