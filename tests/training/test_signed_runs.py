"""An attacker who writes to the storage, without the key, changes nothing that a signed run trains."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import raysharded as rs
from raysharded.checkpoint import list_checkpoints, open_storage
from raysharded.errors import RefusedCheckpoint
from raysharded.journal.log import read
from raysharded.testing.processes import ProcessLauncher
from tests.cases import tried_each_time
from tests.training.harness import SmallTask, samples

pytestmark = pytest.mark.procs

STEPS = 4
NAME = "run"
SECRET = "0123456789abcdef0123456789abcdef"


@pytest.fixture(autouse=True)
def no_other_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAYSHARDED_CHECKPOINT_KEY", "RAYSHARDED_CHECKPOINT_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "run.key"
    path.write_text(SECRET)
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, key_file: Path) -> Path:
    """The storage of two signed runs of a few steps, `run` and `other`, each with a checkpoint of every step."""
    folder = tmp_path_factory.mktemp("signed")
    for name, seed in ((NAME, 5), ("other", 6)):
        fitted(folder, key_file, STEPS, name=name, seed=seed)
    return folder


@pytest.fixture
def stored(made: Path, tmp_path: Path) -> Path:
    """A copy of them that the test may change."""
    return Path(shutil.copytree(made, tmp_path / "stored"))


def fitted(
    folder: Path, key_file: Path | None, max_steps: int, *, name: str = NAME, seed: int = 5, **run: Any
) -> dict[int, dict[str, Any]]:
    """Train the run to `max_steps`. Returns the steps of this call, as its driver reported them."""
    steps: dict[int, dict[str, Any]] = {}

    def listen(kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "step":
            steps[fields["step"]] = dict(fields)

    trainer = rs.ElasticTrainer(
        task=SmallTask(),
        data=samples(),
        batch=rs.BatchConfig(global_batch_size=6, microbatch_size=2, seed=seed),
        scaling=rs.ScalingConfig(num_workers=1),
        run=rs.RunConfig(
            name=name,
            storage_path=folder,
            max_steps=max_steps,
            checkpoint=rs.CheckpointConfig(
                every_steps=1, keep_last=10, signing_key_file=str(key_file) if key_file else None
            ),
            **run,
        ),
    )
    trainer.start_with(ProcessLauncher, listen=listen).wait()
    return steps


def saved(folder: Path, name: str = NAME) -> list[int]:
    return [ref.step for ref in list_checkpoints(open_storage(str(folder / name))) if ref.complete]


def segments(folder: Path) -> list[Path]:
    return sorted((folder / NAME / "journal").iterdir())


def add_segment(folder: Path, *entries: Mapping[str, Any]) -> None:
    """An attacker's segment, written as an unsigned run has it, after all others."""
    number = int(segments(folder)[-1].name.partition(".")[0]) + 1
    lines = [json.dumps(entry) for entry in ({"kind": "segment", "writer": "mallory"}, *entries)]
    (folder / NAME / "journal" / f"{number:08d}.jsonl").write_text("\n".join([*lines, ""]))


RATE = {"kind": "learning_rate", "at": 1.0, "step": STEPS, "from_step": STEPS + 1, "factor": 1000.0}


def rewind_to_the_start(folder: Path) -> dict[str, Any]:
    distrusted = [ref.prefix for ref in list_checkpoints(open_storage(str(folder / NAME)))]
    fields = {"step": STEPS, "to_step": 0, "who": "asked", "reason": "", "skip_samples": 0, "distrusted": distrusted}
    return {"kind": "rewind", "at": 1.0, **fields, "skips": [], "learning_rate": []}


@pytest.fixture(scope="module")
def untouched(made: Path, tmp_path_factory: pytest.TempPathFactory, key_file: Path) -> dict[str, Any]:
    """The step after `made`, in a copy that nobody changed."""
    folder = tmp_path_factory.mktemp("untouched")
    shutil.copytree(made / NAME, folder / NAME)
    return fitted(folder, key_file, STEPS + 1)[STEPS + 1]


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one[name] == other[name] for name in ("loss", "lr", "gradient_norm", "digest"))


def test_a_run_that_is_signed_from_the_beginning_signs_every_segment_and_claim(stored: Path) -> None:
    heads = [json.loads(path.read_text().partition("\n")[0]) for path in segments(stored)]
    assert [head["place"] for head in heads] == [f"run/journal/{path.name}" for path in segments(stored)]
    assert [head["after"] for head in heads] == ["", *(head["hmac"] for head in heads[:-1])]
    claims = [json.loads(path.read_text()) for path in sorted((stored / NAME / "claims").glob("*.json"))]
    assert all(claim["hmac"] and claim["place"].startswith("run/claims/") for claim in claims)
    assert [claim.get("after") for claim in claims] == [None, *([c["number"], c["digest"]] for c in claims[:-1])]


def test_an_unsigned_segment_changes_no_learning_rate(
    stored: Path, key_file: Path, untouched: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    add_segment(stored, RATE)
    with caplog.at_level(logging.WARNING, "raysharded.driver"):
        steps = fitted(stored, key_file, STEPS + 1)
    assert same(steps[STEPS + 1], untouched)
    assert "are not signed with the run's key, and are ignored" in caplog.text


def test_an_unsigned_rewind_neither_goes_back_nor_deletes_a_signed_checkpoint(
    stored: Path, key_file: Path, untouched: dict[str, Any]
) -> None:
    before = saved(stored)
    add_segment(stored, rewind_to_the_start(stored))
    steps = fitted(stored, key_file, STEPS + 1)
    assert list(steps) == [STEPS + 1]
    assert same(steps[STEPS + 1], untouched)
    assert saved(stored) == [*before, STEPS + 1]


@pytest.mark.long  # the checkpoints, claims and the replaced segment of another run are refused below
def test_a_segment_of_another_signed_run_decides_nothing(
    stored: Path, key_file: Path, untouched: dict[str, Any]
) -> None:
    """It is signed with the same key."""
    number = len(segments(stored)) + 1
    shutil.copy(sorted((stored / "other" / "journal").iterdir())[0], stored / NAME / "journal" / f"{number:08d}.jsonl")
    assert same(fitted(stored, key_file, STEPS + 1)[STEPS + 1], untouched)


@pytest.mark.parametrize("what", tried_each_time(["replaced"], ["removed", "replaced"]))
def test_a_signed_segment_is_not_left_out_or_replaced_without_a_word(stored: Path, key_file: Path, what: str) -> None:
    middle, before = segments(stored)[1], saved(stored)
    if what == "removed":
        middle.unlink()
    else:
        shutil.copy(stored / "other" / "journal" / middle.name, middle)
    with pytest.raises(RefusedCheckpoint, match="were removed or replaced after they were written"):
        fitted(stored, key_file, STEPS + 1)
    assert saved(stored) == before
    assert list(fitted(stored, key_file, STEPS + 1, accept_unsigned=True)) == [STEPS + 1]
    assert list(fitted(stored, key_file, STEPS + 2)) == [STEPS + 2]  # what was accepted is signed since


def test_another_runs_checkpoints_and_claims_are_refused(stored: Path, key_file: Path) -> None:
    """Both are whole, and signed with the same key."""
    for folder in ("checkpoints", "claims"):
        shutil.rmtree(stored / NAME / folder)
        shutil.copytree(stored / "other" / folder, stored / NAME / folder)
    with pytest.raises(RefusedCheckpoint, match="is signed as a checkpoint of run 'other', not of 'run'"):
        fitted(stored, key_file, STEPS + 1)


def test_another_runs_newest_checkpoint_is_not_resumed_from(
    stored: Path, key_file: Path, untouched: dict[str, Any]
) -> None:
    """An attacker adds it, with a claim under the next number."""
    (step,) = (stored / "other" / "checkpoints").glob(f"step-{STEPS:010d}-*")
    shutil.copytree(step, stored / NAME / "checkpoints" / step.name)
    claims = sorted((stored / NAME / "claims").glob("*.json"))
    (theirs,) = (path for path in (stored / "other" / "claims").glob("*.json") if step.name in path.read_text())
    claim = json.loads(claims[-1].read_text()) | json.loads(theirs.read_text()) | {"number": len(claims) + 1}
    claims[-1].with_name(f"{len(claims) + 1:010d}.json").write_bytes(without_signature(claim))
    assert same(fitted(stored, key_file, STEPS + 1)[STEPS + 1], untouched)


def remove_all_but_the_first(folder: Path) -> int:
    """Remove checkpoints, and the claims that name them. Returns the step of the first, which stays."""
    first, *others = sorted((folder / NAME / "checkpoints").glob("step-*"))
    assert others
    for save in others:
        for claim in (folder / NAME / "claims").glob("*.json"):
            if save.name in claim.read_text():
                claim.unlink()
        shutil.rmtree(save)
    return int(first.name.split("-")[1])


def test_a_newest_checkpoint_that_was_removed_is_reported_and_at_least_step_refuses_the_run(
    stored: Path, key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = remove_all_but_the_first(stored)
    with pytest.raises(RefusedCheckpoint, match=rf"of step {STEPS} or later, and its newest is of step {first}"):
        fitted(stored, key_file, STEPS + 1, at_least_step=STEPS)
    with caplog.at_level(logging.WARNING, "raysharded.driver.events"):
        steps = fitted(stored, key_file, STEPS + 1)
    assert list(steps) == list(range(first + 1, STEPS + 2))
    assert f"the journal has a checkpoint of step {STEPS}, and it is not there" in caplog.text
    (told,) = (entry for entry in read(open_storage(str(stored / NAME))) if entry["kind"] == "checkpoint_skipped")
    assert told["step"] == STEPS
    assert list(fitted(stored, key_file, STEPS + 2, at_least_step=STEPS + 1)) == [STEPS + 2]


def unsign(folder: Path) -> None:
    """Make the run as an older version with the key left it: only the manifests are signed."""
    for path in segments(folder):
        head, _, rest = path.read_text().partition("\n")
        plain = {name: value for name, value in json.loads(head).items() if name in ("kind", "writer")}
        path.write_text(f"{json.dumps(plain, separators=(',', ':'))}\n{rest}")
    for path in (folder / NAME).rglob("*.json"):
        if path.parent.name in ("claims", "lease"):
            path.write_bytes(without_signature(json.loads(path.read_text())))


def without_signature(body: dict[str, Any]) -> bytes:
    from raysharded.checkpoint.format import signed_json

    body = {name: value for name, value in body.items() if name not in ("digest", "hmac", "place", "after", "version")}
    return signed_json.seal(body, body.pop("format"))


def test_a_run_of_an_older_version_goes_on_under_its_key_and_is_signed_from_then_on(
    stored: Path, key_file: Path, untouched: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    before = saved(stored)
    unsign(stored)
    with caplog.at_level(logging.WARNING, "raysharded.driver"):
        steps = fitted(stored, key_file, STEPS + 1)
    assert same(steps[STEPS + 1], untouched)
    assert "is not signed until now, and decides nothing that its checkpoints do not confirm" in caplog.text
    assert saved(stored) == [*before, STEPS + 1]
    caplog.clear()
    add_segment(stored, RATE)
    (segments(stored)[0].with_name("00000000.jsonl")).write_text(json.dumps(RATE) + "\n")
    with pytest.raises(RefusedCheckpoint, match="were removed or replaced"):  # what is older is vouched for, too
        fitted(stored, key_file, STEPS + 2)
    segments(stored)[0].unlink()
    with caplog.at_level(logging.WARNING, "raysharded.driver"):
        steps = fitted(stored, key_file, STEPS + 2)
    assert steps[STEPS + 2]["lr"] < 1
    assert "is not signed until now" not in caplog.text


@pytest.mark.parametrize("what", tried_each_time(["rate"], ["rate", "rewind"]))
def test_what_an_unsigned_journal_decides_after_the_newest_signed_checkpoint_needs_a_yes(
    stored: Path, key_file: Path, what: str
) -> None:
    before = saved(stored)
    unsign(stored)
    add_segment(stored, RATE if what == "rate" else rewind_to_the_start(stored))
    told = "1000 times the learning rate from step 5 on" if what == "rate" else "of step 1 is to be deleted"
    with pytest.raises(RefusedCheckpoint, match=told) as caught:
        fitted(stored, key_file, STEPS + 1)
    assert "RunConfig(accept_unsigned=True)" in str(caught.value)
    assert saved(stored) == before
    steps = fitted(stored, key_file, STEPS + 1, accept_unsigned=True)
    assert list(steps) == ([STEPS + 1] if what == "rate" else list(range(1, STEPS + 2)))


def test_a_run_without_a_key_goes_on_under_one_when_a_user_accepts_that(
    tmp_path: Path, key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fitted(tmp_path, None, 2)
    with pytest.raises(RefusedCheckpoint, match=r"is not signed.*RunConfig\(accept_unsigned=True\)"):
        fitted(tmp_path, key_file, 3)
    with caplog.at_level(logging.WARNING, "raysharded.driver"):
        assert list(fitted(tmp_path, key_file, 3, accept_unsigned=True)) == [3]
    assert "goes on from its checkpoint of step 2, which is not signed" in caplog.text
    assert list(fitted(tmp_path, key_file, 4, at_least_step=3)) == [4]


@pytest.mark.long  # above a user accepts a run without a key
def test_what_an_older_version_added_to_a_signed_run_counts_when_a_user_accepts_it(
    stored: Path, key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It signs the manifests alone."""
    fitted(stored, key_file, STEPS + 1)
    newest, claim = segments(stored)[-1], sorted((stored / NAME / "claims").glob("*.json"))[-1]
    newest.write_text('{"kind":"segment","writer":"old"}\n' + newest.read_text().partition("\n")[2])
    claim.write_bytes(without_signature(json.loads(claim.read_text())))
    with caplog.at_level(logging.WARNING, "raysharded.driver"):
        assert list(fitted(stored, key_file, STEPS + 2, accept_unsigned=True)) == [STEPS + 2]
    assert f"goes on from its checkpoint of step {STEPS + 1}, which is not signed or not claimed" in caplog.text
    assert list(fitted(stored, key_file, STEPS + 3)) == [STEPS + 3]


def test_a_signed_run_without_any_checkpoint_does_not_go_on_without_its_key(stored: Path, key_file: Path) -> None:
    for name in ("checkpoints", "claims"):
        shutil.rmtree(stored / NAME / name)
    before = [path.read_bytes() for path in segments(stored)]
    with pytest.raises(RefusedCheckpoint, match=r"the journal of the run at .* is signed, and the run has no signing"):
        fitted(stored, None, STEPS)
    after = [path.read_bytes() for path in segments(stored)]
    assert after[: len(before)] == before
    assert [data for data in after[len(before) :] if data.count(b"\n") > 1] == [], "no entry was added"
