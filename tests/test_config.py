"""Wrong configurations are refused when they are made, with the value and the remedy."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import raysharded as rs
from raysharded import errors
from raysharded.checkpoint import SigningKey, open_storage
from raysharded.checkpoint.retention.policy import Best, Keep
from raysharded.errors import ConfigError, RayshardedError
from raysharded.run.group_planner import GroupPlanner
from raysharded.run.local import LocalRun
from raysharded.run.offline import StoredRun
from raysharded.run.translation import files_of, job_of, limits_of
from tests.training.harness import GptTask, Tokens

RUN: dict[str, Any] = {"name": "a", "storage_path": "b", "max_steps": 1}

WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: rs.BatchConfig(global_batch_size=0, microbatch_size=1), "global_batch_size=0: give a whole number"),
    (lambda: rs.BatchConfig(global_batch_size=7, microbatch_size=2), r"7 is not a multiple of.*2.*Take .*=6"),
    (lambda: rs.BatchConfig(global_batch_size=True, microbatch_size=1), "global_batch_size=True"),
    (lambda: rs.ScalingConfig(num_workers=0), "num_workers=0: give a number of 1 or more"),
    (lambda: rs.ScalingConfig(num_workers=(0, 2)), r"\(0, 2\): give a minimum of 1 or more"),
    (lambda: rs.ScalingConfig(num_workers=(3, 2)), r"\(3, 2\): give the minimum first"),
    (lambda: rs.ScalingConfig(num_workers="4"), r"whole number or \(min, max\)"),  # type: ignore[arg-type]
    (lambda: rs.ScalingConfig(num_workers=1, start_timeout_s="60"), "start_timeout_s='60'"),  # type: ignore[arg-type]
    (lambda: rs.ScalingConfig(num_workers=1, cpus_per_worker=-1), "cpus_per_worker=-1"),
    (lambda: rs.ScalingConfig(num_workers=1, resources_per_worker={"TPU": -1}), r"\['TPU'\]=-1"),
    (lambda: rs.ScalingConfig(num_workers=4, shard_group_size=0), "shard_group_size=0: give a whole number of 1"),
    (
        lambda: rs.ScalingConfig(num_workers=(1, 3), shard_group_size=4),
        r"needs 4 workers, and.*\(1, 3\) allows for 3.*=3",
    ),
    (lambda: rs.ScalingConfig(num_workers=6, shard_group_size=4), r"6 is not a multiple.*: 2 of them.*Take.*4 or 8"),
    (lambda: rs.ScalingConfig(num_workers=4, tensor_parallel_degree=0), "tensor_parallel_degree=0: give a whole"),
    (lambda: rs.ScalingConfig(num_workers=4, tensor_parallel_degree=True), "tensor_parallel_degree=True: give a whole"),
    (
        lambda: rs.ScalingConfig(num_workers=(2, 8), tensor_parallel_degree=4),
        r"needs 4 workers, and num_workers=\(2, 8\) allows 2. Take a minimum of 4",
    ),
    (lambda: rs.ScalingConfig(num_workers=7, tensor_parallel_degree=2), r"7 is not a multiple.*: 1 of.*Take.*6 or 8"),
    (
        lambda: rs.ScalingConfig(num_workers=6, shard_group_size=3, tensor_parallel_degree=2),
        "shard_group_size=3 is not a multiple of tensor_parallel_degree=2",
    ),
    (lambda: rs.CheckpointConfig(every_steps=0), "every_steps=0"),
    (lambda: rs.CheckpointConfig(keep_last=0), "keep_last=0"),
    (lambda: rs.CheckpointConfig(keep_every=0), "keep_every=0"),
    (lambda: rs.CheckpointConfig(keep_best=("loss", "least", 1)), r"keep_best=.*\"min\" or \"max\""),  # type: ignore[arg-type]
    (lambda: rs.CheckpointConfig(keep_best="loss"), "keep_best='loss'"),  # type: ignore[arg-type]
    (lambda: rs.CheckpointConfig(keep_best=("loss", "min", 0)), "and how many"),
    (lambda: rs.CheckpointConfig(max_failed_saves=0), "max_failed_saves=0"),
    (lambda: rs.CheckpointConfig(on_failed_saves="ignore"), "choose one of 'warn', 'stop'"),  # type: ignore[arg-type]
    (lambda: rs.CheckpointConfig(grace_s=-1), "grace_s=-1"),
    (lambda: rs.CheckpointConfig(signing_key_file=3), "signing_key_file=3"),  # type: ignore[arg-type]
    (lambda: rs.CheckpointConfig(at_end="yes"), "at_end='yes': give a bool"),  # type: ignore[arg-type]
    (lambda: rs.FailureConfig(progress_timeout_s=float("inf")), "progress_timeout_s=inf"),
    (lambda: rs.FailureConfig(max_node_failures=0), "max_node_failures=0"),
    (lambda: rs.FailureConfig(task_error_retries=-1), "task_error_retries=-1"),
    (lambda: rs.RunConfig(**{**RUN, "name": "a/b"}), "RunConfig.name='a/b'"),
    (lambda: rs.RunConfig(**{**RUN, "max_steps": 0}), "max_steps=0"),
    (lambda: rs.RunConfig(**{**RUN, "checkpoint": {"every_steps": 3}}), "checkpoint=.*give a CheckpointConfig"),
    (lambda: rs.RunConfig(**{**RUN, "checkpont": None}), "did you mean 'checkpoint'"),
    (lambda: rs.RunConfig(**RUN, accept_arithmetic="yes"), "accept_arithmetic='yes': give a bool"),  # type: ignore[arg-type]
    (lambda: rs.RunConfig(**RUN, record_events="yes"), "record_events='yes': give a bool"),  # type: ignore[arg-type]
    (lambda: rs.RunConfig(**RUN, record_microbatches=1), "record_microbatches=1: give a bool"),  # type: ignore[arg-type]
    (lambda: rs.RunConfig(name="a"), "RunConfig needs storage_path, max_steps; give them by name"),  # type: ignore[call-arg]
    (lambda: rs.EngineConfig(reduction="exactly"), "choose one of 'exact', 'fast'"),  # type: ignore[arg-type]
    (lambda: rs.EngineConfig(mirrors="no"), "mirrors='no': give a bool"),  # type: ignore[arg-type]
    (lambda: rs.Redundancy(parity=(4,)), r"parity=\(4,\): give whole numbers \(k, m\)"),  # type: ignore[arg-type]
    (lambda: rs.Redundancy(parity=(0, 1)), r"parity=\(0, 1\).*of 1 or more"),
    (lambda: rs.Redundancy(parity=(250, 7)), "together 256 at most"),
    (lambda: rs.EngineConfig(redundancy=(4, 1)), r"redundancy=\(4, 1\): give a Redundancy"),  # type: ignore[arg-type]
    (lambda: rs.EngineConfig(redundancy=rs.Redundancy(parity=(4, 1)), mirrors=False), "leave out either"),
    (lambda: rs.EvalConfig(data=[], every_steps=0, num_samples=1), "every_steps=0"),
]


LOADER = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(4)))


@pytest.mark.parametrize(("make", "message"), WRONG, ids=[message[:30] for _, message in WRONG])
def test_a_wrong_value_is_named_with_the_remedy(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def trainer(**change: Any) -> rs.ElasticTrainer:
    given: dict[str, Any] = {
        "task": GptTask(),
        "data": Tokens(),
        "batch": rs.BatchConfig(global_batch_size=4, microbatch_size=2),
        "scaling": rs.ScalingConfig(num_workers=1),
        "run": rs.RunConfig(**RUN),
    }
    return rs.ElasticTrainer(**{**given, **change})


def clipped(norm: Any) -> rs.Task:
    task = GptTask()
    task.max_grad_norm = norm
    return task


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"scaling": rs.ScalingConfig(num_workers=2, tensor_parallel_degree=2)},
            "tensor_parallel_degree is 2, but GptTask has no parallelize",
        ),
        ({"task": GptTask}, r"must be a raysharded.Task \(an instance, not the class\)"),
        ({"data": iter([1])}, "without __len__ and __getitem__"),
        (
            {"data": LOADER},
            "DataLoader without __getitem__. Give a map-style dataset, such as its `dataset`",
        ),
        ({"task": clipped(-1.0)}, r"GptTask.max_grad_norm=-1.0: give a number above 0"),
        ({"task": clipped(0)}, r"GptTask.max_grad_norm=0: give a number above 0"),
        ({"task": clipped(float("nan"))}, r"GptTask.max_grad_norm=nan: give a number above 0"),
        ({"task": clipped("1.0")}, r"GptTask.max_grad_norm='1.0': give a number above 0"),
        ({"batch": 16}, "batch=16 must be a raysharded.BatchConfig"),
        ({"evaluation": 3}, "must be a raysharded.EvalConfig"),
        ({"scale": 3}, "did you mean 'scaling'"),
    ],
)
def test_the_trainer_refuses_what_it_cannot_use(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer(**change)


def test_a_run_is_not_resharded_as_its_task_cannot_be_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = LocalRun(trainer(scaling=rs.ScalingConfig(num_workers=2)).spec())
    with pytest.raises(ConfigError, match="GptTask has no parallelize"):
        run.reshard(tensor_parallel_degree=2)


def test_sources_that_are_read_repeatedly_are_named_before_a_worker_is_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)

    def launch(job: object) -> Any:
        raise ConfigError("no worker here")

    data = rs.Mixture({"much": range(10_000), "little": range(1)}, {"much": 1, "little": 1})
    with pytest.raises(ConfigError, match="no worker here"):
        LocalRun(trainer(data=data).spec(), launch=launch).drive()
    assert "the mixture reads source 'little'" in caplog.text


def test_names_of_before_0_2_give_what_the_new_ones_give_and_warn(tmp_path: Path) -> None:
    made, storage = trainer(), open_storage(str(tmp_path))
    spec = made.spec()
    groups = GroupPlanner(spec)
    for old, new in (
        (made.about, spec.settings),
        (made.user_objects, spec.user_objects),
        (made.limits, lambda: limits_of(spec, groups.grouping())),
        (lambda: made.files(storage, {"torch": "2"}), lambda: files_of(spec, storage, {"torch": "2"})),
        (made.job, lambda: job_of(spec)),
        (lambda: made.grouping(made.scaling), groups.grouping),
        (made.check_memory, groups.check_memory),
    ):
        with pytest.warns(DeprecationWarning, match=r"^ElasticTrainer\.\w+ is deprecated and will be removed in 0\.4"):
            found = old()
        assert found == new()


class Entered(Exception):
    """Raised by the context below: training does not begin."""


@pytest.mark.parametrize("old", [False, True])
def test_fit_enters_a_context_of_the_run_under_either_name(
    old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def context(run: rs.Run) -> AbstractContextManager[object]:
        raise Entered(run.name)

    warned = pytest.warns(
        DeprecationWarning, match=r"fit\(beside=\) is deprecated .* use ElasticTrainer.fit\(context=\)"
    )
    with warned if old else nullcontext(), pytest.raises(Entered, match=r"^a$"):
        trainer().fit(beside=context) if old else trainer().fit(context=context)
    both = pytest.raises(ConfigError, match="give context= alone")
    with pytest.warns(DeprecationWarning, match=r"fit\(beside=\)"), both:
        trainer().fit(context=context, beside=context)


def test_start_here_is_start_local_and_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[Any, ...]] = []
    monkeypatch.setattr(rs.ElasticTrainer, "start_local", lambda *given, **named: started.append((given, named)))
    made, listen = trainer(), print
    with pytest.warns(DeprecationWarning, match=r"start_here is deprecated .* use .*start_local"):
        made.start_here(listen, take_over=True)
    assert started == [((made, listen), {"take_over": True})]


def test_what_people_write_first_is_taken(tmp_path: Path) -> None:
    run = rs.RunConfig(name="a", storage_path=tmp_path, max_steps=1)
    assert (run.storage_path, trainer(run=run).url) == (str(tmp_path), f"{tmp_path}/a")
    scaling = rs.ScalingConfig(num_workers=[1, 2])
    assert (scaling.num_workers, scaling.min_workers, scaling.max_workers) == ((1, 2), 1, 2)
    assert hash(scaling.num_workers) == hash((1, 2))
    for given in (torch.bfloat16, "bf16", "bfloat16"):
        assert rs.EngineConfig(param_dtype=given, reduce_dtype=torch.float32) == rs.EngineConfig(param_dtype="bfloat16")
    for wrong in (torch.int8, "torch.floaty", 16):
        with pytest.raises(ConfigError, match=r"EngineConfig.param_dtype=.*choose one of None, 'float32', 'bfloat16'"):
            rs.EngineConfig(param_dtype=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("every_steps", "every_s", "seconds"),
    [(None, "auto", 600.0), (100, "auto", None), (100, 60.0, 60.0), (None, None, None), (None, 5, 5)],
)
def test_checkpoints_are_written_by_time_unless_steps_are_given(
    every_steps: int | None, every_s: Any, seconds: float | None
) -> None:
    checkpoint = rs.CheckpointConfig(every_steps=every_steps, every_s=every_s)
    run = rs.RunConfig(**RUN, checkpoint=checkpoint)
    assert limits_of(trainer(run=run).spec(), None).save_every_s == seconds
    assert checkpoint.writes_meanwhile == (every_steps is not None or seconds is not None)


class NoLoss(rs.Task):
    def build_model(self) -> Any:
        raise AssertionError

    def build_optimizer(self, model: Any) -> Any:
        raise AssertionError


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": rs.Task()}, r"task=Task\(\) has no build_model. Define it in a subclass of raysharded.Task"),
        ({"task": NoLoss()}, r"task=NoLoss\(\) has no loss"),
        ({"data": []}, "ElasticTrainer: data has no samples"),
        (
            {"evaluation": rs.EvalConfig(data=[1, 2], every_steps=1, num_samples=3)},
            r"EvalConfig.num_samples=3: evaluation.data has 2 samples. Take num_samples=2 or less",
        ),
        (
            {"evaluation": rs.EvalConfig(data=(), every_steps=1, num_samples=3)},
            "ElasticTrainer: evaluation.data has no samples",
        ),
        (
            {"run": rs.RunConfig(**RUN, checkpoint=rs.CheckpointConfig(keep_best=("evaluation.loss", "min", 1)))},
            r"keep_best=\('evaluation.loss', 'min', 1\): the trainer has no evaluation",
        ),
    ],
)
def test_what_can_never_train_is_refused_when_it_is_made(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer(**change)


def test_good_configurations_are_taken_as_they_are() -> None:
    assert trainer().url == "b/a"
    assert trainer(task=clipped(None)).task.max_grad_norm is None
    assert rs.ScalingConfig(num_workers=(2, 8)).max_workers == 8
    assert rs.BatchConfig(global_batch_size=16, microbatch_size=2).num_microbatches == 8


@pytest.mark.parametrize("kind", [kind for kind in vars(errors).values() if isinstance(kind, type)])
def test_every_error_survives_pickling_with_its_message(kind: type) -> None:
    if not issubclass(kind, RayshardedError):
        return
    error = kind("what, where, remedy")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == "what, where, remedy"


def test_what_to_keep_and_the_key_reach_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"a key of a file, and long enough\n")
    checkpoint = rs.CheckpointConfig(
        keep_last=3, keep_every=100, keep_best=("evaluation.loss", "min", 2), signing_key_file=str(file)
    )
    storage = open_storage(str(tmp_path))
    held_out = rs.EvalConfig(data=[0], every_steps=1, num_samples=1)
    made = trainer(run=rs.RunConfig(**RUN, checkpoint=checkpoint), evaluation=held_out)
    files = files_of(made.spec(), storage, {})
    assert files.keep == Keep(last=3, every_steps=100, best=Best(metric="evaluation.loss", mode="min", count=2))
    assert files.key == SigningKey(b"a key of a file, and long enough")
    assert files.global_batch_size == 4
    monkeypatch.setenv("RAYSHARDED_CHECKPOINT_KEY", "a key of the environment")
    assert files_of(trainer().spec(), storage, {}).key == SigningKey(b"a key of the environment")
    monkeypatch.delenv("RAYSHARDED_CHECKPOINT_KEY")
    assert files_of(trainer().spec(), storage, {}).key is None


def test_the_workers_and_the_driver_receive_what_to_do_on_failures_and_notice() -> None:
    checkpoint = rs.CheckpointConfig(max_failed_saves=5, on_failed_saves="stop", grace_s=3.0)
    given = trainer(run=rs.RunConfig(**RUN, checkpoint=checkpoint)).spec()
    limits = limits_of(given, None)
    assert (limits.max_failed_saves, limits.stop_on_failed_saves) == (5, True)
    assert job_of(given).grace_s == 3.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rs.FailureConfig(on_non_finite=cast(Any, "ignore")), "choose one of 'stop', 'skip', 'rewind'"),
        (lambda: rs.FailureConfig(max_skipped_steps=0), "give a whole number of 1 or more"),
        (lambda: rs.EngineConfig(audit_every_steps=0), "give a whole number of 1 or more, or None"),
        (lambda: rs.EngineConfig(audit_every_steps=10, reduction="fast"), "reduction='exact'"),
    ],
)
def test_what_is_done_about_wrong_numbers_is_checked(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_the_first_step_is_proven_in_exact_mode_unless_that_is_turned_off() -> None:
    for engine, proves in (
        (rs.EngineConfig(), True),
        (rs.EngineConfig(prove_first_step=False), False),
        (rs.EngineConfig(reduction="fast"), False),
    ):
        assert limits_of(trainer(engine=engine).spec(), None).proves_first_step is proves
    with pytest.raises(ConfigError, match=r"EngineConfig\.prove_first_step='no': give a bool"):
        rs.EngineConfig(prove_first_step=cast(Any, "no"))


def test_an_attribute_that_is_set_afterwards_is_named_as_one() -> None:
    told = r"no field 'faults', and an attribute that is set afterwards: trainer.faults = FaultPlan\(...\)\. Its fields"
    with pytest.raises(ConfigError, match=told):
        rs.ElasticTrainer(faults=None)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"^EvalConfig has no field 'zzz'\. Its fields are data, "):
        rs.EvalConfig(zzz=1)  # type: ignore[call-arg]


def test_no_password_of_a_url_is_shown() -> None:
    url = "sftp://me:hunter2@host/runs"
    shown = repr(rs.RunConfig(name="gpt", storage_path=url, start_from=f"{url}/other", max_steps=1))
    assert "hunter2" not in shown
    assert shown.count("sftp://me:***@host/runs") == 2
    assert repr(StoredRun("gpt", f"{url}/gpt")) == "<StoredRun 'gpt' at sftp://me:***@host/runs/gpt>"
