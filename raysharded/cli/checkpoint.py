"""`raysharded checkpoint`: list, show and verify the checkpoints of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from raysharded.cli.boundary import console, print_json
from raysharded.errors import CheckpointError

if TYPE_CHECKING:
    from raysharded.checkpoint import CheckpointRef, Storage

app = typer.Typer(help="List, show and verify checkpoints.", no_args_is_help=True, rich_markup_mode=None)

Run = Annotated[str, typer.Argument(metavar="RUN", help="The run's folder or URL: <storage_path>/<name>.")]
Step = Annotated[int | None, typer.Option(metavar="N", help="Of this step. By default the newest.")]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]


@app.command("ls")
def list_(run: Run, as_json: AsJson = False) -> None:
    """List the checkpoints of a run, oldest first, with those that were never committed."""
    storage, refs = _checkpoints(run)
    if as_json:
        rows = [{name: getattr(ref, name) for name in ("step", "save_id", "prefix", "complete")} for ref in refs]
        print_json([{**row, "files": len(ref.keys)} for row, ref in zip(rows, refs, strict=True)])
        return
    from rich import box
    from rich.table import Table

    table = Table(title=storage.url, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("step", justify="right")
    table.add_column("folder", overflow="fold")
    table.add_column("files", justify="right")
    table.add_column("state", no_wrap=True)
    for ref in refs:
        state = "committed" if ref.complete else "never committed"
        table.add_row(str(ref.step), ref.prefix, str(len(ref.keys)), state)
    console().print(table)


@app.command()
def show(run: Run, step: Step = None, as_json: AsJson = False) -> None:
    """Show what is in a checkpoint: when and how it was written, its fingerprint, its tensors."""
    from raysharded.checkpoint import open_checkpoint
    from raysharded.obs.tables import facts_table
    from raysharded.obs.units import moment, size

    storage, refs = _checkpoints(run)
    manifest = open_checkpoint(storage, _choose(storage, refs, step).prefix).manifest
    tensors = {
        name: {"dtype": info.dtype, "shape": list(info.shape), "size_bytes": info.size_bytes}
        for name, info in manifest.tensors.items()
    }
    total_bytes = sum(info.size_bytes for info in manifest.tensors.values())
    found: dict[str, Any] = {
        "run": manifest.run,
        "step": manifest.step,
        "generation": manifest.generation,
        "save_id": manifest.save_id,
        "writer": manifest.writer,
        "created_at": manifest.created_at,
        "size_bytes": total_bytes,
        "files": {file.path: file.size_bytes for file in manifest.files},
        "metadata": dict(manifest.metadata),
        "tensors": tensors,
    }
    if as_json:
        print_json(found)
        return
    table = facts_table()
    for name in ("run", "step", "generation"):
        table.add_row(name, str(found[name]))
    table.add_row("written", f"{moment(manifest.created_at)} by {manifest.writer}")
    table.add_row("size", f"{size(total_bytes)} in {len(manifest.files)} files, {len(tensors)} tensors")
    for name, value in manifest.metadata.items():
        table.add_row(name, ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value))
    for name, tensor in tensors.items():
        table.add_row(name, f"{tensor['dtype']} {tensor['shape']}")
    console().print(table)


@app.command()
def verify(
    run: Run,
    step: Step = None,
    everything: Annotated[bool, typer.Option("--all", help="Every committed checkpoint.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read every byte of a checkpoint and compare it with its digests. Exits with 1 if anything is damaged."""
    storage, refs = _checkpoints(run)
    chosen = [ref for ref in refs if ref.complete] if everything else [_choose(storage, refs, step)]
    found = [(ref, _damage(storage, ref)) for ref in chosen]
    if as_json:
        print_json([{"step": ref.step, "prefix": ref.prefix, "ok": not bad, "damage": bad} for ref, bad in found])
    else:
        for ref, bad in found:
            typer.echo(f"step {ref.step}: {f'{len(bad)} damaged parts' if bad else 'whole'} ({ref.prefix})")
            for error in bad:
                typer.echo(f"  {error}")
    if any(bad for _, bad in found):
        raise typer.Exit(1)


def _damage(storage: Storage, ref: CheckpointRef) -> list[str]:
    from raysharded.checkpoint import open_checkpoint

    try:
        return [str(error) for error in open_checkpoint(storage, ref.prefix).find_damage()]
    except CheckpointError as error:
        return [str(error)]


def _checkpoints(run: str) -> tuple[Storage, list[CheckpointRef]]:
    from raysharded.checkpoint import list_checkpoints, open_storage

    storage = open_storage(run)
    refs = list_checkpoints(storage)
    if not refs:
        raise CheckpointError(
            f"there are no checkpoints at {storage.url}. Give the folder of one run, "
            "<RunConfig.storage_path>/<RunConfig.name>."
        )
    return storage, refs


def _choose(storage: Storage, refs: list[CheckpointRef], step: int | None) -> CheckpointRef:
    """The committed checkpoint of a step, or the newest; of several of one step the newest save."""
    committed = [ref for ref in refs if ref.complete and step in (None, ref.step)]
    if not committed:
        steps = ", ".join(str(s) for s in sorted({ref.step for ref in refs if ref.complete})) or "none"
        what = "no committed checkpoint" if step is None else f"no committed checkpoint of step {step}"
        raise CheckpointError(f"{storage.url} has {what}; there are: {steps}.")
    return committed[-1]
