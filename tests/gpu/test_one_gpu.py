"""One GPU is world size 1: no collectives, but the device path of every part."""

from __future__ import annotations

import pytest
import torch

import raysharded as rs
from raysharded.actors.shards.async_copy import AsyncHostCopy
from tests.gpu.shared_gpu import needs
from tests.training.harness import train

pytestmark = [*needs(1), pytest.mark.usefixtures("gpu_itself")]


def test_training_on_a_gpu_is_reproducible_and_both_accumulations_give_the_same_bits() -> None:
    first = train(1, use_gpu=True)
    assert first.bits == train(1, use_gpu=True).bits
    assert first.bits == train(1, use_gpu=True, engine=rs.EngineConfig(accumulation="local")).bits


def test_bf16_with_activation_checkpointing_is_reproducible() -> None:
    engine = rs.EngineConfig(param_dtype="bfloat16", activation_checkpointing=True)
    assert train(1, use_gpu=True, engine=engine).bits == train(1, use_gpu=True, engine=engine).bits


def test_a_killed_worker_is_replaced_on_the_same_gpu() -> None:
    disturbed = train(1, use_gpu=True, steps=5, kills=[(0, 3, "backward")])
    assert disturbed.bits == train(1, use_gpu=True, steps=5).bits


def test_a_copy_is_begun_without_waiting_and_is_of_what_was_launched_before() -> None:
    """The state's copies, during the next computation."""
    device = torch.device("cuda", 0)
    source = torch.zeros(1 << 22, device=device)
    into = torch.empty(1 << 22, pin_memory=True)
    filler = AsyncHostCopy(device)
    torch.cuda.synchronize()
    torch.cuda._sleep(1 << 28)  # a tenth of a second
    source.fill_(1.0)
    filling = filler.begin([into], [source])
    after = torch.cuda.current_stream().record_event()
    assert not after.query(), "nobody has waited for what was launched"
    filling.wait()
    assert bool((into == 1.0).all())
