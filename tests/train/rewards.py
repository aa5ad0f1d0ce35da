"""The rewards of the recorded GRPO runs."""


def reward_correct(correct, **columns):
    return correct


def reward_short(completion_ids, **columns):
    return [-len(ids) / 100 for ids in completion_ids]


def reward_varied(completion_ids, **columns):
    """Differs between almost all completions: the share of even ids."""
    return [sum(i % 2 == 0 for i in ids) / max(len(ids), 1) for ids in completion_ids]
