"""Packing plans: the format, beside the store that they are for.

**Format `raysharded.packing-plan`, version 1.** A plan is the file `packed-N.plan` in the folder of a token store, for
sequences of N tokens. All numbers are little-endian. It has:

- the 8 bytes `RAYPLAN1`, the length of a JSON text as 4 bytes, and that text, with the fields of `Facts`;
- for each group of samples, its first token, 8 bytes each;
- for each group its number of tokens, 4 bytes each;
- for each group the number of pieces that are placed by size, 4 bytes each;
- for each group the number of pieces in its range that belong to others, 4 bytes each;
- the numbers of these other pieces, of one group after the other, 4 bytes each;
- the BLAKE3 digest (32 bytes) of all bytes before it.

`raysharded.data.packed.arrangement` derives the samples from that and from the tokens.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import asdict, dataclass, field, fields

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from raysharded.checkpoint.storage import NoSuchKey, Storage
from raysharded.data.packed import arrangement
from raysharded.data.packed.arrangement import Group
from raysharded.data.store.layout import Index
from raysharded.display.plain_text import masked
from raysharded.errors import DataError, StorageError
from raysharded.locations import join_url

MAGIC = b"RAYPLAN1"
FORMAT = "raysharded.packing-plan"
_DIGEST_BYTES = 32
_WORDS = npt.NDArray[np.uint32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """The settings of a plan, and how it turned out."""

    format: str = FORMAT
    arrangement: int = arrangement.VERSION
    store: str
    """Digest of the store's shards."""
    seq_len: int
    end_of_document: int
    samples_per_block: int
    """Samples per group, a power of two."""
    num_groups: int
    num_samples: int
    num_documents: int
    num_cuts: int
    """Number of pieces that continue a document."""
    num_targets: int
    """Number of tokens that are a target, each once; the other places of the samples are padding."""
    num_read: int
    """Number of tokens in the ranges of all groups."""

    @property
    def padding(self) -> float:
        """Share of the samples' places that are padding."""
        return 1 - self.num_targets / (self.num_samples * self.seq_len)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A plan in memory: 20 bytes for each group, and 4 for each piece in its range that is another group's."""

    facts: Facts
    starts: npt.NDArray[np.uint64]
    lengths: _WORDS
    num_sorted: _WORDS
    others: _WORDS
    other_ends: npt.NDArray[np.int64] = field(compare=False)
    """End of each group's numbers in `others`."""
    digest: str
    """Hex digits of the digest of its file."""

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays."""
        arrays = (self.starts, self.lengths, self.num_sorted, self.others, self.other_ends)
        return sum(array.nbytes for array in arrays)

    def group(self, number: int) -> Group:
        first = int(self.other_ends[number - 1]) if number else 0
        return Group(
            start=int(self.starts[number]),
            length=int(self.lengths[number]),
            num_sorted=int(self.num_sorted[number]),
            others=tuple(self.others[first : int(self.other_ends[number])].tolist()),
        )

    def range_of(self, number: int) -> tuple[int, int]:
        """(first token, end) of a group."""
        start = int(self.starts[number])
        return start, start + int(self.lengths[number])


def name_of_plan(seq_len: int) -> str:
    """Name of the plan for sequences of this length."""
    return f"packed-{seq_len}.plan"


class GroupColumns:
    """Groups while a plan is made, as a plan has them: 20 bytes for each, and 4 for each piece of another group."""

    def __init__(self) -> None:
        self.starts, self.lengths, self.num_sorted = array("Q"), array("I"), array("I")
        self._num_others, self._others = array("I"), array("I")

    def __len__(self) -> int:
        return len(self.starts)

    def add(self, group: Group) -> None:
        self.starts.append(group.start)
        self.lengths.append(group.length)
        self.num_sorted.append(group.num_sorted)
        self._num_others.append(len(group.others))
        self._others.extend(group.others)

    def to_bytes(self, facts: Facts) -> bytes:
        """The bytes of the plan of all groups."""
        text = json.dumps(asdict(facts)).encode()
        columns = (self.lengths, self.num_sorted, self._num_others, self._others)
        arrays = [np.asarray(self.starts, dtype="<u8"), *(np.asarray(one, dtype="<u4") for one in columns)]
        body = b"".join([MAGIC, len(text).to_bytes(4, "little"), text, *(one.tobytes() for one in arrays)])
        return body + blake3(body).digest()


def read_plan(storage: Storage, index: Index, seq_len: int) -> Plan:
    """The plan beside a store for sequences of this length.

    Raises DataError if there is none, if it is damaged, or if it is for other tokens or other sequences.
    """
    url, name = storage.url, name_of_plan(seq_len)
    where = masked(join_url(url, name))
    command = f"`raysharded data arrange {masked(url)} --seq-len {seq_len}`"
    try:
        data = storage.read(name)
    except NoSuchKey as error:
        raise DataError(
            f"{masked(url)}: no plan for packing its documents into sequences of {seq_len} tokens. Make it with "
            f'{command}, or use packing="concatenate".'
        ) from error
    except StorageError as error:
        raise StorageError(f"{where}: cannot be read: {masked(str(error))}") from error
    plan = parse_plan(data, where, command)
    if plan.facts.store != index.digest:
        raise DataError(
            f"{where}: made for other tokens than the store has now. Delete it, and make it again with {command}."
        )
    if plan.facts.seq_len != seq_len:
        raise DataError(
            f"{where}: made for sequences of {plan.facts.seq_len} tokens instead of {seq_len}: it was renamed. Delete "
            f"it, and make it again with {command}."
        )
    return plan


def parse_plan(data: bytes, where: str, command: str) -> Plan:
    """The plan in these bytes. Raises DataError; `command`: how to make it again."""
    body = data[:-_DIGEST_BYTES]
    if data[: len(MAGIC)] != MAGIC or blake3(body).digest() != data[-_DIGEST_BYTES:]:
        raise DataError(f"{where}: damaged, or no packing plan. Delete it, and make it again with {command}.")
    length = int.from_bytes(body[8:12], "little")
    facts = json.loads(body[12 : 12 + length])
    if facts["format"] != FORMAT or facts["arrangement"] != arrangement.VERSION:
        raise DataError(
            f"{where}: a plan of arrangement {facts['arrangement']}; this raysharded knows {arrangement.VERSION}. "
            f"Upgrade raysharded, or delete it and make it again with {command}."
        )
    found = Facts(**{one.name: facts[one.name] for one in fields(Facts)})
    at, number = 12 + length, found.num_groups
    starts = np.frombuffer(body, "<u8", number, at)
    lengths, num_sorted, counts = (
        np.frombuffer(body, "<u4", number, at + (8 + 4 * place) * number) for place in range(3)
    )
    return Plan(
        facts=found,
        starts=starts,
        lengths=lengths,
        num_sorted=num_sorted,
        others=np.frombuffer(body, "<u4", -1, at + 20 * number),
        other_ends=np.cumsum(counts, dtype=np.int64),
        digest=data[-_DIGEST_BYTES:].hex(),
    )
