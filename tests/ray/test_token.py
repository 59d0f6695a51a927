"""A process without the token of a cluster is refused, and its error names the token that it needs."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ray.clusters import run_script
from tests.ray.test_which_ray import STARTS, started
from tests.ray.test_whose_ray import listener

ATTACH = "import sys, raysharded; raysharded.attach('gpt', sys.argv[1])"


def refused(address: str, home: Path, **settings: str) -> str:
    """The message that ends a script which attaches to the cluster with these settings of Ray."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment = {**inherited, "HOME": str(home), **settings}
    command = [sys.executable, "-c", ATTACH, address]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False, cwd=home)
    assert ended.returncode == 1
    (last,) = (line for line in ended.stderr.splitlines() if line.startswith("ClusterError: "))
    return last


@pytest.mark.ray
def test_a_process_that_should_have_a_token_and_has_none_is_told_where_it_is(tmp_path: Path) -> None:
    with listener() as (_, address):
        message = refused(address, tmp_path, RAY_AUTH_MODE="token")
    assert "Token authentication is enabled but no authentication token was found" in message
    assert "have the token of ~/.ray/auth_token on the machine that ran `ray start`" in message


@pytest.mark.ray
@pytest.mark.clusters
@pytest.mark.parametrize("how", ["found", pytest.param("named", marks=pytest.mark.long)])
def test_the_users_own_cluster_is_used_with_the_token_of_the_home_and_without_it_refuses(
    how: str, tmp_path: Path, own_cluster: dict[str, str]
) -> None:
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text(secrets.token_hex(32))
    environment = {**own_cluster, "HOME": str(tmp_path)}
    del environment["RAY_AUTH_MODE"]
    with started(environment):
        address = (Path(environment["RAY_TMPDIR"]) / "ray" / "ray_current_cluster").read_text()
        named = {"RAY_ADDRESS": address} if how == "named" else {}
        found = run_script(STARTS, str(tmp_path), environment={**environment, **named})
        (tmp_path / "other").mkdir()
        message = refused(address, tmp_path / "other")
    assert found["address"] == address
    assert not [line for line in found["said"] if "Token" in line]
    assert "set RAY_AUTH_MODE=token here, and have the token of ~/.ray/auth_token" in message
