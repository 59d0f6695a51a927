"""`raysharded status`: one run, from its storage, and from its driver actor where storage does not suffice."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from raysharded.cli.errors import AsJson, print_json, print_json_line
from raysharded.cli.output import console, echo
from raysharded.cli.runs.ls import cells, state_text
from raysharded.cli.streams import leave_if_unread

if TYPE_CHECKING:
    from raysharded.report.overview import RunOverview
    from raysharded.run import Status

RunStorage = Annotated[
    str, typer.Argument(metavar="RUN", help="The run's folder or URL, <storage_path>/<name>; or its name on a cluster.")
]

RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="The run's name, or its folder or URL: <storage_path>/<name>.")
]
Address = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="The Ray cluster: by default RAY_ADDRESS, or the one on this machine."),
]


def url_of(run: str) -> str:
    """The URL of a run's storage. A string that may be a path is used as one; a plain name is looked up on the cluster.

    Raises as `raysharded.attach` for a name that no cluster knows.
    """
    if os.sep in run or os.path.exists(run):
        return run
    from raysharded.run.attach import attach

    return attach(run).url


def status(
    run: RunStorage,
    follow: Annotated[
        bool, typer.Option("--follow", help="Then print a line for each change, until the run's driver ends.")
    ] = False,
    every_s: Annotated[float, typer.Option("--every", metavar="SECONDS", min=0.1, help="Interval of --follow.")] = 2.0,
    as_json: AsJson = False,
) -> None:
    """Show a run: its state, its driver, its workers, and its latest incidents.

    Reads the run's storage, from any machine with access to it, and cannot disturb the run. If RUN is a name, or if
    storage does not show that the driver is at work, the Ray cluster that is found is queried, too: the driver knows
    more than a storage that it cannot write to. With --follow and --json: one line of JSON per change.
    """
    from raysharded.errors import StorageError
    from raysharded.report.loader import open_run
    from raysharded.report.overview import look
    from raysharded.report.recent import read_recent
    from raysharded.run.hosted.cluster_status import complete, without_storage
    from raysharded.run.status import stored_status, with_restart, with_stored_best

    url = url_of(run)
    unreadable: StorageError | None = None
    try:
        storage = open_run(url)
        (glance,), recent = look([storage]), read_recent(storage)
        glance, found = complete(glance, stored_status(glance, recent), ask=url != run)
        found = with_stored_best(found, glance, storage)
    except StorageError as error:
        answered = without_storage(url, error)
        if answered is None:
            raise
        (glance, found), unreadable = answered, error
    if as_json:
        (print_json_line if follow else print_json)(found.as_dict())
    else:
        _show(glance, found)
    if not follow:
        return
    if unreadable is not None:  # its changes are read from there
        raise unreadable
    from raysharded.report.live.follow import follow as follow_run

    told = follow_run(
        storage, glance, recent.last_segment, every_s=every_s, pause=leave_if_unread, complete=with_restart
    )
    if as_json:
        for changes in told:
            for change in changes:
                print_json_line(change)
        return
    from raysharded.report.live.view import lines

    for line in lines(told, glance.max_steps or 0):
        echo(line)


OVER = frozenset(("ended", "finished", "stopped", "failed"))
"""States of runs whose processes have exited."""


def _show(run: RunOverview, found: Status) -> None:
    from rich.text import Text

    from raysharded.display.quantities import count, duration, moment
    from raysharded.report.history.tables import facts_table
    from raysharded.report.state_meaning import meaning

    step, loss, workers, checkpoint, age = cells(run)
    table = facts_table()
    table.add_row("run", Text(f"{run.name}, at {run.url}"))
    starting = ", and its workers are starting" if run.state == "running" and found.num_ready is not None else ""
    table.add_row("state", Text.assemble(state_text(run), f": {meaning(run)}{starting}"))
    if run.driver:
        table.add_row("driver", Text(run.driver))
    if run.error:
        table.add_row("error", Text(run.error))
    for warning in found.warnings:
        table.add_row("warning", Text(warning))
    table.add_row("step", step or "none")
    if found.step_s is not None:
        rest = f"; {duration(found.left_s)} left" if found.left_s else ""
        table.add_row("a step takes", f"{duration(found.step_s)}{rest}")
    table.add_row("loss", loss or "none")
    table.add_row("workers", _workers(run, found, workers))
    if found.missing:
        table.add_row("", Text(found.missing))
    for node, processes in _processes(found) if run.state not in OVER else []:
        table.add_row("", Text(f"on {node}: {processes}"))
    if run.checkpoint_at is not None:
        checkpoint += f", committed {moment(run.checkpoint_at)}"
    table.add_row("newest checkpoint", checkpoint or "none")
    if found.best_checkpoint is not None:
        best = found.best_checkpoint
        table.add_row("best checkpoint", Text(f"step {best.step}: {best.metric} {best.value:.6g}"))
    table.add_row("newest entry", f"{age}, of {count(run.num_segments, 'segment')}" if age else "none")
    incidents = facts_table()
    for at, text in found.incidents:
        incidents.add_row(Text(moment(at)), Text(text))
    with console() as out:
        out.print(table)
        if found.incidents:
            out.print(incidents)


def _workers(run: RunOverview, found: Status, count: str) -> str:
    """The members' number and numbers; before the first generation, how many workers are ready of how many needed."""
    if run.state == "new" or found.num_ready is not None:
        needed = "" if found.num_needed is None else f", at least {found.num_needed} needed"
        return "starting" if found.num_ready is None else f"starting: {found.num_ready} ready{needed}"
    members = "" if not found.workers else f": {', '.join(map(str, found.workers))}"
    return f"{count or 'none'}{members}"


def _processes(found: Status) -> list[tuple[str, str]]:
    """Every node, with the process ids of its workers."""
    nodes: dict[str, list[str]] = {}
    for worker in found.workers:
        if worker in found.nodes:
            nodes.setdefault(found.nodes[worker], []).append(f"{worker} is process {found.pids.get(worker, 'unknown')}")
    return [(node, ", ".join(processes)) for node, processes in nodes.items()]
