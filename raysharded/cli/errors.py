"""The top-level error handler, with one message per raysharded error; and the commands' printing."""

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
"""The exit status that a shell reports for a command ended by Ctrl-C."""
_WIDTH = 140
"""Width, in characters, of output that is not a terminal."""


class Commands(Suggesting):
    """The root group of the commands."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]  # typer's own class of contexts, or click's
        try:
            return super().invoke(ctx)
        except RayshardedError as error:
            show_error(error)
            raise typer.Exit(1) from None
        except KeyboardInterrupt as interrupt:
            typer.echo(str(interrupt) or "interrupted", err=True)  # `fit`'s message states how to resume
            raise typer.Exit(INTERRUPTED) from None


def show_error(error: RayshardedError) -> None:
    """Print the message to stderr, after the traceback of the user's code if there is one."""
    if isinstance(error, TaskError) and error.user_traceback:
        typer.echo(error.user_traceback.rstrip(), err=True)
    typer.echo(f"error: {error}", err=True)


def console(width: int = _WIDTH) -> Console:
    """Standard output, `width` characters wide if it is not a terminal. Text is printed unchanged: names may resemble
    rich's markup."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else width, highlight=False, markup=False, emoji=False)


AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]
"""Option of every command: one JSON value on standard output, and nothing else there. Unknown and non-finite values are
null; `_s` are seconds, `_at` seconds since 1970, `_bytes` bytes. Errors still go to standard error."""


def print_json(value: Any) -> None:
    """Indented JSON on standard output."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def print_json_line(value: Any) -> None:
    """JSON on one line of standard output, for commands that print several values."""
    typer.echo(json.dumps(value, separators=(",", ":"), allow_nan=False))
