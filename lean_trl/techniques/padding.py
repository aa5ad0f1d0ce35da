"""Padding-free batches: sequences lie one after another, so no token is computed for nothing."""

from __future__ import annotations

from lean_trl.config import Config
from lean_trl.techniques.technique import Evidence, Technique, Trial


class PaddingFree(Technique):
    """Batches are built without padding by data.batch; here is only the proof that they were."""

    name = "padding_free"
    settings = ("data.padding_free",)

    def __init__(self, config: Config) -> None:
        # A multiple to round up to asks for a tail of padding, of less than that many tokens.
        self.tail = (config.data.pad_to_multiple_of or 1) - 1
        self.enabled = config.data.padding_free

    def evidence(self, trial: Trial) -> Evidence:
        batch = trial.batch
        padding = batch.num_tokens - batch.num_real_tokens
        saved = len(batch.lengths) * max(batch.lengths) - batch.num_real_tokens
        text = f"{padding} padding tokens in {batch.num_tokens}, {saved} in a padded batch"
        return Evidence(saved if padding <= self.tail else 0, text)
