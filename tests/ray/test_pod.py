"""A pod as clusters give it: any user, no home, a read-only root with one writable volume, little shared memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

USER = 1000770000
POD = """
set -e
volume=$1; stage=$2; shift 2
mount --make-rprivate /
mount --bind "$volume" /srv
if [ -n "$HIDDEN" ]; then  # Python is in a home that other users may not enter
    mount --bind "$HIDDEN" "$stage"
    mount -t tmpfs -o mode=755,size=1m none "$HOLDER"
    mkdir -p "$HIDDEN"
    mount --bind "$stage" "$HIDDEN"
fi
mount -t tmpfs -o mode=1777,size=8m none /dev/shm
awk '{print $2}' /proc/self/mounts | while read -r at; do
    [ -e "$at" ] || continue  # behind another mount
    case "$at" in /proc*|/sys*|/dev*|/srv) ;; *) mount -o remount,bind,ro "$at" ;; esac
done
exec setpriv --reuid "$USER_ID" --regid 0 --clear-groups env -i "PATH=$PATH" "PYTHONPATH=$PYTHONPATH" \
    OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1 "$@"
"""
FIT = """
import raysharded as rs
from tests.faults.on_fake_nfs import Ramps, Squares
trainer = rs.ElasticTrainer(
    task=Squares(), data=Ramps(), batch=rs.BatchConfig(global_batch_size=4, microbatch_size=1),
    scaling=rs.ScalingConfig(num_workers=1, cpus_per_worker=0.25),
    run=rs.RunConfig(name="run", storage_path="/srv/runs", max_steps=3),
)
print(trainer.fit(progress=False).fingerprint)
"""


class Pod:
    """Runs commands in a mount namespace like a pod's."""

    def __init__(self, folder: Path) -> None:
        self.volume, self._stage = folder / "volume", folder / "stage"
        self.volume.mkdir()
        self._stage.mkdir()
        os.chown(self.volume, USER, 0)

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        given = [f"{name}={value}" for name, value in variables.items()]
        return subprocess.run(
            ["unshare", "--mount", "sh", "-c", POD, "sh", self.volume, self._stage, *given, *command],
            env={**os.environ, "PYTHONPATH": str(ROOT), "USER_ID": str(USER), **_hidden()},
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )


def _hidden() -> dict[str, str]:
    """Python's own folder, and the one above it that other users may not enter; both empty if they may."""
    base = Path(sys.base_prefix)
    closed = [folder for folder in base.parents if not folder.stat().st_mode & 0o001]
    return {"HIDDEN": str(base), "HOLDER": str(closed[-1])} if closed else {"HIDDEN": "", "HOLDER": ""}


@pytest.fixture
def pod(tmp_path: Path) -> Pod:
    if os.geteuid() != 0:
        pytest.skip("a mount namespace takes root")
    missing = [name for name in ("unshare", "setpriv", "awk") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    made = Pod(tmp_path)
    tried = made.run("true")
    if tried.returncode != 0:
        pytest.skip(f"no namespace like a pod's can be made here: {tried.stderr.strip()}")
    return made


def test_a_pod_is_read_only_but_for_its_volume(pod: Pod) -> None:
    told = pod.run(
        "sh", "-c", "id -u; touch /srv/a && echo volume; touch /tmp/a; touch /a; df -m /dev/shm | tail -1"
    ).stdout
    user, volume, memory = told.splitlines()
    assert (user, volume, memory.split()[1]) == (str(USER), "volume", "8")


@pytest.mark.ray
@pytest.mark.clusters
def test_fit_in_a_pod_needs_a_volume_and_no_home(pod: Pod) -> None:
    done = pod.run(
        sys.executable, "-c", FIT, HOME="/", TMPDIR="/srv", RAY_TMPDIR="/srv", RAY_AUTH_MODE="disabled", USER="any"
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()[-1]) == 32


SESSIONS = (
    {"HOME": "/srv", "TMPDIR": "/srv", "RAY_TMPDIR": "/tmp"},
    "Ray keeps its sessions in /tmp/ray, which cannot be written by user 1000770000",
)
HOMES = [
    ({"HOME": "/", "TMPDIR": "/srv", "RAY_TMPDIR": "/srv"}, "HOME=/ cannot be written by user 1000770000"),
    ({"TMPDIR": "/srv", "RAY_TMPDIR": "/srv"}, "user 1000770000 has no home: HOME is not set"),
]


@pytest.mark.long  # test_surroundings.py has the same sentences without a pod
@pytest.mark.ray
@pytest.mark.clusters
@pytest.mark.parametrize(("variables", "told"), [SESSIONS, *HOMES])
def test_what_a_pod_lacks_is_one_sentence_and_doctor_has_it(pod: Pod, variables: dict[str, str], told: str) -> None:
    done = pod.run(sys.executable, "-c", FIT, **variables)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("ClusterError: Ray cannot be started on this machine: ")
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    seen = pod.run(sys.executable, "-m", "raysharded", "doctor", "/srv/runs", "--json", **variables)
    assert seen.returncode == 1
    assert told in seen.stdout
    assert "/dev/shm" in seen.stdout or "shm-size" in seen.stdout


@pytest.mark.long
def test_doctor_names_the_variable_where_no_folder_of_temporary_files_can_be_written(pod: Pod) -> None:
    seen = pod.run(sys.executable, "-m", "raysharded", "doctor", "/srv/runs", HOME="/srv")
    assert seen.returncode == 1
    assert "no folder of temporary files can be written" in seen.stdout
    assert "Set TMPDIR to" in seen.stdout
    assert "Install it again" not in seen.stdout
