"""Manifests and box indexes with something changed, sealed as if by a real writer: each is read, or refused by one of
our errors, in little time and memory.

`python -m tests.checkpoint.spoiled COUNT [SEED]` tries so many of each kind, and writes the results as JSON. C++ reads
Parquet, and must not crash either: hence a separate process.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from raysharded.checkpoint import open_checkpoint, open_storage
from raysharded.checkpoint.format.boxes import BoxTable, FileBox
from raysharded.checkpoint.format.index import BadIndex, decode_index, encode_index
from raysharded.errors import CheckpointError
from tests.checkpoint.samples import State, raw, read_all, save, seal

STATE: State = {"w": raw("float32", 6, 4), "b": raw("int64"), "e": raw("bool", 0, 3)}
VALUES = [None, True, -1, 0, 1, 2**31, 2**53, 2**62, 2**63, 2**64, 10**400, 0.5, 1e308, "", "w", "b", "..", "\ud800"]


@dataclass(kw_only=True, slots=True)
class Watched:
    """The results of some cases."""

    read: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    """Processor time of the slowest case."""
    grown_mib: int = 0
    """Growth of the process's peak memory."""


def watch(count: int, case: Callable[[], object]) -> Watched:
    """Run cases that are read, or raise CheckpointError or BadIndex; all other errors are raised."""
    watched, before = Watched(), _peak_mib()
    for _ in range(count):
        began = time.process_time()
        try:
            case()
            watched.read += 1
        except (CheckpointError, BadIndex) as error:
            str(error).encode()
            watched.refused += 1
        watched.slowest_s = max(watched.slowest_s, time.process_time() - began)
    watched.grown_mib = _peak_mib() - before
    return watched


def indexes(chance: random.Random) -> Callable[[], object]:
    """An index with bytes changed, put in or left out, half of the time in its footer."""
    boxes = BoxTable.of(FileBox(name=f"t{i % 7}", offsets=(i, 0), sizes=(1, 3), start=i * 12) for i in range(300))
    whole = encode_index(np.zeros(300, np.int32), boxes)

    def case() -> object:
        data = bytearray(whole)
        for _ in range(chance.choice([1, 1, 2, 8])):
            near = max(0, len(data) - 1 - chance.randrange(900))
            at = chance.randrange(len(data)) if chance.random() < 0.5 else near
            match chance.randrange(4):
                case 0:
                    data[at] = chance.randrange(256)
                case 1:
                    data[at] ^= 1 << chance.randrange(8)
                case 2:
                    del data[at : at + chance.randrange(1, 9)]
                case _:
                    data[at:at] = bytes(chance.choice([0, 255, 127, chance.randrange(256)]) for _ in range(4))
        return decode_index(bytes(data), [(f"t{i}", 2) for i in range(7)], 1)

    return case


def manifests(chance: random.Random) -> Callable[[], object]:
    """A manifest with values changed, left out, doubled or exchanged, of which a reader reads everything."""
    storage = open_storage(f"memory://spoiled-{chance.random()}/run")
    prefix = save(storage, STATE)
    whole = storage.read(f"{prefix}/manifest.json")

    def case() -> object:
        body = json.loads(whole)
        for _ in range(chance.choice([1, 1, 2, 3])):
            found = places(body, [])
            where, key = chance.choice(found)
            match chance.choice(["set", "set", "drop", "double", "swap"]):
                case "set":
                    where[key] = chance.choice(VALUES)
                case "drop":
                    del where[key]
                case "double" if isinstance(where, list):
                    where.append(where[key])
                case _:
                    other, at = chance.choice(found)
                    where[key] = json.loads(json.dumps(other[at]))
        storage.write(f"{prefix}/manifest.json", [seal(body)])
        checkpoint = open_checkpoint(storage, prefix)
        checkpoint.verify()
        return read_all(checkpoint)

    return case


def places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every (container, key) in it."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        found.append((value, key))
        if isinstance(inner, (dict, list)):
            places(inner, found)
    return found


def _peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def main(count: str, seed: str = "0") -> None:
    """Writes the results of both kinds to stdout."""
    kinds = {"indexes": indexes, "manifests": manifests}
    found = {name: asdict(watch(int(count), kind(random.Random(int(seed))))) for name, kind in kinds.items()}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
