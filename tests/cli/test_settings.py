"""`raysharded run --config run.yaml name=value`: the use of the settings, and the errors for wrong ones."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

import raysharded as rs
from raysharded.cli.settings import NESTED, SECTIONS, TUPLES, apply, known_names, read_settings
from raysharded.errors import ConfigError
from tests.cli.test_run import raysharded_run
from tests.training.harness import GptTask


class Tiny(GptTask):
    def __init__(self, layers: int, width: int = 8) -> None:
        self.layers, self.width = layers, width


WHOLE: dict[str, Any] = {
    "task": {"layers": 2},
    "data": {"paths": "corpus", "seq_len": 16},
    "batch": {"global_batch_size": 16, "microbatch_size": 2},
    "scaling": {"num_workers": [2, 8]},
    "run": {"name": "x", "storage_path": "runs", "max_steps": 10, "checkpoint": {"every_steps": 5}},
}
YAML = """
task: {layers: 2}
data: {paths: corpus, seq_len: 16}
batch:
  global_batch_size: 16
  microbatch_size: 2
scaling: {num_workers: [2, 8]}
run: {name: x, storage_path: runs, max_steps: 10, checkpoint: {every_steps: 5}}
"""
TOML = """
task.layers = 2
data = {paths = "corpus", seq_len = 16}
scaling.num_workers = [2, 8]
batch = {global_batch_size = 16, microbatch_size = 2}
[run]
name = "x"
storage_path = "runs"
max_steps = 10
checkpoint.every_steps = 5
"""


def written(folder: Path, content: str, name: str = "run.yaml") -> str:
    (folder / name).write_text(content)
    return str(folder / name)


def trainer() -> rs.ElasticTrainer:
    return apply(Tiny, WHOLE)


@pytest.mark.parametrize(("name", "content"), [("a.yaml", YAML), ("a.toml", TOML), ("a.json", json.dumps(WHOLE))])
def test_a_task_and_a_file_are_a_trainer_in_every_format(tmp_path: Path, name: str, content: str) -> None:
    made = apply(Tiny, read_settings(written(tmp_path, content, name), ["task.width=32"]))
    assert isinstance(made.task, Tiny)
    assert (made.task.layers, made.task.width, made.data.seq_len) == (2, 32, 16)
    assert (made.scaling.num_workers, made.batch.global_batch_size) == ((2, 8), 16)
    assert (made.run.checkpoint.every_steps, made.run.max_steps) == (5, 10)


def test_overrides_change_what_they_name_and_nothing_else(tmp_path: Path) -> None:
    before = trainer()
    settings = read_settings(
        None,
        [
            "batch.global_batch_size=32",
            "run.checkpoint.keep_last=7",
            "engine.compile=true",
            "engine.redundancy.parity=[4, 1]",
            "scaling.num_workers=3",
            "run.name=other",
        ],
    )
    after = apply(before, settings)
    assert (after.batch.global_batch_size, after.batch.microbatch_size) == (32, 2)
    assert (after.run.checkpoint.keep_last, after.run.checkpoint.every_steps) == (7, 5)
    assert (after.engine.compile, after.engine.redundancy) == (True, rs.Redundancy(parity=(4, 1)))
    assert (after.scaling.num_workers, after.run.name, after.run.max_steps) == (3, "other", 10)
    assert (before.batch.global_batch_size, before.run.name, before.engine.redundancy) == (16, "x", None)
    assert apply(before, {}) is before


@pytest.mark.parametrize("text", ["1,2", "(1,2)", "(1, 2)", "[1,2]", "[1, 2]", "1, 2", "(1, 2,)"])
def test_a_tuple_is_read_as_python_and_json_write_it_and_without_brackets(text: str) -> None:
    after = apply(trainer(), read_settings(None, [f"scaling.num_workers={text}", f"engine.redundancy.parity={text}"]))
    assert (after.scaling.num_workers, after.engine.redundancy) == ((1, 2), rs.Redundancy(parity=(1, 2)))


@pytest.mark.parametrize(
    "text",
    [
        "loss,min,2",
        "(loss, min, 2)",
        "('loss', 'min', 2)",
        '["loss", "min", 2]',
    ],
)
def test_a_tuple_of_text_needs_no_quotes(text: str) -> None:
    after = apply(trainer(), read_settings(None, [f"run.checkpoint.keep_best={text}"]))
    assert after.run.checkpoint.keep_best == ("loss", "min", 2)


@pytest.mark.parametrize(("text", "notices"), [("aws", ("aws",)), ("aws,gcp", ("aws", "gcp")), ("()", ())])
def test_a_tuple_of_any_length_may_have_one_item_or_none(text: str, notices: tuple[str, ...]) -> None:
    after = apply(trainer(), read_settings(None, [f"run.failure.preemption_notices={text}"]))
    assert after.run.failure.preemption_notices == notices


def test_every_setting_that_is_a_tuple_has_an_example_which_is_accepted_and_which_its_error_shows() -> None:
    tuples = {
        f"{section}.{field.name}"
        for section, kind in {**SECTIONS, **NESTED}.items()
        for field in dataclasses.fields(kind)
        if re.search("tuple|Sequence", str(field.type))
    }
    assert tuples - {"run.metrics"} == TUPLES.keys()  # which are objects
    for name, example in TUPLES.items():
        apply(trainer(), read_settings(None, [f"{name}={example}"]))
        with pytest.raises(ConfigError) as raised:
            apply(trainer(), read_settings(None, [f"{name}=2;8,"]))
        assert str(raised.value).startswith(f"{name}=")
        assert f" On the command line: {name}={example}." in str(raised.value)
    with pytest.raises(
        ConfigError, match=r"^scaling.num_workers=1-2: give .* command line: scaling.num_workers=2,8\.$"
    ):
        apply(trainer(), read_settings(None, ["scaling.num_workers=1-2"]))


def test_the_last_override_wins_over_those_before_and_over_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, YAML)
    settings = read_settings(file, ["run.max_steps=20", "run.max_steps=30", "run.checkpoint.every_steps=None"])
    assert (settings["run"]["max_steps"], settings["run"]["checkpoint"]["every_steps"]) == (30, None)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "batch.globl_batch_size=3",
            "there is no setting batch.globl_batch_size: did you mean batch.global_batch_size?",
        ),
        ("max_steps=3", "there is no setting max_steps: did you mean run.max_steps?"),
        ("run.keep_last=3", "there is no setting run.keep_last: did you mean run.checkpoint.keep_last?"),
        ("scalng.num_workers=3", "did you mean scaling.num_workers?"),
        ("scaling.quux=3", "there is no setting scaling.quux: scaling has num_workers, "),
        ("quux=3", "there is no setting quux: the sections are task, data, batch, "),
        ("batch.global_batch_size", "give SECTION.FIELD=VALUE"),
    ],
)
def test_a_mistyped_setting_names_the_nearest(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_settings(None, [override])
    assert message in str(raised.value)
    assert override in str(raised.value)


def test_a_mistyped_setting_in_a_file_names_the_file_and_the_nearest(tmp_path: Path) -> None:
    file = written(tmp_path, "run: {checkpoint: {every_step: 5}}\n")
    with pytest.raises(ConfigError) as raised:
        read_settings(file, [])
    assert str(raised.value).startswith(f"{file}: there is no setting run.checkpoint.every_step: ")
    assert "did you mean run.checkpoint.every_steps?" in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({**WHOLE, "task": {"layer": 2}}, "there is no setting task.layer: did you mean task.layers?"),
        ({**WHOLE, "task": {}}, "Tiny needs task.layers."),
        ({**WHOLE, "data": {"paths": "x", "seqlen": 3}}, "did you mean data.seq_len?"),
        ({name: WHOLE[name] for name in ("task", "data", "batch")}, "it needs the settings scaling, run as well"),
        ({**WHOLE, "batch": 3}, "batch=3: give its fields"),
        ({**WHOLE, "batch": {"global_batch_size": "many", "microbatch_size": 2}}, "batch.global_batch_size=many: give"),
    ],
)
def test_what_does_not_make_a_trainer_is_refused_with_what_is_missing(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        apply(Tiny, settings)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.yaml", None, "cannot be read"),
        ("a.yaml", "a: [", "is not well formed"),
        ("a.toml", "a = ", "is not well formed"),
        ("a.json", "[1]", "has list instead of sections"),
        ("a.ini", "", "give a file that ends in"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_error(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    if content is not None:
        written(tmp_path, content, name)
    with pytest.raises(ConfigError, match=message):
        read_settings(str(tmp_path / name), [])


def test_no_configuration_inside_another_is_forgotten() -> None:
    kinds = {kind.__name__ for kind in NESTED.values()}
    for owner in ("BatchConfig", "ScalingConfig", "RunConfig", "EngineConfig", "EvalConfig"):
        for field in dataclasses.fields(getattr(rs, owner)):
            names = {name for name in rs.__all__ if dataclasses.is_dataclass(getattr(rs, name))}
            assert {part.strip() for part in str(field.type).split("|")} & names <= kinds
    assert {"batch.seed", "run.checkpoint.every_steps", "engine.redundancy.parity"} <= set(known_names())


def test_the_command_passes_settings_on(tmp_path: Path) -> None:
    (tmp_path / "train_it.py").write_text(
        "import raysharded as rs\n"
        "from tests.training.harness import GptTask\n"
        "class Tiny(GptTask):\n"
        "    def __init__(self, layers): self.layers = layers\n"
        "def fit(trainer, take_over, context):\n"
        "    steps = trainer.run.max_steps * 1000 + trainer.task.layers\n"
        "    return rs.Result(name='x', url='u', steps=steps, fingerprint='f', checkpoint='')\n"
        "rs.ElasticTrainer.fit = fit\n"
    )
    file = written(tmp_path, YAML)
    ran = raysharded_run("train_it:Tiny", tmp_path, "--config", file, "run.max_steps=7", "--json")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["steps"] == 7002
    wrong = raysharded_run("train_it:Tiny", tmp_path, "--config", file, "run.maxsteps=7")
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert wrong.stderr == (
        "error: setting run.maxsteps=7: there is no setting run.maxsteps: did you mean run.max_steps?\n"
    )
