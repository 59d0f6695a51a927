"""Imported once by the server that workers are forked from, where models of transformers are to be trained."""

import gc

import transformers
import transformers.modeling_utils
import transformers.models.auto.modeling_auto
import transformers.models.llama.modeling_llama  # a fifteenth of a second, most of which any other model takes, too
import transformers.models.swin.modeling_swin
import transformers.models.t5.modeling_t5

transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
gc.freeze()  # as for what a worker itself imports
