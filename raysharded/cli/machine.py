"""Tests of `raysharded doctor` that concern this machine: its Ray, extras, home, memory, limits."""

from __future__ import annotations

import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from raysharded.cli.diagnostics import Finding

EXTRAS: dict[str, tuple[str, str]] = {
    "jobs": ("aiohttp_cors", "`ray job submit`, the dashboard"),
    "s3": ("s3fs", "fsspec+s3:// URLs, `raysharded data pack --layout parquet` to s3://"),
    "tokenizers": ("tokenizers", "`raysharded data pack --tokenizer`"),
    "huggingface": ("transformers", "models of `from_pretrained`, examples/finetune_hf.py"),
    "tensorboard": ("tensorboard", "raysharded.metrics.TensorBoard"),
    "parity": ("zfec", "Redundancy(parity=(k, m)) with m of 2 or more"),
}
"""Extra -> a module that it installs, and its use."""
OPEN_FILES = 4096
"""Sufficient limit of open files: Ray and the sockets of some dozens of workers need about half of it."""


def which_ray() -> Finding:
    """The Ray that `fit()` would use here, in the words of its start; and a cluster's user, nodes, CPUs and GPUs."""
    from raysharded.errors import ClusterError
    from raysharded.ray_backend import cluster

    try:
        choice = cluster.find_choice(log_to_driver=False)
    except ClusterError as error:
        address = os.environ.get("RAY_ADDRESS", "")
        return Finding(name="ray used", found=f"RAY_ADDRESS={address}", ok=False, advice=str(error))
    if not choice.address:
        return Finding(name="ray used", found=f"{choice}", advice=choice.foreign)
    return Finding(name="ray used", found=f"{choice}; {cluster.describe_owner()}: {cluster.describe_size()}")


def extras() -> Finding:
    """The extras whose packages are installed, and those that are missing, each with its use."""
    there = [name for name, (module, _) in EXTRAS.items() if find_spec(module) is not None]
    missing = [f"{name} ({use})" for name, (_, use) in EXTRAS.items() if name not in there]
    advice = f"Missing, if you need them: {'; '.join(missing)}: `pip install 'raysharded[NAME]'`." if missing else ""
    return Finding(name="extras", found=", ".join(there) or "none", advice=advice)


def home() -> Finding:
    """Whether Ray and torch can keep their files: in the home, the folder of Ray's sessions, and that of torch's."""
    from raysharded.actors.process.surroundings import home_problem, session_problem, working_directory_problem

    problem = working_directory_problem() or home_problem() or temporary_problem() or session_problem()
    if problem:
        what, _, advice = problem.partition(". ")
        return Finding(name="home", found=what, ok=False, advice=f"{advice}.")
    try:
        folder = Path.home()
    except RuntimeError:  # Python's error for a user without one
        return Finding(name="home", found=f"none, for user {os.getuid()}; Ray needs none here")
    if os.access(folder, os.W_OK | os.X_OK):
        return Finding(name="home", found=f"{folder}, writable")
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "disabled":
        return Finding(name="home", found=f"{folder}, which is not writable; Ray needs none here")
    advice = "Ray and torch write there: set HOME to a folder of yours."
    return Finding(name="home", found=f"HOME={folder} is not writable", ok=False, advice=advice)


def temporary_problem() -> str:
    """The sentence on a machine where no folder of temporary files can be written; empty if one can."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError:  # Python has tried to write in each
        return "no folder of temporary files can be written. Set TMPDIR to one"
    return ""


def memory() -> Finding:
    """The memory of this machine, and a container's limit."""
    from raysharded.display.quantities import size
    from raysharded.preflight.host_memory import host_memory

    found = host_memory()
    if found.machine is None:
        return Finding(name="memory", found="unknown")
    told = f"{size(found.machine)}, {size(found.available or 0)} available"
    return Finding(name="memory", found=told if found.limit is None else f"{told}; limited to {size(found.limit)}")


def open_files() -> Finding:
    """Whether processes here may open enough files. Drivers and workers raise their own limit to the hard one."""
    from raysharded.protocol.descriptors import hard_limit, limit, most_workers

    soft, hard = limit(), hard_limit()
    if hard == sys.maxsize:
        return Finding(name="open files", found="no limit")
    enough = f"enough for a run of {most_workers(hard)} workers"
    found = f"{hard}, {enough}" if soft == hard else f"{soft}, which a run raises to {hard}, {enough}"
    if hard >= OPEN_FILES:
        return Finding(name="open files", found=found)
    advice = f"Have {OPEN_FILES} allowed where processes start (`ulimit -Hn`, limits.conf: nofile)."
    return Finding(name="open files", found=f"at most {found}", ok=False, advice=advice)
