"""The numbers of a run's steps as an Arrow table. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from raysharded.journal.entries import Entry
from raysharded.report.history.step_table import Group, Steps
from raysharded.report.history.summary import Fold

if TYPE_CHECKING:
    import pyarrow

COLUMNS = {
    "step": "from 1; each once, ascending",
    "at": "when the driver recorded it, UTC",
    "loss": "the mean over the step's weight",
    "weight": "what the loss is averaged over: tokens, or samples",
    "gradient_norm": "before clipping",
    "lr": "the learning rate of the first parameter group",
    "workers": "how many did the step",
    "generation": "the membership that did it",
    "samples": "that were read",
    "seconds": "that the step took, all phases together, as one worker measured them",
}
"""The columns of every table, in this order, with their meanings. Then follow, in order of first appearance,
`seconds/<phase>`, `metrics/<name>` and `evaluation/<name>`: null if a step has no such number. Non-finite values are
included."""
_GROUPS: tuple[Group, ...] = ("seconds", "metrics", "evaluation")
_AT_ONCE = 2048


def metrics_table(entries: Iterable[Entry]) -> pyarrow.Table:
    """A row for each committed step of a journal's entries, oldest first: the last result of each step. The columns
    begin with those of `COLUMNS`.

    Raises KeyError, TypeError or ValueError for entries without the fields of their kind.
    """
    fold, waiting = Fold(), list[Entry]()
    for entry in entries:
        if entry["kind"] == "step":
            waiting.append(entry)
            if len(waiting) < _AT_ONCE:
                continue
        fold.add_steps(waiting)
        waiting.clear()
        if entry["kind"] != "step":
            fold.add(entry)
    fold.add_steps(waiting)
    return table_of(fold.steps())


def table_of(steps: Steps) -> pyarrow.Table:
    """As `metrics_table`, for steps that were already read."""
    import pyarrow as pa

    columns: dict[str, pyarrow.Array] = {
        "step": pa.array(steps.whole("step")),
        "at": pa.array(np.rint(steps.real("at") * 1e6).astype("datetime64[us]"), pa.timestamp("us", tz="UTC")),
        "loss": pa.array(steps.real("loss")),
        "weight": pa.array(steps.real("weight")),
        "gradient_norm": pa.array(steps.real("gradient_norm")),
        "lr": pa.array(steps.real("lr")),
        "workers": pa.array(steps.whole("workers").astype(np.int32)),
        "generation": pa.array(steps.whole("generation")),
        "samples": pa.array(steps.whole("reads")),
        "seconds": pa.array(steps.total_s()),
    }
    for group in _GROUPS:
        for name in steps.names(group):
            columns[f"{group}/{name}"] = pa.array(steps.named(group, name), mask=~steps.has(group, name))
    return pa.table(columns)
