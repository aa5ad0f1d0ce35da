"""Tokenizer folders: special ids, templates by name, saving."""

import json
from pathlib import Path

import pytest

from lean_trl.data.tokenizer import Tokenizer, load_tokenizer

from .fixtures import PLAIN_TEMPLATE, write_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "tokenizer"


def test_ids(tok: Tokenizer, tok_bos: Tokenizer) -> None:
    assert (tok.bos_id, tok.eos_id, tok.pad_id) == (1, 2, 0)
    assert tok.encode("hello") == [47] and tok_bos.encode("hello") == [1, 47]
    assert tok_bos.encode("hello", add_special_tokens=False) == [47]
    assert tok_bos.encode_batch(["a", "b"]) == [[1, 7], [1, 8]]
    assert tok.decode([45, 46]) == "hello" == tok.decode([47])
    assert tok.decode([1, 7], skip_special_tokens=True) == "a"


def test_stop_ids_are_eos_and_what_closes_a_turn(tok: Tokenizer, tmp_path: Path) -> None:
    assert tok.stop_ids == (2, 5)
    assert load_tokenizer(write_tokenizer(tmp_path, template=None)).stop_ids == (2,)


def test_saving_keeps_every_byte_and_adds_stop_ids(tok: Tokenizer, tmp_path: Path) -> None:
    tok.save(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (tok.folder / name).read_bytes()
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"eos_token_id": [2, 5]}
    again = load_tokenizer(tmp_path)
    assert again.stop_ids == tok.stop_ids and again.identity == tok.identity
    again.save(tmp_path / "once more")
    written = (tmp_path / "once more" / "generation_config.json").read_bytes()
    assert written == (tmp_path / "generation_config.json").read_bytes()


def test_a_template_of_the_users_own(tok: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}!")
    mine = load_tokenizer(tok.folder, chat_template=str(tmp_path / "mine.jinja"))
    assert mine.render_chat([{"role": "user", "content": "a"}]) == "a!"
    mine.save(tmp_path / "saved")
    assert (tmp_path / "saved" / "chat_template.jinja").read_text() == "{{ messages[0].content }}!"
    with pytest.raises(ValueError, match="neither a Jinja file nor one of.*default"):
        load_tokenizer(tok.folder, chat_template="rag")


def test_templates_in_the_older_places(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, template=None)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "default", "template": "d"},
        {"name": "tool_use", "template": "t"},
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("r")
    for name, text in ((None, "d"), ("tool_use", "t"), ("rag", "r")):
        assert load_tokenizer(folder, chat_template=name).render_chat([]) == text
    load_tokenizer(folder).save(tmp_path / "saved")
    assert (tmp_path / "saved" / "additional_chat_templates" / "rag.jinja").read_text() == "r"


def test_no_template_and_no_tokenizer(tmp_path: Path) -> None:
    bare = load_tokenizer(write_tokenizer(tmp_path / "bare", template=None))
    with pytest.raises(ValueError, match="no chat template.*model.chat_template"):
        bare.render_chat([{"role": "user", "content": "a"}])
    with pytest.raises(ValueError, match="tokenizer.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="give the folder"):
        load_tokenizer(tmp_path / "bare" / "tokenizer.json")


@pytest.mark.parametrize("adds_bos", [False, True])
def test_same_ids_as_transformers(tmp_path: Path, adds_bos: bool) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_tokenizer(tmp_path, adds_bos=adds_bos, template=PLAIN_TEMPLATE)
    ours = load_tokenizer(folder)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    for text in ("", "hello lo\n", "ab<eos>", "<|u|>x<|end|>", "9 z"):
        assert ours.encode(text) == theirs(text)["input_ids"]
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs(text)["input_ids"])
    chat = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "hello"}]
    got = theirs.apply_chat_template(chat, tokenize=True, return_dict=False)
    assert ours.encode_chat(chat) == got
