"""Every row of the table against transformers, on tiny random checkpoints."""

import filecmp
import json

import pytest
import torch
from safetensors.torch import load_file

from lean_trl.data.batch import build_batch
from lean_trl.model import FAMILIES, load_model, save_model
from lean_trl.model.config import read_config
from lean_trl.model.safetensors_io import read_folder
from lean_trl.types import Example

from .tiny import CONFIGS, TIED, make

transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()

LENGTHS = (48, 37)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """family -> (folder, transformers' model), made once."""
    made = {}

    def get(family):
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = folder, make(family, folder)
        return made[family]

    return get


def sequences(vocab_size=96):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocab_size, (n,), generator=generator) for n in LENGTHS]


def logits(model, ids):
    with torch.no_grad():
        return model.logits(model.hidden(build_batch([Example(each.numpy()) for each in ids])))


def test_every_family_is_tested():
    assert set(CONFIGS) == set(FAMILIES)


@pytest.mark.parametrize("family", CONFIGS)
def test_logits(family, checkpoint):
    folder, peer = checkpoint(family)
    model = load_model(folder)
    ids = sequences()
    with torch.no_grad():
        expected = [peer(each[None]).logits[0] for each in ids]
    assert expected[0].abs().max() > 0.5  # logits that say something
    torch.testing.assert_close(logits(model, ids), torch.cat(expected), atol=1e-4, rtol=0)
    torch.testing.assert_close(logits(model, ids[:1]), expected[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", CONFIGS)
def test_log_probs_and_every_gradient(family, checkpoint):
    folder, peer = checkpoint(family)
    model = load_model(folder)
    ids = sequences()
    scores = model(build_batch([Example(each.numpy()) for each in ids]), ("entropy",))
    peer.zero_grad()
    expected = torch.cat(
        [
            peer(each[None]).logits[0, :-1].log_softmax(-1).gather(1, each[1:, None]).squeeze(1)
            for each in ids
        ]
    )
    torch.testing.assert_close(scores.logprobs, expected, atol=1e-4, rtol=0)
    scores.logprobs.sum().backward()
    expected.sum().backward()
    grads = {name: p.grad for name, p in peer.named_parameters()}
    assert {name for name, _ in model.named_parameters()} == set(grads)
    for name, parameter in model.named_parameters():
        scale = grads[name].abs().max().item()
        assert scale > 0, name
        error = (parameter.grad - grads[name]).abs().max().item()
        assert error < 2e-4 * scale, f"{name}: {error} of {scale}"


@pytest.mark.parametrize("family", CONFIGS)
def test_export_gives_the_same_bytes(family, checkpoint, tmp_path):
    folder, peer = checkpoint(family)
    save_model(load_model(folder), tmp_path)
    for name in ("model.safetensors", "config.json"):
        assert filecmp.cmp(folder / name, tmp_path / name, shallow=False), name
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, tensor in peer.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])  # plain, tied, stacked
def test_sharded_in_and_out(family, checkpoint, tmp_path):
    folder, peer = checkpoint(family)
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    peer.save_pretrained(theirs, max_shard_size="100KB")
    assert len(list(theirs.glob("*.safetensors"))) > 2
    save_model(load_model(theirs), ours, max_shard_bytes=100_000)
    assert len(list(ours.glob("*.safetensors"))) > 2
    expected = load_file(folder / "model.safetensors")
    shards = [load_file(file) for file in ours.glob("*.safetensors")]
    written = {name: tensor for shard in shards for name, tensor in shard.items()}
    assert set(written) == set(expected)
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    index = json.loads((ours / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in expected.values())
    again = transformers.AutoModelForCausalLM.from_pretrained(ours)
    for name, tensor in peer.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    # Saving whole where shards lay leaves no shard behind to be read in its place.
    save_model(load_model(ours), ours)
    assert set(read_folder(ours)) == set(expected)
    assert sorted(p.name for p in ours.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_bfloat16_files(family, checkpoint, tmp_path):
    """Stored in bf16: the same bytes in and out in bf16, and float32 is exact on the way."""
    _, peer = checkpoint(family)
    peer.to(torch.bfloat16).save_pretrained(tmp_path / "in")
    peer.to(torch.float32)
    save_model(load_model(tmp_path / "in", dtype="bfloat16"), tmp_path / "out")
    for name in ("model.safetensors", "config.json"):
        assert filecmp.cmp(tmp_path / "in" / name, tmp_path / "out" / name, shallow=False), name
    model = load_model(tmp_path / "in")
    save_model(model, tmp_path / "wide")
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["dtype"] == "float32"
    stored, wide = (load_file(tmp_path / d / "model.safetensors") for d in ("in", "wide"))
    assert all(torch.equal(stored[name].float(), wide[name]) for name in stored)


def old_spelling(config):
    """A config.json as transformers 4 wrote it."""
    old = dict(config)
    rope = old.pop("rope_parameters")
    old["torch_dtype"] = old.pop("dtype")
    if "full_attention" in rope:
        full, local = rope["full_attention"], rope["sliding_attention"]
        old |= {"rope_local_base_freq": local["rope_theta"], "rope_theta": full["rope_theta"]}
        old["rope_scaling"] = {"type": full["rope_type"], "factor": full["factor"]}
        return old
    rope = dict(rope)
    old["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        old["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type")
    old["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    return old


@pytest.mark.parametrize("family", CONFIGS)
def test_both_spellings_of_config_mean_the_same(family, checkpoint):
    folder, _ = checkpoint(family)
    config = json.loads((folder / "config.json").read_text())
    new, old = read_config(config), read_config(old_spelling(config))
    differing = {
        name
        for name in new.__dataclass_fields__
        if name not in ("raw", "ropes") and getattr(new, name) != getattr(old, name)
    }
    assert not differing
    for kind, rope in new.ropes.items():
        assert torch.equal(rope.table(), old.ropes[kind].table())


@pytest.mark.parametrize("family", CONFIGS)
def test_defaults_are_those_of_transformers(family, tmp_path):
    """What a config.json leaves out means the same to both: only the sizes are given."""
    sizes = {
        key: value
        for key, value in CONFIGS[family].items()
        if key in ("num_hidden_layers", "num_local_experts", "n_routed_experts", "num_experts")
    }
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4}
    peer = transformers.AutoConfig.for_model(
        family, vocab_size=96, hidden_size=64, intermediate_size=96, **sizes
    )
    peer.save_pretrained(tmp_path)
    full = json.loads((tmp_path / "config.json").read_text())
    silent = {
        key: full[key]
        for key in ("model_type", "vocab_size", "hidden_size", "intermediate_size")
        + ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    }
    counts = (*sizes, "num_local_experts", "n_routed_experts")
    silent |= {key: full[key] for key in counts if key in full}
    given, assumed = read_config(full), read_config(silent)
    differing = {
        name: (getattr(given, name), getattr(assumed, name))
        for name in given.__dataclass_fields__
        if name not in ("raw", "ropes") and getattr(given, name) != getattr(assumed, name)
    }
    if given.latent is not None:
        differing.pop("head_dim", None)  # means nothing there
    assert not differing
    for kind, rope in given.ropes.items():
        torch.testing.assert_close(rope.table(), assumed.ropes[kind].table(), rtol=0, atol=0)
    assert assumed.tied == (family in TIED - {"qwen3"})


def test_latent_attention_without_compressed_queries(tmp_path):
    peer = make("deepseek_v3", tmp_path, q_lora_rank=None, attention_bias=True)
    ids = sequences()
    with torch.no_grad():
        expected = torch.cat([peer(each[None]).logits[0] for each in ids])
    torch.testing.assert_close(logits(load_model(tmp_path), ids), expected, atol=1e-4, rtol=0)


def test_long_and_short_sequences_in_one_batch(tmp_path):
    """48 tokens take longrope's long factors and 37 its short ones, side by side too."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.1 * i for i in range(6)],
        "long_factor": [2.0 + 0.7 * i for i in range(6)],
        "partial_rotary_factor": 0.75,
    }
    peer = make("phi3", tmp_path, rope_parameters=rope, original_max_position_embeddings=40)
    ids = sequences()
    with torch.no_grad():
        expected = torch.cat([peer(each[None]).logits[0] for each in ids])
    torch.testing.assert_close(logits(load_model(tmp_path), ids), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "llama3rope_tied", "qwen3_moe"])
def test_recorded_models(name, root):
    folder = root / "tests" / "golden" / "models" / name
    peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = sequences(512)
    with torch.no_grad():
        expected = torch.cat([peer(each[None]).logits[0] for each in ids])
    torch.testing.assert_close(logits(load_model(folder), ids), expected, atol=1e-4, rtol=0)
