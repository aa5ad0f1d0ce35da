"""Rotary position embeddings: every kind that config.json knows, as inverse frequencies and one
scale.

A token at position p turns pair i of a head by the angle p * inv_freq[i] (Su et al. 2021, section
3.4.2). The kinds differ only in inv_freq and in a factor on cos and sin:

    default    theta^(-2i / d)
    linear     default / factor (position interpolation, Chen et al. 2023)
    dynamic    theta grows with the sequence beyond max_position_embeddings (NTK-aware)
    yarn       a ramp between default and linear (Peng et al. 2023, section 3)
    llama3     long waves divided by factor, short ones kept (Llama 3.1)
    longrope   a measured factor for each pair, one set for short and one for long sequences
               (Ding et al. 2024)

dynamic and longrope depend on the length of the sequence. It is each sequence's own length that
counts here, so a batch gives every sequence the angles that it has alone.

Dimension letters: T tokens, R trees, F = rotary dimensions / 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

DEFAULT_KIND = "full_attention"  # the key of a model that has one kind of rope


@dataclass(frozen=True)
class Rope:
    """One kind of rotary embedding; `settings` as in config.json's rope_parameters."""

    kind: str  # a key of TABLES
    dim: int  # rotary dimensions of a head; the rest of the head is not turned
    max_positions: int
    settings: Mapping[str, Any]

    def table(self) -> Tensor:
        """What is computed once, fp32: inv_freq [F], or what the length-dependent kinds make it
        from.
        """
        return TABLES[self.kind](self)

    def angles(self, table: Tensor, positions: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, fp32 [T, F], of tokens at `positions` [T] in trees bounded by `cu_seqlens`
        [R + 1].
        """
        inv_freq = table
        if self.kind in LENGTH_DEPENDENT:
            tree, length = _tree_lengths(positions, cu_seqlens)
            inv_freq = LENGTH_DEPENDENT[self.kind](self, table, length)[tree]
        angles = positions[:, None].float() * inv_freq
        scale = attention_factor(self)
        return angles.cos() * scale, angles.sin() * scale


class RotaryEmbedding(nn.Module):
    """cos and sin for each kind of rope in a model. Holds the tables, so that a forward copies
    nothing to the device.
    """

    def __init__(self, ropes: Mapping[str, Rope]) -> None:
        super().__init__()
        self.ropes = dict(ropes)
        for name, rope in self.ropes.items():
            self.register_buffer(name, rope.table(), persistent=False)

    def forward(self, positions: Tensor, cu_seqlens: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        return {
            name: rope.angles(self.get_buffer(name), positions, cu_seqlens)
            for name, rope in self.ropes.items()
        }

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        """`model.to(bfloat16)` moves the tables but must not round them: 8 bits put position 1000
        off by several.
        """
        super()._apply(fn, recurse)
        for name, rope in self.ropes.items():
            setattr(self, name, rope.table().to(self.get_buffer(name).device))
        return self


def _tree_lengths(positions: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """(tree of each token int64 [T], depth of each tree fp32 [R]).

    The depth, not the number of tokens: completions that share a prompt are no longer for being
    many.
    """
    num_trees = cu_seqlens.shape[0] - 1
    tree = torch.repeat_interleave(
        torch.arange(num_trees, device=positions.device),
        cu_seqlens.diff().long(),
        output_size=positions.shape[0],
    )
    depth = torch.zeros(num_trees, dtype=positions.dtype, device=positions.device)
    return tree, depth.scatter_reduce(0, tree, positions + 1, "amax").float()


def _exponent(rope: Rope) -> Tensor:
    return torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim


def _base(rope: Rope) -> Tensor:
    """theta^(2i / d), fp32 [F]: the wavelengths over 2 pi."""
    return rope.settings["rope_theta"] ** _exponent(rope)


def _default(rope: Rope) -> Tensor:
    return 1.0 / _base(rope)


def _linear(rope: Rope) -> Tensor:
    return _default(rope) / rope.settings["factor"]


def _yarn(rope: Rope) -> Tensor:
    s, dim = rope.settings, rope.dim
    original = s["original_max_position_embeddings"]

    def pair_with(turns: float) -> float:
        """The pair that makes `turns` turns within the original context."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(s["rope_theta"]))

    low, high = pair_with(s.get("beta_fast") or 32), pair_with(s.get("beta_slow") or 1)
    if s.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2).float() - low) / (high - low if high != low else 0.001)
    keep = 1 - ramp.clamp(0, 1)
    base = _base(rope)
    return 1.0 / (yarn_factor(rope) * base) * (1 - keep) + 1.0 / base * keep


def _llama3(rope: Rope) -> Tensor:
    s, inv_freq = rope.settings, _default(rope)
    low, high = s["low_freq_factor"], s["high_freq_factor"]
    turns = s["original_max_position_embeddings"] / (2 * math.pi / inv_freq)
    smooth = (turns - low) / (high - low)
    between = (1 - smooth) * inv_freq / s["factor"] + smooth * inv_freq
    scaled = torch.where(turns < low, inv_freq / s["factor"], between)
    return torch.where(turns > high, inv_freq, scaled)


def _longrope(rope: Rope) -> Tensor:
    """[2, F]: for short and for long sequences."""
    factors = [rope.settings["short_factor"], rope.settings["long_factor"]]
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * _base(rope))


def _longrope_at(rope: Rope, table: Tensor, length: Tensor) -> Tensor:
    """length fp32 [R] -> inv_freq [R, F]."""
    return table[(length > rope.settings["original_max_position_embeddings"]).long()]


def _dynamic_at(rope: Rope, table: Tensor, length: Tensor) -> Tensor:
    """length fp32 [R] -> inv_freq [R, F]."""
    s, dim = rope.settings, rope.dim
    stretch = s["factor"] * length.clamp(min=rope.max_positions) / rope.max_positions
    theta = s["rope_theta"] * (stretch - (s["factor"] - 1)) ** (dim / (dim - 2))
    return 1.0 / theta[:, None] ** table


TABLES: dict[str, Callable[[Rope], Tensor]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _exponent,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}
LENGTH_DEPENDENT: dict[str, Callable[[Rope, Tensor, Tensor], Tensor]] = {
    "dynamic": _dynamic_at,
    "longrope": _longrope_at,
}
REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}


def yarn_factor(rope: Rope) -> float:
    """How many times longer than the original context the model was stretched."""
    factor = rope.settings.get("factor")
    original = rope.settings["original_max_position_embeddings"]
    return rope.max_positions / original if factor is None else factor


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """0.1 * mscale * ln(factor) + 1 (Peng et al. 2023, section 3.4), 1 without stretching."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def attention_factor(rope: Rope) -> float:
    """The factor on cos and sin, that is the square root of the factor on attention scores."""
    s = rope.settings
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if s.get("attention_factor") is not None:
        return s["attention_factor"]
    factor = yarn_factor(rope)
    if rope.kind == "longrope":
        original = s["original_max_position_embeddings"]
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    if s.get("mscale") and s.get("mscale_all_dim"):
        return yarn_mscale(factor, s["mscale"]) / yarn_mscale(factor, s["mscale_all_dim"])
    return yarn_mscale(factor)


def score_factor(rope: Rope) -> float:
    """What latent attention multiplies its scores with when the context is stretched.

    Its cos and sin carry mscale / mscale_all_dim; the square of mscale_all_dim's part belongs to
    all dimensions of a head, so it goes to the scores (DeepSeek-V3's released model).
    """
    all_dim = rope.settings.get("mscale_all_dim")
    if rope.kind == "default" or not all_dim:
        return 1.0
    return yarn_mscale(rope.settings["factor"], all_dim) ** 2


def read_ropes(config: Mapping[str, Any], head_dim: int, kinds: set[str]) -> dict[str, Rope]:
    """The ropes of a model by layer kind, from either spelling of config.json.

    transformers 5 writes `rope_parameters`, flat or one dict for each layer kind; older files write
    `rope_theta`, `rope_scaling` (with `type` for `rope_type`), `partial_rotary_factor` and
    `rope_local_base_freq`.

    >>> linear = {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}
    >>> new = {"max_position_embeddings": 64, "rope_parameters": linear}
    >>> old = {"max_position_embeddings": 64, "rope_theta": 1e4,
    ...        "rope_scaling": {"type": "linear", "factor": 2.0}}
    >>> read_ropes(old, 8, {"full_attention"}) == read_ropes(new, 8, {"full_attention"})
    True
    """
    given = config.get("rope_parameters") or {}
    nested = any(isinstance(value, Mapping) for value in given.values())
    scaling = config.get("rope_scaling") or {}
    if not given and not scaling:
        scaling = config.get("rope_default") or {}
    local_theta = config.get("rope_local_base_freq")
    ropes = {}
    for kind in sorted(kinds):
        settings = {"rope_theta": config.get("rope_theta")}
        if kind == "sliding_attention" and local_theta is not None:
            # Stretching is for the layers that see far; local layers keep the plain kind.
            settings["rope_theta"] = local_theta
        else:
            settings |= scaling
        settings |= (given.get(kind) or {}) if nested else given
        ropes[kind] = _rope(config, settings, head_dim)
    return ropes


def _rope(config: Mapping[str, Any], settings: dict[str, Any], head_dim: int) -> Rope:
    kind = settings.pop("rope_type", None) or settings.get("type") or "default"
    settings.pop("type", None)
    kind = (config.get("rope_aliases") or {}).get(kind, kind)
    if kind not in TABLES:
        raise ValueError(f"config.json asks for rope type {kind!r}; known are {', '.join(TABLES)}")
    required = ("rope_theta", *REQUIRED.get(kind, ()))
    if missing := [key for key in required if settings.get(key) is None]:
        raise ValueError(f"config.json: rope type {kind!r} needs {', '.join(missing)}")
    max_positions = config["max_position_embeddings"]
    original = config.get("original_max_position_embeddings")
    if original is not None:  # where a file has it at the top, that one was trained with
        settings["original_max_position_embeddings"] = original
    else:
        settings.setdefault("original_max_position_embeddings", max_positions)
    partial = (
        settings.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    )
    dim = int(head_dim * partial)
    for name in ("short_factor", "long_factor"):
        if kind == "longrope" and len(settings[name]) != dim // 2:
            raise ValueError(
                f"config.json: {name} has {len(settings[name])} entries, expected {dim // 2} "
                "(half the rotary dimensions)"
            )
    return Rope(kind, dim, max_positions, settings)
