from __future__ import annotations

import os
import subprocess
import sys

import pytest

from raysharded.checkpoint.threads import NICENESS

STEP_BACK = """
import os, threading
from raysharded.checkpoint.threads import step_back

def niceness():
    step_back()
    print(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), os.getpriority(os.PRIO_PROCESS, os.getpid()))

thread = threading.Thread(target=niceness)
thread.start()
thread.join()
"""


@pytest.mark.parametrize("more", [0, 5, 15])
def test_work_in_the_background_yields_to_training_at_any_priority_of_the_process(more: int) -> None:
    of_process = min(19, os.getpriority(os.PRIO_PROCESS, 0) + more)
    command = ["nice", "-n", str(more), sys.executable, "-c", STEP_BACK]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert tuple(map(int, said.split())) == (min(19, of_process + NICENESS), of_process)
