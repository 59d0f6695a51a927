"""Choices of the CUDA seam that need no GPU: which one is mine, and which settings of the environment hold."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from raysharded.actors.device.cuda import Cuda, arithmetic_settings, entry_of, index_of
from raysharded.errors import ConfigError


@pytest.mark.parametrize(
    ("assigned", "visible", "index"),
    [
        ([], None, 0),
        (["3"], "3", 0),  # Ray shows it alone
        (["3"], None, 3),  # Ray does not set the variable
        (["3"], "1,3", 1),  # nor here, where the node has it
        (["GPU-b"], "GPU-a, GPU-b", 1),
    ],
)
def test_a_worker_takes_the_gpu_that_it_was_assigned(assigned: list[str], visible: str | None, index: int) -> None:
    assert index_of(assigned, visible) == index


@pytest.mark.parametrize(("assigned", "visible"), [("3", "0,1"), ("GPU-b", "GPU-a"), ("GPU-b", None)])
def test_a_gpu_that_is_assigned_and_not_visible_is_refused(assigned: str, visible: str | None) -> None:
    with pytest.raises(ConfigError, match=f"assigned GPU {assigned}, and CUDA_VISIBLE_DEVICES is"):
        index_of([assigned], visible)


def test_a_gpu_is_named_by_its_own_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [entry_of(index, "5, 7") for index in range(3)] == ["5", "7", ""]
    assert entry_of(0, None) == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(uuid="b"))
    assert Cuda().identity(torch.device("cuda", 1)) == "GPU 7 GPU-b"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    found: dict[str, str] = {}
    monkeypatch.setattr("os.environ", found)
    return found


def test_settings_are_made_and_those_of_the_user_are_kept(environment: dict[str, str]) -> None:
    environment["TORCH_FR_BUFFER_SIZE"] = "7"
    Cuda().prepare_environment(exact=False)
    assert environment["TORCH_FR_BUFFER_SIZE"] == "7"
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert "pinned_max_round_threshold_mb:64" in environment["PYTORCH_ALLOC_CONF"]
    assert "CUBLAS_WORKSPACE_CONFIG" not in environment
    Cuda().prepare_environment(exact=True)
    assert environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_an_allocator_that_is_configured_by_its_older_name_keeps_its_settings(environment: dict[str, str]) -> None:
    environment["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:512"
    Cuda().prepare_environment(exact=True)
    assert "PYTORCH_ALLOC_CONF" not in environment


def test_a_setting_that_would_end_survivors_is_refused(environment: dict[str, str]) -> None:
    environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "3"
    with pytest.raises(ConfigError, match="end the survivors"):
        Cuda().prepare_environment(exact=True)


def test_settings_that_change_a_products_bits_are_compared_between_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    before = arithmetic_settings()
    assert "NVIDIA_TF32_OVERRIDE" not in before
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert arithmetic_settings()["NVIDIA_TF32_OVERRIDE"] == "0"
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert arithmetic_settings()["matmul_precision"] != before["matmul_precision"]
    finally:
        torch.set_float32_matmul_precision(precision)
