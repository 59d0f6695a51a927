"""Commands that change a running run: `raysharded pause`, `resize`, `stop` and others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from raysharded.cli.checkpoint.target import BestOne, choice, find_run
from raysharded.cli.errors import AsJson, print_json
from raysharded.cli.output import echo
from raysharded.cli.runs.status import Address, RunName
from raysharded.display.quantities import count, weights_text
from raysharded.errors import ConfigError

if TYPE_CHECKING:
    from raysharded.run import Run


def pause(run: RunName, address: Address = None, as_json: AsJson = False) -> None:
    """Pause a run at the next step. Its workers keep their state in memory."""
    found = _attached(run, address)
    is_paused = found.status().phase == "paused"
    found.pause()
    _say(found, "is paused already" if is_paused else "pauses at the next step", as_json)


def resume(run: RunName, address: Address = None, as_json: AsJson = False) -> None:
    """Resume a paused run from its workers' memory."""
    found = _attached(run, address)
    found.resume()
    _say(found, "resumes", as_json)


def resize(
    run: RunName,
    workers: Annotated[int, typer.Argument(metavar="N", min=1, help="Within ScalingConfig.num_workers.")],
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Continue a run with N workers from the next step on."""
    found = _attached(run, address)
    found.resize(workers)
    _say(found, f"is to have {count(workers, 'worker')}", as_json)


def drain(
    run: RunName,
    node: Annotated[str, typer.Argument(metavar="NODE", help="Its Ray id, or its host name.")],
    within_s: Annotated[
        float, typer.Option("--within", metavar="SECONDS", min=0, help="Time after which the workers have left.")
    ] = 300.0,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Move all workers of a run off a node, and start none there."""
    found = _attached(run, address)
    found.drain(node, within_s=within_s)
    _say(found, f"leaves node {node} within {within_s:g} s", as_json)


def learning_rate(
    run: RunName,
    factor: Annotated[
        float, typer.Argument(metavar="FACTOR", min=0, help="Factor of the task's learning rate; 1 is unchanged.")
    ],
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Multiply a run's learning rates by a factor from the next step on."""
    found = _attached(run, address)
    found.set_learning_rate(factor)
    _say(found, f"continues with the learning rate times {factor:g}", as_json)


def mixture_weights(
    run: RunName,
    weights: Annotated[
        list[str], typer.Argument(metavar="SOURCE=WEIGHT...", help="Weights of sources; one that is left out has none.")
    ],
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Read the sources of a run's mixture with other weights from the next step on."""
    found = _attached(run, address)
    given = dict(map(_weight, weights))
    if len(given) < len(weights):
        raise ConfigError("a source has two weights: give it one.")
    found.set_mixture_weights(given)
    _say(found, f"continues with {weights_text(given)} as weights of its mixture", as_json)


def _weight(text: str) -> tuple[str, float]:
    name, _, number = text.rpartition("=")
    try:
        return name, float(number)
    except ValueError:
        raise ConfigError(f"{text!r} is no weight of a source: give SOURCE=WEIGHT, such as web=0.7.") from None


def rewind(
    run: RunName,
    step: Annotated[int, typer.Argument(metavar="STEP", min=0, help="Step of a committed checkpoint.")],
    skip_data: Annotated[
        bool, typer.Option("--skip-data", help="Skip the samples that were read since, instead of reading them again.")
    ] = False,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Return a run to a checkpoint, and continue from there. Newer checkpoints are deleted."""
    found = _attached(run, address)
    found.rewind(step, skip_data=skip_data)
    _say(found, f"returns to step {step}", as_json)


def save(
    run: RunName,
    timeout_s: Annotated[
        float | None, typer.Option("--timeout", metavar="SECONDS", min=0, help="Longest time to wait for it.")
    ] = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint of a run's next step now, and wait until it is committed."""
    found = _attached(run, address)
    try:
        written = found.checkpoint(timeout_s)
    except TimeoutError as error:
        echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        print_json(asdict(written))
    else:
        echo(f"checkpoint of step {written.step}: {written.url}")


def stop(
    run: RunName,
    now: Annotated[bool, typer.Option("--now", help="At once, without a checkpoint.")] = False,
    within_s: Annotated[
        float | None,
        typer.Option("--within", metavar="SECONDS", min=0, help="Time for the checkpoint; then end without it."),
    ] = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """End a run after one more checkpoint. Started again, it resumes from there. A second call ends it at once.

    A run that is over stays as it is: the command reports how it ended.
    """
    from raysharded.cli.runs.wait import ending

    found = _attached(run, address)
    if found.is_over():
        over = found.status()
        if as_json:
            print_json(over.as_dict())
        else:
            echo(f"nothing is stopped: {ending(over)}")
        return
    again = found.status().stop_requested
    found.stop(checkpoint=not now, within_s=within_s)
    without = "ends at once, without the requested checkpoint" if again else "ends at once"
    _say(found, without if now or again else "ends after a checkpoint", as_json)


def fork(
    run: RunName,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The new run's name, not its folder.")],
    step: Annotated[
        int | None, typer.Option(metavar="STEP", min=0, help="The checkpoint's step; by default the newest.")
    ] = None,
    best: BestOne = False,
    storage: Annotated[
        str | None, typer.Option(metavar="URL", help="The new run's storage; by default this one's.")
    ] = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Start a run's trainer under another name, from a checkpoint of the run. The run itself continues.

    The new run's folder is beside the run's, or in --storage. To prepare a new run for another trainer, without
    starting it: `raysharded checkpoint fork`.
    """
    from raysharded.cli.runs.wait import wait_until_begun
    from raysharded.report.overview import begins_with

    chosen, parent = choice(step, best), _attached(run, address)
    at = find_run(parent.url).choose(chosen).step if chosen == "best" else chosen
    made = parent.fork(name, at, storage_path=storage)
    wait_until_begun(made)
    if as_json:
        print_json(made.status().as_dict())
        return
    echo(f"run {made.name} begins with step {begins_with(made.url)} of {parent.url}")
    echo(f"its folder: {made.url}; `raysharded status {made.url}` shows it")


COMMANDS: dict[str, Callable[..., None]] = {
    "pause": pause,
    "resume": resume,
    "resize": resize,
    "drain": drain,
    "learning-rate": learning_rate,
    "mixture-weights": mixture_weights,
    "rewind": rewind,
    "save": save,
    "stop": stop,
    "fork": fork,
}
"""Commands by name, as they are added to the root."""


def _attached(run: str, address: str | None) -> Run:
    from raysharded.run.attach import attach

    return attach(run, address)


def _say(run: Run, what: str, as_json: bool) -> None:
    """Print the request and the run's status."""
    status = run.status()
    if as_json:
        print_json(status.as_dict())
        return
    if status.phase == "starting":
        echo(f"run {run.name} {what}; it is starting")
        return
    of = f" of {status.max_steps}" if status.max_steps else ""
    echo(f"run {run.name} {what}; it is at step {status.step}{of} ({status.phase})")
    for warning in status.warnings:
        echo(f"warning: {warning}")
