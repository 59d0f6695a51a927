"""Stories in the laboratory, and what came of each: `python -m tests.lab [STORY ...]`; without names, all.

One cluster and one run serve all stories that the run survives, and one that it does not, at the end.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.lab.machines import why_not
from tests.lab.ray_machines import RayMachines
from tests.lab.stories import DRIVER, ENDS, GOES_ON, HEADER, SLOTS, Story
from tests.lab.training import LabRun


def main(names: Sequence[str]) -> int:
    """Run the stories of these names; returns the exit status."""
    known = {story.__name__: story for story in (*GOES_ON, *ENDS)}
    if unknown := [name for name in names if name not in known]:
        _print(f"no such story: {', '.join(unknown)}. There are: {', '.join(known)}")
        return 2
    if reason := why_not():
        _print(f"no laboratory here: {reason}")
        return 1
    chosen = [known[name] for name in names or known]
    ends = [story for story in chosen if story in ENDS]
    _print(HEADER)
    _run([*(story for story in chosen if story in GOES_ON), *ends[:1]])
    for story in ends[1:]:
        _run([story])
    return 0


def _run(stories: Sequence[Story]) -> None:
    with tempfile.TemporaryDirectory(prefix="lab-run") as folder, RayMachines(SLOTS, redis=True) as cluster:
        run = LabRun(cluster, DRIVER, Path(folder), workers=(1, 2))
        run.wait_for_step(3)
        for story in stories:
            _print(story(cluster, run).text())
            if run.ended:
                _print(f"{'':49}{run.ended}")


def _print(line: str) -> None:
    print(line, flush=True)  # noqa: T201  # a script prints


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
