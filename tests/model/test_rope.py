"""Every kind of rotary embedding against transformers; each sequence keeps its own angles."""

import pytest
import torch

from lean_trl.data.batch import build_batch
from lean_trl.model.rope import RotaryEmbedding, read_ropes
from lean_trl.types import Example

HEAD_DIM, MAX_POSITIONS = 16, 64
KINDS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn, untruncated": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn, two mscales": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
    },
    "yarn, given factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "attention_factor": 1.3,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [2.0 + 0.5 * i for i in range(8)],
        "original_max_position_embeddings": 40,
    },
    "partial": {"rope_type": "default", "partial_rotary_factor": 0.5},
}


def config(settings):
    return {
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {"rope_theta": 500.0, **settings},
    }


def angles(settings, lengths):
    ropes = read_ropes(config(settings), HEAD_DIM, {"full_attention"})
    batch = build_batch([Example([1] * n) for n in lengths])
    return RotaryEmbedding(ropes)(batch.positions, batch.cu_seqlens)["full_attention"]


# 30 is short for longrope and dynamic; 50 is long for longrope, 90 for dynamic too.
@pytest.mark.parametrize("length", [1, 30, 50, 90])
@pytest.mark.parametrize("name", KINDS)
def test_against_transformers(name, length):
    transformers = pytest.importorskip("transformers")
    family = "glm4" if name == "partial" else "llama"  # Llama has no partial rotary embedding
    peer_config = transformers.AutoConfig.for_model(
        family,
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        num_hidden_layers=1,
        num_key_value_heads=4,
        vocab_size=8,
        intermediate_size=8,
        pad_token_id=None,
        **config(KINDS[name]),
    )
    peer = transformers.AutoModelForCausalLM.from_config(peer_config).model.rotary_emb
    cos, sin = peer(torch.zeros(1), torch.arange(length)[None])
    ours = angles(KINDS[name], [length])
    half = ours[0].shape[1]
    assert half == (HEAD_DIM // 4 if name == "partial" else HEAD_DIM // 2)
    torch.testing.assert_close(ours[0], cos[0, :, :half], atol=2e-6, rtol=0)
    torch.testing.assert_close(ours[1], sin[0, :, :half], atol=2e-6, rtol=0)


@pytest.mark.parametrize("name", KINDS)
def test_a_sequence_turns_as_it_does_alone(name):
    """A longer neighbour must not stretch it, whatever shares the batch."""
    lengths = [30, 90, 50, 1]
    together = angles(KINDS[name], lengths)
    for side in (0, 1):
        alone = torch.cat([angles(KINDS[name], [n])[side] for n in lengths])
        assert torch.equal(together[side], alone)


def test_completions_that_share_a_prompt_are_as_long_as_each_of_them():
    """Three completions of 20 tokens make a tree of 60 tokens, 40 deep: short for longrope."""
    scored = [False] * 20 + [True] * 20
    examples = [
        Example([1] * 20 + list(range(first, first + 20)), scored, group=0) for first in (2, 30, 60)
    ]
    tree = build_batch(examples, share_prefixes=True)
    assert tree.num_tokens == 80
    ropes = read_ropes(config(KINDS["longrope"]), HEAD_DIM, {"full_attention"})
    cos, _ = RotaryEmbedding(ropes)(tree.positions, tree.cu_seqlens)["full_attention"]
    alone, _ = angles(KINDS["longrope"], [40])
    assert torch.equal(cos[:40], alone)
    assert torch.equal(cos[40:60], alone[20:])


def test_casting_a_model_does_not_round_the_tables():
    ropes = read_ropes(config(KINDS["llama3"]), HEAD_DIM, {"full_attention"})
    rotary = RotaryEmbedding(ropes)
    before = rotary.full_attention.clone()
    rotary.to(torch.bfloat16)
    assert rotary.full_attention.dtype == torch.float32
    assert torch.equal(rotary.full_attention, before)
    assert not list(rotary.state_dict())


def test_hand_worked_angles():
    """theta 100, 4 dimensions: pairs turn by p and p / 10."""
    settings = {"max_position_embeddings": 8, "rope_theta": 100.0}
    ropes = read_ropes(settings, 4, {"full_attention"})
    positions = torch.tensor([0, 2])
    cos, sin = RotaryEmbedding(ropes)(positions, torch.tensor([0, 2]))["full_attention"]
    torch.testing.assert_close(sin, torch.tensor([[0.0, 0.0], [2.0, 0.2]]).sin())
    torch.testing.assert_close(cos, torch.tensor([[0.0, 0.0], [2.0, 0.2]]).cos())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope_type": "spiral"}, "rope type 'spiral'; known are default, linear"),
        ({"rope_type": "linear"}, "'linear' needs factor"),
        ({"rope_type": "llama3", "factor": 2.0}, "needs low_freq_factor, high_freq_factor"),
        (
            {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 8},
            "short_factor has 1 entries, expected 8",
        ),
    ],
)
def test_broken_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        read_ropes(config(settings), HEAD_DIM, {"full_attention"})
