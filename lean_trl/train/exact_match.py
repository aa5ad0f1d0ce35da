"""Greedy answers to held-out questions, and how many of them are right.

No cache: every round forwards the live sequences again, packed without padding. What makes that
fast is the draft, a guess of the tokens to come: one forward checks all of it, the part that greedy
decoding agrees with is kept, and what the model said after its first disagreement is the next
draft. The result is that of one token at a time for any draft, good or bad; a good one takes few
rounds. The gold answer is a good one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lean_trl.data.batch import build_batch
from lean_trl.data.tokenizer import Tokenizer
from lean_trl.model.decoder import CausalLM
from lean_trl.train.distributed import compute_device, reshard
from lean_trl.types import Example

LOOKAHEAD = 16  # ids that a draft has at least


@dataclass(frozen=True)
class Sample:
    """One question with the model's answer."""

    question: str  # what the user said last
    answer: str  # decoded, special tokens left out
    gold: str | None  # what answer_of finds in the row's own answer
    right: bool


@dataclass(frozen=True)
class ExactMatch:
    """rate = right answers / count; samples in the order of the rows."""

    rate: float
    count: int
    samples: tuple[Sample, ...]


def exact_match(
    model: CausalLM,
    tokenizer: Tokenizer,
    rows: Sequence[Mapping[str, Any]],
    max_new_tokens: int,
    answer_of: Callable[[str], str | None],
) -> ExactMatch:
    """Greedy answers to rows of `messages` that end with the assistant's; right when answer_of
    finds in the model's answer what it finds in the row's.

    Raises ValueError for rows of another kind, or none.
    """
    if not rows:
        raise ValueError("exact_match needs at least one row")
    conversations = [row.get("messages") or [] for row in rows]
    for index, messages in enumerate(conversations):
        if len(messages) < 2 or messages[-1]["role"] != "assistant":
            raise ValueError(
                f"row {index}: exact match needs `messages` that end with the right answer of the "
                f"assistant, got columns {', '.join(rows[index])}"
            )
    golds = [messages[-1]["content"] for messages in conversations]
    ends = list(tokenizer.stop_ids[:1])
    answers = greedy(
        model,
        [tokenizer.encode_chat(m[:-1], add_generation_prompt=True) for m in conversations],
        max_new_tokens,
        stop_ids=tokenizer.stop_ids,
        drafts=[tokenizer.encode(gold, add_special_tokens=False) + ends for gold in golds],
    )
    samples = []
    for messages, ids in zip(conversations, answers, strict=True):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        gold = answer_of(messages[-1]["content"])
        right = gold is not None and answer_of(text) == gold
        samples.append(Sample(messages[-2]["content"], text, gold, right))
    num_right = sum(sample.right for sample in samples)
    return ExactMatch(num_right / len(samples), len(samples), tuple(samples))


@dataclass
class _Answer:
    prompt: list[int]
    draft: list[int]  # a guess of what follows `ids`
    ids: list[int] = field(default_factory=list)  # decided

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.ids) + len(self.draft)

    def example(self) -> Example:
        """Prompt, decided ids, draft and a place for one more; the draft and that are scored."""
        ids = [*self.prompt, *self.ids, *self.draft, 0]
        scored = np.arange(len(ids)) >= len(self.prompt) + len(self.ids)
        return Example(np.array(ids), scored)

    def take(self, said: list[int], stop_ids: Sequence[int], max_new_tokens: int) -> bool:
        """Keep what is decided of `said`, the likeliest ids at the scored places. True: done."""
        agreed = 0
        while agreed < len(self.draft) and said[agreed] == self.draft[agreed]:
            agreed += 1
        for token in said[: agreed + 1]:
            self.ids.append(token)
            if token in stop_ids or len(self.ids) == max_new_tokens:
                return True
        # A model that knows nothing yet says one thing over and over: guess that it goes on.
        draft = said[agreed + 1 :]
        draft += said[-1:] * (LOOKAHEAD - len(draft))
        self.draft = draft[: max_new_tokens - len(self.ids) - 1]
        return False


@torch.no_grad()
def greedy(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    stop_ids: Sequence[int] = (),
    drafts: Sequence[Sequence[int]] | None = None,
    max_tokens_per_batch: int = 4096,
) -> list[list[int]]:
    """The likeliest next token again and again, up to and with a stop id, at most max_new_tokens.

    drafts: guesses of the answers; they change how long this takes, never what it returns.
    """
    assert max_new_tokens >= 1 and all(prompts), "something to answer and room for the answer"
    was_training = model.training
    model.eval()
    guesses = drafts or [()] * len(prompts)
    answers = [
        _Answer(list(prompt), list(guess)[: max_new_tokens - 1])
        for prompt, guess in zip(prompts, guesses, strict=True)
    ]
    live = answers
    while live:
        # Equal lengths side by side: attention takes each length in one call.
        live = sorted(live, key=lambda answer: answer.length)
        going = []
        for chunk in _chunks(live, max_tokens_per_batch):
            for answer, said in zip(chunk, _say(model, chunk), strict=True):
                if not answer.take(said, stop_ids, max_new_tokens):
                    going.append(answer)
        live = going
    model.train(was_training)
    reshard(model)
    return [answer.ids for answer in answers]


def _say(model: CausalLM, answers: Sequence[_Answer]) -> list[list[int]]:
    """The likeliest id at each scored place of each answer."""
    batch = build_batch([answer.example() for answer in answers], device=compute_device(model))
    best = model.logits(model.hidden(batch)[batch.rows]).argmax(-1).cpu()
    return [ids.tolist() for ids in best.split(batch.units)]


def _chunks(answers: Sequence[_Answer], max_tokens: int) -> list[list[_Answer]]:
    """Runs of answers of at most max_tokens, placeholders included, or a single longer answer."""
    chunks: list[list[_Answer]] = []
    room = 0
    for answer in answers:
        if not chunks or answer.length + 1 > room:
            chunks.append([])
            room = max_tokens
        chunks[-1].append(answer)
        room -= answer.length + 1
    return chunks
