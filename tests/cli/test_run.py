"""`raysharded run`: the allowed contents of a user's file, and the errors for all others."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raysharded.errors import ConfigError, TaskError
from raysharded.trainer import ElasticTrainer
from tests.cases import tried_each_time
from tests.cli.processes import in_a_folder
from tests.paths import ROOT

# A trainer without a cluster: what `fit` does is up to each test.
TRAINER = """
import raysharded as rs
from raysharded.errors import ClusterError, NonFiniteLoss

class Tiny(rs.Task):
    build_model = build_optimizer = loss = lambda self, *given: None

class Trainer(rs.ElasticTrainer):
    def __init__(self):
        pass
    def fit(self, take_over, context):
        {fit}

def trainer():
    return Trainer()

made = trainer()
number = 3
"""
# In place of its constructor: with settings that can be changed.
REAL = """        super().__init__(
            task=Tiny(),
            data=[1, 2],
            batch=rs.BatchConfig(global_batch_size=2, microbatch_size=1),
            scaling=rs.ScalingConfig(num_workers=1),
            run=rs.RunConfig(name="tiny", storage_path="runs", max_steps=6),
        )
"""
FINISHED = 'return rs.Result(name="tiny", url="/runs/tiny", steps=6, fingerprint="f" * 32, checkpoint="")'


def raysharded_run(target: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return in_a_folder(["run", target, *options], folder)


def write(folder: Path, fit: str = FINISHED, name: str = "train_tiny.py") -> Path:
    file = folder / name
    file.write_text(TRAINER.format(fit=fit))
    return file


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], object]]:
    """Loads a target in this process, with the test's folder as the current one, and forgets it afterwards."""
    from raysharded.cli.target import load_trainer

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield load_trainer
    for name in {name for name in sys.modules if name.startswith("train_")} - before:
        del sys.modules[name]


def test_a_file_is_run_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    ran = subprocess.run(
        [sys.executable, "-m", "raysharded", "run", f"{write(tmp_path)}:trainer"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path / "elsewhere",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == (f"run tiny: 6 steps, fingerprint {'f' * 32}\nreport: raysharded report /runs/tiny\n")


@pytest.mark.parametrize("target", ["train_a.py", "train_a.py:made", "train_a:trainer", "train_a:made", "./train_a.py"])
def test_a_target_is_a_file_or_a_module_and_names_a_function_or_a_trainer(
    target: str, load: Callable[[str], object], tmp_path: Path
) -> None:
    write(tmp_path, name="train_a.py")
    assert isinstance(load(target), ElasticTrainer)
    assert sys.path[0] == str(tmp_path)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nothing.py", "there is no file"),
        ("nothing_here:trainer", "there is no module 'nothing_here'"),
        ("nothing_here.deeper:trainer", "there is no module 'nothing_here.deeper'"),
        ("train_b.py:other", "has no 'other'"),
        ("train_b.py:number", "gives 3, not a raysharded.ElasticTrainer"),
        ("train_b.py:", "names no trainer"),
        ("json.py", "there is another module called 'json'"),
    ],
)
def test_a_target_that_names_nothing_is_one_clear_error(
    target: str, message: str, load: Callable[[str], object], tmp_path: Path
) -> None:
    write(tmp_path, name="train_b.py")
    write(tmp_path, name="json.py")
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        load(target)
    assert target in str(raised.value)


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (
            "import raysharded as rs\ndef trainer():\n    return rs.no_such_name(3)\n",
            "return rs.no_such_name(3)",
        ),
        ("def trainer(:\n    pass\n", "def trainer(:"),
        ("import no_such_package\n", "import no_such_package"),
        ("raise OSError('no disk')\n", "raise OSError('no disk')"),
    ],
)
def test_what_the_users_own_code_raises_is_shown_from_there_on(
    code: str, line: str, load: Callable[[str], object], tmp_path: Path
) -> None:
    file = tmp_path / "train_c.py"
    file.write_text(code)
    with pytest.raises(TaskError, match=r"train_c\.py raised ") as raised:
        load("train_c.py")
    shown = raised.value.user_traceback
    assert line in shown
    assert str(file) in shown
    assert "cli/target.py" not in shown
    assert "importlib" not in shown


def test_a_finished_run_is_printed_as_json(tmp_path: Path) -> None:
    ran = raysharded_run(str(write(tmp_path)), tmp_path, "--json")
    told = {"name": "tiny", "url": "/runs/tiny", "steps": 6, "fingerprint": "f" * 32, "checkpoint": ""}
    told |= {"loss": None, "metrics": {}, "evaluation": {}, "wall_s": None, "best_checkpoint": None}
    assert (ran.returncode, json.loads(ran.stdout)) == (0, told)


def test_what_the_program_and_its_processes_print_is_not_in_the_json(tmp_path: Path) -> None:
    prints = f"import os; print('mine', flush=True); os.system('echo a child'); {FINISHED}"
    ran = raysharded_run(str(write(tmp_path, prints)), tmp_path, "--json")
    assert (ran.returncode, json.loads(ran.stdout)["name"]) == (0, "tiny")
    assert ran.stderr.splitlines() == ["mine", "a child"]
    ran = raysharded_run(str(write(tmp_path, prints)), tmp_path)
    assert ran.stdout.splitlines()[:2] == ["mine", "a child"]


def test_an_error_of_the_run_is_one_line(tmp_path: Path) -> None:
    ran = raysharded_run(str(write(tmp_path, 'raise ClusterError("2 of 4 workers. Add nodes.")')), tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr) == (75, "", "error: 2 of 4 workers. Add nodes.\n")


def test_an_error_of_the_task_shows_the_users_traceback_once(tmp_path: Path) -> None:
    fit = 'raise NonFiniteLoss("the loss of step 3 is nan", "Traceback of theirs\\n  in loss\\n")'
    ran = raysharded_run(str(write(tmp_path, fit)), tmp_path)
    assert ran.returncode == 1
    assert ran.stderr == "Traceback of theirs\n  in loss\nerror: the loss of step 3 is nan\n"


def test_ctrl_c_ends_a_run_with_one_line(tmp_path: Path) -> None:
    file = write(tmp_path, 'import time; print("training", flush=True); time.sleep(60)')
    process = subprocess.Popen(
        [sys.executable, "-m", "raysharded", "run", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "training\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, "interrupted\n")


@pytest.mark.parametrize(
    "command",
    tried_each_time(
        [[], ["run"], ["data", "pack"]],
        [[], ["run"], ["report"], ["data"], ["data", "pack"], ["checkpoint"], ["doctor"]],
    ),
)
def test_help_loads_neither_torch_nor_ray(command: list[str]) -> None:
    code = (
        "import sys\nfrom raysharded.cli import main\n"
        f"sys.argv = ['raysharded', *{command!r}, '--help']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "assert not {'torch', 'ray', 'numpy', 'pyarrow'} & set(sys.modules)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "Usage: raysharded" in ran.stdout


def test_other_bits_are_accepted_with_a_flag(tmp_path: Path) -> None:
    file = write(tmp_path, 'raise ClusterError(f"accepts: {self.run.accept_arithmetic}, {self.run.max_steps} steps")')
    file.write_text(file.read_text().replace("        pass\n", REAL, 1))
    for options, accepts in (((), False), (("--accept-arithmetic",), True)):
        ran = raysharded_run(f"{file}:trainer", tmp_path, "run.max_steps=7", *options)
        assert f"accepts: {accepts}, 7 steps" in ran.stderr
