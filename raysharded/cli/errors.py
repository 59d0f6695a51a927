"""Where exceptions end: one message for every error that raysharded raises on purpose; and how commands print."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raysharded.cli.suggestions import Suggesting
from raysharded.errors import RayshardedError, TaskError

if TYPE_CHECKING:
    from rich.console import Console

INTERRUPTED = 130
"""What a shell reports for a command that Ctrl-C ended."""
_WIDTH = 140
"""Of what is not a terminal."""


class Commands(Suggesting):
    """The root of the commands."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]  # typer's own class of contexts, or click's
        try:
            return super().invoke(ctx)
        except RayshardedError as error:
            show_error(error)
            raise typer.Exit(1) from None
        except KeyboardInterrupt as interrupt:
            typer.echo(str(interrupt) or "interrupted", err=True)  # `fit` says how to go on
            raise typer.Exit(INTERRUPTED) from None


def show_error(error: RayshardedError) -> None:
    """The message on stderr; before it, where the user's own code raised."""
    if isinstance(error, TaskError) and error.user_traceback:
        typer.echo(error.user_traceback.rstrip(), err=True)
    typer.echo(f"error: {error}", err=True)


def console(width: int = _WIDTH) -> Console:
    """Standard output, `width` characters wide where it is not a terminal. Text is printed as it is: names may look
    like rich's markup."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else width, highlight=False, markup=False, emoji=False)


AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]
"""Every command has it: one JSON value on standard output and nothing else there; what is not known, or not finite, is
null; `_s` are seconds, `_at` seconds since 1970, `_bytes` bytes. Errors go to standard error all the same."""


def print_json(value: Any) -> None:
    """Indented JSON on standard output."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def print_json_line(value: Any) -> None:
    """JSON on one line of standard output, for commands that go on."""
    typer.echo(json.dumps(value, separators=(",", ":"), allow_nan=False))
