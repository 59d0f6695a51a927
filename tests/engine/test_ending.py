"""What ended a worker's call, as its driver is told."""

from __future__ import annotations

import pytest

from raysharded.actors.ending import ending_of
from raysharded.driver.messages import StopReason
from raysharded.errors import (
    CheckpointError,
    CollectiveAborted,
    ConfigError,
    CorruptNumbers,
    DataError,
    InexactError,
    StorageError,
    TaskError,
)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (CollectiveAborted("gone"), StopReason.ABORTED),
        (TaskError("bug"), StopReason.TASK_ERROR),
        (CorruptNumbers("bits"), StopReason.CORRUPT),
        (InexactError("batch norm"), StopReason.REFUSED),
        (ConfigError("no"), StopReason.REFUSED),
        (CheckpointError("torn"), StopReason.REFUSED),
        (DataError("no column"), StopReason.TASK_ERROR),
        (StorageError("away"), StopReason.TASK_ERROR),
    ],
)
def test_our_own_errors_say_themselves_whose_fault_it_is(error: Exception, reason: StopReason) -> None:
    found = ending_of(error, interrupted=False)
    assert (found.reason, found.error, found.is_unexpected) == (reason, error, False)


def test_an_error_that_nobody_expected_is_the_tasks_with_its_traceback() -> None:
    try:
        raise KeyError("no such column")
    except KeyError as error:
        found = ending_of(error, interrupted=False)
    assert (found.reason, found.is_unexpected) == (StopReason.TASK_ERROR, True)
    assert str(found.error) == "KeyError: 'no such column'"
    assert isinstance(found.error, TaskError)
    assert 'raise KeyError("no such column")' in found.error.user_traceback


@pytest.mark.parametrize("error", [TaskError("in forward"), ValueError("a tensor that nobody filled")])
def test_nobody_is_to_blame_for_what_follows_an_abort(error: Exception) -> None:
    assert ending_of(error, interrupted=True).reason is StopReason.ABORTED
