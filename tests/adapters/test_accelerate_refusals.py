"""Settings and calls of an `Accelerator` that a session cannot keep are refused by their names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import GeneralTracker
from accelerate.utils import DistributedType
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import raysharded as rs
from raysharded.adapters.accelerate import Elastic, elastic
from raysharded.adapters.accelerate_calls import Calls
from raysharded.adapters.accelerate_parts import StepScheduler, require_loader, require_supported
from raysharded.errors import ConfigError, TaskError

BATCH = rs.BatchConfig(global_batch_size=8, microbatch_size=2)
DATA: Any = [torch.ones(3)] * 8


@pytest.fixture(autouse=True)
def _new_state() -> Iterator[None]:
    """accelerate keeps the first settings of a process."""
    _forget()
    yield
    _forget()


def _forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def made(**settings: Any) -> Any:
    """An accelerator ahead of the first step of a session."""
    session: Any = SimpleNamespace(batch=BATCH, step=None, max_steps=4, _task=SimpleNamespace())
    return elastic(Accelerator, session)(cpu=True, **settings)


def prepared() -> Any:
    """An accelerator behind `prepare`."""
    found = made()
    found._train = DataLoader(DATA, batch_size=2)
    return found


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"mixed_precision": "bf16"}, r"mixed_precision='bf16'\): give EngineConfig\(param_dtype"),
        ({"gradient_accumulation_steps": 3}, r"gradient_accumulation_steps=3\): a step of the run has 4 microbatches"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_setting_that_cannot_be_kept_is_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        made(**settings)


@pytest.mark.parametrize("kind", [kind for kind in DistributedType if kind != DistributedType.NO], ids=str)
def test_each_launch_and_plugin_of_accelerate_is_refused(kind: DistributedType) -> None:
    launched = SimpleNamespace(distributed_type=kind, mixed_precision="no", gradient_accumulation_steps=1)
    with pytest.raises(
        ConfigError, match=rf"a part of {kind.value}: start the script with python, not with accelerate"
    ):
        require_supported(launched, BATCH)


def test_usual_settings_are_accepted() -> None:
    for accumulated in (1, 2, 4):
        assert made(gradient_accumulation_steps=accumulated).gradient_accumulation_steps == accumulated


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from DATA


@pytest.mark.parametrize(
    ("loader", "named"),
    [
        (lambda: DataLoader(Endless(), batch_size=2), "the training data need a length and items"),
        (
            lambda: DataLoader(DATA, batch_size=2, sampler=DistributedSampler(DATA, num_replicas=1, rank=0)),
            r"sampler=DistributedSampler\(\.\.\.\)\): the order of samples belongs to the run",
        ),
        (lambda: DataLoader(DATA, batch_size=4), r"batch_size=4\) and BatchConfig\(microbatch_size=2\) are one thing"),
    ],
    ids=["no length", "sampler", "batch_size"],
)
def test_training_data_that_cannot_be_kept_are_refused(loader: Callable[[], DataLoader[Any]], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        require_loader(loader(), BATCH)


def test_prepare_takes_everything_in_one_call() -> None:
    model, data = nn.Linear(3, 1), DataLoader(DATA, batch_size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parts in ((model, optimizer), (model, data), (optimizer, data), (model, nn.Linear(3, 1), optimizer, data)):
        with pytest.raises(ConfigError, match=r"accelerator\.prepare\(\.\.\.\): call it once, with one model"):
            made().prepare(*parts)
    with pytest.raises(ConfigError, match=r"accelerator\.prepare\(\.\.\.\): call it once"):
        prepared().prepare(model, optimizer, data)


def test_training_data_that_are_numbers_are_refused_unless_the_run_reads_their_places() -> None:
    model, found = nn.Linear(3, 1), made()
    numbers: Any = [7, 3, 0, 5, 1, 2, 6, 4]
    parts = (model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader[Any](numbers, batch_size=2))
    found.session._job = SimpleNamespace(data=numbers)
    with pytest.raises(ConfigError, match=r"the training data: its samples are numbers, as 7, .*Wrap them"):
        found.prepare(*parts)
    found.session._job = SimpleNamespace(data=range(8))
    with pytest.raises(AttributeError, match="shard"):  # behind the check: this session cannot share
        found.prepare(*parts)


def test_objects_are_registered_ahead_of_prepare() -> None:
    counter, ahead, behind = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), made(), prepared()
    ahead.register_for_checkpointing(counter)
    assert ahead._custom_objects == [counter]
    here = rf"^{re.escape(__file__)}:\d+: accelerator\."
    with pytest.raises(ConfigError, match=rf"{here}register_for_checkpointing\(\.\.\.\): move this line ahead of"):
        behind.register_for_checkpointing(counter)
    behind.register_for_checkpointing(StepScheduler(torch.optim.lr_scheduler.ConstantLR(counter), behind))
    assert not behind._custom_objects, "prepare has registered a scheduler that it returns"


class Tracker(GeneralTracker):  # type: ignore[misc]  # accelerate has no annotations
    """A tracker of the script's own."""

    name, requires_logging_directory, tracker = "own", False, None

    def store_init_configuration(self, values: Any) -> None: ...

    def log(self, values: Any, step: Any = None) -> None: ...


@pytest.mark.parametrize(
    ("call", "named"),
    [
        *(
            (lambda it, name=name: getattr(it, name)(DATA), rf"accelerator\.{name}: {way}")
            for name, way in {
                "on_last_process": r"ranks change with the workers\. Use accelerator\.is_main_process",
                "on_process": "ranks change with the workers",
                "on_local_process": "ranks change with the workers",
                "split_between_processes": "the number of workers changes",
                "skip_first_batches": "leave it out: the run resumes by itself",
                "register_save_state_pre_hook": "it would never be called",
                "register_load_state_pre_hook": "it would never be called",
                "prepare_model": r"call accelerator\.prepare once",
                "prepare_optimizer": r"call accelerator\.prepare once",
                "prepare_scheduler": r"call accelerator\.prepare once",
                "prepare_data_loader": r"call accelerator\.prepare once",
            }.items()
        ),
        (lambda it: it.is_last_process, r"accelerator\.is_last_process: ranks change with the workers"),
        (lambda it: it.set_trigger(), r"set_trigger\(\): a worker cannot end the loop, which ends at RunConfig"),
        (lambda it: it.check_trigger(), r"check_trigger\(\): a worker cannot end the loop"),
        (
            lambda it: it.reduce(torch.ones(1), "mean"),
            r"reduce\(reduction='mean'\): .* accelerator\.gather_for_metrics",
        ),
        (
            lambda it: it.reduce({"loss": torch.ones(1)}),
            r"reduce\(\.\.\.\): a sum of fractions .* accelerator\.gather_for_metrics",
        ),
        (lambda it: it.reduce({"number": 1}), r"accelerator\.reduce: a session gathers tensors alone"),
        (lambda it: it.pad_across_processes("text"), r"pad_across_processes: a session gathers tensors alone"),
        (lambda _: made(log_with=Tracker()).init_trackers("run"), r"init_trackers: each worker would begin a run"),
        (lambda it: it.clip_grad_value_([], 1.0), r"clip_grad_value_: change gradients in a hook"),
        (lambda it: it.clip_grad_norm_([], 1.0, norm_type=1), r"clip_grad_norm_\(norm_type=1\): a session clips the 2"),
        (lambda it: it.gather_for_metrics(["text"]), r"gather_for_metrics: a session gathers tensors alone"),
        (lambda it: it.gather_for_metrics(torch.ones(1), use_gather_object=True), "a session gathers tensors alone"),
        (lambda it: it.gather({"number": 1}), "a session gathers tensors alone"),
    ],
)
def test_a_call_that_cannot_be_kept_is_refused(call: Callable[[Any], Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        call(made())


AS_IN_ONE_PROCESS = """
    autocast clear context_parallel_rank data_parallel_rank data_parallel_shard_rank deepspeed_plugin
    deepspeed_ulysses_dl_adapter device dispatch_batches distributed_type even_batches fp8_backend free_memory
    get_tracker gradient_accumulation_steps is_composable_parallelism_enabled is_fsdp2 join_uneven_inputs
    local_main_process_first local_process_index log logging_dir lomo_backward main_process_first
    maybe_context_parallel mixed_precision multi_device no_sync non_blocking num_processes
    optimizer_step_was_skipped parallelism_config pipeline_parallel_rank process_index profile project_dir
    save_iteration should_save_model split_batches sync_gradients tensor_parallel_rank torch_device_mesh
    trigger_sync_in_backward unscale_gradients use_distributed use_seedable_sampler use_stateful_dataloader
    verify_device_map
"""
"""Names of an `Accelerator` that a session leaves as they are."""


def test_each_other_name_of_an_accelerator_is_overridden() -> None:
    own = {name for kind in (Elastic, Calls) for name in vars(kind)}
    names = {name for name in vars(Accelerator) if not name.startswith("_")}
    assert names - own == set(AS_IN_ONE_PROCESS.split())


def test_a_loop_in_another_form_is_refused_with_the_lines_to_write() -> None:
    with pytest.raises(TaskError, match=r"write `for epoch in accelerator\.epochs\(num_epochs\)` around the loop"):
        next(made().microbatches())
    with pytest.raises(TaskError, match=r"belongs into `with accelerator\.accumulate\(model\):`"):
        made().backward(torch.ones(()))
