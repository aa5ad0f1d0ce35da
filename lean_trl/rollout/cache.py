"""Keys and values of sequences that are being generated, in slots allocated once.

Running sequences lie in the first slots, so that attention reads one block of memory and copies
nothing; when one ends, the last moves into its slot.

Dimension letters: A running sequences, L positions of a slot, T tokens of a forward, N query heads,
K kv heads, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from lean_trl.model.attention import PackedContext
from lean_trl.model.config import ModelConfig


def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """What keys and values of one token take over all layers."""
    if (
        config.latent is not None
    ):  # stored as the heads see them, values filled up to the keys' size
        size = config.num_heads * (config.latent.nope + config.latent.rope)
    else:
        size = config.num_kv_heads * config.head_dim
    return 2 * size * config.num_layers * dtype.itemsize


@dataclass
class SlotCache:
    """[slots, K, L, H] for each layer, made when the layer first runs."""

    slots: int
    length: int  # L
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)

    def _layer(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in self.keys:
            shape = (self.slots, like.shape[1], self.length, like.shape[2])
            # Zeros, not whatever was there: 0 * NaN would reach the output past the mask.
            self.keys[layer], self.values[layer] = like.new_zeros(shape), like.new_zeros(shape)
        return self.keys[layer], self.values[layer]

    def append(self, layer: int, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Write one token of each running sequence: k and v [A, K, H] at positions int64 [A]."""
        keys, values = self._layer(layer, k)
        rows = torch.arange(k.shape[0], device=k.device)
        keys[rows, :, positions] = k
        values[rows, :, positions] = v

    def fill(self, slots: slice, prompt: dict[int, tuple[Tensor, Tensor]]) -> None:
        """Write one whole prompt into all of `slots`: {layer: (k, v)}, each [P, K, H]."""
        for layer, (k, v) in prompt.items():
            keys, values = self._layer(layer, k)
            keys[slots, :, : k.shape[0]] = k.transpose(0, 1)
            values[slots, :, : v.shape[0]] = v.transpose(0, 1)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a slot."""
        for store in (self.keys, self.values):
            for tensor in store.values():
                tensor[target, :, :length] = tensor[source, :, :length]


@dataclass(frozen=True)
class PromptContext:
    """Reads packed prompts as training does, and keeps keys and values of every layer."""

    packed: PackedContext
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # layer -> [T, K, H]

    @property
    def rope(self) -> dict[str, tuple[Tensor, Tensor]]:
        return self.packed.rope

    @property
    def real(self) -> Tensor | None:
        return None

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        scale: float,
    ) -> Tensor:
        self.kept[layer] = (k, v)
        return self.packed.attend(
            layer, q, k, v, window=window, softcap=softcap, sinks=sinks, scale=scale
        )


@dataclass(frozen=True)
class StepContext:
    """One new token of each running sequence, looking at the cache."""

    rope: dict[str, tuple[Tensor, Tensor]]
    cache: SlotCache
    positions: Tensor  # int64 [A]; of the new tokens
    longest: int  # largest position + 1
    real: Tensor | None = None
    hidden: dict[int | None, Tensor] = field(default_factory=dict)  # window -> mask of this step

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        scale: float,
    ) -> Tensor:
        num, _, size = q.shape
        self.cache.append(layer, k, v, self.positions)
        keys = self.cache.keys[layer][:num, :, : self.longest]
        values = self.cache.values[layer][:num, :, : self.longest]
        q = q.unflatten(1, (k.shape[1], -1))  # [A, K, N / K, H]: heads of a group are its queries
        mask = self._mask(window, q)
        if softcap is None and sinks is None:
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
            return out.reshape(num, -1, size)
        scores = torch.matmul(q, keys.transpose(-1, -2)).float() * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores + mask.float()
        if sinks is not None:
            sink = sinks.float().view(1, k.shape[1], -1, 1).expand(num, -1, -1, -1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = scores.softmax(-1)[..., : self.longest].to(values.dtype)
        return torch.matmul(weights, values).reshape(num, -1, size)

    def _mask(self, window: int | None, q: Tensor) -> Tensor:
        """0 where a token is seen, else -inf: [A, 1, 1, longest], made once a step."""
        if window not in self.hidden:
            there = torch.arange(self.longest, device=q.device)
            distance = self.positions[:, None] - there
            unseen = distance < 0
            if window is not None:
                unseen |= distance >= window
            mask = torch.zeros(unseen.shape, dtype=q.dtype, device=q.device)
            self.hidden[window] = mask.masked_fill(unseen, -torch.inf)[:, None, None]
        return self.hidden[window]
