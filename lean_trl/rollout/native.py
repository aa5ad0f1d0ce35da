"""The native engine: the training model itself, with a cache of keys and values.

Each prompt is read once for all its completions. Continuous batching: a sequence that ends makes
room at once for the next that waits. No server, no copy of the weights, any device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor
from torch.nn.functional import pad

from lean_trl.model.attention import PackedContext
from lean_trl.model.decoder import CausalLM
from lean_trl.rollout.cache import PromptContext, SlotCache, StepContext, bytes_per_token
from lean_trl.rollout.engine import Completion, FinishReason, Request
from lean_trl.rollout.sampling import Dice, draw, runs
from lean_trl.train.distributed import compute_device

PROMPT_TOKENS = 8192  # of one forward over prompts: enough to fill any device
GIB = 1 << 30


@dataclass
class _Sequence:
    """A completion under way."""

    request: Request
    index: int
    dice: Dice
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Of the newest token, whose keys are not in the cache yet."""
        return len(self.request.prompt_ids) + len(self.ids) - 1

    def finish_reason(self) -> FinishReason | None:
        """None: it goes on."""
        if self.ids and self.ids[-1] in self.request.stop_ids:
            return "stop"
        return "length" if len(self.ids) >= self.request.max_tokens else None


@dataclass
class _Prompt:
    """A prompt that was read: kept until the last of its completions has a slot."""

    logits: Tensor  # fp32 [V] after its last token
    kept: dict[int, tuple[Tensor, Tensor]]  # layer -> keys and values [P, K, H]


class NativeEngine:
    """Engine over a CausalLM. Tokens do not depend on what else runs, but for rounding.

    kv_cache_gib: most memory of keys and values; as many sequences run as fit. max_slots: at most
    so many. awake: entered by wake(), left by sleep(). any_rank_busy: where every forward is a
    collective, ranks that are done must go on as long as any is not; it tells (busy here) -> busy
    anywhere. dtype: of keys and values; None: the parameters'.

    Greedy tokens equal those of the training forward, log-probs its own to 1e-5 in fp32.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        kv_cache_gib: float = 2.0,
        max_slots: int = 256,
        awake: Callable[[], AbstractContextManager[None]] = nullcontext,
        any_rank_busy: Callable[[bool], bool] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.max_slots, self.kv_cache_gib = model, max_slots, kv_cache_gib
        self.any_rank_busy, self._awake, self._stack = any_rank_busy, awake, ExitStack()
        self.dtype = dtype or next(model.parameters()).dtype  # of keys and values
        self.decode_steps = 0  # forwards of one token of each running sequence
        self.prompt_tokens = 0  # read, each prompt once
        self._version = 0
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []  # sequence i is in slot i
        self._prompts: dict[int, _Prompt] = {}  # request id -> its prompt, read
        self._left: dict[int, int] = {}  # request id -> completions without a slot yet
        self._done: list[Completion] = []
        self._cache: SlotCache | None = None
        self._seen: Tensor | None = None  # bool [slots, V], for the repetition penalty

    # -- the protocol --

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.id in self._left:
                raise ValueError(f"request id {request.id} is in use: give each its own")
            self._left[request.id] = request.n
            for index in range(request.n):
                self._waiting.append(_Sequence(request, index, Dice(request.seed, index)))

    def poll(self, timeout: float | None = None) -> list[Completion]:
        """Runs until something is done; `timeout` is not needed, for nothing waits."""
        if not self._done and (self._busy() or self.any_rank_busy is not None):
            with torch.no_grad():
                while self._go_on():
                    self._round()
        done, self._done = self._done, []
        return done

    def cancel(self, ids: Iterable[int]) -> None:
        gone = set(ids)
        for sequence in [s for s in (*self._running, *self._waiting) if s.request.id in gone]:
            self._finish(sequence, "abort")
        self._waiting = deque(s for s in self._waiting if s.request.id not in gone)
        for slot in reversed(range(len(self._running))):
            if self._running[slot].request.id in gone:
                self._release(slot)
        for request in gone:
            self._prompts.pop(request, None)
            self._left.pop(request, None)

    def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """The weights are the trainer's own already."""
        self._version = version

    def sleep(self, level: int = 1) -> None:
        assert not self._running, "sequences are under way"
        self._cache = self._seen = None
        self._stack.close()

    def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        self._stack.close()
        self._stack.enter_context(self._awake())

    def reset_prefix_cache(self) -> None:
        self._prompts.clear()

    def close(self) -> None:
        self.cancel(list(self._left))
        self._cache = self._seen = None

    # -- one round --

    def _busy(self) -> bool:
        return bool(self._waiting or self._running)

    def _go_on(self) -> bool:
        if self.any_rank_busy is not None:  # all ranks leave together
            return self.any_rank_busy(self._busy())
        return self._busy() and not self._done

    def _round(self) -> None:
        """One forward: over prompts when there is room for more sequences, else one token each."""
        chosen = self._to_read()
        if chosen:
            self._read(chosen)
        elif self._running:
            self._step()
        else:  # another rank works, and its forward needs this one
            self._read_nothing()
        self._admit()

    def _to_read(self) -> list[Request]:
        """Prompts of waiting sequences that would find a slot, up to PROMPT_TOKENS."""
        if not self._waiting:
            return []
        self._make_room()
        assert self._cache is not None
        free = self._cache.slots - len(self._running)
        chosen: dict[int, Request] = {}
        tokens = 0
        for sequence in islice(self._waiting, free):
            request = sequence.request
            if request.id in self._prompts or request.id in chosen:
                continue
            length = len(request.prompt_ids)
            if not self._fits(request) or (chosen and tokens + length > PROMPT_TOKENS):
                break
            chosen[request.id] = request
            tokens += length
        return list(chosen.values())

    def _fits(self, request: Request) -> bool:
        assert self._cache is not None
        return len(request.prompt_ids) + request.max_tokens <= self._cache.length

    def _make_room(self) -> None:
        """A cache for what waits; while sequences run it stays as it is."""
        if self._running:
            return
        length = max(len(s.request.prompt_ids) + s.request.max_tokens for s in self._waiting)
        size = bytes_per_token(self.model.config, self.dtype) * length
        budget = int(self.kv_cache_gib * GIB)
        if size > budget:
            raise ValueError(
                f"the keys and values of one sequence of {length} tokens take {size / GIB:.3f} "
                f"GiB, more than rollout.kv_cache_gib {self.kv_cache_gib:g}: raise it, or lower "
                "data.max_prompt_length and rollout.max_completion_length"
            )
        slots = min(budget // size, self.max_slots, len(self._waiting))
        cache = self._cache
        if cache is None or cache.length < length or cache.slots < slots:
            self._cache = self._seen = None  # before the new one is allocated
            self._cache = SlotCache(slots, length)

    def _read(self, requests: Sequence[Request]) -> None:
        """Keys, values and logits of some prompts, in one packed forward."""
        lengths = [len(request.prompt_ids) for request in requests]
        self.prompt_tokens += sum(lengths)
        hidden, kept = self._forward_packed([request.prompt_ids for request in requests])
        last = torch.tensor(lengths, device=hidden.device).cumsum(0) - 1
        logits = self.model.logits(hidden[last])
        first = 0
        for request, length, row in zip(requests, lengths, logits, strict=True):
            own = {
                layer: (k[first : first + length], v[first : first + length])
                for layer, (k, v) in kept.items()
            }
            self._prompts[request.id] = _Prompt(row, own)
            first += length

    def _read_nothing(self) -> None:
        hidden, _ = self._forward_packed([(0,)])
        self.model.logits(hidden)

    def _forward_packed(
        self, prompts: Sequence[Sequence[int]]
    ) -> tuple[Tensor, dict[int, tuple[Tensor, Tensor]]]:
        device = compute_device(self.model)
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        ids = torch.tensor([token for prompt in prompts for token in prompt]).to(device)
        bounds = pad(lengths.cumsum(0), (1, 0))
        positions = torch.arange(len(ids)) - torch.repeat_interleave(bounds[:-1], lengths)
        positions, cu_seqlens = positions.to(device), bounds.to(device, torch.int32)
        ctx = PromptContext(
            PackedContext(
                cu_seqlens=cu_seqlens,
                max_seqlen=int(lengths.max()),
                end=None,
                positions=positions,
                rope=self.model.model.rotary_emb(positions, cu_seqlens),
                real=None,
                backend=self.model.attention,
            )
        )
        return self.model.run(ids, ctx), ctx.kept

    def _step(self) -> None:
        """One token more of each running sequence."""
        self.decode_steps += 1
        assert self._cache is not None
        device = compute_device(self.model)
        at = [sequence.position for sequence in self._running]
        ids = torch.tensor([sequence.ids[-1] for sequence in self._running]).to(device)
        positions = torch.tensor(at).to(device)
        each = torch.arange(len(at) + 1, device=device)
        rope = self.model.model.rotary_emb(positions, each)
        ctx = StepContext(rope, self._cache, positions, max(at) + 1)
        logits = self.model.logits(self.model.run(ids, ctx))
        self._extend(list(range(len(self._running))), logits)
        self._reap()

    def _admit(self) -> None:
        """Slots for waiting sequences whose prompts are read; each draws its first token."""
        if self._cache is None:
            return
        first = len(self._running)
        rows = []
        while self._waiting and len(self._running) < self._cache.slots:
            request = self._waiting[0].request
            if request.id not in self._prompts:
                break
            prompt, start = self._prompts[request.id], len(self._running)
            room = min(self._left[request.id], self._cache.slots - start)
            self._running += [self._waiting.popleft() for _ in range(room)]
            self._cache.fill(slice(start, start + room), prompt.kept)
            self._mark_prompt(slice(start, start + room), request)
            rows += [prompt.logits] * room
            self._left[request.id] -= room
            if not self._left[request.id]:  # the last of its completions
                del self._left[request.id], self._prompts[request.id]
        if rows:
            self._extend(list(range(first, len(self._running))), torch.stack(rows))
            self._reap()

    def _mark_prompt(self, slots: slice, request: Request) -> None:
        if request.sampling.repetition_penalty == 1:
            return
        assert self._cache is not None
        if self._seen is None:
            shape = (self._cache.slots, self.model.config.vocab_size)
            self._seen = torch.zeros(shape, dtype=torch.bool, device=compute_device(self.model))
        self._seen[slots] = False
        self._seen[slots, list(request.prompt_ids)] = True

    def _extend(self, slots: list[int], logits: Tensor) -> None:
        """Draw the next token of the sequences in `slots` from logits [len(slots), V]."""
        sequences = [self._running[slot] for slot in slots]
        uniform = torch.tensor([s.dice.roll() for s in sequences]).to(logits.device)
        whole = list(range(len(slots)))
        for sampling, rows in runs([s.request.sampling for s in sequences]).items():
            every = rows == whole
            seen = None
            if sampling.repetition_penalty != 1:
                assert self._seen is not None
                seen = self._seen[[slots[row] for row in rows]]
            ids, logprobs = draw(
                logits if every else logits[rows],
                sampling,
                uniform if every else uniform[rows],
                seen,
            )
            # One copy from the device for both: log-probs are fp32, ids exact in fp64.
            both = torch.stack([ids.double(), logprobs.double()]).tolist()
            for row, token, logprob in zip(rows, *both, strict=True):
                self._append(slots[row], int(token), logprob)

    def _append(self, slot: int, token: int, logprob: float) -> None:
        sequence = self._running[slot]
        if not sequence.versions or sequence.versions[-1][1] != self._version:
            sequence.versions.append((len(sequence.ids), self._version))
        sequence.ids.append(token)
        sequence.logprobs.append(logprob)
        if sequence.request.sampling.repetition_penalty != 1:
            assert self._seen is not None
            self._seen[slot, token] = True

    def _reap(self) -> None:
        """Hand out what is finished and close the gaps."""
        for slot in reversed(range(len(self._running))):
            reason = self._running[slot].finish_reason()
            if reason is not None:
                self._finish(self._running[slot], reason)
                self._release(slot)

    def _finish(self, sequence: _Sequence, reason: FinishReason) -> None:
        self._done.append(
            Completion(
                sequence.request.id,
                sequence.index,
                tuple(sequence.ids),
                tuple(sequence.logprobs),
                reason,
                tuple(sequence.versions),
            )
        )

    def _release(self, slot: int) -> None:
        """The last running sequence moves into a freed slot: running ones stay side by side."""
        last = self._running.pop()
        if slot == len(self._running):
            return
        assert self._cache is not None
        self._running[slot] = last
        self._cache.move(len(self._running), slot, last.position)
        if self._seen is not None:
            self._seen[slot] = self._seen[len(self._running)]
