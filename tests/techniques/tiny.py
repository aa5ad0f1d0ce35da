"""A model small enough for many runs, and batches for it."""

from __future__ import annotations

import numpy as np

from lean_trl.config import Config, config_from_dict
from lean_trl.data.batch import build_batch
from lean_trl.model.loader import new_model
from lean_trl.types import Batch, Example

RAW = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}


def make_model(seed=0, **changes):
    return new_model(RAW | changes, seed)


def make_config(**sections) -> Config:
    return config_from_dict(sections)


def make_batch(*lengths: int, seed=0) -> Batch:
    rng = np.random.default_rng(seed)
    return build_batch([Example(rng.integers(1, 60, n)) for n in lengths or (19, 12)])


def gradients(model) -> dict:
    """{parameter: its gradient}, taken away from the model."""
    found = {name: p.grad for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = None
    return found
