"""Models small enough to work out by hand."""

import torch
from torch import nn

from lean_trl.types import Scores


class Table(nn.Module):
    """The log-prob of a token is a parameter chosen by its id; `log_sum_sq` is half of it."""

    def __init__(self, logprobs):
        super().__init__()
        self.logprobs = nn.Parameter(torch.as_tensor(logprobs).clone())

    def forward(self, batch, want=()):
        logprobs = self.logprobs[batch.targets]
        statistics = {"log_sum_sq": logprobs.detach() / 2} if "log_sum_sq" in want else {}
        return Scores(logprobs=logprobs, **statistics)


class RewardTable(nn.Module):
    """The reward of a sequence is a parameter chosen by the id of its last token."""

    def __init__(self, rewards):
        super().__init__()
        self.rewards = nn.Parameter(torch.as_tensor(rewards).clone())

    def forward(self, batch, want=()):
        reward = self.rewards[batch.input_ids[batch.last]]
        return Scores(logprobs=reward.new_zeros(0), reward=reward)
