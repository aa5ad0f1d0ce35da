"""config.json -> ModelConfig: what the decoder is built from, read once and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lean_trl.model.families import FAMILIES, SLIDING, Family, Json
from lean_trl.model.rope import DEFAULT_KIND, Rope, read_ropes

# What every HF config class assumes; a family's row overrides it.
DEFAULTS: dict[str, Any] = {
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "sliding_window": None,
    "use_sliding_window": True,
}
# HF has several names for one thing; the first one is ours.
ALIASES = (("hidden_act", "hidden_activation"),)
REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
# No model comes near these. Beyond them a config.json is broken, and saying so beats running out of
# memory.
LIMITS = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 22,
    "intermediate_size": 1 << 22,
    "num_hidden_layers": 10_000,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
DROPOUTS = ("attention_dropout", "resid_pdrop", "embd_pdrop")


@dataclass(frozen=True)
class Layer:
    """What differs from layer to layer."""

    window: int | None  # a token sees itself and window - 1 tokens before it; None: all of them
    rope: str | None  # key of ModelConfig.ropes; None: positions are not encoded here


@dataclass(frozen=True)
class ModelConfig:
    """A model's shape and settings. `raw` is config.json as read; save_model writes it back."""

    raw: Json
    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[Layer, ...]
    ropes: Mapping[str, Rope]
    max_positions: int
    activation: str
    norm_eps: float
    attention_bias: bool
    mlp_bias: bool
    tied: bool  # the head is the embedding
    attention_dropout: (
        float  # the largest dropout that config.json asks for; the model itself has none
    )
    initializer_range: float
    attention_scale: float  # on q . k
    attention_softcap: float | None
    embedding_scale: float
    residual_scale: float  # on what attention and MLP add to the stream
    logits_scale: float
    logits_softcap: float | None

    @property
    def num_layers(self) -> int:
        return len(self.layers)


def read_config(raw: Json) -> ModelConfig:
    """Check a config.json and read it with the defaults of its family.

    Raises ValueError for an unknown architecture (with the known ones), missing keys and impossible
    sizes.
    """
    family = find_family(raw)
    config = {**DEFAULTS, **family.defaults, **{k: v for k, v in raw.items() if v is not None}}
    for ours, *others in ALIASES:
        config.setdefault(ours, next((config[name] for name in others if name in config), None))
    if missing := [name for name in REQUIRED if name not in config]:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    _check_sizes(config)
    layers = _layers(config, family)
    rope_kinds = {layer.rope for layer in layers if layer.rope is not None}
    return ModelConfig(
        raw=raw,
        family=family,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        layers=layers,
        ropes=read_ropes(config, config["head_dim"], rope_kinds),
        max_positions=config["max_position_embeddings"],
        activation=_activation(config),
        norm_eps=config["rms_norm_eps"],
        attention_bias=config["attention_bias"],
        mlp_bias=config["mlp_bias"],
        tied=config["tie_word_embeddings"],
        attention_dropout=max(config.get(name) or 0.0 for name in DROPOUTS),
        initializer_range=config["initializer_range"],
        attention_scale=config["head_dim"] ** -0.5,
        attention_softcap=config.get("attn_logit_softcapping"),
        embedding_scale=1.0,
        residual_scale=1.0,
        logits_scale=1.0,
        logits_softcap=config.get("final_logit_softcapping"),
    )


def find_family(raw: Json) -> Family:
    """The row of the table that config.json's model_type names."""
    family = FAMILIES.get(raw.get("model_type", ""))
    if family is None:
        raise ValueError(
            f"config.json has model_type {raw.get('model_type')!r} (architectures "
            f"{raw.get('architectures')}), which is not supported; known are "
            f"{', '.join(FAMILIES)}. docs/families.md says how to add one."
        )
    return family


def _layers(config: Json, family: Family) -> tuple[Layer, ...]:
    kinds, rotary = family.layer_kinds(config), family.rotary(config)
    count = config["num_hidden_layers"]
    if len(kinds) != count or len(rotary) != count:
        raise ValueError(
            f"config.json: {count} layers, but layer_types has {len(kinds)} and no_rope_layers "
            f"{len(rotary)} entries"
        )
    window = config["sliding_window"] if config["use_sliding_window"] else None
    return tuple(
        Layer(window if kind == SLIDING else None, DEFAULT_KIND if turned else None)
        for kind, turned in zip(kinds, rotary, strict=True)
    )


def _activation(config: Json) -> str:
    name = config.get("hidden_act") or "silu"
    if name not in ACTIVATIONS:
        raise ValueError(
            f"config.json: hidden_act {name!r} is not supported; known are {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def _check_sizes(config: Json) -> None:
    for name, limit in LIMITS.items():
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= limit:
            raise ValueError(
                f"config.json: {name} is {value!r}, expected a whole number from 1 to {limit}"
            )
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    if heads % kv_heads:
        raise ValueError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads "
            f"{kv_heads}"
        )
