"""A run has one owner, and one sequence with its commits, in every race and after every lost reply."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from raysharded.checkpoint import Claims, Storage, open_storage
from raysharded.checkpoint.claims import Claimer, FindNewest, Get, NotOwner, Put
from raysharded.checkpoint.stored_claims import (
    Claim,
    claim_key,
    decode_claim,
    encode_claim,
    find_newest,
    list_numbers,
    read_claim,
)
from raysharded.errors import CheckpointError, CorruptCheckpoint, RunOwnedElsewhere, StaleGeneration, StorageError
from raysharded.testing.storages import CountingStorage, FailingStorage
from tests.cases import examples

DIGEST = "d" * 64


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "run") if request.param == "local" else f"memory://{tmp_path}/run")


def _commit(claims: Claims, generation: int, step: int) -> int:
    return claims.commit(generation, step, f"checkpoints/step-{step}", DIGEST)


def _all(storage: Storage) -> list[Claim]:
    return [read_claim(storage, number) for number in list_numbers(storage)]


def test_an_owner_commits_and_the_next_owner_continues_after_it(storage: Storage) -> None:
    first = Claims(storage, "first", wall=lambda: 7.0)
    assert first.own(3) == 3
    assert _commit(first, 3, 10) == 2
    assert _commit(first, 5, 20) == 3
    second = Claims(storage, "second")
    assert second.own(1) == 6, "above all generations that were claimed"
    assert _commit(second, 6, 30) == 5
    assert [(claim.number, claim.kind, claim.generation, claim.writer, claim.step) for claim in _all(storage)] == [
        (1, "owner", 3, "first", 0),
        (2, "commit", 3, "first", 10),
        (3, "commit", 5, "first", 20),
        (4, "owner", 6, "second", 0),
        (5, "commit", 6, "second", 30),
    ]
    assert _all(storage)[1] == Claim(
        number=2,
        id=_all(storage)[0].id,
        kind="commit",
        generation=3,
        writer="first",
        created_at=7.0,
        step=10,
        prefix="checkpoints/step-10",
        digest=DIGEST,
    )


def test_an_older_owner_is_refused_with_the_newer_ones_name_in_every_generation(storage: Storage) -> None:
    old, new = Claims(storage, "old"), Claims(storage, "new")
    old.own(1)
    new.own(2)
    for generation in (1, 2, 99):
        with pytest.raises(NotOwner, match="'new', owns the run") as caught:
            _commit(old, generation, 10)
        assert isinstance(caught.value, StaleGeneration)
        assert isinstance(caught.value, RunOwnedElsewhere)
    assert [claim.kind for claim in _all(storage)] == ["owner", "owner"]


def test_an_older_generation_and_an_earlier_step_of_the_same_owner_are_refused(storage: Storage) -> None:
    claims = Claims(storage, "a")
    claims.own(1)
    _commit(claims, 2, 20)
    with pytest.raises(StaleGeneration, match="generation 2") as caught:
        _commit(claims, 1, 30)
    assert not isinstance(caught.value, NotOwner), "it still owns the run"
    with pytest.raises(StaleGeneration, match="step 20 of it was committed before"):
        _commit(claims, 2, 10)
    _commit(claims, 3, 10)


def test_who_owns_nothing_commits_nothing(storage: Storage) -> None:
    with pytest.raises(CheckpointError, match="own"):
        _commit(Claims(storage, "a"), 1, 1)
    assert storage.list() == []


def test_the_same_commit_again_is_the_same_claim(storage: Storage) -> None:
    claims = Claims(storage, "a")
    claims.own(1)
    number = _commit(claims, 1, 10)
    _commit(claims, 1, 20)
    assert _commit(claims, 1, 10) == number
    assert len(_all(storage)) == 3


@pytest.mark.parametrize("took_effect", [False, True])
def test_after_any_failure_the_same_call_shows_whether_the_claim_was_made(storage: Storage, took_effect: bool) -> None:
    class Flaky(FailingStorage):
        """Fails once."""

        def _do(self, operation: str, act: Callable[[], Any], half: Callable[[], object] = lambda: None) -> Any:
            if self.fired:
                return act()
            return super()._do(operation, act, half)

    for fail_at in range(10):
        claims = Claims(flaky := Flaky(storage, fail_at=fail_at, took_effect=took_effect), f"driver {fail_at}")

        def again(call: Callable[[], int]) -> int:
            try:
                return call()
            except StorageError:
                return call()

        before = len(_all(storage))
        generation = again(lambda: claims.own(0))  # noqa: B023  # called at once
        again(lambda: _commit(claims, generation, 10))  # noqa: B023
        again(lambda: _commit(claims, generation, 20))  # noqa: B023
        added = _all(storage)[before:]
        assert [(claim.kind, claim.step) for claim in added] == [("owner", 0), ("commit", 10), ("commit", 20)]
        if not flaky.fired:
            assert fail_at > 3
            return
    raise AssertionError("never without a failure")


def test_a_start_reads_one_claim_and_a_commit_none_however_many_there_are(storage: Storage) -> None:
    first = Claims(storage, "first")
    first.own(1)
    for step in range(50):
        _commit(first, 1, step)
    counting = CountingStorage(storage)
    second = Claims(counting, "second")
    assert second.own(0) == 2
    _commit(second, 2, 99)
    assert [key for key, _, _ in counting.reads] == [claim_key(51)]


def test_a_claim_that_cannot_be_read_stops_a_commit_and_is_passed_over_by_a_new_owner(storage: Storage) -> None:
    old = Claims(storage, "old")
    old.own(4)
    storage.write(claim_key(2), [b'{"digest":"torn'])
    with pytest.raises(CorruptCheckpoint, match=r"claims/0000000002\.json"):
        _commit(old, 4, 10)
    new = Claims(storage, "new")
    assert new.own(0) == 5
    assert _commit(new, 5, 10) == 4
    late = Claims(storage, "late")
    late.own(0)
    assert find_newest(storage)[0] == 5


def test_a_new_owner_passes_over_unreadable_claims_that_appear_while_it_claims(storage: Storage) -> None:
    claims = Claims(storage, "a")
    claims.own(1)
    storage.write(claim_key(2), [b""])
    assert claims.own(1) == 2
    assert find_newest(storage)[0] == 3


def test_every_byte_of_a_claim_counts() -> None:
    claim = Claim(
        number=7, id="i", kind="commit", generation=1, writer="w", created_at=0.5, step=3, prefix="p", digest=DIGEST
    )
    data = encode_claim(claim)
    assert decode_claim(data, 7, "here") == claim
    for at in range(len(data)):
        with pytest.raises(CorruptCheckpoint, match="here"):
            decode_claim(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], 7, "here")
        with pytest.raises(CorruptCheckpoint, match="here"):
            decode_claim(data[:at], 7, "here")
    with pytest.raises(CorruptCheckpoint, match="number 7"):
        decode_claim(data, 8, "here")


# -- every order of two or three drivers' operations --


@dataclass
class Told:
    """The result of one of a driver's commits."""

    driver: int
    prefix: str
    outcome: str = "nothing"


@dataclass
class Sequence:
    """The claims in storage, and the results of drivers. A reply may be lost, before or after its effect."""

    claims: dict[int, Claim] = field(default_factory=dict)
    told: list[Told] = field(default_factory=list)
    owners: list[tuple[int, int]] = field(default_factory=list)
    """(driver, generation) in the order of the results."""

    def do(self, wanted: FindNewest | Put | Get) -> Any:
        match wanted:
            case FindNewest():
                number = max(self.claims, default=0)
                return number, self.claims.get(number)
            case Put(claim=claim):
                absent = claim.number not in self.claims
                if absent:
                    assert claim.number == len(self.claims) + 1, "no number is left out"
                    self.claims[claim.number] = claim
                return absent
            case Get(number=number):
                return self.claims[number]


def _drive(sequence: Sequence, driver: int, plan: list[tuple[str, int]]) -> Generator[None, str, None]:
    """A driver's life, one operation on storage at a time; the value sent in decides about the reply."""
    claimer = Claimer(f"driver {driver}", f"id {driver}", lambda: 0.0)
    generation, step = 0, 0
    for what, by in plan:
        while True:
            calls: Generator[Any, Any, int]
            told = Told(driver, f"{driver}/{generation}/{step}")
            if what == "own":
                calls = claimer.own(generation)
            else:
                calls = claimer.commit(generation, step, told.prefix, DIGEST)
            try:
                reply = None
                while True:
                    wanted = calls.send(reply)
                    fate = yield
                    if fate == "lost before":
                        raise StorageError("lost")
                    reply = sequence.do(wanted)
                    if fate == "lost after":
                        raise StorageError("lost")
            except StorageError:
                continue  # the same call again
            except StaleGeneration:
                told.outcome = "refused"
            except StopIteration as done:
                told.outcome = "made"
                if what == "own":
                    generation = done.value
                    sequence.owners.append((driver, generation))
            if what == "commit":
                sequence.told.append(told)
            break
        if what == "own":
            step = 0
        elif by:
            step += by
        else:
            generation += 1


_PLANS = st.lists(
    st.tuples(st.just("commit"), st.integers(0, 2)) | st.tuples(st.just("own"), st.just(0)), min_size=1, max_size=5
).map(lambda plan: [("own", 0), *plan])
_FATES = st.sampled_from(["ok", "ok", "ok", "lost before", "lost after"])


@settings(max_examples=examples(90, of=300))
@given(
    plans=st.lists(_PLANS, min_size=2, max_size=3),
    schedule=st.lists(st.tuples(st.integers(0, 2), _FATES), max_size=60),
)
def test_however_drivers_interleave_the_laws_of_the_sequence_hold(
    plans: list[list[tuple[str, int]]], schedule: list[tuple[int, str]]
) -> None:
    sequence = Sequence()
    lives = {driver: _drive(sequence, driver, plan) for driver, plan in enumerate(plans)}
    for life in lives.values():
        next(life)
    for driver, fate in [*schedule, *((driver, "ok") for _ in range(200) for driver in range(3))]:
        if driver in lives:
            try:
                lives[driver].send(fate)
            except StopIteration:
                del lives[driver]
    assert not lives, "every driver comes to its end"
    ordered = [sequence.claims[number] for number in sorted(sequence.claims)]
    assert [claim.number for claim in ordered] == list(range(1, len(ordered) + 1))
    owner, generation, step = "", -1, 0
    for claim in ordered:
        if claim.kind == "owner":
            assert claim.generation > generation
            owner, generation, step = claim.id, claim.generation, 0
        else:
            assert claim.id == owner, "an owner that was followed by another has committed"
            assert (claim.generation, claim.step) >= (generation, step)
            generation, step = claim.generation, claim.step
    committed = {claim.prefix for claim in ordered if claim.kind == "commit"}
    for told in sequence.told:
        assert (told.prefix in committed) == (told.outcome == "made"), told
    owned = [claim.generation for claim in ordered if claim.kind == "owner"]
    assert len(set(owned)) == len(owned)
    assert {generation for _, generation in sequence.owners} <= set(owned)
