"""The record of a packing that is not complete, beside its shards, so that a later call continues it."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from raysharded.checkpoint.storage import NoSuchKey, Storage, open_storage
from raysharded.checkpoint.storage.optional_operations import list_sizes
from raysharded.data.store.layout import Kind, Shard
from raysharded.data.text.files import File, reading
from raysharded.display.plain_text import masked
from raysharded.errors import ConfigError

NAME = "unfinished.json"
_THREADS = 16
_TOLD_EVERY_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PackProgress:
    """Progress of `pack` when a shard is written, and every ten seconds."""

    shards: int
    tokens: int
    """Tokens so far, also of an interrupted call before."""
    tokens_per_s: float
    """Rate of this call."""
    share: float
    """Share of the inputs' bytes that was read, also by an interrupted call before."""


@dataclass(slots=True)
class Progress:
    """Progress of a packing: whole shards, and the place in the inputs behind them."""

    storage: Storage
    inputs: str
    """Digest of the inputs' names and sizes, and of all settings that decide the tokens."""
    shards: tuple[Shard, ...] = ()
    parts: int = 0
    """Parts of the inputs whose tokens are in whole shards."""
    tokens_of_part: int = 0
    """Tokens of the next part that are in whole shards, too."""
    documents: int = 0
    """Documents of these parts."""
    first_tokens: int = 0
    sizes: tuple[int, ...] = ()
    """Bytes of each input."""
    say: Callable[[PackProgress], None] | None = None
    done_bytes: float = 0.0
    """Bytes of the inputs up to the end of the newest part that was written."""
    _ends: deque[float] = field(default_factory=deque)
    """These bytes at the end of each part that is being read."""
    _told: float = field(default_factory=time.monotonic)
    _began: float = field(default_factory=time.monotonic)
    _num_shards: int = 0
    _passed: tuple[int, int, int] = (0, 0, 0)
    """(parts, tokens, documents) of the parts that were written wholly."""

    @classmethod
    def of(cls, folder: str, kind: Kind, files: Sequence[File], about: Mapping[str, Any]) -> Progress:
        """The recorded progress of a folder, or none. Raises ConfigError for that of other inputs or settings."""
        with ThreadPoolExecutor(min(_THREADS, len(files)), "raysharded-sizes") as threads:
            sizes = list(threads.map(_size, files))
        names = [[file.name, size] for file, size in zip(files, sizes, strict=True)]
        text = json.dumps([names, kind.fields(), kind.end_of_document, dict(about)])
        found = cls(open_storage(folder), blake3(text.encode()).hexdigest(), sizes=tuple(sizes))
        found._read(folder)
        return found

    def _read(self, folder: str) -> None:
        try:
            told = json.loads(self.storage.read(NAME))
            shards = tuple(Shard(name=name, num_tokens=number, id=id_) for name, number, id_ in told["shards"])
            place = int(told["parts"]), int(told["tokens_of_part"]), int(told["documents"])
        except NoSuchKey:
            return
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"pack: {masked(folder)}: {NAME} is damaged: {error!r}. Empty the folder.") from error
        if told["inputs"] != self.inputs:
            raise ConfigError(
                f"pack: {masked(folder)} has an unfinished packing of other inputs, or with other settings. Repeat "
                "these to continue it, or empty the folder."
            )
        self.shards, (self.parts, self.tokens_of_part, self.documents) = shards, place
        self.first_tokens = sum(shard.num_tokens for shard in shards)
        self._num_shards = len(shards)
        self._passed = self.parts, self.first_tokens - self.tokens_of_part, self.documents

    def check(self) -> None:
        """Raise ConfigError if a recorded shard is missing."""
        there = list_sizes(self.storage, "") if self.shards else {}
        gone = [shard.name for shard in self.shards if shard.name not in there]
        if gone:
            raise ConfigError(
                f"pack: {masked(self.storage.url)}: {gone[0]} of an unfinished packing is missing. Empty the folder."
            )

    def begins(self, done_bytes: float, *, is_written: bool) -> None:
        """Record that the next part is read, with which so many bytes of the inputs are; `is_written`: was before."""
        if is_written:
            self.done_bytes = done_bytes
        else:
            self._ends.append(done_bytes)

    def passed(self, num_tokens: int, num_documents: int) -> None:
        """Record that one more part is written, with so many tokens and documents in total; report it now and then."""
        self._passed = self._passed[0] + 1, num_tokens, num_documents
        self.done_bytes = self._ends.popleft()
        if time.monotonic() - self._told >= _TOLD_EVERY_S:
            self._tell(num_tokens)

    def save(self, shards: Sequence[Shard]) -> None:
        """Record the whole shards, and report the progress."""
        total = sum(shard.num_tokens for shard in shards)
        parts, tokens, documents = self._passed
        body = {
            "inputs": self.inputs,
            "shards": [[shard.name, shard.num_tokens, shard.id] for shard in shards],
            "parts": parts,
            "tokens_of_part": total - tokens,
            "documents": documents,
        }
        self.storage.write(NAME, [json.dumps(body).encode()])
        self._num_shards = len(shards)
        self._tell(total)

    def _tell(self, num_tokens: int) -> None:
        self._told = time.monotonic()
        if self.say is not None:
            rate = (num_tokens - self.first_tokens) / max(self._told - self._began, 1e-6)
            share = self.done_bytes / max(sum(self.sizes), 1)
            self.say(PackProgress(shards=self._num_shards, tokens=num_tokens, tokens_per_s=rate, share=share))

    def end(self) -> None:
        """Remove the record: the store is complete."""
        self.storage.delete([NAME])


def _size(file: File) -> int:
    with reading(file.name, "read"):
        return int(file.fs.size(file.path))
