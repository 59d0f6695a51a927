"""Output of commands: lines, tables, atomic files, and a bar for long work."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from raysharded.display.plain_text import masked, one_line, printable
from raysharded.errors import StorageError

if TYPE_CHECKING:
    from rich.console import Console

_UNLIMITED = 1 << 20
"""Width of output that is not a terminal: tables are complete, one line per row."""


def echo(text: str | bytes, *, err: bool = False, nl: bool = True, lines: bool = False) -> None:
    """Print a line, to standard error with `err`, in the stream's own encoding: typer would write UTF-8 to ASCII.

    Text is made harmless: it is printed on one line (with `lines` on several), without control characters and the
    passwords of URLs. Bytes are printed unchanged.
    """
    if isinstance(text, str):
        text = (printable if lines else one_line)(masked(text))
    typer.echo(text, file=sys.stderr if err else sys.stdout, nl=nl)


@contextmanager
def console() -> Iterator[Console]:
    """Standard output for tables.

    Wide tables are shortened for terminals only. Other outputs get no trailing blanks.
    """
    from raysharded.report.console import PlainConsole

    is_terminal = sys.stdout.isatty()
    out = PlainConsole(width=None if is_terminal else _UNLIMITED)
    if is_terminal:
        yield out
        return
    with out.capture() as captured:
        yield out
    sys.stdout.write("\n".join(line.rstrip() for line in captured.get().split("\n")))
    sys.stdout.flush()


def write_page(path: str, page: str) -> None:
    """Write a page to a file, replace an existing one, and report it; for "-" print it to standard output.

    Raises StorageError if the file cannot be written.
    """
    if path == "-":
        echo(page.encode(), nl=False)  # UTF-8, which the page declares
        return
    temporary = f"{path}.{secrets.token_hex(4)}.tmp"
    try:
        with open(temporary, "w", encoding="utf-8", newline="\n") as file:
            file.write(page)
        os.replace(temporary, path)
    except OSError as error:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise StorageError(
            f"{path}: the page cannot be written: {error.strerror}. Give a file in a folder that you may write to."
        ) from error
    echo(f"{path}: {len(page.encode()) / 1024:.0f} KiB; open it in any browser", err=True)


def screen() -> Console | None:
    """The terminal at standard output, to redraw in place; None if there is none that can."""
    from raysharded.report.console import PlainConsole

    out = PlainConsole()
    return out if sys.stdout.isatty() and not out.is_dumb_terminal else None


def require_writable(path: str) -> None:
    """Raise StorageError if a file cannot be written there, before the work whose result it is for."""
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        what = "it is a folder" if os.path.isdir(path) else f"{folder} is no folder that you may write to"
        raise StorageError(f"{path} cannot be written: {what}. Give a file in a folder that you may write to.")


@contextmanager
def byte_progress(what: str, total_bytes: int | None, *, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """A function to call with each number of bytes done; shows a bar on standard error if that is a terminal.

    `total_bytes` is None if unknown beforehand.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from raysharded.report.console import PlainConsole

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=PlainConsole(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda num_bytes: bar.update(task, advance=num_bytes)
