"""What a script that ends with one of our errors shows."""

from __future__ import annotations

import pytest

from raysharded.errors import ConfigError, TaskError
from raysharded.plain_errors import describe


@pytest.mark.parametrize("text", ["no such token", "no such token\nin two lines: at the end"])
def test_the_tasks_own_error_is_shown_once_and_whole(text: str) -> None:
    traceback = f'Traceback (most recent call last):\n  File "t.py", line 3, in loss\n    look()\nLookupError: {text}\n'
    shown = describe(TaskError(f"T.loss in step 1, microbatch 2 raised LookupError: {text}", traceback))
    assert shown == f"{traceback}TaskError: T.loss in step 1, microbatch 2 raised LookupError (above)"
    assert shown.count(text) == 1


def test_a_further_word_after_the_cause_stays() -> None:
    error = TaskError("D[3] raised in step 1: KeyError: 3. Correct the dataset.", "Traceback:\nKeyError: 3\n")
    assert (
        describe(error)
        == "Traceback:\nKeyError: 3\nTaskError: D[3] raised in step 1: KeyError (above). Correct the dataset."
    )


def test_other_errors_are_their_message() -> None:
    assert describe(ConfigError("give a number: 3")) == "ConfigError: give a number: 3"
