"""A run as commands are given it that read its storage: by folder or URL, or by its name on the Ray cluster."""

from __future__ import annotations

import os
from typing import Annotated

import typer

RunStorage = Annotated[
    str, typer.Argument(metavar="RUN", help="The run's folder or URL, <storage_path>/<name>; or its name on a cluster.")
]


def url_of(run: str) -> str:
    """Where the run is stored. What may be a path is taken for one; a bare name is asked for on the cluster, if there
    is one. Raises ConfigError for a name that the cluster does not know, with those that may be meant."""
    if os.sep in run or os.path.exists(run):
        return run
    from raysharded.errors import ClusterError
    from raysharded.run.finding import attach

    try:
        return attach(run).url
    except ClusterError:
        return run
