"""The end of a run: time limits for the journal's last entries, and for a user's function behind its last step."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable

from raysharded.display.quantities import count, listing
from raysharded.driver.state.state import State
from raysharded.errors import StorageError
from raysharded.ids import WorkerId
from raysharded.journal.writer import Recorder
from raysharded.protocol.worker_launcher import Launcher, Reply, WorkerLost

_log = logging.getLogger("raysharded.driver")
AT_ONCE_S = 1.0
"""Time limit for the journal's last entries when the run must end at once."""
STOPPED_S = 10.0
"""Time limit for them after a stop request without a deadline, and for repeating them after an error."""
_FINISHED_S = 300.0
"""Time limit for the journal's last entries of a run that has done its steps."""
FUNCTION_S = 60.0
"""Time limit for the lines of a training function behind its last step."""
_LOOK_S = 0.25


def limit_s(state: State, now: float) -> float:
    """Time limit for the end of the journal; a stop request's deadline bounds it. `now`: of the driver's clock."""
    if not state.stop_requested:
        return _FINISHED_S
    by = state.stop_by
    return max(AT_ONCE_S, by - now if by is not None and math.isfinite(by) else STOPPED_S)


def write(recorder: Recorder, within_s: float, run: str, *, is_stopped: bool) -> str:
    """Write the end of the journal. Raises StorageError; that of a stopped run is returned in words, and logged."""
    try:
        recorder.close(within_s)
    except StorageError as error:
        if not is_stopped:
            raise
        unwritten = f"the end of the run's journal could not be written: {error}"
        _log.warning("run %s: %s", run, unwritten)
        return unwritten
    return ""


def let_functions_return(launcher: Launcher, members: Iterable[WorkerId], within_s: float) -> None:
    """Notify the workers that the run is over, and wait until their training functions have returned.

    Other answers of workers are dropped: the run has its result. A function that takes longer is ended, with a warning.
    """
    waiting, ends_at = set(members), time.monotonic() + within_s
    for worker in waiting:
        launcher.call(worker, "finish", 2 * within_s)  # an answer means that it has returned
    while waiting and (left_s := ends_at - time.monotonic()) > 0:
        for happened in launcher.wait(min(left_s, _LOOK_S)):
            if isinstance(happened, WorkerLost) or (isinstance(happened, Reply) and happened.method == "finish"):
                waiting.discard(happened.worker)
    if waiting:
        _log.warning(
            "the training function of %s (%s) has not returned %g s after the run's last step, and is ended",
            count(len(waiting), "worker"),
            listing([str(worker) for worker in sorted(waiting)]),
            within_s,
        )
