"""`raysharded check`: tests a custom trainer before it is run."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from raysharded.cli.errors import AsJson, interrupted_by_sigterm, print_json, show_error
from raysharded.cli.output import console, echo
from raysharded.cli.streams import own_stdout
from raysharded.errors import ConfigError

if TYPE_CHECKING:
    from raysharded.preflight import Check, Needs, Report
    from raysharded.trainer import ElasticTrainer

_WRONG_USAGE = 2
_BEYOND_S = 15.0
"""Seconds after its time limit at which the command ends itself, in any state."""


def check(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py[:NAME] | MODULE:NAME",
            help="The trainer, as for `run`: a function that returns one, the trainer itself, or with --config a "
            "Task's class.",
            show_default=False,
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ARGUMENT | NAME=VALUE",
            help="Arguments of the trainer's function, if it takes any, as for `plan`; otherwise settings that "
            "override all others, as for `run`.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="Settings that override the trainer's: YAML, TOML or JSON.")
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", min=2, help="Steps of each of the three runs.")] = 3,
    device: Annotated[
        str | None, typer.Option(metavar="cpu", help="Test a trainer for GPUs on CPUs. Default: the trainer's.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=1.0, help="Time limit; checks not done by then are omitted.")
    ] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Test a trainer over a few steps, and compare the bits; takes a minute for a small model.

    Two fresh processes build the model. It is trained on one worker, on two with every step computed twice, and on two
    of which one is killed. Neither Ray nor the run's storage is touched, and no files are left. Exits with 0 if all
    checks pass, 1 if one fails. Exits with 2 for wrong usage, and if the check does not fit into the memory or the
    time.
    """
    if device not in (None, "cpu"):
        raise typer.BadParameter(f"{device!r}: give cpu, or leave it out.", param_hint="--device")
    with _limited(timeout), own_stdout() if as_json else contextlib.nullcontext():
        try:
            trainer = _trainer(target, arguments or [], config)
            report = trainer.check(
                steps=steps,
                device="cpu" if device == "cpu" else None,
                timeout_s=timeout,
                listen=None if as_json else _show,
            )
        except ConfigError as error:
            show_error(error)
            raise typer.Exit(_WRONG_USAGE) from None
        except _OutOfTime:
            echo(f"error: not done within {timeout:g} s. Give it a longer --timeout, or fewer --steps.", err=True)
            raise typer.Exit(1) from None
    _show_tracebacks(report)
    if as_json:
        print_json(report.as_dict())
    else:
        _show_end(report)
    if not report.ok:
        raise typer.Exit(1)


def _trainer(target: str, arguments: Sequence[str], config: str | None) -> ElasticTrainer:
    from raysharded.cli.settings import apply, read_settings
    from raysharded.cli.target import load_target, takes_arguments

    if arguments and takes_arguments(target):
        return apply(load_target(target, arguments), read_settings(config, []))
    settings = read_settings(config, arguments)
    return apply(load_target(target), settings)


class _OutOfTime(BaseException):
    """The command exceeds its time limit: user code does not return. No Exception, so that user code cannot catch
    it."""


@contextlib.contextmanager
def _limited(timeout_s: float) -> Iterator[None]:
    """A context in which the command ends past the time limit, and by SIGTERM, so that started processes are ended."""

    def end_late(*_: object) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, end_late)
    signal.setitimer(signal.ITIMER_REAL, timeout_s + _BEYOND_S)
    try:
        with interrupted_by_sigterm():
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before if before is not None else signal.SIG_DFL)


def _show(found: Needs | Check) -> None:
    from raysharded.preflight.requirements import Needs
    from raysharded.preflight.results import line_of_check, lines_of_needs

    with console() as out:
        for line in lines_of_needs(found) if isinstance(found, Needs) else [line_of_check(found)]:
            out.print(line)


def _show_end(report: Report) -> None:
    from raysharded.preflight.results import lines_at_end

    with console() as out:
        for line in lines_at_end(report):
            out.print(line)


def _show_tracebacks(report: Report) -> None:
    """Print the tracebacks of the task's errors, each once."""
    for text in dict.fromkeys(found.user_traceback.rstrip() for found in report.checks if found.user_traceback):
        echo(text, err=True)
