"""Take out the checks of a user's loop one at a time, and look whether a test misses each.

`python -m tests.session.removed_checks FOLDER`: tries every check of `MODULES` and `FUNCTIONS` in a work tree of the
current commit, with `pass` in its place, against the files of `TESTS` in which it is reached. Results are kept in
FOLDER, and not repeated.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.paths import ROOT

MODULES = tuple(
    f"raysharded/actors/{name}.py"
    for name in (
        "model/meta_watch",
        "optimizer/held_parameters",
        "optimizer/registered_state",
        "session/built_model",
        "session/held_out",
        "session/loop_checks",
        "session/loop_errors",
        "session/own_collectives",
        "session/parameter_tensors",
        "session/step_comparisons",
        "session/user_session",
        "session/user_step",
        "step/proofs/evaluation_proof",
    )
)
FUNCTIONS = {
    "raysharded/actors/reduction/tree_reducer.py": ("require_backward",),
    "raysharded/actors/step/meetings.py": ("_begin", "meet_alike", "settle"),
}
"""Functions with checks of loops, in modules with others."""
TESTS = (
    "tests/session/test_lost_changes.py",
    "tests/session/test_misuse.py",
    "tests/session/test_modes_between_steps.py",
    "tests/session/test_in_a_step.py",
    "tests/session/test_behind_a_step.py",
    "tests/session/test_registered_state.py",
    "tests/session/test_own_data.py",
    "tests/session/test_call_form.py",
    "tests/session/test_end_of_a_loop.py",
    "tests/session/test_parameter_tensors.py",
    "tests/session/test_proven_evaluations.py",
    "tests/session/test_replaced_objects.py",
    "tests/session/test_registered_schedulers.py",
    "tests/session/test_values_before_shard.py",
    "tests/session/test_late_hooks.py",
)
LIMIT_S = 600.0
_REACHED = "RAYSHARDED_CHECKS_REACHED"
"""Environment variable: file to which each check that is reached adds a line."""


def checks(module: str) -> list[ast.Raise]:
    """The checks of a module in the order of lines.

    A bare `raise`, which passes an error on, is none, nor is CollectiveAborted, by which a step ends without a mistake.
    """
    tree = ast.parse((ROOT / module).read_text(encoding="utf-8"))
    of_loops: list[ast.AST] = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in FUNCTIONS.get(module, ())
    ]
    assert of_loops or module not in FUNCTIONS, f"{module} has no {FUNCTIONS[module]}"
    raised = {
        node for part in of_loops or [tree] for node in ast.walk(part) if isinstance(node, ast.Raise) and node.exc
    }
    found = [node for node in raised if "CollectiveAborted" not in ast.unparse(node)]
    return sorted(found, key=lambda node: node.lineno)


def without(source: str, check: ast.Raise) -> str:
    """The module's source with `pass` in the place of a check."""
    lines = source.splitlines(keepends=True)
    lines[check.lineno - 1 : check.end_lineno] = [f"{' ' * check.col_offset}pass\n"]
    return "".join(lines)


def noting(source: str, module: str) -> str:
    """The module's source in which each check that is reached adds `MODULE:LINE` to a file."""
    lines = source.splitlines(keepends=True)
    for check in checks(module):
        line, column = lines[check.lineno - 1], check.col_offset
        note = f"open(__import__('os').environ[{_REACHED!r}], 'a').write('{module}:{check.lineno}\\n'); "
        lines[check.lineno - 1] = f"{line[:column]}{note}{line[column:]}"
    return "".join(lines)


def reached(tree: Path, folder: Path) -> dict[str, list[str]]:
    """`MODULE:LINE` of each check that is reached -> the files of `TESTS` in which it is. Raises ValueError if a test
    fails, as a check that is removed could not be found by it."""
    found: dict[str, list[str]] = {}
    sources = {module: (tree / module).read_text(encoding="utf-8") for module in (*MODULES, *FUNCTIONS)}
    for module, source in sources.items():
        (tree / module).write_text(noting(source, module), encoding="utf-8")
    try:
        for test in TESTS:
            notes = folder / "reached.txt"
            notes.write_text("")
            if failed := first_failure(tree, [test], {_REACHED: str(notes)}):
                raise ValueError(f"{failed} fails with all checks in place")
            for check in set(notes.read_text().split()):
                found.setdefault(check, []).append(test)
    finally:
        for module, source in sources.items():
            (tree / module).write_text(source, encoding="utf-8")
    return found


def first_failure(tree: Path, tests: Sequence[str], variables: Mapping[str, str] | None = None) -> str:
    """The first test of these files that fails in a work tree; empty if all pass."""
    options = ("-x", "-q", "-n", "2", "--tb=no", "--no-header", "-p", "no:cacheprovider", "-m", "not long and not ray")
    tried = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", **(variables or {})},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    failed = [line.partition(" ")[2] for line in tried.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failed[0].partition(" - ")[0] if failed else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    tree, kept = folder / "tree", folder / "results.jsonl"
    if not tree.exists():
        subprocess.run(["git", "-C", str(ROOT), "worktree", "add", "--detach", str(tree), "HEAD"], check=True)
    rows = [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()] if kept.exists() else []
    known = {row["check"] for row in rows}
    map_file = folder / "reached.json"
    if not map_file.exists():
        map_file.write_text(json.dumps(reached(tree, folder), indent=1), encoding="utf-8")
    by_check = json.loads(map_file.read_text(encoding="utf-8"))
    for module in (*MODULES, *FUNCTIONS):
        path = tree / module
        source = path.read_text(encoding="utf-8")
        for check in checks(module):
            name = f"{module}:{check.lineno}"
            if name in known:
                continue
            tests = by_check.get(name, [])
            path.write_text(without(source, check), encoding="utf-8")
            try:
                found = first_failure(tree, tests) if tests else ""
            except subprocess.TimeoutExpired:
                found = f"no end within {LIMIT_S:.0f} s"
            finally:
                path.write_text(source, encoding="utf-8")
            with kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"check": name, "found": found}) + "\n")
            sys.stdout.write(f"{name}: {found or ('MISSED BY ALL TESTS' if tests else 'NOT REACHED BY A TEST')}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
