"""The settings of the losses, which of them each method reads, and the checks across them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

from lean_trl.rollout_config import ImportanceCorrection
from lean_trl.settings import (
    Count,
    Fraction,
    NonNegative,
    Number,
    Positive,
    Share,
    is_default,
    setting,
)

# method -> names of its losses; the first is the default
LOSS_TYPES: dict[str, tuple[str, ...]] = {
    "sft": ("nll", "dft"),
    "dpo": (
        *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard"),
        *("aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sigmoid_norm"),
        *("sft", "simpo", "cpo", "orpo"),
    ),
    "reward": ("bradley_terry",),
    "kto": ("kto", "apo_zero_unpaired"),
    "grpo": ("dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"),
    "rloo": ("rloo",),
    "online_dpo": ("sigmoid", "ipo"),
}


@dataclass(frozen=True)
class LossConfig:
    loss_type: str | list[str] = setting(
        None,
        "name of the loss; dpo: or a list of names",
        per_method={method: names[0] for method, names in LOSS_TYPES.items()},
    )
    loss_weights: list[Number] | None = setting(
        None, "dpo: weight of each loss of the list; null: 1 each"
    )
    beta: NonNegative = setting(
        None,
        "strength of the pull to the reference; grpo, rloo: 0 loads none",
        per_method={method: 0.1 for method in LOSS_TYPES} | {"grpo": 0.0, "rloo": 0.05},
    )
    label_smoothing: Fraction = setting(0.0, "dpo: share of labels taken to be wrong")
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = (
        setting("reverse_kl", "dpo: what replaces the log-ratio")
    )
    f_alpha_divergence_coef: Number = setting(0.5, "dpo: alpha of alpha_divergence")
    ld_alpha: Share | None = setting(
        None, "dpo: weight of the tokens beyond the pair's shorter completion; null: 1"
    )
    use_weighting: bool = setting(False, "dpo: weigh pairs by how likely the policy would say them")
    discopop_tau: Share = setting(0.05, "dpo: temperature of discopop")
    simpo_gamma: Number = setting(0.5, "dpo: margin asked by simpo")
    cpo_alpha: NonNegative = setting(1.0, "dpo: weight of the likelihood in cpo")
    precompute_ref_log_probs: bool = setting(
        False, "dpo, kto: score all rows with the reference first, on disk, and train without it"
    )
    sync_ref_model: bool = setting(False, "let the reference follow the policy")
    ref_model_sync_steps: Count = setting(512, "steps between two moves of the reference")
    ref_model_mixup_alpha: Share = setting(0.6, "reference <- alpha policy + (1 - alpha) reference")
    desirable_weight: NonNegative = setting(1.0, "kto: factor on desirable completions")
    undesirable_weight: NonNegative = setting(1.0, "kto: factor on undesirable completions")
    center_rewards_coefficient: NonNegative = setting(
        0.0, "reward: pulls the sum of a pair's rewards to 0; 0.01 is usual"
    )
    epsilon: NonNegative = setting(0.2, "grpo, rloo: the ratio is clipped below 1 - epsilon")
    epsilon_high: NonNegative | None = setting(
        None, "and above 1 + epsilon_high; null: epsilon. cispo: the cap of the ratio; null: 5"
    )
    delta: Positive | None = setting(None, "grpo: cap of the ratio on the side that is not clipped")
    importance_sampling_level: Literal["token", "sequence"] = setting(
        "token", "grpo: the ratio of each token, or of the whole completion (GSPO)"
    )
    scale_rewards: Literal["group", "batch", "none"] = setting(
        "group", "grpo: whose standard deviation advantages are divided by"
    )
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = setting(
        "sum_then_normalize", "grpo: how several rewards become one advantage"
    )
    normalize_advantages: bool = setting(
        False, "rloo: advantages of a generation get mean 0 and deviation 1"
    )
    reward_clip_range: list[Number] | None = setting(
        None, "rloo: [lowest, highest] reward, before the KL is taken off"
    )
    missing_eos_penalty: NonNegative | None = setting(
        None, "online_dpo: taken off the reward of a completion that did not end"
    )
    mask_truncated_completions: bool = setting(
        False, "grpo, rloo: learn nothing from completions that were cut off"
    )
    off_policy_mask_threshold: Positive | None = setting(
        None, "grpo: leave out bad completions that the policy has moved away from by this much"
    )
    top_entropy_quantile: Share = setting(
        1.0, "grpo: learn from this share of the step's tokens, those of the highest entropy"
    )
    entropy_coef: NonNegative = setting(0.0, "grpo: weight of the entropy bonus")
    use_adaptive_entropy: bool = setting(
        False, "grpo: move entropy_coef until the entropy is entropy_target"
    )
    entropy_target: NonNegative = setting(0.2, "nats a token; the bonus works below it")
    entropy_coef_min: NonNegative = setting(0.0, "least adaptive entropy_coef")
    entropy_coef_max: NonNegative = setting(1.0, "largest adaptive entropy_coef")
    entropy_coef_delta: NonNegative = setting(0.005, "by which it moves in a step")
    kl_estimator: Literal["k1", "k2", "k3"] = setting("k3", "grpo: estimator of the KL")
    use_bias_correction_kl: bool = setting(
        True, "grpo: multiply the KL by the ratio, so that its gradient is the KL's"
    )
    importance_correction: ImportanceCorrection | None = setting(
        None, "grpo: weigh tokens by how trainer and engine differ; null: not"
    )
    sapo_temperature_pos: Positive = setting(1.0, "sapo: of positive advantages")
    sapo_temperature_neg: Positive = setting(1.05, "sapo: of the others")
    vespo_k_pos: NonNegative = setting(2.0, "vespo: power of the ratio, advantages >= 0")
    vespo_lambda_pos: NonNegative = setting(3.0, "vespo: decay, advantages >= 0")
    vespo_k_neg: NonNegative = setting(3.0, "vespo: power of the ratio, negative advantages")
    vespo_lambda_neg: NonNegative = setting(2.0, "vespo: decay, negative advantages")
    router_aux_loss_coef: NonNegative | None = setting(
        None, "weight of the experts' balancing loss; null: the model's own; 0: off"
    )
    disable_dropout: bool = setting(
        True, "run a model whose config asks for dropout without it; false refuses it"
    )


_MOVING = {"sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha"}
_REFERENCE = {"precompute_ref_log_probs", *_MOVING}
_ADAPTIVE = {"entropy_target", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta"}
# Which settings a method reads, beside those that all read.
_READ_BY_ALL = {"loss_type", "disable_dropout", "router_aux_loss_coef"}
_READ_BY = {
    "sft": set(),
    "dpo": {
        *("loss_weights", "beta", "label_smoothing", "f_divergence_type"),
        *("f_alpha_divergence_coef", "ld_alpha", "use_weighting", "discopop_tau"),
        *("simpo_gamma", "cpo_alpha"),
    }
    | _REFERENCE,
    "reward": {"center_rewards_coefficient"},
    "kto": {"beta", "desirable_weight", "undesirable_weight"} | _REFERENCE,
    "grpo": {
        *("beta", "epsilon", "epsilon_high", "delta", "importance_sampling_level"),
        *("scale_rewards", "multi_objective_aggregation", "mask_truncated_completions"),
        *("off_policy_mask_threshold", "top_entropy_quantile", "entropy_coef"),
        *("use_adaptive_entropy", "kl_estimator", "use_bias_correction_kl"),
        *("importance_correction", "sapo_temperature_pos", "sapo_temperature_neg"),
        *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
    }
    | _MOVING
    | _ADAPTIVE,
    "rloo": {
        *("beta", "epsilon", "epsilon_high", "normalize_advantages", "reward_clip_range"),
        "mask_truncated_completions",
    }
    | _MOVING,
    "online_dpo": {"beta", "missing_eos_penalty"} | _MOVING,
}


_CLIPPED = ("grpo", "bnpo", "dapo", "dr_grpo", "luspo")
# Settings that only some losses of their method read.
_READ_BY_LOSS = {
    "simpo_gamma": ("simpo",),
    "cpo_alpha": ("cpo",),
    "discopop_tau": ("discopop",),
    "epsilon": (*_CLIPPED, "rloo"),
    "epsilon_high": (*_CLIPPED, "cispo", "rloo"),
    "delta": _CLIPPED,
    "sapo_temperature_pos": ("sapo",),
    "sapo_temperature_neg": ("sapo",),
    "vespo_k_pos": ("vespo",),
    "vespo_lambda_pos": ("vespo",),
    "vespo_k_neg": ("vespo",),
    "vespo_lambda_neg": ("vespo",),
}


def loss_contradictions(loss: LossConfig, method: str) -> Iterator[str]:
    """What is wrong with the loss settings of a method, each with its way out."""
    known, given = LOSS_TYPES[method], loss.loss_type
    names = given if isinstance(given, list) else [given]
    if isinstance(given, list) and method != "dpo":
        yield f"loss.loss_type: method {method} takes one loss, got {given}: name one"
    for name in names:
        if name not in known:
            yield (
                f"loss.loss_type: got {name!r}, expected one of {', '.join(known)} "
                f"for method {method}"
            )
    if not names or len(set(names)) < len(names):
        yield f"loss.loss_type: expected different losses, at least one, got {given}"
    if loss.loss_weights is not None and len(loss.loss_weights) != len(names):
        yield (
            f"loss.loss_weights has {len(loss.loss_weights)} weights for {len(names)} losses: "
            "give one for each"
        )
    read = _READ_BY[method] | _READ_BY_ALL
    for item in fields(loss):
        if item.name not in read and not is_default(loss, item.name, method):
            yield f"loss.{item.name} has no effect on method {method}: leave it out"
    for name, readers in _READ_BY_LOSS.items():
        idle = name in read and not set(readers) & set(names)
        if idle and not is_default(loss, name, method):
            yield f"loss.{name} has no effect on {', '.join(names)}: leave it out"
    if loss.f_divergence_type != "alpha_divergence" and "f_alpha_divergence_coef" in read:
        if not is_default(loss, "f_alpha_divergence_coef", method):
            yield (
                "loss.f_alpha_divergence_coef has no effect on loss.f_divergence_type "
                f"{loss.f_divergence_type}: set that to alpha_divergence"
            )
    if method in ("dpo", "kto", "online_dpo") and loss.beta == 0:
        yield f"loss.beta: got 0, expected number > 0 for method {method}"
    yield from _online_contradictions(loss, method)
    if loss.sync_ref_model and loss.precompute_ref_log_probs:
        yield "loss.sync_ref_model moves the reference: set precompute_ref_log_probs false"
    if method == "kto" and loss.precompute_ref_log_probs and loss.loss_type == "kto":
        yield (
            "loss.precompute_ref_log_probs: kto scores completions of other rows too, which "
            "change with each epoch: set it false, or loss.loss_type apo_zero_unpaired"
        )
    if not loss.sync_ref_model:
        for name in ("ref_model_sync_steps", "ref_model_mixup_alpha"):
            default = next(item.default for item in fields(loss) if item.name == name)
            if getattr(loss, name) != default:
                yield f"loss.{name} has no effect without loss.sync_ref_model: set that to true"


def _online_contradictions(loss: LossConfig, method: str) -> Iterator[str]:
    clip_range = loss.reward_clip_range
    if clip_range is not None and (len(clip_range) != 2 or clip_range[0] >= clip_range[1]):
        yield f"loss.reward_clip_range: got {clip_range}, expected [lowest, highest]"
    if method in ("grpo", "rloo") and loss.sync_ref_model and loss.beta == 0:
        yield "loss.sync_ref_model moves a reference that loss.beta 0 does not load: set beta"
    if method == "grpo":
        yield from _grpo_contradictions(loss)


def _grpo_contradictions(loss: LossConfig) -> Iterator[str]:
    name, level = loss.loss_type, loss.importance_sampling_level
    if name == "luspo" and level != "sequence":
        yield "loss.loss_type luspo needs loss.importance_sampling_level sequence: set that"
    if name == "vespo" and level != "token":
        yield "loss.loss_type vespo takes the whole ratio itself: leave importance_sampling_level"
    correction = loss.importance_correction
    if name == "vespo" and correction is not None and not correction.mode.startswith("token"):
        yield "loss.importance_correction.mode: vespo needs token_truncate or token_mask"
    if correction is not None:
        low, high = correction.clip_min, correction.clip_max
        if correction.mode.endswith("truncate") and low is None and high is None:
            yield "loss.importance_correction truncates to no bound: set clip_min or clip_max"
        if low is not None and high is not None and low >= high:
            yield f"loss.importance_correction: clip_min {low} is not below clip_max {high}"
    if loss.top_entropy_quantile == 0:
        yield "loss.top_entropy_quantile: got 0, expected number > 0 and <= 1"
    if loss.entropy_coef_min > loss.entropy_coef_max:
        yield "loss.entropy_coef_min is above entropy_coef_max: lower it"
    if not loss.use_adaptive_entropy:
        for item in sorted(_ADAPTIVE):
            if not is_default(loss, item, "grpo"):
                yield f"loss.{item} has no effect without loss.use_adaptive_entropy: set it"
    for item in ("kl_estimator", "use_bias_correction_kl"):
        if loss.beta == 0 and not is_default(loss, item, "grpo"):
            yield f"loss.{item} has no effect while loss.beta is 0: leave it out, or set beta"
