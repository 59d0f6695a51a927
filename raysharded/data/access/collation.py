"""Batches that the process which reads the samples makes of them, by the task's own function.

The draws of that function begin at a seed of the microbatch, and torch has the worker's settings there, so the batches
are those of the training thread. This is checked for the first one of a generation, and for one in each of the steps
2, 4, 8, ...: a function that depends on what changes is another one there. The samples of the others stay in
the process.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from raysharded.data.access import generators
from raysharded.ids import derive_seed


@dataclass(frozen=True, slots=True)
class Wish:
    """A request for a batch of some samples."""

    number: int
    """Seed of the function's draws."""
    keeps_samples: bool
    """Whether the samples are needed, too."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Collated samples."""

    value: Any


class Rows(list[Any]):
    """Samples that are the rows of one array, which nothing else refers to."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        super().__init__(array)
        self.array = array

    def __reduce__(self) -> tuple[type[Rows], tuple[npt.NDArray[Any]]]:
        return Rows, (self.array,)


class Collation:
    """Whether batches are made in the process that reads the samples, for one worker. Thread-safe."""

    def __init__(self, seed: int) -> None:
        """`seed`: of the run."""
        self._seed = seed
        self._changing = threading.Lock()
        self._is_proved = self._gave_alone = False
        self._step = 0
        """Step of the newest request; 0: none in this generation."""
        self._compared = 0, 0
        """The newest (step, microbatch) that is to be compared, also if it is read again."""
        self.reason = ""
        """The reason for which the training thread makes all batches; empty: it does not."""

    @property
    def is_refused(self) -> bool:
        """True if the training thread makes all batches from now on."""
        return bool(self.reason)

    def wish(self, step: int, microbatch: int) -> Wish | None:
        """The batch to request; None: the training thread makes it."""
        with self._changing:
            if self.reason:
                return None
            before, self._step = self._step, step
            if not before or (step != before and step & (step - 1) == 0):
                self._compared = step, microbatch
            keeps_samples = self._compared == (step, microbatch) or not self._is_proved
            self._gave_alone = self._gave_alone or not keeps_samples
            return Wish(seed_of(self._seed, "train", step, microbatch), keeps_samples=keeps_samples)

    def restart(self) -> None:
        """A generation begins: its first batch is compared, as one of each of the steps 2, 4, 8, ... is."""
        with self._changing:
            self._step = 0

    def judge(self, *, is_equal: bool) -> bool:
        """A batch is, or is not, the one that the training thread makes of the same samples.

        False: it is not, and others were requested that are not compared.
        """
        if not is_equal:
            self.refuse("its batch in the process that reads the samples is another one")
        with self._changing:
            self._is_proved = True
            return is_equal or not self._gave_alone

    def refuse(self, reason: str) -> None:
        """Let the training thread make all batches from now on."""
        with self._changing:
            self.reason = self.reason or reason


def seed_of(seed: int, purpose: str, step: int, microbatch: int) -> int:
    """Seed of the draws for a microbatch's collation. `purpose`: "train" or "evaluate"."""
    return derive_seed(seed, f"collate for {purpose}", step, microbatch)


def copies_of(samples: Sequence[Any]) -> list[Any]:
    """The samples for a collator, which may remove keys: dicts are copied."""
    return [copy.copy(one) if isinstance(one, dict) else one for one in samples]


def collate_here(function: Callable[[list[Any]], Any], samples: Sequence[Any], number: int) -> Batch:
    """The batch that a task's function makes in this process, which reads data alone. Raises what it raises."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(number)
    generators.seed(number, with_torch=False)
    return Batch(function(copies_of(samples)))
