"""Greedy decoding against one token at a time, and exact match of a model that recites answers."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from lean_trl import builtin
from lean_trl.builtin.dataset import make_rows
from lean_trl.data.batch import build_batch
from lean_trl.data.tokenizer import load_tokenizer
from lean_trl.model.loader import new_model
from lean_trl.model.safetensors_io import read_json
from lean_trl.train.exact_match import exact_match, greedy
from lean_trl.types import Batch, Example

TOKENIZER = load_tokenizer(builtin.model_folder())
ROWS = make_rows()["test_easy"][:12]
END = TOKENIZER.eos_id


class Reciter(nn.Module):
    """Continues each known text as it goes on, and says END after anything else.

    Its hidden state is the likeliest next id; it counts the tokens that it is given.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        super().__init__()
        self.device_of = nn.Parameter(torch.zeros(1))
        self.texts = [TOKENIZER.encode(text) for text in texts]
        self.tokens = self.rounds = 0

    def hidden(self, batch: Batch) -> Tensor:
        self.tokens += batch.num_tokens
        self.rounds += 1
        said = torch.empty(batch.num_tokens, dtype=torch.int64)
        bounds = batch.cu_seqlens.tolist()
        for start, stop in zip(bounds, bounds[1:], strict=False):
            ids = batch.input_ids[start:stop].tolist()
            for n in range(1, len(ids) + 1):
                known = [text for text in self.texts if text[:n] == ids[:n] and len(text) > n]
                said[start + n - 1] = known[0][n] if known else END
        return said

    def logits(self, hidden: Tensor) -> Tensor:
        return nn.functional.one_hot(hidden, TOKENIZER.vocab_size).float()


def one_by_one(model: nn.Module, prompt: list[int], count: int, stops: Sequence[int]) -> list[int]:
    ids: list[int] = []
    for _ in range(count):
        with torch.no_grad():
            hidden = model.hidden(build_batch([Example(prompt + ids)]))
            ids.append(int(model.logits(hidden[-1]).argmax()))
        if ids[-1] in stops:
            break
    return ids


@pytest.fixture(scope="module")
def model() -> nn.Module:
    # Wide initial weights: what this model says depends on all that came before.
    config = read_json(builtin.model_folder() / "config.json")
    return new_model({**config, "initializer_range": 0.3, "num_hidden_layers": 2}, seed=1)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [
        TOKENIZER.encode_chat(row["messages"][:1], add_generation_prompt=True) for row in ROWS[:5]
    ] + [[7]]


@pytest.mark.parametrize("max_tokens", [1, 150])
@pytest.mark.parametrize("drafted", ["none", "gold", "right", "half"])
def test_greedy_is_one_token_at_a_time(
    model: nn.Module, prompts: list[list[int]], max_tokens: int, drafted: str
) -> None:
    count = 20
    free = [one_by_one(model, prompt, count, ()) for prompt in prompts]
    stops = (free[0][4], free[1][9])  # some answers stop there, others at the limit
    expected = [one_by_one(model, prompt, count, stops) for prompt in prompts]
    assert {len(ids) == count for ids in expected} == {True, False}
    drafts = {
        "none": None,
        "gold": [TOKENIZER.encode("14 + 7 = 21\nAnswer: 21") for _ in prompts],
        "right": free,
        "half": [ids[: n + 3] + [11] * 40 for n, ids in enumerate(free)],
    }[drafted]
    found = greedy(
        model, prompts, count, stop_ids=stops, drafts=drafts, max_tokens_per_batch=max_tokens
    )
    assert found == expected


def test_one_token_and_training_mode(model: nn.Module, prompts: list[list[int]]) -> None:
    model.train()
    assert greedy(model, prompts, 1) == [one_by_one(model, p, 1, ()) for p in prompts]
    assert model.training
    model.eval()
    assert greedy(model, [], 1) == [] and not model.training


def chats(answers: Sequence[str]) -> list[str]:
    return [
        TOKENIZER.render_chat([row["messages"][0], {"role": "assistant", "content": answer}])
        for row, answer in zip(ROWS, answers, strict=True)
    ]


def test_rate_counts_the_answers_that_are_right() -> None:
    golds = [row["messages"][1]["content"] for row in ROWS]
    said = list(golds)
    said[0] = "Answer: " + golds[0].split("Answer: ")[1]  # right without any steps
    said[1] = golds[1] + "1"  # another number
    said[2] = golds[2].replace("Answer: ", "It is ")  # no answer
    result = exact_match(Reciter(chats(said)), TOKENIZER, ROWS, 64, builtin.answer_of)
    assert result.count == 12 and result.rate == pytest.approx(10 / 12)
    assert [sample.right for sample in result.samples] == [True, False, False] + [True] * 9
    assert [sample.answer for sample in result.samples] == said
    assert result.samples[1].question == ROWS[1]["messages"][0]["content"]
    assert result.samples[1].gold == golds[1].split("Answer: ")[1]


def test_an_answer_cut_short_is_wrong() -> None:
    golds = [row["messages"][1]["content"] for row in ROWS]
    longest = max(len(TOKENIZER.encode(gold)) for gold in golds)
    reciter = Reciter(chats(golds))
    assert exact_match(reciter, TOKENIZER, ROWS, longest, builtin.answer_of).rate == 1
    assert exact_match(reciter, TOKENIZER, ROWS, 3, builtin.answer_of).rate == 0


def test_right_answers_cost_one_forward() -> None:
    golds = [row["messages"][1]["content"] for row in ROWS]
    reciter = Reciter(chats(golds))
    exact_match(reciter, TOKENIZER, ROWS, 64, builtin.answer_of)
    assert reciter.rounds == 1
    # Per row: the conversation without its last newline, and one place for the token after it.
    assert reciter.tokens == sum(len(text) for text in reciter.texts)


@pytest.mark.parametrize(
    "rows, message",
    [
        ([], "at least one row"),
        ([{"text": "hello"}], "row 0: .* got columns text"),
        ([ROWS[0], {"messages": ROWS[1]["messages"][:1]}], "row 1: exact match needs `messages`"),
    ],
)
def test_rows_of_another_kind_are_refused(rows: list[dict], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        exact_match(Reciter([]), TOKENIZER, rows, 8, builtin.answer_of)
