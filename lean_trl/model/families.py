"""The table of model families: one row each, over the one decoder in decoder.py.

A row says where a family differs from Llama, and which keys of config.json its files may leave out.
A family whose files name or slice their tensors in another way adds a name map. docs/families.md
walks through adding one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Json = Mapping[str, Any]  # config.json, with the defaults of its family beneath

FULL, SLIDING = "full_attention", "sliding_attention"


def full(config: Json) -> list[str]:
    """Every layer sees everything before it."""
    return [FULL] * config["num_hidden_layers"]


def sliding(config: Json) -> list[str]:
    """Every layer has the window, where config.json gives one."""
    return [SLIDING] * config["num_hidden_layers"]


def typed(config: Json) -> list[str]:
    """As `layer_types` says, else every `sliding_window_pattern`-th layer is full and the others
    have the window.
    """
    if config.get("layer_types") is not None:
        return config["layer_types"]
    period = config["sliding_window_pattern"]
    return [FULL if (i + 1) % period == 0 else SLIDING for i in range(config["num_hidden_layers"])]


def upper(config: Json) -> list[str]:
    """As `layer_types` says, else layers from `max_window_layers` on have the window."""
    if config.get("layer_types") is not None:
        return config["layer_types"]
    return [
        SLIDING if i >= config["max_window_layers"] else FULL
        for i in range(config["num_hidden_layers"])
    ]


def all_rotary(config: Json) -> list[bool]:
    """Every layer turns its queries and keys."""
    return [True] * config["num_hidden_layers"]


def some_rotary(config: Json) -> list[bool]:
    """As `no_rope_layers` says (1: turned), else every `no_rope_layer_interval`-th layer does
    without.
    """
    if config.get("no_rope_layers") is not None:
        return [bool(flag) for flag in config["no_rope_layers"]]
    interval = config["no_rope_layer_interval"]
    return [(i + 1) % interval != 0 for i in range(config["num_hidden_layers"])]


@dataclass(frozen=True)
class Family:
    """What sets a family apart from Llama."""

    architecture: str  # config.json "architectures"
    # What HF's config class assumes where config.json is silent.
    defaults: Json = field(default_factory=dict)
    # Names of the norms before attention, after it, before the MLP and after it; None: no norm
    # there.
    norms: tuple[str | None, str | None, str | None, str | None] = (
        "input_layernorm",
        None,
        "post_attention_layernorm",
        None,
    )
    norm_offset: float = 0.0  # what is added to the stored norm weights (Gemma stores weight - 1)
    qk_norm: Literal["head", "all"] | None = (
        None  # queries and keys normed for each head, or all heads as one
    )
    output_bias: bool = True  # o_proj follows `attention_bias`; False: never has one
    fused_qkv: bool = False  # one qkv_proj
    fused_gate_up: bool = False  # one gate_up_proj
    rope_pairs: Literal["halves", "interleaved"] = (
        "halves"  # which dimensions of a head are turned together
    )
    sinks: bool = False  # a learnt logit for each head that takes attention and gives nothing
    layer_kinds: Callable[[Json], list[str]] = full
    rotary: Callable[[Json], list[bool]] = all_rotary
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # see loader.py


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM"),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        defaults={"head_dim": 128, "max_window_layers": 28, "max_position_embeddings": 32768},
        qk_norm="head",
        layer_kinds=upper,
    ),
}
