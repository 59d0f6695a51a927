"""Tests of `raysharded doctor` that concern this machine: the Ray that a run would use, extras, home, limits."""

from __future__ import annotations

import os
import resource
import tempfile
from importlib.util import find_spec

from raysharded.cli.diagnostics import Finding

EXTRAS: dict[str, tuple[str, str]] = {
    "jobs": ("aiohttp_cors", "`ray job submit`, the dashboard"),
    "s3": ("s3fs", "training data at s3://"),
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
    """Whether the home folder and the folder of temporary files are writable: Ray and torch keep files there."""
    for what, folder in (("HOME", os.path.expanduser("~")), ("the temporary folder", tempfile.gettempdir())):
        if not os.access(folder, os.W_OK | os.X_OK):
            advice = f"Ray and torch write there: set {'HOME' if what == 'HOME' else 'TMPDIR'} to a folder of yours."
            return Finding(name="home", found=f"{what}={folder} is not writable", ok=False, advice=advice)
    return Finding(name="home", found=f"{os.path.expanduser('~')}, writable")


def open_files() -> Finding:
    """Whether this process may open enough files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= OPEN_FILES:
        return Finding(name="open files", found="no limit" if soft == resource.RLIM_INFINITY else str(soft))
    possible = hard == resource.RLIM_INFINITY or hard >= OPEN_FILES
    advice = f"Raise it: `ulimit -n {OPEN_FILES}`." if possible else f"Have {OPEN_FILES} allowed (limits.conf: nofile)."
    return Finding(name="open files", found=f"at most {soft}", ok=False, advice=advice)
