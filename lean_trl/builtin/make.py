"""How the files of the built-in model came about: a small BPE tokenizer, a template, a config."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from lean_trl.builtin.problems import EASY, HARD, problems, question, solution

SPECIAL_TOKENS = ("<|pad|>", "<|im_start|>", "<|im_end|>")
# Every digit is a token, as carrying needs. A space before a digit goes to what stands before it,
# not to the digit: 7 is the same token in "7 + 5" and "has 7".
SPLIT = r"\p{N}| ?\p{L}+(?: (?=\p{N}))?| ?[^\s\p{L}\p{N}]+(?: (?=\p{N}))?|\s+"
VOCAB_SIZE = 512  # what the texts support is a little less

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- message['content'] + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def make_tokenizer() -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer of the built-in texts; any other text costs more tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    return tokenizer


def _texts() -> Iterator[str]:
    for level in (EASY, HARD):
        rng = Random(0)
        for problem in islice(problems(level, rng, held_out=False), 2000):
            yield from (question(problem, rng), solution(problem))
            yield from ("system\n", "user\n", "assistant\n")


def write_model_folder(folder: Path) -> None:
    """Write config.json, the tokenizer and the chat template, in Hugging Face's layout."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    pad, _, end = (tokenizer.token_to_id(token) for token in SPECIAL_TOKENS)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": pad,
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 192,
        "initializer_range": 0.04,
        "intermediate_size": 512,
        "max_position_embeddings": 512,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "vocab_size": tokenizer.get_vocab_size(),
    }
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    for name, values in (("tokenizer_config", tokenizer_config), ("config", config)):
        text = json.dumps(values, indent=2) + "\n"
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
