"""What `export` and `import` have in common: options, and how the outcome is told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from raysharded.cli.boundary import print_json

if TYPE_CHECKING:
    from raysharded.checkpoint.exchange.names import NameMap

Names = Annotated[
    list[str] | None,
    typer.Option("--names", metavar="PATTERN", help="Only what matches, as 'model.*'. May be repeated."),
]
Map = Annotated[
    str | None,
    typer.Option(
        "--map",
        metavar="FILE",
        help='JSON: {"our name": "their name" or null}, or [["pattern", "replacement" or null], ...]. Patterns are '
        r"regular expressions, as model\.(.*), and replacements may name groups, as \1; the first pattern that matches "
        "a whole name of the source counts. What nothing matches is left out.",
    ),
]


def read_map(path: str | None) -> NameMap | None:
    """The name map in a file, if one is given."""
    from raysharded.checkpoint.exchange.names import NameMap

    return None if path is None else NameMap.from_file(path)


def say(done: dict[str, Any], as_json: bool) -> None:
    """Prints what was done."""
    from raysharded.obs.units import size

    if as_json:
        print_json(done)
        return
    kind = "checkpoint" if done["format"] == "raysharded" else done["format"]
    typer.echo(
        f"step {done['step']}: {done['num_tensors']} tensors, {size(done['size_bytes'])} ({kind}) at {done['dest']}"
    )
