"""A run's numbers as a table, from its journal's entries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def metrics_table(entries: Iterable[Mapping[str, Any]]) -> Any:  # pyarrow's Table; it has no annotations
    """One row per step, oldest first, with the last word on each: `step`, `at`, `loss`, `gradient_norm`, `lr`,
    `workers`, the task's metrics and `evaluation.*`; null where a step does not have a number."""
    import pyarrow as pa

    rows: dict[int, dict[str, Any]] = {}
    for entry in entries:
        back = _back_to(entry)
        if back is not None:
            rows = {step: row for step, row in rows.items() if step <= back}
        elif entry["kind"] == "step":
            rows[int(entry["step"])] = _row(entry)
    names = list(dict.fromkeys(["step", "at", "loss", *(name for row in rows.values() for name in row)]))
    whole = {"step", "workers"}
    schema = pa.schema([(name, pa.int64() if name in whole else pa.float64()) for name in names])
    return pa.Table.from_pylist([rows[step] for step in sorted(rows)], schema=schema)


def _back_to(entry: Mapping[str, Any]) -> int | None:
    """The step after which everything is computed anew, and may come out otherwise."""
    match entry["kind"]:
        case "rewind":
            return int(entry["to_step"])
        case "corruption":
            return int(entry["verified_step"])
    return None


def _row(entry: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"step": int(entry["step"]), "at": float(entry["at"]), "workers": int(entry["workers"])}
    row |= {name: float(entry[name]) for name in ("loss", "gradient_norm", "lr") if entry.get(name) is not None}
    row |= {name: float(value) for name, value in (entry.get("metrics") or {}).items()}
    return row | {f"evaluation.{name}": float(value) for name, value in (entry.get("evaluation") or {}).items()}
