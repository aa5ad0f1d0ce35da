"""The shipped files of the built-in model are what the script writes, and are fit for use."""

import json
from pathlib import Path

import pytest

from lean_trl import builtin
from lean_trl.builtin.dataset import make_rows
from lean_trl.builtin.make import write_model_folder
from lean_trl.data.tokenizer import load_tokenizer
from lean_trl.model.loader import new_model
from lean_trl.model.safetensors_io import read_json

TOKENIZER = load_tokenizer(builtin.model_folder())
FILES = {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
CHAT = [{"role": "user", "content": "What is 40 + 2?"}, {"role": "assistant", "content": "42"}]


def test_the_script_writes_what_is_shipped_byte_for_byte(tmp_path: Path) -> None:
    write_model_folder(tmp_path)
    shipped = builtin.model_folder()
    assert {file.name for file in tmp_path.iterdir()} == FILES
    assert {file.name for file in shipped.iterdir()} == FILES
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (shipped / name).read_bytes(), name


def test_digits_are_tokens_and_the_same_wherever_they_stand() -> None:
    digit = {d: TOKENIZER.backend.token_to_id(d) for d in "0123456789"}
    assert len(set(digit.values())) == 10 and None not in digit.values()
    for text in ("Mia has 40 coins.", "7 + 5 = 12", "Answer: 9061", "(3) 4,5\n6 x7"):
        digits = [character for character in text if character.isdigit()]
        ids = TOKENIZER.encode(text)
        assert [i for i in ids if i in digit.values()] == [digit[d] for d in digits]
        assert len(ids) <= len(text)


@pytest.mark.parametrize(
    "text", ["", "Zażółć gęślą jaźń 😀\t\n\n  12  x", "<b>&amp;</b>", "\x00\x7f"]
)
def test_any_text_survives(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_rows_are_short() -> None:
    rows = make_rows()
    longest = max(
        len(TOKENIZER.encode_chat(row["messages"])) for split in rows.values() for row in split
    )
    assert longest <= 128  # data.max_length of the recipe


def test_special_tokens_and_template() -> None:
    assert (TOKENIZER.pad_id, TOKENIZER.eos_id, TOKENIZER.stop_ids) == (0, 2, (2,))
    assert TOKENIZER.bos_id is None
    text, spans = TOKENIZER.chat.render_marked([{"role": "system", "content": "Add."}, *CHAT])
    assert text == (
        "<|im_start|>system\nAdd.<|im_end|>\n"
        "<|im_start|>user\nWhat is 40 + 2?<|im_end|>\n"
        "<|im_start|>assistant\n42<|im_end|>\n"
    )
    assert [text[a:b] for a, b in spans] == ["42<|im_end|>"]
    asked = TOKENIZER.encode_chat(CHAT[:1], add_generation_prompt=True)
    whole = TOKENIZER.encode_chat(CHAT)
    assert whole[: len(asked)] == asked
    assert TOKENIZER.decode(whole[len(asked) :]) == "42<|im_end|>\n"


def test_model_is_tiny_qwen3_and_comes_from_the_seed() -> None:
    config = read_json(builtin.model_folder() / "config.json")
    assert config["vocab_size"] == TOKENIZER.vocab_size
    model = new_model(config, seed=3)
    assert 1e6 <= sum(weight.numel() for weight in model.parameters()) <= 3e6
    again = new_model(config, seed=3).state_dict()
    assert all(weight.equal(again[name]) for name, weight in model.state_dict().items())


def test_transformers_reads_the_folder() -> None:
    transformers = pytest.importorskip("transformers")
    folder = builtin.model_folder()
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs.apply_chat_template(CHAT, tokenize=False) == TOKENIZER.render_chat(CHAT)
    marked = theirs.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    assert marked["input_ids"] == TOKENIZER.encode_chat(CHAT)
    learnt = [i for i, m in zip(marked["input_ids"], marked["assistant_masks"], strict=True) if m]
    assert theirs.decode(learnt) == "42<|im_end|>"
    assert (theirs.eos_token, theirs.pad_token) == ("<|im_end|>", "<|pad|>")
    config = transformers.AutoConfig.from_pretrained(folder)
    assert config.model_type == "qwen3" and config.head_dim == 32
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == len(theirs)
