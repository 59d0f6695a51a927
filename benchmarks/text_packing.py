"""Packing of text by one process, by two, and on Ray, beside the tokenizer alone; and killed half way and continued.

python -m benchmarks.text_packing FOLDER [--megabytes 400] [--vocabulary 32000] [--tokens-per-shard N] [--json PATH]

The text consists of the sources and headers of the environment's packages, each a document of JSON Lines. A byte-level
BPE is trained on a part of them. `FOLDER` keeps both, and the results so far: the command continues where it was ended.
It fails if the stores differ. A Ray is started for each part that needs one, and what a killed part leaves is ended.
CPU seconds are those of all processes that a part started, without Ray's workers, whose raylet leaves no record.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

SUFFIXES = frozenset((".py", ".pyi", ".h", ".hpp", ".cpp", ".cuh", ".md", ".rst", ".txt", ".js", ".html"))
TRAINED_ON_BYTES = 40_000_000
SHARDS_BEFORE_KILL = 0.5
_FILE_BYTES = 100_000_000
_PR_SET_CHILD_SUBREAPER = 36
_ORPHANS_S = 20.0
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "RAY_ADDRESS": "local"}


def write_text(folder: Path, size_bytes: int) -> None:
    """Write the documents, in files of 100 MB. Raises SystemExit if the packages have less text."""
    folder.mkdir()
    written = 0
    documents = _documents()
    for number in range(-(-size_bytes // _FILE_BYTES)):
        with (folder / f"{number:03}.jsonl").open("w", encoding="utf-8") as file:
            of_file = 0
            while of_file < min(_FILE_BYTES, size_bytes - written):
                text = next(documents, None)
                if text is None:
                    raise SystemExit(f"the packages have {(written + of_file) / 1e6:.0f} MB of text")
                line = json.dumps({"text": text}) + "\n"
                of_file += len(line)
                file.write(line)
        written += of_file


def _documents() -> Iterator[str]:
    found = sorted(path for path in Path(sys.prefix, "lib").rglob("*") if path.suffix in SUFFIXES and path.is_file())
    for path in found:
        text = path.read_text(encoding="utf-8", errors="ignore")
        if text.strip():
            yield text


def texts(folder: Path) -> Iterator[str]:
    """The documents, in order."""
    for path in sorted(folder.iterdir()):
        with path.open(encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)["text"]


def train_tokenizer(folder: Path, text: Path, vocabulary: int) -> None:
    """Train a byte-level BPE on every so many documents."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    size = sum(path.stat().st_size for path in text.iterdir())
    stride = max(1, size // TRAINED_ON_BYTES)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator((one for number, one in enumerate(texts(text)) if number % stride == 0), trainer)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))


def tokenize(text: Path, tokenizer: Path) -> dict[str, int]:
    """The tokenizer alone, in one thread: it reads all documents, and forgets their tokens."""
    from tokenizers import Tokenizer

    found, tokens, batch = Tokenizer.from_file(str(tokenizer)), 0, []
    for document in texts(text):
        batch.append(document)
        if len(batch) == 64:
            tokens += sum(map(len, found.encode_batch(batch, add_special_tokens=False)))
            batch.clear()
    return {"tokens": tokens + sum(map(len, found.encode_batch(batch, add_special_tokens=False)))}


def packed(folder: Path, name: str, options: list[str], per_shard: int, *, killed: bool = False) -> dict[str, Any]:
    """Figures of `raysharded data pack`; `killed`: with SIGKILL, once half of the shards of the first store exist."""
    output = folder / name
    command = [sys.executable, "-m", "raysharded", "data", "pack", "--format", "jsonl", "--json", *options]
    command += ["--tokens-per-file", str(per_shard), "--tokenizer", str(folder / "tokenizer" / "tokenizer.json")]
    command += [str(folder / "text"), str(output)]
    found: dict[str, Any] = {}
    if killed:
        whole = _shards(folder / "one process")
        found["killed_after_shards"] = _kill_half_way(command, output, int(SHARDS_BEFORE_KILL * whole))
        found["ended_after_the_kill"] = _end_orphans()
    found |= timed(command)
    return found | {"digest": digest(output), "shards": _shards(output)}


def _kill_half_way(command: list[str], output: Path, shards: int) -> int:
    process = subprocess.Popen(
        command,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | _ENVIRONMENT,
    )
    while _shards(output) < shards:
        if process.poll() is not None:
            raise SystemExit(f"data pack ended with status {process.returncode} before it was killed")
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return _shards(output)


def _shards(store: Path) -> int:
    return len([path for path in store.glob("shard-*") if path.is_file()])


def digest(store: Path) -> str:
    """Digest of all files of a store, with their names."""
    found = hashlib.blake2b(digest_size=16)
    for path in sorted(path for path in store.rglob("*") if path.is_file()):
        found.update(str(path.relative_to(store)).encode())
        with path.open("rb") as file:
            found.update(hashlib.file_digest(file, "blake2b").digest())
    return found.hexdigest()


def timed(command: list[str]) -> dict[str, Any]:
    """Wall and CPU seconds of a command with all that it starts. Raises SystemExit if it fails."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, env=os.environ | _ENVIRONMENT)
    seconds = time.monotonic() - began
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with status {done.returncode}")
    _reap_orphans()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    lines = done.stdout.decode().strip().splitlines()
    report = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else json.loads(done.stdout)
    return {"seconds": seconds, "cpu_seconds": used, "load": os.getloadavg()[0], "report": report}


def _reap_orphans() -> None:
    """Wait for processes that lost their parents, such as Ray's, and became this one's."""
    ends = time.monotonic() + _ORPHANS_S
    while time.monotonic() < ends:
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.1)
        except ChildProcessError:
            return


def _end_orphans() -> int:
    """Wait for what a killed command left, and end what does not end by itself; returns the number of these."""
    _reap_orphans()
    ended = 0
    while left := _children():
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        ended += len(left)
        _reap_orphans()
    return ended


def _children() -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text(encoding="utf-8").rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state != "Z":
                found.append(int(stat.parent.name))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--tokens-per-shard", type=int, default=1 << 23)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tokenize", action="store_true", help=argparse.SUPPRESS)
    settings = parser.parse_args()
    folder: Path = settings.folder
    text, tokenizer = folder / "text", folder / "tokenizer"
    if settings.tokenize:
        sys.stdout.write(json.dumps(tokenize(text, tokenizer / "tokenizer.json")) + "\n")
        return
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    folder.mkdir(parents=True, exist_ok=True)
    if not text.exists():
        write_text(text, settings.megabytes * 1_000_000)
    if not tokenizer.exists():
        train_tokenizer(tokenizer, text, settings.vocabulary)
    kept = folder / "results.json"
    found: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    alone = [sys.executable, "-m", "benchmarks.text_packing", "--tokenize", str(folder)]
    per_shard: int = settings.tokens_per_shard
    options: dict[str, list[str]] = {"one process": [], "two processes": ["--workers", "2"], "on Ray": ["--ray"]}
    parts: dict[str, Callable[[], dict[str, Any]]] = {"the tokenizer alone": lambda: timed(alone)}
    for name, own in options.items():
        parts[name] = partial(packed, folder, name, own, per_shard)
    for name, of in (("killed half way", "two processes"), ("killed half way on Ray", "on Ray")):
        parts[name] = partial(packed, folder, name, options[of], per_shard, killed=True)
    for name, part in parts.items():
        if name not in found:
            found[name] = part()
            kept.write_text(json.dumps(found, indent=1), encoding="utf-8")
    size = sum(path.stat().st_size for path in text.iterdir()) / 1e6
    sys.stdout.write(f"{size:.0f} MB of JSON Lines\n")
    for name, one in found.items():
        sys.stdout.write(
            f"{name}: {one['seconds']:.0f} s, {one['cpu_seconds']:.0f} CPU s, {size / one['seconds']:.2f} MB/s, "
            f"load {one['load']:.1f}, {one.get('digest', '')}\n"
        )
    if settings.json:
        settings.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    digests = {one["digest"] for one in found.values() if "digest" in one}
    sys.exit(f"the stores differ: {digests}" if len(digests) > 1 else 0)


if __name__ == "__main__":
    main()
