"""Drafts -> token ids and what is scored of them, a block of rows at a time and on all cores.

Each text is encoded once. A prompt's end is found in the ids of prompt + answer, as the length of
their common prefix with the ids of the prompt alone: that is what the model sees when it has to
answer. Only the prompt's last stretch, from its last special token on, is encoded again; for chat
templates that is the same few words in every row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tokenizers

from lean_trl.data.drafts import Piece, Span
from lean_trl.data.spans import common_characters
from lean_trl.data.tokenizer import Tokenizer

Encoded = tuple[np.ndarray, np.ndarray]  # ids int32 [n], scored bool [n]


@dataclass
class _Text:
    """An encoded text: its ids and, when asked for, where each token lies in it."""

    ids: np.ndarray  # int32 [n]
    encoding: tokenizers.Encoding | None = None
    known_offsets: np.ndarray | None = None  # int64 [n, 2]; characters

    def offsets(self) -> np.ndarray:
        if self.known_offsets is None:
            assert self.encoding is not None
            self.known_offsets = np.array(self.encoding.offsets, np.int64).reshape(-1, 2)
        return self.known_offsets

    def span(self, index: int) -> Span:
        """Characters of one token."""
        if self.encoding is not None:
            chars = self.encoding.token_to_chars(index)
            assert chars is not None
            return chars
        start, stop = self.offsets()[index].tolist()
        return start, stop


class Encoder:
    """Encodes pieces; remembers the ends of prompts that it has met."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._backend = tokenizer.backend
        size = max(self._backend.get_added_tokens_decoder(), default=-1) + 1
        self._is_added = np.zeros(max(size, self._backend.get_vocab_size()) + 1, bool)
        self._is_added[list(self._backend.get_added_tokens_decoder())] = True
        self._ends: dict[str, np.ndarray] = {}
        self._ordinary: tokenizers.Tokenizer | None = None

    def encode(self, pieces: Sequence[Piece]) -> list[Encoded]:
        """Ids and scored of each piece, in order."""
        texts = self._encode_texts(pieces)
        ends = [
            None if piece.prompt is None else self._end_of_prompt(piece, piece.prompt, text)
            for piece, text in zip(pieces, texts, strict=True)
        ]
        self._learn([end[0] for end in ends if end is not None])
        return [self._finish(*triple) for triple in zip(pieces, texts, ends, strict=True)]

    def _encode_texts(self, pieces: Sequence[Piece]) -> list[_Text]:
        texts = [piece.text for piece in pieces]
        if any(piece.prompt is not None or piece.spans is not None for piece in pieces):
            encodings = self._backend.encode_batch(texts)
            encoded = [_Text(np.array(e.ids, np.int32), e) for e in encodings]
        else:
            encodings = self._backend.encode_batch_fast(texts)  # without offsets
            encoded = [_Text(np.array(e.ids, np.int32)) for e in encodings]
        for i, piece in enumerate(pieces):
            if piece.literal:
                encoded[i] = self._encode_around(piece.text, piece.literal)
        return encoded

    def _encode_around(self, text: str, literal: Sequence[Span]) -> _Text:
        """A text with parts that look like special tokens but are ordinary characters."""
        if self._ordinary is None:
            self._ordinary = tokenizers.Tokenizer.from_str(self._backend.to_str())
            self._ordinary.encode_special_tokens = True
        ids: list[int] = []
        offsets: list[Span] = []
        position = 0
        for start, stop in [*literal, (len(text), len(text))]:
            parts = ((self._backend, position, start), (self._ordinary, start, stop))
            for backend, low, high in parts:
                encoding = backend.encode(text[low:high])
                ids += encoding.ids
                offsets += [(a + low, b + low) for a, b in encoding.offsets]
            position = stop
        return _Text(np.array(ids, np.int32), None, np.array(offsets, np.int64).reshape(-1, 2))

    def _end_of_prompt(self, piece: Piece, prompt: str, text: _Text) -> tuple[str, int]:
        """(the prompt from its last special token on, that token's index in the whole)."""
        common = len(prompt)
        if not piece.text.startswith(prompt):
            common = common_characters(prompt, piece.text)
        for index in np.flatnonzero(self._is_added[text.ids])[::-1].tolist():
            start, stop = text.span(index)
            if stop <= common:
                return prompt[start:], index
        return prompt, 0

    def _learn(self, ends: Sequence[str]) -> None:
        if len(self._ends) > 4096:  # plain prompts all differ: nothing to remember
            self._ends.clear()
        new = [end for end in dict.fromkeys(ends) if end not in self._ends]
        for end, encoding in zip(new, self._backend.encode_batch_fast(new), strict=True):
            self._ends[end] = np.array(encoding.ids, np.int32)

    def _finish(self, piece: Piece, text: _Text, end: tuple[str, int] | None) -> Encoded:
        if piece.ids is not None:
            assert piece.scored is not None
            return piece.ids, piece.scored
        ids = text.ids
        scored = np.ones(len(ids), bool)
        if end is not None:
            prompt_end, start = end
            scored[: start + common_prefix(self._ends[prompt_end], ids[start:])] = False
        elif piece.spans is not None:
            scored = _covered(text.offsets(), piece.spans)
        before = np.array(self.tokenizer.prefix if piece.bos else (), np.int32)
        if np.array_equal(ids[: len(before)], before):
            before = before[:0]  # the text has its own
        after = np.array(self._ending(ids) if piece.eos else (), np.int32)
        whole = np.concatenate([before, ids, after])
        return whole, np.concatenate(
            [np.full(len(before), end is None), scored, np.ones(len(after), bool)]
        )

    def _ending(self, ids: np.ndarray) -> tuple[int, ...]:
        """What a plain text still needs: the tokenizer's own suffix, and EOS once."""
        suffix, eos = self.tokenizer.suffix, self.tokenizer.eos_id
        last = suffix[-1] if suffix else ids[-1] if len(ids) else None
        return suffix if eos is None or last == eos else (*suffix, eos)


def align_pair(pair: Sequence[Encoded]) -> list[Encoded]:
    """Score two answers to one prompt from the same token on:

    where their ids leave the prompt's first.
    """
    starts = [int(np.argmax(scored)) for _, scored in pair if scored.any()]
    first = min(starts, default=max(len(ids) for ids, _ in pair))
    return [(ids, np.arange(len(ids)) >= first) for ids, _ in pair]


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common prefix of two id arrays."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def _covered(offsets: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """bool [n]: tokens with a character in one of the spans."""
    scored = np.zeros(len(offsets), bool)
    for start, stop in spans:
        first = np.searchsorted(offsets[:, 1], start, side="right")
        scored[first : np.searchsorted(offsets[:, 0], stop, side="left")] = True
    return scored
