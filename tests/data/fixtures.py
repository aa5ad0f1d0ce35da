"""A tokenizer small enough to work out by hand, and the folder that holds it.

ids: 0 <pad> 1 <bos> 2 <eos> 3 <|u|> 4 <|a|> 5 <|end|> 6 <unk>, 7-32 a..z, 33 space, 34-43 0..9, 44
newline, 45 he, 46 llo, 47 hello, 48 lo. "hello" always encodes to 47, though 45 46 decodes to the
same text.
"""

from __future__ import annotations

import json
import string
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, processors
from tokenizers.decoders import Fuse

SPECIAL = ("<pad>", "<bos>", "<eos>", "<|u|>", "<|a|>", "<|end|>")
CHARACTERS = (*string.ascii_lowercase, " ", *string.digits, "\n")

# No marks of what the assistant writes; CT of the hand-worked cases.
PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ '<|a|>' if m.role == 'assistant' else '<|u|>' }}{{ m.content }}{{ "
    "'<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|a|>' }}{% endif %}"
)


def last_answer_template(generation_prompt: str) -> str:
    """Writes `0 0 ` before the last assistant content, but promises something else:

    imitates reasoning templates.
    """
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|a|>' }}"
        "{% if loop.last %}{{ '0 0 ' }}{% endif %}{% else %}{{ '<|u|>' }}{% endif %}{{ m.content "
        "}}{{ '<|end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|a|>"
        + generation_prompt
        + "' }}{% endif %}"
    )


def write_tokenizer(
    folder: Path,
    *,
    template: str | None = PLAIN_TEMPLATE,
    adds_bos: bool = False,
    pad: str = "<pad>",
) -> Path:
    """Write the tokenizer's files; adds_bos: its post-processor puts <bos> first."""
    vocab = {token: index for index, token in enumerate((*SPECIAL, "<unk>", *CHARACTERS))}
    for token in ("he", "llo", "hello", "lo"):
        vocab[token] = len(vocab)
    merges = [("h", "e"), ("l", "o"), ("l", "lo"), ("he", "llo")]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[a-z]+|[^a-z]"), "isolated")
    backend.decoder = Fuse()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    )
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 1)]
        )
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": pad, "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    """One row a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
