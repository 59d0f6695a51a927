"""The target of the commands' first argument: a run, one checkpoint's folder, or a folder of such folders."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

from raysharded.cli.errors import AsJson as AsJson
from raysharded.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from raysharded.checkpoint import BestCheckpoint, Checkpoint, CheckpointRef, SigningKey, Storage

Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="The run's folder or URL, <storage_path>/<name>; or the folder of one checkpoint, or of several.",
    ),
]
RunOnly = Annotated[str, typer.Argument(metavar="RUN", help="The run's folder or URL: <storage_path>/<name>.")]
_NO_KEY = "the key is not set (RAYSHARDED_CHECKPOINT_KEY_FILE)"
Step = Annotated[int | None, typer.Option(metavar="N", help="The checkpoint's step. By default the newest.")]
BestOne = Annotated[
    bool, typer.Option("--best", help="The best checkpoint of the run, by its CheckpointConfig.keep_best.")
]
Choice: TypeAlias = int | Literal["best"] | None
"""A step, the best of a run, or None: the newest."""


def choice(step: int | None, best: bool, names: str = "--best, --step") -> Choice:
    """The choice that the two options `names` make."""
    if best and step is not None:
        first, _, second = names.partition(", ")
        raise typer.BadParameter(f"{first} is one checkpoint and {second} another: give one of the two.")
    return "best" if best else step


@dataclass(frozen=True, slots=True)
class RunPlace:
    """A run: its storage and its saves, oldest first."""

    storage: Storage
    refs: list[CheckpointRef]

    @property
    def committed(self) -> list[CheckpointRef]:
        return [ref for ref in self.refs if ref.complete]

    def choose(self, step: Choice) -> CheckpointRef:
        """The committed checkpoint of a step, the best, or the newest one. If a step has several, its newest save.

        One that is marked for deletion, and only kept by a pin, is chosen if there is no other.
        """
        from raysharded.checkpoint.retention.catalog import last_unmarked

        if step == "best":
            return self._best()
        found = [ref for ref in self.committed if step in (None, ref.step)]
        if not found:
            steps = ", ".join(str(number) for number in sorted({ref.step for ref in self.committed})) or "none"
            what = "no committed checkpoint" if step is None else f"no committed checkpoint of step {step}"
            raise CheckpointError(f"{self.storage.url} has {what}; there are: {steps}.")
        return last_unmarked(found)

    def scored(self) -> list[BestCheckpoint]:
        """The checkpoints with their values of the metric that `keep_best` names, best first; empty without one."""
        from raysharded.checkpoint.retention.best import by_value

        return by_value(self.storage, self.refs, key=key())

    def _best(self) -> CheckpointRef:
        scored = self.scored()
        if not scored:
            raise CheckpointError(
                f"--best: no checkpoint of {self.storage.url} is known as the best. The newest one records no "
                "CheckpointConfig.keep_best, or none has its number. `raysharded checkpoint show` shows the numbers "
                "of one checkpoint; choose it with --step."
            )
        return scored[0].ref


@dataclass(frozen=True, slots=True)
class FolderPlace:
    """The folder of one checkpoint, from any writer, inside or outside a run."""

    storage: Storage
    prefix: str


@dataclass(frozen=True, slots=True)
class BesidePlace:
    """A folder that is not a run and directly contains checkpoint folders, ordered by the numbers in their names."""

    storage: Storage
    prefixes: list[str]

    def choose(self, step: Choice) -> Checkpoint:
        """The newest checkpoint, as `load` chooses it; or the newest of a step: those that cannot be opened are
        skipped."""
        _refuse_best(self.storage.url, step)
        if step is None:
            from raysharded.checkpoint.retention.flat_folder import newest_beside

            newest = newest_beside(self.storage, key=key())
            if newest is None:
                raise CheckpointError(f"{self.storage.url} has no checkpoint any more.")
            return newest
        steps: set[int] = set()
        for prefix in reversed(self.prefixes):
            with suppress(CheckpointError):
                found = _open(self.storage, prefix)
                if found.step == step:
                    return found
                steps.add(found.step)
        there = ", ".join(str(number) for number in sorted(steps)) or "none"
        raise CheckpointError(
            f"{self.storage.url} has no checkpoint of step {step} that can be read; there are: {there}."
        )


Place = RunPlace | FolderPlace | BesidePlace


def find_place(url: str) -> Place:
    """The run, the checkpoint or the folder of checkpoints at a folder or URL. Raises CheckpointError if there are
    none."""
    from raysharded.checkpoint import list_checkpoints, open_storage
    from raysharded.checkpoint.retention.flat_folder import side_by_side

    storage = open_storage(url)
    refs = list_checkpoints(storage, key=key())
    if refs:
        return RunPlace(storage, refs)
    single = _single(url)
    if single is not None:
        return single
    beside = side_by_side(storage)
    if beside:
        return BesidePlace(storage, beside)
    from raysharded.report.nearby import meant

    raise CheckpointError(
        f"there are no checkpoints at {storage.url}.{meant(storage)} Give the folder of one run, "
        "<RunConfig.storage_path>/<RunConfig.name>, or the folder of one checkpoint, with its manifest.json, or the "
        "one above it."
    )


def _single(url: str) -> FolderPlace | None:
    from raysharded.checkpoint.format.encoding import is_foreign
    from raysharded.checkpoint.format.limits import MAX_MANIFEST_BYTES
    from raysharded.checkpoint.format.paths import MANIFEST_NAME
    from raysharded.checkpoint.sharded_io.checkpoint_uri import storage_above
    from raysharded.checkpoint.storage import NoSuchKey

    try:
        above, name = storage_above(url)
        foreign = is_foreign(above.read(f"{name}/{MANIFEST_NAME}", 0, MAX_MANIFEST_BYTES))
    except (ConfigError, NoSuchKey):
        return None
    return None if foreign else FolderPlace(above, name)


def find_run(url: str) -> RunPlace:
    """The run at a folder or URL. Raises CheckpointError if there is none."""
    place = find_place(url)
    if not isinstance(place, RunPlace):
        what = "a single checkpoint" if isinstance(place, FolderPlace) else "a folder of single checkpoints"
        raise CheckpointError(
            f"{url} is {what}, not a run. Give the run's folder: the one that has `checkpoints` in it."
        )
    return place


def _refuse_best(url: str, step: Choice) -> None:
    if step == "best":
        raise CheckpointError(f"--best is for runs: {url} has single checkpoints. Name one by its folder or --step.")


def open_chosen(place: Place, step: Choice) -> Checkpoint:
    """The checkpoint of a step, the best, the newest, or the only one; opened with the environment's key, if set."""
    from raysharded.checkpoint import open_ref

    if isinstance(place, RunPlace):
        return open_ref(place.storage, place.choose(step), key=key(), check_files=False)
    if isinstance(place, BesidePlace):
        return place.choose(step)
    _refuse_best(place.storage.url, step)
    found = _open(place.storage, place.prefix)
    if step not in (None, found.step):
        raise CheckpointError(f"the checkpoint in {place.storage.url}, {place.prefix}, is of step {found.step}.")
    return found


def _open(storage: Storage, prefix: str) -> Checkpoint:
    from raysharded.checkpoint import open_checkpoint

    return open_checkpoint(storage, prefix, key=key())


def signature(signed: bool | None) -> str:
    """The state of an opened checkpoint's signature: opening it checks it if there is a key.

    `signed`: whether it carries one; None: it cannot be opened.
    """
    if signed is None:
        return "unknown"
    if not signed:
        return "none"
    found = key()
    return f"checked with the key {found.identity}" if found is not None else f"not checked: {_NO_KEY}"


def key() -> SigningKey | None:
    """The signing key in the environment."""
    from raysharded.checkpoint import signing_key_from_environment

    return signing_key_from_environment()
