"""`raysharded checkpoint ls | show`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from raysharded.cli.checkpoint.target import (
    AsJson,
    BesidePlace,
    BestOne,
    FolderPlace,
    Place,
    Run,
    RunPlace,
    Step,
    choice,
    find_place,
    key,
    open_chosen,
    signature,
)
from raysharded.cli.errors import print_json
from raysharded.cli.output import console, echo
from raysharded.display.plain_text import one_line
from raysharded.errors import CheckpointError

if TYPE_CHECKING:
    from raysharded.checkpoint import Checkpoint, CheckpointRef, Storage


_AT_ONCE = 16


def list_(run: Run, as_json: AsJson = False) -> None:
    """List the checkpoints, oldest first, and a run's saves that are not checkpoints, with the reason.

    It shows which are signed; `raysharded checkpoint verify` checks the signatures.
    If the run keeps the best by a number, each checkpoint is shown with that number, and the best is marked.
    """
    place = find_place(run)
    rows = _rows(place)
    if as_json:
        print_json(rows)
        return
    from raysharded.display.quantities import moment
    from raysharded.report.history.row_table import RowTable

    table = RowTable()
    table.add_column("step", right=True)
    table.add_column("folder", long="shorten")
    table.add_column("data files", right=True, rank=1)
    table.add_column("state")
    table.add_column("signed", rank=2)
    table.add_column("committed")
    metric = next((row["metric"] for row in rows if row["metric"] is not None), None)
    if metric is not None:
        table.add_column(one_line(metric))
    table.add_column("pins", long="shorten")
    for row in rows:
        committed = moment(row["committed_at"]) if row["committed_at"] is not None else ""
        state = "never committed" if row["state"] in ("unclaimed", "unfinished") else row["state"]
        step, files = ("" if row[name] is None else str(row[name]) for name in ("step", "files"))
        signed = "" if row["signed"] is None else "yes" if row["signed"] else "no"
        value = "" if row["value"] is None else f"{row['value']:.6g}{', the best' if row['best'] else ''}"
        numbers = [] if metric is None else [value]
        table.add_row(step, row["prefix"], files, state, signed, committed, *numbers, ", ".join(row["pins"]))
    echo(place.storage.url)
    with console() as out:
        out.print(table)
        for row in rows:
            if row["reason"]:
                out.print(one_line(row["reason"]))


def show(run: Run, step: Step = None, best: BestOne = False, as_json: AsJson = False) -> None:
    """Show the contents of a checkpoint: when and how it was written, its fingerprint, its tensors.

    Of a fork's reference, only the reference is shown. The parent that it names is not opened.
    """
    place = find_place(run)
    at = choice(step, best)
    chosen = place.choose(at) if isinstance(place, RunPlace) else None
    if chosen is not None and chosen.state == "reference":
        _show_reference(place.storage, chosen, as_json)
        return
    found = _facts(open_chosen(place, at))
    if as_json:
        print_json(found)
        return
    from raysharded.display.quantities import count, moment, size
    from raysharded.report.history.tables import facts_table

    table = facts_table()
    for name in ("url", "run", "step", "generation"):
        table.add_row(name, str(found[name]))
    table.add_row("written", f"{moment(found['created_at'])} by {found['writer']}")
    table.add_row(
        "size",
        f"{size(found['size_bytes'])} in {count(len(found['files']), 'data file')}, "
        f"{count(len(found['tensors']), 'tensor')}",
    )
    table.add_row("manifest", found["digest"])
    table.add_row("signature", signature(found["signed"]))
    for name, value in (("data", found["data"]), *found["metadata"].items()):
        if value not in ({}, None):
            parts = isinstance(value, dict) and ", ".join(f"{k} {v}" for k, v in value.items())
            table.add_row(one_line(name), parts or str(value))
    for name, tensor in found["tensors"].items():
        table.add_row(one_line(name), f"{tensor['dtype']} {tensor['shape']}")
    with console() as out:
        out.print(table)


def _show_reference(storage: Storage, ref: CheckpointRef, as_json: bool) -> None:
    from raysharded.checkpoint.retention.fork_reference import read_reference
    from raysharded.locations import join_url

    found = {
        "url": join_url(storage.url, ref.prefix),
        "state": ref.state,
        **asdict(read_reference(storage, ref.prefix)),
    }
    if as_json:
        print_json(found)
        return
    from raysharded.display.quantities import moment
    from raysharded.report.history.tables import facts_table

    table = facts_table()
    for name in ("url", "step", "parent", "prefix", "pin"):
        table.add_row(name, str(found[name]))
    table.add_row("manifest", str(found["manifest_digest"]))
    table.add_row("made", moment(float(str(found["created_at"]))))
    with console() as out:
        out.print(table)
        out.print("It refers to the checkpoint of another run. `raysharded checkpoint show PARENT` shows that one.")


def _rows(place: Place) -> list[dict[str, Any]]:
    from raysharded.checkpoint import list_pins

    if isinstance(place, FolderPlace):
        return [_opened_row(open_chosen(place, None))]
    if isinstance(place, BesidePlace):
        return [_row_beside(place, prefix) for prefix in place.prefixes]
    tags: dict[str, list[str]] = {}
    for pin in list_pins(place.storage):
        tags.setdefault(pin.prefix, []).append(pin.tag)
    with ThreadPoolExecutor(_AT_ONCE, "raysharded-manifests") as pool:
        signed = list(pool.map(lambda ref: _is_signed(place.storage, ref), place.refs))
    scored = place.scored()
    values = {one.ref.prefix: {"metric": one.metric, "value": one.value} for one in scored}
    best = scored[0].ref.prefix if scored else None
    return [
        {
            **_row(place, ref, tags.get(ref.prefix, []), one),
            **values.get(ref.prefix, {}),
            "best": ref.prefix == best,
        }
        for ref, one in zip(place.refs, signed, strict=True)
    ]


_UNSCORED = {"best": False, "metric": None, "value": None}


def _is_signed(storage: Storage, ref: CheckpointRef) -> bool | None:
    """Whether a save's manifest carries a signature, by its first bytes; None without a manifest."""
    from raysharded.checkpoint.format.encoding import HEAD_BYTES, is_signed
    from raysharded.checkpoint.format.paths import MANIFEST_NAME
    from raysharded.checkpoint.storage import NoSuchKey, NotAFile

    at = f"{ref.prefix}/{MANIFEST_NAME}"
    if at not in ref.keys:
        return None
    try:
        return is_signed(storage.read(at, 0, HEAD_BYTES))
    except (NoSuchKey, NotAFile):
        return None


def _row(place: RunPlace, ref: CheckpointRef, pins: list[str], signed: bool | None) -> dict[str, Any]:
    return {
        "step": ref.step,
        "save_id": ref.save_id,
        "prefix": ref.prefix,
        "complete": ref.complete,
        "state": ref.state,
        "reason": _parent(place, ref) if ref.state == "reference" else ref.reason,
        "generation": ref.generation,
        "digest": ref.digest,
        "signed": signed,
        "committed_at": ref.claim.created_at if ref.claim else None,
        "pins": pins,
        "files": sum(key.endswith(".safetensors") for key in ref.keys),  # as `show` counts: only data files
        **_UNSCORED,
    }


def _parent(place: RunPlace, ref: CheckpointRef) -> str:
    from raysharded.checkpoint.retention.fork_reference import read_reference
    from raysharded.checkpoint.storage import NoSuchKey

    try:
        found = read_reference(place.storage, ref.prefix)
    except (CheckpointError, NoSuchKey) as error:
        return f"step {ref.step} under {ref.prefix} refers to an unknown parent: {error}"
    return f"step {ref.step} under {ref.prefix} is that of the parent run {found.parent}, under {found.prefix} there."


def _row_beside(place: BesidePlace, prefix: str) -> dict[str, Any]:
    try:
        return _opened_row(open_chosen(FolderPlace(place.storage, prefix), None))
    except CheckpointError as error:
        nothing = dict.fromkeys(("step", "save_id", "generation", "digest", "signed", "committed_at", "files"))
        told = {"prefix": prefix, "complete": False, "state": "damaged", "reason": str(error), "pins": []}
        return {**nothing, **told, **_UNSCORED}


def _opened_row(found: Checkpoint) -> dict[str, Any]:
    return {
        "step": found.step,
        "save_id": found.manifest.save_id,
        "prefix": found.prefix,
        "complete": True,
        "state": "committed",
        "reason": "",
        "generation": found.manifest.generation,
        "digest": found.digest,
        "signed": found.signed,
        "committed_at": found.manifest.created_at,
        "pins": [],
        "files": len(found.manifest.files),
        **_UNSCORED,
    }


def _facts(found: Checkpoint) -> dict[str, Any]:
    from raysharded.locations import join_url

    manifest = found.manifest
    return {
        "url": join_url(found.storage.url, found.prefix),
        "digest": found.digest,
        "signed": found.signed,
        "signature_checked": found.signed and key() is not None,
        "version": manifest.version,
        "run": manifest.run,
        "step": manifest.step,
        "generation": manifest.generation,
        "save_id": manifest.save_id,
        "writer": manifest.writer,
        "created_at": manifest.created_at,
        "size_bytes": sum(info.size_bytes for info in manifest.tensors.values()),
        "files": {file.path: file.size_bytes for file in manifest.files},
        "data": dict(manifest.data),
        "metadata": dict(manifest.metadata),
        "tensors": {
            name: {"dtype": info.dtype, "shape": list(info.shape), "size_bytes": info.size_bytes}
            for name, info in manifest.tensors.items()
        },
    }
