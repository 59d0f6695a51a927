"""With a key, the small objects of a run count only where its holder put them: others delete and hide nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from raysharded import checkpoint
from raysharded.checkpoint import Claims, SigningKey, Storage, list_pins, newest_complete, open_storage, pin, unpin
from raysharded.checkpoint.format import signed_json
from raysharded.checkpoint.format.signing import Unsigned
from raysharded.checkpoint.removal_mark import REMOVAL_KEY, encode_mark, new_mark, read_mark
from raysharded.checkpoint.retention.catalog import list_checkpoints
from raysharded.checkpoint.retention.claim_history import History
from raysharded.checkpoint.retention.forks.fork import drop_reference, fork
from raysharded.checkpoint.retention.forks.fork_copy import copy_parent
from raysharded.checkpoint.retention.gc import prune
from raysharded.checkpoint.retention.policy import Keep
from raysharded.checkpoint.retention.run_removal import RunRemoval
from raysharded.checkpoint.retention.tombstone import tombstone_key, write_tombstone
from raysharded.checkpoint.stored_claims import claim_key, find_newest, read_claim
from raysharded.errors import CheckpointError, CorruptCheckpoint, IncompleteCheckpoint, RefusedCheckpoint
from tests.checkpoint.samples import raw, save

KEY = SigningKey(b"k" * 32)
OTHER = SigningKey(b"o" * 32)


class Run:
    """A signed run that commits small checkpoints."""

    def __init__(self, folder: Path, name: str = "run", key: SigningKey | None = KEY) -> None:
        self.key = key
        self.storage = open_storage(str(folder / name))
        self.name = name
        self.begin()

    def begin(self, writer: str = "driver") -> None:
        self.claims = Claims(self.storage, writer, key=self.key)
        self.generation = self.claims.own(1)

    def save(self, step: int) -> str:
        return save(
            self.storage,
            {"w": raw("float32", 6, 4, seed=step)},
            step=step,
            save_id=f"g{self.generation:06d}",
            generation=self.generation,
            claims=self.claims,
            run=self.name,
            key=self.key,
        )

    @property
    def newest(self) -> int:
        """Step of the newest checkpoint, as the key's holder finds it; 0 if there is none."""
        found = newest_complete(self.storage, skip_damaged=True, key=self.key).checkpoint
        return found.step if found is not None else 0

    @property
    def steps(self) -> list[int]:
        return [ref.step for ref in list_checkpoints(self.storage, key=self.key) if ref.complete]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(tmp_path)
    for step in (1, 2, 3):
        made.save(step)
    return made


def unsigned(data: bytes) -> bytes:
    """The object as a forger without the key writes it."""
    body = json.loads(data)
    plain = {name: value for name, value in body.items() if name not in ("digest", "hmac", "place", "version")}
    return signed_json.seal(plain, plain.pop("format"))


def forge_claim(run: Run, number: int, **changes: object) -> None:
    body = json.loads(run.storage.read(claim_key(run.claims._claimer.number))) | {"number": number, **changes}
    run.storage.write(claim_key(number), [unsigned(json.dumps(body).encode())])


# -- claims --


def test_every_signed_claim_names_the_one_before_it(run: Run) -> None:
    claims = [read_claim(run.storage, number, key=KEY) for number in (1, 2, 3, 4)]
    assert [claim.after for claim in claims] == [None, *((claim.number, claim.seal) for claim in claims[:-1])]


@pytest.mark.parametrize("kind", ["owner", "commit"])
def test_an_unsigned_claim_takes_no_run_over_and_is_passed_over(run: Run, kind: str) -> None:
    forge_claim(run, 5, kind=kind, id="mallory", writer="mallory", generation=7, step=9)
    assert run.claims.find_rival() is None
    assert find_newest(run.storage, key=KEY) == (5, read_claim(run.storage, 4, key=KEY))
    run.save(4)
    assert read_claim(run.storage, 6, key=KEY).after == (4, read_claim(run.storage, 4, key=KEY).seal)
    run.begin("heir")
    assert run.generation == 2
    assert (run.newest, run.steps) == (4, [1, 2, 3, 4])
    assert History(run.storage, key=KEY).damaged == []


def test_a_claim_of_another_run_or_number_is_refused(run: Run, tmp_path: Path) -> None:
    other = Run(tmp_path, "other")
    other.save(3)
    run.storage.write(claim_key(5), [other.storage.read(claim_key(2))])
    with pytest.raises(RefusedCheckpoint, match=r"is signed, but as 'other/claims/0000000002\.json'"):
        read_claim(run.storage, 5, key=KEY)
    run.storage.write(claim_key(5), [run.storage.read(claim_key(3))])
    with pytest.raises(CorruptCheckpoint):
        read_claim(run.storage, 5, key=KEY)
    assert run.newest == 3


def test_the_checkpoint_of_a_claim_that_was_replaced_is_never_deleted(run: Run) -> None:
    """Without its claim, a manifest looks like one whose save ended before the claim."""
    forge_claim(run, 3, kind="owner")  # it committed step 2
    run.begin("heir")
    for step in (4, 5, 6):
        run.save(step)
    prune(run.storage, Keep(last=1), key=KEY, now=True)
    assert [(ref.step, ref.state) for ref in list_checkpoints(run.storage, key=KEY)] == [
        (2, "damaged"),
        (6, "committed"),
    ]


def test_a_claim_that_was_put_back_from_an_older_copy_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(1)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    shutil.rmtree(tmp_path / "run")
    run = Run(tmp_path)  # begun anew, with the same name and key
    run.save(1)
    run.save(2)
    shutil.copy(tmp_path / "copy" / claim_key(2), tmp_path / "run" / claim_key(2))
    history = History(run.storage, key=KEY)
    history.commits_of({"checkpoints/none": None})
    assert "put back from an older copy" in str(history.damaged[0])


def test_claims_of_a_run_without_a_key_count_until_the_first_signed_one(tmp_path: Path) -> None:
    run = Run(tmp_path, key=None)
    run.save(1)
    run.key = KEY
    assert find_newest(run.storage, key=KEY)[1] == read_claim(run.storage, 2)
    run.begin("heir")
    assert run.generation == 2
    run.save(2)
    forge_claim(run, 5, kind="owner", generation=9)
    assert run.steps == [1, 2]
    assert History(run.storage, key=KEY).newest() is not None
    assert find_newest(run.storage, key=KEY)[1] == read_claim(run.storage, 4, key=KEY)


def test_a_driver_with_another_key_sees_who_holds_the_run(run: Run) -> None:
    found = find_newest(run.storage, key=OTHER)[1]
    assert found is not None
    assert found.writer == "driver"
    with pytest.raises(RefusedCheckpoint, match="another key"):
        newest_complete(run.storage, skip_damaged=True, key=OTHER)


# -- deletion --


def test_an_unsigned_tombstone_neither_hides_nor_deletes_a_signed_checkpoint(run: Run) -> None:
    for ref in list_checkpoints(run.storage):
        write_tombstone(run.storage, ref.prefix, newest_claim=1, created_at=0.0, key=None)
    assert run.newest == 3
    prune(run.storage, Keep(last=9), key=KEY)
    run.save(4)
    prune(run.storage, Keep(last=9), key=KEY)
    assert run.steps == [1, 2, 3, 4]


def test_a_tombstone_of_another_checkpoint_marks_nothing(run: Run) -> None:
    prune(run.storage, Keep(last=2), key=KEY)
    first, second, _ = list_checkpoints(run.storage, key=KEY)
    assert (first.state, first.marked) == ("retired", True)
    run.storage.write(tombstone_key(second.prefix), [run.storage.read(tombstone_key(first.prefix))])
    assert run.steps == [2, 3]
    assert not list_checkpoints(run.storage, key=KEY)[1].marked


def test_a_checkpoint_that_an_unsigned_tombstone_says_is_deleted_is_lost(run: Run) -> None:
    """The forger deleted its manifest."""
    newest = list_checkpoints(run.storage)[-1]
    write_tombstone(run.storage, newest.prefix, newest_claim=1, created_at=0.0, key=None)
    run.storage.delete([f"{newest.prefix}/manifest.json"])
    assert newest_complete(run.storage).checkpoint is not None  # without a key, nothing shows it
    with pytest.raises(IncompleteCheckpoint, match="it was lost"):
        newest_complete(run.storage, key=KEY)
    run.save(4)
    prune(run.storage, Keep(last=9), key=KEY)
    assert run.storage.list(newest.prefix)


def test_the_data_of_a_checkpoint_that_the_key_retired_goes_as_usual(run: Run) -> None:
    prune(run.storage, Keep(last=1), key=KEY)
    run.save(4)
    assert len(prune(run.storage, Keep(last=1), key=KEY).removed) == 2
    assert run.steps == [4]


def test_pins_are_signed_and_an_unsigned_one_keeps_a_checkpoint_but_leads_nowhere(run: Run) -> None:
    first, second, _ = list_checkpoints(run.storage, key=KEY)
    pin(run.storage, "best", first, fork="memory://fork", key=KEY)
    pin(run.storage, "forged", second, fork="memory://victim")
    assert [(one.tag, one.fork) for one in list_pins(run.storage, key=KEY)] == [
        ("best", "memory://fork"),
        ("forged", ""),
    ]
    prune(run.storage, Keep(last=1), key=KEY)
    assert run.steps == [1, 2, 3]
    unpin(run.storage, "forged")
    run.storage.write("checkpoints/pins/moved.json", [run.storage.read("checkpoints/pins/best.json")])
    assert [(one.tag, one.fork) for one in list_pins(run.storage, key=KEY)][1] == ("moved", "")


def test_a_removal_does_not_take_an_unsigned_mark_for_one_that_has_begun(run: Run) -> None:
    """It would delete a pinned checkpoint."""
    pin(run.storage, "best", list_checkpoints(run.storage, key=KEY)[0], key=KEY)
    mark = new_mark(lambda: 0.0)
    begun = type(mark)(id=mark.id, host="", pid=0, created_at=0.0, begun=True)
    run.storage.write(REMOVAL_KEY, [encode_mark(begun)])
    found = read_mark(run.storage, key=KEY)
    assert found is not None
    assert not found.begun
    with pytest.raises(CheckpointError, match="was pinned just now, as 'best'"):
        RunRemoval(run.storage, [], key=KEY).begin(lambda: False)


# -- forks --


def test_a_fork_of_a_signed_run_is_signed_and_begins_with_its_checkpoint(run: Run, tmp_path: Path) -> None:
    child = open_storage(str(tmp_path / "child"))
    fork(run.storage, list_checkpoints(run.storage, key=KEY)[1], child, key=KEY)
    found = newest_complete(child, key=KEY).checkpoint
    assert found is not None
    assert (found.step, found.storage.url) == (2, run.storage.url)
    (ref,) = list_checkpoints(child, key=KEY)
    claims = Claims(child, "owner", key=KEY)
    copy_parent(child, ref, claims, claims.own(1), key=KEY)
    own = newest_complete(child, key=KEY).checkpoint
    assert own is not None
    assert (own.step, own.storage.url, own.manifest.run) == (2, child.url, "child")
    assert list_pins(run.storage, key=KEY) == []


def test_a_reference_that_the_key_did_not_sign_is_no_beginning_of_a_run(run: Run, tmp_path: Path) -> None:
    child = open_storage(str(tmp_path / "child"))
    fork(run.storage, list_checkpoints(run.storage)[1], child)
    with pytest.raises(RefusedCheckpoint, match="repeat `raysharded checkpoint fork` with it"):
        newest_complete(child, key=KEY)
    (ref,) = list_checkpoints(child)
    with pytest.raises(RefusedCheckpoint):
        drop_reference(child, ref, key=KEY)
    assert [one.tag for one in list_pins(run.storage)] != []
    fork(run.storage, list_checkpoints(run.storage, key=KEY)[1], child, key=KEY)
    found = newest_complete(child, key=KEY).checkpoint
    assert found is not None
    assert found.step == 2


def test_a_fork_of_an_unsigned_run_needs_that_no_key_is_given(tmp_path: Path) -> None:
    parent = Run(tmp_path, key=None)
    parent.save(1)
    child = open_storage(str(tmp_path / "child"))
    with pytest.raises(RefusedCheckpoint, match="is not signed"):
        fork(parent.storage, list_checkpoints(parent.storage)[0], child, key=KEY)
    fork(parent.storage, list_checkpoints(parent.storage)[0], child)
    assert newest_complete(child).checkpoint is not None


# -- checkpoints in other places --


def test_a_checkpoint_of_another_run_is_refused_in_a_runs_folder(run: Run, tmp_path: Path) -> None:
    """Its folder, and the claims with which it is whole."""
    other = Run(tmp_path, "other")
    for step in (1, 2, 3, 4):
        other.save(step)
    for folder in ("checkpoints", "claims"):
        shutil.rmtree(tmp_path / "run" / folder)
        shutil.copytree(tmp_path / "other" / folder, tmp_path / "run" / folder)
    for load in (
        lambda: newest_complete(run.storage, key=KEY),
        lambda: checkpoint.open(run.storage.url, key=KEY),
        lambda: checkpoint.open(f"{run.storage.url}/{list_checkpoints(run.storage)[-1].prefix}", key=KEY),
    ):
        refused(load, "is signed as a checkpoint of run 'other', not of 'run'")
    assert newest_complete(run.storage).checkpoint is not None


def refused(load: Callable[[], object], match: str) -> None:
    with pytest.raises(RefusedCheckpoint, match=match):
        load()


def saved(folder: Path, step: int, value: float, *, run: str = "", name: str = "") -> Path:
    path = folder / (name or f"step-{step}")
    checkpoint.save(path, {"w": torch.full((3,), float(value))}, step=step, run=run, key=KEY)
    return path


def loaded(folder: Path) -> list[float]:
    into = {"w": torch.zeros(3)}
    checkpoint.load(folder, into, key=KEY)
    values: list[float] = into["w"].tolist()
    return values


def test_an_old_signed_step_in_the_folder_of_a_newer_one_is_refused(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        saved(tmp_path, step, step)
    shutil.copytree(tmp_path / "step-1", tmp_path / "step-9")
    refused(lambda: loaded(tmp_path), "is signed as a checkpoint of step 1, not of step 9")
    refused(lambda: loaded(tmp_path / "step-9"), "is signed as a checkpoint of step 1, not of step 9")
    assert loaded(tmp_path / "step-3") == [3.0] * 3


def test_an_old_signed_step_in_a_folder_of_a_free_name_is_not_the_newest(tmp_path: Path) -> None:
    """The name has no step."""
    for number in (1, 2, 3):
        saved(tmp_path, number, number, name=f"epoch-{number}")
    shutil.copytree(tmp_path / "epoch-1", tmp_path / "epoch-9", copy_function=shutil.copyfile)  # of a newer time
    assert loaded(tmp_path) == [3.0] * 3
    assert loaded(tmp_path / "epoch-9") == [1.0] * 3


@pytest.mark.parametrize("name", ["step-3", "ckpt-3"])
def test_another_folders_signed_step_in_place_of_ours_is_refused(tmp_path: Path, name: str) -> None:
    for step in (1, 2, 3):
        saved(tmp_path / "ours", step, step, run="ours", name=name.replace("3", str(step)))
    other = saved(tmp_path / "theirs", 3, 33.0, run="theirs", name=name)
    shutil.rmtree(tmp_path / "ours" / name)
    shutil.copytree(other, tmp_path / "ours" / name)
    refused(lambda: loaded(tmp_path / "ours"), "are of different runs: .* Name the checkpoint that is meant")


def test_a_signed_checkpoint_whose_step_was_not_given_may_have_any_name(tmp_path: Path) -> None:
    saved(tmp_path, 0, 5.0, name="step-12")
    assert loaded(tmp_path) == [5.0] * 3


# -- the sealing itself --


def test_a_signed_object_is_read_without_the_key_as_an_unsigned_one() -> None:
    """Older versions do so."""
    body = {"a": 1, "b": "text"}
    data = signed_json.seal(body, "raysharded-test", key=KEY, place="run/x.json")
    assert signed_json.unseal(data, "raysharded-test", "x.json") == body
    assert signed_json.unseal(data, "raysharded-test", "x.json", key=KEY, place="run/x.json") == body
    assert json.loads(data)["place"] == "run/x.json"
    for key, place, match in (
        (OTHER, "run/x.json", "another key"),
        (KEY, "run/y.json", "but as 'run/x.json', not as 'run/y.json'"),
    ):
        with pytest.raises(RefusedCheckpoint, match=match):
            signed_json.unseal(data, "raysharded-test", "x.json", key=key, place=place)
    with pytest.raises(Unsigned):
        signed_json.unseal(signed_json.seal(body, "raysharded-test"), "raysharded-test", "x.json", key=KEY, place="")


def test_the_place_of_an_object_does_not_depend_on_the_storage_above_the_run(run: Run, tmp_path: Path) -> None:
    """A run may be copied to another storage, under its own name."""
    moved: Storage = open_storage(str(shutil.copytree(tmp_path / "run", tmp_path / "elsewhere" / "run")))
    found = newest_complete(moved, key=KEY).checkpoint
    assert found is not None
    assert found.step == 3
