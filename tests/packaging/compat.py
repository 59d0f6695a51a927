"""The lowest and the newest versions that pyproject.toml allows, tried in separate environments: `make compat`.

Parts that passed for a commit are not repeated, so it can be interrupted, or run in parts. Needs nothing but the
standard library, and is run with any Python from 3.11 on.

    make compat COMPAT="lowest newest"         # all parts: the default
    make compat COMPAT=lowest:demo,engine      # these parts
"""

from __future__ import annotations

import datetime
import os
import re
import shlex
import subprocess
import sys
import time
import tomllib
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.paths import ROOT

FOLDER = ROOT / ".venv-compat"
RESULTS = FOLDER / "results.txt"
"""A line for everything that was tried."""
EXTRAS = ("parity", "tensorboard", "huggingface")
"""Extras whose code the tests run; tokenizers come with transformers."""
PINNED_EXTRAS = ("parity",)
"""The lower bounds of the others fit neither transformers nor what `wandb` and `mlflow-skinny` have in common."""
LINTERS = {"ruff", "mypy", "import-linter", "rich"}
"""Packages of the extra `dev` that the tests do not need; rich is there for one of them."""
NEWEST_TORCH = os.environ.get("NEWEST_TORCH", "torch")
"""Argument of pip for the newest torch."""
PARTS = {
    "demo": ("-m", "raysharded", "demo"),
    "quick": ("-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "-m", os.environ.get("QUICK", "")),
    "engine": (
        *("-m", "pytest", "-q", "--reruns", "1", "--max-suite-reruns", "3", "--rerun-show-tracebacks"),
        *("tests/training", "tests/actors", "-m", "procs and not long and not gpu"),
    ),
}
"""Part -> the arguments of Python. pytest's own arguments in $PYTEST_ARGS narrow the last two."""
SHOWN = ("torch", "ray", "numpy", "pyarrow", "fsspec", "boto3", "typer", "cattrs", "rich")


def project() -> Any:
    """`[project]` of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def lowest(requirement: str) -> str | None:
    """`torch>=2.13,<2.16` -> `torch==2.13.0`; None if it has no lower bound. Three numbers, as releases are named."""
    found = re.match(r"([A-Za-z0-9_.-]+)(?:\[[^]]*\])?\s*>=\s*([0-9.]+)", requirement)
    if found is None:
        return None
    name, version = found.groups()
    return f"{name}=={version}{'.0' * (2 - version.count('.'))}"


def constraints() -> list[str]:
    """The lower bounds of all needed packages, and of extras."""
    found = project()
    asked = [
        *found["dependencies"],
        *(each for extra in PINNED_EXTRAS for each in found["optional-dependencies"][extra]),
    ]
    return [pinned for pinned in map(lowest, asked) if pinned is not None]


def tools() -> list[str]:
    """Packages of the extra `dev` that the tests need in addition to raysharded."""
    asked = project()["optional-dependencies"]["dev"]
    names = [(re.split(r"[\[><=]", each)[0], each) for each in asked]
    return [each for name, each in names if name != "raysharded" and name not in LINTERS]


def install(which: str) -> list[list[str]]:
    """The arguments of pip, one after another."""
    package = ["-e", f".[{','.join(EXTRAS)}]", *tools()]
    if which == "newest":
        return [["--upgrade", "--upgrade-strategy", "eager", NEWEST_TORCH, *package]]
    file = FOLDER / which / "constraints.txt"
    file.write_text("\n".join(constraints()) + "\n")
    torch = next(each for each in constraints() if each.startswith("torch=="))
    return [[torch], ["-c", str(file), *package]]


def main(arguments: Sequence[str]) -> int:
    """Run the requested parts; 1 if something fails."""
    ok = True
    for argument in arguments or ("lowest", "newest"):
        which, _, parts = argument.partition(":")
        if which not in ("lowest", "newest") or not set(filter(None, parts.split(","))) <= PARTS.keys():
            _say(f"{argument}: give lowest or newest, and of the parts {', '.join(PARTS)}")
            return 2
        installed = _try(which, "install")
        done = [_try(which, part) for part in (parts.split(",") if parts else PARTS) if installed]
        ok = installed and all(done) and ok
    return 0 if ok else 1


def _try(which: str, part: str) -> bool:
    """True if a part passes, now or before, for this commit."""
    environment = FOLDER / which
    stamp, state = environment / f"passed-{part}", _state(which, part)
    if stamp.exists() and stamp.read_text() == state:
        return True
    began = time.monotonic()
    python = str(environment / "bin" / "python")
    if part == "install":
        if not Path(python).exists():
            venv.create(environment, with_pip=True)
        pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
        commands = [[*pip, *arguments] for arguments in install(which)]
    else:
        narrowed = shlex.split(os.environ.get("PYTEST_ARGS", "")) if "pytest" in PARTS[part] else []
        commands = [[python, *PARTS[part], *narrowed]]
    _say(f"{which}: {part}")
    ok = all(subprocess.run(command, cwd=ROOT, check=False).returncode == 0 for command in commands)
    _note(which, part, ok, time.monotonic() - began, python)
    if ok:
        stamp.write_text(state)
    return ok


def _state(which: str, part: str) -> str:
    """The state of the code for which a part passes."""
    if part == "install":
        return "\n".join(
            [*project()["dependencies"], *tools(), *(constraints() if which == "lowest" else [NEWEST_TORCH])]
        )
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return f"{git.stdout.strip()} {os.environ.get('PYTEST_ARGS', '')}"


def _note(which: str, part: str, ok: bool, seconds: float, python: str) -> None:
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    line = f"{now}  {which:7} {part:8} {'passed' if ok else 'FAILED'}  {seconds:5.0f} s  {', '.join(_versions(python))}"
    with RESULTS.open("a") as file:
        file.write(line + "\n")
    _say(line)


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


def _versions(python: str) -> Iterator[str]:
    """Versions of the most important packages, as installed there."""
    ask = "import sys, importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in sys.argv[1:]), sep=chr(10))"
    told = subprocess.run([python, "-c", ask, *SHOWN], capture_output=True, text=True, check=False)
    yield from told.stdout.split("\n")[:-1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
