"""Run and step of a checkpoint's folder, compared with its signed manifest. Pure.

A signature shows that a holder of the key wrote a manifest, not that it was written here. In a run's folder the run's
name and the step are known. The name of a folder that belongs to no run has at most a step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from raysharded.checkpoint.format.manifest import Manifest
from raysharded.checkpoint.format.paths import CHECKPOINTS_FOLDER, parse_save_folder
from raysharded.errors import RefusedCheckpoint
from raysharded.locations import name_of

_STEP = re.compile(r"step[-_]?([0-9]+)", re.IGNORECASE)


def check_identity(manifest: Manifest, url: str) -> None:
    """Raise RefusedCheckpoint if the folder at `url` is named after another run or step than the manifest's.

    A manifest without a run, and step 0, are not compared: `checkpoint.save` writes both by default.
    """
    run, step = _run_of(url), _STEP.fullmatch(name_of(url))
    if run and manifest.run not in ("", run):
        raise RefusedCheckpoint(
            f"{url} is signed as a checkpoint of run {manifest.run!r}, not of {run!r}: it is refused. It was copied "
            "here from another run, or the run's folder was renamed: then give the folder its name back."
        )
    if step is not None and manifest.step not in (0, int(step[1])):
        raise RefusedCheckpoint(
            f"{url} is signed as a checkpoint of step {manifest.step}, not of step {int(step[1])}: it is refused. It "
            "was copied here from another step; name its folder after its own step."
        )


def check_same_run(runs: Mapping[str, str], url: str) -> None:
    """Raise RefusedCheckpoint unless signed checkpoints side by side below `url` are of one run.

    `runs`: the folders' names, with the runs' names in their manifests. Those without one are not compared.
    """
    folders = {run: folder for folder, run in sorted(runs.items()) if run}
    if len(folders) > 1:
        told = ", ".join(f"{folder} is of {run!r}" for run, folder in sorted(folders.items()))
        raise RefusedCheckpoint(
            f"the signed checkpoints at {url} are of different runs: {told}. Name the checkpoint that is meant."
        )


def _run_of(url: str) -> str:
    """Name of the run that has the folder at `url` as a save; empty if none has."""
    path, _, save = url.partition("?")[0].rpartition("/")
    above, _, folder = path.rpartition("/")
    return name_of(above) if folder == CHECKPOINTS_FOLDER and parse_save_folder(save) is not None else ""
