"""The response to an audit's finding: culprits are removed, and possibly wrong steps are computed again. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from raysharded.driver.checkpoints import protected
from raysharded.driver.state import recovery_timeline
from raysharded.driver.state.changed import replace
from raysharded.driver.state.commands import Command, DeleteCheckpoints, Outcome, Record, finish, prepend
from raysharded.driver.state.state import Checkpointed, State
from raysharded.driver.workers import proof_failures
from raysharded.errors import InexactError
from raysharded.protocol.messages import Corruption, StepReport, save_prefix


def note(state: State, report: StepReport) -> Outcome:
    """Handle a reported step: one whose audit found nothing is verified."""
    if report.audit_s is None:
        return state, []
    fields = {"step": report.step, "seconds": report.audit_s, "workers": report.world_size, "ok": True}
    if state.corrupted is not None and report.step >= state.corrupted[0]:  # computed again, and correct: it is over
        state = replace(state, corrupted=None)
    return replace(state, verified_step=report.step), [Record(kind="audit", fields=fields)]


def found(state: State) -> Corruption | None:
    """The corruption that members of the stopped generation found; None if there is none."""
    return next((stop.corruption for stop in state.stops.values() if stop.corruption is not None), None)


def evict(state: State, corruption: Corruption, at: float) -> Outcome:
    """The state without the culprits, and without results since the newest verified step.

    Ends the run if the repeated step fails its audit again, with another worker in the culprit's place.
    """
    verified = state.verified_step
    fields = {
        **corruption.fields(),
        "verified_step": verified,
        "distrusted": [*_folders(state), *_being_written(state)],
    }
    commands: list[Command] = [Record(kind="corruption", fields=fields, durable=True)]
    if state.corrupted is not None and state.corrupted[0] == corruption.step:
        return prepend(finish(state, _again(state.corrupted[1], corruption)), commands)
    incident = recovery_timeline.found(state, at, reason=corruption.text())
    state, more = _without_distrusted(replace(state, corrupted=(corruption.step, corruption.text()), incident=incident))
    commands.extend(more)
    return prepend(proof_failures.without_culprits(state, corruption, at), commands)


def _again(before: str, corruption: Corruption) -> InexactError:
    return InexactError(
        f"{corruption.text()}, after it had been computed again from a verified state, because of: {before}. It is "
        "likely that the task's computation is not reproducible: look for randomness that torch.manual_seed does not "
        "set, and for what depends on time or on the machine. Otherwise several machines compute wrong numbers."
    )


def _distrusted(state: State) -> Sequence[Checkpointed]:
    """Checkpoints of unverified steps."""
    return [checkpoint for checkpoint in protected.known(state) if checkpoint.step > state.verified_step]


def _folders(state: State) -> list[str]:
    """Folders of checkpoints of unverified steps, also of those that storage may have without having confirmed it."""
    folders = [checkpoint.prefix for checkpoint in _distrusted(state)]
    return folders + protected.unconfirmed_after(state, state.verified_step)


def _being_written(state: State) -> list[str]:
    """Folders of unverified checkpoints that may still be committed at any moment, even after this driver has ended."""
    return [
        save_prefix(saving.step, saving.generation, state.driver)
        for saving in state.saves.values()
        if saving.step > state.verified_step and not saving.fingerprint_only
    ]


def _without_distrusted(state: State) -> Outcome:
    """The state without memory contents and checkpoints of unverified steps."""
    gone, folders = _distrusted(state), _folders(state)
    left = tuple(checkpoint for checkpoint in protected.known(state) if checkpoint not in gone)
    kept = {key: saving for key, saving in state.saves.items() if saving.step <= state.verified_step}
    asked = tuple(
        request for saving in state.saves.values() if saving.step > state.verified_step for request in saving.answers
    )
    state = replace(
        state,
        checkpoint=left[-1] if left else None,
        older_checkpoints=left[:-1],
        saves=kept,
        asked=(*state.asked, *asked),
        unconfirmed_saves=tuple(one for one in state.unconfirmed_saves if one[0] <= state.verified_step),
        given_up=None,
        stops={},
        holdings={},
        invalidated_up_to=state.generation,
        invalidated_after=state.verified_step,
    )
    return state, [DeleteCheckpoints(prefixes=tuple(folders))] if folders else []
