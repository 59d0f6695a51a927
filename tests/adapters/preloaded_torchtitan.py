"""Imported once by the server that workers are forked from, where a worker is to run torchtitan's `Trainer`."""

import gc
import sys

import tests.preloaded  # noqa: F401
from tests.adapters import titan_programs

titan_programs.stand_in_for_a_device()
sys.path.append(str(titan_programs.FOLDER))

import torchtitan.models.llama3.config_registry  # noqa: E402
import torchtitan.trainer  # noqa: E402, F401

gc.freeze()  # as for what a worker itself imports
