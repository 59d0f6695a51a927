"""Old modules still work: the same objects under their old names, with a warning at the line that imports them."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from raysharded.deprecation import MOVED_MODULES, REMOVED_IN
from tests.golden.public_names import LIST
from tests.paths import ROOT


def public_names(module: str) -> set[str]:
    """The names of a module that were ever public."""
    return set(re.findall(rf"^{re.escape(module)}\.(\w+)$", LIST.read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.parametrize(("old", "new"), MOVED_MODULES.items())
def test_an_old_module_has_the_names_of_the_new_one_and_warns_who_imports_it(
    old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        importlib.import_module(old.rpartition(".")[0])  # the package of an old module warns by itself
        monkeypatch.delitem(sys.modules, old, raising=False)
        warned.clear()
        importlib.import_module(old)
    assert [(each.category, str(each.message)) for each in warned] == [
        (DeprecationWarning, f"{old} is deprecated and will be removed in {REMOVED_IN}; use {new}.")
    ]
    module = importlib.import_module(new)
    names = public_names(old) or {name for name in vars(module) if not name.startswith("_")}
    for name in names - {each.rpartition(".")[2] for each in MOVED_MODULES}:
        assert getattr(sys.modules[old], name) is getattr(module, name)


def test_the_warning_points_at_the_line_that_imports(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nfrom raysharded.driver.events import Event\n")
    done = subprocess.run(
        [sys.executable, "-W", "default", script], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert f"{script}:2: DeprecationWarning: raysharded.driver.events is deprecated" in done.stderr


def test_the_table_has_every_old_module() -> None:
    shims = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in (ROOT / "raysharded").rglob("*.py")
        if "\nwarn_of_old_module(__name__)" in path.read_text(encoding="utf-8")
    }
    assert shims == MOVED_MODULES.keys()
