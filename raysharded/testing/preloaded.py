"""Imported once by the server that workers are forked from: all that a worker would otherwise import itself, and the
driver, which the modules of tasks often import."""

import gc

import torch._dynamo  # noqa: F401 - every optimizer's constructor imports it: more than a second

import raysharded.actors.worker
import raysharded.checkpoint.storage.fsspec
import raysharded.checkpoint.storage.local
import raysharded.driver.driver
import raysharded.testing.processes  # noqa: F401

gc.freeze()  # what was imported lives as long as the process: collections need not look at it again
