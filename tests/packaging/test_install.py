"""The lines with which a reader installs raysharded, from the pages themselves, where nothing is installed yet.

They need a package index. Where pip finds no CPU wheel of torch it takes one of gigabytes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from raysharded.cli.machine import EXTRAS
from tests.docs.blocks import blocks, page
from tests.paths import ROOT

pytestmark = pytest.mark.long

PIP_S = 1800.0
KEPT = re.compile(r"HOME|LANG|TMPDIR|PIP_.*|SSL_.*|(?i:.*_proxy)")
"""Variables that a shell keeps: settings of pip and of the network, none that names packages or a Python."""


def shell(script: str, cwd: Path) -> str:
    """The output of a shell that has this Python on its PATH, but none of its packages. It ends at the first error."""
    env = {name: value for name, value in os.environ.items() if KEPT.fullmatch(name)}
    env["PATH"] = f"{sys.base_prefix}/bin:/usr/bin:/bin"
    done = subprocess.run(
        ["bash", "-ec", script], cwd=cwd, env=env, capture_output=True, text=True, timeout=PIP_S, check=False
    )
    assert done.returncode == 0, f"{script}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@dataclass(frozen=True)
class Installed:
    """A copy of this checkout in which the README's lines were executed, and what they printed."""

    folder: Path
    told: str

    def run(self, script: str) -> str:
        """The output of commands in its environment."""
        return shell(f". .venv/bin/activate\n{script}", self.folder)

    def extras(self) -> tuple[set[str], str]:
        """The extras that doctor finds, and what it advises."""
        checks: list[dict[str, Any]] = json.loads(self.run("raysharded doctor --json || true"))["checks"]
        (extras,) = (check for check in checks if check["name"] == "extras")
        return set(extras["found"].split(", ")) - {"none"}, extras["advice"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("install") / "raysharded"
    built = shutil.ignore_patterns("__pycache__", ".*", "*.egg-info", "build", "dist")
    shutil.copytree(ROOT, folder, symlinks=True, ignore=built)
    (block,) = blocks(page("README.md"), "bash")
    assert block.startswith("python3 -m venv")
    return Installed(folder, shell(block, folder))


def test_the_lines_of_the_readme_install_it_and_its_first_example_runs(installed: Installed) -> None:
    shown = re.compile(r"^(?:3 workers, one killed by SIGKILL|1 worker, undisturbed): +(\w{32})$", re.MULTILINE)
    with_a_loss, undisturbed = shown.findall(installed.told)
    assert with_a_loss == undisturbed


def test_every_extra_installs_with_the_pip_of_a_new_environment_and_doctor_finds_it(installed: Installed) -> None:
    lines = re.findall(r"^\| `(pip install '\.\[(\w+)\]')` \|", page("quickstart.md").read_text("utf-8"), re.MULTILINE)
    assert {extra for _, extra in lines} == EXTRAS.keys()
    found, advice = installed.extras()
    assert found == set()
    assert all(f"{extra} ({use})" in advice for extra, (_, use) in EXTRAS.items())
    there = set()
    for line, extra in lines:
        installed.run(f"{line}\npip check")
        there.add(extra)
        assert installed.extras()[0] == there
