"""A right that is missing is named, and what can do without it continues: with a user and a policy of the bucket."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import boto3
import pytest

from raysharded.checkpoint import Keep, list_checkpoints, open_storage
from raysharded.checkpoint.retention.gc import prune
from raysharded.checkpoint.storage.s3 import S3Storage
from raysharded.cli import diagnostics
from raysharded.errors import StorageError
from tests.checkpoint.retention.runs import Run
from tests.s3.keys import allow, new_user, remove_user
from tests.s3.server import S3Server

pytestmark = pytest.mark.s3

RIGHTS = (
    "s3:GetObject",
    "s3:PutObject",
    "s3:DeleteObject",
    "s3:ListBucket",
    "s3:ListBucketMultipartUploads",
    "s3:AbortMultipartUpload",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tenant:
    """A user whose key this process uses in a bucket of the tests'."""

    server: S3Server
    bucket: str
    user: str

    @property
    def url(self) -> str:
        """A storage in the bucket, with a separate connection."""
        at = f"{self.bucket}/{secrets.token_hex(4)}/run?endpoint_url={self.server.endpoint_url}"
        return f"s3://{at}&timeout_s=90.{secrets.randbelow(10**9)}"

    def may_all_but(self, *rights: str) -> None:
        """Allow all rights and deny these: a user has rights to the user's own objects besides those of the policy."""
        allow(self.server, self.bucket, self.user, RIGHTS, rights)


@pytest.fixture
def tenant(
    s3_server: S3Server, s3_credentials: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Tenant]:
    owner = boto3.session.Session().client("s3", endpoint_url=s3_server.endpoint_url)
    bucket = f"tenant-{secrets.token_hex(6)}"
    owner.create_bucket(Bucket=bucket)
    user, key = new_user(s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key.access)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key.secret)
    yield Tenant(server=s3_server, bucket=bucket, user=user)
    remove_user(s3_server, user)


def test_each_missing_right_is_named(tenant: Tenant) -> None:
    tenant.may_all_but()
    (found,) = [finding for finding in diagnostics.storage(open_storage(tenant.url)) if finding.name == "rights"]
    assert (found.ok, found.found) == (True, "all that a run needs")
    for right in RIGHTS:
        tenant.may_all_but(right)
        storage = open_storage(tenant.url)
        assert isinstance(storage, S3Storage)
        assert storage.missing_rights() == [right]


@pytest.mark.parametrize("right", ["s3:GetObject", "s3:ListBucketMultipartUploads"])
def test_doctor_tells_what_a_missing_right_is_needed_for(tenant: Tenant, right: str) -> None:
    tenant.may_all_but(right)
    findings = diagnostics.storage(open_storage(tenant.url))
    (found,) = [finding for finding in findings if finding.name == "rights"]
    assert found.found == f"without {right}"
    needed = right == "s3:GetObject"
    assert (found.ok, len(findings) > 1) == (not needed, not needed)
    assert ("A run needs it" if needed else "Uploads of lost writers stay without it") in found.advice


def test_without_the_right_to_list_uploads_only_tidying_is_lost(
    tenant: Tenant, caplog: pytest.LogCaptureFixture
) -> None:
    tenant.may_all_but("s3:ListBucketMultipartUploads", "s3:AbortMultipartUpload")
    run = Run(open_storage(tenant.url))
    for step in (1, 2, 3):
        run.save(step)
    with caplog.at_level(logging.WARNING, "raysharded.checkpoint"):
        for _ in range(2):
            prune(run.storage, Keep(last=1), now=True)
    assert [ref.step for ref in list_checkpoints(run.storage)] == [3]
    (said,) = [record for record in caplog.records if "uploads" in record.getMessage()]
    assert "the right s3:ListBucketMultipartUploads is missing to the access key that ends in" in said.getMessage()
    assert "\n" not in said.getMessage()
    assert said.exc_info is None


def test_a_refusal_names_the_right(tenant: Tenant) -> None:
    tenant.may_all_but("s3:PutObject")
    with pytest.raises(StorageError, match="Allow these credentials s3:PutObject there: the access key that ends in"):
        open_storage(tenant.url).write("a", [b"1"])
