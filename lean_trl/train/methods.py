"""The table of methods: a row is an objective of about a dozen lines over a loss family.

Adding a method touches this table and one file in `losses/`; the step stays as it is.
"""

from __future__ import annotations

from lean_trl.loss_config import LossConfig
from lean_trl.losses import sft_loss
from lean_trl.train.online import GRPO, ONLINE_DPO, RLOO
from lean_trl.train.preference import DPO, KTO, REWARD
from lean_trl.types import Batch, LossTerms, Method, Metric, Scores, Term


def token_metrics(scores: Scores) -> dict[str, Metric]:
    """What every method logs of its scored tokens: means over tokens."""
    metrics = {}
    if scores.entropy is not None:
        metrics["entropy"] = Metric(scores.entropy)
    if scores.top1 is not None:
        metrics["mean_token_accuracy"] = Metric(scores.top1.float())
    return metrics


def sft_objective(scores: Scores, batch: Batch, loss: LossConfig) -> LossTerms:
    """Mean loss of the scored tokens of the window."""
    name = loss.loss_type or "nll"
    assert isinstance(name, str)
    values = sft_loss(scores.logprobs, loss_type=name)
    return LossTerms((Term(values, None, "tokens"),), token_metrics(scores))


METHODS: dict[str, Method] = {
    "sft": Method(
        "sft", unit="tokens", examples="sft", objective=sft_objective, want=("entropy", "top1")
    ),
    "dpo": DPO,
    "reward": REWARD,
    "kto": KTO,
    "grpo": GRPO,
    "rloo": RLOO,
    "online_dpo": ONLINE_DPO,
}
