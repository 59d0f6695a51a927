"""cluster.yaml is accepted by `ray up`, and fits the package's requirements."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.paths import ROOT


@pytest.fixture(scope="module")
def cluster() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))
    return loaded


def test_ray_accepts_it(cluster: dict[str, Any]) -> None:
    # Ray has no public function for this; these two are what `ray up` calls first.
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(cluster))


def test_the_head_is_on_demand_and_the_workers_are_spot_gpus(cluster: dict[str, Any]) -> None:
    types = cluster["available_node_types"]
    head = types.pop(cluster["head_node_type"])
    assert "InstanceMarketOptions" not in head["node_config"]
    for worker in types.values():
        assert worker["node_config"]["InstanceMarketOptions"]["MarketType"] == "spot"
        assert worker["resources"]["GPU"] >= 1
        assert 1 <= worker["min_workers"] <= worker["max_workers"] <= cluster["max_workers"]


def test_its_ray_and_python_are_ones_the_package_allows(cluster: dict[str, Any]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    image = re.fullmatch(r"rayproject/ray:(\d+\.\d+\.\d+)-py3(\d+)-gpu", cluster["docker"]["image"])
    assert image is not None
    (ray,) = (r for r in map(Requirement, project["dependencies"]) if r.name == "ray")
    assert image[1] in ray.specifier
    assert f"3.{image[2]}" in SpecifierSet(project["requires-python"])


def test_it_installs_the_torch_that_the_makefile_tests(cluster: dict[str, Any]) -> None:
    tested = re.search(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert tested is not None
    assert f'pip install "{tested[1]}"' in cluster["setup_commands"]
