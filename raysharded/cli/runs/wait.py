"""`raysharded wait`: the end of a run, for scripts. Also the end of a run in words, and as an exit status."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from raysharded.cli.errors import AsJson, interrupted_by_sigterm, print_json
from raysharded.cli.output import echo
from raysharded.cli.runs.status import Address, RunName

if TYPE_CHECKING:
    from raysharded.run import Run, Status

FAILED, STOPPED, ENDED, TIMED_OUT = 1, 3, 4, 124
"""Exit statuses of `wait` and `attach`; the last one is that of `timeout(1)`."""
_STATUS = {"finished": 0, "stopped": STOPPED, "ended": ENDED}
"""State of a run that is over -> exit status; of all others `FAILED`."""
_LOOK_S = 1.0
_LAST_WORD_S = 60.0
"""Longest time until the storage of a run whose driver was lost shows its end."""
_BEGIN_S = 5.0
"""Interval at which a start that takes long reports the cause."""
_DELAYS = ("waiting_for_owner", "waiting_for_workers")


def wait(
    run: RunName,
    timeout_s: Annotated[
        float | None, typer.Option("--timeout", metavar="SECONDS", min=0, help="Longest time to wait; by default none.")
    ] = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Wait for the end of a run, and report it. Ctrl-C ends the wait, not the run.

    The exit status is 0 for a finished run, 1 for one that failed or could not start, and 3 for one that was stopped.
    It is 4 if the run's driver exited without a final entry, and 124 after the timeout.
    """
    from raysharded.run.attach import attach

    handle = attach(run, address)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    try:
        with interrupted_by_sigterm():
            while not handle.is_over():
                left_s = _LOOK_S if deadline is None else deadline - time.monotonic()
                if left_s <= 0:
                    echo(f"error: run {handle.name} is still {handle.status().phase} after {timeout_s:g} s", err=True)
                    raise typer.Exit(TIMED_OUT)
                time.sleep(min(_LOOK_S, left_s))
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; the run continues") from None
    found = final_status(handle)
    if as_json:
        print_json(found.as_dict())
    else:
        echo(ending(found))
    raise typer.Exit(exit_status(found))


def final_status(run: Run) -> Status:
    """The status of a run that is over. After the loss of a driver actor its storage may show that a minute later."""
    from raysharded.report.live.follow import OVER

    deadline = time.monotonic() + _LAST_WORD_S
    while (found := run.status()).state not in OVER and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    return found


def exit_status(found: Status) -> int:
    """The exit status of a command that watched a run to this end."""
    return _STATUS.get(found.state, FAILED)


def ending(found: Status) -> str:
    """The end of a run in a sentence, with its error, and with the place where it resumes unless it is finished."""
    from raysharded.run.results import start_in_words

    of = f" of {found.max_steps}" if found.max_steps else ""
    at = f"at step {found.step}{of}"
    match found.state:
        case "finished":
            return f"run {found.name} finished {at}"
        case "stopped":
            what = f"was stopped {at}"
        case "ended":
            what = f"ended {at}: its driver exited without a final entry"
        case "failed":
            what = f"failed {at}"
        case _:
            what = f"is {found.state} {at}"
    rest = f"started again, it resumes {start_in_words(found.checkpoint_step)}"
    said = "; ".join((rest, *found.warnings))
    return f"run {found.name} {what}{f': {found.error}' if found.error else ''}; {said}"


def wait_until_begun(run: Run) -> None:
    """Return when a driver leads a run that was just started; the cause of a long start goes to standard error.

    Raises the error of a start that failed.
    """
    from raysharded.journal.entry_text import incident_text

    after = 0
    while True:
        try:
            run.wait_until_begun(_BEGIN_S)
            return
        except TimeoutError:
            for number, kind, fields in run.entries(after):
                after = number
                if kind in _DELAYS:
                    echo(f"run {run.name} is starting: {incident_text(kind, fields)}", err=True)
