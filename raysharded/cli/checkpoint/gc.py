"""`raysharded checkpoint gc`."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from raysharded.cli.checkpoint.target import AsJson, FolderPlace, Run, RunPlace, find_place, key
from raysharded.cli.errors import print_json
from raysharded.cli.output import echo
from raysharded.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from raysharded.checkpoint import Best, Keep, Pruned


def collect(
    run: Run,
    keep_last: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Keep the newest N. Without it all checkpoints are kept.")
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option(metavar="STEPS", min=1, help="Also keep the last of every STEPS steps.")
    ] = None,
    keep_best: Annotated[
        str | None, typer.Option(metavar="METRIC:min|max[:N]", help="Also keep the N (1) best by a metric.")
    ] = None,
    now: Annotated[bool, typer.Option("--now", help="Delete data at once, even if someone is reading it.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be deleted; delete nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete the files of broken saves and, with --keep-last, checkpoints. Pinned ones and the newest always stay.

    For checkpoints outside a run, only the files of broken saves in their folders are deleted.
    """
    keep = _rules(keep_last, keep_every, keep_best)
    with _working(f"gc of {run}"):
        done = _collect(run, keep, now, dry_run)
    if as_json:
        print_json({**asdict(done), "dry_run": dry_run})
        return
    for line in _lines(done) or ["nothing to delete"]:
        echo(line)
    if dry_run:
        echo("This was a dry run: nothing was deleted.")


def _collect(url: str, keep: Keep | None, now: bool, dry_run: bool) -> Pruned:
    from raysharded.checkpoint import prune
    from raysharded.checkpoint.retention.orphan_files import GRACE_S, sweep

    try:
        place = find_place(url)
    except CheckpointError:
        left = _left_without_manifests(url)
        if left.left:
            return left
        raise
    if isinstance(place, RunPlace):
        if keep is not None and keep.best is not None:
            _require_metric(place, keep.best.metric)
        return prune(place.storage, keep, now=now, dry_run=dry_run, key=key())
    if keep is not None:
        raise CheckpointError(
            f"{url} is not a run: rules of what to keep are for runs. Delete folders by hand instead."
        )
    prefix = place.prefix if isinstance(place, FolderPlace) else None
    return sweep(place.storage, prefix, grace_s=0.0 if now else GRACE_S, dry_run=dry_run, key=key())


def _left_without_manifests(url: str) -> Pruned:
    """The remains of broken saves in a place without checkpoints: reported, but not deleted."""
    from raysharded.checkpoint import open_storage
    from raysharded.checkpoint.retention.orphan_files import sweep
    from raysharded.checkpoint.sharded_io.checkpoint_uri import storage_above

    below = sweep(open_storage(url), dry_run=True)
    with suppress(ConfigError):
        return below if below.left else sweep(*storage_above(url), dry_run=True)
    return below


def _require_metric(place: RunPlace, metric: str) -> None:
    """Raise CheckpointError if no checkpoint has the metric: the rule would silently keep nothing."""
    from raysharded.checkpoint import open_ref
    from raysharded.checkpoint.retention.best import numbers_of

    there: set[str] = set()
    for ref in reversed(place.committed):
        with suppress(CheckpointError):
            numbers = numbers_of(open_ref(place.storage, ref, key=key(), check_files=False))
            there |= {name for name, value in numbers.items() if _is_number(value)}
            if metric in there:
                return
    if place.committed:
        known = ", ".join(sorted(there)) or "none"
        raise CheckpointError(f"--keep-best {metric}: no checkpoint of {place.storage.url} has it; there are: {known}.")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


@contextmanager
def _working(what: str) -> Iterator[None]:
    """A status line on standard error, if that is a terminal; the duration depends on storage and is unknown."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.text import Text

    from raysharded.report.console import PlainConsole

    with PlainConsole(stderr=True).status(Text(what), spinner="line"):
        yield


def _rules(keep_last: int | None, keep_every: int | None, keep_best: str | None) -> Keep | None:
    from raysharded.checkpoint import Keep

    if keep_last is None:
        if keep_every is not None or keep_best is not None:
            raise typer.BadParameter("--keep-every and --keep-best add to --keep-last: give that too.")
        return None
    return Keep(last=keep_last, every_steps=keep_every, best=_best(keep_best) if keep_best is not None else None)


def _best(text: str) -> Best:
    from raysharded.checkpoint import Best

    metric, _, rest = text.partition(":")
    mode, _, count = rest.partition(":")
    if not metric or mode not in ("min", "max") or not (count or "1").isdecimal() or int(count or "1") < 1:
        raise typer.BadParameter(f"--keep-best {text}: give METRIC:min or METRIC:max, and :N for more than one.")
    return Best(metric=metric, mode="min" if mode == "min" else "max", count=int(count or "1"))


def _lines(done: Pruned) -> list[str]:
    return [
        *(f"{prefix}: deleted; its data goes once a further checkpoint is committed" for prefix in done.retired),
        *(f"{prefix}: deleted, with its data" for prefix in done.removed),
        *(f"{prefix}: debris of a broken save, deleted" for prefix in done.debris),
        *(f"{prefix}: reference to the parent run dropped" for prefix in done.references),
        *(f"{left.prefix}: left alone, {left.reason}" for left in done.left),
    ]
