"""`raysharded checkpoint`: the output, the effects, and the exit status of its commands."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from raysharded.checkpoint import Storage, newest_complete, open_storage, pin, save
from raysharded.checkpoint.format.paths import data_path
from raysharded.checkpoint.retention.fork_reference import Reference, encode_reference
from raysharded.checkpoint.retention.two_phase_delete import retire
from raysharded.cli.checkpoint.gc import _working
from raysharded.cli.output import byte_progress
from raysharded.locations import join_url
from raysharded.run.control import _chosen
from raysharded.testing.storages import save_rows
from tests.canary import connections
from tests.checkpoint.retention.runs import Run, ref_of, save_v1, states
from tests.checkpoint.test_signed_objects import KEY, Run as SignedRun
from tests.cli.test_commands import fail, invoke, succeed


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    """A run with committed checkpoints of steps 10 and 20, and saves of 30 and 40 that never were."""
    storage = open_storage(str(tmp_path / "run"))
    run = Run(storage)
    for step in (10, 20):
        run.save(step, metrics={"loss": step / 10})
    run.unfinished(30)
    run.unclaimed(40)
    return storage


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A checkpoint by itself, in a folder of any name."""
    import numpy as np

    storage = open_storage(str(tmp_path / "by itself"))
    prefix = save_rows(storage, {"w": np.zeros((4, 3), np.float32)}, step=7, save_id="x", num_writers=2)
    (tmp_path / "by itself" / prefix).rename(tmp_path / "my checkpoint")
    return str(tmp_path / "my checkpoint")


# -- ls, show --


def test_a_checkpoint_that_a_rollback_deleted_and_a_pin_keeps_is_not_taken_for_the_newest(
    storage: Storage, tmp_path: Path
) -> None:
    undone = ref_of(storage, Run(storage).save(50))
    pin(storage, "held", undone)
    assert not retire(storage, undone, number=0)  # pinned: it is marked, and still there
    url = storage.url
    assert json.loads(succeed("checkpoint", "show", url, "--json"))["step"] == 20
    assert "step 20: whole" in succeed("checkpoint", "verify", url)
    assert "step 20" in succeed("checkpoint", "export", url, tmp_path / "copy", "--format", "raysharded")
    assert "begins with step 20" in succeed("checkpoint", "fork", url, "other")
    assert _chosen(storage, None, None).step == 20
    assert json.loads(succeed("checkpoint", "show", url, "--step", "50", "--json"))["step"] == 50
    assert "step 50: whole" in succeed("checkpoint", "verify", url, "--step", "50")


def test_names_that_look_like_markup_are_printed_as_they_are(tmp_path: Path) -> None:
    import torch

    names, above = ("w[/x]", "y[red]z", ":100:"), tmp_path / "side[/z]"
    for number, name in ((0.0, "a"), (1.0, "b")):
        save(str(above / name), {name: torch.full((3,), number) for name in names}, metadata={"note": "see [/tmp/x]"})
    for command in (("show", above / "a"), ("diff", above / "a", above / "b")):
        shown = invoke("checkpoint", *command).stdout
        assert all(name in shown for name in names), shown
    assert "see [/tmp/x]" in succeed("checkpoint", "show", above / "a")
    assert above.name in succeed("checkpoint", "ls", above)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_names_a_folder_that_looks_like_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for working in (lambda: byte_progress("of [/x][red]y", 3), lambda: _working("of [/x][red]y")):
        stderr = _Terminal()
        monkeypatch.setattr(sys, "stderr", stderr)
        with working():
            pass
        assert "of [/x][red]y" in stderr.getvalue()


def test_ls_lists_every_save_and_why_it_is_no_checkpoint(storage: Storage) -> None:
    rows = json.loads(succeed("checkpoint", "ls", storage.url, "--json"))
    assert [(row["step"], row["complete"], row["state"]) for row in rows] == [
        (10, True, "committed"),
        (20, True, "committed"),
        (30, False, "unfinished"),
        (40, False, "unclaimed"),
    ]
    assert (len(rows[0]["digest"]), rows[0]["generation"], rows[0]["files"], rows[0]["pins"]) == (64, 1, 2, [])
    out = succeed("checkpoint", "ls", storage.url)
    assert out.count("committed   ") >= 2
    assert "step 30 under checkpoints/step-0000000030-g000001 was never committed: it has no manifest.json." in out
    assert "no claim names it" in out


def test_ls_and_show_know_a_checkpoint_by_itself(folder: str) -> None:
    [row] = json.loads(succeed("checkpoint", "ls", folder, "--json"))
    assert (row["step"], row["complete"], row["prefix"]) == (7, True, "my checkpoint")
    assert row["state"] == "committed"  # the word of a run's
    assert "my checkpoint" in succeed("checkpoint", "ls", folder)
    found = json.loads(succeed("checkpoint", "show", f"{folder}/", "--json"))
    assert (found["url"], found["step"], found["tensors"]["w"]["shape"]) == (folder, 7, [4, 3])
    assert "is of step 7" in fail("checkpoint", "show", folder, "--step", 8)


def test_show_is_of_the_newest_committed_or_of_the_step_that_is_named(storage: Storage) -> None:
    found = json.loads(succeed("checkpoint", "show", storage.url, "--json"))
    assert (found["step"], found["tensors"]["w"]["shape"], found["metadata"]) == (20, [20], {"metrics": {"loss": 2.0}})
    assert "loss 1.0" in succeed("checkpoint", "show", storage.url, "--step", 10)
    message = fail("checkpoint", "show", storage.url, "--step", 30)
    assert "no committed checkpoint of step 30; there are: 10, 20" in message


def test_a_save_in_a_run_is_shown_by_its_own_folder_too(storage: Storage) -> None:
    url = f"{storage.url}/checkpoints/step-0000000010-g000001"
    assert json.loads(succeed("checkpoint", "show", url, "--json"))["step"] == 10


def test_a_run_of_version_1_is_listed_and_shown(tmp_path: Path) -> None:
    save_v1(open_storage(str(tmp_path)), 7)
    [row] = json.loads(succeed("checkpoint", "ls", tmp_path, "--json"))
    assert (row["state"], row["digest"]) == ("committed", None)
    assert json.loads(succeed("checkpoint", "show", tmp_path, "--json"))["version"] == 1


def test_checkpoints_of_nothing_are_one_error(tmp_path: Path) -> None:
    for command in (["ls"], ["show"], ["verify"], ["gc"]):
        assert fail("checkpoint", *command, tmp_path).startswith(f"there are no checkpoints at {tmp_path}")
    assert fail("checkpoint", "pin", tmp_path, "tag").startswith(f"there are no checkpoints at {tmp_path}")


def test_unsigned_checkpoints_are_refused_when_a_key_is_set(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYSHARDED_CHECKPOINT_KEY", "0123456789abcdef")
    for command in ("show", "verify"):
        result = invoke("checkpoint", command, storage.url)
        assert result.exit_code == 1
        assert "not signed" in result.output


def test_every_command_says_whether_a_checkpoint_is_signed_and_whether_that_was_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SignedRun(tmp_path)
    run.begin()
    run.save(10)
    url = run.storage.url
    (listed,) = json.loads(succeed("checkpoint", "ls", url, "--json"))
    assert listed["signed"] is True
    row = next(line for line in succeed("checkpoint", "ls", url).splitlines() if listed["prefix"] in line)
    assert row.split()[3:5] == ["committed", "yes"]
    assert "  its signature: not checked: the key is not set" in succeed("checkpoint", "verify", url)
    assert "not checked: the key is not set" in succeed("checkpoint", "show", url)
    found = [json.loads(succeed("checkpoint", command, url, "--json")) for command in ("show", "verify")]
    assert [(one["signed"], one["signature_checked"]) for one in (found[0], *found[1])] == [(True, False)] * 2
    monkeypatch.setenv("RAYSHARDED_CHECKPOINT_KEY", KEY.secret.decode())
    identity = KEY.identity
    assert f"  its signature: checked with the key {identity}" in succeed("checkpoint", "verify", url)
    assert f"checked with the key {identity}" in succeed("checkpoint", "show", url)
    (verified,) = json.loads(succeed("checkpoint", "verify", url, "--json"))
    assert (verified["signed"], verified["signature_checked"]) == (True, True)


def test_a_checkpoint_that_nobody_signed_is_shown_as_such(storage: Storage, folder: str) -> None:
    rows = json.loads(succeed("checkpoint", "ls", storage.url, "--json"))
    assert [row["signed"] for row in rows] == [False, False, None, False]  # of the third there is no manifest
    assert [row["signed"] for row in json.loads(succeed("checkpoint", "ls", folder, "--json"))] == [False]
    assert "signature" not in succeed("checkpoint", "verify", storage.url)
    shown = next(line for line in succeed("checkpoint", "show", storage.url).splitlines() if "signature" in line)
    assert shown.split() == ["signature", "none"]


# -- verify --


def test_verify_finds_a_byte_that_changed(storage: Storage) -> None:
    assert succeed("checkpoint", "verify", storage.url, "--all").count("whole") == 2
    newest = succeed("checkpoint", "verify", storage.url).splitlines()
    assert newest[0].startswith("step 20: whole ")
    assert newest[1:] == ["only the newest was read: 1 other with --all, one with --step N"]
    assert "only the newest" not in succeed("checkpoint", "verify", storage.url, "--step", 10)
    data_file = Path(storage.url, "checkpoints", "step-0000000020-g000001", "w0001.safetensors")
    content = bytearray(data_file.read_bytes())
    content[-1] ^= 1
    data_file.write_bytes(content)
    damaged = invoke("checkpoint", "verify", storage.url)
    assert (damaged.exit_code, damaged.stderr) == (1, "")
    assert "step 20: 1 damaged part" in damaged.stdout
    assert data_file.name in damaged.stdout
    succeed("checkpoint", "verify", storage.url, "--step", 10)
    found = json.loads(invoke("checkpoint", "verify", storage.url, "--all", "--json").stdout)
    assert [(row["step"], row["ok"]) for row in found] == [(10, True), (20, False)]


def test_verify_names_everything_that_is_missing(storage: Storage) -> None:
    prefix = "checkpoints/step-0000000020-g000001"
    storage.delete([f"{prefix}/w0000.safetensors"])
    assert "w0000.safetensors is missing" in invoke("checkpoint", "verify", storage.url).stdout
    storage.delete([f"{prefix}/manifest.json"])
    lost = invoke("checkpoint", "verify", storage.url, "--all")
    assert lost.exit_code == 1
    assert "claims/0000000003.json" in lost.stdout or "manifest.json does not exist" in lost.stdout


def test_verify_reads_a_checkpoint_by_itself(folder: str) -> None:
    assert succeed("checkpoint", "verify", folder) == "step 7: whole (my checkpoint)\n"
    Path(folder, "w0000.safetensors").unlink()
    assert invoke("checkpoint", "verify", folder).exit_code == 1


def test_verify_of_a_run_fails_when_its_newest_committed_checkpoint_is_lost(storage: Storage) -> None:
    storage.delete(["checkpoints/step-0000000020-g000001/manifest.json"])
    for more in ([], ["--step", 20]):
        lost = invoke("checkpoint", "verify", storage.url, *more)
        assert lost.exit_code == 1
        assert "was committed by claims/" in lost.output
    succeed("checkpoint", "verify", storage.url, "--step", 10)


def test_verify_of_a_run_fails_when_its_newest_manifest_is_damaged(storage: Storage) -> None:
    manifest = Path(storage.url, "checkpoints", "step-0000000020-g000001", "manifest.json")
    manifest.write_bytes(manifest.read_bytes()[:-9])
    damaged = invoke("checkpoint", "verify", storage.url)
    assert (damaged.exit_code, "step 20: 1 damaged part" in damaged.stdout) == (1, True)


def test_verify_refuses_one_step_and_all_at_once(storage: Storage) -> None:
    result = invoke("checkpoint", "verify", storage.url, "--step", 10, "--all")
    assert result.exit_code == 2
    assert "--all" in result.stderr


# -- checkpoints side by side --


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """Checkpoints of the public save(), of steps 9 and 10, in one folder."""
    import torch

    for step in (9, 10):
        save(tmp_path / "beside" / f"step-{step}", {"w": torch.full((3,), float(step))}, step=step)
    return tmp_path / "beside"


def test_checkpoints_side_by_side_are_listed_shown_and_read(beside: Path, tmp_path: Path) -> None:
    rows = json.loads(succeed("checkpoint", "ls", beside, "--json"))
    assert [(row["step"], row["prefix"], row["files"]) for row in rows] == [(9, "step-9", 1), (10, "step-10", 1)]
    assert "step-10" in succeed("checkpoint", "ls", beside)
    assert json.loads(succeed("checkpoint", "show", beside, "--json"))["step"] == 10
    assert json.loads(succeed("checkpoint", "show", beside, "--step", 9, "--json"))["step"] == 9
    assert "there are: 9, 10" in fail("checkpoint", "show", beside, "--step", 8)
    more = "only the newest was read: 1 other with --all, one with --step N\n"
    assert succeed("checkpoint", "verify", beside) == f"step 10: whole (step-10)\n{more}"
    assert succeed("checkpoint", "verify", beside, "--step", 9) == "step 9: whole (step-9)\n"
    assert succeed("checkpoint", "verify", beside, "--all").count("whole") == 2
    assert invoke("checkpoint", "diff", beside, beside, "--step-a", 9).exit_code == 1
    assert "1 tensor is equal by its digest" in succeed("checkpoint", "diff", beside, beside)
    succeed("checkpoint", "export", beside, tmp_path / "copy", "--format", "raysharded", "--step", 9)
    assert "is a folder of single checkpoints, not a run" in fail("checkpoint", "pin", beside, "a")


def test_a_damaged_checkpoint_beside_others_is_listed_with_the_reason(beside: Path) -> None:
    (beside / "step-10" / "manifest.json").write_bytes(b"{")
    row = json.loads(succeed("checkpoint", "ls", beside, "--json"))[1]
    assert (row["prefix"], row["state"], row["complete"]) == ("step-10", "damaged", False)
    assert "manifest.json" in succeed("checkpoint", "ls", beside)
    assert invoke("checkpoint", "verify", beside).exit_code == 1
    assert "no step: 1 damaged part" in invoke("checkpoint", "verify", beside, "--all").stdout


@pytest.mark.long
def test_inspecting_checkpoints_side_by_side_imports_no_torch(beside: Path) -> None:
    code = (
        "import sys; from raysharded.cli import app\n"
        "for command in ('ls', 'show', 'verify'):\n"
        "    app(['checkpoint', command, sys.argv[1]], standalone_mode=False)\n"
        "    assert 'torch' not in sys.modules, command"
    )
    subprocess.run([sys.executable, "-c", code, str(beside)], check=True)


# -- gc of folders --


def _broken(folder: Path, save_id: str = "0123456789ab") -> None:
    """Write the files that a killed save leaves."""
    (folder / save_id).mkdir(parents=True)
    (folder / save_id / "rank00000.safetensors").write_bytes(b"some")
    (folder / save_id / "rank00001.safetensors.tmp-0123456789ab").write_bytes(b"half")


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("which", ["step-10", ""])
def test_gc_of_a_folder_takes_what_its_manifest_does_not_name_and_nothing_else(beside: Path, which: str) -> None:
    (beside / "step-10" / "notes.txt").write_text("mine")
    (beside / "step-10" / "0123456789ab").mkdir()
    (beside / "step-10" / "0123456789ab" / "notes.txt").write_text("mine")
    (beside / "step-10" / "manifest.json.tmp-0123456789ab").write_text("half")
    inner = beside / "step-10" / "aaaaaaaaaaaa"
    _checkpoint_inside(inner)
    before = _files(beside) - {"step-10/manifest.json.tmp-0123456789ab"}
    _broken(beside / "step-10", "ba9876543210")
    (beside / "step-10" / "0123456789ab" / "rank00000.safetensors").write_bytes(b"some")
    everything = _files(beside)
    dry = json.loads(succeed("checkpoint", "gc", beside / which, "--dry-run", "--json"))
    assert _files(beside) == everything
    done = json.loads(succeed("checkpoint", "gc", beside / which, "--json"))
    assert done == {**dry, "dry_run": False}
    assert done["debris"] == ["step-10/0123456789ab", "step-10/ba9876543210", "step-10/manifest.json"]
    assert _files(beside) == before
    assert succeed("checkpoint", "gc", beside / which) == "nothing to delete\n"
    assert succeed("checkpoint", "verify", beside, "--all").count("whole") == 2


def _checkpoint_inside(folder: Path) -> None:
    """A checkpoint inside another's folder, whose name is like a save's: its files lie as a save's do."""
    import numpy as np

    storage = open_storage(str(folder.parent / "made"))
    prefix = save_rows(storage, {"w": np.zeros(2, np.float32)}, step=1, save_id="x", num_writers=1)
    (folder.parent / "made" / prefix).rename(folder)


def test_gc_proves_nothing_without_a_manifest_and_reports_it(beside: Path, tmp_path: Path) -> None:
    _broken(beside / "step-11")
    _broken(tmp_path / "alone" / "step-1")
    for folder in (beside, tmp_path / "alone", tmp_path / "alone" / "step-1"):
        before = _files(tmp_path)
        said = succeed("checkpoint", "gc", folder)
        assert "left alone, it has no manifest.json, so that its save may still be in progress" in said
        assert _files(tmp_path) == before


def test_gc_of_a_folder_deletes_nothing_when_the_manifest_is_damaged_or_rules_are_given(beside: Path) -> None:
    _broken(beside / "step-9")
    before = _files(beside)
    assert "not a run" in fail("checkpoint", "gc", beside, "--keep-last", 1)
    (beside / "step-9" / "manifest.json").write_bytes(b"{")
    assert "step-9: left alone, " in succeed("checkpoint", "gc", beside / "step-9")
    assert _files(beside) == before


@pytest.mark.s3
def test_gc_takes_dangling_uploads_of_a_killed_save(s3_url: str) -> None:
    import torch

    from raysharded.checkpoint.storage.s3.bucket import open_bucket

    save(join_url(s3_url, "step-1"), {"w": torch.zeros(3)}, step=1)
    storage, bucket = open_storage(s3_url), open_bucket(s3_url)
    data = data_path("step-1", "rank00000", partitioned=True, subfolder="0123456789ab")
    for key in (f"step-1/{data}", "step-2/manifest.json"):
        bucket.request("create_multipart_upload", Key=bucket.location.full(key))
    assert len(storage.unfinished()) == 2
    assert f"step-1/{data}".rpartition("/")[0] in succeed("checkpoint", "gc", s3_url)
    assert [write.key for write in storage.unfinished()] == ["step-2/manifest.json"]
    assert succeed("checkpoint", "verify", s3_url) == "step 1: whole (step-1)\n"


# -- pin, unpin, fork --


def test_pin_and_unpin(storage: Storage) -> None:
    made = json.loads(succeed("checkpoint", "pin", storage.url, "good", "--step", 10, "--json"))
    assert (made["tag"], made["step"]) == ("good", 10)
    rows = json.loads(succeed("checkpoint", "ls", storage.url, "--json"))
    assert [row["pins"] for row in rows] == [["good"], [], [], []]
    assert succeed("checkpoint", "pin", storage.url, "newest").startswith("newest: step 20")
    assert "names step 10" in fail("checkpoint", "pin", storage.url, "good")
    assert succeed("checkpoint", "unpin", storage.url, "good") == "good: removed\n"
    assert "there is no tag 'good'" in fail("checkpoint", "unpin", storage.url, "good")


def test_a_checkpoint_by_itself_is_no_run(folder: str) -> None:
    for command in (["pin", folder, "a"], ["unpin", folder, "a"], ["fork", folder, f"{folder}2"]):
        assert "is a single checkpoint, not a run" in fail("checkpoint", *command)


def test_fork_lets_a_new_run_begin_with_a_checkpoint(storage: Storage, tmp_path: Path) -> None:
    new = tmp_path / "new"
    made = json.loads(succeed("checkpoint", "fork", storage.url, new, "--step", 10, "--json"))
    assert made["parent"] == storage.url
    found = newest_complete(open_storage(str(new))).checkpoint
    assert found is not None
    assert found.step == 10
    [row] = json.loads(succeed("checkpoint", "ls", new, "--json"))
    assert row["state"] == "reference"
    assert f"the parent run {storage.url}, under checkpoints/step-0000000010-g000001" in row["reason"]
    assert row["reason"] in succeed("checkpoint", "ls", new)
    assert succeed("checkpoint", "verify", new) == f"step 10: whole ({row['prefix']})\n"
    assert "itself a reference" in fail("checkpoint", "fork", new, tmp_path / "newer")


def test_a_fork_given_by_name_is_beside_its_parent_and_the_message_says_how_to_start_it(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    told = succeed("checkpoint", "fork", storage.url, "new")
    assert told.startswith(f"{tmp_path}/new begins with step 20 of {storage.url}, which is pinned there as fork-new-")
    assert f"\nstart it: raysharded run FILE.py run.name=new run.storage_path={tmp_path}\n" in told
    assert newest_complete(open_storage(str(tmp_path / "new"))).checkpoint is not None
    assert (
        json.loads(succeed("checkpoint", "fork", storage.url, "./new", "--json"))["url"] == f"{tmp_path}/elsewhere/new"
    )
    told = succeed("checkpoint", "fork", "../run", "third")
    assert told.startswith(f"{tmp_path}/third begins with step 20 ")


# -- gc --


def test_gc_keeps_all_checkpoints_unless_told_and_takes_debris(storage: Storage) -> None:
    following = Run(storage)
    following.unfinished(50)
    before = storage.list()
    dry = json.loads(succeed("checkpoint", "gc", storage.url, "--dry-run", "--json"))
    assert storage.list() == before
    assert "dry run" in succeed("checkpoint", "gc", storage.url, "--dry-run")
    done = json.loads(succeed("checkpoint", "gc", storage.url, "--json"))
    assert done == {**dry, "dry_run": False}
    assert [prefix[-18:] for prefix in done["debris"]] == ["0000000030-g000001", "0000000040-g000001"]
    assert "may still be written" in done["left"][0]["reason"]
    assert states(storage) == [(10, "committed"), (20, "committed"), (50, "unfinished")]
    assert "left alone, it may still be written" in succeed("checkpoint", "gc", storage.url)


def test_gc_applies_the_rules_that_it_is_given(storage: Storage) -> None:
    run = Run(storage)
    for step in (50, 60):
        run.save(step, metrics={"loss": float(step)})
    out = succeed("checkpoint", "gc", storage.url, "--keep-last", 1, "--keep-best", "loss:min")
    assert "step-0000000020-g000001: deleted; its data goes once a further checkpoint is committed" in out
    assert [step for step, state in states(storage) if state == "committed"] == [10, 60]
    out = succeed("checkpoint", "gc", storage.url, "--keep-last", 1, "--keep-every", 60, "--now")
    assert "step-0000000010-g000001: deleted, with its data" in out
    assert states(storage) == [(60, "committed")]
    assert succeed("checkpoint", "gc", storage.url) == "nothing to delete\n"


def test_gc_refuses_a_metric_that_no_checkpoint_has_and_names_those_there_are(storage: Storage) -> None:
    before = storage.list()
    said = fail("checkpoint", "gc", storage.url, "--keep-last", 1, "--keep-best", "los:min")
    assert "--keep-best los: no checkpoint" in said
    assert said.endswith("there are: loss.")
    assert storage.list() == before


def test_gc_refuses_rules_that_cannot_be_meant(storage: Storage) -> None:
    for wrong in (["--keep-every", 5], ["--keep-best", "loss:min"], ["--keep-last", 0]):
        assert invoke("checkpoint", "gc", storage.url, *wrong).exit_code == 2
    for best in ("loss", "loss:least", "loss:min:0", ":min", "loss:min:x"):
        result = invoke("checkpoint", "gc", storage.url, "--keep-last", 1, "--keep-best", best)
        assert result.exit_code == 2
        assert "METRIC:min" in result.stderr


def test_show_tells_a_forks_parent_and_asks_nothing_of_it(storage: Storage, tmp_path: Path) -> None:
    new = tmp_path / "child"
    made = json.loads(succeed("checkpoint", "fork", storage.url, new, "--json"))
    del made["url"]  # of the fork; the rest is its reference
    (reference,) = new.glob("checkpoints/*/reference.json")
    changed = Reference(**{**made, "parent": "s3://bucket/run?endpoint_url=http://127.0.0.1:9"})
    reference.write_bytes(encode_reference(changed))
    with connections() as opened:
        shown = json.loads(succeed("checkpoint", "show", new, "--json"))
        told = succeed("checkpoint", "show", new)
        assert "it was not opened" in " ".join(invoke("checkpoint", "verify", new).stdout.split())
    assert opened == []
    assert (shown["state"], shown["step"], shown["parent"]) == ("reference", 20, changed.parent)
    assert "127.0.0.1:9" in told
