"""Imported once by the server that workers are forked from, where a worker is to run a `Trainer`."""

import gc

import accelerate  # noqa: F401
import peft  # noqa: F401
import transformers
import transformers.models.llama.modeling_llama
import transformers.trainer
import transformers.trainer_seq2seq

import tests.preloaded  # noqa: F401

transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
gc.freeze()  # as for what a worker itself imports
