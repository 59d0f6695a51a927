"""Settings for every test."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile

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


pytest_plugins = ["tests.second_tries", "tests.resumption", "tests.in_memory"]

# Several ranks share a few cores, and bits are compared between runs: one thread each, set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests that start clusters neither find nor hide those of this machine's users: Ray's files are in a separate folder,
# with a short path for its sockets. A run whose folder is named finds no `ray start --temp-dir` of another test.
_OWN_FOLDER = None if "RAY_TMPDIR" in os.environ else tempfile.mkdtemp(prefix="rst", dir=os.environ.get("TMPDIR"))
if _OWN_FOLDER is not None:
    os.environ["RAY_TMPDIR"] = _OWN_FOLDER


def pytest_sessionfinish(exitstatus: int) -> None:
    """pytest's hook. Logs of Ray stay for a run that failed."""
    if _OWN_FOLDER is not None and exitstatus == 0:
        shutil.rmtree(_OWN_FOLDER, ignore_errors=True)


# Tests in the background of a shell ignore Ctrl-C, and under `nohup` SIGHUP, which children would inherit: some tests
# send them to theirs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")
