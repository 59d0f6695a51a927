"""Imported once by the server that workers are forked from, where models of transformers are to be trained."""

import gc

import transformers
import transformers.modeling_utils
import transformers.models.auto.modeling_auto

transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
gc.freeze()  # as for what a worker itself imports
