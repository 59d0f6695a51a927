"""`raysharded doctor`: tests whether this machine can run raysharded."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer

import raysharded
from raysharded.cli import diagnostics, machine
from raysharded.cli.errors import AsJson, print_json
from raysharded.cli.output import console
from raysharded.errors import StorageError

_PACKAGES = ("torch", "ray", "pyarrow", "fsspec", "boto3", "safetensors", "numpy")
_OLDEST_PYTHON = (3, 11)


def doctor(
    url: Annotated[
        str | None,
        typer.Argument(metavar="[URL]", help="Also test this storage: writing, conditional writes, its clock."),
    ] = None,
    storage: Annotated[str | None, typer.Option(metavar="URL", help="Alias of URL.")] = (None),
    self_test: Annotated[
        bool,
        typer.Option(
            "--self-test",
            help="Also train a tiny model on one worker, and on two of which one is killed, and compare (seconds).",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what this machine has, and what is missing. Exits with 1 if anything is."""
    facts, problems = look()
    findings = try_out(url or storage)
    if self_test:
        findings.append(diagnostics.self_test())
    problems += [f"{found.name}: {found.advice}" for found in findings if not found.ok]
    facts |= {found.name: found.found for found in findings if found.name == "storage"}
    if as_json:
        tried = [asdict(found) for found in findings]
        print_json({**facts, "checks": tried, "problems": problems, "ok": not problems})
    else:
        from raysharded.report.history.tables import facts_table, verdict

        table = facts_table()
        for name, value in facts.items():
            table.add_row(name, ", ".join(value) or "none" if isinstance(value, list) else str(value))
        for found in findings:
            if found.name != "storage":
                table.add_row(
                    found.name, f"{found.found}. {found.advice}" if found.ok and found.advice else found.found
                )
        for problem in problems:
            table.add_row("problem", verdict(good=False, text=problem))
        with console() as out:
            out.print(table)
    if problems:
        raise typer.Exit(1)


def try_out(url: str | None) -> list[diagnostics.Finding]:
    """The findings of tests; takes about three seconds, most of them for imports."""
    runs = diagnostics.ray()
    findings = [*diagnostics.versions(), runs, *([machine.which_ray()] if runs.ok else [])]
    findings += [*diagnostics.collectives(), diagnostics.shared_memory()]
    findings += [machine.extras(), machine.home(), machine.memory(), machine.open_files()]
    if url is None:
        return findings
    from raysharded.checkpoint import open_storage

    try:
        return [*findings, *diagnostics.storage(open_storage(url))]
    except StorageError as error:
        return [*findings, diagnostics.Finding(name="storage", found=f"{url}: failed", ok=False, advice=str(error))]


def look() -> tuple[dict[str, Any], list[str]]:
    """(facts about this machine, problems)."""
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
    return facts, problems


def _gpus(problems: list[str]) -> list[str]:
    try:
        from raysharded.actors.device.accelerator import accelerator
    except (ImportError, OSError) as error:  # a library that torch needs is missing
        # With dill installed, which `datasets` needs, torch's import takes a folder of temporary files.
        advice = "Set TMPDIR to a folder that can be written" if machine.temporary_problem() else "Install it again"
        problems.append(f"torch cannot be imported: {error}. {advice}.")
        return []
    return accelerator().names()
