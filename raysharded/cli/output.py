"""Output of commands besides lines of text: atomic files, and a bar for long work."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

from raysharded.errors import StorageError


def write_page(path: str, page: str) -> None:
    """Write a page to a file, replace an existing one, and report it; for "-" print it to standard output.

    Raises StorageError if the file cannot be written.
    """
    if path == "-":
        typer.echo(page, nl=False)
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
    typer.echo(f"{path}: {len(page.encode()) / 1024:.0f} KiB; open it in any browser", err=True)


@contextmanager
def byte_progress(what: str, total_bytes: int | None, *, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """A function to call with each number of bytes done; shows a bar on standard error if that is a terminal.

    `total_bytes` is None if unknown beforehand.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda num_bytes: bar.update(task, advance=num_bytes)
