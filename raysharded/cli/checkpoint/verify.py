"""`raysharded checkpoint verify`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raysharded.cli.checkpoint.target import (
    AsJson,
    BesidePlace,
    BestOne,
    Choice,
    FolderPlace,
    Place,
    Run,
    RunPlace,
    Step,
    choice,
    find_place,
    key,
    open_chosen,
    signature,
)
from raysharded.cli.errors import print_json
from raysharded.cli.output import byte_progress, echo
from raysharded.display.quantities import count
from raysharded.errors import CheckpointError

if TYPE_CHECKING:
    from raysharded.checkpoint import Checkpoint, CheckpointRef

    _Suspect = tuple[int | None, str, Callable[[], Checkpoint]]
    """(step, if known, folder, function that opens it)."""


def verify(
    run: Run,
    step: Step = None,
    best: BestOne = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Every committed checkpoint, not the newest alone.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read every byte of a checkpoint and compare it with its digests: of the newest, of one step, or of all.

    Signatures are checked if RAYSHARDED_CHECKPOINT_KEY_FILE names the key; the output states whether they were. Exits
    with 1 if anything is damaged.
    """
    chosen = choice(step, best)
    if everything and chosen is not None:
        raise typer.BadParameter(
            f"--all is every checkpoint and {'--best' if best else '--step'} one: give one of the two."
        )
    place = find_place(run)
    suspects = _suspects(place, chosen, everything)
    found = [_read(name, prefix, open_it) for name, prefix, open_it in suspects]
    has_key = key() is not None
    if as_json:
        print_json([one.as_dict(has_key) for one in found])
    else:
        for one in found:
            what = "whole" if not one.damage else count(len(one.damage), "damaged part")
            echo(f"{f'step {one.step}' if one.step is not None else 'no step'}: {what} ({one.prefix})")
            if one.signed:
                echo(f"  its signature: {signature(one.signed)}")
            for error in one.damage:
                echo(f"  {error}")
        others = 0 if everything or chosen is not None else _number_in(place) - 1
        if others > 0:
            echo(f"only the newest was read: {count(others, 'other')} with --all, one with --step N")
    if any(one.damage for one in found):
        raise typer.Exit(1)


def _number_in(place: Place) -> int:
    """The number of checkpoints that `--all` reads."""
    if isinstance(place, FolderPlace):
        return 1
    return len(place.prefixes) if isinstance(place, BesidePlace) else len(_of_run(place))


def _of_run(place: RunPlace) -> list[CheckpointRef]:
    return [ref for ref in place.refs if ref.complete or ref.state in ("damaged", "lost")]


def _suspects(place: Place, step: Choice, everything: bool) -> Iterator[_Suspect]:
    """Every checkpoint to read. A run's newest one may be a committed checkpoint that was lost."""
    from raysharded.checkpoint.retention.catalog import last_unmarked

    if isinstance(place, FolderPlace):
        opened = open_chosen(place, step)
        yield opened.step, place.prefix, lambda: opened
    elif isinstance(place, BesidePlace):
        for prefix in place.prefixes if everything else [_chosen_beside(place, step)]:
            yield None, prefix, lambda prefix=prefix: open_chosen(FolderPlace(place.storage, prefix), None)  # type: ignore[misc]  # bound now
    else:
        chosen = _of_run(place)
        of_step = [ref for ref in chosen if step in (None, ref.step)]  # may be damaged
        newest = [last_unmarked(of_step) if of_step else place.choose(step)]
        for ref in chosen if everything else newest:
            yield ref.step, ref.prefix, lambda ref=ref: _open_ref(place, ref)  # type: ignore[misc]  # bound now


def _chosen_beside(place: BesidePlace, step: Choice) -> str:
    return place.prefixes[-1] if step is None else place.choose(step).prefix


def _open_ref(place: RunPlace, ref: CheckpointRef) -> Checkpoint:
    from raysharded.checkpoint import open_ref

    if not ref.complete:
        raise CheckpointError(ref.reason)
    return open_ref(place.storage, ref, key=key(), check_files=False)


@dataclass(frozen=True, slots=True)
class _Verdict:
    """A checkpoint that was read."""

    step: int | None
    prefix: str
    signed: bool | None
    """Whether it carries a signature, which a wrong key would have rejected; None: it cannot be opened."""
    damage: list[str]

    def as_dict(self, has_key: bool) -> dict[str, Any]:
        checked = None if self.signed is None else self.signed and has_key
        found = {"step": self.step, "prefix": self.prefix, "ok": not self.damage, "damage": self.damage}
        return {**found, "signed": self.signed, "signature_checked": checked}


def _read(step: int | None, prefix: str, open_it: Callable[[], Checkpoint]) -> _Verdict:
    try:
        checkpoint = open_it()
        total = sum(file.size_bytes for file in checkpoint.manifest.files)
        with byte_progress(f"step {checkpoint.step}", total) as advance:
            damage = [str(error) for error in checkpoint.find_damage(advance)]
            return _Verdict(checkpoint.step, prefix, checkpoint.signed, damage)
    except CheckpointError as error:
        return _Verdict(step, prefix, None, [str(error)])
