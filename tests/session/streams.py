"""Custom streams for loops in tests: a tokenizer-like buffer as state, and what spoils one."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from raysharded.actors.session.user_session import Session
from raysharded.actors.session.user_step import UserStep
from tests.session.loops import Average, Loop
from tests.training.harness import SEQUENCE, VOCABULARY


class TokenStream:
    """Batches of 2 sequences, cut from documents of uneven lengths that are read ahead into a buffer."""

    def __init__(self, index: int, num: int, *, batches: int | None = None) -> None:
        self.index, self.num, self.batches = index, num, batches
        self.document, self.buffer, self.given = 0, torch.empty(0, dtype=torch.int64), 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        size = 2 * (SEQUENCE + 1)
        while self.batches is None or self.given < self.batches:
            while len(self.buffer) < size:
                generator = torch.Generator().manual_seed(1000 * self.document + self.index)
                length = 5 + (7 * self.document + self.index) % 11
                self.document += 1
                self.buffer = torch.cat([self.buffer, torch.randint(VOCABULARY, (length,), generator=generator)])
            batch, self.buffer = self.buffer[:size], self.buffer[size:]
            self.given += 1
            yield {"tokens": batch.reshape(2, -1), "place": (self.index, self.given)}

    def state_dict(self) -> dict[str, Any]:
        return {"document": self.document, "buffer": self.buffer, "given": self.given, "bytes": b"\0\1"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["bytes"] == b"\0\1"
        self.document, self.buffer, self.given = state["document"], state["buffer"], state["given"]


class Forgetful(TokenStream):
    """Its state lacks the buffer."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "buffer": torch.empty(0, dtype=torch.int64)}


def short_by_one(index: int, num: int) -> TokenStream:
    """Streams of which one ends after 3 batches, and the others after 4."""
    return TokenStream(index, num, batches=3 if index == 1 else 4)


def empty(index: int, num: int) -> TokenStream:
    return TokenStream(index, num, batches=0)


def batch_at(step: int, index: int) -> dict[str, Any]:
    """A pure function of the microbatch."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    return {"tokens": torch.randint(VOCABULARY, (2, SEQUENCE + 1), generator=generator), "place": (index, step)}


def drawn(step: int, index: int) -> Any:
    """Draws from the process's generator, which is seeded for each microbatch."""
    return {"tokens": torch.randint(VOCABULARY, (2, SEQUENCE + 1)), "place": (index, step)}


_calls = 0


def counted(step: int, index: int) -> Any:
    """Gives another batch at each call."""
    global _calls
    _calls += 1
    return {**batch_at(step, index), "call": _calls}


class OwnLoop(Loop):
    """The loop of the tests' GPT, with its own microbatches; it notes each that it computed."""

    def __init__(self, folder: Path, make: Any = TokenStream, *, is_stream: bool = True) -> None:
        super().__init__()
        self._folder, self._make_data, self._is_stream = folder, make, is_stream
        self._session: Session | None = None

    def built(self, model: Any) -> None:
        assert self._session is not None
        if self._is_stream:
            self._session.streams(self._make_data)
        else:
            self._session.reads(self._make_data)

    def __call__(self, session: Session) -> None:
        self._session = session
        super().__call__(session)

    def tokens_of(self, step: UserStep, batch: dict[str, Any]) -> torch.Tensor:
        """The tokens of a microbatch; notes its bytes under its step and number."""
        tokens: torch.Tensor = batch.pop("tokens")
        index, given = batch["place"]
        assert given == step.number or step.microbatch < 0
        if step.microbatch >= 0:
            assert index == step.microbatch
            digest = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()
            with (self._folder / f"{step.number}-{index}").open("a") as file:
                file.write(digest + "\n")
        return tokens

    def applied(self, session: Session, step: UserStep, average: Average) -> None: ...


def read_bytes(folder: Path) -> dict[str, set[str]]:
    """Microbatch -> digests of the bytes that workers got for it."""
    return {file.name: set(file.read_text().split()) for file in folder.iterdir()}


class PacedStream(TokenStream):
    """Slow, until a file states that the awaited event has happened."""

    happened: Path

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in super().__iter__():
            if not self.happened.exists():
                time.sleep(0.1)
            yield batch


def paced(happened: Path, index: int, num: int) -> PacedStream:
    stream = PacedStream(index, num)
    stream.happened = happened
    return stream


class Odd(TokenStream):
    """Its state is no plain data."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": {1, 2}}


class Large(TokenStream):
    """Its state is what it has read ahead."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "buffer": torch.zeros(1 << 17, dtype=torch.int64)}


class Moody(TokenStream):
    """From its second batch on it gives another one each time that it is made anew from its state there."""

    made = 0

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        Moody.made += 1

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in super().__iter__():
            yield batch if Moody.made < 2 or self.given < 2 else {**batch, "tokens": batch["tokens"] + 1}


def broken(index: int, num: int) -> Any:
    raise KeyError(f"no stream {index} of {num}")


class OfItsProcess(TokenStream):
    """Gives each process that reads other tokens."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in super().__iter__():
            yield {**batch, "tokens": (batch["tokens"] + os.getpid()) % VOCABULARY}


def of_its_process(step: int, index: int) -> dict[str, Any]:
    """As `drawn`, with other tokens in each process that reads."""
    batch = drawn(step, index)
    return {**batch, "tokens": (batch["tokens"] + os.getpid()) % VOCABULARY}
