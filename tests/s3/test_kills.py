"""Uploaders killed by SIGKILL on a real S3 server leave the previous checkpoint, and nothing that cannot be removed."""

from __future__ import annotations

import os

import pytest

from tests.cases import tried_each_time
from tests.checkpoint.killing import kill_savers

pytestmark = [pytest.mark.s3, pytest.mark.procs]


@pytest.mark.parametrize("kills", tried_each_time([6], of=[6, 10]))
def test_processes_killed_in_the_middle_of_an_upload_cost_nothing_but_that_save(s3_url: str, kills: int) -> None:
    """Data files of 9 MiB go up in parts: the remains of a killed upload are found as unfinished, and discarded."""
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    killed = kill_savers(s3_url, kills=kills, rows=75_000, chunk=65_536, environment=environment)
    assert killed.in_a_save == kills
    assert len(killed.files_found) > 1, killed
    assert killed.dangling > 0
