"""Listeners to a live run's journal entries: the live line, writers of metrics, the caller's own listener."""

from __future__ import annotations

import contextlib
import logging
import platform
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from raysharded.clock import Clock, SystemClock
from raysharded.run.results import Listener

if TYPE_CHECKING:
    from raysharded.run.spec import RunSpec


_log = logging.getLogger("raysharded.driver")


def ignore(kind: str, fields: dict[str, Any]) -> None:
    """Ignore all entries."""


def announce(text: str, *, shown: bool) -> None:
    """Report the start, before the first journal entry: a line where the live line will be, or one in the log.

    In a notebook it is logged too: a cell has the live line alone.
    """
    from raysharded.report.console import PlainConsole

    console = PlainConsole(stderr=True)
    if not shown or console.is_jupyter:
        _log.info("%s", text)
        return
    with contextlib.suppress(OSError, ValueError, SystemExit):  # nobody reads it: the run continues
        console.print(text, soft_wrap=True, highlight=False, markup=False)


@contextlib.contextmanager
def listening(
    max_steps: int, tokens_per_step: int | None, progress: bool, outside: Listener | None, clock: Clock | None = None
) -> Iterator[Listener]:
    """A listener that feeds the live line and the caller's own.

    `clock`: the time of the entries, if that is not now.
    """
    if not progress:
        yield outside or ignore
        return
    from raysharded.report.console import PlainConsole
    from raysharded.report.live.progress import LiveView

    view = LiveView(PlainConsole(stderr=True), max_steps, clock or SystemClock(), tokens_per_step)

    def listen(kind: str, fields: dict[str, Any]) -> None:
        view.on_entry(kind, fields)
        if outside is not None:
            outside(kind, fields)

    try:
        with shown_elsewhere():
            yield listen
    finally:
        view.close()


@contextlib.contextmanager
def shown_elsewhere() -> Iterator[None]:
    """Suppress Python's own output of entries that a person should not miss, which needs no handler.

    The process that follows the run shows them.
    """
    from raysharded.driver.driver import EVENTS_LOG

    events_log, shown = logging.getLogger(EVENTS_LOG), logging.NullHandler()
    events_log.addHandler(shown)
    try:
        yield
    finally:
        events_log.removeHandler(shown)


@contextlib.contextmanager
def measuring(spec: RunSpec, url: str, listen: Listener) -> Iterator[Listener]:
    """`listen`, preceded by the configured writers of metrics."""
    if not spec.run.metrics:
        yield listen
        return
    from raysharded.metrics.feed import Feed, close
    from raysharded.metrics.translation import Translator

    samples, tokens = spec.batch.global_batch_size, spec.tokens_per_step
    feeds = [Feed(writer, Translator(url, samples, tokens), SystemClock()) for writer in spec.run.metrics]

    def tell(kind: str, fields: dict[str, Any]) -> None:
        for feed in feeds:
            feed.put(kind, fields)
        listen(kind, fields)

    try:
        yield tell
    finally:
        close(feeds)


def untested_versions() -> list[str]:
    """A sentence for each installed package in a version that raysharded was not tested with."""
    from importlib.metadata import PackageNotFoundError, version

    from raysharded.versions import TESTED, untested

    found = {}
    for name in TESTED:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return untested(found)


def file_limits(most_workers: int) -> list[str]:
    """A sentence if this machine's limit of open files is too low for the run's workers; raises this process's own."""
    from raysharded.protocol.descriptors import raise_limit, shortage

    raise_limit()
    return list(filter(None, [shortage(most_workers)]))


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter for a run's record."""
    from importlib.metadata import version

    return {"python": platform.python_version(), **{name: version(name) for name in ("torch", "ray")}}
