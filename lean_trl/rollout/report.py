"""What a generation was like: numbers for metrics.jsonl under TRL's names."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lean_trl.rollout.buffer import Rollout


def generation_metrics(rollouts: Sequence[Rollout], names: Sequence[str]) -> dict[str, float]:
    """Of all completions of a generation, on all ranks; names of the K rewards."""
    lengths = np.array([len(r.completion_ids) for r in rollouts])
    ended = lengths[[not r.truncated for r in rollouts]]
    metrics = {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": 1 - len(ended) / len(lengths),
        "completions/mean_terminated_length": float(ended.mean()) if len(ended) else 0.0,
        "completions/min_terminated_length": float(ended.min()) if len(ended) else 0.0,
        "completions/max_terminated_length": float(ended.max()) if len(ended) else 0.0,
        "completions/learnt_ratio": float(np.mean([r.learnt for r in rollouts])),
    }
    for k, name in enumerate(names):
        values = np.array([r.rewards[k] for r in rollouts], np.float64)
        known = values[~np.isnan(values)]
        metrics[f"rewards/{name}/mean"] = _mean(known)
        metrics[f"rewards/{name}/std"] = _deviation(known)
        if len(known) < len(values):
            metrics[f"rewards/{name}/abstained"] = float(len(values) - len(known))
    totals = np.array([r.reward for r in rollouts])
    known = totals[~np.isnan(totals)]
    groups = np.array([r.group for r in rollouts])
    flat = [_deviation(_known(totals[groups == g])) < 1e-8 for g in np.unique(groups)]
    metrics |= {
        "reward": _mean(known),
        "reward_std": _deviation(known),
        "frac_reward_zero_std": float(np.mean(flat)),
    }
    return metrics | _sampling(rollouts)


def _sampling(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """How far the engine's log-probs are from the trainer's, where both are known."""
    both = [
        (r.sampled_logprobs[r.scored], r.extras["old_logprobs"])
        for r in rollouts
        if r.sampled_logprobs is not None and "old_logprobs" in r.extras
    ]
    if not both or not sum(len(a) for a, _ in both):
        return {}
    difference = np.concatenate([old.astype(np.float64) - sampled for sampled, old in both])
    metrics = {
        "sampling/sampling_logp_difference/mean": float(np.abs(difference).mean()),
        "sampling/sampling_logp_difference/max": float(np.abs(difference).max()),
    }
    weights = [r.extras["importance_weights"] for r in rollouts if "importance_weights" in r.extras]
    if weights and sum(map(len, weights)):
        ratio = np.concatenate(weights)
        metrics |= {
            "sampling/importance_sampling_ratio/min": float(ratio.min()),
            "sampling/importance_sampling_ratio/mean": float(ratio.mean()),
            "sampling/importance_sampling_ratio/max": float(ratio.max()),
        }
    return metrics


def pair_metrics(rollouts: Sequence[Rollout], pairs: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Of the completions that online DPO compares."""
    scores = np.array([[rollouts[a].reward, rollouts[b].reward] for a, b in pairs]).reshape(-1, 2)
    return {
        "objective/scores": _mean(scores.ravel()),
        "objective/scores_margin": _mean(scores[:, 0] - scores[:, 1]),
        "val/contain_eos_token": float(np.mean([not r.truncated for r in rollouts])),
        "pairs_not_compared": float(len(rollouts) // 2 - len(pairs)),
    }


def _known(values: np.ndarray) -> np.ndarray:
    return values[~np.isnan(values)]


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else float("nan")


def _deviation(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0
