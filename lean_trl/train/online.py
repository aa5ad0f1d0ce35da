"""Online methods as rows of METHODS: GRPO, RLOO and online DPO. Where their sequences, advantages
and log-probs of the past come from is the rollout feed's business.

U scored tokens, S completions, P pairs (2p chosen, 2p + 1 rejected).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lean_trl.loss_config import LossConfig
from lean_trl.losses import (
    entropy_threshold,
    kl,
    off_policy_mask,
    policy_loss,
    policy_ratio,
    policy_weights,
    rloo_loss,
    segment_sum,
)
from lean_trl.losses.grpo import grpo_row
from lean_trl.losses.pairs import logistic
from lean_trl.train.gather import gather_columns
from lean_trl.types import Batch, LossTerms, Method, Metric, Scores, Term

Score = Callable[[Batch], Scores]


# -- GRPO --


def grpo_objective(scores: Scores, batch: Batch, loss: LossConfig) -> LossTerms:
    """The policy loss with its masks, the pull to the reference and the entropy bonus."""
    assert isinstance(loss.loss_type, str)
    logprobs, advantages = scores.logprobs, batch.extras["advantages"]
    # Without old log-probs the weights that sampled are those of now: a ratio of exactly 1.
    old = batch.extras.get("old_logprobs", logprobs.detach())
    ids = batch.sequence_ids
    ratio = policy_ratio(
        logprobs,
        old,
        level=loss.importance_sampling_level,
        sequence_ids=ids,
        num_sequences=batch.num_sequences,
    )
    factor, entropy_mask = token_factors(scores, batch, old, loss)
    values = factor * _policy_values(logprobs, old, advantages, ids, batch, loss)
    metrics = {"policy_loss": Metric(values)} if loss.entropy_coef else {}
    if loss.beta:
        divergence = kl(logprobs, batch.extras["ref_logprobs"], loss.kl_estimator)
        if loss.use_bias_correction_kl:
            divergence = divergence * ratio
        metrics["kl"] = Metric(divergence)
        values = values + loss.beta * divergence
    weights, unit = policy_weights(
        loss.loss_type,
        batch.cu_units,
        max_completion_length=batch.max_completion_length,
        num_units=batch.num_units,
    )
    terms = [Term(values, weights, unit)]
    assert scores.entropy is not None
    metrics["entropy"] = Metric(scores.entropy)
    if loss.entropy_coef or loss.use_adaptive_entropy:
        coef = batch.extras["entropy_coef"]
        kept = entropy_mask
        if kept is not None:  # a mean over the tokens that are kept
            kept = kept / batch.extras["entropy_kept"].clamp(min=1e-8)
        terms.append(Term(-scores.entropy, kept, "tokens", coef))
        metrics["entropy_coef"] = Metric(coef.reshape(1), how="last")
    return LossTerms(
        tuple(terms), {**metrics, **ratio_metrics(ratio.detach(), advantages[ids], batch, loss)}
    )


def _policy_values(
    logprobs: Tensor, old: Tensor, advantages: Tensor, ids: Tensor, batch: Batch, loss: LossConfig
) -> Tensor:
    assert isinstance(loss.loss_type, str)
    kind = grpo_row(loss.loss_type).kind
    corrected = kind == "vespo" and loss.importance_correction is not None
    return policy_loss(
        logprobs,
        old,
        advantages,
        kind=kind,
        epsilon=loss.epsilon,
        epsilon_high=loss.epsilon_high,
        delta=loss.delta,
        sequence_ids=ids,
        level=loss.importance_sampling_level,
        sapo_temperature_pos=loss.sapo_temperature_pos,
        sapo_temperature_neg=loss.sapo_temperature_neg,
        vespo_k_pos=loss.vespo_k_pos,
        vespo_lambda_pos=loss.vespo_lambda_pos,
        vespo_k_neg=loss.vespo_k_neg,
        vespo_lambda_neg=loss.vespo_lambda_neg,
        log_importance=batch.extras["importance_weights"].log() if corrected else None,
    )


def token_factors(
    scores: Scores, batch: Batch, old: Tensor, loss: LossConfig
) -> tuple[Tensor, Tensor | None]:
    """(what each token's policy loss is multiplied by [U], the entropy mask [U] or None)."""
    factor = torch.ones_like(old)
    if loss.off_policy_mask_threshold is not None:
        factor = factor * off_policy_mask(
            scores.logprobs,
            batch.extras.get("sampled_logprobs", old),
            batch.extras["advantages"],
            batch.cu_units,
            loss.off_policy_mask_threshold,
        )
    mask = None
    if loss.top_entropy_quantile < 1:
        assert scores.entropy is not None
        mask = (scores.entropy.detach() >= batch.extras["entropy_threshold"]).float()
        factor = factor * mask
    # vespo has the correction in its sequence's ratio already.
    if loss.importance_correction is not None and loss.loss_type != "vespo":
        factor = factor * batch.extras["importance_weights"]
    return factor, mask


def ratio_metrics(
    ratio: Tensor, advantages: Tensor, batch: Batch, loss: LossConfig
) -> dict[str, Metric]:
    """How many tokens were clipped, over the window; min and max are of single completions."""
    if loss.loss_type == "cispo":
        cap = 5.0 if loss.epsilon_high is None else loss.epsilon_high
        return {"cispo_clip_ratio": Metric(((ratio > cap) & (advantages > 0)).float())}
    if loss.loss_type in ("sapo", "vespo"):
        return {}
    if loss.delta is not None:
        ratio = ratio.clamp(max=loss.delta)
    high_bound = loss.epsilon if loss.epsilon_high is None else loss.epsilon_high
    low = ((ratio < 1 - loss.epsilon) & (advantages < 0)).float()
    high = ((ratio > 1 + high_bound) & (advantages > 0)).float()
    return _clip_metrics(low, high, batch)


def _clip_metrics(low: Tensor, high: Tensor, batch: Batch) -> dict[str, Metric]:
    lengths = batch.cu_units.diff()
    shares = [segment_sum(t, batch.cu_units) / lengths.clamp(min=1) for t in (low, high)]
    present = (lengths > 0).float()
    return {
        "clip_ratio/low_mean": Metric(low),
        "clip_ratio/high_mean": Metric(high),
        "clip_ratio/region_mean": Metric(low + high),
        "clip_ratio/low_min": Metric(shares[0], present, how="min"),
        "clip_ratio/high_max": Metric(shares[1], present, how="max"),
    }


def grpo_statistics(loss: LossConfig) -> Callable[..., list[Batch]] | None:
    """The quantile of the window's entropies."""
    if loss.top_entropy_quantile >= 1:
        return None

    def statistics(
        score: Score, batches: Sequence[Batch], group: dist.ProcessGroup | None
    ) -> list[Batch]:
        entropies = []
        for batch in batches:
            entropy = score(batch).entropy
            assert entropy is not None
            entropies.append(entropy)
        window, _ = gather_columns(torch.cat(entropies)[None], group)
        threshold = entropy_threshold(window[0], loss.top_entropy_quantile)
        kept = (window[0] >= threshold).float().mean().nan_to_num(1.0)
        return [
            batch.with_extras(entropy_threshold=threshold, entropy_kept=kept) for batch in batches
        ]

    return statistics


# -- RLOO --


def rloo_objective(scores: Scores, batch: Batch, loss: LossConfig) -> LossTerms:
    """The clipped ratio of whole completions; the pull to the reference is in their rewards."""
    logprobs, advantages = scores.logprobs, batch.extras["advantages"]
    old = batch.extras.get("old_logprobs", logprobs.detach())
    values = rloo_loss(
        logprobs,
        old,
        advantages,
        batch.cu_units,
        epsilon=loss.epsilon,
        epsilon_high=loss.epsilon_high,
    )
    high_bound = loss.epsilon if loss.epsilon_high is None else loss.epsilon_high
    ratio = segment_sum((logprobs - old).detach(), batch.cu_units).exp()
    low = ((ratio < 1 - loss.epsilon) & (advantages < 0)).float()
    high = ((ratio > 1 + high_bound) & (advantages > 0)).float()
    assert scores.entropy is not None
    metrics = {
        "entropy": Metric(scores.entropy),
        "clip_ratio/low_mean": Metric(low),
        "clip_ratio/high_mean": Metric(high),
        "clip_ratio/region_mean": Metric(low + high),
        "clip_ratio/low_min": Metric(low, how="min"),
        "clip_ratio/high_max": Metric(high, how="max"),
    }
    if loss.beta:
        metrics["kl"] = Metric(old - batch.extras["ref_logprobs"])
    return LossTerms((Term(values, None, "sequences"),), metrics)


# -- online DPO --


def online_dpo_objective(scores: Scores, batch: Batch, loss: LossConfig) -> LossTerms:
    """The better of two completions against the other: sigmoid, or ipo over summed log-probs.

    Guo et al., "Direct Language Model Alignment from Online AI Feedback" (arXiv 2402.04792).
    """
    logps = segment_sum(scores.logprobs, batch.cu_units)
    log_ratio = logps - segment_sum(batch.extras["ref_logprobs"], batch.cu_units)
    chosen, rejected = log_ratio[0::2], log_ratio[1::2]
    margin = chosen - rejected
    if loss.loss_type == "ipo":
        values = (margin - 1 / (2 * loss.beta)).square()
    else:
        values = logistic(loss.beta * margin)
    detached = log_ratio.detach()
    penalty = -loss.beta * detached
    metrics = {
        "rewards/chosen": Metric(loss.beta * chosen),
        "rewards/rejected": Metric(loss.beta * rejected),
        "rewards/margins": Metric(loss.beta * margin),
        "rewards/accuracies": Metric((margin > 0).float()),
        "logps/chosen": Metric(logps[0::2]),
        "logps/rejected": Metric(logps[1::2]),
        "objective/kl": Metric(detached),
        "objective/entropy": Metric(-logps),
        "objective/non_score_reward": Metric(penalty),
        "objective/rlhf_reward": Metric(batch.extras["reward"] + penalty),
    }
    if scores.entropy is not None:
        metrics["entropy"] = Metric(scores.entropy)
    return LossTerms((Term(values, None, "pairs"),), metrics)


GRPO = Method(
    "grpo",
    unit="tokens",
    examples="prompt",
    objective=grpo_objective,
    want=("entropy",),
    reference=lambda loss: loss.beta > 0,
    window_statistics=grpo_statistics,
    rollout=True,
)
RLOO = Method(
    "rloo",
    unit="tokens",
    examples="prompt",
    objective=rloo_objective,
    want=("entropy",),
    reference=lambda loss: loss.beta > 0,
    rollout=True,
)
ONLINE_DPO = Method(
    "online_dpo",
    unit="pairs",
    examples="prompt",
    objective=online_dpo_objective,
    want=("entropy",),
    reference=True,
    rollout=True,
)
