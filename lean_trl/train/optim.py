"""The optimizer: which parameters decay, and torch's fused AdamW."""

from __future__ import annotations

from torch import nn
from torch.optim import AdamW, Optimizer

from lean_trl.config import TrainConfig


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Matrices and embeddings decay; vectors (norms, biases, sinks) do not. No frozen ones."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trained:
        raise ValueError("the model has no trainable parameter: nothing to optimise")
    groups = [
        {"params": [p for _, p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for _, p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, config: TrainConfig) -> Optimizer:
    """AdamW in one fused kernel: foreach holds about a copy of the parameters in temporaries."""
    return AdamW(
        parameter_groups(model, config.weight_decay),
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        fused=True,
    )


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    """The same rate for every group."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
