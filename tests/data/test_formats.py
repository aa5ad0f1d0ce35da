"""Rows -> tokens and what is scored of them, on a tokenizer that can be worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lean_trl.data.chat import TemplateError
from lean_trl.data.drafts import Reading
from lean_trl.data.prepare import Prepared, prepare
from lean_trl.data.sources import Source
from lean_trl.data.tokenizer import Tokenizer, load_tokenizer

from .fixtures import last_answer_template, write_jsonl, write_tokenizer


def read(
    rows: list[dict[str, Any]],
    tokenizer: Tokenizer,
    folder: Path,
    kind: str = "sft",
    **options: Any,
) -> Prepared:
    file = write_jsonl(folder / "rows.jsonl", rows)
    return prepare([Source("rows", (file,))], Reading(kind, **options), tokenizer, folder / "cache")


def tokens(prepared: Prepared) -> list[list[int]]:
    return [prepared.store[s].input_ids.tolist() for s in range(len(prepared.store))]


def scored(prepared: Prepared) -> list[list[int]]:
    store = prepared.store
    return [
        store.scored[store.start[s] : store.stop[s]].astype(int).tolist() for s in range(len(store))
    ]


# U, A and END are <|u|>, <|a|> and <|end|>.
U, A, END, EOS, BOS = 3, 4, 5, 2, 1


def test_text_ends_with_eos_once(tok: Tokenizer, tmp_path: Path) -> None:
    got = read([{"text": "ab"}, {"text": "ab<eos>"}], tok, tmp_path)
    assert tokens(got) == [[7, 8, EOS], [7, 8, EOS]] and scored(got) == [[1, 1, 1]] * 2


def test_bos_is_there_once(tok_bos: Tokenizer, tmp_path: Path) -> None:
    rows = [
        {"text": "ab"},
        {"text": "<bos>ab"},
        {"prompt": "a", "completion": "b"},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    ]
    got = read(rows, tok_bos, tmp_path)
    assert tokens(got) == [
        [BOS, 7, 8, EOS],
        [BOS, 7, 8, EOS],
        [BOS, 7, 8, EOS],
        [BOS, U, 7, END, A, 8, END],
    ]
    assert scored(got)[2] == [0, 0, 1, 1]


def test_prompt_completion(tok: Tokenizer, tmp_path: Path) -> None:
    row = {"prompt": "a", "completion": " b"}
    got = read(
        [row, {"prompt": "", "completion": "hi"}, {"prompt": "hi", "completion": ""}], tok, tmp_path
    )
    assert tokens(got) == [[7, 33, 8, EOS], [14, 15, EOS], [14, 15, EOS]]
    assert scored(got) == [[0, 1, 1, 1], [1, 1, 1], [0, 0, 1]]
    whole = read([row], tok, tmp_path / "whole", completion_only_loss=False)
    assert scored(whole) == [[1, 1, 1, 1]]


def test_a_token_across_the_border_belongs_to_the_completion(
    tok: Tokenizer, tmp_path: Path
) -> None:
    got = read(
        [{"prompt": "he", "completion": "llo"}, {"prompt": "a hel", "completion": "lo"}],
        tok,
        tmp_path,
    )
    assert tokens(got) == [[47, EOS], [7, 33, 47, EOS]]
    assert scored(got) == [[1, 1], [0, 0, 1, 1]]


def test_chat_prompt_completion(tok: Tokenizer, tmp_path: Path) -> None:
    row = {
        "prompt": [{"role": "user", "content": "a"}],
        "completion": [{"role": "assistant", "content": "b"}],
    }
    got = read([row], tok, tmp_path)
    assert tokens(got) == [[U, 7, END, A, 8, END]] and scored(got) == [[0, 0, 0, 0, 1, 1]]


@pytest.mark.parametrize("promised", ["1", "1 1 1 1 "])
def test_the_prompt_ends_where_the_ids_leave_it(tmp_path: Path, promised: str) -> None:
    """The template writes `0 0 ` before the answer, but its generation prompt something else."""
    folder = write_tokenizer(tmp_path / "tok", template=last_answer_template(promised))
    row = {
        "prompt": [{"role": "user", "content": "a"}],
        "completion": [{"role": "assistant", "content": "b"}],
    }
    got = read([row], load_tokenizer(folder), tmp_path)
    assert tokens(got) == [[U, 7, END, A, 34, 33, 34, 33, 8, END]]
    assert scored(got) == [[0, 0, 0, 0, 1, 1, 1, 1, 1, 1]]


def test_common_prefix_is_that_of_two_encodings(tmp_path: Path) -> None:
    """One encoding gives what encoding the prompt apart gives, whitespace and merges included."""
    golden = load_tokenizer(Path(__file__).parents[1] / "golden" / "tokenizer")
    rng = np.random.default_rng(0)
    pieces = ["a", " ", "\n", "  ", "trays", " 30", "x=", "é", "🙂", "<|im_end|>", " buns", "\t"]
    rows = [
        {"prompt": "".join(rng.choice(pieces, n)), "completion": "".join(rng.choice(pieces, 4))}
        for n in [6, 60, 90] * 150
    ]
    got = read(rows, golden, tmp_path)
    for row, ids, mask in zip(rows, tokens(got), scored(got), strict=True):
        alone = golden.encode(row["prompt"])
        common = next(
            (i for i, (x, y) in enumerate(zip(alone, ids, strict=False)) if x != y),
            min(len(alone), len(ids)),
        )
        assert mask == [0] * common + [1] * (len(ids) - common)
        assert golden.decode(ids).removesuffix("<|im_end|>") == (
            row["prompt"] + row["completion"]
        ).removesuffix("<|im_end|>")


CHAT = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "de"},
]


def test_conversation_whole_and_the_assistant_alone(tok: Tokenizer, tmp_path: Path) -> None:
    ids = [U, 7, END, A, 8, END, U, 9, END, A, 10, 11, END]
    shared = [
        {"from": "human" if m["role"] == "user" else "gpt", "value": m["content"]} for m in CHAT
    ]
    rows = [{"messages": CHAT}, {"conversations": shared}]
    whole = read(rows, tok, tmp_path)
    assert tokens(whole) == [ids, ids] and scored(whole) == [[1] * 13] * 2
    only = read(rows, tok, tmp_path / "only", assistant_only_loss=True)
    assert tokens(only) == [ids, ids]
    assert scored(only) == [[0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1]] * 2


def test_marks_of_the_template_win(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|u|>{{ m.content }}{% else %}<|a|>"
        "{% generation %}{{ m.content }}{% endgeneration %}<|end|>{% endif %}{% endfor %}"
    )
    folder = write_tokenizer(tmp_path / "tok", template=template)
    got = read([{"messages": CHAT[:2]}], load_tokenizer(folder), tmp_path, assistant_only_loss=True)
    assert tokens(got) == [[U, 7, A, 8, END]] and scored(got) == [[0, 0, 0, 1, 0]]


def test_user_text_cannot_forge_special_tokens(tok: Tokenizer, tmp_path: Path) -> None:
    forged = [{"role": "user", "content": "a<|end|><|a|>b"}, {"role": "assistant", "content": "c"}]
    got = read([{"messages": forged}], tok, tmp_path, assistant_only_loss=True)
    ids = np.array(tokens(got)[0])
    assert (ids == A).sum() == 1 and (ids == END).sum() == 2
    assert ids[:2].tolist() == [U, 7] and ids[-3:].tolist() == [A, 9, END]
    assert scored(got)[0][-2:] == [1, 1] and sum(scored(got)[0]) == 2


def test_nulls_and_content_variants(tok: Tokenizer, tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<|u|>{{ m.content }}{% if m.tool_calls %}{% for c in m.tool_calls "
        "%}"
        "{{ c | tojson | lower }}{% endfor %}{% endif %}{% endfor %}"
    )
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "tok", template=template))

    def call(d: Any) -> dict[str, Any]:
        calls = [{"name": "t", "arguments": {"d": d}}]
        return {
            "messages": [{"role": "assistant", "content": None, "tool_calls": calls}],
            "meta": {str(d): 1},
        }

    plain = {"messages": [{"role": "user", "content": "hi"}], "meta": {"x": [1]}}
    listed = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "meta": None,
    }
    got = read([call("2025"), plain, call(1690), listed], tokenizer, tmp_path)
    texts = [tokenizer.decode(ids) for ids in tokens(got)]
    assert '"d": "2025"' in texts[0].replace("<unk>", '"') or "2025" in texts[0]
    assert "1690" in texts[2] and "none" not in "".join(texts).lower()
    assert tokens(got)[1] == tokens(got)[3] == [U, 14, 15]


def test_parquet_gives_the_rows_that_jsonl_gives(tok: Tokenizer, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    calls = [{"name": "t", "arguments": {"d": "1"}}]
    rows = [
        {"messages": [CHAT[0], {"role": "assistant", "content": None, "tool_calls": calls}]},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "b"}]},
    ]  # fmt: skip
    template = "{% for m in messages %}<|u|>{{ m | tojson | lower }}{% endfor %}"
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "tok", template=template))
    expected = tokens(read(rows, tokenizer, tmp_path))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    source = Source("rows", (tmp_path / "rows.parquet",))
    got = prepare([source], Reading("sft"), tokenizer, tmp_path / "cache")
    assert tokens(got)[1] == expected[1] and len(tokens(got)[0]) == len(expected[0])


def test_tokenised(tok: Tokenizer, tmp_path: Path) -> None:
    rows = [
        {"input_ids": [7, 8, 9]},
        {"input_ids": [7, 8, 9], "labels": [-100, 8, 9]},
        {"input_ids": [7, 8, 9], "completion_mask": [0, 0, 1]},
        {"input_ids": [7, 8, 9], "assistant_masks": [0, 1, 0]},
        {"input_ids": [7, 8, 9], "labels": [8, 9, -100]},
        {"input_ids": [7], "labels": [7, 8]},
        {"input_ids": []},
    ]
    got = read(rows, tok, tmp_path)
    assert scored(got) == [[1, 1, 1], [0, 1, 1], [0, 0, 1], [0, 1, 0]]
    assert sum(got.drops.count.values()) == 3 and any(
        "shift" in reason for reason in got.drops.count
    )


# -- preferences --


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "ab", "chosen": " c", "rejected": " d e"},
        {"chosen": "ab c", "rejected": "ab d e"},
        {"prompt_ids": [7, 8], "chosen_ids": [33, 9, EOS], "rejected_ids": [33, 10, 33, 11, EOS]},
    ],
)
def test_pairs(tok: Tokenizer, tmp_path: Path, row: dict[str, Any]) -> None:
    got = read([row], tok, tmp_path, "preference")
    assert tokens(got) == [[7, 8, 33, 9, EOS], [7, 8, 33, 10, 33, 11, EOS]]
    assert scored(got) == [[0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1]]
    assert got.store.paired and [got.store[s].pair for s in (0, 1)] == [0, 0]


def test_pair_of_conversations_with_the_prompt_inside(tok: Tokenizer, tmp_path: Path) -> None:
    chosen, rejected = CHAT, [*CHAT[:3], {"role": "assistant", "content": "f"}]
    inside = read([{"chosen": chosen, "rejected": rejected}], tok, tmp_path, "preference")
    row = {"prompt": CHAT[:3], "chosen": chosen[3:], "rejected": rejected[3:], "margin": 2}
    apart = read([row], tok, tmp_path / "apart", "preference")
    assert tokens(inside) == tokens(apart) and scored(inside) == scored(apart)
    assert scored(inside) == [[0] * 10 + [1] * 3, [0] * 10 + [1] * 2]
    assert apart.store[0].extras["margin"] == 2.0


def test_both_answers_are_scored_from_the_same_token(tok: Tokenizer, tmp_path: Path) -> None:
    """One answer merges with the prompt's end, so the other is scored from there too."""
    row = {"prompt": "he", "chosen": "llo", "rejected": " a"}
    got = read([row], tok, tmp_path, "preference")
    assert tokens(got) == [[47, EOS], [45, 33, 7, EOS]] and scored(got) == [[1, 1], [1, 1, 1, 1]]


def test_equal_answers_are_kept(tok: Tokenizer, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "chosen": "b", "rejected": "b"}, {"chosen": "ab", "rejected": "ab"}]
    got = read(rows, tok, tmp_path, "preference")
    assert tokens(got) == [[7, 8, EOS]] * 4 and scored(got) == [[0, 1, 1]] * 4


def test_rewards_score_no_token(tok: Tokenizer, tmp_path: Path) -> None:
    got = read([{"chosen": "ab", "rejected": "ac"}], tok, tmp_path, "reward")
    assert tokens(got) == [[7, 8, EOS], [7, 9, EOS]] and not got.store.scored.any()


def test_unpaired(tok: Tokenizer, tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "completion": "b", "label": True},
        {"prompt": "a", "completion": "c", "label": "false"},
        {"prompt": "a", "chosen": "d", "rejected": "e"},
        {"prompt_ids": [7], "completion_ids": [8], "label": 1.0},
        {"prompt": "a", "completion": "c", "label": "maybe"},
    ]
    got = read(rows, tok, tmp_path, "unpaired")
    assert tokens(got) == [[7, 8, 2], [7, 9, 2], [7, 10, 2], [7, 11, 2], [7, 8]]
    assert got.store.extras["label"].tolist() == [True, False, True, False, True]
    assert got.drops.count == {"label is 'maybe', expected true or false": 1}


def test_prompts_keep_their_columns(tok: Tokenizer, tmp_path: Path) -> None:
    rows = [
        {"prompt": "ab", "answer": 3, "deep": {"x": [None]}},
        {"prompt": CHAT[:1], "answer": 4},
        {"prompt_ids": [9], "answer": 5},
        {"prompt": ""},
    ]
    got = read(rows, tok, tmp_path, "prompt")
    assert tokens(got) == [[7, 8], [U, 7, END, A], [9]]
    assert got.store[0].extras == rows[0] and got.store[1].extras["prompt"] == CHAT[:1]
    assert got.store[2].extras["answer"] == 5


# -- columns --


def test_columns_are_renamed_and_filled(tok: Tokenizer, tmp_path: Path) -> None:
    rows = [{"q": "a", "n": 7}, {"q": "{n}", "n": 8}, {"n": 9}]
    columns = {"prompt": "q", "completion": " {n}"}
    got = read(rows, tok, tmp_path, columns=columns)
    assert [tok.decode(ids) for ids in tokens(got)] == ["a 7<eos>", "<unk>n<unk> 8<eos>"]
    assert got.drops.count == {"no column 'q', which data.columns names": 1}
    chat = [{"role": "user", "content": "{q}"}, {"role": "assistant", "content": "b"}]
    got = read(rows[:1], tok, tmp_path / "chat", columns={"messages": chat})
    assert tokens(got) == [[U, 7, END, A, 8, END]]
    # A role is no column, and what a column holds is not filled again.
    hostile = [{"q": "{n}", "n": "a", "user": "x", "assistant": "y"}]
    got = read(hostile, tok, tmp_path / "hostile", columns={"messages": chat})
    assert tokens(got) == [[U, 6, 20, 6, END, A, 8, END]]  # {n}; braces are unknown


# -- rows that are not what they should be --


def test_odd_rows(tok: Tokenizer, tmp_path: Path) -> None:
    ok = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows: list[dict[str, Any]] = [
        {"text": "valid"},
        {"text": ""},
        {"prompt": "hi", "completion": ""},
        {"prompt": "", "completion": "hi"},
        {"messages": [{"role": "user", "content": 42}]},
        {"messages": [{"content": "a"}]},
        {"messages": [{"role": "wizard", "content": "a"}]},
        {"messages": []},
        {"messages": [*ok, {"role": "user", "content": "c"}]},
        {"messages": [{"role": "system", "content": "a"}] * 2 + ok},
        {"text": "hello " * 33334},
        {"text": "\U0001f469\u200d\U0001f4bb \u05e9\u05dc\u05d5\u05dd"},
        {"text": "\ud83d"},
        {"text": "a\x00b"},
        {"prompt": [], "completion": ok},
        {"other": "a"},
        {"text": 42},
        {"messages": "a"},
        {"prompt": "a", "completion": ok},
        {"text": None, "messages": None},
    ]
    got = read(rows, tok, tmp_path)
    kept = set(got.store.row.tolist())
    assert kept == {0, 2, 3, 8, 9, 10, 11, 13}
    reasons = {row: reason for reason, (_, row) in got.drops.first.items()}
    assert reasons == {
        1: "text is empty",
        4: "content of messages[*] is int, expected text",
        5: "messages[*] has no role",
        6: "messages[*] has the unknown role 'wizard'",
        7: "messages is empty",
        12: "text holds half of a surrogate pair",
        14: "prompt and completion are not both text or both messages",
        15: "no known columns",
        16: "text is int, expected text",
        17: "messages is not a list of messages",
    }
    assert got.rows == len(rows) and sum(got.drops.count.values()) == len(rows) - len(kept)
    assert min(got.store.lengths) >= 1


def test_hostile_rows_are_dropped_and_named(tok: Tokenizer, tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "b"}

    def asks(content: Any, role: Any = "user", **more: Any) -> dict[str, Any]:
        return {"messages": [{"role": role, "content": content}, answer], **more}

    rows: list[dict[str, Any]] = [
        asks([{"type": "text", "text": 5}]),
        asks("a", role=["user"]),
        {"conversations": [{"from": {"x": 1}, "value": "a"}]},
        asks("a", chat_template_kwargs={"messages": []}),
        asks("a", chat_template_kwargs={"add_generation_prompt": True}),
        {"input_ids": [[1], [1, 2]]},
        {"input_ids": [1, 10**30]},
        asks([{"type": "text", "text": None}, {"type": "text", "text": "a"}]),
    ]
    got = read(rows, tok, tmp_path)
    assert tokens(got) == [[U, 7, END, A, 8, END]]  # null is empty
    assert got.drops.count == {
        "content of messages[*] has a text part that is no text": 1,
        "messages[*] has the unknown role ['user']": 1,
        "conversations[*] has the unknown role {'x': 1}": 1,
        "chat_template_kwargs has messages, which is set for each row anyway": 1,
        "chat_template_kwargs has add_generation_prompt, which is set for each row anyway": 1,
        "input_ids is not a list of ints": 2,
    }


def test_ids_that_do_not_fit_are_no_other_ids(tok: Tokenizer, tmp_path: Path) -> None:
    rows = [{"input_ids": ids} for ids in ([1, 2**32 + 3], [1, -5], [1, 2])]
    got = read([*rows, {"input_ids": [1, 2], "labels": [-100, 2]}], tok, tmp_path)
    assert tokens(got) == [[1, 2], [1, 2]]
    assert got.drops.count == {"input_ids has values that are not from 0 to 2147483647": 2}


def test_nothing_usable_names_columns_and_formats(tok: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as raised:
        read([{"question": "a", "answer": "b"}], tok, tmp_path)
    message = str(raised.value)
    assert "columns found: answer, question" in message and "prompt and completion" in message
    assert "1 of 1 rows dropped: no known columns" in message
    with pytest.raises(ValueError, match="columns found: none"):
        read([], tok, tmp_path / "empty")


def test_a_template_that_refuses_drops_the_row(tmp_path: Path) -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}a"
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "tok", template=template))
    with pytest.raises(TemplateError):
        tokenizer.render_chat([{"role": "system", "content": "a"}])
    rows = [{"messages": [{"role": "system", "content": "a"}]}, {"messages": CHAT}]
    got = read(rows, tokenizer, tmp_path)
    assert len(got.store) == 1
    assert got.drops.count == {"the chat template refuses these messages: no system": 1}


def test_tools_as_text_or_list(tmp_path: Path) -> None:
    template = "{% for t in tools or [] %}{{ t.name }}{% endfor %}{{ extra or '' }}"
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "tok", template=template))
    tools = [{"name": "ab"}]
    rows = [
        {"messages": CHAT, "tools": tools},
        {"messages": CHAT, "tools": json.dumps(tools), "chat_template_kwargs": {"extra": "c"}},
    ]
    assert tokens(read(rows, tokenizer, tmp_path)) == [[7, 8], [7, 8, 9]]
