"""Causes of a worker's death, from Ray's errors. The texts are those of 2.56, shortened in their middle."""

from __future__ import annotations

import pytest

from raysharded.ray_backend.death_causes import cause_of_death

DIED = (
    "The actor died unexpectedly before finishing this task.\n\tclass_name: A\n\tpid: 24640\nThe actor is dead because "
    "its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
)
SILENT = (
    "Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the "
    "process was killed by the OOM killer due to high memory usage, (2) ray stop --force was called, or (3) the worker "
    "crashed unexpectedly due to SIGSEGV or another unexpected error."
)
ENDED = "its process ended silently: killed (SIGKILL, the kernel's memory killer), or crashed"
LOW_ON_MEMORY = (
    "1 worker(s) were killed due to the node running low on memory. \nMemory on the node (IP: 10.0.0.2, ID: 5c4676b7) "
    "was 62.03GB used / 64.00GB limit (0.969219)\nOOM kill reason: Memory usage exceeded threshold"
)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (DIED + SILENT, ENDED),
        (
            DIED + SILENT.replace("2. End of file", "104. Connection reset by peer"),
            f"{ENDED} (Connection reset by peer)",
        ),
        (
            DIED + "Worker exits unexpectedly. Worker exits with an exit code 1. The process receives a SIGTERM.",
            "its process was ended by SIGTERM",
        ),
        (DIED + "Worker exits unexpectedly. Worker exits with an exit code 3.", "its process exited with code 3"),
        (
            DIED + "Worker exits unexpectedly. Worker exits with an exit code 1. A plain reason.",
            "its process exited with code 1: A plain reason.",
        ),
        (DIED + "Worker is idle for too long.", "its process died: Worker is idle for too long."),
        (
            "The actor died.\nThe actor is dead because it was killed by `ray.kill`.",
            "its process was killed by `ray.kill`",
        ),
        (
            LOW_ON_MEMORY,
            "Ray killed its process because its node ran low on memory: 62.03GB used / 64.00GB limit",
        ),
        ("The actor is temporarily unavailable.", "RuntimeError: The actor is temporarily unavailable."),
    ],
)
def test_the_cause_of_a_workers_death_is_in_plain_words(text: str, cause: str) -> None:
    assert cause_of_death(RuntimeError(text)) == cause
