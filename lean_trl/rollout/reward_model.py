"""A reward model as one more reward, scored by the scorer that training uses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lean_trl.config import Config
from lean_trl.data.batch import build_batch
from lean_trl.data.hub import resolve_model
from lean_trl.data.tokenizer import Tokenizer, load_tokenizer
from lean_trl.model.decoder import CausalLM
from lean_trl.model.loader import load_model
from lean_trl.model.value_head import RewardModel
from lean_trl.rollout.rewards import Questions
from lean_trl.train.distributed import World
from lean_trl.types import Example


@dataclass
class ModelJudge:
    """Scores prompt and completion as the reward model's own tokenizer and template write them."""

    name: str
    model: CausalLM
    tokenizer: Tokenizer
    batch_size: int

    @torch.no_grad()
    def judge(self, questions: Questions) -> list[float]:
        """One score for each completion."""
        examples = [
            Example(np.array(self._ids(prompt, said)))
            for prompt, said in zip(questions.prompts, questions.completions, strict=True)
        ]
        device = next(self.model.parameters()).device
        scores = []
        for low in range(0, len(examples), self.batch_size):
            batch = build_batch(examples[low : low + self.batch_size], device=device)
            reward = self.model(batch).reward
            assert reward is not None
            scores.append(reward.cpu())
        return torch.cat(scores).tolist() if scores else []

    def _ids(self, prompt: object, said: object) -> list[int]:
        if isinstance(prompt, list) and isinstance(said, list):
            return self.tokenizer.encode_chat(prompt + said)
        return self.tokenizer.encode(f"{prompt}{said}")


def open_reward_model(path: str | None, config: Config, world: World) -> ModelJudge | None:
    """The model of rollout.reward_model_path, whole on every rank; None: none is asked for."""
    if path is None:
        return None
    folder = resolve_model(path)
    model = load_model(
        folder,
        dtype=config.model.dtype,
        device=world.device,
        attention=config.model.attention,
        kind=RewardModel,
    )
    model.requires_grad_(False).eval()
    name = Path(path).name
    return ModelJudge(name, model, load_tokenizer(folder), config.train.micro_batch_size)
