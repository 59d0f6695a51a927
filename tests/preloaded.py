"""Imported once by the server that the tests' processes are forked from: the imports of the modules that define their
tasks and functions, a sixth of a second in each process otherwise."""

import gc

import hypothesis  # noqa: F401
import pytest  # noqa: F401

import raysharded.checkpoint.api
import raysharded.testing.preloaded
import raysharded.testing.storages
import raysharded.trainer  # noqa: F401
import tests.training.harness  # noqa: F401

gc.freeze()  # as for what a worker itself imports
