"""Places in the code that decide about its bits, its order or its refusals, with one change for each.

Found by the syntax tree, never chosen by hand: comparisons that are turned, orders that are reversed, seeds that lose
an argument, and conditions of a skip that are negated.
"""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path, PurePosixPath
from random import Random
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["comparison", "order", "seed", "skip"]
KINDS: tuple[Kind, ...] = ("comparison", "order", "seed", "skip")

_MODULES_OF = {
    "actors/comm": "fsdp_collectives",
    "actors/compilation": "ahead_of_join compiled_blocks",
    "actors/guards": "forwards inputs parameters",
    "actors/in_place": "fsdp_tree unit_hooks",
    "actors/model": (
        "build constants construction drawn_constants init_batches init_weights inventory meta_watch param_layout "
        "parameter_marks sharded_model"
    ),
    "actors/numerics": (
        "bit_digest column_sums exact_sums grad_norm microbatch_schedule norm_blocks step_consensus summation_tree"
    ),
    "actors/optimizer": (
        "built_optimizer held_parameters inner_optimizers kept_state learning_rate read_watch shard_optimizer "
        "step_hooks trial trial_outcomes trial_tensors"
    ),
    "actors/reduction": "gradient_exchange replica_sum tree_reducer",
    "actors/shards": "async_copy device_state erasure mirror parity position rebuild restore store transfer",
    "actors/step": ("agreement evaluation forward_backward gradient meetings parameter_use recomputation update"),
    "actors/step/proofs": "attribute_proof audit audit_verdict evaluation_proof first_step_proof repeated_pass",
    "actors/task_calls": "object_contents plain_attributes task_numbers",
    "data": "ledger loader order",
    "data/access": "generators repeat_check",
    ".": "numerics overrides",
}
MODULES = tuple(
    str(PurePosixPath("raysharded", folder, f"{name}.py"))
    for folder, names in _MODULES_OF.items()
    for name in names.split()
)
"""Modules that decide about the values that a worker computes, and about its data."""

_TURNED: dict[type[ast.cmpop], str] = {
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
_SEEDS = ("manual_seed", "seed_torch", "seed_without_a_driver", "derive_seed", "default_rng", "seed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One change of one line."""

    kind: Kind
    path: str
    line: int
    column: int
    """Column of the first changed character, from 0 on, in UTF-8 bytes."""
    before: str
    after: str

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line}:{self.column} {self.kind}"

    def applied(self, source: str) -> str:
        """The file's text with the change. Raises ValueError if it does not have the text that is to be changed."""
        lines = source.encode().split(b"\n")
        line, before = lines[self.line - 1], self.before.encode()
        if line[self.column : self.column + len(before)] != before:
            raise ValueError(f"{self.name}: {self.before!r} is not there")
        lines[self.line - 1] = line[: self.column] + self.after.encode() + line[self.column + len(before) :]
        return b"\n".join(lines).decode()


def drawn(root: Path, seed: int, count: int) -> list[Mutant]:
    """`count` of all mutants of `MODULES`, by a seed: as many of each kind, as far as there are. Equal code gives equal
    mutants."""
    was_enabled = gc.isenabled()
    gc.disable()  # no tree is garbage, and the search would take longer than the parser
    try:
        found = [mutant for path in MODULES for mutant in mutants_of(path, (root / path).read_text(encoding="utf-8"))]
    finally:
        if was_enabled:
            gc.enable()
    random = Random(seed)
    by_kind = [
        random.sample(of_kind, len(of_kind)) for kind in KINDS if (of_kind := [m for m in found if m.kind == kind])
    ]
    in_turns = [mutant for turn in zip_longest(*by_kind) for mutant in turn if mutant is not None]
    return [mutant for mutant in in_turns if mutant.after != mutant.before][:count]


def of_module(path: str, root: Path, folders: Sequence[str]) -> list[str]:
    """Those of these test files, and of those in these folders, that import a module or have its name; else those of
    its package."""
    package, name = PurePosixPath(path).parent, PurePosixPath(path).stem
    dotted = ".".join(package.parts)
    imports = re.compile(rf"^ *(from {dotted}\.{name} import|from {dotted} import .*\b{name}\b)", re.MULTILINE)
    files = {path for path in map(root.joinpath, folders) if path.is_file()}
    found = sorted(files.union(*((root / folder).rglob("test_*.py") for folder in folders)))
    importing = [
        file for file in found if file.stem == f"test_{name}" or imports.search(file.read_text(encoding="utf-8"))
    ]
    of_package = [file for file in found if file.parent == root.joinpath("tests", *package.parts[1:])]
    return [str(file.relative_to(root)) for file in importing or of_package]


def mutants_of(path: str, source: str) -> list[Mutant]:
    """All of a module, in the order of its lines."""
    lines = source.encode().split(b"\n")
    found = [
        Mutant(kind=kind, path=path, line=node.lineno, column=node.col_offset, before=_text(node, lines), after=after)
        for kind, node, after in _changes(ast.parse(source), lines)
        if node.lineno == node.end_lineno
    ]
    return sorted(found, key=lambda mutant: (mutant.line, mutant.column, mutant.kind, mutant.after))


def _changes(tree: ast.AST, lines: list[bytes]) -> Iterator[tuple[Kind, ast.expr, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _TURNED:
                yield "comparison", node, f"{_text(left, lines)} {_TURNED[type(op)]} {_text(right, lines)}"
            case ast.Call(func=ast.Name(id="sorted")):
                yield "order", node, f"{_text(node, lines)}[::-1]"
            case ast.Call(func=ast.Name(id="reversed"), args=[argument]):
                yield "order", node, f"iter({_text(argument, lines)})"
            case ast.Call(func=ast.Name() | ast.Attribute() as function, args=[_, *_] as args) if _is_seed(function):
                kept = ", ".join(_text(one, lines) for one in args[:-1])
                yield "seed", node, f"{_text(function, lines)}({kept or '0'})"
            case ast.If(test=test, body=[ast.Return() | ast.Continue() | ast.Raise() | ast.Break()]):
                yield "skip", test, f"not ({_text(test, lines)})"


def _is_seed(function: ast.expr) -> bool:
    name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
    return name in _SEEDS


def _text(node: ast.expr, lines: list[bytes]) -> str:
    """As `ast.get_source_segment`, which splits the whole source for each node."""
    last_number, end = node.end_lineno, node.end_col_offset
    assert last_number is not None
    first, *more = lines[node.lineno - 1 : last_number]
    if not more:
        return first[node.col_offset : end].decode()
    return b"\n".join([first[node.col_offset :], *more[:-1], more[-1][:end]]).decode()


def table(results: Sequence[tuple[Mutant, str]]) -> str:
    """The results in words: how many of each kind were found, and those that were not."""
    rows = [f"{'kind':16} {'tried':>6} {'found':>6}"]
    kinds = sorted({mutant.kind for mutant, _ in results})
    for kind in kinds:
        of_kind = [result for mutant, result in results if mutant.kind == kind]
        rows.append(f"{kind:16} {len(of_kind):6} {sum(result != 'survived' for result in of_kind):6}")
    found = sum(result != "survived" for _, result in results)
    rows.append(f"{'all':16} {len(results):6} {found:6}   {100 * found / max(1, len(results)):.1f} %")
    rows += [
        f"not found: {mutant.name}: {mutant.before!r} -> {mutant.after!r}"
        for mutant, result in results
        if result == "survived"
    ]
    return "\n".join(rows)
