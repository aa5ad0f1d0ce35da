"""SFT of other families against the same steps written out with transformers."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from lean_trl.model.loader import load_model
from lean_trl.train.loop import train

from ..model.tiny import make
from .golden import GOLDEN, lines, model_folder, recorded_config

STEPS, ROWS = 3, 8


def by_hand(folder):
    """(loss, norm of the gradient before clipping) of each step, rows one by one."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    texts = [json.loads(row)["text"] for row in (GOLDEN / "data" / "text.jsonl").open()]
    rows = [tokenizer(text).input_ids + [tokenizer.eos_token_id] for text in texts]
    experts = model.config.model_type == "qwen3_moe"
    options = {"output_router_logits": True} if experts else {}
    steps = []
    for step in range(STEPS):
        window = [torch.tensor(row[:128]) for row in rows[step * ROWS : (step + 1) * ROWS]]
        outputs = [model(ids[None], **options) for ids in window]
        loss = torch.zeros(())
        for ids, output in zip(window, outputs, strict=True):
            logprobs = output.logits[0, :-1].log_softmax(-1)
            loss = loss - logprobs.gather(1, ids[1:, None]).sum()
        loss = loss / sum(len(ids) - 1 for ids in window)
        if experts:  # the coefficient of the model's own config.json, over the whole window
            layers = zip(*(output.router_logits for output in outputs), strict=True)
            logits = tuple(torch.cat(layer) for layer in layers)
            module = transformers.models.qwen3_moe.modeling_qwen3_moe
            loss = loss + 0.001 * module.load_balancing_loss_func(logits, 8, 2)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((loss.item(), norm.item()))
    return steps


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "llama3rope_tied", "qwen3_moe"])
def test_the_same_steps_as_transformers(name, tmp_path):
    changes = {"data": {"max_length": 128}, "train": {"max_steps": STEPS}}
    train(recorded_config(tmp_path, "text", model=name, **changes))
    ours = [(line["loss"], line["grad_norm"]) for line in lines(tmp_path)]
    expected = by_hand(model_folder(name, tmp_path))
    for step in range(STEPS):
        assert ours[step] == pytest.approx(expected[step], rel=1e-4), step


def test_an_exported_model_has_its_buffers(tmp_path):
    """DeepSeek's correction of its router is no parameter, and a model without it does not load."""
    pytest.importorskip("transformers")
    folder = tmp_path / "deepseek_v3"
    peer = make("deepseek_v3", folder, vocab_size=512)
    shutil.copytree(GOLDEN / "tokenizer", folder, dirs_exist_ok=True)
    config = recorded_config(
        tmp_path,
        "text",
        train={"max_steps": 1},
        data={"max_length": 32},
        checkpoint={"export_hf": True},
    )
    train(replace(config, model=replace(config.model, path=str(folder))))
    exported = load_model(tmp_path / "out" / "model").state_dict()
    biases = [name for name in exported if name.endswith("e_score_correction_bias")]
    assert biases
    for name in biases:
        assert torch.equal(exported[name], peer.state_dict()[name])
