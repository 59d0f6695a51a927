"""A process without the token of a cluster is refused, and its error names the token that it needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ray.clusters import refused, run_script, with_token
from tests.ray.test_which_ray import STARTS, started
from tests.ray.test_whose_ray import listener


@pytest.mark.ray
def test_a_process_that_should_have_a_token_and_has_none_is_told_where_it_is(tmp_path: Path) -> None:
    with listener() as (_, address):
        message = refused(address, tmp_path, RAY_AUTH_MODE="token")
    assert "Token authentication is enabled but no authentication token was found" in message
    assert "have the token of ~/.ray/auth_token on the machine that ran `ray start`" in message


@pytest.mark.long  # test_which_ray.py has a cluster of the user's with a token, and the refusal without it
@pytest.mark.ray
@pytest.mark.clusters
@pytest.mark.parametrize("how", ["found", "named"])
def test_the_users_own_cluster_is_used_with_the_token_of_the_home(
    how: str, tmp_path: Path, own_cluster: dict[str, str]
) -> None:
    environment = with_token(own_cluster, tmp_path)
    with started(environment):
        address = (Path(environment["RAY_TMPDIR"]) / "ray" / "ray_current_cluster").read_text()
        named = {"RAY_ADDRESS": address} if how == "named" else {}
        found = run_script(STARTS, str(tmp_path), environment={**environment, **named})
    assert found["address"] == address
    assert not [line for line in found["said"] if "Token" in line]
