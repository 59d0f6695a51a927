"""The commands: thin wrappers over the Python API.

Heavy modules are imported only when a command needs them: `raysharded --help` loads neither torch nor Ray.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from raysharded.cli import check, checkpoint, completion, data, doctor, plan, streams
from raysharded.cli.errors import AsJson, Commands, print_json
from raysharded.cli.output import console, echo, require_writable
from raysharded.cli.runs import attach, control, kill, ls, rm, status, wait
from raysharded.cli.runs.status import RunStorage, url_of
from raysharded.cli.usage import App
from raysharded.display.quantities import count
from raysharded.errors import ClusterError, ConfigError

if TYPE_CHECKING:
    from raysharded.run import Result
    from raysharded.trainer import ElasticTrainer

_WIDEST = 120
"""Characters of a line of help that are still read with ease."""

app = App(
    cls=Commands,
    help="Elastic, fault-tolerant sharded training on Ray: the same weights, bit for bit, at any number of workers.",
    add_completion=False,
    pretty_exceptions_enable=False,  # an internal error is shown with Python's traceback
    context_settings={"max_content_width": _WIDEST},
)
app.add_typer(data.app, name="data")
app.add_typer(checkpoint.app, name="checkpoint")
app.command("doctor")(doctor.doctor)
app.command("completion")(completion.completion)
app.command("plan")(plan.plan)
app.command("check")(check.check)
app.command("runs")(ls.runs)
app.command("status")(status.status)
app.command("attach")(attach.attach)
app.command("wait")(wait.wait)
app.command("kill")(kill.kill)
app.command("rm")(rm.rm)
for _name, _command in control.COMMANDS.items():
    app.command(_name)(_command)


def main() -> None:
    """The `raysharded` command. Ends the process: 0, 1 after an error, 2 for wrong usage, 130 after Ctrl-C.

    `run`, `attach` and `wait` have more exit statuses, for the end of a run.
    """
    streams.secure()
    if completion.VARIABLE in os.environ:
        completion.enable()
    try:
        app(prog_name=completion.PROGRAM)
    except streams.OutputError as error:
        echo(f"error: standard output cannot be written: {error.strerror}. Give it another place.", err=True)
        sys.exit(1)


def _show_version(wanted: bool) -> None:
    if wanted:
        from raysharded import __version__

        echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    json_path: Annotated[
        str | None, typer.Option("--json", metavar="PATH", help="Also write the results as JSON.")
    ] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", min=1, help="Optimizer steps to train.")] = None,
    workers: Annotated[int | None, typer.Option(metavar="N", min=1, help="Workers to start with.")] = None,
    storage: Annotated[str | None, typer.Option(metavar="FOLDER", help="Keep the runs in this folder.")] = None,
    chaos: Annotated[
        str | None,
        typer.Option(
            metavar="FAULT:every=TIME,...",
            help="Inject these faults at random times, instead of the demo's kills: kill, stop, term, or "
            "slow:every=TIME:seconds=N. Example: kill:every=10s,slow:every=20s:seconds=2",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of --chaos: it determines the times.")] = 0,
) -> None:
    """Train a small GPT, kill some of its workers, and show that the weights are the same. About two minutes on 2
    cores.

    Exits with 1 if any check fails.
    """
    from raysharded.demo import run_demo

    if json_path is not None:
        require_writable(json_path)
    raise typer.Exit(
        run_demo(json_path=json_path, steps=steps, workers=workers, storage=storage, chaos=chaos, seed=seed)
    )


@app.command()
def run(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py[:NAME] | MODULE:NAME",
            help="The trainer: a function without arguments that returns an ElasticTrainer, or the ElasticTrainer "
            "itself. NAME is `trainer` by default. With --config also a Task's class.",
            show_default=False,
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME=VALUE",
            help="Settings that override all others: batch.global_batch_size=32 run.max_steps=2000.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="Settings that override the trainer's: YAML, TOML or JSON.")
    ] = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Take over from another driver of the run, without waiting for its end.")
    ] = False,
    accept_arithmetic: Annotated[
        bool,
        typer.Option(
            "--accept-arithmetic",
            help="Continue although the workers would compute different bits than the run so far; the report states "
            "from which step on.",
        ),
    ] = False,
    accept_unsigned: Annotated[
        bool,
        typer.Option(
            "--accept-unsigned",
            help="Continue although the signing key did not sign the run's newest checkpoint or its journal; from then "
            "on everything is signed.",
        ),
    ] = False,
    chaos: Annotated[
        str | None,
        typer.Option(
            metavar="FAULT:every=TIME,...",
            help="Inject faults into its workers at random times, to test that the weights are the same: kill, stop, "
            "term, slow, wedge, stuck, raise, drop, corrupt. Example: kill:every=30s,stop:every=2m",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of --chaos: it determines the times.")] = 0,
    detach: Annotated[
        bool,
        typer.Option("--detach", help="Start it with a driver actor on a Ray cluster, and return when that leads it."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train the run that a file or module defines, to its end. A second call resumes the run.

    The exit status is 0 for a finished run and 3 for one that was stopped. After an error it is 75 if the same command
    may succeed later: the cluster or storage failed, or workers were lost. It is 1 if something must be changed first.
    """
    from raysharded.cli.settings import apply, read_settings
    from raysharded.cli.target import load_target

    accepted = ["run.accept_arithmetic=true"] if accept_arithmetic else []
    accepted += ["run.accept_unsigned=true"] if accept_unsigned else []
    settings = read_settings(config, [*(overrides or []), *accepted])
    with streams.own_stdout() if as_json else nullcontext():
        trainer = apply(load_target(target), settings)
        result = None if detach else _fit(trainer, take_over=take_over, chaos=chaos, seed=seed)
    if result is None:
        _start(trainer, take_over=take_over, chaos=chaos, as_json=as_json)
        return
    if as_json:
        print_json(asdict(result))
        return
    echo(f"run {result.name}: {count(result.steps, 'step')}, fingerprint {result.fingerprint}")
    echo(f"report: raysharded report {result.url}")


def _fit(trainer: ElasticTrainer, *, take_over: bool, chaos: str | None, seed: int) -> Result:
    context = None
    if chaos is not None:
        from raysharded.testing import chaos_for

        context = chaos_for(trainer, chaos, seed=seed)
    return trainer.fit(take_over=take_over, context=context)


def _start(trainer: ElasticTrainer, *, take_over: bool, chaos: str | None, as_json: bool) -> None:
    from raysharded.ray_backend.cluster import find_choice

    if chaos is not None:
        raise ConfigError("raysharded run: --chaos needs this process; leave out either --chaos or --detach.")
    choice = find_choice(log_to_driver=False)
    if not choice.address:
        why = choice.foreign or f"there is no Ray cluster here that would outlive this command ({choice.why})."
        raise ClusterError(
            f"raysharded run --detach: {why} Start one (`ray start --head`), set RAY_ADDRESS, or leave out --detach."
        )
    started = trainer.start(take_over=take_over)
    wait.wait_until_begun(started)
    if as_json:
        print_json({"name": started.name, "url": started.url})
        return
    if started.status().state == "finished":
        echo(f"run {started.name} is finished: nothing is left to do")
    else:
        echo(f"run {started.name} has begun: raysharded attach {started.name}")
    echo(f"its folder: {started.url}")


@app.command()
def report(
    run: RunStorage,
    html: Annotated[
        str | None,
        typer.Option("--html", metavar="FILE", help="Write it as one HTML page, which needs no network; - is stdout."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a run's events, the use of its time, and the check that no sample was lost.

    Exits with 1 if samples were lost or repeated, if a step computed again gave a different result, or if the journal
    is damaged.
    """
    from raysharded.report import load

    found = load(url_of(run))
    if html is not None:
        from raysharded.cli.output import write_page

        write_page(html, found.as_html())
    if as_json:
        from raysharded.run.hosted.cluster_status import status_at

        print_json({**found.as_dict(), "run_status": status_at(found.url).as_dict()})
    elif html is None:
        with console() as out:
            out.print(found)
    if not found.ok or found.damage:
        raise typer.Exit(1)


@app.command()
def replay(
    run: RunStorage,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, with the state after every event.")] = False,
) -> None:
    """Run the drivers of a recorded run again on the same events, and show events and decisions.

    The run must have been recorded: RunConfig(record_events=True). Exits with 1 if the decisions differ from the
    journal's.
    """
    from raysharded.driver.replay.rerun import load
    from raysharded.report.loader import open_run

    url = url_of(run)
    open_run(url)
    replays = load(url)
    if as_json:
        print_json([found.as_dict() for found in replays])
    else:
        for line in (line for found in replays for line in found.lines()):
            echo(line)
    if any(found.differences for found in replays):
        raise typer.Exit(1)
