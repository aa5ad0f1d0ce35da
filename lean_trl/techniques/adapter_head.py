"""LoRA on the head, inside the op that scores tokens: neither logits nor W + B A ever exist.

Imports peft: only techniques.adapters imports this, when a run asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from peft.tuners import lora
from torch import Tensor

from lean_trl.types import Batch, Scores


class AdaptedHead(lora.Linear):
    """peft's LoRA layer around our Head: its weights, names, merging and files."""

    def _get_in_out_features(self, module: Any) -> tuple[int, int]:
        vocab, width = module.weight.shape
        return width, vocab

    def low_rank(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """(scaling * dropout(hidden) A^T, B) for hidden [..., D]; None while adapters are off."""
        if self.disable_adapters or self.merged:
            return None
        (name,) = self.active_adapters
        down, up = self.lora_A[name].weight, self.lora_B[name].weight
        low = F.linear(self.lora_dropout[name](hidden.to(down.dtype)), down) * self.scaling[name]
        return low, up

    def forward(
        self, hidden: Tensor, batch: Batch, want: Sequence[str], temperature: float | Tensor
    ) -> Scores:
        return self.base_layer(hidden, batch, want, temperature, self.low_rank(hidden))

    def logits(self, hidden: Tensor) -> Any:
        """See CausalLM.logits."""
        adapter = self.low_rank(hidden)
        if adapter is not None:
            adapter = adapter[0].to(hidden.dtype), adapter[1].to(hidden.dtype)
        return self.base_layer.logits(hidden, adapter)
