"""An adapter folded into its base model, in fp32: a model that needs no peft."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from lean_trl.config import Config
from lean_trl.model.config import read_config
from lean_trl.model.decoder import CausalLM
from lean_trl.model.loader import EMBEDDING, HEAD
from lean_trl.peft_config import PeftConfig
from lean_trl.techniques.adapter_reference import adapted
from lean_trl.techniques.adapters import Adapters, base_name
from lean_trl.techniques.trial import trial_batch


def merge_adapter(model: CausalLM, adapter: str | Path) -> tuple[CausalLM, float]:
    """(the merged model, the largest change of a logit, or of a reward, that the merging made).

    model: the base in fp32, used up. W + scale * B A is rounded in fp32, once. A head that was the
    embedding becomes a matrix of its own when the adapter is on the embedding alone.
    """
    assert all(p.dtype == torch.float32 for p in model.parameters()), "merging rounds in fp32"
    config = Config(peft=PeftConfig(adapter_path=str(adapter)))
    adapters = Adapters(config)
    adapters.on_model(model)
    model.eval()
    with torch.no_grad():
        before = _outputs(model, config)
        head = model.model.embed_tokens.weight.clone()  # what a tied head multiplies with
        for layer in adapted(model):
            if hasattr(layer, "merge"):
                layer.merge(safe_merge=True)
        weights = _merged(model, adapters.base_names)
        raw = dict(model.config.raw)
        if model.config.tied and not torch.equal(weights[EMBEDDING], head):
            raw["tie_word_embeddings"], weights[HEAD] = False, head
        merged = type(model)(read_config(raw), device="meta")
        merged.load_state_dict(weights, assign=True)
        merged.model.rotary_emb.to("cpu")
        change = (_outputs(merged.eval(), config) - before).abs().max().item()
    return merged, change


def _outputs(model: CausalLM, config: Config) -> Tensor:
    """Logits of the trial's tokens; rewards of a model that has them."""
    batch = trial_batch(config, model.config.vocab_size)
    reward = model(batch).reward
    return model.logits(model.hidden(batch)) if reward is None else reward


def _merged(model: CausalLM, names: set[str]) -> dict[str, Tensor]:
    """The base's weights by name; a module that was trained whole stands for the original."""
    state = model.state_dict()
    merged = {base_name(name): t for name, t in state.items() if base_name(name) in names}
    for name, tensor in state.items():
        before, found, after = name.partition(".modules_to_save.default.")
        if found:
            merged[f"{before}.{after}"] = tensor
    assert merged.keys() == names
    return merged
