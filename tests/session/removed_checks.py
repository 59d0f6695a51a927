"""Take out the checks of a user's loop one at a time, and look whether a test misses each.

`python -m tests.session.removed_checks FOLDER`: tries every `raise` of `MODULES` and `FUNCTIONS` in a work tree of the
current commit, with `pass` in its place. Results are kept in FOLDER, and not repeated.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
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
        "session/parameter_tensors",
        "session/step_comparisons",
        "session/user_session",
        "session/user_step",
        "step/proofs/evaluation_proof",
    )
)
FUNCTIONS = {
    "raysharded/actors/reduction/tree_reducer.py": ("require_backward",),
    "raysharded/actors/step/step.py": ("meet", "meet_alike", "register"),
}
"""Functions with checks of loops, in modules with others."""
TESTS = (
    "tests/session/test_lost_changes.py",
    "tests/session/test_misuse.py",
    "tests/session/test_in_a_step.py",
    "tests/session/test_behind_a_step.py",
    "tests/session/test_registered_state.py",
    "tests/session/test_call_form.py",
    "tests/session/test_end_of_a_loop.py",
    "tests/session/test_parameter_tensors.py",
    "tests/session/test_proven_evaluations.py",
    "tests/session/test_replaced_objects.py",
)
LIMIT_S = 600.0


def checks(module: str) -> Iterator[tuple[int, str]]:
    """(line of a `raise`, the module's source without it); a bare `raise`, which passes an error on, is none."""
    source = (ROOT / module).read_text(encoding="utf-8")
    lines, tree = source.splitlines(keepends=True), ast.parse(source)
    of_loops: list[ast.AST] = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in FUNCTIONS.get(module, ())
    ]
    assert of_loops or module not in FUNCTIONS, f"{module} has no {FUNCTIONS[module]}"
    for node in (node for part in of_loops or [tree] for node in ast.walk(part)):
        if isinstance(node, ast.Raise) and node.exc is not None and node.end_lineno is not None:
            indent = " " * node.col_offset
            yield node.lineno, "".join([*lines[: node.lineno - 1], f"{indent}pass\n", *lines[node.end_lineno :]])


def first_failure(tree: Path) -> str:
    """The first test that fails in a work tree; empty if all pass."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-n",
        "2",
        "--tb=no",
        "--no-header",
        "-p",
        "no:cacheprovider",
    ]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    tried = subprocess.run(
        [*command, "-m", "not long and not ray", *TESTS],
        cwd=tree,
        env=environment,
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
    known = {(row["module"], row["line"]) for row in rows}
    for module in (*MODULES, *FUNCTIONS):
        path = tree / module
        source = path.read_text(encoding="utf-8")
        for line, without in checks(module):
            if (module, line) in known:
                continue
            path.write_text(without, encoding="utf-8")
            try:
                found = first_failure(tree)
            except subprocess.TimeoutExpired:
                found = f"no end within {LIMIT_S:.0f} s"
            finally:
                path.write_text(source, encoding="utf-8")
            with kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"module": module, "line": line, "found": found}) + "\n")
            sys.stdout.write(f"{module}:{line}: {found or 'MISSED BY ALL TESTS'}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
