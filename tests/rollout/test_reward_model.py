"""A reward model as a reward: its score is that of one forward over the whole conversation."""

import pytest
import torch

from lean_trl.config import config_from_dict
from lean_trl.data.batch import build_batch
from lean_trl.data.tokenizer import load_tokenizer
from lean_trl.model.loader import load_model, save_model
from lean_trl.model.value_head import RewardModel
from lean_trl.rollout.judges import open_judges
from lean_trl.rollout.rewards import Questions
from lean_trl.train.distributed import World
from lean_trl.types import Example
from tests.train.golden import GOLDEN, model_folder

ALONE = World(0, 1, torch.device("cpu"), None)


def test_scores(tmp_path):
    base = model_folder("qwen3", tmp_path)
    folder = tmp_path / "judge"
    save_model(load_model(base, kind=RewardModel), folder)
    tokenizer = load_tokenizer(GOLDEN / "tokenizer")
    tokenizer.save(folder)
    config = config_from_dict(
        {
            "method": "grpo",
            "data": {"path": "rows.jsonl"},
            "rollout": {"reward_model_path": str(folder), "reward_funcs": "think_format"},
            "train": {"micro_batch_size": 2},
        }
    )
    judges = open_judges(config, tokenizer, ALONE)
    assert judges.names == ["think_format", "judge"]
    prompt = [{"role": "user", "content": "2 + 2?"}]
    said = [[{"role": "assistant", "content": text}] for text in ("4", "5", "I do not know")]
    asked = Questions([prompt, prompt, "plain: "], [*said[:2], "four"], [[1]] * 3, {})
    scores = judges.model.judge(asked)
    model = load_model(folder, kind=RewardModel)
    texts = [tokenizer.encode_chat(prompt + said[0]), tokenizer.encode("plain: four")]
    with torch.no_grad():
        alone = [model(build_batch([Example(ids)])).reward.item() for ids in texts]
    assert [scores[0], scores[2]] == pytest.approx(alone, abs=1e-5)
    assert len(set(scores)) == 3
