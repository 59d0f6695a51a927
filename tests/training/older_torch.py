"""The behaviour of torch 2.9, on today's torch: an all-gather reads memory that the optimizer does not write to."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from raysharded.actors.step import assembly
from raysharded.demo.model import ByteGPT
from tests import patches
from tests.training.harness import GptTask

_reset: Any = FSDPParam.reset_sharded_param


def pad_again() -> None:
    """From now on, in this process, every call pads an uneven shard into a new buffer: the first forward makes one."""

    def reset(param: Any) -> None:
        param._sharded_param_data = param._sharded_param_data.clone()  # no longer the parameter's memory, so not kept
        _reset(param)

    FSDPParam.reset_sharded_param = reset  # type: ignore[method-assign]  # of a worker's process, which ends with it


class PadsAgain(GptTask):
    """The GPT of the harness, in a process with the behaviour of torch 2.9."""

    def build_model(self) -> nn.Module:
        pad_again()
        return super().build_model()


class PadsAgainUnseen(ByteGPT):
    """The demo's GPT, in such a process, whose engine does not check."""

    def build_model(self) -> nn.Module:
        pad_again()
        patches.replace(assembly, "check_memory", lambda *_: None)
        return super().build_model()
