"""Stories in the laboratory, and what came of each: `python -m tests.lab [STORY ...]`; without names, all.

One cluster and one run serve all stories that the run survives, and one that it does not, at the end.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.lab.machines import why_not
from tests.lab.ray_machines import RayMachines
from tests.lab.stories import DRIVER, ENDS, ENDS_STARTED, GOES_ON, HEADER, SLOTS, Row, Story
from tests.lab.training import LabRun


def main(names: Sequence[str]) -> int:
    """Run the stories of these names; returns the exit status: 1 if the bits of a run differ."""
    known = {story.__name__: story for story in (*GOES_ON, *ENDS, *ENDS_STARTED)}
    if unknown := [name for name in names if name not in known]:
        _print(f"no such story: {', '.join(unknown)}. There are: {', '.join(known)}")
        return 2
    if reason := why_not():
        _print(f"no laboratory here: {reason}")
        return 1
    chosen = [known[name] for name in names or known]
    ends = [story for story in chosen if story in ENDS]
    groups = [[*(story for story in chosen if story in GOES_ON), *ends[:1]], *([story] for story in ends[1:])]
    began = time.monotonic()
    _print(HEADER)
    rows = [row for stories in groups if stories for row in _run(stories, "fit")]
    for story in chosen:
        if story in ENDS_STARTED:
            rows += _run([story], "start")
    _print(f"{len(rows)} stories in {time.monotonic() - began:.0f} s")
    return 0 if all(row.equal for row in rows) else 1


def _run(stories: Sequence[Story], how: str) -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="lab-run") as folder, RayMachines(SLOTS, redis=how == "fit") as cluster:
        run = LabRun(cluster, DRIVER, Path(folder), how=how, workers=(1, 2))
        run.wait_until_trained(2)
        for story in stories:
            rows.append(story(cluster, run))
            _print(rows[-1].text())
    return rows


def _print(line: str) -> None:
    print(line, flush=True)  # noqa: T201  # a script prints


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
