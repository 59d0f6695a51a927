"""The packages that may be loaded: importing raysharded is cheap, and the pure packages are pure."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest

import raysharded
from raysharded.deprecation import MOVED_MODULES
from tests.forked import in_a_fork
from tests.paths import ROOT

HEAVY = ("torch", "ray", "pyarrow", "boto3")

LOADED = """
import json, sys
before = set(sys.modules)
{code}
print("\\n" + json.dumps(sorted({{name.partition(".")[0] for name in set(sys.modules) - before}})))
"""

HELP = """
import runpy
sys.argv = ["raysharded", "--help"]
try:
    runpy.run_module("raysharded", run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert not end.code, end.code
"""


def packages_loaded_by(code: str) -> set[str]:
    """The top-level packages that a fresh interpreter loads for `code`."""
    command = [sys.executable, "-c", LOADED.format(code=code)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr
    return set(json.loads(run.stdout.splitlines()[-1]))


def test_importing_raysharded_loads_the_standard_library_alone() -> None:
    assert packages_loaded_by("import raysharded") - sys.stdlib_module_names == {"raysharded"}


def test_help_loads_nothing_heavy() -> None:
    assert packages_loaded_by(HELP).isdisjoint(HEAVY)


@pytest.mark.parametrize("module", ["config", "errors", "ids", "clock", "task"])
def test_the_lowest_layer_loads_the_standard_library_alone(module: str) -> None:
    loaded = packages_loaded_by(f"import raysharded.{module}")
    assert loaded - sys.stdlib_module_names == {"raysharded"}


def modules_under(package: str) -> list[str]:
    files = (ROOT / "raysharded" / package).rglob("[!_]*.py")
    found = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files}
    return sorted(found - MOVED_MODULES.keys())


def test_pure_modules_load_neither_torch_nor_ray() -> None:
    packages = ("layout", "journal", "protocol", "ownership", "driver", "report")
    pure = [module for package in packages for module in modules_under(package)]
    assert {"raysharded.driver.handlers.worker_loss", "raysharded.layout.reshard.planner"} <= {*pure}
    assert packages_loaded_by("\n".join(f"import {module}" for module in pure)).isdisjoint({"torch", "ray"})


def load_all(modules: list[str]) -> set[str]:
    """All packages that a process with the engine has after loading these modules."""
    for module in modules:
        importlib.import_module(module)
    return {name.partition(".")[0] for name in sys.modules}


def test_checkpoint_data_checks_and_the_engine_work_without_ray() -> None:
    modules = [
        *modules_under("checkpoint"),
        *modules_under("data"),
        *modules_under("preflight"),
        "raysharded.actors.step.engine",
    ]
    loaded = in_a_fork(load_all, modules)
    assert {"torch", "pyarrow", "raysharded"} <= loaded
    assert "ray" not in loaded


def test_no_other_module_than_an_adapter_imports_transformers() -> None:
    loaded = in_a_fork(load_all, ["raysharded.trainer", "raysharded.actors.worker", "raysharded.adapters.hf_arguments"])
    assert {"torch", "raysharded"} <= loaded
    assert loaded.isdisjoint({"transformers", "accelerate", "peft"})


def test_every_exported_name_resolves() -> None:
    for name in raysharded.__all__:
        assert getattr(raysharded, name) is not None


def test_packages_of_the_docs_are_attributes_that_load_neither_torch_nor_ray() -> None:
    names = ["checkpoint", "data", "errors", "metrics", "report", "testing"]
    told = "".join(f"raysharded.{name}; " for name in names)
    loaded = packages_loaded_by(f"import raysharded; there = dir(raysharded); {told}assert {{*{names}}} <= {{*there}}")
    assert loaded.isdisjoint({"torch", "ray"})


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        _ = raysharded.Trainer
