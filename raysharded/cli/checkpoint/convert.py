"""`raysharded checkpoint export | import`."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raysharded.cli.checkpoint.target import AsJson, BestOne, Run, Step, choice, find_place, key, open_chosen
from raysharded.cli.errors import print_json
from raysharded.cli.output import byte_progress, echo
from raysharded.errors import CheckpointError
from raysharded.locations import require_file

if TYPE_CHECKING:
    from raysharded.checkpoint import Checkpoint
    from raysharded.checkpoint.interop.names import NameMap
    from raysharded.checkpoint.interop.results import Exported, Imported


Names = Annotated[
    list[str] | None,
    typer.Option("--names", metavar="PATTERN", help="Only tensors that match, as 'model.*'. May be repeated."),
]
Map = Annotated[
    str | None,
    typer.Option(
        "--map",
        metavar="FILE",
        help='JSON: {"our name": "their name" or null}, or [["pattern", "replacement" or null], ...]. Patterns are '
        r"regular expressions, as model\.(.*), and replacements may name groups, as \1; the first pattern that matches "
        "a whole name of the source is used. Names without a match are omitted.",
    ),
]


def read_map(path: str | None) -> NameMap | None:
    """The name map in a file; None without a file."""
    from raysharded.checkpoint.interop.names import NameMap

    return None if path is None else NameMap.from_file(path)


def say(done: dict[str, Any], as_json: bool) -> None:
    """Print the result of a conversion."""
    from raysharded.display.quantities import count, size

    if as_json:
        print_json(done)
        return
    kind = "checkpoint" if done["format"] == "raysharded" else done["format"]
    echo(
        f"step {done['step']}: {count(done['num_tensors'], 'tensor')}, {size(done['size_bytes'])} ({kind}) at "
        f"{done['dest']}"
    )


class To(StrEnum):
    """Formats that `export` writes."""

    DCP = "dcp"
    SAFETENSORS = "safetensors"
    PEFT = "peft"
    RAYSHARDED = "raysharded"


def export(
    run: Run,
    dest: Annotated[str, typer.Argument(metavar="DEST", help="A new folder or URL.", show_default=False)],
    to: Annotated[
        To, typer.Option("--format", help="torch.distributed.checkpoint, Hugging Face, an adapter, or a copy.")
    ],
    step: Step = None,
    best: BestOne = False,
    names: Names = None,
    name_map: Map = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="safetensors, peft: convert floating point, as to bfloat16.")
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="safetensors: a config.json to copy; peft: an adapter_config.json."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint in another format, or a copy of it. Needs a bounded amount of memory."""
    to_hugging_face = to in (To.SAFETENSORS, To.PEFT)
    if not to_hugging_face and (name_map or dtype or config):
        raise typer.BadParameter("--map, --dtype and --config are for --format safetensors or peft.")
    checkpoint = open_chosen(find_place(run), choice(step, best))
    whole = not (names or name_map or to is To.PEFT)
    total = sum(info.size_bytes for info in checkpoint.manifest.tensors.values()) if whole else None
    with byte_progress(f"export to {dest}", total, quiet=as_json) as progress:
        options: dict[str, Any] = {"names": tuple(names or ()), "progress": progress}
        if to_hugging_face:
            options |= {"name_map": read_map(name_map), "dtype": dtype, "config": _content(config)}
        done = _export(checkpoint, dest, to, options)
    say({"step": checkpoint.step, "dest": dest, "format": to.value, **asdict(done)}, as_json)


def _export(checkpoint: Checkpoint, dest: str, to: To, options: dict[str, Any]) -> Exported | Imported:
    from raysharded.checkpoint.interop.locations import place_of

    if to is To.DCP:
        from raysharded.checkpoint.interop.dcp.exporter import export_dcp

        return export_dcp(checkpoint, place_of(dest), **options)
    if to is To.SAFETENSORS:
        from raysharded.checkpoint.interop.huggingface.exporter import export_huggingface

        return export_huggingface(checkpoint, place_of(dest), **options)
    if to is To.PEFT:
        from raysharded.checkpoint.interop.huggingface.adapter import export_peft

        return export_peft(checkpoint, place_of(dest), **options)
    from raysharded.checkpoint.interop.copy import copy_checkpoint

    return copy_checkpoint(checkpoint, place_of(dest), key=key(), **options)


def _content(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        require_file(path)
        return Path(path).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error


class From(StrEnum):
    """Formats that `import` reads."""

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
    kind: Annotated[From, typer.Option("--format", help="SRC's format.")] = From.AUTO,
    names: Names = None,
    skip: Annotated[
        list[str] | None,
        typer.Option("--skip", metavar="PATTERN", help="dcp: omit tensors that match. May be repeated."),
    ] = None,
    name_map: Map = None,
    step: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="The checkpoint's step. By default DEST's, if named after one, or 0."),
    ] = None,
    run: Annotated[str, typer.Option(metavar="NAME", help="The new checkpoint's run.")] = "",
    as_json: AsJson = False,
) -> None:
    """Convert another library's checkpoint. Pickled code in it is never run."""
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
    from raysharded.checkpoint.interop.dcp.metadata import METADATA_NAME
    from raysharded.checkpoint.interop.locations import has, place_of

    place = place_of(source)
    is_file = place[1].endswith(".safetensors")
    return From.DCP if not is_file and has(place, METADATA_NAME) else From.SAFETENSORS


def _import(source: str, dest: str, kind: From, options: dict[str, Any]) -> Imported:
    from raysharded.checkpoint.interop.locations import place_of

    if kind is From.DCP:
        from raysharded.checkpoint.interop.dcp.importer import import_dcp

        return import_dcp(place_of(source), place_of(dest), **options)
    from raysharded.checkpoint.interop.huggingface.importer import import_huggingface

    return import_huggingface(place_of(source), place_of(dest), **options)
