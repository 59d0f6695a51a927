"""The output of a script that ends with one of our errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from raysharded.display.uncaught_errors import describe
from raysharded.errors import ConfigError, TaskError
from tests.cases import tried_each_time


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
from raysharded.display import uncaught_errors
uncaught_errors.install(errors.RayshardedError)
import ray
uncaught_errors.install(errors.RayshardedError)
import sys
print(sys.excepthook.args[1].__module__)
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


CALLS = {
    "a configuration": (
        "import raysharded as rs",
        "rs.BatchConfig(global_batch=32)",
        "did you mean 'global_batch_size'?",
    ),
    "a check of a value": (
        "import raysharded as rs",
        "rs.ScalingConfig(num_workers=0)",
        "num_workers=0: give a number",
    ),
    "data": ("import raysharded as rs", "rs.TokenDataset('', seq_len=8)", "TokenDataset.paths=''"),
    "a trainer": (
        "import raysharded as rs",
        "rs.ElasticTrainer(task=1, data=[1], batch=None, scaling=None, run=None)",
        "task",
    ),
    "a load": ("from raysharded import checkpoint", "checkpoint.load('rnus', {})", "there is nothing at"),
    "a save": ("from raysharded import checkpoint", "checkpoint.save('', {})", "give the checkpoint's folder"),
    "an open": ("from raysharded import checkpoint", "checkpoint.open('rnus')", "there is nothing at"),
}
"""Public calls with a mistake: (import, call, part of the message)."""


@pytest.mark.parametrize("what", tried_each_time(["a trainer", "an open"], CALLS))
def test_whichever_public_call_fails_a_script_shows_its_own_line_and_the_message(what: str, tmp_path: Path) -> None:
    first, call, message = CALLS[what]
    script = tmp_path / "script.py"
    script.write_text(f"{first}\n\n{call}\n", encoding="utf-8")

    def shown(*options: str) -> str:
        command = [sys.executable, *options, str(script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
        assert done.returncode == 1
        return done.stderr

    own, text = shown().splitlines()
    assert own == f"{script}:3: {call}"
    assert message in text
    whole = shown("-X", "dev", "-W", "ignore")
    assert "Traceback (most recent call last)" in whole
    assert "raysharded" in whole


def test_other_errors_keep_their_tracebacks_after_one_of_ours(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import raysharded as rs\ntry:\n    rs.ScalingConfig(num_workers=0)\nexcept ValueError:\n    {}[3]\n",
        encoding="utf-8",
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr.count("Traceback (most recent call last)") == 2
    assert done.stderr.splitlines()[-1] == "KeyError: 3"
