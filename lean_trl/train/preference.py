"""Preference methods: DPO, reward modelling and KTO as rows of METHODS.

U scored tokens, S sequences (2p chosen, 2p + 1 rejected of pair p), P pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lean_trl.loss_config import LossConfig
from lean_trl.losses import (
    DPO_LOSSES,
    Pairs,
    dpo_loss,
    kl_estimate,
    kto_loss,
    reward_loss,
    segment_sum,
    shared_length_weights,
    wpo_weights,
)
from lean_trl.train.gather import gather_columns
from lean_trl.types import Batch, LossTerms, Method, Metric, Scores, Term

Score = Callable[[Batch], Scores]


# -- DPO --


def weighted_losses(loss: LossConfig) -> list[tuple[str, float]]:
    """(name, weight) of each loss of the sum."""
    names = loss.loss_type if isinstance(loss.loss_type, list) else [loss.loss_type]
    return list(zip(names, loss.loss_weights or [1.0] * len(names), strict=True))


def check_dpo(loss: LossConfig) -> None:
    """Refuse settings that no loss of the sum reads, and losses that cannot have them."""
    rows = {name: DPO_LOSSES[name] for name, _ in weighted_losses(loss)}
    for row in rows.values():  # a loss raises for a setting out of its range: ask before the run
        smoothing = loss.label_smoothing if row.smoothing else 0.0
        row.loss(Pairs.example(label_smoothing=smoothing, discopop_tau=loss.discopop_tau))
    if loss.label_smoothing and not any(row.smoothing for row in rows.values()):
        raise ValueError(f"loss.label_smoothing has no effect on {', '.join(rows)}: leave it out")
    if loss.f_divergence_type != "reverse_kl":
        without = [n for n, row in rows.items() if row.reference and not row.divergence]
        if without or not any(row.divergence for row in rows.values()):
            raise ValueError(
                f"loss.f_divergence_type {loss.f_divergence_type} does not go with "
                f"{', '.join(without or rows)}: leave it reverse_kl"
            )
    if loss.use_weighting and any(row.statistics for row in rows.values()):
        raise ValueError(
            "loss.use_weighting weighs pairs, but aot and aot_unpaired compare sorted values of "
            "all pairs: set it false"
        )
    if loss.ld_alpha is not None and not all(
        row.reference or row.unit == "chosen_tokens" for row in rows.values()
    ):
        raise ValueError("loss.ld_alpha is for losses with a reference: leave it out")


def pair_inputs(scores: Scores, batch: Batch, loss: LossConfig) -> dict[str, Any]:
    """The tensors that dpo_loss takes, from the scored tokens of a batch."""

    def sums(logprobs: Tensor) -> tuple[Tensor, Tensor]:
        if loss.ld_alpha is not None:
            logprobs = logprobs * shared_length_weights(
                batch.cu_units, batch.num_units, loss.ld_alpha
            )
        total = segment_sum(logprobs, batch.cu_units)
        return total[0::2], total[1::2]

    chosen, rejected = sums(scores.logprobs)
    inputs = {"chosen": chosen, "rejected": rejected}
    if "ref_logprobs" in batch.extras:
        inputs["ref_chosen"], inputs["ref_rejected"] = sums(batch.extras["ref_logprobs"])
    lengths = batch.cu_units.diff()
    inputs["chosen_lengths"], inputs["rejected_lengths"] = lengths[0::2], lengths[1::2]
    if loss.ld_alpha is not None:
        inputs["chosen_nll"] = -segment_sum(scores.logprobs, batch.cu_units)[0::2]
    return inputs


def dpo_objective(scores: Scores, batch: Batch, loss: LossConfig) -> LossTerms:
    """The weighted sum of the preference losses, each over its own unit."""
    inputs = pair_inputs(scores, batch, loss)
    weights = None
    if loss.use_weighting:
        assert scores.log_sum_sq is not None
        weights = wpo_weights(scores.logprobs, scores.log_sum_sq, batch.cu_units)
    terms, results = [], []
    for name, coef in weighted_losses(loss):
        row = DPO_LOSSES[name]
        result = dpo_loss(
            **inputs,
            loss_type=name,
            beta=loss.beta,
            label_smoothing=loss.label_smoothing if row.smoothing else 0.0,
            f_divergence_type=loss.f_divergence_type if row.divergence else "reverse_kl",
            f_alpha_divergence_coef=loss.f_alpha_divergence_coef,
            discopop_tau=loss.discopop_tau,
            simpo_gamma=loss.simpo_gamma,
            cpo_alpha=loss.cpo_alpha,
            matched=tuple(batch.extras[extra] for extra in _MATCHED.get(name, ())) or None,
        )
        terms.append(Term(result.losses, weights, row.unit, coef))
        results.append((not row.reference, result))
    # Rewards are log-ratios where any loss of the sum has them, wherever it stands in the list.
    _, shown = min(results, key=lambda item: item[0])
    rewards = shown.chosen_rewards, shown.rejected_rewards
    return LossTerms(tuple(terms), _dpo_metrics(scores, batch, *rewards))


def _dpo_metrics(
    scores: Scores, batch: Batch, chosen: Tensor, rejected: Tensor
) -> dict[str, Metric]:
    logps = segment_sum(scores.logprobs.detach(), batch.cu_units)
    metrics = {
        "rewards/chosen": Metric(chosen),
        "rewards/rejected": Metric(rejected),
        "rewards/accuracies": Metric((chosen > rejected).float()),  # a tie is no success
        "rewards/margins": Metric(chosen - rejected),
        "logps/chosen": Metric(logps[0::2]),
        "logps/rejected": Metric(logps[1::2]),
    }
    if scores.entropy is not None:
        metrics["entropy"] = Metric(scores.entropy)
    if scores.top1 is not None:
        of_chosen = (batch.sequence_ids % 2 == 0).float()
        metrics["mean_token_accuracy"] = Metric(scores.top1.float(), of_chosen)
    return metrics


# loss -> the extras that hold its statistics of the window
_MATCHED = {"aot": ("aot_ref_margin",), "aot_unpaired": ("aot_rejected", "aot_chosen")}


def dpo_statistics(loss: LossConfig) -> Callable[..., list[Batch]] | None:
    """Ranks over the window for the losses that compare sorted values; None for the others."""
    names = [name for name, _ in weighted_losses(loss) if DPO_LOSSES[name].statistics]
    if not names:
        return None

    def statistics(
        score: Score, batches: Sequence[Batch], group: dist.ProcessGroup | None
    ) -> list[Batch]:
        fields = ("chosen", "rejected", "ref_chosen", "ref_rejected")
        parts = [pair_inputs(score(batch), batch, loss) for batch in batches]
        mine = torch.stack([torch.cat([part[name] for part in parts]) for name in fields])
        window, first = gather_columns(mine, group)
        pairs = Pairs(*window)
        extras: dict[str, Sequence[Tensor]] = {}
        for name in names:
            compute = DPO_LOSSES[name].statistics
            assert compute is not None
            for extra, values in zip(_MATCHED[name], compute(pairs), strict=True):
                own = values[first : first + mine.shape[1]]
                extras[extra] = own.split([batch.num_pairs for batch in batches])
        return [
            batch.with_extras(**{name: values[i] for name, values in extras.items()})
            for i, batch in enumerate(batches)
        ]

    return statistics


def dpo_want(loss: LossConfig) -> tuple[str, ...]:
    """WPO weighs tokens by the whole distribution."""
    return ("entropy", "top1", "log_sum_sq") if loss.use_weighting else ("entropy", "top1")


def dpo_reference(loss: LossConfig) -> bool:
    """Reference-free losses load no reference."""
    return any(DPO_LOSSES[name].reference for name, _ in weighted_losses(loss))


# -- reward models --


def reward_objective(scores: Scores, batch: Batch, loss: LossConfig) -> LossTerms:
    """Bradley-Terry over the scores of each pair."""
    assert scores.reward is not None, "the model has no reward head"
    rewards = scores.reward
    chosen, rejected = rewards[0::2], rewards[1::2]
    margin = batch.extras.get("margin")
    values = reward_loss(chosen, rejected, margin, loss.center_rewards_coefficient)
    metrics = {
        "accuracy": Metric((chosen > rejected).float()),
        "margin": Metric(chosen - rejected),
        "mean_reward": Metric(rewards),
        "min_reward": Metric(rewards, how="min"),
        "max_reward": Metric(rewards, how="max"),
    }
    return LossTerms((Term(values, None, "pairs"),), metrics)


# -- KTO --


def kto_objective(scores: Scores, batch: Batch, loss: LossConfig) -> LossTerms:
    """KTO over single completions."""
    assert isinstance(loss.loss_type, str)
    labels = batch.extras["label"]
    logps = segment_sum(scores.logprobs, batch.cu_units)
    result = kto_loss(
        logps,
        segment_sum(batch.extras["ref_logprobs"], batch.cu_units),
        labels,
        batch.extras.get("kl"),
        loss_type=loss.loss_type,
        beta=loss.beta,
        desirable_weight=loss.desirable_weight,
        undesirable_weight=loss.undesirable_weight,
    )
    desirable, undesirable = labels.float(), (~labels).float()
    metrics = {
        "rewards/chosen": Metric(result.rewards, desirable),
        "rewards/rejected": Metric(result.rewards, undesirable),
        "rewards/margins": Metric(result.rewards, desirable - undesirable, how="contrast"),
        "logps/chosen": Metric(logps, desirable),
        "logps/rejected": Metric(logps, undesirable),
        # The rank of a desirable completion's reward is not known here: right means above 0.
        "rewards/accuracies": Metric(((result.rewards > 0) == labels).float()),
    }
    if "kl" in batch.extras:
        metrics["kl"] = Metric(batch.extras["kl"])
    if scores.entropy is not None:
        metrics["entropy"] = Metric(scores.entropy)
    return LossTerms((Term(result.losses, None, "sequences"),), metrics)


def kto_statistics(loss: LossConfig) -> Callable[..., list[Batch]] | None:
    """z0 from the mismatched completions of the window."""
    if loss.loss_type != "kto":
        return None

    def statistics(
        score: Score, batches: Sequence[Batch], group: dist.ProcessGroup | None
    ) -> list[Batch]:
        policy, reference = [], []
        for batch in batches:
            other = batch.mismatched
            assert other is not None, "KTO batches carry mismatched completions"
            policy.append(segment_sum(score(other).logprobs, other.cu_units))
            reference.append(segment_sum(other.extras["ref_logprobs"], other.cu_units))
        mine = torch.stack([torch.cat(policy), torch.cat(reference)])
        window, _ = gather_columns(mine, group)
        kl = kl_estimate(window[0], window[1])
        return [batch.with_extras(kl=kl.expand(batch.num_sequences)) for batch in batches]

    return statistics


DPO = Method(
    "dpo",
    unit="pairs",
    examples="preference",
    objective=dpo_objective,
    want=dpo_want,
    reference=dpo_reference,
    window_statistics=dpo_statistics,
    check=check_dpo,
)
REWARD = Method("reward", unit="pairs", examples="reward", objective=reward_objective)
KTO = Method(
    "kto",
    unit="sequences",
    examples="unpaired",
    objective=kto_objective,
    want=("entropy",),
    reference=True,
    window_statistics=kto_statistics,
)
