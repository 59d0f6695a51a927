"""Programs of Debian's packages for tests, downloaded once and unpacked into a cache: nothing is installed."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path


class NotUnpacked(Exception):
    """The programs are not available; the message has the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unpacked:
    """Programs that are needed, and the packages that have them."""

    name: str
    """Name of the cache's folder."""
    packages: tuple[str, ...]
    programs: tuple[str, ...]
    libraries: tuple[str, ...] = ()
    """Further folders with libraries, below Debian's."""

    def root(self) -> Path:
        """The folder with the programs, which are downloaded if they are not there. Raises NotUnpacked."""
        cache = self._cache()
        cache.mkdir(parents=True, exist_ok=True)
        with open(cache / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # several test runs may start at once
            root = cache / "root"
            if not root.is_dir() or self._unusable(root):
                print(f"downloading {', '.join(self.packages)} into {cache}", flush=True)  # noqa: T201  # it takes a while
                self._download(cache / "packages")
                _unpack(cache / "packages", root)
                missing = self._unusable(root)
                if missing:
                    raise NotUnpacked(f"programs in {root} do not run: {missing}. Remove {cache} and try again.")
            return root

    def environment(self, root: Path) -> dict[str, str]:
        """The environment in which the programs run."""
        inner = [libraries(root) / name for name in self.libraries]
        places = (libraries(root), root / f"lib/{os.uname().machine}-linux-gnu", *inner)
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
            "LD_LIBRARY_PATH": ":".join(map(str, places)),
            "PATH": f"{root / 'usr/bin'}:{os.environ['PATH']}",
        }

    def _cache(self) -> Path:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        try:
            release = Path("/etc/debian_version").read_text().strip().replace("/", "-")
        except FileNotFoundError as error:
            raise NotUnpacked(f"{self.packages[0]} is one of Debian's packages: run the tests on Debian.") from error
        return cache / "raysharded" / f"{self.name}-{release}"

    def _unusable(self, root: Path) -> str:
        """The first thing that a program lacks; "" if they all can run here. The machine's own libraries may change."""
        for name in self.programs:
            program = root / "usr/bin" / name
            if not program.is_file():
                return f"there is no {program}"
            needs = subprocess.run(
                ["ldd", program], capture_output=True, text=True, env=self.environment(root), check=False
            )
            for line in needs.stdout.splitlines():
                if "not found" in line:
                    return f"{name}: {line.strip()}"
        return ""

    def _download(self, packages: Path) -> None:
        """Download the packages, and their dependencies that this machine lacks."""
        shutil.rmtree(packages, ignore_errors=True)
        (packages / "partial").mkdir(parents=True)
        here = ["-o", f"Dir::Cache::archives={packages}", "-o", "APT::Sandbox::User=root"]
        for command in (
            ["apt-get", "update", "-qq"],
            ["apt-get", "install", "-qq", "-y", "--download-only", "--no-install-recommends", *here, *self.packages],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise NotUnpacked(
                    f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}. Downloading "
                    f"{', '.join(self.packages)} needs root on Debian, once; it installs nothing."
                )


def _unpack(packages: Path, root: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
    fresh = Path(tempfile.mkdtemp(dir=root.parent, prefix="root-"))
    for package in sorted(packages.glob("*.deb")):
        subprocess.run(["dpkg", "--extract", package, fresh], check=True, capture_output=True)
    fresh.chmod(0o755)
    fresh.rename(root)
    shutil.rmtree(packages)


def libraries(root: Path) -> Path:
    """The folder of this machine's kind of libraries."""
    return root / f"usr/lib/{os.uname().machine}-linux-gnu"
