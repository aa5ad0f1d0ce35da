"""Settings of online methods: defaults by method, and mistakes with their way out."""

import pytest

from lean_trl.config import config_from_dict, load_config
from lean_trl.recipe import SettingsError


def config(**sections):
    tree = {"method": "grpo", "data": {"path": "rows.jsonl"}, "rollout": {"reward_funcs": "a.b"}}
    for name, value in sections.items():
        tree[name] = {**tree.get(name, {}), **value} if isinstance(value, dict) else value
    return config_from_dict(tree)


def test_defaults_by_method():
    grpo, rloo, pairs = (config(method=name) for name in ("grpo", "rloo", "online_dpo"))
    assert [c.rollout.num_generations for c in (grpo, rloo, pairs)] == [8, 2, 2]
    assert [c.rollout.max_completion_length for c in (grpo, rloo, pairs)] == [512, 512, 64]
    assert [c.rollout.temperature for c in (grpo, rloo, pairs)] == [1.0, 1.0, 0.9]
    assert [c.loss.beta for c in (grpo, rloo, pairs)] == [0.0, 0.05, 0.1]
    assert [c.loss.loss_type for c in (grpo, rloo, pairs)] == ["dapo", "rloo", "sigmoid"]


@pytest.mark.parametrize(
    "sections, answer",
    [
        ({"method": "sft"}, "rollout.reward_funcs has no effect on method sft"),
        ({"loss": {"loss_type": "gspo"}}, "expected one of dapo, grpo, bnpo"),
        ({"loss": {"loss_type": "luspo"}}, "needs loss.importance_sampling_level sequence"),
        ({"loss": {"importance_sampling_level": "sentence"}}, "expected token | sequence"),
        ({"loss": {"scale_rewards": "groups"}}, "did you mean group"),
        ({"loss": {"entropy_target": 0.3}}, "without loss.use_adaptive_entropy"),
        ({"loss": {"normalize_advantages": True}}, "has no effect on method grpo"),
        ({"loss": {"loss_type": "cispo", "delta": 4.0}}, "loss.delta has no effect on cispo"),
        ({"loss": {"importance_correction": {"mode": "token"}}}, "token_truncate"),
        (
            {"loss": {"importance_correction": {"clip_min": 3.0, "clip_max": 3.0}}},
            "clip_min 3.0 is not below",
        ),
        ({"rollout": {"num_generations": 1}}, "expected int >= 2"),
        ({"rollout": {"temperature": 0.0}}, "expected number > 0"),
        ({"rollout": {"engine": "replay"}}, "needs rollout.replay_path"),
        ({"rollout": {"replay_path": "x"}}, "without rollout.engine replay"),
        ({"rollout": {"reward_weights": [1.0, 2.0]}}, "2 weights for 1 rewards"),
        ({"rollout": {"reward_funcs": None}}, "no reward: set rollout.reward_funcs"),
        ({"rollout": {"task": "reasoning_gym:x"}}, "leave data.path out"),
        ({"method": "online_dpo", "rollout": {"num_generations": 4}}, "compares 2 completions"),
        ({"method": "online_dpo", "loss": {"beta": 0.0}}, "loss.beta: got 0"),
        ({"data": {"packing": True}}, "data.packing has no effect on method grpo"),
        ({"method": "rloo", "loss": {"reward_clip_range": [1.0]}}, "expected [lowest, highest]"),
    ],
)
def test_mistakes(sections, answer):
    with pytest.raises(SettingsError) as raised:
        config(**sections)
    assert answer in str(raised.value)


def test_a_nested_section_from_the_command_line():
    given = load_config(
        ["--method=grpo", "--loss.importance_correction.mode=token_mask", "--model.path=x"]
    )
    assert given.loss.importance_correction.mode == "token_mask"
    assert given.loss.importance_correction.clip_max == 3.0
