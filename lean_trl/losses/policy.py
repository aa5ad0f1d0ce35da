"""Policy-gradient losses: what each sampled token costs. U scored tokens, S completions.

w = exp(logprobs - old_logprobs) is the ratio between the policy and itself when it sampled; A the
advantage of the completion.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lean_trl.losses.reduce import segment_ids

LEVELS = ("token", "sequence")
VESPO_LOG_RANGE = (math.log(1e-8), 20.0)  # what the logarithm of a sequence's ratio is clamped to


@dataclass(frozen=True)
class Policy:
    """What a policy loss looks at. All tensors are fp [U]; advantages carry no gradient."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor  # each token has its completion's
    ratio: Tensor  # w, of the token or of its completion
    sequence_ids: Tensor | None = None  # int64 [U]
    num_sequences: int = 0
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    log_importance: Tensor | None = None  # log of engine's correction of each token, see vespo


def clip(p: Policy) -> Tensor:
    """-min(min(w, delta) A, clip(w, 1 - epsilon, 1 + epsilon_high) A).

    Schulman et al., "Proximal Policy Optimization" (arXiv 1707.06347), equation 7; epsilon_high of
    Yu et al., "DAPO" (arXiv 2503.14476), section 3.1; delta of INTELLECT-2 (arXiv 2505.07291). With
    w of the completion it is GSPO (Zheng et al., arXiv 2507.18071, equation 5).
    """
    free = p.ratio if p.delta is None else p.ratio.clamp(max=p.delta)
    bounded = p.ratio.clamp(1 - p.epsilon, 1 + p.epsilon_high)
    return -torch.minimum(free * p.advantages, bounded * p.advantages)


def cispo(p: Policy) -> Tensor:
    """-sg(min(w, epsilon_high)) A log p: the weight is clipped, never the gradient.

    MiniMax-M1 (arXiv 2506.13585), equation 4. epsilon_high is the cap itself here: 5 is usual.
    """
    return -p.ratio.detach().clamp(max=p.epsilon_high) * p.advantages * p.logprobs


def sapo(p: Policy) -> Tensor:
    """-A sigmoid(t (w - 1)) 4 / t, t the temperature of the advantage's sign: a soft clip.

    Gao et al., "Soft Adaptive Policy Optimization" (arXiv 2511.20347).
    """
    t = _pick(p.advantages > 0, p.sapo_temperature_pos, p.sapo_temperature_neg, p.ratio)
    return -p.advantages * torch.sigmoid(t * (p.ratio - 1)) * 4 / t


def vespo(p: Policy) -> Tensor:
    """-sg(phi) A log p with phi = exp(lambda + k log W - lambda W), W the completion's whole ratio
    and k, lambda those of the advantage's sign.

    "VESPO: Variational Sequence-Level Soft Policy Optimization" (arXiv 2602.10693).
    """
    assert p.sequence_ids is not None
    log_ratio = (p.logprobs - p.old_logprobs).detach().clamp(-20, 20)
    if p.log_importance is not None:
        log_ratio = log_ratio + p.log_importance.clamp(*VESPO_LOG_RANGE)
    total = log_ratio.new_zeros(p.num_sequences).index_add(0, p.sequence_ids, log_ratio)
    log_w = total.clamp(*VESPO_LOG_RANGE)[p.sequence_ids]
    positive = p.advantages >= 0
    k = _pick(positive, p.vespo_k_pos, p.vespo_k_neg, log_w)
    rate = _pick(positive, p.vespo_lambda_pos, p.vespo_lambda_neg, log_w)
    phi = torch.exp(rate + k * log_w - rate * log_w.exp())
    return -phi.nan_to_num(0.0, 0.0, 0.0) * p.advantages * p.logprobs


POLICY_LOSSES: dict[str, Callable[[Policy], Tensor]] = {
    "clip": clip,
    "cispo": cispo,
    "sapo": sapo,
    "vespo": vespo,
}
CISPO_CAP = 5.0  # epsilon_high of cispo where none is given: 0.2 would scale every gradient by 0.2


def policy_ratio(
    logprobs: Tensor,
    old_logprobs: Tensor,
    *,
    level: str = "token",
    sequence_ids: Tensor | None = None,
    num_sequences: int = 0,
) -> Tensor:
    """w of each token [U]; level sequence: exp of the completion's mean log-ratio, for all of it.

    >>> log_ratios = torch.tensor([0.5, 0.0, 0.25])
    >>> ids = torch.tensor([0, 0, 1])
    >>> policy_ratio(log_ratios, torch.zeros(3), level="sequence", sequence_ids=ids,
    ...              num_sequences=2)
    tensor([1.2840, 1.2840, 1.2840])
    """
    log_ratio = logprobs - old_logprobs
    if level == "token":
        return log_ratio.exp()
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}, got {level!r}")
    if sequence_ids is None:
        raise ValueError("level 'sequence' needs sequence_ids, the completion of each token")
    zeros = log_ratio.new_zeros(num_sequences)
    sums = zeros.index_add(0, sequence_ids, log_ratio)
    counts = zeros.detach().index_add(0, sequence_ids, torch.ones_like(log_ratio))
    return (sums / counts.clamp(min=1)).exp()[sequence_ids]


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    kind: str = "clip",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    sequence_ids: Tensor | None = None,
    level: str = "token",
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
    log_importance: Tensor | None = None,
) -> Tensor:
    """Loss of each scored token, unreduced: fp [U] -> [U]. `policy_weights` says how to add up.

    logprobs, old_logprobs: of the sampled tokens in nats, both at the temperature that they were
    sampled with; old_logprobs carry no gradient. advantages: fp [U], or fp [S] with sequence_ids.
    kind: a key of POLICY_LOSSES. sequence_ids: int64 [U], the completion of each token. level:
    token, or sequence for the ratio of the whole completion (GSPO). epsilon_high: None is epsilon,
    for cispo 5. log_importance: fp [U], only read by vespo.

    >>> old = torch.zeros(4)
    >>> ratios = torch.tensor([1.5, 1.5, 0.5, 0.5])
    >>> policy_loss(ratios.log(), old, torch.tensor([1.0, -1.0, -1.0, 1.0]))
    tensor([-1.2000,  1.5000,  0.8000, -0.5000])

    Raises ValueError for an unknown kind or level and for misshapen inputs.
    """
    if kind not in POLICY_LOSSES:
        raise ValueError(f"kind must be one of {', '.join(POLICY_LOSSES)}, got {kind!r}")
    if kind == "vespo" and sequence_ids is None:
        raise ValueError("vespo needs sequence_ids, the completion of each token")
    wanted = logprobs.shape if sequence_ids is None else sequence_ids.shape
    per_token = advantages if sequence_ids is None else advantages[sequence_ids]
    shapes = [tuple(t.shape) for t in (logprobs, old_logprobs, per_token)]
    if logprobs.ndim != 1 or set(shapes) != {tuple(wanted)}:
        raise ValueError(
            "expected logprobs and old_logprobs of shape [U] and advantages [U], or [S] with "
            f"sequence_ids [U], got shapes {[tuple(logprobs.shape), tuple(old_logprobs.shape)]} "
            f"and {tuple(advantages.shape)}"
        )
    if epsilon_high is None:
        epsilon_high = CISPO_CAP if kind == "cispo" else epsilon
    logprobs, old_logprobs = _at_least_fp32(logprobs), _at_least_fp32(old_logprobs)
    ratio = policy_ratio(
        logprobs,
        old_logprobs,
        level=level,
        sequence_ids=sequence_ids,
        num_sequences=len(advantages),
    )
    return POLICY_LOSSES[kind](
        Policy(
            logprobs,
            old_logprobs,
            per_token.to(logprobs.dtype),
            ratio,
            sequence_ids,
            len(advantages),
            epsilon,
            epsilon_high,
            delta,
            sapo_temperature_pos,
            sapo_temperature_neg,
            vespo_k_pos,
            vespo_lambda_pos,
            vespo_k_neg,
            vespo_lambda_neg,
            log_importance,
        )
    )


def rloo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    cu_units: Tensor,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
) -> Tensor:
    """-min(w A, clip(w, 1 - epsilon, 1 + epsilon_high) A) of each completion: [U] -> [S].

    w is the ratio of the whole completion, exp of its summed log-ratio. Ahmadian et al.
    (arXiv 2402.14740), section 2.3, with the clipping of PPO for samples that are used again.
    Divide the sum by the completions of the whole optimizer step.

    cu_units: int [S + 1]; tokens of completion s are [cu_units[s], cu_units[s + 1]).

    >>> rloo_loss(torch.tensor([0.1, 0.2, 0.0]), torch.zeros(3), torch.tensor([1.0, -2.0]),
    ...           torch.tensor([0, 2, 3]))
    tensor([-1.2000,  2.0000])
    """
    logprobs, old_logprobs = _at_least_fp32(logprobs), _at_least_fp32(old_logprobs)
    ids = segment_ids(cu_units, logprobs.shape[0])
    sums = logprobs.new_zeros(len(cu_units) - 1).index_add(0, ids, logprobs - old_logprobs)
    high = epsilon if epsilon_high is None else epsilon_high
    advantages = advantages.to(logprobs.dtype)
    return clip(Policy(logprobs, old_logprobs, advantages, sums.exp(), None, 0, epsilon, high))


def kl(logprobs: Tensor, ref_logprobs: Tensor, estimator: str = "k3") -> Tensor:
    """An estimate of KL(policy || reference) from each sampled token: fp [U] -> [U].

    With d = log p - log p_ref: k1 = d, k2 = d^2 / 2, k3 = exp(-d) + d - 1. Schulman, "Approximating
    KL divergence" (joschu.net/blog/kl-approx.html, 2020). All are right in the mean of the value;
    the gradient of k1 is 0 in the mean, and only k3 times the ratio w has the gradient of the KL.

    >>> kl(torch.tensor([-1.0]), torch.tensor([-1.5]))
    tensor([0.1065])

    Raises ValueError for an unknown estimator.
    """
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"estimator must be one of {', '.join(KL_ESTIMATORS)}, got {estimator!r}")
    return KL_ESTIMATORS[estimator](_at_least_fp32(logprobs) - _at_least_fp32(ref_logprobs))


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: d,
    "k2": lambda d: d.square() / 2,
    "k3": lambda d: torch.expm1(-d) + d,
}


def _pick(condition: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """torch.where of two numbers would be fp32 whatever the rest is."""
    return torch.where(condition, like.new_full((), yes), like.new_full((), no))


def _at_least_fp32(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
