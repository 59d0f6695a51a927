"""Decisions in a journal that began without signatures, for a driver with a key. Pure, except for a log message.

An older version with the key signed checkpoints alone. Its journal shows what happened, but anybody may have written
it. Decisions that a signed checkpoint confirms hold. Later ones need a user's yes. From the driver's first entry on,
everything is signed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from raysharded.checkpoint.retention.catalog import CheckpointRef
from raysharded.display.quantities import weights_text
from raysharded.driver.checkpoints.committer import RunFiles
from raysharded.driver.startup.resume_point import ResumePoint, undone
from raysharded.driver.state.arithmetic import accepted
from raysharded.errors import RefusedCheckpoint
from raysharded.journal.signed_segments import ACCEPT
from raysharded.overrides import decided, skipped_before

_log = logging.getLogger("raysharded.driver")
Entries = Sequence[Mapping[str, Any]]


def require_confirmed(entries: Entries, found: ResumePoint, refs: Sequence[CheckpointRef], files: RunFiles) -> None:
    """Raise RefusedCheckpoint if unsigned entries decide what the signed checkpoint does not confirm.

    Otherwise log that the run's journal is signed from now on.
    """
    decisions = list(unconfirmed(entries, found, refs))
    if decisions:
        raise RefusedCheckpoint(
            f"the journal of the run at {files.storage.url} is not signed, a signing key is set, and the journal "
            f"decides what no signed checkpoint confirms: {'; '.join(decisions)}. If nobody asked for that, restore "
            f"the run's folder journal/ from a copy. {ACCEPT}"
        )
    _log.warning(
        "the journal of the run at %s is not signed until now, and decides nothing that its checkpoints do not "
        "confirm; from now on it is signed with the run's key",
        files.storage.url,
    )


def unconfirmed(entries: Entries, found: ResumePoint, refs: Sequence[CheckpointRef]) -> Iterator[str]:
    """Decisions of the entries that the newest checkpoint does not confirm, each in words."""
    decisions, newest = decided(entries), found.newest.checkpoint
    for step, factor in decisions.rates:
        if step > found.step:
            yield f"{factor:g} times the learning rate from step {step} on"
    samples = newest.manifest.data.get("samples") if newest is not None else None
    confirmed = samples if isinstance(samples, int) else 0
    for step, position, weights in decisions.weights:
        if position >= confirmed:
            yield f"{weights_text(dict(weights))} as weights of the mixture from step {step} on"
    for step, skipped in decisions.skips:
        if step >= found.step and skipped != skipped_before(decisions.skips, step):
            yield f"{skipped} samples skipped after step {step}"
    told = accepted(entries)
    if told is not None and (newest is None or told != newest.manifest.metadata.get("arithmetic")):
        yield "other bits, as a user accepted"
    gone = undone(entries, refs)
    for ref in refs:
        if ref.complete and ref.prefix in gone:
            yield f"the checkpoint of step {ref.step} is to be deleted"
