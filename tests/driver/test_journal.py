"""Guarantees for a reader and a second writer of a run's journal, on a folder and on fsspec's memory."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from raysharded.checkpoint import SigningKey, Storage, open_storage
from raysharded.driver.startup import resume_point
from raysharded.driver.startup.adopted_workers import saves_given_up
from raysharded.driver.startup.persisted_requests import asked_last
from raysharded.driver.startup.resume_point import rollbacks
from raysharded.driver.state.state import State
from raysharded.errors import RefusedCheckpoint, RunOwnedElsewhere, StorageError
from raysharded.journal.log import FOLDER, DamagedJournal, Journal, newest_generation, next_segment, read, segment_key
from raysharded.journal.reader import entries_of, steps_of
from raysharded.journal.signed_segments import Chain, Link, is_signed
from raysharded.journal.verified import JournalReader, read_verified, reduced
from raysharded.protocol.session import last_recorded_step, taken_back
from tests.driver.schedules import BASE


class SetClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now + 0.5


class LosesReplies:
    """A storage whose writes arrive, but whose answer to the first one is lost."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.lost = 0

    @property
    def url(self) -> str:
        return self._storage.url

    def put_if_absent(self, key: str, data: bytes) -> bool:
        done = self._storage.put_if_absent(key, data)
        if not self.lost:
            self.lost += 1
            raise StorageError("the connection was reset")
        return done

    def __getattr__(self, name: str) -> object:
        return getattr(self._storage, name)


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    url = str(tmp_path / "run") if request.param == "local" else f"memory://{tmp_path.name}/run"
    opened = open_storage(url)
    yield opened
    opened.delete(opened.list())


def test_what_an_older_driver_has_under_way_is_read_after_a_fence_or_never_arrives(storage: Storage) -> None:
    clock = SetClock()
    older, oldest = Journal(storage, clock, "a"), Journal(storage, clock, "z")
    older.append("step", {"step": 1}, durable=True)
    newer = Journal(storage, clock, "b", still_owns=lambda: True)
    older.append("step", {"step": 2}, durable=True)  # it arrives before the fence
    newer.fence()
    assert [entry["step"] for entry in read(storage)] == [1, 2]
    for journal in (older, oldest):
        with pytest.raises(RunOwnedElsewhere):
            journal.append("step", {"step": 3}, durable=True)
    newer.append("started", {}, durable=True)
    assert [entry["kind"] for entry in read(storage)] == ["step", "step", "started"]


def test_entries_are_read_back_in_order_with_the_time_they_were_made(storage: Storage) -> None:
    clock = SetClock()
    journal = Journal(storage, clock, "me")
    journal.append("generation", {"generation": 1, "members": (3, 4)})
    clock.now += 1
    journal.append("step", {"step": 1, "seconds": {"forward": 0.25}, "text": "Zeile\u2028eins\n"}, durable=True)
    assert list(read(storage)) == [
        {"kind": "generation", "at": 1000.5, "generation": 1, "members": [3, 4]},
        {"kind": "step", "at": 1001.5, "step": 1, "seconds": {"forward": 0.25}, "text": "Zeile\u2028eins\n"},
    ]


def test_a_password_of_a_url_is_not_stored(storage: Storage) -> None:
    journal = Journal(storage, SetClock(), "me")
    told = {"error": "read sftp://me:hunter2@host/a failed", "places": [{"url": "http://hunter2@host"}]}
    journal.append("failed", told, durable=True)
    assert [key for key in storage.list() if b"hunter2" in storage.read(key)] == []
    (entry,) = read(storage)
    assert entry["error"] == "read sftp://me:***@host/a failed"


def test_floats_that_json_cannot_express_become_strings_that_float_reads(storage: Storage) -> None:
    journal = Journal(storage, SetClock(), "me")
    losses = [math.nan, math.inf, -math.inf, 0.1]
    journal.append("step", {"loss": losses, "metrics": {"accuracy": math.nan}}, durable=True)
    (entry,) = read(storage)
    assert [type(loss) for loss in entry["loss"]] == [str, str, str, float]
    assert [repr(float(loss)) for loss in entry["loss"]] == [repr(loss) for loss in losses]
    assert entry["metrics"] == {"accuracy": "nan"}


def test_floats_keep_every_bit(storage: Storage) -> None:
    losses = [0.1 + 0.2, 5e-324, 1.7976931348623157e308, -0.0, 1 / 3]
    Journal(storage, SetClock(), "me").append("step", {"loss": losses}, durable=True)
    (entry,) = read(storage)
    assert [loss.hex() for loss in entry["loss"]] == [loss.hex() for loss in losses]


def test_a_durable_entry_is_on_storage_at_once_and_takes_along_what_waited(storage: Storage) -> None:
    journal = Journal(storage, SetClock(), "me", flush_interval_s=2.0)
    journal.append("step", {"step": 1})
    assert list(read(storage)) == []
    journal.append("worker_lost", {"worker": 1}, durable=True)
    assert [entry["kind"] for entry in read(storage)] == ["step", "worker_lost"]


def test_an_entry_waits_no_longer_than_the_interval_and_the_next_entry(storage: Storage) -> None:
    clock = SetClock()
    journal = Journal(storage, clock, "me", flush_interval_s=2.0)
    journal.append("step", {"step": 1})
    clock.now += 2.0
    journal.append("step", {"step": 2})
    assert [entry["step"] for entry in read(storage)] == [1, 2]


def test_a_long_run_writes_segments_less_often_but_durable_entries_at_once(storage: Storage) -> None:
    clock = SetClock()
    storage.put_if_absent(segment_key(20_000), b"")
    journal = Journal(storage, clock, "me", flush_interval_s=2.0)
    journal.append("step", {"step": 1})
    clock.now += 29.0
    journal.append("step", {"step": 2})
    assert list(read(storage)) == []
    clock.now += 1.0
    journal.append("step", {"step": 3})
    journal.append("worker_lost", {"worker": 1}, durable=True)
    assert len(storage.list(FOLDER)) == 3


def test_segments_are_numbered_on_and_nothing_to_write_makes_none(storage: Storage) -> None:
    journal = Journal(storage, SetClock(), "me")
    journal.flush()
    for step in (1, 2, 3):
        journal.append("step", {"step": step}, durable=True)
    journal.flush()
    assert storage.list(FOLDER) == [segment_key(n) for n in (1, 2, 3)]
    assert next_segment(storage) == 4


def test_a_later_driver_writes_behind_the_entries_of_the_earlier(storage: Storage) -> None:
    Journal(storage, SetClock(), "first").append("generation", {"generation": 4}, durable=True)
    Journal(storage, SetClock(), "second").append("generation", {"generation": 5}, durable=True)
    assert [entry["generation"] for entry in read(storage)] == [4, 5]
    assert newest_generation(read(storage)) == 5


def test_of_two_drivers_at_once_the_second_to_write_gets_an_error_that_it_does_not_own_the_run(
    storage: Storage,
) -> None:
    first, second = (Journal(storage, SetClock(), name) for name in ("first", "second"))
    second.append("started", {"driver": "second"}, durable=True)
    with pytest.raises(RunOwnedElsewhere, match="another driver wrote journal/00000001"):
        first.append("started", {"driver": "first"}, durable=True)
    assert [entry["driver"] for entry in read(storage)] == ["second"]


def test_the_owner_of_the_run_writes_behind_what_an_older_driver_still_wrote(storage: Storage) -> None:
    owner = Journal(storage, SetClock(), "owner", still_owns=lambda: True)
    zombie = Journal(storage, SetClock(), "zombie", still_owns=lambda: False)
    for step in (1, 2):
        zombie.append("step", {"step": step}, durable=True)
    owner.append("started", {"driver": "owner"}, durable=True)
    with pytest.raises(RunOwnedElsewhere):
        zombie.append("step", {"step": 3}, durable=True)
    owner.append("step", {"step": 1}, durable=True)
    assert [entry["kind"] for entry in read(storage)] == ["step", "step", "started", "step"]


def test_a_lost_reply_is_not_taken_for_another_driver(storage: Storage) -> None:
    unreliable = LosesReplies(storage)
    journal = Journal(unreliable, SetClock(), "me")  # type: ignore[arg-type]  # forwards the rest
    with pytest.raises(StorageError):
        journal.append("step", {"step": 1}, durable=True)
    journal.flush()
    journal.append("step", {"step": 2}, durable=True)
    assert unreliable.lost == 1
    assert [entry["step"] for entry in read(storage)] == [1, 2]


def test_what_was_added_after_a_lost_reply_is_not_taken_for_another_driver_either(storage: Storage) -> None:
    journal = Journal(LosesReplies(storage), SetClock(), "me")  # type: ignore[arg-type]  # forwards the rest
    with pytest.raises(StorageError):
        journal.append("step", {"step": 1}, durable=True)
    journal.append("step", {"step": 2}, durable=True)
    assert [entry["step"] for entry in read(storage)] == [1, 2]


def test_what_a_killed_writer_left_behind_does_not_stop_a_reader(storage: Storage) -> None:
    Journal(storage, SetClock(), "me").append("step", {"step": 1}, durable=True)
    whole = storage.read(segment_key(1))
    storage.write(segment_key(1) + ".tmp-0123456789ab", [whole[:10]])
    storage.write(segment_key(2), [whole, whole.splitlines()[1][:7]])
    assert [entry["step"] for entry in read(storage)] == [1, 1]
    assert next_segment(storage) == 3


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60)
@given(
    st.lists(st.dictionaries(st.text().filter(lambda key: key not in ("kind", "at")), PLAIN, max_size=4), max_size=5)
)
def test_all_values_of_json_come_back_as_they_were(entries: list[dict[str, object]]) -> None:
    storage = open_storage("memory://journal-round-trip")
    storage.delete(storage.list())
    journal = Journal(storage, SetClock(), "me")
    for fields in entries:
        journal.append("entry", fields)
    journal.flush()
    assert [{k: v for k, v in entry.items() if k not in ("kind", "at")} for entry in read(storage)] == entries


def test_several_segments_are_read_at_once_and_come_in_order(storage: Storage) -> None:
    class Meets:
        """A storage in which a read returns only when another is under way."""

        barrier = threading.Barrier(2)

        def read(self, key: str, offset: int, size: int) -> bytes:
            self.barrier.wait(10.0)
            return storage.read(key, offset, size)

        def __getattr__(self, name: str) -> object:
            return getattr(storage, name)

    journal = Journal(storage, SetClock(), "driver")
    for step in range(8):
        journal.append("step", {"step": step}, durable=True)
    meets: Any = Meets()
    assert [entry["step"] for entry in read(meets)] == list(range(8))


# -- signed --

KEY, OTHER = SigningKey(b"k" * 32), SigningKey(b"o" * 32)


def signed(storage: Storage, writer: str = "me", key: SigningKey | None = KEY, *, accept: bool = False) -> Journal:
    """The journal of a driver that has read what was there."""
    journal = Journal(storage, SetClock(), writer, key=key, still_owns=lambda: True)
    journal.fence()
    journal.follow(read_verified(storage, key, accept_unsigned=accept).link)
    return journal


def steps(storage: Storage, key: SigningKey | None = KEY, *, accept: bool = False) -> list[int]:
    return [entry["step"] for entry in read_verified(storage, key, accept_unsigned=accept).entries]


def write(journal: Journal, *steps: int) -> None:
    """Entries that a new driver keeps one by one."""
    for step in steps:
        journal.append("audit", {"step": step}, durable=True)


def test_entries_of_several_drivers_with_the_key_count_and_others_are_left_out(storage: Storage) -> None:
    write(signed(storage, "a"), 1, 2)
    write(Journal(storage, SetClock(), "mallory"), 666)
    write(Journal(storage, SetClock(), "mallory", key=OTHER), 667)
    write(signed(storage, "b"), 3)
    assert steps(storage) == [1, 2, 3]
    assert [entry["step"] for entry in read(storage)] == [1, 2, 666, 667, 3]


def test_a_driver_writes_past_a_segment_that_was_put_in_its_way(storage: Storage) -> None:
    journal = signed(storage, "a")
    write(journal, 1)
    write(Journal(storage, SetClock(), "mallory"), 666)
    write(journal, 2)
    assert steps(storage) == [1, 2]


def test_a_lost_reply_breaks_no_chain(storage: Storage) -> None:
    journal = Journal(LosesReplies(storage), SetClock(), "me", key=KEY)  # type: ignore[arg-type]  # forwards the rest
    with pytest.raises(StorageError):
        write(journal, 1)
    write(journal, 2, 3)
    assert steps(storage) == [1, 2, 3]


def test_a_fence_is_not_signed_and_breaks_no_chain(storage: Storage) -> None:
    """It may be of a worker without a driver, which has no key."""
    write(signed(storage, "a"), 1)
    Journal(storage, SetClock(), "orphan").fence()
    write(signed(storage, "b"), 2)
    assert steps(storage) == [1, 2]
    chain = Chain[None](key=KEY, url=storage.url)
    for key in storage.list(FOLDER):
        chain.add(key, storage.read(key), lambda _: None)
    assert chain.checked().ignored == []


def test_signed_steps_are_read_as_unsigned_ones_are(storage: Storage) -> None:
    """Only the beginnings of steps are read, in segments that the key signed."""
    journal = signed(storage)
    for numbers in ((3, 1, 2), (4,), (5, 7, 6)):
        for step in numbers:
            journal.append("step", {"generation": 1, "step": step, "seconds": {"step": 99}})
        journal.flush()
    journal.append("step", {"metrics": {"generation": 1, "step": 99}, "generation": 1, "step": 5}, durable=True)
    journal.append("generation", {"generation": 2, "step": 9, "members": [0]}, durable=True)
    found = read_verified(storage, KEY).entries
    assert found == read_verified(storage, None).entries
    assert [entry["step"] for entry in found] == [7, 5, 9]


@pytest.mark.parametrize("change", ["removed", "unsigned", "swapped", "cut", "earlier"])
def test_a_segment_that_is_missing_changed_or_out_of_order_is_detected(storage: Storage, change: str) -> None:
    write(signed(storage), 1, 2, 3, 4)
    keys = storage.list(FOLDER)[1:]
    second, third = (storage.read(key) for key in keys[1:3])
    match change:
        case "removed":
            storage.delete([keys[1]])
        case "unsigned":
            storage.write(keys[1], [b'{"kind":"segment","writer":"me"}\n' + second.partition(b"\n")[2]])
        case "swapped":
            storage.write(keys[1], [third])
            storage.write(keys[2], [second])
        case "cut":
            storage.write(keys[1], [second[:-1]])
        case "earlier":
            storage.write(keys[1], [storage.read(keys[0])])
    with pytest.raises(RefusedCheckpoint, match="some were removed or replaced"):
        steps(storage)


def test_segments_of_another_run_or_key_do_not_count(storage: Storage) -> None:
    other = open_storage(f"memory://{id(storage)}/other")
    write(signed(other), 1, 2)
    for key in other.list(FOLDER):
        storage.write(key, [other.read(key)])
    with pytest.raises(RefusedCheckpoint, match="signed with another key than the one given, or elsewhere"):
        steps(storage)
    with pytest.raises(RefusedCheckpoint, match="signed with another key"):
        steps(other, OTHER)
    other.delete(other.list())


def test_a_journal_without_signatures_counts_until_the_first_signed_segment_vouches_for_it(storage: Storage) -> None:
    write(Journal(storage, SetClock(), "old"), 1, 2)
    assert read_verified(storage, KEY).is_unsigned
    write(signed(storage, "new"), 3)
    found = read_verified(storage, KEY)
    assert ([entry["step"] for entry in found.entries], found.is_unsigned) == ([1, 2, 3], False)
    write(Journal(storage, SetClock(), "mallory"), 666)
    assert steps(storage) == [1, 2, 3]
    storage.write(segment_key(2), [storage.read(segment_key(1))])
    with pytest.raises(RefusedCheckpoint, match="some were removed or replaced"):
        steps(storage)


def test_what_a_user_accepts_counts_from_the_next_signed_segment_on(storage: Storage) -> None:
    write(signed(storage, "a"), 1, 2, 3)
    storage.delete([segment_key(3)])
    with pytest.raises(RefusedCheckpoint, match=r"RunConfig\(accept_unsigned=True\)"):
        steps(storage)
    assert steps(storage, accept=True) == [1, 3]
    write(signed(storage, "b", accept=True), 4)
    assert steps(storage) == [1, 3, 4]
    write(signed(storage, "c", accept=True), 5)  # there is nothing left to accept
    assert steps(storage) == [1, 3, 4, 5]


def test_readers_without_the_key_read_signed_segments_as_others(storage: Storage) -> None:
    signed(storage).append("step", {"step": 1}, durable=True)
    newest = storage.read(storage.list(FOLDER)[-1])
    assert is_signed(newest)
    assert [entry["step"] for entry in steps_of(newest) or []] == [1]
    assert [(line, entry["step"]) for line, entry in entries_of(newest)] == [(2, 1)]
    assert len(newest.partition(b"\n")[0]) < 256, "older versions read no more of a head"


def test_a_link_of_a_journal_without_segments_is_that_of_a_new_run(storage: Storage) -> None:
    assert read_verified(storage, KEY).link == Link()
    assert read_verified(storage, KEY, accept_unsigned=True).link == Link()


class Refuses:
    """A storage that takes no segments while `full`; the first one that it refuses arrives all the same."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.full = False
        self.refused = 0

    @property
    def url(self) -> str:
        return self._storage.url

    def put_if_absent(self, key: str, data: bytes) -> bool:
        if self.full:
            self.refused += 1
            if self.refused == 1:
                self._storage.put_if_absent(key, data)
            raise StorageError("no space left")
        return self._storage.put_if_absent(key, data)

    def __getattr__(self, name: str) -> object:
        return getattr(self._storage, name)


def test_of_entries_that_cannot_be_written_the_newest_are_kept_and_the_dropped_are_counted(storage: Storage) -> None:
    refusing = Refuses(storage)
    journal = Journal(refusing, SetClock(), "a", most_bytes=4000)  # type: ignore[arg-type]
    journal.append("step", {"step": 1}, durable=True)
    refusing.full = True
    with pytest.raises(StorageError):
        journal.append("step", {"step": 2}, durable=True)
    for number in range(3, 1001):
        journal.add("step", {"step": number}, at=0.0)
        if number % 100 == 0:
            journal.add("checkpoint", {"step": number}, at=0.0, durable=True)
    refusing.full = False
    journal.flush()
    entries = list(read(storage))
    (gap,) = [entry for entry in entries if entry["kind"] == "entries_dropped"]
    steps = [entry["step"] for entry in entries if entry["kind"] == "step"]
    assert steps == [1, 2, *range(gap["last_step"] + 1, 1001)]
    assert (gap["first_step"], gap["steps"], gap["entries"]) == (3, 1000 - len(steps), 1000 - len(steps))
    assert len(steps) > 50, "a tenth less than the limit is kept"
    assert [entry["step"] for entry in entries if entry["kind"] == "checkpoint"] == list(range(100, 1001, 100))
    assert entries.index(gap) == 2, "it stands where they would"
    journal.append("step", {"step": 1001}, durable=True)
    assert [entry["kind"] for entry in read(storage)].count("entries_dropped") == 1


# -- what a new driver reads --


def _ordinary(numbers: Iterable[int]) -> list[dict[str, Any]]:
    return [{"kind": "step", "at": 1.0, "step": number, "seconds": {"forward": 0.5}} for number in numbers]


def test_consecutive_steps_are_reduced_to_the_highest_and_the_last_and_recordings_are_left_out() -> None:
    lost, event = {"kind": "worker_lost", "worker": 3}, {"kind": "event", "number": 1}
    odd = {"kind": "step", "step": "7", "seconds": {}}
    entries = [*_ordinary([1, 2]), event, *_ordinary([3]), lost, odd, *_ordinary([9, 8, 4, 5]), {"kind": "recording"}]
    plain = [{"kind": "step", "step": number} for number in (3, 9, 5)]
    assert list(reduced(entries)) == [plain[0], lost, odd, plain[1], plain[2]]


OTHERS = ("generation", "rewind", "resize", "started", "checkpoint_failed")


@given(st.lists(st.one_of(st.integers(1, 5), st.sampled_from(OTHERS))))
def test_a_new_driver_decides_the_same_by_the_reduced_journal(drawn: list[int | str]) -> None:
    fields: dict[str, dict[str, Any]] = {
        "generation": {"generation": 4, "step": 2},
        "rewind": {"to_step": 1, "reason": "x"},
        "resize": {"workers": 3},
        "started": {"resumed_after_step": 2, "scaling": {}},
        "checkpoint_failed": {"step": 3, "error": "x"},
    }
    entries = [{"kind": "step", "step": one} if isinstance(one, int) else {"kind": one, **fields[one]} for one in drawn]
    short = list(reduced(entries))
    workers = lambda entry: int(entry["workers"])  # noqa: E731
    assert asked_last(entries, {}, "resize", workers) == asked_last(short, {}, "resize", workers)
    assert last_recorded_step(entries) == last_recorded_step(short)
    assert taken_back(entries) == taken_back(short)
    assert rollbacks(entries) == rollbacks(short)
    state = State(limits=BASE)
    assert saves_given_up(state, entries, range(1, 6), ()) == saves_given_up(state, short, range(1, 6), ())
    assert resume_point._with_decisions(state, entries) == resume_point._with_decisions(state, short)
    kinds = [entry["kind"] for entry in short]
    assert ["step"] * 3 not in [kinds[at : at + 3] for at in range(len(kinds))]


def test_numbers_of_any_size_are_read_as_they_were_written(storage: Storage) -> None:
    seed = 2**70 + 1
    signed(storage, "a", None).append("started", {"batch": {"seed": seed}, "step": 0}, durable=True)
    (entry,) = read_verified(storage, None).entries
    assert entry["batch"] == {"seed": seed}


@pytest.mark.parametrize("key", [None, KEY])
def test_a_second_read_reads_only_what_was_written_since(storage: Storage, key: SigningKey | None) -> None:
    counted = CountsReads(storage)
    write(signed(storage, "a", key), 1, 2)
    reader = JournalReader(counted, key)
    assert [entry["step"] for entry in reader.read().entries] == [1, 2]
    write(signed(storage, "b", key), 3)
    counted.keys.clear()
    found = reader.read()
    assert [entry["step"] for entry in found.entries] == [1, 2, 3]
    assert found == read_verified(storage, key)
    assert counted.keys == [segment_key(4), segment_key(5)], "a fence, and what was written since"


def test_a_second_read_begins_again_if_what_was_read_is_no_longer_there(storage: Storage) -> None:
    write(signed(storage, "a"), 1, 2, 3)
    reader = JournalReader(storage, KEY)
    assert len(reader.read().entries) == 3
    storage.delete([segment_key(3)])
    with pytest.raises(RefusedCheckpoint, match="some were removed or replaced"):
        reader.read()


@pytest.mark.parametrize("line", [b"{", b'"kind"', b"[1]", b'{"kind":1}', b'{"kind":"a","x":[1\n2],"y":{}}'])
def test_damage_counts_where_its_segment_counts(storage: Storage, line: bytes) -> None:
    write(signed(storage), 1)
    storage.write(segment_key(9), [b'{"kind":"segment"}\n' + line + b"\n"])
    assert steps(storage) == [1], "nobody with the key wrote the damaged one"
    with pytest.raises(DamagedJournal, match=f"line 2 of .*{segment_key(9)}"):
        read_verified(storage, None)


class CountsReads:
    """A storage that notes which keys are read."""

    def __init__(self, storage: Storage) -> None:
        self._storage, self.keys = storage, list[str]()

    def read(self, key: str, offset: int = 0, size: int | None = None) -> bytes:
        self.keys.append(key)
        return self._storage.read(key, offset, size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)
