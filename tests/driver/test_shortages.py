"""A driver whose storage takes no journal entries: it reports that, and trains on as long as it may."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import raysharded as rs
from raysharded.checkpoint import open_storage
from raysharded.checkpoint.storage.local import LocalStorage
from raysharded.driver.checkpoints import saves
from raysharded.driver.shortages import Shortages
from raysharded.driver.state.state import Phase, State
from raysharded.errors import StorageError
from raysharded.ids import GenerationId, WorkerId
from raysharded.journal.entry_text import incident_text
from raysharded.journal.log import Journal, read
from raysharded.journal.writer import BACK_OFF_S, Recorder
from raysharded.testing import processes
from tests.driver.scripted import LIMITS
from tests.driver.test_journal import SetClock
from tests.training.harness import GptTask, Tokens

TRAINING = State(limits=LIMITS, driver="d", phase=Phase.TRAINING, step=7)
PAUSED = replace(TRAINING, phase=Phase.PAUSED)


class DiskFull:
    """While it is on, local storage takes no journal entries."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on = False
        put = LocalStorage.put_if_absent

        def refusing(storage: LocalStorage, key: str, data: bytes) -> bool:
            if self.on and key.startswith("journal/"):
                raise StorageError(f"put_if_absent {storage.url}/{key} failed: No space left on device.")
            return put(storage, key, data)

        monkeypatch.setattr(LocalStorage, "put_if_absent", refusing)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> DiskFull:
    return DiskFull(monkeypatch)


class Bench:
    """A driver's reports of its storage, by a clock that a test moves."""

    def __init__(self, folder: Path) -> None:
        self.clock, self.told = SetClock(), list[tuple[str, dict[str, Any]]]()
        self.recorder = Recorder(Journal(open_storage(str(folder)), self.clock, "me"), self.clock)
        launcher: Any = self  # no worker is waited for
        self.missing, self.asked = "", list[int | None]()
        self.shortages = Shortages(
            launcher, self.recorder, self.clock, self._tell, self._tell, storage_patience_s=600.0
        )

    def describe_shortage(self, wanted: int | None = None) -> str:
        self.asked.append(wanted)
        return self.missing

    def _tell(self, kind: str, fields: dict[str, Any]) -> None:
        self.told.append((kind, fields))

    def look(self, state: State, after_s: float = 0.0) -> list[str]:
        """The texts of what the driver reports `after_s` seconds later, when an entry could not wait."""
        self.clock.now += after_s
        self.recorder.record("step", {"step": state.step}, durable=True)
        self.recorder.flush()
        self.told.clear()
        self.shortages.report(state)
        return [incident_text(kind, fields) or "" for kind, fields in self.told]


@pytest.fixture
def bench(tmp_path: Path, disk: DiskFull) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.recorder.abandon()


def test_storage_that_takes_no_entries_is_reported_with_its_error_and_what_follows(
    bench: Bench, disk: DiskFull
) -> None:
    assert bench.look(TRAINING) == []
    disk.on = True
    (said,) = bench.look(TRAINING, BACK_OFF_S)
    assert said.startswith(
        "step 7: storage has taken no entries of the journal for 0.00 s; in 10 min 0 s the run ends: "
    )
    assert said.endswith("No space left on device.")
    assert bench.look(TRAINING, 20.0) == []
    (said,) = bench.look(TRAINING, 10.0)
    assert "for 30 s; in 9 min 30 s the run ends" in said
    disk.on = False
    assert bench.look(TRAINING, 10.0) == ["storage takes entries again, after 40 s without"]
    assert bench.look(TRAINING, 10.0) == []


def test_a_range_that_is_not_filled_is_reported_once_for_each_generation_with_what_is_missing(bench: Bench) -> None:
    began = bench.clock.now
    starting = replace(
        TRAINING,
        limits=replace(LIMITS, min_workers=1, max_workers=3),
        generation=GenerationId(1),
        members=(WorkerId(0), WorkerId(1)),
        starting={WorkerId(2): began},
    )
    assert bench.look(starting) == []
    assert bench.look(starting, 9.0) == []
    assert bench.look(starting, 1.0) == []  # it lacks nothing: it takes long to start
    assert bench.asked == [3]
    bench.missing = "Each worker needs 1 CPU (the cluster has 2, 0 free)."
    assert bench.look(starting, 9.0) == []
    text = f"2 of at most 3 workers: 1 more would be taken. {bench.missing}"
    assert bench.look(starting, 1.0) == [f"step 7: {text}"]
    assert bench.look(starting, 100.0) == []
    assert bench.shortages.below_maximum(starting) == text
    assert bench.shortages.below_maximum(replace(starting, phase=Phase.PAUSED)) == ""
    full = replace(starting, members=(*starting.members, WorkerId(2)), generation=GenerationId(2), starting={})
    assert bench.look(full, 100.0) == []
    assert bench.shortages.below_maximum(full) == ""
    again = replace(starting, generation=GenerationId(3))  # what a lost worker had is free by now
    assert bench.shortages.below_maximum(again) == ""
    assert bench.look(again, 5.0) == []
    assert bench.look(again, 10.0) == [f"step 7: {text}"]


def test_what_fails_now_can_be_asked_for_at_any_time(bench: Bench, disk: DiskFull) -> None:
    assert bench.shortages.storage_failing(TRAINING) == ""
    disk.on = True
    bench.look(TRAINING)
    bench.clock.now += 20.0
    assert "for 20 s; in 9 min 40 s the run ends: put_if_absent" in bench.shortages.storage_failing(TRAINING)
    assert "the run ends" not in bench.shortages.storage_failing(PAUSED)
    disk.on = False
    bench.look(TRAINING)
    assert bench.shortages.storage_failing(TRAINING) == ""


def test_a_stop_that_waits_for_its_checkpoint_is_noted() -> None:
    stopping = replace(TRAINING, stop_requested=True)
    assert saves.stop_warning(TRAINING) == ""
    assert saves.stop_warning(replace(stopping, phase=Phase.OVER)) == ""
    assert saves.stop_warning(stopping) == (
        "a stop was requested: it ends when a checkpoint of a step after 0 is committed; another stop ends it without "
        "one"
    )
    assert "is committed (2 attempts failed); another" in saves.stop_warning(replace(stopping, failed_saves=2))


def test_the_run_ends_when_storage_has_failed_for_too_long(bench: Bench, disk: DiskFull) -> None:
    disk.on = True
    bench.look(TRAINING)
    bench.look(TRAINING, 600.0)
    with pytest.raises(StorageError, match="No space left on device"):
        bench.look(TRAINING, 1.0)


def test_a_paused_run_waits_for_storage_as_long_as_its_pause(bench: Bench, disk: DiskFull) -> None:
    disk.on = True
    bench.look(TRAINING, 0.0)
    for _ in range(10):
        (said,) = bench.look(PAUSED, 500.0)
        assert "the run ends" not in said
    bench.look(TRAINING, 599.0)
    with pytest.raises(StorageError):
        bench.look(TRAINING, 2.0)


def test_a_run_trains_on_while_its_journal_cannot_be_written_and_nothing_of_it_is_lost(
    tmp_path: Path, disk: DiskFull
) -> None:
    heard: list[str] = []

    def listen(kind: str, fields: dict[str, Any]) -> None:
        heard.append(kind)
        if kind == "step" and "storage_failing" not in heard:
            disk.on = fields["step"] >= 3
        elif kind == "storage_failing":
            disk.on = False

    trainer = rs.ElasticTrainer(
        task=GptTask(),
        data=Tokens(),
        batch=rs.BatchConfig(global_batch_size=4, microbatch_size=2),
        scaling=rs.ScalingConfig(num_workers=1),
        run=rs.RunConfig(
            name="full", storage_path=str(tmp_path), max_steps=60, checkpoint=rs.CheckpointConfig(every_steps=5)
        ),
    )
    processes.fit(trainer, listen=listen)
    assert heard.count("storage_failing") == 1
    entries = list(read(open_storage(str(tmp_path / "full"))))
    assert [entry["step"] for entry in entries if entry["kind"] == "step"] == list(range(1, 61))


def test_a_write_that_fails_leaves_no_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a full disk, which takes folders and no files."""
    storage = open_storage(str(tmp_path / "run"))
    storage.write("kept/file", [b"x"])

    def full(handle: int) -> None:
        if stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(StorageError, match="No space left on device"):
            storage.write("checkpoints/step-1/w0", [b"x"])
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["kept"]
    storage.write("checkpoints/step-1/w0", [b"x"])
    assert storage.read("checkpoints/step-1/w0") == b"x"
