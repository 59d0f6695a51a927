"""CUDA and NCCL are named in `raysharded.actors.device` alone, and the checkpoint library, which is below it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.paths import PACKAGE

SEAM = (PACKAGE / "actors" / "device", PACKAGE / "checkpoint")
MODULES = ("cuda", "accelerator", "mtia", "xpu")
"""Modules of torch with streams, events and devices."""
ATTRIBUTES = ("is_cuda", "record_stream", "is_pinned", "ProcessGroupNCCL", "NCCL")
TEXTS = ("cuda", "nccl")
ANY_NAME = re.compile("|".join((*MODULES, *ATTRIBUTES, *TEXTS, "pin_memory")))
"""Finds a name in every source in which `named` finds one, and in others, as in comments."""


def named(source: str) -> Iterator[str]:
    """Names of a kind of device in the code of a module."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr=attr) if attr in MODULES:
                yield f"torch.{attr}"
            case ast.Attribute(attr=attr) if attr in ATTRIBUTES:
                yield attr
            case ast.Compare(left=left, comparators=[*others]):
                texts = [one.value for one in (left, *others) if isinstance(one, ast.Constant)]
                yield from (str(text) for text in texts if text in TEXTS)
            case ast.Call(func=function, args=args, keywords=keywords):
                yield from (str(one.value) for one in args if isinstance(one, ast.Constant) and one.value in TEXTS)
                of_torch = isinstance(function, ast.Attribute) and ast.unparse(function.value) == "torch"
                yield from (keyword.arg for keyword in keywords if of_torch and keyword.arg == "pin_memory")
            case ast.Import(names=names) if any(name.name.startswith("torch.cuda") for name in names):
                yield "import torch.cuda"
            case ast.ImportFrom(module=module) if module is not None and module.startswith("torch.cuda"):
                yield "import torch.cuda"


@pytest.mark.parametrize(
    "source",
    [
        "torch.cuda.synchronize()",
        "if x.is_cuda: pass",
        "x.record_stream(y)",
        "torch.empty(3, pin_memory=True)",
        "if device.type == 'cuda': pass",
        "torch.device('cuda', 0)",
        "dist.init_process_group('nccl')",
        "torch.accelerator.current_stream()",
        "dist.ProcessGroupNCCL.Options()",
        "from torch.cuda import Stream",
    ],
)
def test_a_use_of_cuda_is_found(source: str) -> None:
    assert ANY_NAME.search(source)
    assert list(named(source))


def test_only_the_seam_names_a_kind_of_device() -> None:
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if not any(map(path.is_relative_to, SEAM))]
    texts = {str(path.relative_to(PACKAGE)): path.read_text() for path in paths}
    found = {path: sorted(set(named(text))) for path, text in texts.items() if ANY_NAME.search(text)}
    assert {path: names for path, names in found.items() if names} == {}
    assert any(list(named(path.read_text())) for path in SEAM[0].glob("*.py"))
