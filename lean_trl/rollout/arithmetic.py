"""How many completions a generation has, and how they become windows: refused when it cannot be.

num_generations completions of each prompt make a group; a window holds units_per_step completions;
a generation is one window or several, each learnt from num_iterations times.
"""

from __future__ import annotations

from dataclasses import dataclass

from lean_trl.config import Config, units_per_step
from lean_trl.recipe import SettingsError


@dataclass(frozen=True)
class Arithmetic:
    """Sizes in completions over all ranks."""

    num_generations: int  # of each prompt
    generation: int
    window: int
    num_iterations: int

    @property
    def prompts(self) -> int:
        """Prompts of one generation."""
        return self.generation // self.num_generations

    @property
    def reused(self) -> bool:
        """Whether the policy moves on before a generation is used up."""
        return self.windows(self.prompts) * self.num_iterations > 1

    def windows(self, prompts: int) -> int:
        """Windows of a generation of so many prompts; the last of an epoch may be short."""
        return -(-prompts * self.num_generations // self.window)

    def steps(self, prompts: int) -> int:
        """Optimizer steps of one pass over so many prompts."""
        full, rest = divmod(prompts, self.prompts)
        windows = full * self.windows(self.prompts) + (self.windows(rest) if rest else 0)
        return windows * self.num_iterations


def make_arithmetic(config: Config, world_size: int) -> Arithmetic:
    """The sizes that the settings ask for.

    Raises SettingsError, with numbers that work, when groups would be cut.

    >>> from lean_trl.config import config_from_dict
    >>> tree = {"method": "grpo", "train": {"micro_batch_size": 8}}
    >>> make_arithmetic(config_from_dict(tree), world_size=2).prompts
    2
    """
    rollout, train = config.rollout, config.train
    each, window = rollout.num_generations, units_per_step(train, world_size)
    generation, micro_batches = window, rollout.steps_per_generation
    if micro_batches is not None:
        generation = micro_batches * train.micro_batch_size * world_size
    if micro_batches is not None and generation % window:
        per_step = window / (train.micro_batch_size * world_size)
        whole = max(round(micro_batches / per_step), 1) * per_step
        advice = (
            f"set rollout.steps_per_generation to {whole:g}"
            if whole == int(whole)
            else "leave rollout.steps_per_generation out"
        )
        raise SettingsError(
            f"one generation is {generation} completions (rollout.steps_per_generation "
            f"{micro_batches} x micro_batch_size {train.micro_batch_size} x "
            f"{world_size} ranks), which is no multiple of the {window} of a step: {advice}"
        )
    if generation % each:
        wanted = -(-generation // each) * each
        fewer = [n for n in range(2, each) if generation % n == 0]
        other = f", or rollout.num_generations to {fewer[-1]}" if fewer else ""
        raise SettingsError(
            f"one generation is {generation} completions, which is no multiple of "
            f"rollout.num_generations {each}: set train.batch_size to {wanted} (and leave "
            f"gradient_accumulation_steps and steps_per_generation out){other}"
        )
    if config.method == "online_dpo" and window % 2:
        raise SettingsError(
            f"a step of {window} completions cuts a pair: set train.batch_size to {window + 1}"
        )
    return Arithmetic(each, generation, window, rollout.num_iterations)
