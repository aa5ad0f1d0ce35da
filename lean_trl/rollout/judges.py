"""All that gives a generation its rewards: functions, a task, a reward model, or a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lean_trl.config import Config
from lean_trl.data.tokenizer import Tokenizer
from lean_trl.rollout.buffer import Rollout
from lean_trl.rollout.engine import Completion
from lean_trl.rollout.prompts import Prompt, column_values
from lean_trl.rollout.reward_model import ModelJudge, open_reward_model
from lean_trl.rollout.rewards import Questions, Reward, Scoring, find_rewards
from lean_trl.rollout_config import reward_names
from lean_trl.train.distributed import World
from lean_trl.train.gather import gather_columns


@dataclass
class Judges:
    """The rewards of a run, in the order of their columns."""

    tokenizer: Tokenizer
    functions: list[Reward]
    model: ModelJudge | None
    recorded: bool  # no function is named: the replayed file brings the rewards
    weights: list[float] | None
    timeout_s: float | None

    @property
    def names(self) -> list[str]:
        """What metrics call them."""
        names = [reward.name for reward in self.functions]
        return names + ([self.model.name] if self.model else []) + ["recorded"] * self.recorded

    def start(
        self,
        rollouts: Sequence[Rollout],
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
    ) -> Pending:
        """Begin to judge this rank's completions; the trainer goes on meanwhile."""
        rows = [
            {**prompt.columns, **completion.columns}
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        said = [
            _said(self.tokenizer.decode(r.completion_ids, skip_special_tokens=True), prompt.text)
            for r, prompt in zip(rollouts, prompts, strict=True)
        ]
        questions = Questions(
            [prompt.text for prompt in prompts],
            said,
            [r.completion_ids.tolist() for r in rollouts],
            column_values(rows),
        )
        recorded = [_recorded(row) for row in rows] if self.recorded else None
        scoring = Scoring(self.functions if rollouts else [], questions, self.timeout_s)
        return Pending(self, scoring, questions, [r.group for r in rollouts], recorded)


@dataclass
class Pending:
    """Rewards under way."""

    judges: Judges
    scoring: Scoring
    questions: Questions
    groups: list[int]
    recorded: list[float] | None

    def gather(self, group: dist.ProcessGroup | None) -> tuple[np.ndarray, list[str]]:
        """(rewards fp32 [N, K] of all ranks, ordered by group as `exchange` orders, problems here).

        Waits for the functions.
        """
        verdicts = self.scoring.result()
        columns = [verdicts.rewards] if self.groups else []
        count = len(self.questions)
        if self.judges.model is not None:
            scores = self.judges.model.judge(self.questions) if count else []
            columns.append(np.array(scores, np.float32).reshape(count, 1))
        if self.recorded is not None:
            columns.append(np.array(self.recorded, np.float32).reshape(count, 1))
        width = len(self.judges.names)
        mine = np.concatenate(columns, 1) if count else np.zeros((0, width), np.float32)
        values, _ = gather_columns(torch.from_numpy(np.ascontiguousarray(mine.T)), group)
        groups, _ = gather_columns(torch.tensor(self.groups, dtype=torch.int64)[None], group)
        order = np.argsort(groups[0].numpy(), kind="stable")
        return values.numpy().T[order], verdicts.problems


def open_judges(
    config: Config, tokenizer: Tokenizer, world: World, more: Sequence[Reward] = ()
) -> Judges:
    """The rewards that the settings name, then `more`.

    Raises ValueError for one that cannot be found.
    """
    rollout = config.rollout
    names = reward_names(rollout)
    asked = bool(names or rollout.reward_model_path or rollout.task)
    replayed = rollout.engine == "replay"
    if not asked and not replayed and config.data.path is None:
        names = ["right_answer"]  # the built-in problems
    functions = [*find_rewards(names, rollout.max_completion_length), *more]
    model = open_reward_model(rollout.reward_model_path, config, world)
    recorded = replayed and not asked
    weights = rollout.reward_weights
    return Judges(tokenizer, functions, model, recorded, weights, rollout.reward_timeout_s)


def _said(text: str, prompt: Any) -> Any:
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def _recorded(row: dict[str, Any]) -> float:
    """The sum of the rewards that a line of completions holds; NaN for none."""
    rewards = row.get("rewards")
    if not isinstance(rewards, dict):
        raise ValueError(
            "the replayed file has no rewards: name rollout.reward_funcs, or replay a file that "
            "log_completions wrote"
        )
    known = [value for value in rewards.values() if value is not None]
    return float(sum(known)) if known else float("nan")
