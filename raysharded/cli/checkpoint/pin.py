"""`raysharded checkpoint pin | unpin | fork`."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Annotated

import typer

from raysharded.cli.checkpoint.target import AsJson, BestOne, RunOnly, Step, choice, find_run, key
from raysharded.cli.errors import print_json
from raysharded.cli.output import echo
from raysharded.errors import ConfigError
from raysharded.locations import join_url, scheme_of, split_url

Tag = Annotated[str, typer.Argument(metavar="TAG", help="A name: letters, digits, '.', '_' or '-'.")]


def pin(run: RunOnly, tag: Tag, step: Step = None, best: BestOne = False, as_json: AsJson = False) -> None:
    """Keep a checkpoint under a name, regardless of the retention rules, until it is unpinned."""
    from raysharded.checkpoint import pin as make_pin

    place = find_run(run)
    made = make_pin(place.storage, tag, place.choose(choice(step, best)), key=key())
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
    new_run: Annotated[
        str,
        typer.Argument(
            metavar="NEW", help="The new run: a name, for a folder beside the run's; or a folder (./NEW) or URL. Empty."
        ),
    ],
    step: Step = None,
    best: BestOne = False,
    as_json: AsJson = False,
) -> None:
    """Prepare a new run that begins with a checkpoint of this one; `fit()` starts it, with any trainer.

    Nothing is copied: the checkpoint stays here while the fork needs it. To start it at once, with the trainer of a run
    that has a driver actor: `raysharded fork`.
    """
    from raysharded.checkpoint import fork as make_fork, open_storage

    place = find_run(run)
    new = open_storage(_beside(place.storage.url, new_run))
    made = make_fork(place.storage, place.choose(choice(step, best)), new, key=key())
    if as_json:
        print_json({"url": new.url, **asdict(made)})
        return
    above, name = split_url(new.url)
    echo(f"{new.url} begins with step {made.step} of {made.parent}, which is pinned there as {made.pin}")
    echo(f"start it: raysharded run FILE.py run.name={name} run.storage_path={above}")
    echo(f"or fit() with RunConfig(name={name!r}, storage_path={above!r})")


def _beside(parent: str, new_run: str) -> str:
    """The URL of the new run: a plain name is one beside the parent."""
    if os.sep in new_run or new_run in (os.curdir, os.pardir) or scheme_of(new_run):
        return new_run
    above, _ = split_url(parent)
    if above.endswith(":/"):
        raise ConfigError(f"nothing is beside {parent}, a whole bucket: give NEW as a folder or URL.")
    return join_url(above, new_run)
