"""A run's result: from its storage, and from the last state of its driver."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raysharded.errors import CheckpointError, StorageError
from raysharded.run.results import Result, ScoredCheckpoint

if TYPE_CHECKING:
    from raysharded.checkpoint import Best, Checkpoint, SigningKey, Storage
    from raysharded.driver.state.state import State

_log = logging.getLogger("raysharded.driver")


def of_checkpoint(newest: Checkpoint, storage: Storage, name: str, url: str) -> Result:
    """The result that a run has with its newest checkpoint, from what that records."""
    return Result(
        name=name,
        url=url,
        steps=newest.step,
        fingerprint=str(newest.manifest.metadata.get("fingerprint", "")),
        checkpoint=folder_of(storage, url, newest.prefix, newest.storage.url),
        **_last_numbers(newest.manifest.metadata.get("metrics") or {}),
    )


def of_finished(state: State, storage: Storage, name: str, url: str) -> Result:
    """The result of a run whose driver has done the last step."""
    assert state.result_fingerprint is not None
    return _of_state(state, storage, name, url, steps=state.step, fingerprint=state.result_fingerprint)


def of_stopped(newest: Checkpoint | None, state: State, storage: Storage, name: str, url: str) -> Result:
    """The result of a run that was stopped: that of its newest checkpoint, from which it would resume.

    `newest`: None if it has none, or if storage does not answer now.
    """
    if newest is not None:
        return of_checkpoint(newest, storage, name, url)
    found = state.checkpoint
    return _of_state(
        state,
        storage,
        name,
        url,
        steps=found.step if found else 0,
        fingerprint=found.fingerprint if found else "",
    )


def _of_state(state: State, storage: Storage, name: str, url: str, *, steps: int, fingerprint: str) -> Result:
    found = state.checkpoint
    return Result(
        name=name,
        url=url,
        steps=steps,
        fingerprint=fingerprint,
        checkpoint=folder_of(storage, url, found.prefix, found.url) if found else "",
        **_last_numbers(state.measured if state.measured_step == steps else {}),
    )


def _last_numbers(measured: Mapping[str, float]) -> dict[str, Any]:
    """The fields `loss`, `metrics` and `evaluation` of a `Result`, from a step's numbers as checkpoints keep them."""
    prefix = "evaluation."
    return {
        "loss": measured.get("loss"),
        "metrics": {k: v for k, v in measured.items() if k != "loss" and not k.startswith(prefix)},
        "evaluation": {k.removeprefix(prefix): v for k, v in measured.items() if k.startswith(prefix)},
    }


def best_of(
    storage: Storage, url: str, rule: Best | None = None, *, key: SigningKey | None = None
) -> ScoredCheckpoint | None:
    """The run's best checkpoint; None if there is none, or if it cannot be read now, which is logged.

    `rule`: None for the one that the newest checkpoint records.
    """
    from raysharded.checkpoint import best_checkpoint

    try:
        best = best_checkpoint(storage, rule, key=key)
    except (CheckpointError, StorageError) as error:
        _log.warning("the best checkpoint of the run at %s cannot be determined: %s", url, error)
        return None
    if best is None:
        return None
    return ScoredCheckpoint(
        step=best.ref.step, url=folder_of(storage, url, best.ref.prefix), metric=best.metric, value=best.value
    )


def with_best(result: Result, storage: Storage, rule: Best | None = None, *, key: SigningKey | None = None) -> Result:
    """The result with the run's best checkpoint; as `best_of`."""
    return replace(result, best_checkpoint=best_of(storage, result.url, rule, key=key))


def newest_of(storage: Storage) -> Checkpoint | None:
    """The newest checkpoint, with the environment's signing key; None if there is none."""
    from raysharded.checkpoint import newest_complete, signing_key_from_environment

    return newest_complete(storage, skip_damaged=True, key=signing_key_from_environment()).checkpoint


def folder_of(storage: Storage, url: str, prefix: str, elsewhere: str = "") -> str:
    """URL of a checkpoint: below the run's own, or in the storage `elsewhere` that a fork began with."""
    from raysharded.locations import join_url

    return join_url(elsewhere if elsewhere not in ("", storage.url) else url, prefix)
