"""DPO, reward models and KTO against the numbers that TRL showed (tests/golden/README.md)."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lean_trl.config import Config, save_config
from lean_trl.train.loop import train

from .golden import GOLDEN, RECORDS, check_against_record, lines, recorded_config
from .test_golden_sft import SHAPES, torchrun

EIGHT = {"micro_batch_size": 8, "gradient_accumulation_steps": 1}
LOOSE = 1e-3  # TRL against itself in another batch shape differs by 1e-4 there

# record -> the loss settings that differ from loss_type as named
DPO: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "ipo": {},
    "hinge": {},
    "apo_zero": {},
    "robust": {"label_smoothing": 0.1},
    "sigmoid_norm": {},
    "aot_ga1": {"loss_type": "aot"},
    "aot_smoothed_ga1": {"loss_type": "aot", "label_smoothing": 0.1},
    "aot_unpaired_ga1": {"loss_type": "aot_unpaired"},
    "exo_pair": {"label_smoothing": 1e-3},
    "nca_pair": {},
    "bco_pair": {},
    "sppo_hard": {},
    "apo_down": {},
    "discopop": {},
    "sft_ga1": {"loss_type": "sft"},
    "mpo_ga1": {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    "ld": {"loss_type": "sigmoid", "ld_alpha": 0.5},
    "wpo": {"loss_type": "sigmoid", "use_weighting": True},
    "forward_kl": {"loss_type": "sigmoid", "f_divergence_type": "forward_kl"},
    "js_divergence": {"loss_type": "sigmoid", "f_divergence_type": "js_divergence"},
    "alpha_divergence": {
        "loss_type": "sigmoid",
        "f_divergence_type": "alpha_divergence",
        "f_alpha_divergence_coef": 0.7,
    },
    "sync": {
        "loss_type": "sigmoid",
        "sync_ref_model": True,
        "ref_model_sync_steps": 2,
        "ref_model_mixup_alpha": 0.6,
    },
}
DIVERGENCES = ("forward_kl", "js_divergence", "alpha_divergence")
TOLERANCE = {name: LOOSE for name in ("sppo_hard", "discopop", *DIVERGENCES)}


def dpo_config(folder: Path, name: str, **changes: Any) -> Config:
    loss = {"loss_type": name, **DPO[name], **changes.pop("loss", {})}
    data = {"max_length": 256}
    return recorded_config(folder, "preference", method="dpo", data=data, loss=loss, **changes)


@pytest.mark.parametrize("name", DPO)
def test_recorded_dpo(name: str, tmp_path: Path) -> None:
    changes = dict(EIGHT) if name.endswith("ga1") else {}
    if name == "forward_kl":
        changes = {"learning_rate": 1e-5}
    train(dpo_config(tmp_path, name, train=changes))
    check_against_record(lines(tmp_path), f"dpo/{name}", TOLERANCE.get(name, 1e-4))


# The losses that need a statistic of the window, several terms, another unit or another reference.
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["aot_ga1", "aot_unpaired_ga1", "mpo_ga1", "sync"])
def test_the_same_window_in_another_shape(name: str, shape: str, tmp_path: Path) -> None:
    changes = dict(SHAPES[shape])
    if "max_tokens_per_micro_batch" in changes:
        changes["max_tokens_per_micro_batch"] = 600  # the longest pair has 501 tokens
    train(dpo_config(tmp_path, name, train=changes))
    check_against_record(lines(tmp_path), f"dpo/{name}")


def test_metrics_have_the_peers_names_and_numbers(tmp_path: Path) -> None:
    """Its means are over micro-batches, so only where a window is one of them."""
    train(dpo_config(tmp_path, "aot_ga1", train=EIGHT))
    names = ["rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"]
    names += ["logps/chosen", "logps/rejected", "entropy"]
    for line, entry in zip(lines(tmp_path), steps("dpo/aot_ga1"), strict=True):
        for name in names:
            assert line[name] == pytest.approx(entry[name], rel=1e-3, abs=1e-3), name


def steps(name: str) -> list[dict[str, Any]]:
    record = RECORDS[name]["log"]
    return [e for e in (record["log"] if isinstance(record, dict) else record) if "loss" in e]


def test_prompt_inside_chosen_and_rejected_of_a_chat(tmp_path: Path) -> None:
    train(recorded_config(tmp_path, "preference_chat", method="dpo", data={"max_length": 256}))
    check_against_record(lines(tmp_path), "dpo/chat")


def test_keep_end_cuts_each_side_by_itself(tmp_path: Path) -> None:
    data = {"max_length": 96, "truncation_mode": "keep_end"}
    train(recorded_config(tmp_path, "preference", method="dpo", data=data))
    check_against_record(lines(tmp_path), "dpo/keep_end")


def test_padded_batches_are_the_same_run(tmp_path: Path) -> None:
    config = dpo_config(tmp_path, "sigmoid", memory={"activation_checkpointing": False})
    padded = {"data": {"path": config.data.path, "max_length": 256, "padding_free": False}}
    train(recorded_config(tmp_path, "preference", method="dpo", **padded))
    check_against_record(lines(tmp_path), "dpo/sigmoid")
    assert lines(tmp_path)[0]["padding_fraction"] > 0.2


def test_a_reference_on_disk_is_the_same_run(tmp_path: Path) -> None:
    for _ in range(2):  # scored on the fly, then found
        shutil.rmtree(tmp_path / "out" / "checkpoints", ignore_errors=True)
        (tmp_path / "out" / "metrics.jsonl").unlink(missing_ok=True)
        train(dpo_config(tmp_path, "sigmoid", loss={"precompute_ref_log_probs": True}))
        check_against_record(lines(tmp_path), "dpo/sigmoid")
    with pytest.raises(ValueError, match="max_length was 256, is 128"):
        other = {"loss": {"precompute_ref_log_probs": True}, "data": {"max_length": 128}}
        never = {"checkpoint": {"export_hf": False, "resume": "never"}}
        train(recorded_config(tmp_path, "preference", method="dpo", **other, **never))


@pytest.mark.parametrize("precompute", [False, True])
def test_two_ranks(precompute: bool, tmp_path: Path) -> None:
    shape = {"micro_batch_size": 2, "gradient_accumulation_steps": None, "batch_size": 8}
    loss = {"precompute_ref_log_probs": precompute}
    name = "sigmoid" if precompute else "aot_unpaired_ga1"
    save_config(dpo_config(tmp_path, name, train=shape, loss=loss), tmp_path / "recipe.yaml")
    torchrun(2, tmp_path / "recipe.yaml")
    check_against_record(lines(tmp_path), f"dpo/{name}")


# -- reward models --


def classifier(folder: Path) -> Path:
    """The recorded start: the body of the tiny model and the record's score."""
    target = folder / "classifier"
    shutil.copytree(GOLDEN / "models" / "qwen3", target)
    shutil.copytree(GOLDEN / "tokenizer", target, dirs_exist_ok=True)
    weights = load_file(target / "model.safetensors")
    weights.pop("lm_head.weight", None)
    weights["score.weight"] = torch.tensor(RECORDS["reward/plain"]["log"]["score_weight"])
    save_file(weights, target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    config["architectures"] = ["Qwen3ForSequenceClassification"]
    config["num_labels"] = 1
    (target / "config.json").write_text(json.dumps(config))
    return target


def reward_config(folder: Path, **changes: Any) -> Config:
    data = {"max_length": 256}
    config = recorded_config(folder, "preference", method="reward", data=data, **changes)
    return replace(config, model=replace(config.model, path=str(classifier(folder))))


@pytest.mark.parametrize("shape", ["recorded", *SHAPES])
def test_recorded_reward(shape: str, tmp_path: Path) -> None:
    changes = dict(SHAPES.get(shape, {}))
    if "max_tokens_per_micro_batch" in changes:
        changes["max_tokens_per_micro_batch"] = 600
    train(reward_config(tmp_path, train=changes))
    check_against_record(lines(tmp_path), "reward/plain")


def test_reward_on_two_ranks(tmp_path: Path) -> None:
    shape = {"micro_batch_size": 4, "gradient_accumulation_steps": None, "batch_size": 8}
    save_config(reward_config(tmp_path, train=shape), tmp_path / "recipe.yaml")
    torchrun(2, tmp_path / "recipe.yaml")
    check_against_record(lines(tmp_path), "reward/plain")


# -- KTO --

KTO: dict[str, dict[str, Any]] = {
    "kto_ga1": {},
    "weighted_ga1": {"desirable_weight": 1.5, "undesirable_weight": 0.5},
    "apo_zero_unpaired": {"loss_type": "apo_zero_unpaired"},
}


def kto_config(folder: Path, name: str, shape: dict[str, Any]) -> Config:
    # Completions that max_length has cut go to other prompts as they are; the peer cuts afterwards.
    data = {"max_length": 512 if name == "weighted_ga1" else 256}
    return recorded_config(
        folder, "preference", method="kto", data=data, loss=KTO[name], train=shape
    )


@pytest.mark.parametrize("name", KTO)
def test_recorded_kto(name: str, tmp_path: Path) -> None:
    train(kto_config(tmp_path, name, EIGHT if name.endswith("ga1") else {}))
    check_against_record(lines(tmp_path), f"kto/{name}")
    if name.endswith("ga1"):
        for line, entry in zip(lines(tmp_path), steps(f"kto/{name}"), strict=True):
            assert line["kl"] == pytest.approx(entry["kl"], rel=1e-3, abs=1e-4)
            for key in ("rewards/chosen", "rewards/margins"):
                assert line[key] == pytest.approx(entry[key], abs=1e-3)


@pytest.mark.parametrize("shape", ["1x8", "3 of 8"])
def test_kto_in_another_shape(shape: str, tmp_path: Path) -> None:
    """The peer's KL depends on its micro-batches, ours on the window alone."""
    train(kto_config(tmp_path, "weighted_ga1", SHAPES[shape]))
    check_against_record(lines(tmp_path), "kto/weighted_ga1")


def test_kto_on_two_ranks(tmp_path: Path) -> None:
    shape = {"micro_batch_size": 4, "gradient_accumulation_steps": None, "batch_size": 8}
    save_config(kto_config(tmp_path, "kto_ga1", shape), tmp_path / "recipe.yaml")
    torchrun(2, tmp_path / "recipe.yaml")
    check_against_record(lines(tmp_path), "kto/kto_ga1")
