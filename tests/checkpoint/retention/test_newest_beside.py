"""The newest of checkpoints in one folder is the one of the highest step, under any names."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from raysharded.checkpoint import api
from raysharded.checkpoint.retention.flat_folder import newest_beside
from raysharded.checkpoint.storage import Storage, open_storage
from raysharded.cli.checkpoint.target import BesidePlace, find_place
from raysharded.errors import CorruptCheckpoint
from raysharded.testing.storages import CountingStorage


class Timed(CountingStorage):
    """Has times too, and counts the manifests that were read."""

    def times(self, name: str | None, prefix: str = "") -> Any:
        inner: Any = self.inner
        return inner.times(name, prefix)

    @property
    def manifests(self) -> list[str]:
        return [key.partition("/")[0] for key, _, _ in self.reads]


def saved(folder: Path, steps: dict[str, int]) -> Timed:
    """Checkpoints with these names and steps, saved in that order, a second apart."""
    for at, (name, step) in enumerate(steps.items()):
        api.save(folder / name, {"w": torch.full((1,), step)}, step=step)
        os.utime(folder / name / "manifest.json", (1e9 + at, 1e9 + at))
    return Timed(open_storage(str(folder)))


def step_of(storage: Storage) -> int:
    newest = newest_beside(storage)
    assert newest is not None
    return newest.step


@pytest.mark.parametrize(
    "steps",
    [
        {"step-2-loss-0.92": 2, "step-10-loss-0.31": 10},
        {"step-2": 2, "step-10": 10, "step-2.bak-20251125": 2},
        {"step-10": 10, "step-2.bak-20251125": 2},
        {"epoch-9": 900, "step-100": 100},
        {"epoch-1": 900, "step-100": 100},
        {"2025-11-24_run-final": 7, "2025-11-25_run-1": 3},
        {"best": 10, "last": 20, "first": 1},
        {"step-1-lr-5": 1, "step-2-lr-5": 2, "step-3-lr-4": 3},
        {"v1.10": 20, "v2.9": 30},
        {f"step-{step}-loss-0.{99 - step}": step for step in range(1, 13)},
    ],
    ids=lambda steps: next(iter(steps)),
)
@pytest.mark.parametrize("reverse", [False, True], ids=["as saved", "copied in reverse"])
def test_the_newest_is_the_one_of_the_highest_step_under_any_names(
    tmp_path: Path, steps: dict[str, int], reverse: bool
) -> None:
    order = dict(reversed(steps.items())) if reverse else steps
    assert step_of(saved(tmp_path, order)) == max(steps.values())


def test_it_is_what_load_and_open_take_and_the_log_warns_of_misleading_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, {"step-10-loss-0.31": 10, "step-2-loss-0.92": 2})
    with caplog.at_level(logging.WARNING, "raysharded.checkpoint"):
        assert api.load(tmp_path, {"w": torch.zeros(1, dtype=torch.int64)}).step == 10
    assert "'step-10-loss-0.31' is the newest of 2, with step 10" in caplog.text
    assert api.open(tmp_path).step == 10


def test_names_that_are_alike_but_for_their_step_are_trusted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage = saved(tmp_path, {f"step-{step}": step for step in range(1, 30)})
    assert step_of(storage) == 29
    assert storage.manifests == ["step-29"]
    assert caplog.text == ""


def test_the_newest_by_time_is_inspected_too(tmp_path: Path) -> None:
    """It matters after a run that began anew in the same folder, or one whose step 7 was named by mistake."""
    storage = saved(tmp_path, {"step-8": 8, "step-9": 9, "step-7": 70})
    assert step_of(storage) == 70
    assert sorted(set(storage.manifests)) == ["step-7", "step-8", "step-9"]


def test_of_many_doubtful_names_a_bounded_number_is_read_while_they_agree(tmp_path: Path) -> None:
    agreeing = saved(tmp_path / "agreeing", {f"lr-4-step-{number}": number for number in range(20)})
    assert step_of(agreeing) == 19
    assert len(agreeing.manifests) == 16
    storage = saved(tmp_path / "not", {f"step-{number}-of-{20 - number}": number for number in range(20)})
    assert step_of(storage) == 19
    assert len(storage.manifests) == 20, "the last numbers in their names do not tell: all are read"


def test_without_steps_names_decide(tmp_path: Path) -> None:
    assert step_of(saved(tmp_path, {"checkpoint-3": 0, "checkpoint-12": 0, "checkpoint-4": 0})) == 0
    newest = newest_beside(open_storage(str(tmp_path)))
    assert newest is not None
    assert newest.prefix == "checkpoint-12"


def test_a_damaged_one_is_an_error_where_it_may_be_the_newest_and_else_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, {"old-2-of-1": 2, "step-8": 8, "step-9": 9})
    (tmp_path / "old-2-of-1" / "manifest.json").write_text("{}")
    os.utime(tmp_path / "old-2-of-1" / "manifest.json", (1e9, 1e9))
    with caplog.at_level(logging.WARNING, "raysharded.checkpoint"):
        assert step_of(open_storage(str(tmp_path))) == 9
    assert "passing over a checkpoint beside others" in caplog.text
    os.utime(tmp_path / "old-2-of-1" / "manifest.json")
    with pytest.raises(CorruptCheckpoint):
        newest_beside(open_storage(str(tmp_path)))


def test_files_of_other_programs_that_are_named_like_a_manifest_are_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of a web page, of a browser's extension, or of another library's data."""
    saved(tmp_path, {"step-8": 8, "step-9": 9})
    (tmp_path / "page-2025").mkdir()
    for path in (tmp_path / "page-2025" / "manifest.json", tmp_path / "manifest.json"):
        path.write_text(json.dumps({"short_name": "Plots", "icons": [{"src": "a.png"}], "version": 2}))
    with caplog.at_level(logging.WARNING, "raysharded.checkpoint"):
        assert api.load(tmp_path, {"w": torch.zeros(1, dtype=torch.int64)}).step == 9
    assert "page-2025/manifest.json is a file of another program" in caplog.text
    place = find_place(str(tmp_path))
    assert isinstance(place, BesidePlace)
    assert place.choose(None).step == 9
    for name in ("step-8", "step-9"):
        (tmp_path / name / "manifest.json").unlink()
    with pytest.raises(CorruptCheckpoint, match=r"is a file of another program.*not a folder that holds complete"):
        api.open(tmp_path)


def test_a_manifest_that_another_programs_file_replaced_is_an_error(tmp_path: Path) -> None:
    """Such as the error of a proxy: an older checkpoint must not take its place, nor a start from nothing."""
    saved(tmp_path, {"step-8": 8, "step-9": 9})
    (tmp_path / "step-9" / "manifest.json").write_text('{"error": {"code": 403}}')
    for uri in (tmp_path, tmp_path / "step-9"):
        with pytest.raises(CorruptCheckpoint, match="replaced the manifest of the checkpoint whose data are there"):
            api.open(uri)


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "swapped"])
def test_a_damaged_manifest_is_never_taken_for_another_programs_file(tmp_path: Path, damage: str) -> None:
    saved(tmp_path, {"step-8": 8, "step-9": 9})
    path = tmp_path / "step-9" / "manifest.json"
    whole = path.read_bytes()
    body = json.loads(whole)
    path.write_bytes(
        {
            "cut": whole[:-7],
            "changed": whole.replace(b"format", b"forma_"),
            "empty": b"{}",
            "swapped": json.dumps({key: body[key] for key in reversed(body) if key != "digest"}).encode(),
        }[damage]
    )
    with pytest.raises(CorruptCheckpoint, match="do not match their digest"):
        newest_beside(open_storage(str(tmp_path)))


def test_a_link_to_a_checkpoint_whose_manifest_is_empty_is_an_error_as_the_checkpoint_itself(tmp_path: Path) -> None:
    saved(tmp_path / "runs", {"step-1": 1})
    saved(tmp_path, {"elsewhere": 2})
    (tmp_path / "elsewhere" / "manifest.json").write_bytes(b"")
    (tmp_path / "runs" / "step-2").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptCheckpoint):
        newest_beside(open_storage(str(tmp_path / "runs")))


def test_other_storages_know_times_or_do_without(tmp_path: Path) -> None:
    import fsspec

    fsspec.filesystem("memory").store.clear()
    for url in (f"file+fsspec://{tmp_path}", "memory://beside"):
        place = url.replace("file+fsspec", "fsspec+file")
        for name, step in {"step-10-loss-0.31": 10, "step-2-loss-0.92": 2}.items():
            api.save(f"{place}/{name}", {"w": torch.ones(1)}, step=step)
        assert api.open(place).step == 10
    plain = CountingStorage(open_storage(str(tmp_path)))  # which has keys alone
    assert step_of(plain) == 10
