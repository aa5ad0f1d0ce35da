"""Adding a family is one row and a name map: a made-up one, against formulas by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from lean_trl.data.batch import build_batch
from lean_trl.model import load_model, new_model, save_model
from lean_trl.model.families import FAMILIES, Experts, Family
from lean_trl.model.kinds import periodic
from lean_trl.model.safetensors_io import write_json
from lean_trl.types import Example

# Its layers: norms on both sides with its own names and weights stored minus 1, queries and keys
# normed over all heads, rotary pairs side by side on half of each head, every second layer with a
# window, every layer with two of three experts. Its files: other names, experts one by one.
ROW = Family(
    "HeronForCausalLM",
    defaults={"sliding_window_pattern": 2, "sliding_window": 3, "partial_rotary_factor": 0.5},
    norms=("norm_in", "norm_out", "norm_mlp_in", "norm_mlp_out"),
    norm_offset=1.0,
    qk_norm="all",
    rope_pairs="interleaved",
    kinds=periodic,
    experts=Experts(),
    names={
        "model.embed_tokens.weight": ("heron.words.weight",),
        "model.norm.weight": ("heron.norm.weight",),
        "model.layers.{i}.mlp.experts.gate_up_proj": (
            "model.layers.{i}.bird.{e}.gate",
            "model.layers.{i}.bird.{e}.up",
        ),
        "model.layers.{i}.mlp.experts.down_proj": ("model.layers.{i}.bird.{e}.down",),
    },
)
CONFIG = {
    "model_type": "heron",
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "initializer_range": 0.4,
}


@pytest.fixture
def heron(monkeypatch):
    monkeypatch.setitem(FAMILIES, "heron", ROW)


def norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + weight)


def rotate(x):
    """x [T, N, 8]: pairs (0, 1) and (2, 3) turn by p and p / 100; the rest stays."""
    out = x.clone()
    for position in range(x.shape[0]):
        for pair, speed in ((0, 1.0), (1, 1 / 100)):
            cos, sin = math.cos(position * speed), math.sin(position * speed)
            a, b = x[position, :, 2 * pair], x[position, :, 2 * pair + 1]
            out[position, :, 2 * pair] = a * cos - b * sin
            out[position, :, 2 * pair + 1] = a * sin + b * cos
    return out


def by_hand(w, ids):
    """Logits [T, V] of one sequence from the tensors of the files, one token at a time."""
    x = w["heron.words.weight"][ids]
    count = len(ids)
    for i in range(2):
        layer = {k.removeprefix(f"model.layers.{i}."): v for k, v in w.items() if f"rs.{i}." in k}
        h = norm(x, layer["norm_in.weight"])
        q = norm(h @ layer["self_attn.q_proj.weight"].t(), layer["self_attn.q_norm.weight"])
        k = norm(h @ layer["self_attn.k_proj.weight"].t(), layer["self_attn.k_norm.weight"])
        q, k = rotate(q.view(count, 2, 8)), rotate(k.view(count, 1, 8))
        v = (h @ layer["self_attn.v_proj.weight"].t()).view(count, 1, 8)
        heads = torch.zeros(count, 2, 8)
        for t in range(count):
            first = max(0, t - 2) if i == 0 else 0  # layer 0 has the window of 3
            for n in range(2):
                scores = (k[first : t + 1, 0] @ q[t, n]) / math.sqrt(8)
                heads[t, n] = scores.softmax(0) @ v[first : t + 1, 0]
        attended = heads.view(count, 16) @ layer["self_attn.o_proj.weight"].t()
        x = x + norm(attended, layer["norm_out.weight"])
        h = norm(x, layer["norm_mlp_in.weight"])
        probs = (h @ layer["mlp.gate.weight"].t()).softmax(-1)
        mixed = torch.zeros_like(h)
        for t in range(count):
            best, chosen = probs[t].topk(2)
            for weight, e in zip(best / best.sum(), chosen.tolist(), strict=True):
                gate, up = layer[f"bird.{e}.gate"] @ h[t], layer[f"bird.{e}.up"] @ h[t]
                mixed[t] += weight * (layer[f"bird.{e}.down"] @ (F.silu(gate) * up))
        x = x + norm(mixed, layer["norm_mlp_out.weight"])
    return norm(x, w["heron.norm.weight"]) @ w["lm_head.weight"].t()


def test_a_made_up_family(heron, tmp_path):
    save_model(new_model(CONFIG, seed=1), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for name, tensor in weights.items():  # norm weights away from 0
        if tensor.dim() == 1:
            tensor.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(len(name)))
    save_file(weights, tmp_path / "model.safetensors")
    assert weights["model.layers.1.bird.2.up"].shape == (12, 16)
    assert "heron.words.weight" in weights and "model.embed_tokens.weight" not in weights

    model = load_model(tmp_path)
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 23, (n,), generator=generator) for n in (9, 6)]
    with torch.no_grad():
        batch = build_batch([Example(each.numpy()) for each in ids])
        logits = model.logits(model.hidden(batch))
        expected = torch.cat([by_hand(weights, each) for each in ids])
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)

    save_model(model, tmp_path / "out", max_shard_bytes=2_000)
    again = load_model(tmp_path / "out")
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_a_family_without_a_row_is_an_error_that_lists_those_with_one(tmp_path):
    write_json(tmp_path / "config.json", CONFIG)
    with pytest.raises(ValueError, match=r"model_type 'heron'.*known are llama, .*deepseek_v3\. "):
        load_model(tmp_path)
