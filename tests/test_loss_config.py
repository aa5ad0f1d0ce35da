"""Settings of the losses: which of them a method reads, and what a wrong one is answered."""

import dataclasses

import pytest

from lean_trl.config import config_from_dict
from lean_trl.loss_config import LOSS_TYPES, LossConfig
from lean_trl.recipe import SettingsError
from lean_trl.train.methods import METHODS


def problems(method: str, **loss: object) -> list[str]:
    with pytest.raises(SettingsError) as raised:
        config_from_dict({"method": method, "loss": loss})
    return str(raised.value).split("\n")


@pytest.mark.parametrize("method", LOSS_TYPES)
def test_defaults_of_each_method_are_right_and_bind(method: str) -> None:
    config = config_from_dict({"method": method})
    assert config.loss.loss_type == LOSS_TYPES[method][0]
    assert METHODS[method].bind(config.loss).name == method


@pytest.mark.parametrize(
    ("method", "loss", "answer"),
    [
        ("dpo", {"loss_type": "sigmod"}, "loss.loss_type: got 'sigmod', expected one of sigmoid"),
        ("kto", {"loss_type": "sigmoid"}, "expected one of kto, apo_zero_unpaired for method kto"),
        ("kto", {"loss_type": ["kto"]}, "method kto takes one loss, got ['kto']: name one"),
        ("dpo", {"loss_type": []}, "expected different losses, at least one, got []"),
        ("dpo", {"loss_type": ["sft", "sft"]}, "expected different losses"),
        ("dpo", {"loss_weights": [1.0, 2.0]}, "loss.loss_weights has 2 weights for 1 losses"),
        ("sft", {"beta": 0.2}, "loss.beta has no effect on method sft: leave it out"),
        ("reward", {"label_smoothing": 0.1}, "loss.label_smoothing has no effect on method reward"),
        ("dpo", {"desirable_weight": 2.0}, "loss.desirable_weight has no effect on method dpo"),
        ("dpo", {"ref_model_sync_steps": 3}, "has no effect without loss.sync_ref_model"),
        (
            "dpo",
            {"sync_ref_model": True, "precompute_ref_log_probs": True},
            "loss.sync_ref_model moves the reference: set precompute_ref_log_probs false",
        ),
        ("kto", {"precompute_ref_log_probs": True}, "completions of other rows too"),
        ("dpo", {"beta": 0.0}, "loss.beta: got 0, expected number > 0 for method dpo"),
        ("dpo", {"ld_alpha": 1.5}, "loss.ld_alpha: got 1.5 (number), expected number from 0 to 1"),
        ("dpo", {"simpo_gamma": 1.0}, "loss.simpo_gamma has no effect on sigmoid: leave it out"),
        ("dpo", {"loss_type": ["sft", "simpo"], "cpo_alpha": 0.5}, "no effect on sft, simpo"),
        ("dpo", {"loss_type": "hinge", "discopop_tau": 0.5}, "no effect on hinge"),
        ("dpo", {"f_alpha_divergence_coef": 0.7}, "no effect on loss.f_divergence_type reverse_kl"),
        ("grpo", {"vespo_k_pos": 1.0}, "loss.vespo_k_pos has no effect on dapo"),
        ("grpo", {"loss_type": "cispo", "epsilon": 0.3}, "loss.epsilon has no effect on cispo"),
        ("grpo", {"loss_type": "sapo", "epsilon_high": 0.3}, "epsilon_high has no effect on sapo"),
        ("grpo", {"loss_type": "cispo", "delta": 2.0}, "loss.delta has no effect on cispo"),
        ("grpo", {"kl_estimator": "k1"}, "loss.kl_estimator has no effect while loss.beta is 0"),
        ("dpo", {"f_divergence_type": "kl"}, "expected reverse_kl | forward_kl"),
    ],
)
def test_one_wrong_setting_has_one_answer(method: str, loss: dict, answer: str) -> None:
    (problem,) = problems(method, **loss)
    assert answer in problem


def test_a_list_of_losses_is_read_with_its_weights() -> None:
    loss = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1, 0.5]}
    config = config_from_dict({"method": "dpo", "loss": loss})
    assert config.loss.loss_type == ["sigmoid", "sft"]
    assert config.loss.loss_weights == [1.0, 0.5]


def test_ref_path_is_for_methods_with_a_reference() -> None:
    with pytest.raises(SettingsError, match="model.ref_path has no effect on method reward"):
        config_from_dict({"method": "reward", "model": {"ref_path": "x"}})


def test_every_setting_of_a_loss_is_read_by_some_method() -> None:
    for item in dataclasses.fields(LossConfig):
        if item.default is None or item.name == "disable_dropout":
            continue
        changed = not item.default if isinstance(item.default, bool) else 0.25
        answers = []
        for method in LOSS_TYPES:
            try:
                config_from_dict({"method": method, "loss": {item.name: changed}})
            except SettingsError as error:
                answers.append(f"loss.{item.name} has no effect on method" in str(error))
            else:
                answers.append(False)
        assert not all(answers), item.name
