"""The table of model families: one row each, over the one decoder in decoder.py.

A row says where a family differs from Llama, and what its config.json files may leave out. A family
whose files name or slice their tensors in another way adds a name map (names.py). docs/families.md
walks through adding one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from lean_trl.model.kinds import (
    Json,
    all_rotary,
    all_sparse,
    full,
    later_sparse,
    periodic,
    sliding,
    some_rotary,
    stepped_sparse,
    unrotated,
    upper,
)

Names = Mapping[str, tuple[str, ...]]  # see names.py


@dataclass(frozen=True)
class Experts:
    """How a family routes tokens and lays its experts out (moe.py)."""

    sparse: Callable[[Json], list[bool]] = all_sparse
    router: str = "gate"  # the router's name within the MLP
    router_bias: bool = False
    # softmax: over all experts, then the largest k (renormalised if `norm_topk_prob`);
    # topk_softmax: over the largest k; sigmoid: groups of experts, with a correction bias.
    score: Literal["softmax", "topk_softmax", "sigmoid"] = "softmax"
    # rows: [E, out, in] as nn.Linear, the gate's rows before up's; columns: [E, in, out] with
    # biases, gate and up in turns, and gpt-oss's clamped activation.
    layout: Literal["rows", "columns"] = "rows"


@dataclass(frozen=True)
class Family:
    """What sets a family apart from Llama."""

    architecture: str  # config.json "architectures"
    # What HF's config class assumes where config.json is silent.
    defaults: Json = field(default_factory=dict)
    # Names of the norms before attention, after it, before the MLP, after it; None: none there.
    norms: tuple[str | None, str | None, str | None, str | None] = (
        "input_layernorm",
        None,
        "post_attention_layernorm",
        None,
    )
    norm_offset: float = 0.0  # added to the stored norm weights (Gemma stores weight - 1)
    attention: Literal["grouped", "latent"] = "grouped"
    qk_norm: Literal["head", "all"] | None = None  # for each head, or over all heads as one
    output_bias: bool = True  # o_proj follows `attention_bias`; False: never has one
    fused_qkv: bool = False  # one qkv_proj
    fused_gate_up: bool = False  # one gate_up_proj
    sinks: bool = False  # a learnt logit for each head that takes attention and gives nothing
    rope_pairs: Literal["halves", "interleaved"] = "halves"  # which dimensions turn together
    scaled_embedding: bool = False  # times sqrt(hidden_size)
    kinds: Callable[[Json], list[str]] = full
    rotary: Callable[[Json], list[bool]] = all_rotary
    experts: Experts | None = None
    names: Names = field(default_factory=dict)
    ignored: tuple[str, ...] = ()  # patterns of tensors in the files that the model has no use for


def expert_names(mlp: str, gate: str, up: str, down: str) -> Names:
    """The name map of a family whose files hold each expert's matrices by themselves."""
    layer = "model.layers.{i}."
    return {
        layer + "mlp.experts.gate_up_proj": (
            f"{layer}{mlp}.experts.{{e}}.{gate}.weight",
            f"{layer}{mlp}.experts.{{e}}.{up}.weight",
        ),
        layer + "mlp.experts.down_proj": (f"{layer}{mlp}.experts.{{e}}.{down}.weight",),
    }


GEMMA = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
GEMMA_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
QWEN = {
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
# gpt-oss's own rope where config.json has none.
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family(
        "MistralForCausalLM",
        defaults={"sliding_window": 4096, "max_position_embeddings": 131072},
        kinds=sliding,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        defaults=QWEN | {"attention_bias": True},
        output_bias=False,
        kinds=upper,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM", defaults=QWEN | {"head_dim": 128}, qk_norm="head", kinds=upper
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        defaults=GEMMA
        | {
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window_pattern": 2,
            "max_position_embeddings": 8192,
        },
        norms=GEMMA_NORMS,
        norm_offset=1.0,
        scaled_embedding=True,
        kinds=periodic,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        defaults=GEMMA
        | {
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "sliding_window_pattern": 6,
            "max_position_embeddings": 131072,
        },
        norms=GEMMA_NORMS,
        norm_offset=1.0,
        qk_norm="head",
        scaled_embedding=True,
        kinds=periodic,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        defaults={
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            # Names that Phi-3 files gave to longrope before it had one.
            "rope_aliases": {"su": "longrope", "yarn": "longrope"},
        },
        fused_qkv=True,
        fused_gate_up=True,
        kinds=sliding,
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        defaults={"rms_norm_eps": 1e-5},
        norms=(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
        qk_norm="all",
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        defaults={
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "max_position_embeddings": 32768,
            "use_sliding_window": False,
            "no_rope_layer_interval": 4,
        },
        kinds=unrotated,
        rotary=some_rotary,
    ),
    "granite": Family("GraniteForCausalLM", defaults={"attention_multiplier": 1.0}),
    "glm4": Family(
        "Glm4ForCausalLM",
        defaults={
            "head_dim": 128,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1.5625e-7,
            "max_position_embeddings": 131072,
        },
        norms=(
            "input_layernorm",
            "post_self_attn_layernorm",
            "post_attention_layernorm",
            "post_mlp_layernorm",
        ),
        output_bias=False,
        fused_gate_up=True,
        rope_pairs="interleaved",
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        defaults={
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "router_aux_loss_coef": 0.001,
        },
        kinds=sliding,
        experts=Experts(),
        names={
            "model.layers.{i}.mlp.gate.weight": ("model.layers.{i}.block_sparse_moe.gate.weight",),
            **expert_names("block_sparse_moe", "w1", "w3", "w2"),
        },
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        defaults=QWEN
        | {
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "decoder_sparse_step": 1,
            "router_aux_loss_coef": 0.001,
        },
        qk_norm="head",
        kinds=sliding,
        experts=Experts(sparse=stepped_sparse),
        names=expert_names("mlp", "gate_proj", "up_proj", "down_proj"),
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        defaults={
            "head_dim": 64,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "rope_theta": 150000.0,
            "rope_default": GPT_OSS_ROPE,
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "max_position_embeddings": 131072,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "router_aux_loss_coef": 0.001,
        },
        sinks=True,
        kinds=periodic,
        experts=Experts(router="router", router_bias=True, score="topk_softmax", layout="columns"),
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        defaults={
            "max_position_embeddings": 4096,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "rope_interleave": True,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "first_k_dense_replace": 3,
        },
        attention="latent",
        experts=Experts(sparse=later_sparse, score="sigmoid"),
        names=expert_names("mlp", "gate_proj", "up_proj", "down_proj"),
        # The multi-token prediction layer (model.layers.61) helped pre-training; it is no part of
        # the language model.
        ignored=(r"model\.layers\.{num_layers}\..*",),
    ),
}
