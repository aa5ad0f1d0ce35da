"""Reward models: a language model's body with one number for each sequence in place of logits.

The layout is transformers' sequence classifier with one label: the body under its own names and
`score.weight` [1, D], read at the last token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_trl.model.config import ModelConfig
from lean_trl.model.decoder import CausalLM
from lean_trl.model.kinds import Json
from lean_trl.types import Batch, Scores

SCORE, HEAD = "score.weight", "lm_head.weight"


class ScoreHead(nn.Module):
    """hidden [S, D] -> fp32 [S]."""

    def __init__(self, config: ModelConfig, **factory: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, config.hidden_size, **factory))

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight)[:, 0].float()


class RewardModel(CausalLM):
    """model(batch) -> Scores with `reward` fp32 [S], the score of each sequence's last token.

    There is no head over the vocabulary, so `logprobs` is empty. Filled from a sequence classifier
    with one label, or from a language model, whose head is left behind for a new one.
    seed: of the new head. Raises ValueError for a classifier with several labels.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        seed: int = 0,
        attention: str = "auto",
        **factory: Any,
    ) -> None:
        raw = classifier_config(config.raw, config.family.architecture)
        super().__init__(replace(config, raw=raw), attention=attention, **factory)
        self.seed = seed
        self.lm_head = None
        self.score = ScoreHead(config, **factory)

    def set_pad_id(self, pad_id: int | None) -> None:
        """What config.json will call padding: transformers reads the score before it."""
        self.config = replace(self.config, raw={**self.config.raw, "pad_token_id": pad_id})

    def adapt_files(self, stored: Mapping[str, Any]) -> Mapping[str, Any]:
        """Without a head over the vocabulary, and with a new score where there is none."""
        new = NewHead((1, self.config.hidden_size), self.config.initializer_range, self.seed)
        return {SCORE: new, **{name: tensor for name, tensor in stored.items() if name != HEAD}}

    def _score(
        self, hidden: Tensor, batch: Batch, want: Sequence[str], temperature: float | Tensor
    ) -> Scores:
        reward = self.score(hidden[batch.last])
        return Scores(logprobs=reward.new_zeros(0), reward=reward)


@dataclass(frozen=True)
class NewHead:
    """Stands for `score.weight` in files that have none: normal with the model's own spread."""

    shape: tuple[int, ...]
    std: float
    seed: int
    dtype: torch.dtype = torch.float32
    file: str = SCORE

    def copy_into(self, destination: Tensor, name: str, row: int = 0) -> None:
        """Fill `destination` with rows from `row` on; the same numbers on every device and rank."""
        generator = torch.Generator().manual_seed(self.seed)
        whole = torch.empty(self.shape).normal_(0.0, self.std, generator=generator)
        flat = destination.view(-1)
        flat.copy_(whole[row:].reshape(-1)[: flat.shape[0]])


def classifier_config(raw: Json, architecture: str) -> dict[str, Any]:
    """config.json of a sequence classifier with one label over the body that `raw` describes.

    >>> made = classifier_config({"model_type": "qwen3"}, "Qwen3ForCausalLM")
    >>> made["architectures"], made["id2label"]
    (['Qwen3ForSequenceClassification'], {'0': 'LABEL_0'})
    """
    labels = raw.get("num_labels") or len(raw.get("id2label") or [0])
    classifies = any("SequenceClassification" in name for name in raw.get("architectures") or ())
    if classifies and labels != 1:
        raise ValueError(f"config.json has {labels} labels: a reward model has one")
    body = architecture.removesuffix("ForCausalLM")
    return {
        **raw,
        "architectures": [f"{body}ForSequenceClassification"],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }
