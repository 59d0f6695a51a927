"""Imported once by the server from which workers are forked: all modules that a worker would otherwise import itself,
and the driver, which modules of tasks often import."""

import gc
import linecache
import os
import signal
import sys

import torch._dynamo  # noqa: F401 - every optimizer's constructor imports it: more than a second

import raysharded.actors.worker
import raysharded.checkpoint.storage.fsspec
import raysharded.checkpoint.storage.local
import raysharded.driver.driver
import raysharded.testing.processes  # noqa: F401

_ON_THE_STACK = ("concurrent.", "raysharded.actors", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.nn.")
# torch keeps the stack, with its source, of each FakeTensorMode, which FSDP2 makes for parameters of a new shape
for _file in [
    getattr(module, "__file__", "") for name, module in sys.modules.items() if name.startswith(_ON_THE_STACK)
]:
    linecache.getlines(_file or "")

gc.freeze()  # imported objects live as long as the process: collections need not scan them again


def _end_by_sigterm() -> None:
    if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


# SIGTERM to a script's whole process group is for the run and its workers. The server, which ends with the script, is
# still needed: the driver may start a worker before it stops. SIGHUP is for the driver alone, as under Ray.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
os.register_at_fork(after_in_child=_end_by_sigterm)
