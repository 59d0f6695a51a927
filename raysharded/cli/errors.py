"""The top-level error handler, with one message per raysharded error; and the commands' printing."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated, Any

import typer

from raysharded.cli.option_names import Wording
from raysharded.cli.output import echo
from raysharded.cli.suggestions import Suggesting
from raysharded.display.plain_text import indented, masked_in
from raysharded.display.raylet_output import quiet_raylet
from raysharded.errors import RayshardedError, TaskError

INTERRUPTED = 130
"""The exit status that a shell reports for a command ended by Ctrl-C."""
_wording: ContextVar[Wording] = ContextVar("wording")
"""The words of the command that runs."""


class Commands(Suggesting):
    """The root group of the commands."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]  # typer's own class of contexts, or click's
        try:
            with quiet_raylet():
                return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            told = str(interrupt) or "interrupted"  # `fit`'s message states how to resume
            echo(indented(told), err=True, lines=True)
            raise typer.Exit(INTERRUPTED) from None


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """A context in which SIGTERM acts like Ctrl-C. Enter it once Ray is there, whose own handler prints a stack."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


@contextmanager
def worded(wording: Wording) -> Iterator[None]:
    """A context in which `show_error` uses a command's words."""
    token = _wording.set(wording)
    try:
        yield
    finally:
        _wording.reset(token)


def show_error(error: RayshardedError) -> None:
    """Print the message to stderr, after the traceback of the user's code if there is one.

    It speaks of the command's options where the library names their values.
    """
    if isinstance(error, TaskError) and error.user_traceback:
        echo(error.user_traceback.rstrip(), err=True, lines=True)
    echo(indented(f"error: {_wording.get().of(str(error))}"), err=True, lines=True)


AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]
"""Option of every command: one JSON value on standard output, and nothing else there. Unknown and non-finite values are
null; `_s` are seconds, `_at` seconds since 1970, `_bytes` bytes. Errors still go to standard error."""


def print_json(value: Any) -> None:
    """Indented JSON on standard output."""
    echo(json.dumps(masked_in(value), indent=2, allow_nan=False), lines=True)


def print_json_line(value: Any) -> None:
    """JSON on one line of standard output, for commands that print several values."""
    echo(json.dumps(masked_in(value), separators=(",", ":"), allow_nan=False))
