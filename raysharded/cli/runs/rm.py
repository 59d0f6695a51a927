"""`raysharded rm`: remove a run from its storage."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from raysharded.cli.errors import AsJson, print_json
from raysharded.cli.output import echo
from raysharded.cli.runs.status import Address
from raysharded.display.quantities import count

if TYPE_CHECKING:
    from raysharded.run.removal.execution import Removed
    from raysharded.run.removal.plan import RemovalPlan


def rm(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="The run's folder or URL, <storage_path>/<name>; or its name.")
    ],
    with_forks: Annotated[
        bool, typer.Option("--with-forks", help="Also remove forks that need one of its checkpoints.")
    ] = False,
    copy_into_forks: Annotated[
        bool, typer.Option("--copy-into-forks", help="First copy the checkpoints that its forks need into them.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Omit the request for confirmation.")] = False,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Remove a run from its storage: checkpoints, journal, claims. Requests confirmation.

    A run stays while a driver or workers of it are there, while a fork needs one of its checkpoints, and while a
    checkpoint is pinned. Files that raysharded did not write stay. Repeated, it finishes a removal that was
    interrupted.
    """
    from raysharded.run.removal.execution import carry_out, planned

    plan = planned(run, with_forks=with_forks, copy_into_forks=copy_into_forks, address=address)
    if not yes and not _agreed(_question(plan)):
        echo("nothing was removed", err=True)
        raise typer.Exit(1)
    done = carry_out(plan, lambda text: echo(text, err=True))
    if as_json:
        print_json(asdict(done))
        return
    for line in _lines(done):
        echo(line)


def _agreed(question: str) -> bool:
    """The answer to a question, on standard error: standard output is for results."""
    echo(f"{question} [y/N] ", err=True, nl=False)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _question(plan: RemovalPlan) -> str:
    glance = plan.glance
    if glance is None:
        what = f"finish the removal of the run at {plan.storage.url}"
    else:
        of = f" of {glance.max_steps}" if glance.max_steps else ""
        what = f"remove the run {plan.name} at {plan.storage.url} ({glance.state}, step {glance.step or 0}{of})"
    forks = plan.urls()[:-1]
    also = f", and its forks {', '.join(forks)}" if forks else ""
    copies = "".join(f", after copying step {fork.pin.step} into its fork {fork.url}" for fork in plan.copy)
    return f"{what[0].upper()}{what[1:]}{also}{copies}?"


def _lines(done: Removed) -> list[str]:
    return [
        *(f"{url}: has its own copy of the checkpoint that it began with" for url in done.copied),
        *(f"{url}: removed, a fork" for url in done.forks),
        f"{done.url}: removed, {count(done.num_files, 'file')}",
        *(f"{link}: a link, removed; what it leads to is still there" for link in done.links),
        *(f"{key}: left, raysharded did not write it" for key in done.left),
    ]
