"""The storage that a URL opens, and joins of URLs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import raysharded as rs
from raysharded import checkpoint
from raysharded.checkpoint import open_storage, save
from raysharded.checkpoint.sharded_io.checkpoint_uri import split
from raysharded.checkpoint.storage.fsspec import FsspecStorage
from raysharded.checkpoint.storage.local import LocalStorage
from raysharded.checkpoint.storage.s3 import S3Storage
from raysharded.checkpoint.storage.s3.location import Endpoint, Location, parse
from raysharded.data.text.files import as_paths
from raysharded.errors import ConfigError, StorageError
from raysharded.locations import join_url
from tests.training.harness import GptTask


def test_urls_open_the_storage_they_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here = LocalStorage(str(tmp_path / "a b"))
    assert open_storage(f"file://{tmp_path}/a%20b/") == here
    assert open_storage(f"file://localhost{tmp_path}/a%20b") == here
    assert open_storage(str(tmp_path / "a b") + "/") == here
    assert open_storage("a b") == here
    assert open_storage("memory://x/y/") == FsspecStorage("memory://x/y")
    assert open_storage("s3://bucket/x/") == S3Storage("s3://bucket/x")
    assert open_storage("s3://bucket/x/?region=eu-west-1") == S3Storage("s3://bucket/x?region=eu-west-1")
    assert open_storage("fsspec+s3://bucket/x/") == FsspecStorage("fsspec+s3://bucket/x")


@pytest.mark.parametrize(("url", "path"), [("file://./a%20b/", "here/a b"), ("file://../c", "c"), ("file://.", "here")])
def test_a_file_url_that_begins_with_a_dot_is_relative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, path: str
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert open_storage(url) == LocalStorage(str(tmp_path / path))
    assert split(url) == (str((tmp_path / path).parent), (tmp_path / path).name)
    assert as_paths(url, "paths") == (str(tmp_path / path),)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("file://elsewhere/a", r"not name a path of this machine: elsewhere would be .* Give './elsewhere/a' for the"),
        ("file://.../a", "does not name a path of this machine"),
        ("file://", "does not name a path of this machine"),
        ("s3:/bucket/a", "s3: needs two slashes"),
        ("fsspec+gs:/bucket/a", "needs two slashes"),
        ("a\0b/c", "has a NUL in it"),
    ],
)
def test_a_url_that_would_become_some_folder_here_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for opened in (open_storage, split, lambda url: as_paths(url, "paths")):
        with pytest.raises(ConfigError, match=why):
            opened(url)
    if "\0" not in url:
        assert open_storage(f"./{url}").url == str(tmp_path / url.replace("//", "/").rstrip("/"))


@pytest.mark.parametrize("name", ["my run", "2026-01-01T10:00:00", "a\\b"])
def test_a_checkpoint_is_found_by_its_path_and_by_its_url_under_any_name(tmp_path: Path, name: str) -> None:
    state = {"w": torch.ones(2)}
    save(tmp_path / "by path" / name, state)
    save((tmp_path / "by url" / name).as_uri(), state)
    for found in (tmp_path / "by path", tmp_path / "by url"):
        for folder in (found, found / name):
            assert checkpoint.open(folder).read("w").tolist() == [1, 1]
            assert checkpoint.open(folder.as_uri()).read("w").tolist() == [1, 1]


@pytest.mark.parametrize(
    ("base", "parts", "joined"),
    [
        ("runs", ("a",), "runs/a"),
        ("runs/", ("a", "b"), "runs/a/b"),
        ("/", ("a",), "/a"),
        ("/", (), "/"),
        ("runs?", ("a",), "runs?/a"),
        ("memory://", ("a",), "memory://a"),
        ("memory://x/", (), "memory://x"),
        ("s3://bucket", ("a",), "s3://bucket/a"),
        ("s3://bucket/p/?region=x&timeout_s=3", ("a/b",), "s3://bucket/p/a/b?region=x&timeout_s=3"),
        ("s3://bucket?endpoint_url=http://h:1", ("a",), "s3://bucket/a?endpoint_url=http://h:1"),
        ("gs://bucket/a?b", ("c",), "gs://bucket/a?b/c"),
    ],
)
def test_what_is_appended_to_a_url_comes_before_its_options(base: str, parts: tuple[str, ...], joined: str) -> None:
    assert join_url(base, *parts) == joined


def test_a_run_lives_below_the_path_of_its_storage_url() -> None:
    run = rs.RunConfig(name="gpt", storage_path="s3://runs/mine?region=eu-west-1", max_steps=1)
    trainer = rs.ElasticTrainer(
        task=GptTask(),
        data=[0],
        batch=rs.BatchConfig(global_batch_size=1, microbatch_size=1),
        scaling=rs.ScalingConfig(num_workers=1),
        run=run,
    )
    assert trainer.url == "s3://runs/mine/gpt?region=eu-west-1"


def test_an_s3_url_has_the_server_and_the_way_to_reach_it() -> None:
    url = "s3://bucket/a/b?endpoint_url=https%3A%2F%2Fh%3A1%2F&region=eu&addressing_style=virtual&timeout_s=2.5"
    endpoint = Endpoint(endpoint_url="https://h:1/", region="eu", addressing_style="virtual", timeout_s=2.5)
    assert parse(url) == Location(endpoint=endpoint, bucket="bucket", prefix="a/b")
    assert parse("s3://bucket") == Location(endpoint=Endpoint(), bucket="bucket", prefix="")


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("s3://", "must look like"),
        ("s3:///x", "must look like"),
        ("s3://bucket//x", "must look like"),
        ("s3://bucket/x?endpoint=http://h", "no option 'endpoint'"),
        ("s3://bucket/x?endpoint_url=h:1", "does not begin with http"),
        ("s3://bucket/x?addressing_style=dns", "none of auto, path, virtual"),
        ("s3://bucket/x?timeout_s=0", "not a number of seconds"),
        ("s3://bucket/x?timeout_s=nan", "not a number of seconds"),
        ("s3://bucket/x?region", "not option=value"),
    ],
)
def test_an_s3_url_that_means_nothing_is_refused_with_the_reason(url: str, why: str) -> None:
    with pytest.raises(StorageError, match=why):
        open_storage(url)
