"""Every order in which the storage operations of several calls can happen: one operation at a time, order chosen."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from raysharded.checkpoint.storage import Storage
from raysharded.testing.storages import StorageAround

T = TypeVar("T")

_DEADLINE_S = 30.0


class Turns:
    """One call in a separate thread, which stops before each of its operations until it is its turn."""

    def __init__(self, storage: Storage, call: Callable[[Storage], object]) -> None:
        self._stopped, self._go = threading.Semaphore(0), threading.Semaphore(0)
        self.ended = False
        self.outcome: object = None
        """The call's return value or error."""
        self._thread = threading.Thread(target=self._run, args=(Stepped(storage, self.wait), call), daemon=True)
        self._thread.start()
        self._until_stopped()

    def step(self) -> None:
        """Let it do one operation, and stop before the next."""
        self._go.release()
        self._until_stopped()

    def wait(self) -> None:
        self._stopped.release()
        assert self._go.acquire(timeout=_DEADLINE_S)

    def _until_stopped(self) -> None:
        assert self._stopped.acquire(timeout=_DEADLINE_S), "the call hangs"

    def _run(self, storage: Storage, call: Callable[[Storage], object]) -> None:
        try:
            self.outcome = call(storage)
        except Exception as error:  # noqa: BLE001  # the outcome is the test's to judge
            self.outcome = error
        self.ended = True
        self._stopped.release()


@dataclass(frozen=True, slots=True)
class Ran:
    """One order of the operations, and its results."""

    storage: Storage
    outcomes: list[Any]
    """Each call's return value or error."""
    path: list[int]
    """The number of the call of each operation, in order."""
    choices: list[list[int]]
    """The calls that could have come then."""


def run(storage: Storage, calls: Sequence[Callable[[Storage], object]], order: Iterable[int]) -> Ran:
    """Run the calls, one operation at a time: of the call that `order` names next, or of the first unfinished one."""
    turns = [Turns(storage, call) for call in calls]
    ran, chosen = Ran(storage, [], [], []), iter(order)
    while live := [number for number, turn in enumerate(turns) if not turn.ended]:
        wanted = next(chosen, live[0])
        number = wanted if wanted in live else live[0]
        ran.path.append(number)
        ran.choices.append(live)
        turns[number].step()
    ran.outcomes.extend(turn.outcome for turn in turns)
    return ran


def every_order(
    make: Callable[[], Storage], calls: Callable[[Storage], Sequence[Callable[[Storage], object]]]
) -> Iterator[Ran]:
    """Every order of the calls' operations, each once. `make` makes the storage as it is before, `calls` the calls."""
    pending: list[list[int]] = [[]]
    while pending:
        order = pending.pop()
        storage = make()
        ran = run(storage, calls(storage), order)
        for at in range(len(order), len(ran.path)):
            pending += [[*ran.path[:at], other] for other in ran.choices[at] if other != ran.path[at]]
        yield ran


@dataclass(slots=True)
class Stepped(StorageAround):
    """A storage that stops before every operation."""

    stop: Callable[[], None]

    def _do(self, operation: str, act: Callable[[], T]) -> T:
        self.stop()
        return act()
