"""`raysharded doctor`: whether this machine can run it."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer

import raysharded
from raysharded.cli.boundary import console, print_json
from raysharded.errors import StorageError

_PACKAGES = ("torch", "ray", "pyarrow", "fsspec", "boto3", "safetensors", "numpy")
_OLDEST_PYTHON = (3, 11)


def doctor(
    storage: Annotated[str | None, typer.Option(metavar="URL", help="Also write to, and read from, this storage.")] = (
        None
    ),
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Say what this machine has, and what is missing. Exits with 1 if something is."""
    facts, problems = look(storage)
    if as_json:
        print_json({**facts, "problems": problems, "ok": not problems})
    else:
        from raysharded.obs.tables import facts_table, verdict

        table = facts_table()
        for name, value in facts.items():
            table.add_row(name, ", ".join(value) or "none" if isinstance(value, list) else str(value))
        for problem in problems:
            table.add_row("problem", verdict(good=False, text=problem))
        console().print(table)
    if problems:
        raise typer.Exit(1)


def look(storage: str | None) -> tuple[dict[str, Any], list[str]]:
    """(what there is, what is wrong with it)."""
    problems: list[str] = []
    facts: dict[str, Any] = {"raysharded": raysharded.__version__, "python": platform.python_version()}
    if sys.version_info < _OLDEST_PYTHON:
        problems.append(f"Python {facts['python']} is too old. Use Python 3.11 or later.")
    if sys.platform != "linux":
        problems.append(f"{platform.system()} is not supported. Use Linux.")
    for package in _PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            problems.append(f"{package} is not installed. Run `pip install raysharded` again.")
    facts["cpus"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts["gpus"] = _gpus(problems)
    if storage is not None:
        facts["storage"] = _storage(storage, problems)
    return facts, problems


def _gpus(problems: list[str]) -> list[str]:
    try:
        import torch
    except (ImportError, OSError) as error:  # a library that it needs is missing
        problems.append(f"torch cannot be imported: {error}. Install it again.")
        return []
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _storage(url: str, problems: list[str]) -> str:
    from raysharded.checkpoint import check_writable, open_storage

    try:
        storage = open_storage(url)
        check_writable(storage)
    except StorageError as error:
        problems.append(str(error))
        return f"{url}: not writable"
    return f"{storage.url}: writable"
