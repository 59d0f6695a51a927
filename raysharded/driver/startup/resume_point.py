"""The point from which a new driver resumes: the newest checkpoint, and older ones in case it is damaged."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raysharded import numerics
from raysharded.checkpoint import Checkpoint, Storage
from raysharded.checkpoint.format.signing import Unsigned
from raysharded.checkpoint.retention.catalog import CheckpointRef, Newest, list_checkpoints, newest_complete, open_ref
from raysharded.driver.checkpoints.committer import RunFiles
from raysharded.driver.state.arithmetic import accepted, blocks_of, build_seed_of, contents_of, rules_on_record
from raysharded.driver.state.changed import replace
from raysharded.driver.state.events import ASKED
from raysharded.driver.state.state import Checkpointed, State
from raysharded.errors import CheckpointError, CorruptCheckpoint, RefusedCheckpoint
from raysharded.journal.signed_segments import ACCEPT
from raysharded.overrides import (
    WEIGHTS,
    Decisions,
    after,
    consumed,
    rates_of,
    rates_resumed,
    skips_resumed,
    weights_of,
    weights_resumed,
)

_log = logging.getLogger("raysharded.driver")
_OLDER_OPENED = 4
"""Number of older checkpoints that are opened when their claims alone do not state their digests."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumePoint:
    """The run's checkpoints as they were found."""

    newest: Newest
    older: tuple[Checkpointed, ...]
    """Checkpoints before the newest, oldest first."""
    missing: tuple[tuple[int, str], ...] = ()
    """(step, reason) of a newer checkpoint that the run's signed journal has and its storage has not."""
    unfinished: tuple[int, ...] = ()
    """Steps after the newest checkpoint of which storage has a part of another one."""

    @property
    def damaged(self) -> list[tuple[int, str]]:
        """(step, reason) of committed checkpoints that cannot be used."""
        found = [(skipped.ref.step, skipped.reason) for skipped in self.newest.skipped if skipped.damaged]
        return [*found, *self.missing]

    @property
    def step(self) -> int:
        """Step of the newest usable checkpoint; 0 if there is none."""
        return self.newest.checkpoint.step if self.newest.checkpoint is not None else 0


def find(files: RunFiles, without: Collection[str] = ()) -> ResumePoint:
    """The newest usable checkpoint, opened, and those before it.

    The folders `without` are ignored: they were to be deleted, and may still exist if they are pinned.

    Raises CorruptCheckpoint if there are checkpoints and none can be used: a start from scratch would silently lose the
    run. Raises RefusedCheckpoint if the newest one is not signed with the run's key, unless a user accepts that; if it
    is signed and the run has no key; and if it is older than `at_least_step`. Raises StorageError.
    """
    found = _found(files, without)
    if found.step < files.at_least_step:
        newest = f"its newest is of step {found.step}" if found.newest.checkpoint else "there is none"
        raise RefusedCheckpoint(
            f"the run at {files.storage.url} must have a checkpoint of step {files.at_least_step} or later, and "
            f"{newest}: its storage was set back, or at_least_step is wrong. Restore the later one with claims/, or "
            "give a smaller RunConfig(at_least_step=...)."
        )
    return found


def with_missing(found: ResumePoint, entries: Iterable[Mapping[str, Any]], without: Collection[str]) -> ResumePoint:
    """The resume point, with the newest committed checkpoint of the signed journal if it is missing.

    Retention never deletes that one. The folders `without` were to be deleted.
    """
    told = [entry for entry in entries if entry["kind"] == "checkpoint" and entry.get("prefix") not in without]
    newest = max((int(entry["step"]) for entry in told), default=0)
    if newest <= found.step or any(step >= newest for step, _ in found.damaged):
        return found
    reason = f"the journal has a checkpoint of step {newest}, and it is not there: it was removed from storage"
    return replace(found, missing=((newest, reason),))


def _found(files: RunFiles, without: Collection[str]) -> ResumePoint:
    newest = newest_of(files, without)
    refs = [ref for ref in list_checkpoints(files.storage, key=files.key) if ref.prefix not in without]
    begun = {ref.step for ref in refs if ref.state in ("unclaimed", "unfinished")}
    if newest.checkpoint is None:
        found = ResumePoint(newest=newest, older=(), unfinished=tuple(sorted(begun)))
        if found.damaged:
            raise CorruptCheckpoint(
                f"none of the {len(found.damaged)} checkpoints of the run at {files.storage.url} can be used; the "
                f"newest, of step {found.damaged[0][0]}: {found.damaged[0][1]} To begin at the start, give the run "
                "another name, or delete its folders checkpoints/ and claims/."
            )
        return found
    if newest.checkpoint.signed and files.key is None:
        raise RefusedCheckpoint(
            keyless(f"the newest checkpoint of the run at {files.storage.url}, of step {newest.checkpoint.step},")
        )
    step = newest.checkpoint.step
    older = [ref for ref in refs if ref.complete and ref.step < step]
    unfinished = tuple(sorted(one for one in begun if one > step))
    return ResumePoint(newest=newest, older=tuple(_usable(files, older)), unfinished=unfinished)


def keyless(signed: str) -> str:
    """The message about a signed part of a run without a key."""
    return (
        f"{signed} is signed, and the run has no signing key: it would go on unsigned. Give "
        "CheckpointConfig(signing_key_file=...), or set RAYSHARDED_CHECKPOINT_KEY, as its writers did."
    )


def newest_of(files: RunFiles, without: Collection[str] = ()) -> Newest:
    """The newest usable checkpoint: signed, if the run has a key, unless a user accepts the run as it is.

    Raises as `newest_complete` with `skip_damaged`.
    """
    try:
        found = newest_complete(files.storage, skip_damaged=True, key=files.key, without=without)
    except Unsigned as error:
        if not files.accept_unsigned:
            raise Unsigned(f"{error} {ACCEPT}") from error
        found = Newest(checkpoint=None, skipped=())
    if files.key is None or not files.accept_unsigned:
        return found
    return _newest_accepted(files, found, without)


def _newest_accepted(files: RunFiles, signed: Newest, without: Collection[str]) -> Newest:
    """The newest checkpoint regardless of signatures, if it is newer than the signed one."""
    found = newest_complete(files.storage, skip_damaged=True, without=without)
    before = signed.checkpoint.step if signed.checkpoint is not None else -1
    if found.checkpoint is None or found.checkpoint.step <= before:
        return signed
    _log.warning(
        "the run at %s goes on from its checkpoint of step %d, which is not signed or not claimed with the run's key, "
        "as was accepted; all later ones are",
        files.storage.url,
        found.checkpoint.step,
    )
    return found


def resumed(state: State, files: RunFiles, found: ResumePoint, entries: Sequence[Mapping[str, Any]] = ()) -> State:
    """The state of a driver that resumes from the checkpoint and from the journal's decisions.

    The data and the kind of machines stay the same.
    """
    checkpoint = found.newest.checkpoint
    state = _with_decisions(state, entries)
    if checkpoint is None:  # it begins at the start, by its earlier rules if this version still has them
        rules = rules_on_record(entries)
        return state if rules is None else replace(state, numerics=numerics.kept(rules))
    if any(entry["kind"] == "audit" for entry in entries):
        state = replace(state, verified_step=min(state.verified_step, checkpoint.step))
    else:  # the checkpoint of a run without audits so far counts as verified
        state = replace(state, verified_step=checkpoint.step)
    metadata = dict(checkpoint.manifest.metadata)
    arithmetic, rules = _arithmetic_at(checkpoint, entries)
    return replace(
        state,
        decisions=_decisions_at(state.decisions, checkpoint, files.global_batch_size),
        reached=max(state.reached, checkpoint.step),
        checkpoint=_checkpointed(files.storage, checkpoint),
        older_checkpoints=found.older,
        step=checkpoint.step,
        arithmetic=arithmetic,
        arithmetic_unmet=arithmetic is not None,
        numerics=rules,
        num_samples=metadata.get("num_samples"),
        blocks=blocks_of(metadata),
        contents=contents_of(metadata),
        build_seed=build_seed_of(metadata),
    )


def distrusted(entries: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """Folders of checkpoints that were to be deleted, which a driver that died may have left.

    An audit found wrong numbers, or a rewind undid their steps.
    """
    told = [entry for entry in entries if entry["kind"] in ("corruption", "rewind")]
    return frozenset(prefix for entry in told for prefix in entry.get("distrusted", ()))


def rollbacks(entries: Iterable[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """(newest generation, step) of each rollback: it has undone later steps of this generation and of older ones."""
    newest, found = 0, list[tuple[int, int]]()
    for entry in entries:
        match entry["kind"]:
            case "generation":
                newest = int(entry["generation"])
            case "rewind":
                found.append((int(entry.get("generation", newest)), int(entry["to_step"])))
            case "corruption":
                found.append((int(entry.get("generation", newest)), int(entry["verified_step"])))
    return found


def undone(entries: Sequence[Mapping[str, Any]], refs: Iterable[CheckpointRef]) -> frozenset[str]:
    """The folders `distrusted`, and those of other checkpoints among `refs` that a rollback has undone.

    A driver does not know of the latter: it takes a commit that storage did not confirm for failed.
    """
    back = rollbacks(entries)
    unknown = (ref.prefix for ref in refs if ref.complete and is_covered(back, ref.generation, ref.step))
    return distrusted(entries).union(unknown)


def is_covered(back: Iterable[tuple[int, int]], generation: int | None, step: int) -> bool:
    """True if one of these `rollbacks` has undone a generation's step."""
    return generation is not None and any(generation <= newest and step > to for newest, to in back)


def _with_decisions(state: State, entries: Iterable[Mapping[str, Any]]) -> State:
    """The state with the journal's decisions, the newest step since the last rollback, and the newest verified step.

    Decisions are made once, and hold for repeated steps.
    """
    decisions, reached, rewound, verified = state.decisions, state.reached, state.rewound, state.verified_step
    for entry in entries:
        decisions = after(decisions, entry)
        match entry["kind"]:
            case "step":
                reached = max(reached, int(entry["step"]))
            case "rewind":
                reached, asked = int(entry["to_step"]), entry.get("who") == ASKED
                rewound = None if asked else (reached, str(entry["reason"]))
                verified = min(verified, reached)
            case "audit":
                verified = int(entry["step"])
            case "corruption":
                verified = int(entry["verified_step"])
    return replace(state, decisions=decisions, reached=reached, rewound=rewound, verified_step=verified)


def _decisions_at(decisions: Decisions, checkpoint: Checkpoint, global_batch_size: int) -> Decisions:
    """Decisions of a run that resumes from a checkpoint, which records those that it was computed with."""
    step, samples = checkpoint.step, checkpoint.manifest.data.get("samples")
    skips, position = decisions.skips, consumed(decisions.skips, step, global_batch_size)
    if isinstance(samples, int):
        position = samples
        skips = skips_resumed(skips, step=step, samples=samples, global_batch_size=global_batch_size)
    try:
        told = rates_of(checkpoint.manifest.metadata.get("learning_rate", ()))
    except (TypeError, ValueError) as error:
        raise CorruptCheckpoint(
            f"the manifest of step {step} under {checkpoint.storage.url} has no pairs of a step and a factor as "
            f"metadata['learning_rate']: {error}. Restore it."
        ) from error
    try:
        told_weights = weights_of(checkpoint.manifest.metadata.get(WEIGHTS, ()))
    except (TypeError, ValueError, AttributeError) as error:
        raise CorruptCheckpoint(
            f"the manifest of step {step} under {checkpoint.storage.url} has no steps, positions and weights as "
            f"metadata['{WEIGHTS}']: {error}. Restore it."
        ) from error
    return Decisions(
        skips=skips,
        rates=rates_resumed(decisions.rates, step=step, told=told),
        weights=weights_resumed(decisions.weights, position=position, told=told_weights),
    )


def _arithmetic_at(checkpoint: Checkpoint, entries: Sequence[Mapping[str, Any]]) -> tuple[dict[str, str] | None, str]:
    """The run's arithmetic (None if unknown) and its rules: those accepted last, or else the checkpoint's."""
    told = accepted(entries) or checkpoint.manifest.metadata.get("arithmetic")
    try:
        rules = numerics.recorded(told)
    except ValueError as error:
        raise CorruptCheckpoint(
            f"the manifest of step {checkpoint.step} under {checkpoint.storage.url} does not say by which rules it was "
            f"computed: {error}. Restore it."
        ) from error
    return (numerics.of_machine(told) or None) if isinstance(told, Mapping) else None, rules


def _usable(files: RunFiles, refs: list[CheckpointRef]) -> Iterator[Checkpointed]:
    for number, ref in enumerate(refs):
        if ref.digest is not None and files.key is None and ref.state == "committed":
            yield Checkpointed(step=ref.step, prefix=ref.prefix, digest=ref.digest)
        elif number >= len(refs) - _OLDER_OPENED:
            try:
                yield _checkpointed(files.storage, open_ref(files.storage, ref, key=files.key))
            except CheckpointError:
                continue  # not the newest: nothing is lost, and `raysharded checkpoint ls` shows it


def _checkpointed(storage: Storage, checkpoint: Checkpoint) -> Checkpointed:
    elsewhere = checkpoint.storage.url != storage.url
    return Checkpointed(
        step=checkpoint.step,
        prefix=checkpoint.prefix,
        url=checkpoint.storage.url if elsewhere else "",
        digest=checkpoint.digest,
        fingerprint=str(checkpoint.manifest.metadata.get("fingerprint", "")),
    )
