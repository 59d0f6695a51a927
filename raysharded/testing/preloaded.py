"""Imported once by the server from which workers are forked: all modules that a worker would otherwise import itself,
and the driver, which modules of tasks often import."""

import gc

import torch._dynamo  # noqa: F401 - every optimizer's constructor imports it: more than a second

import raysharded.actors.worker
import raysharded.checkpoint.storage.fsspec
import raysharded.checkpoint.storage.local
import raysharded.driver.driver
import raysharded.testing.processes  # noqa: F401

gc.freeze()  # imported objects live as long as the process: collections need not scan them again
