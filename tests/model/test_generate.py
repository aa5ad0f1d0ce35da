"""Generation against transformers, and the filters against their definitions."""

import json
import subprocess
import sys

import pytest
import torch

from lean_trl.model import load_model, new_model
from lean_trl.model.generate import Sampling, choose, generate

from .tiny import BASE, CONFIGS, make

PROMPTS = [[5, 6, 7], [8], list(range(10, 30))]
# A window, softcaps, sinks with experts, latent attention, partial rotary embedding; 30 tokens go
# beyond every window.
GENERATED = ["llama", "mistral", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3", "glm4"]


@pytest.mark.parametrize("family", GENERATED)
def test_greedy_tokens_are_those_of_transformers(family, tmp_path):
    pytest.importorskip("transformers")
    peer = make(family, tmp_path, seed=7, eos_token_id=None)
    model = load_model(tmp_path)
    answers = generate(model, PROMPTS, max_tokens=30)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        expected = peer.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=30,
            do_sample=False,
            pad_token_id=0,
        )
        assert answer == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", CONFIGS)
def test_the_cache_changes_nothing(family):
    """Each token is the most likely one of a forward over everything before it."""
    model = new_model(BASE | CONFIGS[family] | {"model_type": family}, seed=3)
    for prompt, answer in zip(PROMPTS, generate(model, PROMPTS, max_tokens=20), strict=True):
        whole = reread(model, [*prompt, *answer])
        assert answer == whole[len(prompt) - 1 : -1].argmax(-1).tolist()


def reread(model, ids):
    from lean_trl.data.batch import build_batch
    from lean_trl.types import Example

    with torch.no_grad():
        return model.logits(model.hidden(build_batch([Example(ids)])))


def tiny():
    return new_model(BASE | {"model_type": "llama"}, seed=1)


def test_an_answer_ends_with_its_stop_id():
    model = tiny()
    free = generate(model, PROMPTS, max_tokens=12)
    stop = free[0][3]
    stopped = generate(model, PROMPTS, max_tokens=12, stop_ids={stop})
    for before, after in zip(free, stopped, strict=True):
        end = before.index(stop) + 1 if stop in before else 12
        assert after == before[:end]


def test_neighbours_do_not_matter():
    model = tiny()
    together = generate(model, PROMPTS, max_tokens=8)
    assert together == [generate(model, [p], max_tokens=8)[0] for p in PROMPTS]


def test_edges():
    model = tiny()
    assert generate(model, [], max_tokens=5) == []
    assert generate(model, PROMPTS, max_tokens=0) == [[], [], []]
    assert [len(a) for a in generate(model, PROMPTS, max_tokens=1)] == [1, 1, 1]
    with pytest.raises(ValueError, match="at least one id in each prompt"):
        generate(model, [[1], []], max_tokens=1)


def test_seeds():
    model = tiny()
    runs = [
        generate(model, PROMPTS, max_tokens=10, sampling=Sampling(temperature=1.0, seed=seed))
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]


LOGITS = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.5, 0.25, 0.15, 0.1]),
        ({"temperature": 0.5}, [0.25, 0.0625, 0.0225, 0.01]),  # squares, to be normalised
        ({"top_k": 2}, [0.5, 0.25, 0, 0]),
        ({"top_k": 9}, [0.5, 0.25, 0.15, 0.1]),
        ({"top_p": 0.75}, [0.5, 0.25, 0, 0]),
        ({"top_p": 0.76}, [0.5, 0.25, 0.15, 0]),
        ({"top_p": 0.01}, [0.5, 0, 0, 0]),
        ({"min_p": 0.3}, [0.5, 0.25, 0.15, 0]),
        ({"min_p": 1.0}, [0.5, 0, 0, 0]),
        # k first: of 0.667 and 0.333 the first alone holds 0.6.
        ({"top_k": 2, "top_p": 0.6}, [0.5, 0, 0, 0]),
    ],
)
def test_filters(settings, expected):
    sampling = Sampling(**{"temperature": 1.0} | settings)
    order = torch.tensor([2, 0, 3, 1])  # the filters must not depend on the order of the tokens
    logits = LOGITS[order].expand(20000, 4)
    drawn = choose(logits, sampling, torch.Generator().manual_seed(0))
    shares = torch.bincount(order[drawn], minlength=4) / 20000
    wanted = torch.tensor(expected) / sum(expected)
    assert not shares[wanted == 0].any()
    torch.testing.assert_close(shares, wanted, atol=0.015, rtol=0)


@pytest.mark.parametrize(
    "settings", [{"temperature": -1}, {"top_k": -1}, {"top_p": 0}, {"top_p": 1.5}, {"min_p": 2}]
)
def test_impossible_settings(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        Sampling(**settings)


def test_the_script(root, tmp_path):
    """One JSON object a prompt, in order, with the tokenizer beside the model."""
    golden = root / "tests" / "golden"
    folder = tmp_path / "model"
    folder.mkdir()
    for source in (golden / "models" / "qwen3", golden / "tokenizer"):
        for file in source.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
    script = root / "scripts" / "generate.py"
    command = [sys.executable, str(script), str(folder), "one", "zwei Wörter", "--chat"]
    run = subprocess.run(
        [*command, "--max_tokens", "5"], capture_output=True, text=True, check=True
    )
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert [line["prompt"] for line in lines] == ["one", "zwei Wörter"]
    assert '"zwei Wörter"' in run.stdout  # to be read, not as escapes
    assert all(1 <= len(line["ids"]) <= 5 for line in lines)
    wrong = {"--top_p=2": "top_p 2.0 must be in (0, 1]", "--batch_size=0": "expected 1 or more"}
    for option, message in wrong.items():
        run = subprocess.run([*command, option], capture_output=True, text=True)
        assert run.returncode and message in run.stderr and "Traceback" not in run.stderr
