"""Places that files of a run name are opened only on the run's own storage, or where the user allows it."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raysharded.checkpoint import Keep, Storage, fork, list_pins, newest_complete, open_storage, pin, prune
from raysharded.checkpoint.format import signed_json
from raysharded.checkpoint.retention.fork_reference import REFERENCE_NAME, Reference, encode_reference
from raysharded.checkpoint.retention.forks.fork import drop_reference, tag_of
from raysharded.checkpoint.retention.forks.fork_search import find_forks
from raysharded.checkpoint.storage import retry
from raysharded.checkpoint.storage.named_places import ENVIRONMENT_PLACES, is_same_place, url_named
from raysharded.errors import CheckpointError, ConfigError, RayshardedError, RefusedCheckpoint
from tests.canary import connections
from tests.checkpoint.retention.runs import Run, ref_of

OWN_S3 = "s3://bucket/fork?endpoint_url=http://own:9000&region=r"

REFUSED = [
    ("/runs/fork", "http://127.0.0.1:9/run"),
    ("/runs/fork", "s3://bucket/run?endpoint_url=http://127.0.0.1:9"),
    ("/runs/fork", 'reference://::{"version": 1, "templates": {}, "gen": [], "refs": {}}'),
    ("/runs/fork", "simplecache::http://127.0.0.1:9/run"),
    ("/runs/fork", "memory://run"),
    ("/runs/fork", "../run"),
    ("/runs/fork", "file://./run"),
    ("/runs/fork", "file://elsewhere/run"),
    ("/runs/fork", ""),
    ("/runs/fork", "/runs/\0"),
    (OWN_S3, "/runs/parent"),
    (OWN_S3, "s3://other/run"),
    (OWN_S3, "fsspec+s3://bucket/run"),
    (OWN_S3, "s3://bucket/a::http://127.0.0.1:9/run"),
    (OWN_S3, "s3://bucket/../other/run"),
    ("gs://bucket/fork", "gs://bucket/run?x=1"),
    ("sftp://me:secret@host/fork", "sftp://other/run"),
    ("sftp://me@host/fork", "sftp://you@host/run"),
    ("http://host/fork", "http://host:80/run"),
    ("simplecache::http://host/fork", "simplecache::http://host/run"),
]

OPENED = [
    ("/runs/fork", "/runs/parent", "/runs/parent"),
    ("/runs/fork", "file:///runs/a%20b", "/runs/a b"),
    ("memory://fork", "memory://parent", "memory://parent"),
    (OWN_S3, "s3://bucket/run", "s3://bucket/run?endpoint_url=http://own:9000&region=r"),
    (
        OWN_S3,
        "s3://bucket/run?endpoint_url=http://attacker:9000",
        "s3://bucket/run?endpoint_url=http://own:9000&region=r",
    ),
    ("s3://bucket/fork", "s3://bucket/run?endpoint_url=http://attacker:9000", "s3://bucket/run"),
    ("sftp://me:secret@host/fork", "sftp://host/run", "sftp://me:secret@host/run"),
    ("sftp://me:secret@host/fork", "sftp://you:guess@host/run", "sftp://me:secret@host/run"),
    ("abfs://box@account.net/fork", "abfs://box@account.net/run", "abfs://box@account.net/run"),
]


@pytest.fixture(autouse=True)
def nothing_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT_PLACES, raising=False)


@pytest.mark.parametrize(("own", "named"), REFUSED)
def test_another_server_a_chain_or_a_relative_path_is_refused(own: str, named: str) -> None:
    with pytest.raises(RefusedCheckpoint, match="names"):
        url_named(named, own, "a file")


@pytest.mark.parametrize(("own", "named", "opened"), OPENED)
def test_a_file_gives_only_a_path_on_the_runs_own_server(own: str, named: str, opened: str) -> None:
    assert url_named(named, own, "a file") == opened
    assert open_storage(opened).url == opened


def test_a_place_that_the_user_allows_is_opened_with_the_users_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        ENVIRONMENT_PLACES, "s3://models/base?endpoint_url=https://own, sftp://me:secret@host,/elsewhere"
    )
    named = "s3://models/base/run?endpoint_url=http://attacker"
    assert url_named(named, "/fork", "a file") == "s3://models/base/run?endpoint_url=https://own"
    assert url_named("s3://models/base", "/fork", "a file") == "s3://models/base?endpoint_url=https://own"
    assert url_named("sftp://host/run", "/fork", "a file") == "sftp://me:secret@host/run"
    assert url_named("/elsewhere/run", OWN_S3, "a file") == "/elsewhere/run"
    for other in ("s3://models/baseline", "s3://other/base", "/elsewhere-too/run"):
        with pytest.raises(RefusedCheckpoint):
            url_named(other, OWN_S3, "a file")
    monkeypatch.setenv(ENVIRONMENT_PLACES, "simplecache::s3://models")
    with pytest.raises(ConfigError, match=ENVIRONMENT_PLACES):
        url_named("s3://models/run", "/fork", "a file")


def test_one_folder_has_many_urls(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    assert is_same_place(str(tmp_path / "link"), f"file://{tmp_path}/run/")
    assert is_same_place("s3://b/run?endpoint_url=http://x", "s3://b/run/")
    assert not is_same_place("s3://b/run", "s3://b/run2")
    assert not is_same_place("s3://b/run", "gs://b/run")


# -- references --


def forked(tmp_path: Path, **changes: Any) -> tuple[Storage, Storage, Reference]:
    """(parent, fork, reference), the reference with changes, sealed as if by a real writer."""
    parent, run = open_storage(str(tmp_path / "parent")), open_storage(str(tmp_path / "child"))
    made = fork(parent, ref_of(parent, Run(parent).save(5)), run)
    changed = replace(made, **changes)
    run.write(f"{made.folder}/{REFERENCE_NAME}", [encode_reference(changed)])
    return parent, run, changed


@contextmanager
def server() -> Iterator[tuple[int, list[str]]]:
    """A stranger's server: its port, and the requests that it got."""
    requests: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(f"{self.command} {self.path} {self.headers.get('authorization')}")
            self.send_error(404)

        do_HEAD = do_GET  # noqa: N815  # the name that the class calls

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield listening.server_address[1], requests
        listening.shutdown()


@pytest.mark.parametrize("parent", ["http://127.0.0.1:{port}/run", "s3://b/run?endpoint_url=http://127.0.0.1:{port}"])
def test_nothing_is_asked_of_a_strangers_server(parent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "canary")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary")
    with server() as (port, requests):
        _, run, made = forked(tmp_path, parent=parent.format(port=port))
        with connections() as opened:
            with pytest.raises(RefusedCheckpoint, match="it was not opened"):
                newest_complete(run, skip_damaged=True)
            with pytest.raises(RefusedCheckpoint):
                drop_reference(run, ref_of(run, made.folder))
            Run(run).save(6)
            left = prune(run, Keep(last=1)).left
        assert (opened, requests) == ([], [])
        assert [(one.prefix, ENVIRONMENT_PLACES in one.reason) for one in left] == [(made.folder, True)]
        monkeypatch.setattr(retry, "MAX_ATTEMPTS", 1)
        monkeypatch.setenv(ENVIRONMENT_PLACES, made.parent)  # the canary sings where it is allowed to
        with suppress(RayshardedError):
            drop_reference(run, ref_of(run, made.folder))
        assert requests


def test_only_the_pin_of_the_fork_itself_is_removed(tmp_path: Path) -> None:
    parent, run, made = forked(tmp_path, pin="production")
    ref = ref_of(parent, made.prefix)
    pin(parent, "production", ref)
    other = pin(parent, tag_of("/runs/other"), ref, fork="/runs/other")
    drop_reference(run, ref_of(run, made.folder))
    assert {found.tag for found in list_pins(parent)} >= {"production", other.tag}
    run.write(f"{made.folder}/{REFERENCE_NAME}", [encode_reference(replace(made, pin=other.tag))])
    drop_reference(run, ref_of(run, made.folder))
    assert {found.tag for found in list_pins(parent)} >= {"production", other.tag}
    assert [found for found in run.list("checkpoints") if REFERENCE_NAME in found] == []


def test_a_fork_that_is_opened_through_a_link_removes_its_own_pin(tmp_path: Path) -> None:
    parent, run, made = forked(tmp_path)
    (tmp_path / "link").symlink_to(run.url)
    through = open_storage(str(tmp_path / "link"))
    assert tag_of(through.url) != made.pin
    drop_reference(through, ref_of(through, made.folder))
    assert list_pins(parent) == []


def test_a_pin_leads_to_no_strangers_server_and_to_no_other_runs_fork(tmp_path: Path) -> None:
    parent, run, _ = forked(tmp_path)
    (own,) = list_pins(parent)
    assert [found.url for found in find_forks(parent, [own])] == [run.url]
    with connections() as opened:
        (refused,) = find_forks(parent, [replace(own, fork="http://127.0.0.1:9/run")])
    assert opened == []
    assert ENVIRONMENT_PLACES in refused.problem
    stranger = open_storage(str(tmp_path / "stranger"))
    assert find_forks(stranger, [own]) == []  # the fork is of another parent: nobody removes it with this one


def test_a_fork_is_made_only_where_it_will_find_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent, run = open_storage(f"memory://{tmp_path}/parent"), open_storage(str(tmp_path / "child"))
    ref = ref_of(parent, Run(parent).save(5))
    with pytest.raises(CheckpointError, match=ENVIRONMENT_PLACES):
        fork(parent, ref, run)
    assert (run.list(), list_pins(parent)) == ([], [])
    monkeypatch.setenv(ENVIRONMENT_PLACES, parent.url)
    fork(parent, ref, run)
    found = newest_complete(run).checkpoint
    assert found is not None
    assert found.storage.url == parent.url


def test_a_damaged_reference_is_told_by_its_file(tmp_path: Path) -> None:
    _, run, made = forked(tmp_path)
    key = f"{made.folder}/{REFERENCE_NAME}"
    body = json.loads(run.read(key))
    for field, value in (("step", 10**400), ("manifest_digest", "x"), ("created_at", 1e300), ("parent", None)):
        run.write(key, [signed_json.seal({**body, field: value}, "raysharded-reference")])
        with pytest.raises(CheckpointError, match=REFERENCE_NAME):
            newest_complete(run)
