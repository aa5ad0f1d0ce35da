"""What the built-in task shows of itself: how many held-out answers are right, and some of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lean_trl import builtin
from lean_trl.config import Config
from lean_trl.data.tokenizer import Tokenizer
from lean_trl.model.decoder import CausalLM
from lean_trl.train.exact_match import ExactMatch, exact_match

MAX_NEW_TOKENS = 96  # the longest answer has 80
A_FEW = 25
HELD_OUT = ("test_easy", "test_hard")


@dataclass(frozen=True)
class Showcase:
    """{split: its exact match}."""

    matches: dict[str, ExactMatch]

    def metrics(self) -> dict[str, float]:
        """For metrics.jsonl: {"exact_match/test_easy": rate, ...}."""
        return {f"exact_match/{split}": match.rate for split, match in self.matches.items()}

    def __str__(self) -> str:
        """One line, after "exact match"."""
        return ", ".join(
            f"{split} {match.rate:.1%} of {match.count}" for split, match in self.matches.items()
        )

    def samples(self, count: int = 3) -> str:
        """Some held-out questions with the model's answers, the splits in turn."""
        mixed = zip(*(match.samples for match in self.matches.values()), strict=False)
        chosen = [sample for pair in mixed for sample in pair][:count]
        return "\n".join(
            f"\n{sample.question}\n  {sample.answer.strip().replace(chr(10), chr(10) + '  ')}\n"
            f"  -> {'right' if sample.right else f'wrong, {sample.gold} was right'}"
            for sample in chosen
        )


def is_builtin_task(config: Config) -> bool:
    """Whether the run trains on the built-in rows, whose answers can be checked."""
    settings = config.data.path, config.rollout.task
    return settings == (None, None) and config.method != "reward"


def show(model: CausalLM, tokenizer: Tokenizer) -> Showcase:
    """Answer the held-out questions of each split greedily; see some_or_all.

    Every rank of a sharded model must call it.
    """
    return Showcase({split: some_or_all(model, tokenizer, read_rows(split)) for split in HELD_OUT})


def some_or_all(model: CausalLM, tokenizer: Tokenizer, rows: list[dict[str, Any]]) -> ExactMatch:
    """The exact match over the first A_FEW rows, and over all when one of those is right.

    A model that knows nothing takes 0.3 CPU-seconds for a question, because it never stops; a
    trained one takes a hundredth of that.
    """
    for part in (rows[:A_FEW], rows):
        match = exact_match(model, tokenizer, part, MAX_NEW_TOKENS, builtin.answer_of)
        if match.rate == 0:
            break
    return match


def read_rows(split: str) -> list[dict[str, Any]]:
    """The rows of a split of the built-in dataset."""
    import pyarrow.parquet as parquet

    return parquet.read_table(builtin.dataset_path(split)).to_pylist()
