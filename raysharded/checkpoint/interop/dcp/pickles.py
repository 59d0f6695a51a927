"""Foreign pickles, read without running any of their code.

Every class or function that a pickle names is replaced by a stand-in from a table; a name without one ends the reading.
Nothing is imported, so a hostile pickle can call only the stand-ins.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from raysharded.errors import CheckpointError, CorruptCheckpoint

StandIns = Mapping[tuple[str, str], Any]
"""Map from (module, name) to the object to use in its place."""


class Refused(Exception):
    """The pickle names something that has no stand-in. Stand-ins may raise it, too."""


def load(data: bytes, stand_ins: StandIns, where: str, persistent: Callable[[Any], Any] | None = None) -> Any:
    """The object that the pickle describes, built of plain values and stand-ins. `where` names the pickle in errors.

    `persistent` resolves a persistent id; without it such ids are rejected. Raises CheckpointError for a name that has
    no stand-in, CorruptCheckpoint for bytes that are not such a pickle.
    """
    try:
        return _Unpickler(data, stand_ins, persistent).load()
    except Refused as refused:
        raise CheckpointError(
            f"{where}: its pickle requests {refused}, which is not needed to describe tensors and is not loaded. If "
            "you trust where it comes from, load it with torch and save the tensors again."
        ) from None
    except Exception as error:  # a broken pickle may raise anything
        raise CorruptCheckpoint(f"{where}: not a pickle that can be read ({type(error).__name__}: {error}).") from error


class _Unpickler(pickle._Unpickler):
    """The Python unpickler. The one in C allocates a memo as large as the largest index that a pickle names."""

    def __init__(self, data: bytes, stand_ins: StandIns, persistent: Callable[[Any], Any] | None) -> None:
        super().__init__(io.BytesIO(data))
        self._stand_ins = stand_ins
        self._persistent = persistent

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._stand_ins[module, name]
        except KeyError:
            raise Refused(f"{module}.{name}") from None

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise Refused("an object outside the pickle")
        return self._persistent(pid)


def record(name: str) -> type:
    """A new class that stands in for another: it stores the other's pickled state and does nothing with it.

    `fields_of` reads that state. The class is new for every pickle, which might change it.
    """

    def set_state(self: Any, state: Any) -> None:
        self.state = state

    return type(name, (), {"__setstate__": set_state, "state": None})


def fields_of(value: Any) -> dict[str, Any]:
    """The pickled attributes of a `record`; {} for anything else."""
    state = getattr(value, "state", None)
    return state if type(state) is dict else {}
