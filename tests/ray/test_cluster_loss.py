"""A run with a host, and the loss of all of its cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ray.clusters import end, run_script
from tests.ray.driving import STEPS

pytestmark = [pytest.mark.ray, pytest.mark.clusters]

SCRIPT = """
import json, os, signal, sys, threading, time
from pathlib import Path
import ray
from ray.cluster_utils import Cluster
from raysharded.ray_backend.peers import gcs_limit_s
from raysharded.run.hosted.registry import host_of, hosts
from tests.ray.driving import trainer
from tests.ray.leftovers import wait_until

found = {}

def wait():
    try:
        run.wait()
    except Exception as error:
        found["waited"] = f"{type(error).__name__}: {error}"

settings = {"_system_config": {"gcs_rpc_server_reconnect_timeout_s": 170}}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **settings})
cluster.add_node(num_cpus=2)
ray.init(address=cluster.address, log_to_driver=False)
found["limit_s"] = gcs_limit_s()
run = trainer(Path(sys.argv[1]), 1).start()
wait_until(lambda: run.status().step >= 2, "a step", 120)
(name,) = hosts()
where = ray._private.state.actors(host_of(name)._actor_id.hex())["Address"]["NodeID"]
found["on_head"] = where == cluster.head_node.node_id
run.checkpoint(timeout_s=60)
waiting = threading.Thread(target=wait)
waiting.start()
(head,) = cluster.head_node.all_processes["gcs_server"]
for process in (head, *(one for node in cluster.list_all_nodes() for one in node.all_processes["raylet"])):
    os.kill(process.process.pid, signal.SIGKILL)
try:
    while True:
        run.status()  # the driver itself may live a moment longer
        time.sleep(0.2)
except Exception as error:
    found["asked"] = f"{type(error).__name__}: {error}"
waiting.join()
print(json.dumps(found))
sys.stdout.flush()
os._exit(0)  # Ray itself would end this process a minute after its cluster
"""


LIMIT = """
import json
import ray
from raysharded.ray_backend.peers import gcs_limit_s

ray.init(num_cpus=1, include_dashboard=False, object_store_memory=80 << 20)
print(json.dumps({"limit_s": gcs_limit_s()}))
ray.shutdown()
"""
LIMIT_SETTING = "RAY_gcs_rpc_server_reconnect_timeout_s"


@pytest.mark.long  # the test below reads that of the cluster's own settings
def test_rays_limit_is_read_from_the_environment_where_the_cluster_has_none(own_cluster: dict[str, str]) -> None:
    assert run_script(LIMIT, environment=own_cluster | {LIMIT_SETTING: "33"}) == {"limit_s": 33.0}


def test_a_lost_cluster_is_named_and_the_run_resumes_from_its_checkpoint(
    tmp_path: Path, own_cluster: dict[str, str]
) -> None:
    from raysharded.testing.processes import fit
    from tests.ray.driving import hurry, trainer, undisturbed

    found = run_script(SCRIPT, str(tmp_path), environment=own_cluster | {LIMIT_SETTING: "140"})
    assert found["limit_s"] == 170.0  # the cluster's own setting comes before that of the environment
    assert found["on_head"]  # no other node is one that the run cannot lose
    for said in (found["waited"], found["asked"]):
        assert "ClusterError: run 'driven' cannot be reached: the Ray cluster at " in said
        assert "is lost; nothing has answered there for 20 s" in said
    end(f"RAYSHARDED_TEST={own_cluster['RAYSHARDED_TEST']}")  # its machines
    steps = []
    hurry(tmp_path)
    result = fit(trainer(tmp_path, 2), lambda kind, fields: steps.append(fields["step"]) if kind == "step" else None)
    assert steps[0] > 2
    assert steps[-1] == STEPS
    assert result.fingerprint == undisturbed().fingerprint
