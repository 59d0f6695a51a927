"""raysharded: elastic, fault-tolerant sharded training on Ray.

Names are loaded on first use: `import raysharded` loads neither torch nor Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from raysharded.display.plain_text import secure_logs

__version__ = "0.2.0.dev0"

_EXPORTS = {
    "BatchConfig": "raysharded.config",
    "CheckpointConfig": "raysharded.config",
    "EngineConfig": "raysharded.config",
    "EvalConfig": "raysharded.config",
    "FailureConfig": "raysharded.config",
    "Redundancy": "raysharded.config",
    "RunConfig": "raysharded.config",
    "ScalingConfig": "raysharded.config",
    "Loss": "raysharded.task",
    "Task": "raysharded.task",
    "warmup_cosine": "raysharded.task",
    "Mixture": "raysharded.data",
    "Bucketed": "raysharded.data",
    "PackedDataset": "raysharded.data",
    "ShardedItems": "raysharded.data",
    "Stream": "raysharded.data",
    "TokenDataset": "raysharded.data",
    "ParameterTensors": "raysharded.actors.session.parameter_tensors",
    "ElasticTrainer": "raysharded.trainer",
    "Result": "raysharded.run.results",
    "Run": "raysharded.run.handle",
    "RunStopped": "raysharded.run.results",
    "Status": "raysharded.run.results",
    "attach": "raysharded.run.attach",
    "remove_run": "raysharded.run.removal.execution",
}

_SUBMODULES = frozenset(("checkpoint", "data", "errors", "metrics", "report", "testing"))
"""Those that are attributes after `import raysharded` alone."""

if TYPE_CHECKING:
    from raysharded import (
        checkpoint as checkpoint,
        data as data,
        errors as errors,
        metrics as metrics,
        report as report,
        testing as testing,
    )
    from raysharded.actors.session.parameter_tensors import ParameterTensors as ParameterTensors
    from raysharded.config import (
        BatchConfig as BatchConfig,
        CheckpointConfig as CheckpointConfig,
        EngineConfig as EngineConfig,
        EvalConfig as EvalConfig,
        FailureConfig as FailureConfig,
        Redundancy as Redundancy,
        RunConfig as RunConfig,
        ScalingConfig as ScalingConfig,
    )
    from raysharded.data import (
        Bucketed as Bucketed,
        Mixture as Mixture,
        PackedDataset as PackedDataset,
        ShardedItems as ShardedItems,
        Stream as Stream,
        TokenDataset as TokenDataset,
    )
    from raysharded.run.attach import attach as attach
    from raysharded.run.handle import Run as Run
    from raysharded.run.removal.execution import remove_run as remove_run
    from raysharded.run.results import Result as Result, RunStopped as RunStopped, Status as Status
    from raysharded.task import Loss as Loss, Task as Task, warmup_cosine as warmup_cosine
    from raysharded.trainer import ElasticTrainer as ElasticTrainer

__all__ = ["__version__", *sorted(_EXPORTS)]

secure_logs()


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"raysharded.{name}")
    if name not in _EXPORTS:
        raise AttributeError(f"module 'raysharded' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return [*__all__, *sorted(_SUBMODULES)]
