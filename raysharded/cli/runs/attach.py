"""`raysharded attach`: watch a run, from anywhere on its cluster, or from its storage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import typer

from raysharded.cli.errors import AsJson, interrupted_by_sigterm, print_json_line
from raysharded.cli.output import echo, screen
from raysharded.cli.runs.status import Address, RunName
from raysharded.cli.streams import leave_if_unread

_WAIT_S = 2.0
_SHARE = 0.01
"""Share of a core that watching may use: a refresh's cost determines the time of the next one."""
_LEAST_S, _MOST_S = 0.5, 5.0
"""Shortest and longest time between two refreshes."""


def attach(
    run: RunName,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Watch a run while it trains: progress, loss, workers, incidents, checkpoints, and requests.

    Ctrl-C leaves the view, not the run. Without a terminal it prints a line per event; with --json one value per line:
    the run's status, then every journal entry, and the status at the end.

    At the run's end it reports how the run ended, with the exit statuses of `raysharded wait`.
    """
    import raysharded
    from raysharded.cli.runs.wait import ending, exit_status, final_status

    handle = raysharded.attach(run, address=address)
    try:
        with interrupted_by_sigterm():
            if as_json:
                _as_json(handle)
            else:
                _show(handle)
            found = final_status(handle)
    except KeyboardInterrupt:
        echo("left the view; the run continues", err=True)
        return
    if as_json:
        print_json_line({"kind": "status", **found.as_dict()})
    else:
        echo(ending(found))
    raise typer.Exit(exit_status(found))


def _show(handle: Any) -> None:
    from raysharded.report.live.view import lines, view

    out = screen()
    if out is not None:
        view(_batches(handle), handle.status, out)
        return
    for line in lines(_batches(handle), handle.status().max_steps, past=True):
        echo(line)


def _as_json(handle: Any) -> None:
    from raysharded.report.run_report import plain

    print_json_line({"kind": "status", **handle.status().as_dict()})
    for batch in _batches(handle):
        for entry in batch:
            print_json_line(plain(entry))


def _batches(handle: Any) -> Iterator[Sequence[dict[str, Any]]]:
    """Batches of all entries so far, then of new ones, possibly empty, until the run is over, or nobody reads them."""
    import time

    from raysharded.run.handle import Follower

    follower = Follower(handle)
    while past := follower.next(0.0):
        yield _fields(past)
    over = handle.is_over()
    while True:
        used_s = time.process_time()
        new = follower.next(0.0 if over else _WAIT_S) or (follower.rest() if over else [])
        yield _fields(new)
        if new:
            leave_if_unread(_until_next(time.process_time() - used_s))
        elif over:
            return
        else:
            leave_if_unread()
            over = handle.is_over()


def _fields(entries: Sequence[tuple[int, str, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [{**fields, "kind": kind} for _, kind, fields in entries]


def _until_next(look_s: float) -> float:
    """Seconds to wait after a refresh that took this much processor time."""
    return min(_MOST_S, max(_LEAST_S, look_s / _SHARE))
