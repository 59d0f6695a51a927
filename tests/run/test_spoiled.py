"""Run folders that somebody has spoiled: every command ends in time, with an answer or one of our errors."""

from __future__ import annotations

import json
import os
from itertools import product
from pathlib import Path

import pytest

from raysharded.checkpoint import open_storage
from raysharded.checkpoint.storage import NotAFile
from raysharded.errors import StorageError
from raysharded.journal import log
from raysharded.journal.log import DamagedJournal, read
from raysharded.ownership.lease import lease_key, read_lease
from raysharded.report import load
from tests.canary import connections
from tests.cases import tried_each_time
from tests.checkpoint.samples import seal
from tests.cli.test_commands import fail, invoke, succeed
from tests.run import spoiled


@pytest.mark.parametrize("count", tried_each_time([6], of=[6, 48]))
def test_spoiled_folders_give_answers_or_our_errors_and_open_no_connection(count: int) -> None:
    found = spoiled.watch(count, 1000)
    assert (found.folders, found.failures) == (count, [])
    assert found.answered > 5 * count
    assert found.refused > count / 2  # the changes matter


def test_the_tool_sees_a_connection_and_an_error_that_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import random
    import socket

    def stray(_: Path) -> None:
        with socket.socket() as made:
            made.connect_ex(("127.0.0.1", 9))
        raise KeyError("stray")

    monkeypatch.setattr(spoiled, "COMMANDS", {"stray": [stray]})
    (tmp_path / "original").mkdir()
    watched = spoiled.Watched()
    original = spoiled.make_runs(tmp_path / "original", random.Random(1))
    spoiled.case(1, [original], tmp_path / "case", watched)
    assert ["KeyError" in one or "socket.connect" in one for one in watched.failures] == [True, True]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    import random

    spoiled.make_runs(tmp_path, random.Random(1))
    return tmp_path / spoiled.NAME


JOURNAL, LEASE, CLAIM = "journal/00000001.jsonl", "lease/driver.json", "claims/0000000001.json"
KINDS = ["fifo", "device", "folder", "huge"]


@pytest.mark.parametrize(
    ("name", "kind"),
    tried_each_time(
        [*product([JOURNAL], KINDS), (LEASE, "fifo"), (LEASE, "huge"), (CLAIM, "device"), (CLAIM, "folder")],
        of=product([JOURNAL, LEASE, CLAIM], KINDS),
    ),
)
def test_no_pipe_device_or_endless_file_hangs_a_command(run: Path, name: str, kind: str) -> None:
    path = run / name
    path.unlink()
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case _:
            path.touch()
            os.truncate(path, 1 << 40)
    with connections() as opened:
        for words in (("status", run), ("report", run), ("checkpoint", "ls", run)):
            assert "Traceback" not in invoke(*words).output
        states = {
            one["url"].rpartition("/")[2]: one["state"] for one in json.loads(succeed("runs", run.parent, "--json"))
        }
    assert opened == []
    assert states["healthy"] == "finished"
    assert len(states) == 3


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("[" * 100_000, "is damaged: it is not JSON"),
        ("7", "is damaged: it is no entry"),
        ('{"kind":[]}', "is damaged: it is no entry"),
        ('{"kind":"generation","generation":"x"}', "a value that no driver wrote"),
        ('{"kind":"generation","generation":' + "9" * 5000 + "}", "is damaged: it is not JSON"),
        ('{"kind":"rewind","to_step":null,"reason":""}', "a value that no driver wrote"),
    ],
)
def test_a_journal_of_wrong_values_is_one_sentence_for_fit(run: Path, line: str, told: str) -> None:
    head = json.dumps({"kind": "segment", "writer": "driver"})
    (run / "journal" / "00000099.jsonl").write_text(f"{head}\n{line}\n")
    with pytest.raises(DamagedJournal, match=told) as caught:
        spoiled.resume(run)
    assert "\n" not in str(caught.value)


def test_one_run_without_access_is_shown_as_damaged_beside_its_neighbours(run: Path) -> None:
    (run / "journal").rename(run / "was")
    (run / "journal").write_text("in the way")
    found = {one["url"].rpartition("/")[2]: one for one in json.loads(succeed("runs", run.parent, "--json"))}
    assert found["healthy"]["state"] == "finished"
    assert found[run.name]["state"] == "damaged"
    assert fail("status", run)


def test_a_lease_cannot_make_others_wait_for_long(run: Path) -> None:
    storage = open_storage(str(run))
    body = json.loads(storage.read(lease_key("driver")))
    for changes in ({"lease_s": 1e9}, {"since": 1e300}, {"process": {"machine": "", "pid": 2**70, "started": 0}}):
        storage.write(lease_key("driver"), [seal({**body, **changes})])
        assert read_lease(storage, "driver").holder is None


def test_implausible_step_numbers_take_no_memory_in_the_report(run: Path) -> None:
    newest = max((run / "journal").glob("*.jsonl"))
    lines = [json.loads(line) for line in newest.read_text().splitlines()]
    step = next(
        json.loads(line) for path in sorted((run / "journal").iterdir()) for line in path.open() if '"step","' in line
    )
    for number in (2**40, 2**62, 2**63):
        newest.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {**step, "step": number}]))
        with_damage = load(str(run))
        assert with_damage.damage or with_damage.ledger is None


def test_a_journals_segments_are_of_a_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from raysharded.clock import SystemClock

    storage = open_storage(str(tmp_path))
    monkeypatch.setattr(log, "_NEW_SEGMENT_BYTES", 1000)
    journal = log.Journal(storage, SystemClock(), "driver")
    for number in range(100):
        journal.add("step", {"step": number, "text": "x" * (3000 if number == 50 else 10)}, at=0.0)
    journal.flush()
    sizes = [storage.size(key) for key in log.segment_keys(storage)]
    assert [entry["step"] for entry in read(storage)] == list(range(100))
    assert sum(size > 1200 for size in sizes) == 1
    monkeypatch.setattr(log, "MAX_SEGMENT_BYTES", 2000)
    with pytest.raises(DamagedJournal, match="more than 2000 bytes"):
        list(read(storage))


def test_a_folder_or_a_pipe_is_no_file_for_any_operation(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for key in ("folder", "pipe"):
        for act in (storage.size, storage.read):
            with pytest.raises(NotAFile, match=key):
                act(key)
        assert issubclass(NotAFile, StorageError)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return spoiled.originals_in(tmp_path_factory.mktemp("originals"))


@pytest.mark.parametrize(
    "seed", [11099, 11636, 11857, 13789, 14497, 20332, 20406, 20735, 20998, 22870, 24642, 34974, 42615]
)
def test_a_folder_that_once_gave_another_error_gives_one_of_ours(
    originals: list[Path], tmp_path: Path, seed: int
) -> None:
    watched = spoiled.Watched()
    with spoiled.quietly():
        spoiled.case(seed, originals, tmp_path / "case", watched)
    assert (watched.folders, watched.failures) == (1, [])
