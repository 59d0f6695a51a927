"""Choices of the CUDA seam that need no GPU: which one is mine, and which settings of the environment hold."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raysharded.actors.device import cuda_presence
from raysharded.actors.device.cuda import Cuda, arithmetic_settings, entry_of, index_of, is_in_collective, pci_of
from raysharded.actors.device.cuda_presence import CudaFacts, cuda_facts, driver_version, why_unfit, why_unusable
from raysharded.errors import ConfigError
from tests import patches
from tests.forked import in_a_fork
from tests.training.harness import GptTask, train


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


def test_a_gpus_place_in_the_machine_is_known_if_torch_knows_it() -> None:
    assert pci_of(SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)) == "0000:3b:00.0"
    assert pci_of(SimpleNamespace(name="an older torch")) == ""


def test_the_version_of_the_driver_is_its_own_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, library = tmp_path / "driver.c", tmp_path / "libcuda.so"
    source.write_text("int cuDriverGetVersion(int *found) { *found = 13020; return 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    monkeypatch.setattr(cuda_presence, "_DRIVER", str(library))
    assert driver_version() == 13020
    assert cuda_facts().driver == 13020
    monkeypatch.setattr(cuda_presence, "_DRIVER", str(tmp_path / "none.so"))
    assert driver_version() == 0


FACTS = CudaFacts(torch="2.13.0", built_for="13.0", driver=13000, visible="0,1", number=2)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, ""),
        ({"built_for": "13.2"}, ""),  # a driver runs what was built for its own major version
        ({"built_for": "12.8"}, ""),
        ({"built_for": "", "driver": 0, "number": 0}, "torch 2.13.0 was built without CUDA"),
        ({"driver": 0, "number": 0}, "has no NVIDIA driver, or its container does not see"),
        (
            {"driver": 12020, "number": 0},
            "too old: it supports CUDA 12.2, and .* for CUDA 13.0. Update the driver, or install a torch for CUDA 12$",
        ),
        ({"visible": "", "number": 0}, "CUDA_VISIBLE_DEVICES='' hides all GPUs"),
        ({"visible": "-1", "number": 0}, "CUDA_VISIBLE_DEVICES='-1' hides all GPUs"),
        ({"visible": "7", "number": 0}, r"finds no GPU \(CUDA_VISIBLE_DEVICES='7'\).*MIG mode without an instance"),
    ],
)
def test_a_gpu_that_cannot_be_used_has_a_sentence(changes: dict[str, Any], sentence: str) -> None:
    found = why_unusable(replace(FACTS, **changes))
    assert re.search(sentence, found) if sentence else found == ""


@pytest.mark.parametrize(
    ("names", "index", "visible", "sentence"),
    [
        (["NVIDIA H100 80GB HBM3"], 0, "0", ""),
        (["NVIDIA A100-SXM4-40GB MIG 1g.5gb"], 0, "0", "it is a MIG instance .*MIG 1g.5gb.*nvidia-smi -mig 0"),
        (["NVIDIA A100-SXM4-40GB"], 0, "MIG-5c4f", "it is a MIG instance"),
        (["NVIDIA H100 80GB HBM3"], 1, "4,5", "CUDA shows 1 GPUs, and number 1 was assigned"),
    ],
)
def test_a_gpu_that_is_unfit_for_a_worker_has_a_sentence(
    names: list[str], index: int, visible: str, sentence: str
) -> None:
    found = why_unfit(names, index, visible)
    assert re.search(sentence, found) if sentence else found == ""


class NeverBuilt(GptTask):
    """A task that is not to be built."""

    def build_model(self) -> Any:
        raise AssertionError("the model was built")


@pytest.mark.procs
def test_a_run_on_gpus_ends_at_once_where_there_are_none() -> None:
    """In real processes, before a model is built: this torch has no CUDA, or this machine no GPU."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match=r"ScalingConfig\(use_gpu=True\): .*(CUDA|driver)"):
        train(2, use_gpu=True, task=NeverBuilt())


def deterministic_in_generated_code(*, exact: bool) -> bool:
    """In a separate process: the option that Inductor writes beside each of its kernels for a GPU.

    Without it, a reduction that needs many registers is compiled several times, and the fastest adds in its own order.
    """
    from torch._inductor.codegen.triton import TritonKernel
    from torch.utils import _triton

    patches.replace(_triton, "triton_hash_with_backend", lambda: "")  # no Triton is needed here
    if exact:
        Cuda().make_compilation_exact()
    written: dict[str, bool] = TritonKernel.inductor_meta_common()
    return written["deterministic"]


@pytest.mark.procs
@pytest.mark.parametrize("exact", [False, True])
def test_generated_code_chooses_no_order_of_additions_by_measured_times(exact: bool) -> None:
    assert in_a_fork(partial(deterministic_in_generated_code, exact=exact)) is exact


def entry(state: str, at: int) -> dict[str, Any]:
    return {"state": state, "time_created_ns": at, "collective_seq_id": 1}


@pytest.mark.parametrize(
    ("entries", "found"),
    [
        ([], None),
        ([entry("started", 4)], None),  # of an aborted generation
        ([entry("completed", 6), entry("started", 7), entry("scheduled", 8)], True),
        ([entry("started", 4), entry("completed", 6), entry("scheduled", 7)], False),
    ],
    ids=["nothing", "older", "inside", "before it"],
)
def test_the_flight_recorder_shows_whether_the_gpu_is_in_a_collective(
    entries: list[dict[str, Any]], found: bool | None
) -> None:
    assert is_in_collective(entries, since_ns=5) is found


def recorded_entries() -> list[dict[str, Any]]:
    """In a separate process: entries of torch's flight recorder, as gloo has them, too."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    os.environ["TORCH_FR_BUFFER_SIZE"] = "10"
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(3))
    dump = torch._C._distributed_c10d._dump_fr_trace_json  # type: ignore[attr-defined]  # missing in torch's stubs
    entries: list[dict[str, Any]] = json.loads(dump(includeCollectives=True, onlyActive=False))["entries"]
    return entries


@pytest.mark.procs
def test_the_flight_recorder_writes_the_fields_that_are_read() -> None:
    began = time.time_ns()
    (one,) = in_a_fork(recorded_entries)
    assert one["state"] in ("scheduled", "started", "completed")
    assert began <= one["time_created_ns"] <= time.time_ns()
    assert is_in_collective([one], began) is (one["state"] == "started")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    found: dict[str, str] = {}
    monkeypatch.setattr("os.environ", found)
    return found


def test_settings_are_made_and_those_of_the_user_are_kept(environment: dict[str, str]) -> None:
    environment |= {"TORCH_FR_BUFFER_SIZE": "7", "NCCL_P2P_DISABLE": "1", "OTHER": "0"}
    environment["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"
    cuda = Cuda()
    cuda.prepare_environment(exact=False)
    assert cuda.kept_settings() == (
        "TORCH_FR_BUFFER_SIZE=7 (raysharded's own value is 2000)",
        "NCCL_P2P_DISABLE=1",
    )
    assert environment["TORCH_FR_BUFFER_SIZE"] == "7"
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert "pinned_max_round_threshold_mb:64" in environment["PYTORCH_ALLOC_CONF"]
    assert "pinned_num_register_threads:8" in environment["PYTORCH_ALLOC_CONF"]
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


def test_a_preferred_library_for_products_is_compared_only_if_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that began before it was compared have no such fact."""
    assert "blas" not in arithmetic_settings()
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda: torch._C._BlasBackend.Cublaslt)
    assert arithmetic_settings()["blas"] == "Cublaslt"


def test_facts_of_a_gpu_are_those_that_bits_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 1)
    names, properties = {device: "NVIDIA H100 80GB HBM3"}, {device: SimpleNamespace(multi_processor_count=132)}
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91300)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    monkeypatch.setattr("raysharded.actors.device.cuda.driver_version", lambda: 13020)
    assert Cuda().facts(device) == arithmetic_settings() | {
        "gpu": "NVIDIA H100 80GB HBM3",
        "cuda": "13.0",
        "cudnn": "91300",
        "nccl": "2.29.7",
        "driver": "13020",
        "multiprocessors": "132",
    }
