"""RLOO and online DPO on replayed completions against plain loops over transformers' model."""

import json
import math

import pytest
import torch

from lean_trl.train.loop import train

from .golden import GOLDEN, lines, model_folder
from .test_golden_grpo import replayed

ROLLOUTS = [
    json.loads(line) for line in (GOLDEN / "data" / "rollouts.jsonl").read_text().splitlines()
]
EOS = 2


def asked(each):
    """[prompt][completion] in the order in which a replay takes them, two epochs."""
    rows = [ROLLOUTS[i : i + 4] for i in range(0, 64, 4)]
    return [row[:each] for row in rows] + ([row[each : 2 * each] for row in rows])


def reward(row):
    """Of tests/train/rewards.py: correct, and shorter is better."""
    return row["correct"] - len(row["completion_ids"]) / 100


def log_probs(model, row, temperature):
    """[C]: one sequence at a time, the whole vocabulary."""
    prompt, said = row["prompt_ids"], row["completion_ids"]
    logits = model(torch.tensor([prompt + said])).logits[0, len(prompt) - 1 : -1]
    whole = (logits / temperature).log_softmax(-1)
    return whole[torch.arange(len(said)), torch.tensor(said)]


class Loop:
    """AdamW at a constant rate, gradients clipped to 1."""

    def __init__(self, folder, rate=1e-3):
        transformers = pytest.importorskip("transformers")
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.model, self.reference = load(folder).train(), load(folder).eval()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, weight_decay=0.0)
        self.history = []

    def step(self, loss):
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.history.append((loss.item(), norm.item()))


def check(ours, history):
    assert len(ours) == len(history) == 6
    for line, (loss, norm) in zip(ours, history, strict=True):
        assert line["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6), line["step"]
        assert line["grad_norm"] == pytest.approx(norm, rel=1e-4), line["step"]


# Ratios of whole completions: at 1e-3 they are e^10, and rounding alone moves the loss by 1e-4.
RLOO_RATE = 2e-4


def rloo_reference(folder, *, beta=0.05, temperature=0.8):
    """Four prompts a generation, two completions each, learnt from twice."""
    loop = Loop(folder, RLOO_RATE)
    for number in range(3):
        groups = asked(2)[4 * number : 4 * number + 4]
        rows = [row for group in groups for row in group]
        with torch.no_grad():
            old = [log_probs(loop.model, row, temperature) for row in rows]
            ref = [log_probs(loop.reference, row, temperature) for row in rows]
        totals = [
            reward(row) - beta * float((o - r).sum())
            for row, o, r in zip(rows, old, ref, strict=True)
        ]
        advantages = [
            totals[i] - totals[i ^ 1] for i in range(8)
        ]  # the other one's is the baseline
        for _ in range(2):
            loss = torch.zeros(())
            for row, o, advantage in zip(rows, old, advantages, strict=True):
                ratio = (log_probs(loop.model, row, temperature).sum() - o.sum()).exp()
                loss = loss - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            loop.step(loss / 8)
    return loop.history


def test_rloo(tmp_path):
    shape = {"micro_batch_size": 3, "batch_size": 8, "learning_rate": RLOO_RATE}
    sampling = {"num_generations": 2, "temperature": 0.8}
    train(replayed(tmp_path, {}, shape, method="rloo", **sampling))
    check(lines(tmp_path), rloo_reference(model_folder("qwen3", tmp_path)))


def online_dpo_reference(folder, kind, *, beta=0.1, temperature=0.9, penalty=0.3):
    """Eight completions, so four pairs a step."""
    loop = Loop(folder)
    for number in range(6):
        groups = asked(2)[4 * number : 4 * number + 4]
        loss = torch.zeros(())
        for group in groups:
            scores = [reward(r) - penalty * (r["completion_ids"][-1] != EOS) for r in group]
            chosen, rejected = group if scores[0] >= scores[1] else group[::-1]
            margin = torch.zeros(())
            for sign, row in ((1, chosen), (-1, rejected)):
                with torch.no_grad():
                    ref = log_probs(loop.reference, row, temperature).sum()
                margin = margin + sign * (log_probs(loop.model, row, temperature).sum() - ref)
            if kind == "sigmoid":
                loss = loss + torch.log1p((-beta * margin).exp())
            else:
                loss = loss + (margin - 1 / (2 * beta)) ** 2
        loop.step(loss / 4)
    return loop.history


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
@pytest.mark.parametrize("shape", [(8, None), (2, 4)])
def test_online_dpo_under_accumulation(kind, shape, tmp_path):
    """The peer's gradient is not divided by the accumulation steps; ours does not depend on it."""
    size, accumulation = shape
    config = replayed(
        tmp_path,
        {"loss_type": kind, "missing_eos_penalty": 0.3},
        {"micro_batch_size": size, "gradient_accumulation_steps": accumulation},
        method="online_dpo",
        num_generations=2,
        num_iterations=1,
    )
    train(config)
    ours = lines(tmp_path)
    check(ours, online_dpo_reference(model_folder("qwen3", tmp_path), kind))
    assert ours[0]["objective/kl"] == pytest.approx(0, abs=1e-4)
    if kind == "sigmoid":
        assert ours[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    first = [r for group in asked(2)[:4] for r in group]
    scores = [reward(r) - 0.3 * (r["completion_ids"][-1] != EOS) for r in first]
    assert ours[0]["objective/scores"] == pytest.approx(sum(scores) / 8, abs=1e-6)
    assert (
        ours[0]["val/contain_eos_token"] == sum(r["completion_ids"][-1] == EOS for r in first) / 8
    )
