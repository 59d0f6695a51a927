"""`raysharded checkpoint export`."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raysharded.cli.checkpoint.converting import Map, Names, read_map, say
from raysharded.cli.checkpoint.place import AsJson, Run, Step, find_place, key, open_chosen
from raysharded.cli.files import byte_progress
from raysharded.errors import CheckpointError

if TYPE_CHECKING:
    from raysharded.checkpoint import Checkpoint
    from raysharded.checkpoint.exchange.results import Exported, Imported


class To(StrEnum):
    """What `export` writes."""

    DCP = "dcp"
    SAFETENSORS = "safetensors"
    RAYSHARDED = "raysharded"


def export(
    run: Run,
    dest: Annotated[str, typer.Argument(metavar="DEST", help="A new folder or URL.", show_default=False)],
    to: Annotated[To, typer.Option("--format", help="torch.distributed.checkpoint, Hugging Face, or a copy.")],
    step: Step = None,
    names: Names = None,
    name_map: Map = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="safetensors: convert floating point, as to bfloat16.")
    ] = None,
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="safetensors: a config.json to copy for from_pretrained.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint in another format, or a copy of it. Needs a bounded amount of memory."""
    if to is not To.SAFETENSORS and (name_map or dtype or config):
        raise typer.BadParameter("--map, --dtype and --config are for --format safetensors.")
    checkpoint = open_chosen(find_place(run), step)
    total = None if names or name_map else sum(info.size_bytes for info in checkpoint.manifest.tensors.values())
    with byte_progress(f"export to {dest}", total, quiet=as_json) as progress:
        options: dict[str, Any] = {"names": tuple(names or ()), "progress": progress}
        if to is To.SAFETENSORS:
            options |= {"name_map": read_map(name_map), "dtype": dtype, "config": _content(config)}
        done = _export(checkpoint, dest, to, options)
    say({"step": checkpoint.step, "dest": dest, "format": to.value, **asdict(done)}, as_json)


def _export(checkpoint: Checkpoint, dest: str, to: To, options: dict[str, Any]) -> Exported | Imported:
    from raysharded.checkpoint.exchange.places import place_of

    if to is To.DCP:
        from raysharded.checkpoint.exchange.dcp_export import export_dcp

        return export_dcp(checkpoint, place_of(dest), **options)
    if to is To.SAFETENSORS:
        from raysharded.checkpoint.exchange.hf_export import export_huggingface

        return export_huggingface(checkpoint, place_of(dest), **options)
    from raysharded.checkpoint.exchange.copy import copy_checkpoint

    return copy_checkpoint(checkpoint, place_of(dest), key=key(), **options)


def _content(path: str | None) -> bytes | None:
    try:
        return None if path is None else Path(path).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
