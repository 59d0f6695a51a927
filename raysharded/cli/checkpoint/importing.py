"""`raysharded checkpoint import`."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raysharded.cli.checkpoint.converting import Map, Names, read_map, say
from raysharded.cli.checkpoint.place import AsJson, key
from raysharded.cli.files import byte_progress

if TYPE_CHECKING:
    from raysharded.checkpoint.exchange.results import Imported


class From(StrEnum):
    """What `import` reads."""

    AUTO = "auto"
    DCP = "dcp"
    SAFETENSORS = "safetensors"


def import_(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="A folder or URL; a safetensors file.", show_default=False)
    ],
    dest: Annotated[
        str, typer.Argument(metavar="DEST", help="The new checkpoint's folder or URL.", show_default=False)
    ],
    kind: Annotated[From, typer.Option("--format", help="What SRC is.")] = From.AUTO,
    names: Names = None,
    skip: Annotated[
        list[str] | None,
        typer.Option("--skip", metavar="PATTERN", help="dcp: leave out what matches. May be repeated."),
    ] = None,
    name_map: Map = None,
    step: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="The step that it is of. By default DEST's, if named after one, or 0."),
    ] = None,
    run: Annotated[str, typer.Option(metavar="NAME", help="The run that the new checkpoint is of.")] = "",
    as_json: AsJson = False,
) -> None:
    """Make a checkpoint of what another library wrote. Nothing that is pickled there is run."""
    if kind is From.AUTO:
        kind = _kind_of(source)
    if kind is From.DCP and name_map:
        raise typer.BadParameter("--map is for safetensors.")
    if kind is From.SAFETENSORS and (names or skip):
        raise typer.BadParameter("--names and --skip are for dcp; choose with --map.")
    with byte_progress(f"import of {source}", None, quiet=as_json) as progress:
        options: dict[str, Any] = {"step": step, "run": run, "key": key(), "progress": progress}
        if kind is From.DCP:
            options |= {"names": tuple(names or ()), "skip": tuple(skip or ())}
        elif name_map:
            read = read_map(name_map)
            assert read is not None
            options["name_map"] = read if read.exact is None else read.inverse()
        done = _import(source, dest, kind, options)
    say({"source": source, "dest": dest, "format": kind.value, **asdict(done)}, as_json)


def _kind_of(source: str) -> From:
    from raysharded.checkpoint.exchange.dcp_metadata import METADATA_NAME
    from raysharded.checkpoint.exchange.places import has, place_of

    place = place_of(source)
    is_file = place[1].endswith(".safetensors")
    return From.DCP if not is_file and has(place, METADATA_NAME) else From.SAFETENSORS


def _import(source: str, dest: str, kind: From, options: dict[str, Any]) -> Imported:
    from raysharded.checkpoint.exchange.places import place_of

    if kind is From.DCP:
        from raysharded.checkpoint.exchange.dcp_import import import_dcp

        return import_dcp(place_of(source), place_of(dest), **options)
    from raysharded.checkpoint.exchange.hf_import import import_huggingface

    return import_huggingface(place_of(source), place_of(dest), **options)
