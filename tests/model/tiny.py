"""Tiny random checkpoints of every family, made with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

BASE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": None,  # the peer drops the gradient of this row
}
EXPERTS = {"num_experts_per_tok": 2}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
}
# Every window is shorter than the 48 tokens of a test sequence.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 10, "head_dim": 24},
    "qwen2": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
    "qwen3": {"head_dim": 32},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 12},
    "gemma3_text": {
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 6,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
        },
    },
    "phi3": {"sliding_window": 20, "original_max_position_embeddings": 256},
    "olmo2": {},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "granite": {
        "embedding_multiplier": 6.0,
        "logits_scaling": 4.0,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.2,
    },
    "glm4": {"head_dim": 16},
    "mixtral": EXPERTS | {"num_local_experts": 6, "sliding_window": 11},
    "qwen3_moe": EXPERTS
    | {
        "num_experts": 8,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [1],
        "head_dim": 16,
    },
    "gpt_oss": EXPERTS
    | {"num_local_experts": 4, "head_dim": 16, "sliding_window": 8, "rope_parameters": YARN},
    "deepseek_v3": EXPERTS
    | {
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 40,
        "first_k_dense_replace": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "num_key_value_heads": 4,
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8},
    },
}
TIED = {"gemma2", "gemma3_text", "smollm3", "qwen3"}


def make(family: str, folder: Path, seed: int = 0, **changes: Any) -> Any:
    """Write a random checkpoint of the family to `folder`; returns transformers' model, fp32."""
    import transformers

    torch.manual_seed(seed)
    settings = BASE | CONFIGS[family] | {"tie_word_embeddings": family in TIED} | changes
    config = transformers.AutoConfig.for_model(family, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            # Norm weights away from 1, biases, sinks and correction biases away from 0.
            if tensor.dim() == 1:
                tensor.add_(0.3 * torch.randn_like(tensor))
            elif "router" in name or "gate.weight" in name:
                tensor.normal_(0.0, 0.5)
    model.eval().save_pretrained(folder)
    return model
