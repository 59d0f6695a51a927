"""The layers in pyproject.toml name every module: a new one cannot be forgotten."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def layered() -> set[str]:
    """The modules and packages that the layers contract names."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [layer for contract in contracts if contract["type"] == "layers" for layer in contract["layers"]]
    return set(re.findall(r"raysharded[\w.]*", " ".join(layers))) - {"raysharded.checkpoint"}


def modules() -> list[str]:
    """Every module of the library that holds code, by its dotted name."""
    files = (path for path in (ROOT / "raysharded").rglob("*.py") if path.name != "__init__.py")
    return sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files)


def test_every_module_is_in_a_layer() -> None:
    names = layered()
    missing = [module for module in modules() if not any(f"{module}.".startswith(f"{name}.") for name in names)]
    assert missing == [], "give each its layer under [tool.importlinter] in pyproject.toml"
