"""A tokenizer folder in Hugging Face's layout: text <-> ids, special ids, template, saving."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from lean_trl.config import ModelConfig
from lean_trl.data.chat import ChatTemplate, Message
from lean_trl.data.hub import TOKENIZER_FILES, resolve_model
from lean_trl.data.spans import AssistantSpans

SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True)
class Tokenizer:
    """Text <-> ids, and what the model's files say of its special tokens.

    `backend` has no post-processor: BOS and EOS are put in by whoever knows whether they belong
    there.
    """

    folder: Path
    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]  # bos_token, eos_token, ... -> its text
    prefix: tuple[int, ...]  # ids that this tokenizer puts before a plain text (BOS), often none
    suffix: tuple[int, ...]  # ids that it puts after a plain text, almost always none
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None  # EOS where the files name none; nothing is ever inferred from it
    stop_ids: tuple[int, ...]  # end an answer: EOS, generation_config.json's, the template's own
    chat: ChatTemplate | None
    identity: str  # a hash of what turns text into ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a plain text, with the tokenizer's own BOS when add_special_tokens."""
        ids = self.backend.encode(text).ids
        return [*self.prefix, *ids, *self.suffix] if add_special_tokens else ids

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """encode() of each text, on all cores."""
        encodings = self.backend.encode_batch(list(texts))
        if not add_special_tokens:
            return [encoding.ids for encoding in encodings]
        return [[*self.prefix, *encoding.ids, *self.suffix] for encoding in encodings]

    def decode(self, ids: Sequence[int] | np.ndarray, *, skip_special_tokens: bool = False) -> str:
        """The text of some ids."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    @property
    def special_texts(self) -> tuple[str, ...]:
        """What the special tokens look like in text."""
        added = self.backend.get_added_tokens_decoder().values()
        return tuple(token.content for token in added if token.special)

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """What the tokens that end an answer look like in text."""
        return tuple(text for text in map(self.backend.id_to_token, self.stop_ids) if text)

    @property
    def vocab_size(self) -> int:
        """Entries of the vocabulary, added tokens included; the model's may be larger."""
        return self.backend.get_vocab_size()

    def render_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False, **variables: Any
    ) -> str:
        """The text of a conversation by the chat template (BOS included when the template writes
        it).

        Raises ValueError when there is no template, TemplateError when it refuses the messages.
        """
        if self.chat is None:
            raise ValueError(
                f"{self.folder} has no chat template, which rows of messages need: set "
                f"model.chat_template to a "
                f"Jinja file, or give the rows as text"
            )
        return self.chat.render(messages, add_generation_prompt=add_generation_prompt, **variables)

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """The ids of a conversation; see render_chat."""
        return self.encode(self.render_chat(messages, **variables), add_special_tokens=False)

    def save(self, folder: str | Path) -> None:
        """Copy the files into `folder` byte for byte, and the chat template that was used.

        generation_config.json gains the stop ids that it lacks, so that what was trained to stop
        does.
        """
        folder = Path(folder)
        for pattern in TOKENIZER_FILES:
            for file in self.folder.glob(pattern):
                if file.name not in ("config.json", "generation_config.json"):
                    target = folder / file.relative_to(self.folder)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, target)
        if self.chat is not None and self.chat.source != _own_template(self.folder):
            (folder / "chat_template.jinja").write_text(self.chat.source, encoding="utf-8")
        generation = _read_json(self.folder / "generation_config.json")
        if list(self.stop_ids) != _as_list(generation.get("eos_token_id")) and self.stop_ids:
            generation["eos_token_id"] = (
                list(self.stop_ids) if len(self.stop_ids) > 1 else self.stop_ids[0]
            )
            text = json.dumps(generation, indent=2, sort_keys=True) + "\n"
            (folder / "generation_config.json").write_text(text, encoding="utf-8")
        elif generation:
            shutil.copyfile(
                self.folder / "generation_config.json", folder / "generation_config.json"
            )


def load_tokenizer(
    source: str | Path | ModelConfig,
    *,
    revision: str | None = None,
    chat_template: str | None = None,
) -> Tokenizer:
    """The tokenizer of a local folder, a hub id, or the model section of the settings.

    chat_template: a Jinja file, or the name of one of the templates that the folder holds; None:
    its default. Raises ValueError when there is no tokenizer.json or no such template.
    """
    if isinstance(source, ModelConfig):
        revision, chat_template = source.revision, source.chat_template
        folder = resolve_model(source.path, revision, weights=False)
    else:
        folder = resolve_model(source, revision, weights=False)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(
            f"{folder} has no tokenizer.json: convert the tokenizer with transformers and save it "
            f"again"
        )
    backend = tokenizers.Tokenizer.from_file(str(file))
    backend.no_truncation()
    backend.no_padding()
    prefix, suffix = _added_around(backend)
    # Without it offsets are those of the text (GPT-2's trims spaces), and nothing is added behind
    # our back.
    backend.post_processor = None

    special = _special_tokens(folder)
    ids = {name: backend.token_to_id(text) for name, text in special.items()}
    generation = _read_json(folder / "generation_config.json")
    eos = ids.get("eos_token")
    stops = dict.fromkeys(
        [*([] if eos is None else [eos]), *_as_list(generation.get("eos_token_id"))]
    )
    tokenizer = Tokenizer(
        folder=folder,
        backend=backend,
        special_tokens=special,
        prefix=prefix,
        suffix=suffix,
        bos_id=ids.get("bos_token"),
        eos_id=eos,
        pad_id=eos if ids.get("pad_token") is None else ids["pad_token"],
        stop_ids=tuple(stops),
        chat=None,
        identity=hashlib.sha256(
            file.read_bytes() + repr((prefix, suffix, eos)).encode()
        ).hexdigest(),
    )
    template = _template(folder, chat_template)
    if template is None:
        return tokenizer
    chat = ChatTemplate(template, special)
    # A chat model stops where its template closes a turn, whatever eos_token says.
    closing = AssistantSpans(chat, tokenizer.special_texts).closing_token()
    closing_id = None if closing is None else backend.token_to_id(closing)
    if closing_id is not None:
        stops[closing_id] = None
    return replace(tokenizer, chat=chat, stop_ids=tuple(stops))


def _added_around(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the post-processor puts before and after a text."""
    for probe in ("a", "0", ".", "\n"):
        bare = backend.encode(probe, add_special_tokens=False).ids
        full = backend.encode(probe, add_special_tokens=True).ids
        for start in range(len(full) - len(bare) + 1) if bare else ():
            if full[start : start + len(bare)] == bare:
                return tuple(full[:start]), tuple(full[start + len(bare) :])
    raise ValueError("the tokenizer encodes none of 'a', '0', '.' and a newline: is it whole?")


def _special_tokens(folder: Path) -> dict[str, str]:
    """{name: text}. special_tokens_map.json is the older place, tokenizer_config.json wins."""
    found: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        for name, value in _read_json(folder / file).items():
            text = value.get("content") if isinstance(value, dict) else value
            if name in SPECIAL_NAMES and isinstance(text, str):
                found[name] = text
    return found


def _template(folder: Path, wanted: str | None) -> str | None:
    named = _own_templates(folder)
    if wanted is None:
        return named.get("default")
    if wanted in named:
        return named[wanted]
    file = Path(wanted)
    if not file.is_file():
        raise ValueError(
            f"model.chat_template {wanted!r} is neither a Jinja file nor one of the templates of "
            f"{folder}: "
            f"{', '.join(named) or 'it has none'}"
        )
    return file.read_text(encoding="utf-8")


def _own_template(folder: Path) -> str | None:
    return _own_templates(folder).get("default")


def _own_templates(folder: Path) -> dict[str, str]:
    """Templates by name, from all the places where they have been kept; later ones win."""
    value = _read_json(folder / "tokenizer_config.json").get("chat_template")
    named = {"default": value} if isinstance(value, str) else {}
    if isinstance(value, list):
        named = {entry["name"]: entry["template"] for entry in value}
    legacy = _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(legacy, str):
        named["default"] = legacy
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        named[file.stem] = file.read_text(encoding="utf-8")
    file = folder / "chat_template.jinja"
    if file.is_file():
        named["default"] = file.read_text(encoding="utf-8")
    return named


def _read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _as_list(value: int | list[int] | None) -> list[int]:
    return [] if value is None else value if isinstance(value, list) else [value]
