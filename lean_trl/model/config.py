"""config.json -> ModelConfig: what the decoder is built from, read once and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lean_trl.model.families import FAMILIES, Family
from lean_trl.model.kinds import FULL, SLIDING, Json
from lean_trl.model.rope import DEFAULT_KIND, Rope, read_ropes, score_factor

# What HF config classes assume; a family's row overrides it.
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
ALIASES = {"num_experts": ("num_local_experts", "n_routed_experts")}
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
    "moe_intermediate_size": 1 << 22,
    "num_hidden_layers": 10_000,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "sliding_window": 1 << 40,
    "num_experts": 1 << 14,
    "num_experts_per_tok": 1 << 14,
    "q_lora_rank": 1 << 20,
    "kv_lora_rank": 1 << 20,
    "qk_nope_head_dim": 1 << 14,
    "qk_rope_head_dim": 1 << 14,
    "v_head_dim": 1 << 14,
}
NUMBERS = ("rms_norm_eps", "rope_theta", "initializer_range", "max_position_embeddings")
FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
# Noise that config.json may ask for in training.
DROPOUTS = ("attention_dropout", "resid_pdrop", "embd_pdrop", "router_jitter_noise")


@dataclass(frozen=True)
class Layer:
    """What differs from layer to layer."""

    window: int | None  # a token sees itself and window - 1 tokens before it; None: all of them
    rope: str | None  # key of ModelConfig.ropes; None: positions are not encoded here
    sparse: bool  # has experts


@dataclass(frozen=True)
class Latent:
    """Sizes of multi-head latent attention (DeepSeek-V2, section 2.1), in numbers of dimensions."""

    q_rank: int | None  # None: queries are not compressed
    kv_rank: int
    nope: int  # dimensions of a head without rotary embedding
    rope: int  # and with; shared by all heads of the keys
    value: int


@dataclass(frozen=True)
class MoE:
    """Sizes and rules of the experts."""

    num_experts: int
    top_k: int  # experts of a token
    size: int  # intermediate size of an expert
    shared_size: int  # of the experts that every token has, as one; 0: none
    normalize: bool  # the weights of a token's experts sum to 1 (before scaling)
    scaling: float
    groups: int
    top_groups: int  # groups that a token may choose from
    alpha: float  # of gpt-oss's activation
    limit: float
    aux_loss_coef: float  # config.json's router_aux_loss_coef


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
    latent: Latent | None
    moe: MoE | None
    max_positions: int
    activation: str
    norm_eps: float
    attention_bias: bool
    mlp_bias: bool
    interleaved: bool  # rotary dimensions 0 and 1 turn together, not 0 and H / 2
    tied: bool  # the head is the embedding
    attention_dropout: float  # the largest dropout asked for; the model itself has none
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

    def to_dict(self) -> dict[str, Any]:
        """config.json, under the name that other libraries call."""
        return dict(self.raw)


def read_config(raw: Json) -> ModelConfig:
    """Check a config.json and read it with the defaults of its family.

    Raises ValueError for an unknown architecture (with the known ones), missing keys and impossible
    sizes.
    """
    family = find_family(raw)
    config = _complete(raw, family)
    layers = _layers(config, family)
    latent = _latent(config) if family.attention == "latent" else None
    rotary_dim = latent.rope if latent else config["head_dim"]
    ropes = read_ropes(config, rotary_dim, {layer.rope for layer in layers if layer.rope})
    score_dim = latent.nope + latent.rope if latent else config["head_dim"]
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
        ropes=ropes,
        latent=latent,
        moe=_moe(config) if any(layer.sparse for layer in layers) else None,
        max_positions=config["max_position_embeddings"],
        activation=_activation(config),
        norm_eps=config["rms_norm_eps"],
        attention_bias=config["attention_bias"],
        mlp_bias=config["mlp_bias"],
        interleaved=config.get("rope_interleave", family.rope_pairs == "interleaved"),
        tied=config["tie_word_embeddings"],
        attention_dropout=max(config.get(name) or 0.0 for name in DROPOUTS),
        initializer_range=config["initializer_range"],
        attention_scale=_attention_scale(config, score_dim, ropes, latent),
        attention_softcap=config.get("attn_logit_softcapping"),
        embedding_scale=config["hidden_size"] ** 0.5
        if family.scaled_embedding
        else config.get("embedding_multiplier", 1.0),
        residual_scale=config.get("residual_multiplier", 1.0),
        logits_scale=1.0 / config.get("logits_scaling", 1.0),
        logits_softcap=config.get("final_logit_softcapping"),
    )


def find_family(raw: Json) -> Family:
    """The row of the table that config.json's model_type names."""
    family = FAMILIES.get(str(raw.get("model_type")))
    if family is None:
        raise ValueError(
            f"config.json has model_type {raw.get('model_type')!r} (architectures "
            f"{raw.get('architectures')}), which is not supported; known are "
            f"{', '.join(FAMILIES)}. docs/families.md says how to add one."
        )
    return family


def _complete(raw: Json, family: Family) -> dict[str, Any]:
    """config.json over the defaults, under one name for each thing, its sizes checked."""
    config = {**DEFAULTS, **family.defaults, **raw}
    for ours, others in ALIASES.items():
        sources = (raw, family.defaults)  # what the file says beats a default under another name
        found = [source[name] for source in sources for name in (ours, *others) if name in source]
        config[ours] = found[0] if found else None
    if missing := [name for name in REQUIRED if config.get(name) is None]:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
    _check_sizes(config)
    _check_kinds(config)
    heads = config["num_attention_heads"]
    for name, value in (
        ("num_key_value_heads", heads),
        ("head_dim", max(1, config["hidden_size"] // heads)),
    ):
        if config.get(name) is None:
            config[name] = value
    if heads % config["num_key_value_heads"]:
        raise ValueError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads "
            f"{config['num_key_value_heads']}"
        )
    if config.get("use_bidirectional_attention"):
        raise ValueError("config.json: use_bidirectional_attention is not supported: an encoder")
    return config


def _check_sizes(config: Json) -> None:
    for name, limit in LIMITS.items():
        value = config.get(name)
        if value is not None and (type(value) is not int or not 0 < value <= limit):
            raise ValueError(
                f"config.json: {name} is {value!r}, expected a whole number from 1 to {limit}"
            )


def _check_kinds(config: Json) -> None:
    """A text where a number or a flag belongs ("false") must not pass for a true one."""
    for name in NUMBERS:
        value = config.get(name)
        if name == "rope_theta" and value is None:  # rope_parameters have it
            continue
        if type(value) not in (int, float) or not 0 <= float(value or 0) < float("inf"):
            raise ValueError(f"config.json: {name} is {value!r}, expected a number >= 0")
    for name in FLAGS:
        if config.get(name) not in (None, False, True):
            raise ValueError(f"config.json: {name} is {config[name]!r}, expected true or false")
    for name, kind in (
        ("rope_parameters", Mapping),
        ("rope_scaling", Mapping),
        ("layer_types", list),
    ):
        value = config.get(name)
        if value is not None and not isinstance(value, kind):
            raise ValueError(
                f"config.json: {name} is {value!r}, expected a {kind.__name__.lower()}"
            )


def _layers(config: Json, family: Family) -> tuple[Layer, ...]:
    count = config["num_hidden_layers"]
    kinds, rotary = family.kinds(config), family.rotary(config)
    sparse = family.experts.sparse(config) if family.experts else [False] * count
    if len(kinds) != count or len(rotary) != count:
        raise ValueError(
            f"config.json: {count} layers, but layer_types has {len(kinds)} and no_rope_layers "
            f"{len(rotary)} entries"
        )
    if unknown := set(kinds) - {FULL, SLIDING}:
        raise ValueError(
            f"config.json: layer_types has {', '.join(sorted(map(repr, unknown)))}; known are "
            f"{FULL} and {SLIDING}"
        )
    window = config["sliding_window"] if config["use_sliding_window"] else None
    # Families whose sliding layers have a rope of their own say so by one of these.
    nested = any(isinstance(v, Mapping) for v in (config.get("rope_parameters") or {}).values())
    two_ropes = nested or config.get("rope_local_base_freq") is not None
    return tuple(
        Layer(
            window=window if kind == SLIDING else None,
            rope=(kind if two_ropes else DEFAULT_KIND) if turned else None,
            sparse=has_experts,
        )
        for kind, turned, has_experts in zip(kinds, rotary, sparse, strict=True)
    )


def _latent(config: Json) -> Latent:
    latent = Latent(
        q_rank=config["q_lora_rank"],
        kv_rank=config["kv_lora_rank"],
        nope=config["qk_nope_head_dim"],
        rope=config["qk_rope_head_dim"],
        value=config["v_head_dim"],
    )
    if latent.value > latent.nope + latent.rope:
        raise ValueError(
            f"config.json: v_head_dim {latent.value} is larger than qk_nope_head_dim + "
            f"qk_rope_head_dim {latent.nope + latent.rope}, which is not supported"
        )
    return latent


def _moe(config: Json) -> MoE:
    size = config.get("moe_intermediate_size") or config["intermediate_size"]
    moe = MoE(
        num_experts=config["num_experts"],
        top_k=config["num_experts_per_tok"],
        size=size,
        shared_size=size * (config.get("n_shared_experts") or 0),
        normalize=config.get("norm_topk_prob", False),
        scaling=config.get("routed_scaling_factor", 1.0),
        groups=config.get("n_group") or 1,
        top_groups=config.get("topk_group") or 1,
        alpha=config.get("swiglu_alpha", 1.702),
        limit=config.get("swiglu_limit", 7.0),
        aux_loss_coef=config.get("router_aux_loss_coef") or 0.0,
    )
    if moe.top_k > moe.num_experts or moe.num_experts % moe.groups or moe.top_groups > moe.groups:
        raise ValueError(
            f"config.json: {moe.num_experts} experts in {moe.groups} groups cannot give "
            f"{moe.top_k} experts of {moe.top_groups} groups"
        )
    return moe


def _attention_scale(
    config: Json, score_dim: int, ropes: Mapping[str, Rope], latent: Latent | None
) -> float:
    if config.get("attention_multiplier") is not None:
        return config["attention_multiplier"]
    scale = (config.get("query_pre_attn_scalar") or score_dim) ** -0.5
    return scale * score_factor(ropes[DEFAULT_KIND]) if latent else scale


def _activation(config: Json) -> str:
    name = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    if name not in ACTIVATIONS:
        raise ValueError(
            f"config.json: hidden_act {name!r} is not supported; known are {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]
