"""Decisions of a run that resumes from a checkpoint, which may be another run's."""

from __future__ import annotations

from typing import Any

from raysharded.checkpoint import Checkpoint
from raysharded.checkpoint.byte_ranges import BoxIndex
from raysharded.checkpoint.chunk_reader import DataFiles
from raysharded.checkpoint.format.manifest import Manifest
from raysharded.checkpoint.retention.catalog import Newest
from raysharded.driver.startup import resume_point
from raysharded.driver.startup.resume_point import ResumePoint
from raysharded.driver.startup.unsigned_journal import unconfirmed
from raysharded.overrides import Decisions, consumed, own_weights
from tests.driver.memory_storage import MemoryStorage

BATCH = 6
WEIGHTS = (("a", 1.0), ("b", 3.0))


def checkpoint_of(step: int, samples: int, decisions: Decisions) -> Checkpoint:
    """A checkpoint without tensors."""
    manifest = Manifest(
        run="run",
        step=step,
        generation=1,
        save_id="s",
        writer="w",
        created_at=0.0,
        tensors={},
        files=(),
        data={"samples": samples},
        metadata=own_weights(decisions.weights),
    )
    storage = MemoryStorage()
    return Checkpoint(storage, "p", manifest, "", True, BoxIndex(manifest), DataFiles(storage, "p", ()))


def test_a_fork_keeps_weights_of_the_last_samples_if_its_parent_had_skipped_data() -> None:
    parent = Decisions(skips=((2, 12),), weights=((5, 36, WEIGHTS),))
    found = resume_point._decisions_at(Decisions(), checkpoint_of(6, 48, parent), BATCH)
    assert found.weights == parent.weights
    assert consumed(found.skips, 7, BATCH) == 7 * BATCH + 12
    assert resume_point._decisions_at(parent, checkpoint_of(6, 48, parent), BATCH) == parent


def test_an_unsigned_change_of_weights_is_confirmed_by_its_position_alone() -> None:
    def entry(from_step: int, position: int) -> dict[str, Any]:
        weights = dict(WEIGHTS)
        return {"kind": "mixture_weights", "from_step": from_step, "from_position": position, "weights": weights}

    checkpoint = checkpoint_of(6, 48, Decisions())
    found = ResumePoint(newest=Newest(checkpoint=checkpoint, skipped=()), older=())
    assert list(unconfirmed([entry(5, 47)], found, ())) == []  # the checkpoint's own hold there
    for later in (entry(5, 48), entry(1, 1000), entry(7, 48)):
        (told,) = unconfirmed([later], found, ())
        assert f"from step {later['from_step']} on" in told
    nothing = ResumePoint(newest=Newest(checkpoint=None, skipped=()), older=())
    (told,) = unconfirmed([entry(0, 0)], nothing, ())
    assert "weights of the mixture" in told
