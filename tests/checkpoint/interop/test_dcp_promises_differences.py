"""Deliberate differences of our reader and writer from torch's: one table, each row tried with both.

docs/exchange.md lists the same rows, with the reason and the way out, under "What is another way".
"""

from __future__ import annotations

import datetime
import io
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from tests.checkpoint.interop.dcp_promises_storages import KINDS, Kind, said
from tests.checkpoint.interop.ranks import dcp
from tests.paths import DOCS

_DOCS = DOCS / "exchange.md"


@dataclass(frozen=True, slots=True)
class Difference:
    """The result of one act: patterns of the error, "" for none, or of its return value as text."""

    row: str
    """As docs/exchange.md names it."""
    act: Callable[[Kind, Path], str]
    torch: str
    ours: str


def _round(state: dict[str, Any], into: dict[str, Any], **options: Any) -> Callable[[Kind, Path], str]:
    """Saves and loads; returns the error, or the loaded state."""

    def act(kind: Kind, folder: Path) -> str:
        return said(kind.save, state, folder, **options) or str(kind.load(dict(into), folder))

    return act


class _OwnBytes(DefaultSavePlanner):
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002  # torch's name
        return io.BytesIO(b"mine") if write_item.type == WriteItemType.BYTE_IO else object


class _OwnBytesBack(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = value.read()


def _own_bytes(kind: Kind, folder: Path) -> str:
    error = said(kind.save, {"a": 1}, folder, planner=_OwnBytes())
    return error or str(kind.load({"a": 0}, folder, planner=_OwnBytesBack()))


def _unflattened(kind: Kind, folder: Path) -> str:
    state = {"model": {"weight": torch.ones(2)}}
    return said(kind.save, state, folder, planner=DefaultSavePlanner(flatten_state_dict=False))


def _twice(kind: Kind, folder: Path) -> str:
    """Saves by a writer that was given nothing but the folder."""
    for value in (1.0, 2.0):
        error = said(dcp.save, {"a": torch.tensor(value)}, storage_writer=type(kind.writer(folder))(folder))
    return error or str(kind.load({"a": torch.zeros(())}, folder))


def _twice_without(kind: Kind, folder: Path) -> str:
    kind.save({"a": torch.ones(2)}, folder)
    return said(kind.save, {"a": torch.ones(2)}, folder)


def _failed_over(kind: Kind, folder: Path) -> str:
    """The remains of a checkpoint when the save that was to replace it fails."""
    writer = kind.writer(folder, overwrite=True)
    dcp.save({"a": torch.ones(1000), "z": 1}, storage_writer=writer)

    class Failing(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
            if write_item.index.fqn == "a":
                raise OSError("no data")
            return super().resolve_data(write_item)

    assert "no data" in said(dcp.save, {"a": torch.zeros(1000), "z": 2}, storage_writer=writer, planner=Failing())
    into = {"a": torch.full((1000,), 5.0), "z": 0}
    return said(kind.load, into, folder) or str((into["a"].sum().item(), into["z"]))  # type: ignore[attr-defined]


def _without_collectives(kind: Kind, folder: Path) -> str:
    error = said(kind.save, {"a": torch.ones(2)}, folder, use_collectives=False)
    return error or str(sorted(path.name for path in folder.iterdir()))


def _files(kind: Kind, folder: Path) -> str:
    kind.save({"a": torch.ones(2)}, folder)
    return str(sorted(path.name for path in folder.iterdir()))


def _found_by_itself(kind: Kind, folder: Path) -> str:
    kind.save({"a": torch.ones(2)}, folder)
    into = {"a": torch.zeros(2)}
    return said(dcp.load, into, checkpoint_id=folder) or str(into)


def _attributes(kind: Kind, folder: Path) -> str:
    return said(lambda: kind.writer(folder).save_id)


def _arguments(kind: Kind, folder: Path) -> str:
    return said(lambda: type(kind.writer(folder))(folder, thread_count=2, sync_files=False))


def _chunks(kind: Kind, folder: Path) -> str:
    kind.save({"a": torch.ones(2)}, folder)
    metadata = kind.reader(folder).read_metadata()
    return f"{len(metadata.storage_data)} places"


def _damaged(kind: Kind, folder: Path) -> str:
    """Flips one bit of a tensor."""
    kind.save({"a": torch.ones(300)}, folder)
    (file,) = (path for path in folder.rglob("*") if path.suffix in (".distcp", ".safetensors"))
    data = bytearray(file.read_bytes())
    data[data.index(torch.ones(9).numpy().tobytes())] ^= 1
    file.write_bytes(data)
    into = {"a": torch.zeros(300)}
    return said(kind.load, into, folder) or f"{(into['a'] != 1).sum().item()} wrong"


def _lost(kind: Kind, folder: Path) -> str:
    """The type of the error inside CheckpointException when a data file was deleted."""
    kind.save({"a": torch.ones(300)}, folder)
    (file,) = (path for path in folder.rglob("*") if path.suffix in (".distcp", ".safetensors"))
    file.unlink()
    try:
        kind.load({"a": torch.zeros(300)}, folder)
    except dcp.CheckpointException as error:
        return type(error.failures[0][0]).__name__
    return "loaded"


DIFFERENCES = (
    Difference("Other objects", _round({"d": datetime.date(2026, 1, 2)}, {"d": 0}), "date", r"d: .*without running"),
    Difference("Sets", _round({"d": {1, 2}}, {"d": 0}), r"\{1, 2\}", r"d: .*set"),
    Difference("Other dicts inside a value", _round({"d": (Counter(a=1),)}, {"d": 0}), "Counter", r"\(\{'a': 1\},\)"),
    Difference("A tuple with tensors", _round({"d": (torch.ones(2),)}, {"d": 0}), "tensor", r"d: .*dict or a list"),
    Difference("`flatten_state_dict=False`", _unflattened, "^$", r"model: .*dict or a list"),
    Difference("A planner's own bytes", _own_bytes, "b'mine'", r"a: cannot be read"),
    Difference(
        "Dtypes that safetensors does not have",
        _round({"c": torch.ones(2, dtype=torch.complex128)}, {"c": torch.zeros(2, dtype=torch.complex128)}),
        "1.*j",
        "c: a tensor of torch.complex128.* cannot be stored",
    ),
    Difference("Saving over a checkpoint", _twice, r"tensor\(2", "is a checkpoint already"),
    Difference(
        "`overwrite=False`", _twice_without, "RuntimeError.*Checkpoint already exists", "is a checkpoint already"
    ),
    Difference("A save over a checkpoint fails", _failed_over, "Exception", r"\(1000.0, 1\)"),
    Difference("`use_collectives=False`", _without_collectives, "__0.metadata", "Leave it out"),
    Difference("Files", _files, r"'\.metadata', '__0_0\.distcp'", "'manifest.json'"),
    Difference("`load` without a reader", _found_by_itself, "tensor", r"\.metadata"),
    Difference("Attributes of the writer", _attributes, "^$", "save_id"),
    Difference("`thread_count`, `sync_files` and the like", _arguments, "^$", "thread_count"),
    Difference("`Metadata.storage_data`", _chunks, "^1 places", "^0 places"),
    Difference("Errors inside `CheckpointException`", _lost, "^FileNotFoundError$", "^IncompleteCheckpoint$"),
    Difference("A damaged file", _damaged, "1 wrong", "digest"),
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda difference: difference.row)
def test_what_is_another_way(tmp_path: Path, kind: Kind, difference: Difference) -> None:
    text = difference.act(kind, tmp_path / "c")
    pattern = difference.ours if kind.is_ours else difference.torch
    assert re.search(pattern, text, re.DOTALL), text


def test_the_guide_lists_each_difference() -> None:
    section = _DOCS.read_text().partition("### What is another way")[2].partition("\n## ")[0]
    rows = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("|")]
    assert rows[2:] == [difference.row for difference in DIFFERENCES]
