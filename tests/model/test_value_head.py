"""Reward models: transformers' sequence classifier, in and out."""

import json
import math
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from lean_trl.data.batch import build_batch, filler_batch
from lean_trl.model import CausalLM, load_model, new_model, save_model
from lean_trl.model.value_head import NewHead, RewardModel
from lean_trl.types import Example

MODELS = Path(__file__).parents[1] / "golden" / "models"
ROWS = [[5, 6, 7, 8, 9], [11, 12], [13], [20, 21, 22, 23]]


def batch(**layout):
    return build_batch([Example(row, [False] * len(row)) for row in ROWS], **layout)


@pytest.mark.parametrize("name", ["qwen3", "llama3rope_tied"])
def test_saved_model_is_a_sequence_classifier_of_transformers(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    ours = load_model(MODELS / name, kind=partial(RewardModel, seed=3))
    ours.set_pad_id(0)
    save_model(ours, tmp_path)
    theirs, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path, output_loading_info=True, dtype=torch.float32
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    width = max(map(len, ROWS))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in ROWS])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ROWS])
    expected = theirs(input_ids=ids, attention_mask=mask).logits
    assert expected.shape == (4, 1)
    reward = ours(batch()).reward
    torch.testing.assert_close(reward, expected[:, 0], rtol=1e-5, atol=1e-5)
    again = load_model(tmp_path, kind=partial(RewardModel, seed=4))  # the seed is not needed now
    torch.testing.assert_close(again(batch()).reward, reward, rtol=0, atol=0)


def test_padding_changes_nothing_and_a_filler_has_no_reward():
    model = load_model(MODELS / "qwen3", kind=RewardModel)
    scores = model(batch())
    assert scores.reward.dtype == torch.float32 and scores.logprobs.shape == (0,)
    torch.testing.assert_close(model(batch(padding_free=False)).reward, scores.reward)
    torch.testing.assert_close(model(batch(pad_to_multiple_of=8)).reward, scores.reward)
    assert model(filler_batch()).reward.shape == (0,)


def test_only_the_last_token_is_read():
    model = load_model(MODELS / "qwen3", kind=RewardModel)
    model(batch()).reward[1].backward()
    assert torch.equal(
        model.model.embed_tokens.weight.grad.abs().sum(1).nonzero()[:, 0], torch.tensor(ROWS[1])
    )
    hidden = model.hidden(batch())
    torch.testing.assert_close(model.score.weight.grad[0], hidden[6])  # 5 + 2 tokens, the last


def test_a_new_head_has_the_spread_of_the_model_and_the_seed_decides():
    heads = [load_model(MODELS / "qwen3", kind=partial(RewardModel, seed=s)) for s in (0, 0, 1)]
    first, same, other = (head.score.weight for head in heads)
    assert torch.equal(first, same) and not torch.equal(first, other)
    std = heads[0].config.initializer_range
    assert first.std().item() == pytest.approx(std, rel=4 / math.sqrt(2 * first.numel()))
    body = load_model(MODELS / "qwen3")
    assert torch.equal(heads[0].model.embed_tokens.weight, body.model.embed_tokens.weight)


def test_a_head_is_filled_in_parts_as_it_is_whole():
    head = NewHead((3, 4), 0.5, seed=2)
    whole, part, none = torch.empty(12), torch.empty(8), torch.empty(0)
    head.copy_into(whole, "score.weight")
    head.copy_into(part, "score.weight", row=1)
    head.copy_into(none, "score.weight", row=3)
    assert torch.equal(part, whole[4:])


def test_new_model_from_a_config():
    raw = json.loads((MODELS / "qwen3" / "config.json").read_text())
    model = new_model(raw, seed=1, kind=RewardModel)
    assert model.lm_head is None and model.score.weight.shape == (1, raw["hidden_size"])
    assert model(batch()).reward.isfinite().all()


def test_classifiers_with_several_labels_and_language_models_of_classifiers_are_refused(tmp_path):
    ours = load_model(MODELS / "qwen3", kind=RewardModel)
    save_model(ours, tmp_path)
    with pytest.raises(ValueError, match="has score.weight"):
        load_model(tmp_path, kind=CausalLM)
    config = json.loads((tmp_path / "config.json").read_text())
    config["id2label"] = {"0": "bad", "1": "good"}
    two = tmp_path / "two"
    two.mkdir()
    shutil.copy(tmp_path / "model.safetensors", two)
    (two / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="2 labels: a reward model has one"):
        load_model(two, kind=RewardModel)
