"""Keys and users of the tests' server, made and removed through Ceph's admin API while it runs."""

from __future__ import annotations

import json
import secrets
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import boto3
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tests.s3.server import S3Server

REGION = "us-east-1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """An access key, or temporary credentials."""

    access: str
    secret: str
    token: str = ""

    def write(self, path: Path, *, profile: str = "default") -> None:
        """Write it as a shared credentials file, over an older one."""
        lines = [f"[{profile}]", f"aws_access_key_id = {self.access}", f"aws_secret_access_key = {self.secret}"]
        path.write_text("\n".join([*lines, *([f"aws_session_token = {self.token}"] if self.token else []), ""]))


def new_key(server: S3Server, user: str = "tests") -> Key:
    """A further access key of a user. Its last four characters are its own."""
    key = Key(access=f"KEY{secrets.token_hex(8).upper()}", secret=secrets.token_hex(16))
    _admin(
        server, "PUT", "key", {"uid": user, "access-key": key.access, "secret-key": key.secret, "generate-key": "false"}
    )
    return key


def remove_key(server: S3Server, key: Key) -> None:
    """From now on the server refuses the key."""
    _admin(server, "DELETE", "key", {"access-key": key.access, "key-type": "s3"})


def new_user(server: S3Server) -> tuple[str, Key]:
    """(id of a user without any right to the tests' buckets, the user's key)."""
    user = f"user-{secrets.token_hex(4)}"
    key = Key(access=f"KEY{secrets.token_hex(8).upper()}", secret=secrets.token_hex(16))
    names = {"uid": user, "display-name": user, "access-key": key.access, "secret-key": key.secret}
    _admin(server, "PUT", "", names)
    return user, key


def remove_user(server: S3Server, user: str) -> None:
    _admin(server, "DELETE", "", {"uid": user, "purge-data": "true"})


def allow(server: S3Server, bucket: str, user: str, actions: Sequence[str], denied: Sequence[str]) -> None:
    """Make this the bucket's policy: the user may do `actions`, except for those that are denied."""
    arn = f"arn:aws:s3:::{bucket}"
    of_user = {"Principal": {"AWS": [f"arn:aws:iam:::user/{user}"]}, "Resource": [arn, f"{arn}/*"]}
    rules = [{**of_user, "Effect": "Allow", "Action": [*actions]}]
    rules += [{**of_user, "Effect": "Deny", "Action": [*denied]}] if denied else []
    policy = {"Version": "2012-10-17", "Statement": rules}
    _client(server, "s3").put_bucket_policy(Bucket=bucket, Policy=json.dumps(policy))


def _client(server: S3Server, service: str) -> Any:
    return boto3.session.Session().client(
        service,
        endpoint_url=server.endpoint_url,
        region_name=REGION,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
    )


def _admin(server: S3Server, method: str, kind: str, names: dict[str, str]) -> None:
    query = "&".join([*([kind] if kind else []), urlencode(names)])
    url = f"{server.endpoint_url}/admin/user?{query}"
    signed = AWSRequest(method=method, url=url)
    S3SigV4Auth(Credentials(server.access_key, server.secret_key), "s3", REGION).add_auth(signed)
    headers = dict(signed.headers.items())
    with urllib.request.urlopen(urllib.request.Request(url, method=method, headers=headers)) as answer:
        answer.read()
