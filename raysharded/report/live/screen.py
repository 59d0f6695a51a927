"""A run on the terminal's screen of a remote viewer. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from raysharded.display.plain_text import one_line
from raysharded.display.quantities import count, duration, span
from raysharded.report.history.row_table import RowTable
from raysharded.report.history.tables import BAD, DIM, GOOD, facts_table
from raysharded.report.live.progress import progress_text
from raysharded.report.live.tracker import Happened, Standing, Watched

_BARS = "▁▂▃▄▅▆▇█"
_WIDE = 60
"""Characters of the bar and of the sparkline."""
_MOST_WORKERS = 12
"""Maximum number of workers with a line each; if there are more, the slowest are shown."""
_SHOWN = 5


def screen(watched: Watched, standing: Standing | None, now: float) -> RenderableType:
    """The whole screen. `now`: wall clock, in seconds; `standing`: None if unknown."""
    parts: list[RenderableType] = [_head(watched, standing)]
    if standing is not None and standing.workers:
        parts += ["", _workers(standing)]
    for title, happened in (
        ("incidents", watched.incidents),
        ("checkpoints", watched.checkpoints),
        ("requests", watched.asked),
    ):
        if happened:
            parts += ["", _list(title, list(happened)[-_SHOWN:], now)]
    return Group(*parts)


def sparkline(values: Sequence[float], width: int) -> str:
    """A line of at most `width` characters; the height of each is the mean of its part of the values. Finite values
    only."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [place * len(values) // width for place in range(width + 1)]
    means = [math.fsum(values[begin:end]) / (end - begin) for begin, end in pairwise(edges)]
    low, high = min(means), max(means)
    height = (high - low) or 1.0
    return "".join(_BARS[min(len(_BARS) - 1, int((mean - low) / height * len(_BARS)))] for mean in means)


def _head(watched: Watched, standing: Standing | None) -> RenderableType:
    table = facts_table()
    if standing is not None:
        style = BAD if standing.phase == "failed" else GOOD if standing.phase in ("training", "running") else ""
        table.add_row(
            "run", Text(one_line(f"{standing.name or '?'}, at {standing.url}" if standing.url else standing.name))
        )
        mesh = f", {standing.mesh}" if standing.mesh else ""
        table.add_row("state", Text.assemble((standing.phase, style), mesh))
        if standing.driver:
            table.add_row("driver", Text(one_line(standing.driver)))
        if standing.checkpoint_step is not None:
            table.add_row("checkpoint", Text(f"step {standing.checkpoint_step}"))
    table.add_row("now", Text(progress_text(watched.progress())))
    table.add_row("", _bar(watched, standing))
    if watched.losses.points:
        table.add_row("loss", sparkline(watched.losses.points, _WIDE))
    return table


def _bar(watched: Watched, standing: Standing | None) -> RenderableType:
    progress = watched.progress()
    total = progress.max_steps or (standing.max_steps if standing else 0)
    done = max(progress.step, standing.step if standing else 0)
    return ProgressBar(total=max(total, 1), completed=min(done, max(total, 1)), width=_WIDE)


def _workers(standing: Standing) -> RowTable:
    """A line for each worker; if there are very many, for the slowest."""
    ranks = list(enumerate(standing.workers))
    shown = ranks
    if len(ranks) > _MOST_WORKERS:
        slowest = sorted(ranks, key=lambda one: standing.busy_s.get(one[1], 0.0), reverse=True)
        shown = sorted(slowest[:_MOST_WORKERS])
    title = count(len(ranks), "worker") + ("" if shown is ranks else f", the {len(shown)} slowest")
    table = RowTable(title)
    table.add_column("rank", right=True, rank=2)
    table.add_column("worker", right=True)
    table.add_column("node", long="shorten")
    table.add_column("process", right=True, rank=1)
    table.add_column("doing", long="shorten")
    table.add_column("busy per step", right=True)
    for rank, worker in shown:
        busy_s, pid = standing.busy_s.get(worker), standing.pids.get(worker)
        table.add_row(
            str(rank),
            str(worker),
            Text(one_line(standing.nodes.get(worker, ""))),
            "" if pid is None else str(pid),
            Text(one_line(standing.doing.get(worker, ""))),
            "" if busy_s is None else span(busy_s),
        )
    return table


def _list(title: str, happened: Iterable[Happened], now: float) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, show_header=False)
    table.add_column(justify="right", style=DIM, no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    for one in happened:
        cost = "" if one.cost_s is None else span(one.cost_s)
        table.add_row(f"{duration(max(0.0, round(now - one.at)))} ago", Text(one.text), cost)
    return table
