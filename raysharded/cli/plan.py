"""`raysharded plan`: a run's requirements, before its launch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raysharded.cli.errors import AsJson, print_json, show_error
from raysharded.cli.output import console
from raysharded.cli.streams import own_stdout
from raysharded.display.quantities import count, listing
from raysharded.errors import ConfigError

if TYPE_CHECKING:
    from raysharded.config import BatchConfig, EngineConfig
    from raysharded.layout import Mesh
    from raysharded.planning.memory.footprint import Setting
    from raysharded.planning.plans import Plan
    from raysharded.planning.search import Cluster

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTkmgt]i?)?B?")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def _above_zero(value: float | None) -> float | None:
    """A speed in the unit of its option. Raises BadParameter."""
    if value is not None and not 0 < value < math.inf:
        raise typer.BadParameter(f"{value:g}: give a number above 0.")
    return value


def plan(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py[:NAME] | MODULE:NAME | config.json",
            help="The trainer, as for `run`; or a Hugging Face config of a Llama-like model.",
            show_default=False,
        ),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENT", help="Arguments of the trainer's function.")
    ] = None,
    workers: Annotated[int | None, typer.Option(metavar="N", help="By default the trainer's maximum.")] = None,
    workers_per_node: Annotated[
        int | None, typer.Option(metavar="N", help="By default all on one node, at most 8.")
    ] = None,
    shards: Annotated[
        int | None, typer.Option(metavar="N", help="Require shard groups of N workers, instead of the best.")
    ] = None,
    tensor: Annotated[
        int | None, typer.Option(metavar="N", help="Tensor parallel degree; by default the trainer's.")
    ] = None,
    device_memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of one worker: 80GiB.")] = None,
    host_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of one node: 512GiB; here: this machine's.")
    ] = None,
    headroom: Annotated[float, typer.Option(metavar="SHARE", help="Share of both that stays free.")] = 0.1,
    global_batch_size: Annotated[int | None, typer.Option(metavar="N", help="Samples per step.")] = None,
    microbatch_size: Annotated[int | None, typer.Option(metavar="N", help="Samples per forward and backward.")] = None,
    seq_len: Annotated[int | None, typer.Option(metavar="N", help="Tokens per sample; for a config.")] = None,
    param_dtype: Annotated[
        str | None,
        typer.Option(metavar="DTYPE", help="Dtype of forward and backward; for a config: bfloat16 by default."),
    ] = None,
    activation_checkpointing: Annotated[
        bool | None,
        typer.Option("--activation-checkpointing/--no-activation-checkpointing", help="For a config: on by default."),
    ] = None,
    accumulation: Annotated[str | None, typer.Option(metavar="MODE", help="sharded or local.")] = None,
    tflops: Annotated[
        float | None, typer.Option(metavar="N", help="Effective speed of one device.", callback=_above_zero)
    ] = None,
    node_bandwidth: Annotated[
        float | None, typer.Option(metavar="GB/S", help="Per worker, inside a node.", callback=_above_zero)
    ] = None,
    network_bandwidth: Annotated[
        float | None, typer.Option(metavar="GB/S", help="Per worker, to other nodes.", callback=_above_zero)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a run's requirements before its launch: memory, traffic, and the layouts that fit.

    No GPU is needed, and nothing is computed. Exits with 1 if nothing fits, or not the requested layout.
    """
    from raysharded.planning.plans import make_plan

    if target.endswith(".json"):
        if arguments:
            raise ConfigError(f"{target} takes no arguments, but got {' '.join(arguments)!r}; leave them out.")
        if tensor not in (None, 1):
            raise ConfigError(
                f"--tensor {tensor}: a config.json is planned without tensor parallelism; plan a trainer whose task "
                "has parallelize: FILE.py:NAME."
            )
        run = _of_config(Path(target), global_batch_size, microbatch_size, seq_len, workers)
    else:
        if seq_len is not None:
            raise ConfigError("--seq-len is for a config.json; a trainer's data has its own.")
        with own_stdout() if as_json else nullcontext():
            run = _of_trainer(target, arguments or [], global_batch_size, microbatch_size, workers, tensor)
    changes: dict[str, Any] = {
        "param_dtype": param_dtype,
        "activation_checkpointing": activation_checkpointing,
        "accumulation": accumulation,
    }
    engine = replace(run.engine, **{name: value for name, value in changes.items() if value is not None})
    cluster = _cluster(
        run.workers,
        workers_per_node=workers_per_node if workers_per_node is not None else min(8, run.workers),
        device_memory=_bytes("--device-memory", device_memory),
        host_memory=_host_memory(host_memory),
        headroom=headroom,
        **_speeds(run.on_gpu, tflops, node_bandwidth, network_bandwidth),
    )
    wanted = _layout(run.workers, shards, run.degree)
    with own_stdout() if as_json else nullcontext():
        setting = run.measure(engine)
    found = make_plan(setting, cluster, run.batch, wanted=wanted, builds_whole=run.builds_whole)
    if as_json:
        print_json(found.as_dict())
    else:
        _show(found)
    if found.problem is not None:
        show_error(ConfigError(found.problem))
        raise typer.Exit(1)


def _host_memory(text: str | None) -> int | None:
    """Bytes of `--host-memory`; for "here" this machine's, or a container's limit. Raises BadParameter."""
    from raysharded.preflight.host_memory import host_memory

    if text != "here":
        return _bytes("--host-memory", text)
    if (found := host_memory().usable) is None:
        raise typer.BadParameter("--host-memory=here: the memory of this machine is unknown. Give a size: 512GiB.")
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """The run to plan."""

    batch: BatchConfig
    engine: EngineConfig
    workers: int
    degree: int
    measure: Callable[[EngineConfig], Setting]
    on_gpu: bool
    builds_whole: bool


def _of_trainer(
    target: str,
    arguments: list[str],
    global_batch_size: int | None,
    microbatch_size: int | None,
    workers: int | None,
    tensor: int | None,
) -> _Run:
    from raysharded.cli.target import load_trainer
    from raysharded.layout.mesh import layouts_of
    from raysharded.planning.plans import setting_of_task

    trainer = load_trainer(target, arguments)
    batch = replace(
        trainer.batch,
        global_batch_size=trainer.batch.global_batch_size if global_batch_size is None else global_batch_size,
        microbatch_size=trainer.batch.microbatch_size if microbatch_size is None else microbatch_size,
    )

    degree = trainer.scaling.tensor_parallel_degree if tensor is None else tensor
    most = trainer.scaling.max_workers
    at_work = max(most // degree, 1) * degree if degree > 0 else most  # the rest would stand by
    count = at_work if workers is None else workers
    layouts_of(count, degree)  # rejects incompatible numbers before anything is measured

    def measure(engine: EngineConfig) -> Setting:
        return setting_of_task(
            trainer.task,
            trainer.data,
            batch,
            engine,
            on_gpu=trainer.scaling.use_gpu,
            checkpoints=trainer.run.checkpoint.writes_meanwhile,
            degree=degree,
        )

    return _Run(
        batch=batch,
        engine=trainer.engine,
        workers=count,
        degree=degree,
        measure=measure,
        on_gpu=trainer.scaling.use_gpu,
        builds_whole=trainer.task.init_weights is None,
    )


def _of_config(
    path: Path, global_batch_size: int | None, microbatch_size: int | None, seq_len: int | None, workers: int | None
) -> _Run:
    from raysharded.config import BatchConfig, EngineConfig
    from raysharded.planning.models.hf_config import read_config
    from raysharded.planning.plans import setting_of_config

    shape = read_config(path)
    length, num_samples, num_workers = _given(
        path, {"--seq-len": seq_len, "--global-batch-size": global_batch_size, "--workers": workers}
    )
    batch = BatchConfig(
        global_batch_size=num_samples, microbatch_size=1 if microbatch_size is None else microbatch_size
    )
    return _Run(
        batch=batch,
        engine=EngineConfig(param_dtype="bfloat16", activation_checkpointing=True),
        workers=num_workers,
        degree=1,
        measure=lambda engine: setting_of_config(shape, batch, engine, seq_len=length, on_gpu=True),
        on_gpu=True,
        builds_whole=False,
    )


def _given(path: Path, options: Mapping[str, int | None]) -> list[int]:
    """The options' values. Raises ConfigError that names all missing ones."""
    if missing := [f"{option} N" for option, value in options.items() if value is None]:
        raise ConfigError(f"{path} does not describe a run: give {listing(missing)}.")
    given = {option: value for option, value in options.items() if value is not None}
    for option, value in given.items():
        if value < 1:
            raise ConfigError(f"{option} {value}: give a whole number of 1 or more.")
    return list(given.values())


def _cluster(workers: int, **given: float | None) -> Cluster:
    from raysharded.planning.search import Cluster

    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return Cluster(workers=workers, **settings)


def _speeds(
    on_gpu: bool, tflops: float | None, node_bandwidth: float | None, network_bandwidth: float | None
) -> dict[str, float]:
    from raysharded.planning.search import CPU_SPEEDS

    given = {
        "flops": (tflops, 1e12),
        "node_bandwidth": (node_bandwidth, 1e9),
        "network_bandwidth": (network_bandwidth, 1e9),
    }
    known = {name: value * unit for name, (value, unit) in given.items() if value is not None}
    return known if on_gpu else CPU_SPEEDS | known


def _layout(workers: int, shards: int | None, degree: int) -> Mesh | None:
    from raysharded.layout.mesh import layouts_of

    if shards is None:
        return None
    layouts = {layout.shards: layout for layout in layouts_of(workers, degree)}
    if shards not in layouts:
        groups = f" in groups of whole {degree}" if degree > 1 else ""
        raise ConfigError(
            f"--shards {shards} does not divide {count(workers, 'worker')}{groups}; take one of "
            f"{', '.join(map(str, sorted(layouts)[:12]))}."
        )
    return layouts[shards]


def _bytes(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise ConfigError(f"{option} {text}: give a size, such as 80GiB or 500GB.")
    unit = (match[2] or "").lower()
    return int(float(match[1]) * (1024 if unit.endswith("i") else 1000) ** _POWERS[unit[:1]])


def _show(found: Plan) -> None:
    from raysharded.planning.tables import show

    with console() as out:
        show(found, out)
