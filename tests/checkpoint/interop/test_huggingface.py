"""Hugging Face folders: those of `transformers` are imported, and `from_pretrained` loads the exported ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from raysharded.checkpoint.interop.huggingface.exporter import export_huggingface
from raysharded.checkpoint.interop.huggingface.importer import import_huggingface
from raysharded.checkpoint.interop.locations import place_of
from raysharded.checkpoint.interop.names import NameMap
from raysharded.checkpoint.reader import Checkpoint, open_checkpoint
from raysharded.errors import CheckpointError, CorruptCheckpoint, IncompleteCheckpoint
from tests.checkpoint.interop.ranks import bits


def _llama(tied: bool) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=101,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
        )
    )


def _gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=101, n_embd=32, n_layer=2, n_head=4, n_positions=16)
    )


def _imported(source: Path, dest: Path, **options: Any) -> Checkpoint:
    import_huggingface(place_of(str(source)), place_of(str(dest)), **options)
    return open_checkpoint(*place_of(str(dest)))


@pytest.mark.parametrize("kind", ["llama", "tied llama", "gpt2"])
def test_weights_survive_import_and_export_to_the_bit_for_transformers(tmp_path: Path, kind: str) -> None:
    net = _gpt2() if kind == "gpt2" else _llama("tied" in kind)
    net.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    checkpoint = _imported(tmp_path / "hf", tmp_path / "ours", step=7)
    assert checkpoint.step == 7
    assert all(name.startswith("model.") for name in checkpoint.tensors)

    config = (tmp_path / "hf" / "config.json").read_bytes()
    out = tmp_path / "out"
    written = export_huggingface(checkpoint, place_of(str(out)), config=config, max_file_bytes=20_000)
    assert "model.safetensors.index.json" in written.files

    found, notes = type(net).from_pretrained(out, output_loading_info=True)
    assert not notes["missing_keys"]
    assert not notes["unexpected_keys"]
    for name, value in net.state_dict().items():
        assert bits(found.state_dict()[name]) == bits(value), name


def test_a_tied_head_that_was_saved_twice_is_exported_once(tmp_path: Path) -> None:
    net = _llama(tied=True)
    net.save_pretrained(tmp_path / "hf")
    state = {f"model.{name}": value.clone() for name, value in net.state_dict().items()}
    assert "model.lm_head.weight" in state
    save_file(state, tmp_path / "all.safetensors")
    checkpoint = _imported(tmp_path / "all.safetensors", tmp_path / "ours", name_map=NameMap.of([["(.*)", r"\1"]]))

    export_huggingface(
        checkpoint, place_of(str(tmp_path / "out")), config=(tmp_path / "hf" / "config.json").read_bytes()
    )
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert "lm_head.weight" not in exported
    assert exported.keys() == load_file(tmp_path / "hf" / "model.safetensors").keys()
    found = type(net).from_pretrained(tmp_path / "out")
    assert bits(found.lm_head.weight) == bits(net.lm_head.weight)


def _some(tmp_path: Path, **tensors: torch.Tensor) -> Checkpoint:
    save_file({name.replace("__", "."): value for name, value in tensors.items()}, tmp_path / "some.safetensors")
    return _imported(tmp_path / "some.safetensors", tmp_path / "some", name_map=NameMap.of([["(.*)", r"\1"]]))


def test_every_dtype_and_shape_survives(tmp_path: Path) -> None:
    tensors = {
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
        "half": torch.randn(5, 3).half(),
        "brain": torch.randn(3, 5).bfloat16(),
        "eight": torch.randn(9).to(torch.float8_e5m2),
        "long": torch.arange(11),
    }
    checkpoint = _some(tmp_path, **tensors)
    export_huggingface(checkpoint, place_of(str(tmp_path / "out")))
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        assert (found[name].dtype, found[name].shape, bits(found[name])) == (value.dtype, value.shape, bits(value))


def test_only_floating_point_is_converted(tmp_path: Path) -> None:
    checkpoint = _some(tmp_path, w=torch.randn(6, 2), n=torch.arange(3))
    export_huggingface(checkpoint, place_of(str(tmp_path / "out")), dtype="bfloat16")
    found = load_file(tmp_path / "out" / "model.safetensors")
    before = load_file(tmp_path / "some.safetensors")
    assert bits(found["w"]) == bits(before["w"].bfloat16())
    assert bits(found["n"]) == bits(before["n"])


def test_of_a_training_state_the_model_alone_is_exported(tmp_path: Path) -> None:
    checkpoint = _some(
        tmp_path,
        model__w=torch.ones(2),
        buffer__b=torch.ones(3),
        constant__c=torch.ones(4),  # drawn by the model's constructor
        optim__w__exp_avg=torch.ones(2),
        number__w__step=torch.ones(()),
    )
    export_huggingface(checkpoint, place_of(str(tmp_path / "out")))
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"w", "b"}


def test_a_map_of_names_works_in_both_directions(tmp_path: Path) -> None:
    names = NameMap.of({"a": "x.a", "b": None, "c": "x.c"})
    checkpoint = _some(tmp_path, a=torch.ones(2), b=torch.ones(3), c=torch.zeros(4))
    export_huggingface(checkpoint, place_of(str(tmp_path / "out")), name_map=names)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"x.a", "x.c"}
    back = _imported(tmp_path / "out", tmp_path / "back", name_map=names.inverse())
    assert back.tensors.keys() == {"a", "c"}


def test_a_map_that_names_tensors_that_there_are_not_is_refused(tmp_path: Path) -> None:
    checkpoint = _some(tmp_path, a=torch.ones(2), b=torch.ones(3))
    names = NameMap.of({"a": "x.a", "c.*": "x", "d": None})
    with pytest.raises(CheckpointError, match=r"names 2 missing tensors: 'c\.\*', 'd'"):
        export_huggingface(checkpoint, place_of(str(tmp_path / "out")), name_map=names)
    with pytest.raises(CheckpointError, match="names 1 missing tensor: 'x'"):
        _imported(tmp_path / "some.safetensors", tmp_path / "back", name_map=NameMap.of({"a": "a", "x": "b"}))
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "back").exists()
    export_huggingface(
        checkpoint, place_of(str(tmp_path / "out")), names=("a",), name_map=NameMap.of({"b": "y", "a": "x"})
    )


def test_a_map_may_name_the_head_that_a_tied_model_has_not(tmp_path: Path) -> None:
    save_file({"embed_tokens.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    names = NameMap.of({"e": "embed_tokens.weight", "h": "lm_head.weight"}).inverse()
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight'"):
        _imported(tmp_path, tmp_path / "ours", name_map=names)
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    assert _imported(tmp_path, tmp_path / "ours", name_map=names).tensors.keys() == {"e"}


def test_a_pattern_of_the_shell_is_refused_as_a_rule() -> None:
    with pytest.raises(CheckpointError, match="regular expressions"):
        NameMap.of([["model.lm_head.*", "head.*"]])


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "float32", "n": 1}, {"dtype": "bfloat16", "n": 1}),
        ({"torch_dtype": "float32"}, {"torch_dtype": "bfloat16"}),
        ({"n": 1}, {"n": 1, "torch_dtype": "bfloat16"}),
        (
            {"dtype": "float32", "text_config": {"dtype": "float16"}, "quantization_config": {"dtype": "float16"}},
            {"dtype": "bfloat16", "text_config": {"dtype": "bfloat16"}, "quantization_config": {"dtype": "float16"}},
        ),
    ],
)
def test_a_converted_model_has_its_dtype_in_the_config(tmp_path: Path, config: Any, expected: Any) -> None:
    checkpoint = _some(tmp_path, a=torch.ones(2))
    out = tmp_path / "out"
    export_huggingface(checkpoint, place_of(str(out)), dtype="bfloat16", config=json.dumps(config).encode())
    assert json.loads((out / "config.json").read_text()) == expected


def test_transformers_loads_a_converted_model_as_what_it_is(tmp_path: Path) -> None:
    net = _llama(tied=False)
    net.save_pretrained(tmp_path / "hf")
    config = (tmp_path / "hf" / "config.json").read_bytes()
    checkpoint = _imported(tmp_path / "hf", tmp_path / "ours")
    export_huggingface(checkpoint, place_of(str(tmp_path / "out")), dtype="bfloat16", config=config)
    assert type(net).from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_rules_are_tried_in_order_and_on_whole_names() -> None:
    names = NameMap.of([[r"skip\..*", None], [r"layers\.(\d+)\.(.*)", r"h.\1.\2"], ["(.*)", r"rest.\1"]])
    assert [names(n) for n in ("skip.a", "layers.3.w", "x.layers.3.w")] == [None, "h.3.w", "rest.x.layers.3.w"]


@pytest.mark.parametrize("value", [1, {"a": 2}, [["a"]], [["(", "b"]], "x"])
def test_a_name_map_that_is_invalid_is_refused(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"name map"):
        NameMap.of(value)


def test_two_tensors_never_get_one_name(tmp_path: Path) -> None:
    checkpoint = _some(tmp_path, a=torch.ones(2), b=torch.ones(3))
    with pytest.raises(CheckpointError, match="'a' and 'b' would both be called 'x'"):
        export_huggingface(checkpoint, place_of(str(tmp_path / "out")), name_map=NameMap.of([[".*", "x"]]))


def test_weights_are_not_overwritten(tmp_path: Path) -> None:
    checkpoint = _some(tmp_path, a=torch.ones(2), b=torch.ones(2))
    export_huggingface(checkpoint, place_of(str(tmp_path / "out")))
    with pytest.raises(CheckpointError, match=r"has model\.safetensors already"):
        export_huggingface(checkpoint, place_of(str(tmp_path / "out")))
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "model.safetensors.index.json").write_text("mine")
    with pytest.raises(
        CheckpointError, match=r"has model\.safetensors\.index\.json already, and nothing is overwritten"
    ):
        export_huggingface(checkpoint, place_of(str(tmp_path / "index")), max_file_bytes=8)


def test_a_config_that_is_there_stays_and_another_is_refused(tmp_path: Path) -> None:
    checkpoint = _some(tmp_path, a=torch.ones(2))
    place = place_of(str(tmp_path / "out"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text('{"mine": 1}')
    with pytest.raises(CheckpointError, match=r"has another config\.json already, and nothing is overwritten"):
        export_huggingface(checkpoint, place, config=b"{}")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]
    for config in (b'{"mine": 1}', None):
        export_huggingface(checkpoint, place, config=config)
        assert (tmp_path / "out" / "config.json").read_text() == '{"mine": 1}'
        (tmp_path / "out" / "model.safetensors").unlink()


def test_an_export_that_was_stopped_removes_what_it_wrote_and_can_be_repeated(tmp_path: Path) -> None:
    checkpoint = _some(tmp_path, a=torch.ones(2), b=torch.ones(2))
    out = tmp_path / "out"
    first = out / "model-00001-of-00002.safetensors"
    there: list[bool] = []

    def stop(_: int) -> None:
        there.append(first.exists())
        if there[-1]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_huggingface(checkpoint, place_of(str(out)), config=b"{}", max_file_bytes=8, progress=stop)
    assert there[-1]
    assert not out.exists()

    out.mkdir()
    first.write_text("what one left that was killed")
    export_huggingface(checkpoint, place_of(str(out)), config=b"{}", max_file_bytes=8)
    assert load_file(first)["a"].tolist() == [1, 1]


def test_of_two_imports_that_race_for_a_folder_one_learns_that_it_lost(tmp_path: Path) -> None:
    for number in (1, 2):
        save_file({"a": torch.full((3,), float(number))}, tmp_path / f"{number}.safetensors")
    dest = place_of(str(tmp_path / "step-0000000005-abc"))

    def meanwhile(_: int) -> None:
        import_huggingface(place_of(str(tmp_path / "2.safetensors")), dest)

    with pytest.raises(CheckpointError, match="another writer committed"):
        import_huggingface(place_of(str(tmp_path / "1.safetensors")), dest, progress=meanwhile)
    assert open_checkpoint(*dest).read("model.a", (0,), (3,)).tobytes() == np.full(3, 2, np.float32).tobytes()


def test_damage_in_the_source_is_found_while_it_is_exported(tmp_path: Path) -> None:
    checkpoint = _some(tmp_path, a=torch.ones(500))
    (file,) = (tmp_path / "some").rglob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-9] ^= 4
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match="digest"):
        export_huggingface(checkpoint, place_of(str(tmp_path / "out")))
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_what_is_no_safetensors_file_is_refused_and_nothing_is_committed(tmp_path: Path) -> None:
    good = tmp_path / "good.safetensors"
    save_file({"a": torch.ones(50), "b": torch.zeros(3)}, good)
    data = good.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])

    def with_header(encoding: str = "utf-8", **changes: Any) -> bytes:
        text = json.dumps(header | changes).encode(encoding)
        return len(text).to_bytes(8, "little") + text + data[-212:]

    bad = {
        "empty": b"",
        "short": data[:5],
        "long header": (1 << 62).to_bytes(8, "little") + data[8:],
        "not JSON": (8).to_bytes(8, "little") + b"x" * 400,
        "cut off": data[:-1],
        "a gap": with_header(a={"dtype": "F32", "shape": [49], "data_offsets": [0, 196]}),
        "wrong size": with_header(a={"dtype": "F32", "shape": [51], "data_offsets": [0, 200]}),
        "negative": with_header(a={"dtype": "F32", "shape": [-50], "data_offsets": [0, 200]}),
        "unknown dtype": with_header(a={"dtype": "F4", "shape": [50], "data_offsets": [0, 200]}),
        "not a list": with_header(a={"dtype": "F32", "shape": "x", "data_offsets": [0, 200]}),
        "bytes after the last tensor": data + b"\0",
        "a tensor instead of metadata": with_header(
            __metadata__={"dtype": "F32", "shape": [50], "data_offsets": [0, 200]}
        ),
        "a list instead of metadata": with_header(__metadata__=[]),
        "metadata of numbers": with_header(__metadata__={"format": 1}),
        "another encoding": with_header(encoding="utf-16"),
    }
    for number, (what, content) in enumerate(bad.items()):
        file = tmp_path / f"bad{number}.safetensors"
        file.write_bytes(content)
        with pytest.raises(SafetensorError):
            load_file(file)
        with pytest.raises(CheckpointError, match=file.name):
            _imported(file, tmp_path / f"ours{number}")
        assert not (tmp_path / f"ours{number}" / "manifest.json").exists(), what


@pytest.mark.parametrize("wrong", ["__metadata__", "half of a pair: \ud800"])
def test_a_name_that_safetensors_cannot_hold_is_refused_before_anything_is_written(tmp_path: Path, wrong: str) -> None:
    checkpoint = _some(tmp_path, a=torch.ones(2), b=torch.ones(2))
    with pytest.raises(CheckpointError, match=re.escape(repr(wrong))):
        export_huggingface(
            checkpoint, place_of(str(tmp_path / "out")), config=b"{}", name_map=NameMap.of({"a": "a", "b": wrong})
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("there", "missing"),
    [
        (["model-00001-of-00002"], "model-00002-of-00002"),
        (["model-00002-of-00002"], "model-00001-of-00002"),
        (["model-00001-of-00003", "model-00003-of-00003"], "model-00002-of-00003"),
        (["diffusion-1-of-2"], "diffusion-2-of-2"),
        (["diffusion-0-of-2"], "diffusion-1-of-2"),
    ],
)
def test_a_missing_file_of_a_folder_without_an_index_is_named(tmp_path: Path, there: list[str], missing: str) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    for name in there:
        save_file({name: torch.ones(2)}, folder / f"{name}.safetensors")
    with pytest.raises(IncompleteCheckpoint, match=f"lacks {missing}.safetensors"):
        _imported(folder, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("name", ["model-00001-of-00001", "model-00000-of-00001", "pytorch_model", "part-1"])
def test_a_folder_without_an_index_and_with_one_whole_file_is_imported(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file({"a": torch.ones(2)}, folder / f"{name}.safetensors")
    assert _imported(folder, tmp_path / "ours").tensors.keys() == {"model.a"}


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "a\\b", 3])
def test_an_index_cannot_name_files_outside_its_folder(tmp_path: Path, file: Any) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(CorruptCheckpoint, match="weight_map"):
        _imported(folder, tmp_path / "ours")


def test_a_missing_file_of_the_index_is_named(tmp_path: Path) -> None:
    net = _llama(tied=False)
    net.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    gone = sorted((tmp_path / "hf").glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(IncompleteCheckpoint, match=gone.name):
        _imported(tmp_path / "hf", tmp_path / "ours")


def test_big_tensors_pass_in_slabs(tmp_path: Path) -> None:
    value = torch.from_numpy(np.random.default_rng(0).integers(0, 99, (3, 700, 1000)))  # 16.8 MB: more than one slab
    checkpoint = _some(tmp_path, big=value)
    export_huggingface(checkpoint, place_of(str(tmp_path / "out")))
    assert bits(load_file(tmp_path / "out" / "model.safetensors")["big"]) == bits(value)
