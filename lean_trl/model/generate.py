"""Text from any model of the table: greedy or sampled, with a simple cache of keys and values.

Prompts are read in one packed forward; then every step runs one token of each unfinished sequence.
The blocks are those of training, with another context. Nothing here is fast: no paging, no
continuous batching.

Dimension letters: S sequences, L cached positions, N query heads, K kv heads, H head dim, V vocab.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lean_trl.model.attention import PackedContext
from lean_trl.model.decoder import CausalLM
from lean_trl.train.distributed import compute_device


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn; the filters apply in this order."""

    temperature: float = 0.0  # 0: the most likely token
    top_k: int = 0  # of the k most likely; 0: all
    top_p: float = 1.0  # of the fewest that hold this probability together
    min_p: float = 0.0  # of those at least this times as likely as the most likely
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0:
            raise ValueError(
                f"temperature {self.temperature} and top_k {self.top_k} must not be negative"
            )
        if not 0 < self.top_p <= 1 or not 0 <= self.min_p <= 1:
            raise ValueError(f"top_p {self.top_p} must be in (0, 1], min_p {self.min_p} in [0, 1]")


GREEDY = Sampling()


@dataclass
class _Cache:
    """Keys and values of each layer, [S, L, K, H], made when the layer first runs."""

    size: int  # L: the longest prompt and all tokens to come
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)

    def put(self, layer: int, k: Tensor, v: Tensor, slots: tuple[Tensor, Tensor], num: int) -> None:
        """Write k and v [T, K, H] at `slots`: (sequence, position) of each."""
        if layer not in self.keys:
            shape = (num, self.size, *k.shape[1:])
            self.keys[layer], self.values[layer] = k.new_zeros(shape), v.new_zeros(shape)
        self.keys[layer][slots] = k
        self.values[layer][slots] = v


@dataclass(frozen=True)
class _PromptContext:
    """Reads the prompts as training does, and keeps what it computed."""

    packed: PackedContext
    cache: _Cache
    slots: tuple[Tensor, Tensor]

    @property
    def rope(self) -> dict[str, tuple[Tensor, Tensor]]:
        return self.packed.rope

    @property
    def real(self) -> Tensor | None:
        return None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
        self.cache.put(layer, k, v, self.slots, self.packed.cu_seqlens.shape[0] - 1)
        return self.packed.attend(layer, q, k, v, **options)


@dataclass(frozen=True)
class _StepContext:
    """One new token of each sequence, looking at the cache."""

    rope: dict[str, tuple[Tensor, Tensor]]
    cache: _Cache
    positions: Tensor  # int64 [S]
    real: Tensor | None = None

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
        num, heads, _ = q.shape
        rows = torch.arange(num, device=q.device)
        self.cache.put(layer, k, v, (rows, self.positions), num)
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        q = q.unflatten(1, (k.shape[1], -1))
        scores = torch.einsum("skgh,slkh->skgl", q, keys).float() * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        distance = self.positions[:, None] - torch.arange(keys.shape[1], device=q.device)
        hidden = distance < 0
        if window is not None:
            hidden |= distance >= window
        scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
        if sinks is not None:
            sink = sinks.float().view(1, k.shape[1], -1, 1).expand(num, -1, -1, -1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = scores.softmax(-1)[..., : keys.shape[1]].to(values.dtype)
        return torch.einsum("skgl,slkh->skgh", weights, values).flatten(1, 2)


@torch.no_grad()
def generate(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    stop_ids: Collection[int] = (),
    sampling: Sampling = GREEDY,
) -> list[list[int]]:
    """What the model says after each prompt: lists of ids, with the stop id that ended one.

    prompts: lists of ids, none empty. max_tokens: ids per answer at most. Sampling with one seed
    gives the same ids for the same prompts in the same order.

    Raises ValueError for an empty prompt.
    """
    if not all(prompts):
        raise ValueError("generate needs at least one id in each prompt (the BOS will do)")
    answers: list[list[int]] = [[] for _ in prompts]
    if not prompts or max_tokens < 1:
        return answers
    device = compute_device(model)
    generator = torch.Generator(device).manual_seed(sampling.seed)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    cache = _Cache(int(lengths.max()) + max_tokens)
    hidden = _read_prompts(model, prompts, lengths, cache)
    finished = [False] * len(prompts)
    # Finished sequences run on with the others: simple, and their answers are not added to.
    for step in range(max_tokens):
        chosen = choose(model.logits(hidden), sampling, generator)
        for index, token in enumerate(chosen.tolist()):
            if not finished[index]:
                answers[index].append(token)
                finished[index] = token in stop_ids
        if all(finished) or step == max_tokens - 1:
            break
        hidden = _step(model, chosen, lengths + step, cache)
    return answers


def _read_prompts(
    model: CausalLM, prompts: Sequence[Sequence[int]], lengths: Tensor, cache: _Cache
) -> Tensor:
    """Hidden states [S, D] of the last token of each prompt."""
    device = lengths.device
    ids = torch.tensor([token for prompt in prompts for token in prompt], device=device)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    sequence = torch.repeat_interleave(torch.arange(len(prompts), device=device), lengths)
    positions = torch.arange(len(ids), device=device) - cu_seqlens[sequence]
    packed = PackedContext(
        cu_seqlens=cu_seqlens,
        max_seqlen=int(lengths.max()),
        end=None,
        positions=positions,
        rope=model.model.rotary_emb(positions, cu_seqlens),
        real=None,
        backend=model.attention,
    )
    hidden = model.run(ids, _PromptContext(packed, cache, (sequence, positions)))
    return hidden[cu_seqlens[1:] - 1]


def _step(model: CausalLM, ids: Tensor, positions: Tensor, cache: _Cache) -> Tensor:
    """Hidden states [S, D] of one new token of each sequence, at `positions`."""
    each = torch.arange(len(ids) + 1, device=ids.device)
    rope = model.model.rotary_emb(positions, each)
    return model.run(ids, _StepContext(rope, cache, positions))


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """The next token of each sequence, int64 [S], from fp32 logits [S, V].

    >>> choose(torch.tensor([[0.0, 2.0, 1.0]]), GREEDY, torch.Generator())
    tensor([1])
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        smallest = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if sampling.top_p < 1:
        # A token stays when those before it do not hold top_p yet: the first one always does.
        ordered, order = logits.softmax(-1).sort(dim=-1, descending=True)
        drop = ordered.cumsum(-1) - ordered >= sampling.top_p
        logits = logits.masked_fill(drop.scatter(-1, order, drop), -torch.inf)
    probs = logits.softmax(-1)
    if sampling.min_p > 0:
        probs = probs * (probs >= sampling.min_p * probs.amax(-1, keepdim=True))
    return torch.multinomial(probs, 1, generator=generator)[:, 0]
