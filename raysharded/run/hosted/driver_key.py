"""The signing key of a driver actor, which is not the process that has it. Does not import Ray.

An order lies in the cluster's memory, which every process of the cluster can read. So it names the key's file, or the
key's identity; the key itself comes from the driver's own node or environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from raysharded.checkpoint.format.signing import ENVIRONMENT_KEY, ENVIRONMENT_KEY_FILE, signing_key_from_environment
from raysharded.errors import CheckpointError
from raysharded.locations import with_home

if TYPE_CHECKING:
    from raysharded.config import CheckpointConfig

_WAYS_OUT = (
    "Put the key in a file that the driver's node has (`chmod 600`), and name it: "
    f"CheckpointConfig(signing_key_file=...) or ${ENVIRONMENT_KEY_FILE}. Or set ${ENVIRONMENT_KEY} where the cluster "
    "is started, or in the Ray job's runtime environment."
)


class Order(Protocol):
    """The part of a `RunSubmission` that is about the key."""

    @property
    def name(self) -> str: ...
    @property
    def environment(self) -> Mapping[str, str]: ...
    @property
    def key_id(self) -> str: ...


def way_to_the_key(config: CheckpointConfig) -> tuple[dict[str, str], str]:
    """The driver's way to the signing key: the variable that names its file, or the identity of the key itself.

    The file may be on the driver's machine alone. Raises CheckpointError for a blank or missing key.
    """
    if config.signing_key_file is not None:
        return {}, ""
    if ENVIRONMENT_KEY in os.environ:
        found = signing_key_from_environment()
        return {}, found.identity if found else ""
    path = os.environ.get(ENVIRONMENT_KEY_FILE)
    if path is None or not path.strip():
        signing_key_from_environment(require_signed=config.require_signed)
        return {}, ""
    return {ENVIRONMENT_KEY_FILE: os.path.abspath(with_home(path))}, ""


def refuse_a_key_that_is_not_sent(order: Order) -> None:
    """Raise CheckpointError if the driver would need a key from the environment of a Ray that was started here.

    Neither such a Ray's processes nor a cluster's memory get this process's key.
    """
    if order.key_id:
        raise CheckpointError(
            f"run {order.name!r}: the key in ${ENVIRONMENT_KEY} does not reach the run's driver, which is a separate "
            f"process: a key is not put into the memory of a Ray cluster, where others read it. {_WAYS_OUT}"
        )


def take_environment(order: Order) -> None:
    """Set the order's variables in this process, the driver's.

    Raises CheckpointError if the order needs a signing key that this process does not have.
    """
    if ENVIRONMENT_KEY_FILE in order.environment:
        os.environ.pop(ENVIRONMENT_KEY, None)  # its starter had none
    os.environ.update(order.environment)
    if not order.key_id:
        return
    has = f"has another one in ${ENVIRONMENT_KEY}" if ENVIRONMENT_KEY in os.environ else f"has no ${ENVIRONMENT_KEY}"
    if ENVIRONMENT_KEY not in os.environ or _identity() != order.key_id:
        raise CheckpointError(
            f"run {order.name!r} is signed with the key {order.key_id}, and its driver's process {has}: a key is not "
            f"put into the memory of a Ray cluster, where others read it. {_WAYS_OUT}"
        )


def _identity() -> str:
    found = signing_key_from_environment()
    return found.identity if found is not None else ""
