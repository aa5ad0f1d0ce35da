"""Adapters on disk, in peft's layout: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, cat
from torch.distributed.tensor import DTensor

from lean_trl.model.decoder import CausalLM
from lean_trl.model.safetensors_io import write_file
from lean_trl.techniques.adapters import ADAPTER, Adapters, base_name, peft_settings

PREFIX = "base_model.model."  # peft wraps a model twice


def adapter_weights(model: CausalLM, adapters: Adapters) -> dict[str, Tensor]:
    """{name: whole tensor on the CPU} of what peft added to the model. All ranks call it."""
    weights = {}
    for name, tensor in model.state_dict().items():
        if base_name(name) not in adapters.base_names:
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            weights[name] = whole.detach().cpu()
    for factor in ("vera_A", "vera_B"):  # shared by all layers, and once in the file
        shared = [tensor for name, tensor in weights.items() if f".{factor}." in name]
        if shared:
            weights[f"base_model.{factor}.{ADAPTER}"] = shared[0]
    return weights


def save_adapter(
    model: CausalLM, adapters: Adapters, weights: Mapping[str, Tensor], folder: str | Path
) -> None:
    """Write the adapter as peft does, so that transformers and peft load it over the base model.

    weights: of `adapter_weights`. An adapter that took a part out of the base when it started
    (PiSSA, OLoRA, ...) is written as the change since then, a LoRA of twice the rank, which goes
    with the base as it is on disk:  A' = [A; A_0], B' = [B, -B_0].
    """
    import peft

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    settings = peft_settings(model)
    if adapters.start:
        settings, weights = _as_change(settings, weights, adapters.start)
    tensors = peft.get_peft_model_state_dict(
        model, dict(weights), adapter_name=ADAPTER, save_embedding_layers=False
    )
    shared = [t for name, t in tensors.items() if name == "model.embed_tokens.weight"]
    if model.config.tied and shared:  # trained whole: peft wants to be told, and to have both
        settings = copy.copy(settings)
        settings.ensure_weight_tying = True
        tensors["lm_head.weight"] = shared[0].clone()
    file = folder / "adapter_model.safetensors"
    write_file(file, {_file_name(name): t.contiguous() for name, t in tensors.items()})
    settings = copy.copy(settings)
    settings.inference_mode = True
    settings.save_pretrained(str(folder))


def _file_name(name: str) -> str:
    return name if name.startswith("base_model.") else PREFIX + name


def _as_change(
    settings: Any, weights: Mapping[str, Tensor], start: Mapping[str, Tensor]
) -> tuple[Any, dict[str, Tensor]]:
    """Settings and weights of the LoRA that is the difference between now and the start."""
    changed = dict(weights)
    for name, first in start.items():
        if ".lora_A." in name or ".lora_embedding_A." in name:
            changed[name] = cat([weights[name], first.to(weights[name].dtype)], 0)
        elif ".lora_B." in name or ".lora_embedding_B." in name:
            changed[name] = cat([weights[name], -first.to(weights[name].dtype)], 1)
    settings = copy.copy(settings)
    factor = math.sqrt(2) if settings.use_rslora else 2
    settings.r, settings.lora_alpha = 2 * settings.r, factor * settings.lora_alpha
    settings.rank_pattern = {name: 2 * r for name, r in settings.rank_pattern.items()}
    settings.alpha_pattern = {name: factor * a for name, a in settings.alpha_pattern.items()}
    settings.init_lora_weights = True
    return settings, changed
