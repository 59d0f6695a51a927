"""The check of torch for CUDA, on the torch of this environment: what does not need CUDA is there."""

from __future__ import annotations

import re

import pytest
import torch

from raysharded.actors.device.cuda import SETTINGS
from tools.cuda_names import NAMES, Name, found, missing_options, options


def test_names_that_need_no_cuda_are_found() -> None:
    needing_cuda = re.compile("nccl|_CudaDeviceProperties|_cudart", re.IGNORECASE)
    problems = {name.path: found(name) for name in NAMES if not needing_cuda.search(name.path)}
    assert len(problems) > 30
    assert not any(problems.values()), problems


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (Name("torch.cuda.Streamlet"), "has no Streamlet"),
        (Name("torch.cuda.Event", ("blocking_wait",)), "no argument blocking_wait"),
        (Name("torsh.cuda"), "no such module"),
    ],
)
def test_a_missing_name_is_named(name: Name, problem: str) -> None:
    assert problem in found(name)


def test_options_of_the_allocator_are_searched_in_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"expandable_segments", "pinned_max_round_threshold_mb", "PYTORCH_ALLOC_CONF"} <= set(options())
    missing = set(missing_options())
    if torch.version.cuda is None:
        assert "TORCH_NCCL_RETHROW_CUDA_ERRORS" in missing
    assert not {"expandable_segments", "pinned_max_round_threshold_mb"} & missing
    monkeypatch.setitem(SETTINGS, "PYTORCH_ALLOC_CONF", "expandable_parts:True")
    assert "expandable_parts" in missing_options()
