"""Weights of sharded models: each rank reads the rows that it keeps, and they are right."""

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from lean_trl.model.loader import fill_model, load_model, new_model, randomise_model
from lean_trl.model.names import pieces
from lean_trl.model.safetensors_io import Stored
from lean_trl.techniques.shard import Precision, shard_model
from lean_trl.train.distributed import World, make_mesh
from tests.ranks import on_ranks

MODELS = Path(__file__).parent.parent / "golden" / "models"
NAMES = {"layers.{i}.up": ("layers.{i}.{e}.a", "layers.{i}.{e}.b"), "qkv": ("q", "k", "v")}


@pytest.mark.parametrize(
    ("name", "shape"), [("layers.0.up", (3, 4, 2)), ("qkv", (6, 2)), ("norm", (5,))]
)
def test_pieces_of_any_range_of_rows(name, shape):
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    stored = {piece.name: piece.of(whole).clone() for piece in pieces(NAMES, name, shape)}
    assert sum(piece.numel() for piece in stored.values()) == whole.numel()
    for first in range(shape[0] + 1):
        for last in range(first, shape[0] + 1):
            rows = torch.full((last - first, *shape[1:]), -1.0)
            for piece in pieces(NAMES, name, shape):
                part, row = piece.within(rows, first, shape[0])
                if part.numel():
                    part.copy_(stored[piece.name][row : row + part.shape[0]])
            assert torch.equal(rows, whole[first:last]), (first, last)


@pytest.mark.parametrize("name", [path.name for path in sorted(MODELS.iterdir())])
@pytest.mark.parametrize("size", [1, 3])
def test_a_sharded_model_has_the_files_weights(name, size, monkeypatch):
    whole = load_model(MODELS / name)
    seen: dict[int, int] = {}
    read = Stored.copy_into

    def load(world: World) -> dict[str, torch.Tensor]:
        model = load_model(MODELS / name, device="meta")
        shard_model(model, make_mesh("fsdp", None, "cpu"), Precision())
        assert all(p.is_meta for p in model.parameters())
        fill_model(model, MODELS / name, "cpu")
        local = sum(p.to_local().numel() for p in model.parameters())
        seen[world.rank] = local
        return {n: p.full_tensor() for n, p in model.named_parameters()}

    elements = []

    def counted(stored, destination, name, row=0):
        elements.append(destination.numel())
        read(stored, destination, name, row)

    monkeypatch.setattr(Stored, "copy_into", counted)
    for weights in on_ranks(size, load):
        assert weights.keys() == dict(whole.named_parameters()).keys()
        for key, weight in whole.named_parameters():
            assert torch.equal(weights[key], weight), key
    assert sum(elements) == sum(seen.values()) == sum(p.numel() for p in whole.parameters())


def test_the_rotary_tables_survive_the_way_over_meta():
    name = sorted(MODELS.iterdir())[0]
    model = load_model(name, device="meta")
    fill_model(model, name, "cpu")
    for key, table in load_model(name).model.rotary_emb.named_buffers():
        assert torch.equal(model.model.rotary_emb.get_buffer(key), table)


def test_random_weights_do_not_depend_on_the_ranks():
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 23,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "tie_word_embeddings": True,
    }
    whole = new_model(raw, seed=3)

    def build(world: World) -> dict[str, torch.Tensor]:
        model = new_model(raw, device="meta")
        shard_model(model, make_mesh("fsdp", None, "cpu"), Precision())
        randomise_model(model, 3, "cpu")
        assert all(isinstance(p, DTensor) for p in model.parameters())
        return {n: p.full_tensor() for n, p in model.named_parameters()}

    for weights in on_ranks(3, build):
        for key, weight in whole.named_parameters():
            assert torch.equal(weights[key], weight), key
