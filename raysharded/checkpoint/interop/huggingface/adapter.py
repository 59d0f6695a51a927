"""Export of an adapter, such as LoRA's, in the format of Hugging Face's PEFT: for `PeftModel.from_pretrained`.

adapter_model.safetensors: the adapter's tensors, without the adapter's name in theirs
adapter_config.json, if one is given
"""

from __future__ import annotations

import re

from raysharded.checkpoint.format.manifest import Manifest
from raysharded.checkpoint.interop.huggingface.exporter import Folder, default_map, parsed_config, write_folder
from raysharded.checkpoint.interop.locations import Place
from raysharded.checkpoint.interop.names import MODEL_ONLY, NameMap, chosen
from raysharded.checkpoint.interop.results import Exported
from raysharded.checkpoint.interop.slabs import Progress
from raysharded.checkpoint.reader import Checkpoint
from raysharded.errors import CheckpointError

ADAPTER_WEIGHTS_NAME = "adapter_model.safetensors"
ADAPTER_CONFIG_NAME = "adapter_config.json"


def export_peft(
    checkpoint: Checkpoint,
    dest: Place,
    *,
    adapter: str = "default",
    names: tuple[str, ...] = (),
    name_map: NameMap | None = None,
    dtype: str | None = None,
    config: bytes | None = None,
    progress: Progress = lambda _: None,
) -> Exported:
    """Write the adapter of a model that `get_peft_model` made into the folder `dest`, without the base model.

    `adapter`: its name in the model. `names`: patterns of raysharded names, to export only those. `name_map`: by
    default of all tensors of the adapter, and of `modules_to_save`. `dtype`: target of floating point tensors.
    `config`: the bytes of an adapter_config.json to copy, as `LoraConfig.save_pretrained` writes it.

    Raises CheckpointError if the checkpoint has no such adapter, or if the config trains biases of the base model,
    which need a map. Raises it too if `dest` already has such weights or another config. Raises CorruptCheckpoint for
    damage in the source, StorageError if storage fails. On an error the written files are removed, if storage permits
    it.
    """
    manifest = checkpoint.manifest
    if config is not None and name_map is None:
        _refuse_biases(config)
    names_of = name_map or adapter_map(manifest, adapter)
    names_of.require(manifest.tensors)
    renamed = names_of.apply(chosen(manifest.tensors, names))
    if not renamed:
        raise CheckpointError(
            f"none of the {len(manifest.tensors)} tensors (first: {list(manifest.tensors)[:3]}) is chosen as one of "
            f"the adapter {adapter!r}. Export a model that `get_peft_model` made, or give a name map."
        )
    folder = Folder(place=dest, weights=ADAPTER_WEIGHTS_NAME, config_name=ADAPTER_CONFIG_NAME, config=config)
    return write_folder(checkpoint, folder, renamed, dtype=dtype, max_file_bytes=None, progress=progress)


def adapter_map(manifest: Manifest, adapter: str) -> NameMap:
    """Map of an adapter's tensors to the names that PEFT saves: as `get_peft_model_state_dict`, by names alone.

    PEFT's names in a model begin with `base_model.`, and have the adapter's name after that of a module or dict of
    PEFT's. All of these have an underscore in their names, as `lora_A`.
    """
    begin = r"(?:model|buffer)\." if default_map(manifest) is MODEL_ONLY else ""
    model, name = rf"{begin}(?:.*?\.)??(base_model\.", re.escape(adapter)
    return NameMap.of(
        [
            [rf"{model}.*\.lora_magnitude_vector)\.{name}\.weight", r"\1"],  # PEFT keeps the name of an older version
            [rf"{model}.*)\.modules_to_save\.{name}(\..+)", r"\1\2"],
            [rf"{model}.*\.\w*_\w*)\.{name}(\.\w+)?", r"\1\2"],
        ]
    )


def _refuse_biases(config: bytes) -> None:
    """Raise CheckpointError for an adapter_config.json with which biases of the base model are trained."""
    bias = parsed_config(config, ADAPTER_CONFIG_NAME).get("bias", "none")
    if bias != "none":
        raise CheckpointError(
            f"the {ADAPTER_CONFIG_NAME} has bias={bias!r}, but biases of the base model have no adapter's name. Give a "
            "name map that has them too."
        )
