"""Export of a checkpoint to a Hugging Face folder: safetensors with an index, for transformers' `from_pretrained`.

model.safetensors, or model-00001-of-0000N.safetensors ... and model.safetensors.index.json (written last)
config.json, if one is given
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raysharded.checkpoint.byte_ranges import Bytes
from raysharded.checkpoint.format.manifest import Manifest, TensorInfo
from raysharded.checkpoint.format.paths import key_of
from raysharded.checkpoint.interop.huggingface.safetensors_file import FileParts, in_order, require_storable, share_out
from raysharded.checkpoint.interop.locations import Place, refuse_existing, undone_on_error, url_of
from raysharded.checkpoint.interop.names import EVERYTHING, MODEL_ONLY, NameMap, chosen, is_trainers
from raysharded.checkpoint.interop.results import Exported
from raysharded.checkpoint.interop.slabs import Progress, cut_tensors, read_slabs
from raysharded.checkpoint.reader import Checkpoint
from raysharded.checkpoint.storage import NoSuchKey
from raysharded.errors import CheckpointError

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
CONFIG_NAME = "config.json"
FILE_BYTES = 5 * 10**9
"""Maximum file size, 5 GB: the default of `save_pretrained`."""

OUTPUT_HEADS = ("lm_head.weight", "embed_out.weight", "cls.predictions.decoder.weight")
_INPUT_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
_DTYPE_FIELDS = frozenset({"dtype", "torch_dtype"})
_FLOATS = ("float64", "float32", "bfloat16", "float16")


def export_huggingface(
    checkpoint: Checkpoint,
    dest: Place,
    *,
    names: tuple[str, ...] = (),
    name_map: NameMap | None = None,
    dtype: str | None = None,
    config: bytes | None = None,
    max_file_bytes: int = FILE_BYTES,
    progress: Progress = lambda _: None,
) -> Exported:
    """Write the tensors that the map selects into the folder `dest`, through a few slabs of memory.

    `names`: patterns of raysharded names, to export only those. `name_map`: by default a training state's model, with
    `model.x` as `x`, and all tensors of any other checkpoint under their own names. `dtype`: target of floating point
    tensors ("bfloat16", ...), also written into the config. `config`: the bytes of a config.json to copy. If it ties
    the embeddings and they are equal, the output head is left out, as by `save_pretrained`. Numbered files that an
    interrupted export left without an index are overwritten.

    Raises CheckpointError if nothing is left to export, if the map names missing tensors, or for a name that no tensor
    of a safetensors file can have. Raises it too if `dest` already has such weights, an index or another config. Raises
    CorruptCheckpoint for damage in the source, StorageError if storage fails. On an error the written files are
    removed, if storage permits it.
    """
    manifest = checkpoint.manifest
    names_of = name_map or default_map(manifest)
    names_of.require(manifest.tensors)
    renamed = names_of.apply(chosen(manifest.tensors, names))
    _leave_out_tied(checkpoint, renamed, config)
    if not renamed:
        raise CheckpointError(
            f"the name map leaves none of the {len(manifest.tensors)} tensors (first: {list(manifest.tensors)[:3]}). "
            "Give one that fits them."
        )
    config = with_dtype(config, dtype) if config and dtype else config
    folder = Folder(place=dest, weights=WEIGHTS_NAME, config_name=CONFIG_NAME, config=config)
    return write_folder(checkpoint, folder, renamed, dtype=dtype, max_file_bytes=max_file_bytes, progress=progress)


def default_map(manifest: Manifest) -> NameMap:
    """Map of the model alone in a training state (a trainer's, or one with a part "model"), else of everything."""
    if manifest.tree is None:
        return MODEL_ONLY if is_trainers(manifest.tensors) else EVERYTHING
    parts = [entry[0] for entry in manifest.tree.get("dict", [])]
    return MODEL_ONLY if "model" in parts and "model" not in manifest.tensors else EVERYTHING


@dataclass(frozen=True, kw_only=True, slots=True)
class Folder:
    """The folder to write, the names of its files, and the bytes of its config, if one is given."""

    place: Place
    weights: str
    config_name: str
    config: bytes | None


def write_folder(
    checkpoint: Checkpoint,
    folder: Folder,
    renamed: Mapping[str, str],
    *,
    dtype: str | None,
    max_file_bytes: int | None,
    progress: Progress,
) -> Exported:
    """Write the tensors, under their new names, and the config.

    `renamed`: map from names in the checkpoint to new names. `max_file_bytes`: None for one file of any size.

    Raises as `export_huggingface`.
    """
    manifest = checkpoint.manifest
    require_storable(renamed.values())
    source = {new: old for old, new in renamed.items()}
    tensors = {new: _cast_info(manifest.tensors[old], dtype) for new, old in source.items()}
    size_bytes = sum(info.size_bytes for info in tensors.values())
    files = [in_order(some) for some in share_out(tensors, size_bytes if max_file_bytes is None else max_file_bytes)]
    written = _write(folder, files, _Data(checkpoint, source, tensors, progress))
    return Exported(files=tuple(written), num_tensors=len(tensors), size_bytes=size_bytes)


def _write(folder: Folder, files: list[dict[str, TensorInfo]], data: _Data) -> list[str]:
    dest, config = folder.place, folder.config
    storage, _ = dest
    names = [folder.weights]
    if len(files) > 1:
        names = [f"model-{number + 1:05d}-of-{len(files):05d}.safetensors" for number in range(len(files))]
    refuse_existing(dest, [folder.weights, INDEX_NAME])
    new_config = config is not None and not _has_config(folder, config)
    with undone_on_error(dest) as begun:
        if config is not None and new_config:
            storage.write(begun(folder.config_name), [config])
        for name, tensors in zip(names, files, strict=True):
            storage.write(begun(name), FileParts(tensors, data.of))
        written = [*names, *([folder.config_name] if config is not None else [])]
        if len(files) > 1:
            total = sum(info.size_bytes for tensors in files for info in tensors.values())
            placed = {tensor: name for name, tensors in zip(names, files, strict=True) for tensor in tensors}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
            storage.write(begun(INDEX_NAME), [json.dumps(index, indent=2).encode() + b"\n"])
            written.append(INDEX_NAME)
    return written


def _has_config(folder: Folder, config: bytes) -> bool:
    """Whether the folder already has this config. Raises CheckpointError if it has another one."""
    storage, prefix = folder.place
    try:
        if storage.read(key_of(prefix, folder.config_name)) == config:
            return True
    except NoSuchKey:
        return False
    raise CheckpointError(
        f"{url_of(folder.place)} has another {folder.config_name} already, and nothing is overwritten. Choose another "
        "folder, delete that one first, or give none, to keep it."
    )


@dataclass(frozen=True, slots=True)
class _Data:
    """Bytes of tensors under their new names, converted."""

    checkpoint: Checkpoint
    source: Mapping[str, str]
    """Map from new names to raysharded names."""
    tensors: Mapping[str, TensorInfo]
    progress: Progress

    def of(self, names: Sequence[str]) -> Iterator[Bytes]:
        back = {self.source[new]: new for new in names}
        for slab in read_slabs(self.checkpoint, cut_tensors(self.checkpoint, back)):
            self.progress(len(slab.data))
            yield cast(slab.data, slab.info.dtype, self.tensors[back[slab.name]].dtype)


def cast(data: Bytes, dtype: str, to: str) -> Bytes:
    """Elements of one dtype as another, rounded to the nearest."""
    if dtype == to:
        return data
    import torch

    from raysharded.checkpoint.state_dict.staging import bytes_of, torch_dtype

    return bytes_of(torch.from_numpy(data).view(torch_dtype(dtype)).to(torch_dtype(to)))


def _cast_info(info: TensorInfo, dtype: str | None) -> TensorInfo:
    if dtype is not None and dtype not in _FLOATS:
        raise CheckpointError(f"dtype={dtype!r} is not a floating point dtype; give one of {', '.join(_FLOATS)}.")
    return info if dtype is None or info.dtype not in _FLOATS else TensorInfo(dtype=dtype, shape=info.shape)


def _leave_out_tied(checkpoint: Checkpoint, renamed: dict[str, str], config: bytes | None) -> None:
    """Remove the output head from `renamed` if the config ties it to the embedding and both are equal."""
    if config is None or not is_tied(config):
        return
    back = {new: old for old, new in renamed.items()}
    heads = [new for new in back if new.endswith(OUTPUT_HEADS)]
    inputs = [new for new in back if new.endswith(_INPUT_EMBEDDINGS)]
    if len(heads) == len(inputs) == 1 and _are_equal(checkpoint, back[heads[0]], back[inputs[0]]):
        del renamed[back[heads[0]]]


def is_tied(config: bytes) -> bool:
    """Whether a config.json ties the embeddings. Raises CheckpointError if it is not a JSON object."""
    return parsed_config(config).get("tie_word_embeddings") is True


def with_dtype(config: bytes, dtype: str) -> bytes:
    """The config.json with this dtype of the weights, in its nested configs too. Raises as `is_tied`.

    transformers calls the field `dtype`, before version 4.56 `torch_dtype`. Existing fields are changed. If neither
    exists, `torch_dtype` is added, which all versions know.
    """
    found = parsed_config(config)
    if not _DTYPE_FIELDS & found.keys():
        found["torch_dtype"] = dtype
    return json.dumps(_replaced(found, dtype), indent=2).encode() + b"\n"


def _replaced(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Nested configs are `text_config` and the like; `quantization_config` does not describe a model."""
    changed: dict[str, Any] = dict.fromkeys(_DTYPE_FIELDS & config.keys(), dtype)
    for name, value in config.items():
        if name.endswith("_config") and name != "quantization_config" and isinstance(value, dict):
            changed[name] = _replaced(value, dtype)
    return config | changed


def parsed_config(config: bytes, name: str = CONFIG_NAME) -> dict[str, Any]:
    """The fields of a config. Raises CheckpointError if it is not a JSON object."""
    try:
        found = json.loads(config)
    except ValueError as error:
        raise CheckpointError(f"the {name} is not JSON: {error}.") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"the {name} is not a JSON object.")
    return found


def _are_equal(checkpoint: Checkpoint, a: str, b: str) -> bool:
    if checkpoint.manifest.tensors[a] != checkpoint.manifest.tensors[b]:
        return False
    left = read_slabs(checkpoint, cut_tensors(checkpoint, [a]))
    right = read_slabs(checkpoint, cut_tensors(checkpoint, [b]))
    return all(np.array_equal(x.data, y.data) for x, y in zip(left, right, strict=True))
