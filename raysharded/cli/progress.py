"""A bar for long work, in bytes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def byte_progress(what: str, total_bytes: int | None, *, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """A function to call with every so many bytes done; a bar on standard error where that is a terminal.

    `total_bytes` is None if it is not known beforehand.
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
