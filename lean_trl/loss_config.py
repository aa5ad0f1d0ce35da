"""The settings of the losses, which of them each method reads, and the checks across them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Literal

from pydantic import Field

from lean_trl.settings import Count, Fraction, NonNegative, Number, Positive, setting

Share = Annotated[float, Field(ge=0, le=1, description="number from 0 to 1")]

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
    beta: Positive = setting(0.1, "dpo, kto: strength of the pull to the reference")
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
    sync_ref_model: bool = setting(False, "dpo, kto: let the reference follow the policy")
    ref_model_sync_steps: Count = setting(512, "steps between two moves of the reference")
    ref_model_mixup_alpha: Share = setting(0.6, "reference <- alpha policy + (1 - alpha) reference")
    desirable_weight: NonNegative = setting(1.0, "kto: factor on desirable completions")
    undesirable_weight: NonNegative = setting(1.0, "kto: factor on undesirable completions")
    center_rewards_coefficient: NonNegative = setting(
        0.0, "reward: pulls the sum of a pair's rewards to 0; 0.01 is usual"
    )
    router_aux_loss_coef: NonNegative | None = setting(
        None, "weight of the experts' balancing loss; null: the model's own; 0: off"
    )
    disable_dropout: bool = setting(
        True, "run a model whose config asks for dropout without it; false refuses it"
    )


_REFERENCE = {
    "precompute_ref_log_probs",
    "sync_ref_model",
    "ref_model_sync_steps",
    "ref_model_mixup_alpha",
}
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
        if item.name not in read and getattr(loss, item.name) != item.default:
            yield f"loss.{item.name} has no effect on method {method}: leave it out"
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
