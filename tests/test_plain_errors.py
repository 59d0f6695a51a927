"""The output of a script that ends with one of our errors."""

from __future__ import annotations

import subprocess
import sys

import pytest

from raysharded.errors import ConfigError, TaskError
from raysharded.run.process_hooks import describe


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


SCRIPT = """
import {first}
from raysharded import errors
from raysharded.run import process_hooks
process_hooks.install()
import ray
process_hooks.install()
import sys
print(sys.excepthook.args[0].__module__)
raise {error}
"""


@pytest.mark.parametrize("first", ["ray", "sys"])
def test_a_script_that_imports_ray_shows_our_errors_plainly_and_others_as_always(first: str) -> None:
    def shown(error: str) -> str:
        script = SCRIPT.format(first=first, error=error)
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 1
        assert done.stdout == "ray._private.worker\n"  # ours comes first, and then Ray's
        return done.stderr

    ours = shown("errors.ConfigError('give 3')")
    assert ours.splitlines()[-1] == "ConfigError: give 3"
    assert "Traceback" not in ours
    assert "Traceback (most recent call last)" in shown("KeyError(3)")
