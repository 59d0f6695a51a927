"""The shipped wheel, built from the sdist, imported and run where there is no checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.ray]
"""With Ray, as one of them needs it: the wheel is built once."""


IMPORT_ALL = """
import importlib.util, json, pkgutil, raysharded
names = [module.name for module in pkgutil.walk_packages(raysharded.__path__, "raysharded.")]
elsewhere = {"raysharded.adapters.torchtitan"}  # torchtitan has an environment of its own
origins = {name: importlib.import_module(name).__file__ for name in {"raysharded", *names} - elsewhere}
origins |= {name: importlib.util.find_spec(name).origin for name in elsewhere}
print("\\n" + json.dumps(origins))
"""


def run(command: Sequence[str | Path], cwd: Path, timeout_s: float = 300) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*command], cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@dataclass(frozen=True)
class Installed:
    """The wheel, and an environment that has it and this environment's packages, but not this checkout."""

    sdist: Path
    wheel: Path
    python: Path
    site_packages: Path


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    tmp = tmp_path_factory.mktemp("wheel")
    # Built from a copy: setuptools leaves files next to the result.
    source = tmp / "source"
    source.mkdir()
    shutil.copytree(ROOT / "raysharded", source / "raysharded", ignore=shutil.ignore_patterns("__pycache__"))
    for room in ("actors", "checkpoint"):
        (source / room).symlink_to(f"raysharded/{room}")
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    (source / "tests").mkdir()
    for test in (ROOT / "tests").glob("test_*.py"):
        shutil.copy(test, source / "tests")

    build = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    run([sys.executable, "-c", build, tmp / "sdist"], cwd=source)
    (sdist,) = (tmp / "sdist").iterdir()
    with tarfile.open(sdist) as packed:
        packed.extractall(tmp / "unpacked", filter="data")
    (unpacked,) = (tmp / "unpacked").iterdir()
    run([sys.executable, "-c", build.replace("sdist", "wheel"), tmp / "wheel"], cwd=unpacked)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-index", "--no-deps", "--no-compile"]
    (wheel,) = (tmp / "wheel").iterdir()

    venv.create(tmp / "venv", with_pip=False)
    python = tmp / "venv" / "bin" / "python"
    run([*pip, "--python", python, "install", *offline, wheel], cwd=tmp)
    purelib = sysconfig.get_path("purelib", vars={"base": str(tmp / "venv")})
    # A path named in a .pth file is searched for packages, but its own .pth files (our editable install) are not read.
    Path(purelib, "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return Installed(sdist, wheel, python, Path(purelib))


def test_the_wheel_holds_the_library_alone(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as wheel:
        names = wheel.namelist()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"raysharded"}
    assert "raysharded/py.typed" in names
    assert {f"raysharded/report/page/page.{kind}" for kind in ("html", "css", "js")} <= set(names)
    assert "raysharded/metrics/grafana.json" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    shipped = {name for name in names if name.endswith(".py")}
    assert shipped == {str(path.relative_to(ROOT)) for path in (ROOT / "raysharded").rglob("*.py")}


def test_the_sdist_has_what_the_wheel_is_built_of(installed: Installed) -> None:
    with tarfile.open(installed.sdist) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    beside = {name for name in names if not name.startswith(("raysharded/", "raysharded.egg-info"))}
    assert beside - {""} == {
        "LICENSE",
        "MANIFEST.in",
        "PKG-INFO",
        "README.md",
        "pyproject.toml",
        "raysharded",
        "setup.cfg",
    }


def test_an_index_accepts_both(installed: Installed, tmp_path: Path) -> None:
    told = run([sys.executable, "-m", "twine", "check", "--strict", installed.wheel, installed.sdist], cwd=tmp_path)
    assert told.count("PASSED") == 2


@pytest.mark.long
def test_every_module_imports_outside_the_checkout(installed: Installed, tmp_path: Path) -> None:
    origins = json.loads(run([installed.python, "-c", IMPORT_ALL], cwd=tmp_path).splitlines()[-1])
    assert len(origins) == len([*(ROOT / "raysharded").rglob("*.py")])
    for name, origin in origins.items():
        assert Path(origin).is_relative_to(installed.site_packages), name


def test_the_command_is_installed(installed: Installed, tmp_path: Path) -> None:
    assert "demo" in run([installed.python.parent / "raysharded", "--help"], cwd=tmp_path)


def test_the_demo_runs_in_an_empty_folder(installed: Installed, tmp_path: Path) -> None:
    """Takes a minute: three workers are killed only when those before were replaced."""
    (tmp_path / "empty").mkdir()
    command = [
        str(installed.python.parent / "raysharded"),
        "demo",
        "--steps",
        "24",
        "--json",
        str(tmp_path / "demo.json"),
    ]
    assert "Weights identical: yes" in run(command, cwd=tmp_path / "empty", timeout_s=600)
    found = json.loads((tmp_path / "demo.json").read_text(encoding="utf-8"))
    assert (found["steps"], found["identical"], found["samples_lost"], found["problems"]) == (24, True, 0, [])
    assert sum(len(recovery["worker"]) for recovery in found["recoveries"]) == 3
    assert list((tmp_path / "empty").iterdir()) == []
