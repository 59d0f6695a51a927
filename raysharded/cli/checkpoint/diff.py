"""`raysharded checkpoint diff`."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raysharded.cli.checkpoint.convert import Names
from raysharded.cli.checkpoint.target import AsJson, choice, find_place, open_chosen
from raysharded.cli.errors import print_json
from raysharded.cli.output import byte_progress, console, echo
from raysharded.display.quantities import count

if TYPE_CHECKING:
    from raysharded.checkpoint.interop.diff import Diff


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A run's or a checkpoint's folder or URL.", show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B", help="The other one.", show_default=False)],
    step_a: Annotated[int | None, typer.Option(metavar="N", help="A's step. By default the newest.")] = None,
    step_b: Annotated[int | None, typer.Option(metavar="N", help="B's step. By default the newest.")] = None,
    best_a: Annotated[bool, typer.Option("--best-a", help="A's best checkpoint, by its keep_best.")] = False,
    best_b: Annotated[bool, typer.Option("--best-b", help="B's best checkpoint, by its keep_best.")] = False,
    names: Names = None,
    as_json: AsJson = False,
) -> None:
    """Show the tensors that differ between two checkpoints, and by how much. Exits with 1 if any do."""
    from raysharded.checkpoint.interop.diff import diff as compare

    chosen_a = choice(step_a, best_a, "--best-a, --step-a")
    chosen_b = choice(step_b, best_b, "--best-b, --step-b")
    left, right = open_chosen(find_place(a), chosen_a), open_chosen(find_place(b), chosen_b)
    both = left.manifest.tensors.keys() & right.manifest.tensors.keys()
    total = None if names else sum(left.manifest.tensors[name].size_bytes for name in both)
    with byte_progress("diff", total, quiet=as_json) as progress:
        found = compare(left, right, names=tuple(names or ()), progress=progress)
    if as_json:
        print_json(_as_dict(found))
    else:
        _show(found)
    if not found.is_empty:
        raise typer.Exit(1)


def _as_dict(found: Diff) -> dict[str, Any]:
    changed = [
        {"name": name, "a": {"dtype": x.dtype, "shape": list(x.shape)}, "b": {"dtype": y.dtype, "shape": list(y.shape)}}
        for name, x, y in found.changed
    ]
    return {
        "equal": found.is_empty,
        "only_in_a": list(found.only_in_a),
        "only_in_b": list(found.only_in_b),
        "changed": changed,
        "different": [{k: _json_number(v) for k, v in asdict(tensor).items()} for tensor in found.different],
        "num_equal": len(found.equal),
        "num_equal_by_digests": len(found.by_digests),
    }


def _json_number(value: Any) -> Any:
    """JSON has no infinity: a difference that float64 cannot hold is null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _show(found: Diff) -> None:
    from raysharded.report.history.row_table import RowTable

    table = RowTable()
    table.add_column("tensor", long="shorten")
    for name in ("differing", "max", "mean", "relative L2"):
        table.add_column(name, right=True)
    for name in found.only_in_a:
        table.add_row(name, "only in A")
    for name in found.only_in_b:
        table.add_row(name, "only in B")
    for name, x, y in found.changed:
        table.add_row(name, f"{x.dtype} {list(x.shape)} -> {y.dtype} {list(y.shape)}")
    for t in found.different:
        ratio = "-" if t.relative_l2 is None else f"{t.relative_l2:.3g}"
        note = f" ({t.num_not_finite} not finite)" if t.num_not_finite else ""
        table.add_row(
            t.name, f"{t.num_differing} of {t.num_elements}{note}", f"{t.max_abs:.3g}", f"{t.mean_abs:.3g}", ratio
        )
    if not found.is_empty:
        with console() as out:
            out.print(table)
    echo(f"{_equal(found)}{'' if not found.is_empty else '; nothing differs'}.")


def _equal(found: Diff) -> str:
    """The number of equal tensors, and the evidence: files with the same digests were not read."""
    equal = f"{count(len(found.equal), 'tensor')} {'is' if len(found.equal) == 1 else 'are'} equal"
    if found.equal and len(found.by_digests) == len(found.equal):
        return f"{equal} by {'its digest' if len(found.equal) == 1 else 'their digests'}"
    some = f", {len(found.by_digests)} of them by digest" if found.by_digests else ""
    return f"{equal} to the bit{some}"
