"""Uploaders killed by SIGKILL on a real S3 server leave the previous checkpoint, and nothing that cannot be removed."""

from __future__ import annotations

import os

import pytest

from tests.checkpoint.killing import kill_savers

pytestmark = [pytest.mark.s3, pytest.mark.procs]


def test_processes_killed_in_the_middle_of_an_upload_cost_nothing_but_that_save(s3_url: str) -> None:
    """Data files of 9 MiB go up in parts: the remains of a killed upload are found as unfinished, and discarded."""
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    killed = kill_savers(s3_url, kills=10, rows=75_000, chunk=65_536, environment=environment)
    assert killed.in_a_save == 10
    assert len(killed.files_found) > 1, killed
    assert killed.dangling > 0
