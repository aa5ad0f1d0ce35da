"""Drafts -> token ids and what is scored of them, a block of rows at a time and on all cores.

Each text is encoded once. A prompt's end is found in the ids of prompt + answer, as the length of
their common prefix with the ids of the prompt alone: that is what the model sees when it has to
answer. Only the prompt's last stretch is encoded again: from its last special token on, which for
chat templates are the same few words in every row, or else its last few words, when they come out
as they do in the whole; the whole prompt when they do not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tokenizers

from lean_trl.data.drafts import Piece, Span
from lean_trl.data.spans import common_characters
from lean_trl.data.tokenizer import Tokenizer

# Characters of a plain prompt that are encoded again: many words more than a merge reaches over.
TAIL = 64

Encoded = tuple[np.ndarray, np.ndarray]  # ids int32 [n], scored bool [n]


class _Text:
    """An encoded text: its ids and where each token lies in it."""

    def __init__(self, ids: list[int], where: tokenizers.Encoding | np.ndarray) -> None:
        self.ids = np.array(ids, np.int32)  # [n]
        self._where = where  # int64 [n, 2] when it is an array

    def span(self, index: int) -> Span:
        """Characters of one token."""
        if isinstance(self._where, np.ndarray):
            start, stop = self._where[index].tolist()
            return start, stop
        chars = self._where.token_to_chars(index)
        assert chars is not None
        return chars

    def tokens_of(self, start: int, stop: int) -> Span:
        """[first, last) of the tokens that have a character in [start, stop)."""
        if isinstance(self._where, np.ndarray):
            after = int(np.searchsorted(self._where[:, 1], start, side="right"))
            return after, int(np.searchsorted(self._where[:, 0], stop, side="left"))
        # Asking for two tokens is much cheaper than making a list of all offsets.
        first, last = self.token_at(start), self.token_at(stop)
        if last < len(self.ids) and self.span(last)[0] < stop:
            last += 1
        return first, last

    def token_at(self, position: int) -> int:
        """The first token that ends after `position`."""
        assert isinstance(self._where, tokenizers.Encoding)
        if not len(self.ids):
            return 0
        for character in range(position, self.span(len(self.ids) - 1)[1]):
            token = self._where.char_to_token(character)
            if token is not None:  # a normalizer may have dropped some characters
                return token
        return len(self.ids)


class Encoder:
    """Encodes pieces; remembers the ends of prompts that it has met."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._backend = tokenizer.backend
        size = max(self._backend.get_added_tokens_decoder(), default=-1) + 1
        self._is_added = np.zeros(max(size, self._backend.get_vocab_size()) + 1, bool)
        self._is_added[list(self._backend.get_added_tokens_decoder())] = True
        self._ends: dict[str, np.ndarray] = {}
        suffix, eos = tokenizer.suffix, tokenizer.eos_id
        self._nothing = np.zeros(0, np.int32)
        self._prefix, self._suffix = (
            np.array(tokenizer.prefix, np.int32),
            np.array(suffix, np.int32),
        )
        self._suffix_eos = np.array([*suffix, *([] if eos is None else [eos])], np.int32)
        self._ordinary: tokenizers.Tokenizer | None = None

    def encode(self, pieces: Sequence[Piece]) -> list[Encoded]:
        """Ids and scored of each piece, in order."""
        texts = self._encode_texts(pieces)
        ends = [
            None if piece.prompt is None else self._end_of_prompt(piece, piece.prompt, text)
            for piece, text in zip(pieces, texts, strict=True)
        ]
        self._learn([end[0] for end in ends if end is not None])
        for i, (piece, text, end) in enumerate(zip(pieces, texts, ends, strict=True)):
            if end is not None and piece.prompt is not None and not self._in_step(text, *end):
                ends[i] = piece.prompt, 0
        self._learn([end[0] for end in ends if end is not None])
        return [self._finish(*triple) for triple in zip(pieces, texts, ends, strict=True)]

    def _encode_texts(self, pieces: Sequence[Piece]) -> list[_Text]:
        # encode_batch_fast, which finds no offsets, took 1.3x as long (tokenizers 0.23, GSM8K).
        encodings = self._backend.encode_batch([piece.text for piece in pieces])
        encoded = [_Text(encoding.ids, encoding) for encoding in encodings]
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
        return _Text(ids, np.array(offsets, np.int64).reshape(-1, 2))

    def _end_of_prompt(self, piece: Piece, prompt: str, text: _Text) -> tuple[str, int]:
        """(the last stretch of the prompt, the index of its first token in the whole).

        It begins at a special token, where encoding begins anew, or TAIL characters before the end.
        """
        common = len(prompt)
        if not piece.text.startswith(prompt):
            common = common_characters(prompt, piece.text)
        for index in np.flatnonzero(self._is_added[text.ids])[::-1].tolist():
            start, stop = text.span(index)
            if stop <= common:
                return prompt[start:], index
        at = common - TAIL
        token = text.token_at(at) if at > TAIL else 0
        return prompt[text.span(token)[0] :] if token else prompt, token

    def _in_step(self, text: _Text, end: str, start: int) -> bool:
        """Whether a prompt's end, encoded alone, begins with the tokens it has in the whole."""
        alone = self._ends[end]
        return start == 0 or 2 * common_prefix(alone, text.ids[start:]) >= len(alone)

    def _learn(self, ends: Sequence[str]) -> None:
        if len(self._ends) > 4096:  # plain prompts all differ: nothing to remember
            self._ends.clear()
        new = [end for end in dict.fromkeys(ends) if end not in self._ends]
        for end, encoding in zip(new, self._backend.encode_batch(new), strict=True):
            self._ends[end] = np.array(encoding.ids, np.int32)

    def _finish(self, piece: Piece, text: _Text, end: tuple[str, int] | None) -> Encoded:
        if piece.ids is not None:
            assert piece.scored is not None
            return piece.ids, piece.scored
        ids = text.ids
        before = self._prefix if piece.bos else self._nothing
        if len(before) and np.array_equal(ids[: len(before)], before):
            before = self._nothing  # the text has its own
        after = self._ending(ids) if piece.eos else self._nothing
        if len(before) or len(after):
            ids = np.concatenate((before, ids, after))
        scored = np.ones(len(ids), bool)
        if end is not None:
            prompt_end, start = end
            common = common_prefix(self._ends[prompt_end], text.ids[start:])
            scored[: len(before) + start + common] = False
        elif piece.spans is not None:
            scored[:] = False
            for first, stop in piece.spans:
                scored[slice(*text.tokens_of(first, stop))] = True
        return ids, scored

    def _ending(self, ids: np.ndarray) -> np.ndarray:
        """What a plain text still needs: the tokenizer's own suffix, and EOS once."""
        suffix = self._suffix
        last = suffix[-1] if len(suffix) else ids[-1] if len(ids) else None
        if self.tokenizer.eos_id is None or last == self.tokenizer.eos_id:
            return suffix
        return self._suffix_eos


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
