"""`raysharded runs`: the runs below a folder or URL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from raysharded.cli.errors import AsJson, print_json
from raysharded.cli.output import console, echo

if TYPE_CHECKING:
    from raysharded.report.history.row_table import RowTable
    from raysharded.report.overview import RunOverview


_ERROR = 80
"""Characters of an error. `raysharded status` shows all of it."""


def runs(
    url: Annotated[str, typer.Argument(metavar="URL", help="The runs' folder or URL: RunConfig.storage_path.")] = ".",
    as_json: AsJson = False,
) -> None:
    """List the runs below a folder or URL: their drivers, their progress, their newest checkpoints.

    Reads a few small files of each run. If a run's driver is on another machine and seems silent, it is read twice, a
    few seconds apart. If a run lost its driver actor, the Ray cluster that is found is queried about its restart.
    """
    from raysharded.checkpoint import open_storage
    from raysharded.report.nearby import require_folder
    from raysharded.report.overview import find_runs
    from raysharded.run.status import with_restart

    require_folder(url)
    found = list(map(with_restart, find_runs(url)))
    if as_json:
        from raysharded.run.status import stored_status

        print_json([stored_status(run).as_dict() for run in found])
        return
    if not found:
        echo(f"no runs in {open_storage(url).url}", err=True)
        return
    echo(url)
    with console() as out:
        out.print(_table(found))


def _table(found: list[RunOverview]) -> RowTable:
    from raysharded.display.plain_text import brief
    from raysharded.report.history.row_table import RowTable

    table = RowTable()
    table.add_column("run", long="shorten")
    table.add_column("state")
    for name, rank in (("step", 0), ("loss", 3), ("workers", 2), ("checkpoint", 4), ("newest entry", 1)):
        table.add_column(name, right=True, rank=rank)
    table.add_column("driver, or error", long="shorten", rank=5)
    for run in found:
        table.add_row(run.name, state_text(run), *cells(run), run.driver or brief(run.error, _ERROR))
    return table


def state_text(run: RunOverview) -> Any:  # rich's
    """The state, coloured."""
    from rich.text import Text

    from raysharded.report.history.tables import BAD, DIM, GOOD
    from raysharded.report.state_meaning import label

    style = {"failed": BAD, "damaged": BAD, "silent": BAD, "running": GOOD, "paused": GOOD, "finished": GOOD}.get(
        run.state, DIM
    )
    return Text(label(run), style=style)


def cells(run: RunOverview) -> tuple[str, str, str, str, str]:
    """Step, loss, workers, newest checkpoint, age of the newest entry; empty where not known."""
    import time

    from raysharded.display.quantities import duration

    of = "" if run.max_steps is None else f" of {run.max_steps}"
    age_s = None if run.newest_entry_at is None else max(0.0, time.time() - run.newest_entry_at)
    return (
        "" if run.step is None else f"{run.step}{of}",
        "" if run.loss is None else f"{run.loss:.4f}",
        "" if run.workers is None else str(run.workers),
        "" if run.checkpoint_step is None else f"step {run.checkpoint_step}",
        "" if age_s is None else f"{duration(round(age_s))} ago",
    )
