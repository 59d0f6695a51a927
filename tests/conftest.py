"""Settings for every test."""

from __future__ import annotations

import gc
import os
import signal

from hypothesis import settings

import tests.forked  # noqa: F401 - sets the imports of the server that all processes of a test run are forked from
from tests.s3.fixtures import (
    faulty_s3 as faulty_s3,
    s3_bucket as s3_bucket,
    s3_credentials as s3_credentials,
    s3_server as s3_server,
    s3_url as s3_url,
)

# What collecting the tests makes lives as long as the process. It is not searched for garbage, neither while it is made
# nor later: that would take a fifth of the collection, and seconds at the end.
gc.disable()


def pytest_collection_finish() -> None:
    """pytest's hook."""
    gc.freeze()
    gc.enable()


pytest_plugins = ["tests.second_tries", "tests.resumption"]

# Several ranks share a few cores, and bits are compared between runs: one thread each, set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A run whose folder of Ray's files is named finds no `ray start --temp-dir` of another test. It is Ray's own default.
os.environ.setdefault("RAY_TMPDIR", os.environ.get("TMPDIR") or "/tmp")

# Tests in the background of a shell ignore Ctrl-C, and under `nohup` SIGHUP, which children would inherit: some tests
# send them to theirs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")
