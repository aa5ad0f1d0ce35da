"""The settings of adapters: which peft method, where, and from what it starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

from lean_trl.loss_config import LossConfig
from lean_trl.settings import Count, Fraction, Positive, setting


@dataclass(frozen=True)
class PeftConfig:
    """The section's presence switches adapters on; what is null has peft's own default."""

    method: str = setting(
        "lora", "a method of peft that adapts linear layers: lora, ia3, vera, ..."
    )
    config: str | None = setting(None, "adapter_config.json, or its folder, with more settings")
    r: Count | None = setting(None, "rank")
    lora_alpha: Positive | None = setting(None, "the adapter is scaled by lora_alpha / r")
    lora_dropout: Fraction | None = setting(None, "share of the adapter's input that is dropped")
    target_modules: str | list[str] | None = setting(
        None, "names of modules, a regular expression, or all-linear; null: peft's for the family"
    )
    use_rslora: bool | None = setting(None, "scale by lora_alpha / sqrt(r)")
    use_dora: bool | None = setting(None, "learn the weights' norms apart from their directions")
    init_lora_weights: bool | str | None = setting(
        None, "true, gaussian, pissa, olora, loftq, ...: what the adapter starts from"
    )
    modules_to_save: list[str] | None = setting(None, "modules that are trained whole beside it")
    options: dict[str, Any] | None = setting(None, "any other setting of the method's peft config")
    adapter_path: str | None = setting(None, "go on from the adapter in this folder")


@dataclass(frozen=True)
class QuantizationConfig:
    """The section's presence stores the frozen base in few bits; it needs peft."""

    load_in_4bit: bool = setting(False, "4 bits a weight, in blocks of 64")
    load_in_8bit: bool = setting(False, "8 bits a weight, in rows")
    quant_type: Literal["nf4", "fp4"] = setting("nf4", "values of a 4-bit code")
    double_quant: bool = setting(False, "4 bits: keep the blocks' scales in 8 bits")


def quantization_contradictions(
    options: QuantizationConfig | None, peft: PeftConfig | None
) -> Iterator[str]:
    """What a base in few bits cannot be, or cannot do without."""
    if options is None:
        return
    if options.load_in_4bit == options.load_in_8bit:
        yield "quantization needs one of load_in_4bit and load_in_8bit"
    if options.load_in_8bit and options.double_quant:
        yield "quantization.double_quant is for 4 bits: leave it out"
    if peft is None:
        yield "quantization freezes the base, so something else must be trained: set peft"
    elif isinstance(peft.init_lora_weights, str) and peft.init_lora_weights not in (
        "gaussian",
        "eva",
        "orthogonal",
    ):
        yield (
            f"peft.init_lora_weights {peft.init_lora_weights} takes a part out of the base, which "
            "quantization has fixed: leave one of them out"
        )


def peft_contradictions(
    peft: PeftConfig | None, loss: LossConfig, ref_path: str | None
) -> Iterator[str]:
    """What adapters cannot be combined with."""
    if peft is None:
        return
    if loss.precompute_ref_log_probs and peft.adapter_path and ref_path is None:
        yield (
            "loss.precompute_ref_log_probs scores with the base model, but the reference is the "
            "adapter of peft.adapter_path too: set it false, which costs no second model"
        )
    if loss.sync_ref_model:
        yield (
            "loss.sync_ref_model mixes weights of policy and reference, and a mix of two adapters "
            "is no mix of the weights they stand for: leave out peft or loss.sync_ref_model"
        )
    if peft.adapter_path:
        other = [
            f"peft.{item.name}"
            for item in fields(peft)
            if item.name not in ("method", "adapter_path") and getattr(peft, item.name) is not None
        ]
        if other or peft.method != "lora":
            yield (
                f"peft.adapter_path brings its own settings: leave out "
                f"{' and '.join(other) or 'peft.method'}"
            )
