"""The reason that a worker's call ended, as reported to its driver."""

from __future__ import annotations

import pickle
import threading

import pytest
import torch
from torch import nn

import raysharded as rs
from raysharded.actors.process.stop_reason import ending_of
from raysharded.actors.step.forward_backward import Computer
from raysharded.errors import (
    CheckpointError,
    CollectiveAborted,
    ConfigError,
    CorruptNumbers,
    DataError,
    InexactError,
    RayshardedError,
    StorageError,
    TaskError,
)
from raysharded.protocol.messages import StopReason


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
def test_our_own_errors_carry_whose_fault_it_is(error: Exception, reason: StopReason) -> None:
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


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit()])
def test_a_task_that_ends_the_process_has_a_bug_like_any_other(error: BaseException) -> None:
    found = ending_of(error, interrupted=False)
    assert found.reason is StopReason.TASK_ERROR
    assert type(error).__name__ in str(found.error)


class Mute(Exception):
    """Raises when it is converted to text."""

    def __str__(self) -> str:
        raise LookupError("no words")


def test_an_error_without_a_readable_message_is_reported_all_the_same() -> None:
    found = ending_of(Mute(), interrupted=False)
    assert str(found.error) == "Mute: (message unavailable: __str__ raised LookupError)"


class BadLine(DataError):
    """A user's error, whose constructor does not take the arguments that pickle passes."""

    def __init__(self, path: str, line: int) -> None:
        super().__init__(f"{path}:{line} is damaged")


class OwnTaskError(TaskError):
    """A user's error, with fewer fields than ours."""

    def __init__(self) -> None:
        Exception.__init__(self, "mine")


def _local() -> RayshardedError:
    class Local(CheckpointError):
        pass

    return Local("torn")


def _with_a_lock() -> RayshardedError:
    error = DataError("with a lock")
    vars(error)["lock"] = threading.Lock()
    return error


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (BadLine("a.txt", 3), DataError, "a.txt:3 is damaged"),
        (OwnTaskError(), TaskError, "mine"),
        (_local(), CheckpointError, "torn"),
        (_with_a_lock(), DataError, "with a lock"),
    ],
)
def test_an_error_that_cannot_travel_is_replaced_by_ours_with_its_text(
    error: RayshardedError, kind: type[RayshardedError], text: str
) -> None:
    arrived = pickle.loads(pickle.dumps(ending_of(error, interrupted=False).error))
    assert (type(arrived), str(arrived)) == (kind, text)


def _raised(first: Exception, *, hidden: bool) -> BaseException:
    try:
        try:
            raise first
        except Exception as error:
            if hidden:
                raise ValueError("my forward failed") from None
            raise ValueError("my forward failed") from error
    except ValueError as error:
        return error


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize(
    "first",
    [
        CollectiveAborted("a peer is gone"),
        torch.distributed.DistBackendError("NCCL"),
        RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"),
    ],
)
def test_a_peers_death_is_not_blamed_on_a_task_that_wraps_it(first: Exception, hidden: bool) -> None:
    assert ending_of(_raised(first, hidden=hidden), interrupted=False).reason is StopReason.ABORTED


def test_what_is_refused_inside_a_tasks_forward_stays_a_refusal_however_the_task_wraps_it() -> None:
    class Wrapping(rs.Task):
        def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss | torch.Tensor:
            error = _raised(InexactError("unit blocks.0"), hidden=False)
            raise error

    computer = Computer(Wrapping(), nn.Identity(), seed=1)
    with pytest.raises(InexactError, match=r"^unit blocks\.0$"):
        computer.evaluate(1, 0, torch.zeros(1), 1)


def test_an_error_that_is_its_own_cause_has_an_end() -> None:
    error, other = ValueError("one"), ValueError("other")
    error.__context__, other.__context__ = other, error
    assert ending_of(error, interrupted=False).reason is StopReason.TASK_ERROR


@pytest.mark.parametrize("error", [TaskError("in forward"), ValueError("a tensor that nobody filled")])
def test_nobody_is_to_blame_for_what_follows_an_abort(error: Exception) -> None:
    assert ending_of(error, interrupted=True).reason is StopReason.ABORTED
