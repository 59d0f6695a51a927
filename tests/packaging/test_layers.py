"""The layers in pyproject.toml name every module: a new one cannot be forgotten. No modules import each other."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.paths import ROOT
from tools.imports import cycles, imports, imports_below, sources


def layered() -> set[str]:
    """The modules and packages that the layers contract names."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [layer for contract in contracts if contract["type"] == "layers" for layer in contract["layers"]]
    return set(re.findall(r"raysharded[\w.]*", " ".join(layers)))


def modules() -> list[str]:
    """Every module of the library that holds code, by its dotted name."""
    files = (path for path in (ROOT / "raysharded").rglob("*.py") if path.name != "__init__.py")
    return sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files)


def test_every_module_is_in_a_layer() -> None:
    names = layered()
    missing = [module for module in modules() if not any(f"{module}.".startswith(f"{name}.") for name in names)]
    assert missing == [], "give each its layer under [tool.importlinter] in pyproject.toml"


def test_no_module_is_imported_by_what_it_imports_not_even_for_types() -> None:
    assert cycles(imports_below(ROOT)) == []


@pytest.mark.parametrize(
    ("a", "b", "found"),
    [
        ("from raysharded.b import B", "from raysharded.a import A", [["raysharded.a", "raysharded.b"]]),
        ("def f():\n    import raysharded.b", "from raysharded import A", [["raysharded.a", "raysharded.b"]]),
        ("if TYPE_CHECKING:\n    from raysharded import b", "import raysharded.a", [["raysharded.a", "raysharded.b"]]),
        ("from raysharded.b import B", "import torch", []),
    ],
)
def test_a_cycle_is_found(tmp_path: Path, a: str, b: str, found: list[list[str]]) -> None:
    (tmp_path / "raysharded").mkdir()
    for name, text in (("__init__", "from raysharded.a import A"), ("a", a), ("b", b)):
        (tmp_path / "raysharded" / f"{name}.py").write_text(text)
    assert cycles(imports(sources(tmp_path))) == found
