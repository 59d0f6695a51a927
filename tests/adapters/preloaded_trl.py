"""Imported beside `preloaded` where a worker is to run a trainer of TRL."""

import gc

import datasets
import trl
import trl.trainer.dpo_trainer
import trl.trainer.sft_trainer  # noqa: F401

datasets.disable_progress_bars()
gc.freeze()  # as for what a worker itself imports
