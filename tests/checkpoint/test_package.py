"""The package is light to import and cannot be imported twice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import raysharded.checkpoint
from tests.paths import ROOT


def _python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)


def test_importing_and_using_it_loads_neither_torch_nor_ray() -> None:
    code = (
        "import sys, raysharded.checkpoint as c; c.open_checkpoint, c.write_shard, c.prune, c.open_storage('x')\n"
        "print(sorted({'torch', 'ray', 'boto3', 'pyarrow'} & set(sys.modules)))"
    )
    done = _python(code, ROOT)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_it_refuses_to_be_imported_under_another_name() -> None:
    folder = Path(raysharded.checkpoint.__file__).parent.parent
    done = _python("import checkpoint", folder)
    assert "ImportError" in done.stderr
    assert "raysharded.checkpoint" in done.stderr.splitlines()[-1]


def test_every_exported_name_exists() -> None:
    for name in raysharded.checkpoint.__all__:
        assert getattr(raysharded.checkpoint, name) is not None
