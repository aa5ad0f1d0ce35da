"""The rewards of the recorded GRPO runs."""


def reward_correct(correct, **columns):
    return correct


def reward_short(completion_ids, **columns):
    return [-len(ids) / 100 for ids in completion_ids]
