"""Files in and out: what is kept, and one clear error for every way in which they can be wrong."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from lean_trl.model import load_model, new_model, save_model
from lean_trl.model.safetensors_io import read_header, write_file

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def folder(tmp_path):
    save_model(new_model(TINY, seed=3), tmp_path)
    return tmp_path


def edit_config(folder, **changes):
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value != "-"}))


def edit_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


# -- what is kept --------------------------------------------------------------------------


def test_config_is_written_back_as_it_was_but_for_the_dtype(folder, tmp_path):
    edit_config(folder, torch_dtype="bfloat16", my_own_key={"a": [1, None]}, attention_dropout=0.1)
    edit_config(folder, dtype="-")
    before = json.loads((folder / "config.json").read_text())
    model = load_model(folder)
    assert model.config.attention_dropout == 0.1
    save_model(model, tmp_path / "out")
    after = json.loads((tmp_path / "out" / "config.json").read_text())
    assert after == before | {"torch_dtype": "float32"}
    assert list(after) == list(before)


@pytest.mark.parametrize(
    ("family", "key"),
    [("phi3", "resid_pdrop"), ("phi3", "embd_pdrop"), ("mixtral", "router_jitter_noise")],
)
def test_other_noise_counts_as_dropout(family, key):
    raw = TINY | {"model_type": family, key: 0.2, "attention_dropout": 0.1}
    assert new_model(raw).config.attention_dropout == 0.2


def test_seeds(tmp_path):
    weights = [new_model(TINY, seed=seed).state_dict() for seed in (1, 1, 2)]
    name = "model.layers.0.self_attn.q_proj.weight"
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert not torch.equal(weights[0][name], weights[2][name])
    assert 0.015 < weights[0]["model.embed_tokens.weight"].std() < 0.025  # initializer_range 0.02
    assert torch.equal(weights[0]["model.norm.weight"], torch.ones(16))


def test_written_bytes_are_those_of_safetensors(tmp_path):
    """Mixed dtypes, an empty tensor, a scalar, a view, an odd name."""
    tensors = {
        "b": torch.randn(3, 5),
        "a.half": torch.randn(7).half(),
        "a.bf16": torch.randn(2, 2).bfloat16(),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(2.0, dtype=torch.float64),
        "view": torch.arange(12).view(3, 4)[1:].contiguous(),
        "bytes \u00e9": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "flag": torch.tensor([True, False]),
    }
    save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    write_file(tmp_path / "ours", tensors)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    stored = read_header(tmp_path / "ours")
    assert all(torch.equal(stored[name].load(), tensors[name]) for name in tensors)
    transposed = torch.randn(4, 3).t()  # not contiguous: written by its values
    write_file(tmp_path / "t", {"t": transposed})
    assert torch.equal(load_file(tmp_path / "t")["t"], transposed)


def test_a_tied_head_in_the_file_is_taken_when_it_is_the_embedding(folder):
    def tie(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit_weights(folder, tie)
    edit_config(folder, tie_word_embeddings=True)
    model = load_model(folder)
    assert model.lm_head is None
    save_model(model, folder)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")


def test_tensors_that_old_files_carry_are_passed_over(folder):
    def add(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    edit_weights(folder, add)
    load_model(folder)


def test_links_to_a_store_are_followed(folder, tmp_path):
    """The hub's cache keeps files elsewhere and links to them."""
    linked = tmp_path / "linked"
    linked.mkdir()
    for name in ("config.json", "model.safetensors"):
        (linked / name).symlink_to(folder / name)
    load_model(linked)


PEAK = """
import resource, sys
from lean_trl.model import load_model
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = peak()
model = load_model(sys.argv[1], dtype=sys.argv[2])
print(peak() - before, sum(p.nbytes for p in model.parameters()) / 2**20)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_holds_no_second_copy(dtype, tmp_path, root):
    big = TINY | {"vocab_size": 1 << 15, "hidden_size": 512, "intermediate_size": 2048}
    save_model(new_model(big, dtype="bfloat16"), tmp_path)
    command = [sys.executable, "-c", PEAK, str(tmp_path), dtype]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=root, check=True).stdout
    taken, model = map(float, shown.split())
    assert model > 70
    assert taken < model + 32  # the largest tensor alone is 32 MiB in bf16: no copy of that


# -- what is refused -------------------------------------------------------------------------


def missing(tensors):
    del tensors[DOWN], tensors["model.norm.weight"]


def extra(tensors):
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(16)


def wrong_shape(tensors):
    tensors[DOWN] = tensors[DOWN].t().contiguous()


def wrong_vocab(tensors):
    tensors["model.embed_tokens.weight"] = torch.zeros(33, 16)


def integers(tensors):
    tensors[DOWN] = torch.zeros(16, 24, dtype=torch.int8)


def no_head(tensors):
    del tensors["lm_head.weight"]


def nan(tensors):
    tensors[DOWN][3, 5] = torch.nan


def infinity(tensors):
    tensors["model.norm.weight"][0] = -torch.inf


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (missing, rf"lacks {DOWN}, model.norm.weight of this LlamaForCausalLM"),
        (extra, r"has model.layers.0.self_attn.q_proj.bias, which LlamaForCausalLM does not"),
        (wrong_shape, rf"{DOWN} is \[24, 16\], but config.json makes it \[16, 24\]"),
        (wrong_vocab, r"embed_tokens.weight is \[33, 16\], but config.json makes it \[32, 16\]"),
        (integers, rf"{DOWN} is torch.int8: quantised checkpoints are not supported"),
        (no_head, "has no lm_head.weight, .* set it to true if the head is the embedding"),
        (nan, rf"{DOWN} has values that are not finite"),
        (infinity, "model.norm.weight has values that are not finite"),
    ],
)
def test_broken_weights(change, message, folder):
    edit_weights(folder, change)
    with pytest.raises(ValueError, match=message):
        load_model(folder)


def test_tied_flag_that_the_files_contradict(folder):
    edit_config(folder, tie_word_embeddings=True)
    with pytest.raises(ValueError, match="lm_head.weight differs from model.embed_tokens.weight"):
        load_model(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt5"}, "'gpt5' .*not supported; known are llama, mistral, qwen2"),
        ({"model_type": "-"}, "model_type None"),
        ({"hidden_size": "-"}, "lacks hidden_size"),
        ({"num_hidden_layers": 3}, r"lacks model.layers.2\."),
        ({"num_hidden_layers": 1}, r"has model.layers.1\..* and 6 more, which"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, expected a whole number"),
        ({"num_hidden_layers": 9_999}, "9999 layers for 21 tensors"),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000, expected"),
        ({"vocab_size": 16_000_000}, r"makes it \[16000000, 16\]"),
        ({"hidden_size": 4_000_000}, r"makes it \[32, 4000000\]"),
        ({"intermediate_size": 4_000_000}, r"makes it \[4000000, 16\]"),
        ({"head_dim": -4}, "head_dim is -4"),
        ({"num_attention_heads": 2.5}, "num_attention_heads is 2.5"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"num_key_value_heads": 3}, "2 is not a multiple of num_key_value_heads 3"),
        ({"rope_theta": None}, "rope type 'default' needs rope_theta"),
        (
            {"tie_word_embeddings": "false"},
            "tie_word_embeddings is 'false', expected true or false",
        ),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5', expected a number >= 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, expected a number >= 0"),
        ({"rope_theta": [1]}, r"rope_theta is \[1\], expected a number"),
        ({"rope_scaling": 2}, "rope_scaling is 2, expected a mapping"),
        ({"layer_types": 2}, "layer_types is 2, expected a list"),
        ({"model_type": []}, r"model_type \[\]"),
        ({"hidden_act": "mish"}, "hidden_act 'mish' is not supported; known are silu"),
        ({"quantization_config": {"quant_method": "awq"}}, "is quantised \\(awq\\)"),
    ],
)
def test_broken_config(changes, message, folder):
    edit_config(folder, **changes)
    with pytest.raises(ValueError, match=message):
        load_model(folder)


def test_unknown_kinds_of_layers(folder):
    edit_config(folder, model_type="qwen3", layer_types=["chunked_attention", "full_attention"])
    with pytest.raises(ValueError, match="layer_types has 'chunked_attention'; known are full_att"):
        load_model(folder)


def test_a_save_that_fails_leaves_the_old_model(folder, monkeypatch):
    before = load_model(folder).state_dict()
    other = new_model(TINY, seed=9)

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    for size in (1 << 30, 2_000):
        with pytest.raises(OSError, match="disk full"):
            save_model(other, folder, max_shard_bytes=size)
        after = load_model(folder).state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_save_takes_away_the_old_shards_and_nothing_else(folder):
    mine = [folder / name for name in ("model_mine.safetensors", "model-old.safetensors")]
    for file in mine:
        file.write_bytes(b"mine")
    for size, shards in ((2_000, True), (1 << 30, False)):
        save_model(load_model(folder), folder, max_shard_bytes=size)
        assert (folder / "model.safetensors.index.json").exists() is shards
        assert (folder / "model.safetensors").exists() is not shards
        assert any(folder.glob("model-0*.safetensors")) is shards
    assert all(file.read_bytes() == b"mine" for file in mine)


def cut_in_data(file):
    file.write_bytes(file.read_bytes()[:-10])


def cut_in_header(file):
    file.write_bytes(file.read_bytes()[:100])


def empty(file):
    file.write_bytes(b"")


def huge_header(file):
    file.write_bytes((1 << 62).to_bytes(8, "little") + file.read_bytes()[8:])


def no_json(file):
    file.write_bytes((4).to_bytes(8, "little") + b"nope" + b"x" * 100)


def no_object(file):
    file.write_bytes((2).to_bytes(8, "little") + b"[]")


def with_entry(entry):
    def change(file):
        text = json.dumps({"model.norm.weight": entry}).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 64)

    return change


GOOD = {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut_in_data, "ends at .*download it again"),
        (cut_in_header, "not a safetensors file, or was cut short"),
        (empty, "not a safetensors file, or was cut short"),
        (huge_header, "not a safetensors file, or was cut short"),
        (no_json, "broken header"),
        (no_object, "broken header"),
        (with_entry(GOOD | {"shape": [17]}), r"64 bytes, which does not fit F32 \[17\]"),
        (with_entry(GOOD | {"shape": [-16]}), "entry for model.norm.weight is broken"),
        (with_entry(GOOD | {"shape": [1 << 40, 1 << 40]}), "64 bytes, which does not fit"),
        (with_entry(GOOD | {"data_offsets": [64, 128]}), "ends at .*download it again"),
        (with_entry(GOOD | {"data_offsets": [-64, 0]}), "entry for model.norm.weight is broken"),
        (with_entry(GOOD | {"data_offsets": [0]}), "entry for model.norm.weight is broken"),
        (with_entry(GOOD | {"dtype": "F3"}), "dtype F3; known are BOOL"),
        (with_entry(GOOD | {"dtype": ["F32"]}), "entry for model.norm.weight is broken"),
        (with_entry([]), "entry for model.norm.weight is broken"),
    ],
)
def test_broken_safetensors(change, message, folder):
    change(folder / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_model(folder)


def shard(folder):
    save_model(load_model(folder), folder, max_shard_bytes=2_000)
    index = folder / "model.safetensors.index.json"
    return index, json.loads(index.read_text())


@pytest.mark.parametrize("target", ["../secret.safetensors", "/etc/passwd", "..", "", 7, "a\\b"])
def test_an_index_must_not_point_outside_the_folder(target, folder):
    index, content = shard(folder)
    content["weight_map"][DOWN] = target
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="expected the name of a file beside it"):
        load_model(folder)


def test_broken_shards(folder):
    index, content = shard(folder)
    file = folder / content["weight_map"][DOWN]

    def check(message, **changes):
        index.write_text(json.dumps(content | changes))
        with pytest.raises(ValueError, match=message):
            load_model(folder)

    check("has no weight_map", weight_map=None)
    others = {name: f for name, f in content["weight_map"].items() if name != DOWN}
    check(f"holds {DOWN}, which model.safetensors.index.json does not list", weight_map=others)
    check("says that ghost is in", weight_map=content["weight_map"] | {"ghost": file.name})
    file.unlink()
    check(f"lists {file.name}, which is not in")
    index.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        load_model(folder)


def test_pickles_are_never_loaded(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pytorch_model.bin is a pickle, which is never loaded"):
        load_model(folder)


def test_a_folder_without_config(folder):
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config.json does not exist"):
        load_model(folder)


def test_an_unknown_dtype(folder):
    with pytest.raises(ValueError, match="'int4' is not one of float32, bfloat16"):
        load_model(folder, dtype="int4")


@pytest.mark.parametrize("change", [missing, extra, wrong_shape, no_head])
def test_errors_come_before_memory_is_taken(change, folder, monkeypatch):
    edit_weights(folder, change)

    def taken(*args, **kwargs):
        raise AssertionError("memory was taken")

    monkeypatch.setattr("lean_trl.model.loader.fill_model", taken)
    with pytest.raises(ValueError):
        load_model(folder)
