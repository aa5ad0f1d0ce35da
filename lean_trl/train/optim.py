"""The optimizer: which parameters decay, and which algorithm keeps what of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer

from lean_trl.config import TrainConfig
from lean_trl.memory_config import InBackwardConfig
from lean_trl.train.adafactor import Adafactor
from lean_trl.train.compact import CODECS
from lean_trl.train.compact_adamw import CompactAdamW
from lean_trl.train.in_backward import InBackward
from lean_trl.train.muon import Muon

Groups = list[dict[str, Any]]


def parameter_groups(model: nn.Module, weight_decay: float) -> Groups:
    """Matrices and embeddings decay; vectors (norms, biases, sinks) do not. No frozen ones."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trained:
        raise ValueError("the model has no trainable parameter: nothing to optimise")
    groups = [
        {"params": [p for _, p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for _, p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _adamw(groups: Groups, config: TrainConfig, model: nn.Module) -> Optimizer:
    """AdamW in one fused kernel: foreach holds about a copy of the parameters in temporaries."""
    return AdamW(groups, **_adam_options(config), fused=True)


def _compact(groups: Groups, config: TrainConfig, model: nn.Module) -> Optimizer:
    return CompactAdamW(groups, CODECS[config.optimizer], **_adam_options(config))


def _adafactor(groups: Groups, config: TrainConfig, model: nn.Module) -> Optimizer:
    return Adafactor(groups, lr=config.learning_rate)


def _muon(groups: Groups, config: TrainConfig, model: nn.Module) -> Optimizer:
    of_blocks = {id(p) for name, p in model.named_parameters() if ".layers." in name}
    split = []
    for group in groups:
        for adamw in (False, True):
            chosen = [p for p in group["params"] if adamw != (p.ndim >= 2 and id(p) in of_blocks)]
            if chosen:
                split.append({**group, "params": chosen, "adamw": adamw})
    return Muon(split, **_adam_options(config))


def _adam_options(config: TrainConfig) -> dict[str, Any]:
    betas = (config.adam_beta1, config.adam_beta2)
    return {"lr": config.learning_rate, "betas": betas, "eps": config.adam_epsilon}


OPTIMIZERS: dict[str, Callable[[Groups, TrainConfig, nn.Module], Optimizer]] = {
    "adamw": _adamw,
    "adamw_bf16_sr": _compact,
    "adamw_8bit": _compact,
    "adamw_4bit": _compact,
    "adafactor": _adafactor,
    "muon": _muon,
}


def build_optimizer(
    model: nn.Module, config: TrainConfig, in_backward: InBackwardConfig | None = None
) -> Optimizer:
    """The optimizer of the settings over the model's trained parameters.

    in_backward: one for each parameter, which steps inside backward (train/in_backward.py).
    """
    groups, make = parameter_groups(model, config.weight_decay), OPTIMIZERS[config.optimizer]
    if in_backward is None:
        return make(groups, config, model)
    alone = [{**group, "params": [p]} for group in groups for p in group["params"]]
    return InBackward(
        {group["params"][0]: make([group], config, model) for group in alone}, in_backward.clip
    )


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    """The same rate for every group."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
