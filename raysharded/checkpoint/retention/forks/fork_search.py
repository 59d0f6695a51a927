"""The forks that pins of their parent belong to.

A pin names its fork's URL. Those of older versions do not: their forks are found beside the parent, by the tag.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raysharded.checkpoint.removal_mark import is_marked
from raysharded.checkpoint.retention.catalog import CheckpointRef, list_checkpoints
from raysharded.checkpoint.retention.fork_reference import read_reference
from raysharded.checkpoint.retention.forks.fork import FORK_PIN, tag_of
from raysharded.checkpoint.retention.pins import Pin
from raysharded.checkpoint.storage import NoSuchKey, Storage, open_storage
from raysharded.checkpoint.storage.named_places import is_same_place, url_named
from raysharded.checkpoint.storage.optional_operations import list_folders
from raysharded.errors import CheckpointError, CorruptCheckpoint, StorageError
from raysharded.locations import join_url, scheme_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """A fork that needs a checkpoint of its parent."""

    pin: Pin
    """The pin in the parent."""
    url: str
    """URL of the fork's storage."""
    reference: CheckpointRef | None
    """The reference in the fork; None if it could not be read, or the fork is being removed."""
    problem: str = ""
    """Reason why its reference could not be read."""


def find_forks(parent: Storage, pins: Sequence[Pin]) -> list[Fork]:
    """The forks among the owners of these pins; a pin whose owner is unknown, or does not refer to it, is of none."""
    beside = dict(_beside(parent)) if any(pin.tag.startswith(FORK_PIN) and not pin.fork for pin in pins) else {}
    found = ((pin, pin.fork or beside.get(pin.tag, "")) for pin in pins if pin.tag.startswith(FORK_PIN))
    forks = (_fork(parent, pin, url) for pin, url in found if url)
    return [fork for fork in forks if fork is not None]


def references_of(run: Storage) -> list[CheckpointRef]:
    """The run's references to its parent's checkpoints. Raises CheckpointError if the run is being removed."""
    return [ref for ref in list_checkpoints(run) if ref.state == "reference"]


def _fork(parent: Storage, pin: Pin, named: str) -> Fork | None:
    try:
        run = open_storage(url_named(named, parent.url, f"the pin {pin.tag!r} in {parent.url}"))
    except CheckpointError as error:
        return Fork(pin=pin, url=named, reference=None, problem=str(error))
    try:
        if is_marked(run):
            return Fork(pin=pin, url=run.url, reference=None)
        for ref in references_of(run):
            if _needs(run, ref, parent, pin):
                return Fork(pin=pin, url=run.url, reference=ref)
    except (CheckpointError, StorageError) as error:
        return Fork(pin=pin, url=run.url, reference=None, problem=str(error))
    return None


def _needs(run: Storage, ref: CheckpointRef, parent: Storage, pin: Pin) -> bool:
    """Whether the reference names this parent and this pin."""
    try:
        reference = read_reference(run, ref.prefix)
    except (NoSuchKey, CorruptCheckpoint):  # dropped just now; or it names no parent any more
        return False
    return reference.pin == pin.tag and is_same_place(reference.parent, parent.url)


def _beside(parent: Storage) -> Iterator[tuple[str, str]]:
    """(tag of the pin that it would have, URL) of every folder beside the parent."""
    path, mark, options = parent.url.partition("?") if scheme_of(parent.url) == "s3" else (parent.url, "", "")
    above = path.rpartition("/")[0]
    if not above or above.endswith("/"):
        return
    for name in list_folders(open_storage(above + mark + options)):
        url = open_storage(join_url(above + mark + options, name)).url
        yield tag_of(url), url
