"""The commands: their output, and their exit status."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
import typer.testing
from typer.testing import CliRunner, Result

from raysharded import __version__
from raysharded.cli import app, diagnostics, machine
from raysharded.ray_backend import cluster
from tests.driver.recorded import recorded
from tests.driver.scripted import training
from tests.report.entries import data, generation, run_with_a_loss, started, step, write_run

vars(typer.testing)["_get_command"] = cache(typer.main.get_command)
"""All tests of a process share the commands. Making them from their functions takes a tenth of a second."""


def invoke(*arguments: object) -> Result:
    """Run a command in this process. An exception that nothing caught is raised here."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def succeed(*arguments: object) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def fail(*arguments: object) -> str:
    """The message of a command that ends with exactly one error."""
    result = invoke(*arguments)
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.stderr
    assert result.stderr.count("error: ") == 1
    assert result.stderr.startswith("error: ")
    return result.stderr.removeprefix("error: ").rstrip()


# -- report --


def test_report_shows_the_run_and_the_proof(tmp_path: Path) -> None:
    out = succeed("report", write_run(tmp_path, run_with_a_loss()))
    for part in ("finished, 6 of 6 steps", "incidents", "Worker 1 was lost", "checkpoints", "samples lost", "f" * 32):
        assert part in out


def test_report_gives_the_same_as_json(tmp_path: Path) -> None:
    found = json.loads(succeed("report", write_run(tmp_path, run_with_a_loss()), "--json"))
    assert (found["ok"], found["steps"], found["samples_lost"], found["samples_repeated"]) == (True, 6, 0, 0)


def test_report_writes_a_page_and_nothing_else(tmp_path: Path) -> None:
    url, page = write_run(tmp_path / "tiny", run_with_a_loss()), tmp_path / "report.html"
    page.write_text("an older one")
    result = invoke("report", url, "--html", page)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr.startswith(f"{page}: ")
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "tiny"]
    assert succeed("report", url, "--html", "-") == page.read_text(encoding="utf-8")


def test_report_names_the_place_where_a_page_cannot_be_written(tmp_path: Path) -> None:
    url = write_run(tmp_path / "tiny", run_with_a_loss())
    assert fail("report", url, "--html", tmp_path / "no" / "report.html").startswith(f"{tmp_path}/no/report.html: ")
    assert "Is a directory" in fail("report", url, "--html", tmp_path)


def test_report_of_a_damaged_journal_shows_what_is_there_and_ends_with_1(tmp_path: Path) -> None:
    url = write_run(tmp_path, run_with_a_loss())
    (tmp_path / "journal" / "99999999.jsonl").write_text("{\n")
    result = invoke("report", url)
    assert result.exit_code == 1
    assert "The journal is damaged" in result.stdout
    assert "samples lost" in result.stdout


def test_report_ends_with_1_when_samples_were_lost(tmp_path: Path) -> None:
    entries = [started(), data(), *generation(1, [0], 0), step(1), step(3)]
    result = invoke("report", write_run(tmp_path, entries))
    assert result.exit_code == 1
    assert "steps without record" in result.stdout


def test_report_of_nothing_is_one_error(tmp_path: Path) -> None:
    assert fail("report", tmp_path).startswith(f"there is no run at {tmp_path}")


# -- replay --


def test_replay_prints_a_line_for_every_event_and_ends_with_1_when_the_journal_differs(
    tmp_path: Path,
) -> None:
    run = training(size=2, step=3)
    run.lost(1)
    out = succeed("replay", recorded(tmp_path / "run", run)).splitlines()
    assert out[0].startswith("driver d1, ")
    assert "the driver begins  ->  start workers 0, 1" in out[1]
    (lost,) = [line for line in out if "worker 1 is lost: its process died" in line]
    assert "record worker_lost; interrupt worker 0" in lost
    assert out[-1] == f"driver d1: {len(out) - 3} events, decided as it was then"
    (found,) = json.loads(succeed("replay", tmp_path / "run", "--json"))
    assert (len(found["moments"]), found["differences"]) == (len(out) - 2, [])
    assert found["moments"][-1]["state"].startswith("stopping; generation 1 of workers 0, 1; step 3; ")
    segments = (tmp_path / "run" / "journal").iterdir()
    (segment,) = [path for path in segments if '"worker_lost","at":' in path.read_text()]
    segment.write_text(segment.read_text().replace('"worker_lost","at":', '"worker_left","at":'))
    result = invoke("replay", tmp_path / "run")
    assert result.exit_code == 1
    assert f"   DIFFERS  journal/{segment.name}:" in result.stdout
    assert invoke("replay", tmp_path / "run", "--json").exit_code == 1


def test_replay_of_what_was_not_recorded_is_one_error_that_shows_how(tmp_path: Path) -> None:
    assert "RunConfig(record_events=True)" in fail("replay", write_run(tmp_path, run_with_a_loss()))
    assert fail("replay", tmp_path / "none").startswith(f"there is no run at {tmp_path}/none")


# -- data --


def test_pack_and_info_go_together(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "b.jsonl").write_text('{"body": "defg"}\n')
    out = succeed("data", "pack", tmp_path / "a.txt", tmp_path / "b.jsonl", tmp_path / "out", "--text-field", "body")
    assert out.startswith(f"{tmp_path}/out: 9 tokens of 2 documents in 1 file, ")
    found = json.loads(succeed("data", "info", tmp_path / "out", "--seq-len", 4, "--json"))
    assert found == {
        "files": 1,
        "tokens": 9,
        "vocab_size": 257,
        "tokenizer": "bytes",
        "seq_len": 4,
        "samples": 2,
    }
    told = succeed("data", "info", tmp_path / "out")
    assert "257" in told
    assert told.splitlines()[-1] == "with --documents: number and lengths of documents, and a decoded sample"
    assert "with --documents" not in succeed("data", "info", tmp_path / "out", "--documents")


def test_data_arrange_plans_what_pack_wrote_and_changes_no_plan_that_is_there(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number}.txt").write_text("word " * (7 * number + 1))
    succeed("data", "pack", tmp_path, tmp_path / "store")
    command = ("data", "arrange", tmp_path / "store", "--seq-len", 128)
    first = succeed(*command)
    assert "30 documents in" in first
    assert "% of the places are padding" in first
    plan = (tmp_path / "store" / "packed-128.plan").read_bytes()
    again = json.loads(succeed(*command, "--json"))
    assert (again["num_documents"], again["seq_len"], again["end_of_document"]) == (30, 128, 256)
    assert (tmp_path / "store" / "packed-128.plan").read_bytes() == plan
    assert fail("data", "arrange", tmp_path, "--seq-len", 128).startswith(f"{tmp_path}: no token store")


def test_pack_passes_every_option_on(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("abcdefgh")
    options = ["--format", "text", "--tokens-per-file", 4, "--tokens-per-row-group", 2, "--compression", "none"]
    found = json.loads(succeed("data", "pack", tmp_path / "a.log", tmp_path / "out", *options, "--json"))
    assert (found["files"], found["tokens"], found["documents"]) == (3, 9, 1)


def test_pack_names_what_is_wrong_with_its_input(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{broken\n')
    out = tmp_path / "out"
    assert fail("data", "pack", tmp_path / "nothing.txt", out).startswith(f"{tmp_path}/nothing.txt: no such file")
    assert fail("data", "pack", tmp_path / "a.jsonl", out).startswith(f"{tmp_path}/a.jsonl, line 2: not JSON")
    for option, value in (("--format", "xml"), ("--compression", "gzip"), ("--tokens-per-file", "0")):
        wrong = invoke("data", "pack", tmp_path / "a.jsonl", out, option, value)
        assert wrong.exit_code == 2
        assert f"Invalid value for '{option}'" in wrong.stderr
    assert not out.exists()


def test_info_names_a_file_that_was_cut_short(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc" * 1000)
    succeed("data", "pack", tmp_path / "a.txt", tmp_path / "out")
    (shard,) = (tmp_path / "out").glob("*.tokens")
    shard.write_bytes(shard.read_bytes()[:-100])
    assert fail("data", "info", tmp_path / "out").startswith(str(shard))
    succeed("data", "pack", tmp_path / "a.txt", tmp_path / "files", "--layout", "parquet")
    part = tmp_path / "files" / "part-00000.parquet"
    part.write_bytes(part.read_bytes()[:-100])
    assert fail("data", "info", tmp_path / "files").startswith(str(part))


def test_token_files_become_a_store_with_the_same_samples(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc" * 1000)
    succeed("data", "pack", tmp_path / "a.txt", tmp_path / "files", "--layout", "parquet", "--tokens-per-file", "700")
    assert "3001 tokens in 2 shards" in succeed(
        "data", "convert", tmp_path / "files", tmp_path / "store", "--tokens-per-file", "2000"
    )
    files, store = (json.loads(succeed("data", "info", tmp_path / name, "--json")) for name in ("files", "store"))
    assert {**files, "files": 2} == store
    assert fail("data", "convert", tmp_path / "store", tmp_path / "other").endswith("store is a token store already.")
    assert "already has a token store" in fail("data", "convert", tmp_path / "files", tmp_path / "store")


# -- the rest --


@pytest.fixture(scope="module")
def new_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("doctor") / "new"


@pytest.fixture(scope="module")
def diagnosis(new_folder: Path) -> dict[str, Any]:
    """The doctor's findings about a folder that does not exist yet."""
    found: dict[str, Any] = json.loads(succeed("doctor", new_folder, "--json"))
    return found


@pytest.mark.procs
@pytest.mark.slow
def test_doctor_lists_what_there_is(diagnosis: dict[str, Any], new_folder: Path) -> None:
    assert (diagnosis["ok"], diagnosis["raysharded"]) == (True, __version__)
    assert diagnosis["storage"] == f"{new_folder}: writable"
    assert diagnosis["cpus"] >= 1


@pytest.mark.procs
@pytest.mark.slow
def test_doctor_tries_what_a_run_needs_and_reports_what_it_found(diagnosis: dict[str, Any], new_folder: Path) -> None:
    tried = {check["name"]: check for check in diagnosis["checks"]}
    names = {"ray runs", "ray used", "gloo", "nccl", "shared memory", "extras", "home", "memory", "open files"}
    assert tried.keys() == names | {"storage", "conditional write", "clock", "unfinished uploads"}
    assert tried["ray used"]["found"].startswith(("a separate Ray on this machine (", "the Ray at "))
    assert "a group of two added" in tried["gloo"]["found"]
    assert tried["conditional write"]["found"] == "the first of two writers won"
    assert all(check["ok"] for check in diagnosis["checks"])
    assert not new_folder.exists()  # nothing of it stays


@pytest.mark.procs
@pytest.mark.long  # tests/demo/test_self_test.py has one that fails each time
def test_doctor_trains_a_model_at_two_sizes_on_request(tmp_path: Path) -> None:
    found = json.loads(succeed("doctor", tmp_path / "new", "--self-test", "--json"))
    (tried,) = [check for check in found["checks"] if check["name"] == "self-test"]
    assert tried["ok"]
    assert "the same losses, gradient norms and weights" in tried["found"]


def test_doctor_names_the_variable_where_no_temporary_file_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/none"])
    (gloo, *_) = diagnostics.collectives()
    assert not gloo.ok
    assert gloo.found == "not tested: No usable temporary directory found in ['/none']"
    assert gloo.advice == "Set TMPDIR to a folder that can be written."


def test_doctor_finds_storage_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics, "collectives", list)  # tried above, and they take seconds
    (tmp_path / "file").write_text("")
    result = invoke("doctor", "--storage", tmp_path / "file")
    assert result.exit_code == 1
    assert "cannot be written to" in result.stdout
    assert "torch" in result.stdout


def test_doctor_names_extras_that_are_missing_and_what_they_are_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "find_spec", lambda name: None if name in ("zfec", "aiohttp_cors") else name)
    found = machine.extras()
    assert (found.ok, found.found) == (True, "s3, tokenizers, huggingface, tensorboard")
    assert found.advice == (
        "Missing, if you need them: jobs (`ray job submit`, the dashboard); parity (Redundancy(parity=(k, m)) with m "
        "of 2 or more): `pip install 'raysharded[NAME]'`."
    )
    for module, _ in machine.EXTRAS.values():
        assert importlib.util.find_spec(module) is not None, "an extra of the development environment"


def test_doctor_inspects_limits_and_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 1024))
    found = machine.open_files()
    assert (found.ok, found.found) == (False, "at most 1024, enough for a run of 121 workers")
    assert "nofile" in found.advice
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 65536))
    found = machine.open_files()
    assert (found.ok, found.advice) == (True, "")
    assert found.found == "1024, which a run raises to 65536, enough for a run of 8185 workers"
    monkeypatch.setenv("HOME", str(tmp_path / "nothing"))
    found = machine.home()
    assert (found.ok, found.found) == (False, f"HOME={tmp_path}/nothing is not writable")


def test_doctor_names_a_cluster_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_ANSWER_S", 0.1)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    found = machine.which_ray()
    assert (found.ok, found.found) == (False, "RAY_ADDRESS=127.0.0.1:1")
    assert "there is no Ray cluster at 127.0.0.1:1" in found.advice
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert machine.which_ray().found == "a separate Ray on this machine (as RAY_ADDRESS=local says)"


def test_demo_passes_its_options_on_and_ends_with_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    from types import SimpleNamespace

    calls: list[dict[str, object]] = []

    def run_demo(**options: object) -> int:
        calls.append(options)
        return 3

    monkeypatch.setitem(sys.modules, "raysharded.demo", SimpleNamespace(run_demo=run_demo))
    assert invoke("demo", "--json", "x.json", "--steps", 7, "--chaos", "kill:every=9s").exit_code == 3
    expected = {
        "json_path": "x.json",
        "steps": 7,
        "workers": None,
        "storage": None,
        "chaos": "kill:every=9s",
        "seed": 0,
    }
    assert calls == [expected]


def test_version_and_wrong_usage() -> None:
    assert succeed("--version") == f"{__version__}\n"
    wrong = invoke("report")
    assert wrong.exit_code == 2
    assert "Missing argument" in wrong.stderr


def test_an_interrupt_is_one_line_and_130(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(url: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("raysharded.report.load", interrupted)
    result = invoke("report", tmp_path)
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")
