"""What differs from layer to layer, as functions of config.json: one value for each layer.

A family's row names the functions that hold for it (families.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Json = Mapping[str, Any]  # config.json, with the defaults of its family beneath

FULL, SLIDING = "full_attention", "sliding_attention"


def full(config: Json) -> list[str]:
    """Every layer sees everything before it."""
    return [FULL] * config["num_hidden_layers"]


def sliding(config: Json) -> list[str]:
    """Every layer has the window, where config.json gives one."""
    return [SLIDING] * config["num_hidden_layers"]


def periodic(config: Json) -> list[str]:
    """As `layer_types` says, else every `sliding_window_pattern`-th layer is full, others slide."""
    period = config["sliding_window_pattern"]
    return config.get("layer_types") or [
        FULL if (i + 1) % period == 0 else SLIDING for i in range(config["num_hidden_layers"])
    ]


def upper(config: Json) -> list[str]:
    """As `layer_types` says, else layers from `max_window_layers` on slide."""
    first = config["max_window_layers"]
    return config.get("layer_types") or [
        SLIDING if i >= first else FULL for i in range(config["num_hidden_layers"])
    ]


def unrotated(config: Json) -> list[str]:
    """As `layer_types` says, else the layers without rotary embedding slide."""
    return config.get("layer_types") or [
        FULL if rotated else SLIDING for rotated in some_rotary(config)
    ]


def all_rotary(config: Json) -> list[bool]:
    """Every layer turns its queries and keys."""
    return [True] * config["num_hidden_layers"]


def some_rotary(config: Json) -> list[bool]:
    """As `no_rope_layers` says (1: turned!), else all but every `no_rope_layer_interval`-th."""
    if config.get("no_rope_layers") is not None:
        return [bool(turned) for turned in config["no_rope_layers"]]
    interval = config["no_rope_layer_interval"]
    return [(i + 1) % interval != 0 for i in range(config["num_hidden_layers"])]


def all_sparse(config: Json) -> list[bool]:
    """Every layer has experts."""
    return [True] * config["num_hidden_layers"]


def stepped_sparse(config: Json) -> list[bool]:
    """Every `decoder_sparse_step`-th layer but those of `mlp_only_layers`."""
    dense, step = config.get("mlp_only_layers") or [], config["decoder_sparse_step"]
    return [i not in dense and (i + 1) % step == 0 for i in range(config["num_hidden_layers"])]


def later_sparse(config: Json) -> list[bool]:
    """All but the first `first_k_dense_replace` layers."""
    return [i >= config["first_k_dense_replace"] for i in range(config["num_hidden_layers"])]
