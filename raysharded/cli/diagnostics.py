"""The tests of `raysharded doctor`, each with its result and advice."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from raysharded.errors import StorageError

if TYPE_CHECKING:
    from raysharded.checkpoint import Storage

_SHM = "/dev/shm"
SHM_BYTES = 256 << 20
"""Smallest sufficient shared memory. A container's default (Docker: 64 MiB) is too small for NCCL and Ray's objects."""
SKEW_S = 60.0
"""Largest acceptable difference between this clock and the storage's. Beyond it the times of journals and claims are
misleading; S3 rejects requests from 15 minutes on."""
_CONNECT_S = 3.0
_GROUP_S = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result of one test."""

    name: str
    found: str
    ok: bool = True
    advice: str = ""
    """The remedy; empty if nothing is wrong."""


def ray() -> Finding:
    """Whether Ray can be imported, and whether the cluster that the environment names answers."""
    try:
        import ray as found
    except (ImportError, OSError) as error:  # a library that Ray needs is missing
        advice = "Install it again: `pip install --force-reinstall ray`."
        return Finding(name="ray runs", found=f"it cannot be imported: {error}", ok=False, advice=advice)
    address = os.environ.get("RAY_ADDRESS", "")
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not colon or not port.isdigit():
        return Finding(name="ray runs", found=f"{found.__version__}, {address or 'no RAY_ADDRESS'}; none was started")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        advice = "Start that cluster (`ray start --head`), or unset RAY_ADDRESS."
        return Finding(name="ray runs", found=f"RAY_ADDRESS={address}: {error}", ok=False, advice=advice)
    return Finding(name="ray runs", found=f"{found.__version__}, {address} answers")


def versions() -> list[Finding]:
    """Findings for packages at versions that raysharded was not tested with."""
    from raysharded.run.listeners import untested_versions

    return [Finding(name="versions", found="not tested", advice=sentence) for sentence in untested_versions()]


def self_test() -> Finding:
    """A tiny model, trained on one worker and on two with a loss: the bits must be equal."""
    try:
        from raysharded.demo.self_test import run_self_test
    except (ImportError, OSError) as error:  # a library that it needs is missing
        return Finding(name="self-test", found="it cannot begin", ok=False, advice=str(error))
    from raysharded.versions import TESTED, tested

    verdict = run_self_test()
    if verdict.undecided:
        return Finding(name="self-test", found=verdict.found, ok=False, advice=verdict.problem)
    if verdict.problem:
        advice = f"Train nothing with what is installed; tested: {', '.join(map(tested, TESTED))}."
        problem = verdict.problem.rstrip(".")
        return Finding(name="self-test", found=verdict.found, ok=False, advice=f"{problem}. {advice}")
    return Finding(name="self-test", found=verdict.found)


def collectives() -> list[Finding]:
    """An all-reduce in a gloo group of two on the loopback interface; and NCCL, if there are GPUs."""
    try:
        import torch.distributed as dist
    except (ImportError, OSError):  # reported elsewhere
        return []
    if not dist.is_available() or not dist.is_gloo_available():
        advice = "Install a torch that was built with distributed and gloo: https://pytorch.org."
        return [Finding(name="gloo", found="this torch was built without it", ok=False, advice=advice)]
    try:
        findings = [_gloo()]
    except FileNotFoundError as error:  # no folder of temporary files; Python names those that it has tried
        advice = "Set TMPDIR to a folder that can be written."
        findings = [Finding(name="gloo", found=f"not tested: {error.strerror}", ok=False, advice=advice)]
    from raysharded.actors.device.accelerator import accelerator

    if accelerator().is_available():
        version = accelerator().library_version()
        advice = "" if version else "Install a torch that was built for CUDA: https://pytorch.org."
        found = version or "this torch was built without it"
        findings.append(Finding(name="nccl", found=found, ok=bool(version), advice=advice))
    else:
        advice = f"For ScalingConfig(use_gpu=True): {accelerator().why_unusable()}."
        findings.append(Finding(name="nccl", found="not needed: no GPU can be used here", advice=advice))
    return findings


_MEMBER = """
import sys, datetime, torch, torch.distributed as dist
meeting, rank, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
timeout = datetime.timedelta(seconds=seconds)
dist.init_process_group("gloo", init_method="file://" + meeting, rank=rank, world_size=2, timeout=timeout)
values = torch.tensor([rank + 1.0])
dist.all_reduce(values)
print(values.item())
"""


def _gloo() -> Finding:
    """A test with two processes, which are killed at a timeout."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _MEMBER, f"{folder}/meeting"]
        members = [
            subprocess.Popen(
                [*command, str(rank), str(_GROUP_S)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for rank in range(2)
        ]
        problem = ""
        try:
            for member in members:
                told, errors = member.communicate(timeout=2 * _GROUP_S)
                if told.strip() != "3.0":
                    problem = problem or (errors.strip().splitlines() or [f"exit status {member.returncode}"])[-1]
        except subprocess.TimeoutExpired:
            problem = f"nothing came of it in {2 * _GROUP_S:.0f} s"
        finally:
            for member in members:
                member.kill()
                member.communicate()
    if problem:
        advice = "Allow TCP connections between processes of this machine; GLOO_SOCKET_IFNAME names the interface."
        return Finding(name="gloo", found=f"a group of two failed: {problem}", ok=False, advice=advice)
    return Finding(name="gloo", found=f"a group of two added, in {time.monotonic() - began:.1f} s with its imports")


def shared_memory() -> Finding:
    """The size of /dev/shm."""
    try:
        found = os.statvfs(_SHM)
    except OSError as error:
        return Finding(
            name="shared memory", found=f"{_SHM}: {error.strerror}", ok=False, advice=f"Mount a tmpfs at {_SHM}."
        )
    from raysharded.display.quantities import size

    total_bytes = found.f_frsize * found.f_blocks
    ok = total_bytes >= SHM_BYTES
    advice = "" if ok else "Give the container more: `docker run --shm-size=8g`, or an emptyDir of medium Memory."
    free = size(found.f_frsize * found.f_bavail)
    return Finding(name="shared memory", found=f"{size(total_bytes)}, {free} free", ok=ok, advice=advice)


def storage(opened: Storage) -> list[Finding]:
    """A run's requirements on storage: rights, writing, put-if-absent, and a clock close to this one."""
    from raysharded.checkpoint import check_writable
    from raysharded.checkpoint.storage import probing

    try:
        rights = _rights(opened)
        if not all(right.ok for right in rights):
            return rights
        check_writable(opened)
    except StorageError as error:
        return [Finding(name="storage", found=f"{opened.url}: not writable", ok=False, advice=str(error))]
    findings = [Finding(name="storage", found=f"{opened.url}: writable"), *rights]
    key = f".raysharded-probe-{secrets.token_hex(6)}"
    with probing(opened):
        try:
            findings.append(_conditional_write(opened, key))
            findings.append(_clock(opened, key))
            findings.append(_uploads(opened))
        except StorageError as error:
            findings.append(Finding(name="operations", found="one failed", ok=False, advice=str(error)))
        finally:
            opened.delete([key])
    return findings


def _rights(opened: Storage) -> list[Finding]:
    """The rights that a run needs, where the storage knows of rights. Raises StorageError."""
    from raysharded.checkpoint.storage.s3 import FOR_TIDYING, S3Storage

    if not isinstance(opened, S3Storage):
        return []
    missing = opened.missing_rights()
    if not missing:
        return [Finding(name="rights", found="all that a run needs")]
    found, ok = f"without {', '.join(missing)}", set(missing) <= set(FOR_TIDYING)
    why = "Uploads of lost writers stay without it" if ok else "A run needs it"
    advice = f"{why}: allow it to these credentials (docs/storage.md, S3)."
    return [Finding(name="rights", found=found, ok=ok, advice=advice if ok else f"{opened.url}: {found}. {advice}")]


def _conditional_write(opened: Storage, key: str) -> Finding:
    first, second = opened.put_if_absent(key, b"first"), opened.put_if_absent(key, b"second")
    if (first, second, opened.read(key)) != (True, False, b"first"):
        advice = "Two drivers of one run would not detect each other here: choose another folder or URL."
        return Finding(name="conditional write", found="the second of two writers won", ok=False, advice=advice)
    if not getattr(opened, "puts_atomically", lambda: True)():
        advice = "It checks, then writes: never start a run from two places at once. See docs/storage.md, Fallbacks."
        return Finding(name="conditional write", found="best effort: the backend has none", advice=advice)
    return Finding(name="conditional write", found="the first of two writers won")


def _clock(opened: Storage, key: str) -> Finding:
    before = time.time()
    theirs = _time_of(opened, key)
    if theirs is None:
        return Finding(name="clock", found="not known: this kind of storage does not report its time")
    skew_s = theirs - (before + time.time()) / 2
    ok = abs(skew_s) <= SKEW_S
    advice = "" if ok else "Set both machines' clocks by NTP; S3 rejects requests from 15 minutes on."
    return Finding(
        name="clock", found=f"the storage's is {skew_s:+.1f} s from this one (to a second)", ok=ok, advice=advice
    )


def _uploads(opened: Storage) -> Finding:
    """Listing and unfinished uploads: a driver removes those of lost workers. Raises StorageError without the right."""
    count = len(list(opened.unfinished()))
    return Finding(name="unfinished uploads", found=str(count) if count else "none")


def _time_of(opened: Storage, key: str) -> float | None:
    """The storage's clock; None if the storage does not report it."""
    from raysharded.checkpoint.storage.local import LocalStorage

    if isinstance(opened, LocalStorage):
        opened.write(key, [b"clock"])  # the file server sets the time of a change
        return os.stat(os.path.join(opened.root, key)).st_mtime
    from raysharded.checkpoint.storage.fsspec import FsspecStorage

    if isinstance(opened, FsspecStorage):
        return None
    from raysharded.checkpoint.storage.s3.bucket import open_bucket

    bucket = open_bucket(opened.url)
    answer = bucket.request("head_object", Key=bucket.location.full(key))
    said = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    return parsedate_to_datetime(said).timestamp() if said else None
