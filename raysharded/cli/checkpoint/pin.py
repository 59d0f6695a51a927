"""`raysharded checkpoint pin | unpin | fork`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from raysharded.cli.checkpoint.target import AsJson, RunOnly, Step, find_run, key
from raysharded.cli.errors import print_json
from raysharded.cli.output import echo

Tag = Annotated[str, typer.Argument(metavar="TAG", help="A name: letters, digits, '.', '_' or '-'.")]


def pin(run: RunOnly, tag: Tag, step: Step = None, as_json: AsJson = False) -> None:
    """Keep a checkpoint under a name, regardless of the retention rules, until it is unpinned."""
    from raysharded.checkpoint import pin as make_pin

    place = find_run(run)
    made = make_pin(place.storage, tag, place.choose(step), key=key())
    if as_json:
        print_json(asdict(made))
    else:
        echo(f"{tag}: step {made.step} ({made.prefix})")


def unpin(run: RunOnly, tag: Tag, as_json: AsJson = False) -> None:
    """Remove a name; its checkpoint may then be deleted."""
    from raysharded.checkpoint import unpin as remove_pin

    remove_pin(find_run(run).storage, tag)
    if as_json:
        print_json({"tag": tag, "removed": True})
    else:
        echo(f"{tag}: removed")


def fork(
    run: RunOnly,
    new_run: Annotated[str, typer.Argument(metavar="NEW", help="The new run's folder or URL, empty.")],
    step: Step = None,
    as_json: AsJson = False,
) -> None:
    """Prepare a new run that begins with a checkpoint of this one. Nothing is copied: the checkpoint stays here while
    the fork needs it."""
    from raysharded.checkpoint import fork as make_fork, open_storage

    place = find_run(run)
    made = make_fork(place.storage, place.choose(step), open_storage(new_run), key=key())
    if as_json:
        print_json(asdict(made))
    else:
        echo(f"{new_run} begins with step {made.step} of {made.parent}, which is pinned there as {made.pin}")
