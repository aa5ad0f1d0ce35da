"""Drafts -> token ids and what is scored of them, a block of rows at a time and on all cores.

Each text is encoded once. A prompt's end is found in the ids of prompt + answer, as the length of
their common prefix with the ids of the prompt alone: that is what the model sees when it has to
answer. Only the prompt's last stretch, from its last special token on, is encoded again; for chat
templates that is the same few words in every row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tokenizers

from lean_trl.data.examples import Piece
from lean_trl.data.tokenizer import Tokenizer

Encoded = tuple[np.ndarray, np.ndarray]  # ids int32 [n], scored bool [n]


class Encoder:
    """Encodes pieces; remembers the ends of prompts that it has met."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        backend = tokenizer.backend
        self._added = np.array(sorted(backend.get_added_tokens_decoder()), np.int64)
        self._ends: dict[str, np.ndarray] = {}

    def encode(self, pieces: Sequence[Piece]) -> list[Encoded]:
        """Ids and scored of each piece, in order."""
        texts = [piece.text for piece in pieces]
        backend = self.tokenizer.backend
        if any(piece.prompt is not None or piece.spans is not None for piece in pieces):
            encodings = backend.encode_batch(texts)
        else:
            encodings = backend.encode_batch_fast(texts)  # without offsets
        ids = [np.array(encoding.ids, np.int32) for encoding in encodings]
        self._learn_ends(
            [
                self._end_of_prompt(p, e, i)[0]
                for p, e, i in zip(pieces, encodings, ids, strict=True)
            ]
        )
        return [self._finish(*triple) for triple in zip(pieces, encodings, ids, strict=True)]

    def _finish(self, piece: Piece, encoding: tokenizers.Encoding, ids: np.ndarray) -> Encoded:
        if piece.ids is not None:
            assert piece.scored is not None
            return piece.ids, piece.scored
        scored = np.ones(len(ids), bool)
        if piece.prompt is not None:
            scored[: self._prompt_length(piece, encoding, ids)] = False
        elif piece.spans is not None:
            scored = _covered(encoding, piece.spans)
        return (
            self._with_special(ids, scored, piece.prompt is not None)
            if piece.plain
            else (ids, scored)
        )

    def _prompt_length(self, piece: Piece, encoding: tokenizers.Encoding, ids: np.ndarray) -> int:
        """Tokens that prompt and whole have in common."""
        end, start = self._end_of_prompt(piece, encoding, ids)
        assert end is not None
        return start + common_prefix(self._ends[end], ids[start:])

    def _end_of_prompt(
        self, piece: Piece, encoding: tokenizers.Encoding, ids: np.ndarray
    ) -> tuple[str | None, int]:
        """(the prompt's text from its last special token on, that token's index in the whole)."""
        if piece.prompt is None:
            return None, 0
        common = len(piece.prompt)
        if not piece.text.startswith(piece.prompt):
            common = _common_characters(piece.prompt, piece.text)
        for index in np.flatnonzero(np.isin(ids, self._added))[::-1].tolist():
            chars = encoding.token_to_chars(index)
            assert chars is not None
            start, stop = chars
            if stop <= common:
                return piece.prompt[start:], index
        return piece.prompt, 0

    def _learn_ends(self, ends: Sequence[str | None]) -> None:
        new = list(dict.fromkeys(end for end in ends if end is not None and end not in self._ends))
        if len(self._ends) > 4096:  # plain prompts all differ: nothing to remember
            self._ends = {end: self._ends[end] for end in ends if end in self._ends}
        for end, encoding in zip(new, self.tokenizer.backend.encode_batch_fast(new), strict=True):
            self._ends[end] = np.array(encoding.ids, np.int32)

    def _with_special(self, ids: np.ndarray, scored: np.ndarray, has_prompt: bool) -> Encoded:
        """BOS once where the tokenizer adds it, EOS once at the end."""
        t = self.tokenizer
        before = np.array(t.prefix, np.int32)
        if np.array_equal(ids[: len(before)], before):
            before = before[:0]
        after = np.array(t.suffix, np.int32)
        last = after[-1] if len(after) else ids[-1] if len(ids) else None
        if t.eos_id is not None and last != t.eos_id:
            after = np.append(after, np.int32(t.eos_id))
        scores = [np.full(len(before), not has_prompt), scored, np.ones(len(after), bool)]
        return np.concatenate([before, ids, after]), np.concatenate(scores)


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common prefix of two id arrays."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def _common_characters(a: str, b: str) -> int:
    """Length of the common prefix of two texts, by bisection on slices."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _covered(encoding: tokenizers.Encoding, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """bool [n]: tokens with a character in one of the spans."""
    offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
    scored = np.zeros(len(offsets), bool)
    for start, stop in spans:
        first = np.searchsorted(offsets[:, 1], start, side="right")
        scored[first : np.searchsorted(offsets[:, 0], stop, side="left")] = True
    return scored
