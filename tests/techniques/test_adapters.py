"""Adapters: who is trained, what transformers and peft make of the files, what the reference is."""

import math
import warnings

import pytest
import torch

from lean_trl.config import config_from_dict
from lean_trl.data.batch import build_batch
from lean_trl.model.loader import load_model, save_model
from lean_trl.model.value_head import RewardModel
from lean_trl.techniques.adapter_files import adapter_weights, save_adapter
from lean_trl.techniques.adapter_reference import (
    AdaptersOff,
    StartingWeights,
    adapter_reference,
)
from lean_trl.techniques.adapters import Adapters
from lean_trl.techniques.apply import apply_techniques
from lean_trl.techniques.trial import prove
from lean_trl.train.methods import METHODS
from lean_trl.train.optim import build_optimizer
from lean_trl.train.score import with_ref_logprobs
from lean_trl.train.step import count_totals, train_step
from lean_trl.types import Example

from .tiny import gradients, make_batch, make_config, make_model

peft = pytest.importorskip("peft")

ALL = {"target_modules": "all-linear", "r": 4}
EVERYWHERE = {"target_modules": ["q_proj", "down_proj", "embed_tokens", "lm_head"], "r": 4}
METHODS_OF_PEFT = {
    "lora": ALL,
    "peft's own targets": {},
    "rslora": ALL | {"use_rslora": True},
    "dora": ALL | {"use_dora": True},
    "pissa": ALL | {"init_lora_weights": "pissa"},
    "olora": ALL | {"init_lora_weights": "olora"},
    "embedding and head": EVERYWHERE,
    "whole modules": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "one layer": ALL | {"options": {"layers_to_transform": [1]}},
    "ia3": {"method": "ia3"},
    "loha": {"method": "loha", "target_modules": "all-linear", "r": 4},
    "lokr": {"method": "lokr", "target_modules": "all-linear", "r": 4},
    "oft": {"method": "oft", "target_modules": ["q_proj"], "options": {"oft_block_size": 8}},
    "boft": {"method": "boft", "target_modules": ["q_proj"], "options": {"boft_block_size": 8}},
    "vera": {"method": "vera", "target_modules": ["q_proj", "o_proj"], "r": 4},
}


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def start(peft_section, model=None, **sections):
    model = model or make_model()
    config = make_config(peft=peft_section, **sections)
    applied = apply_techniques(model, config)
    return model, applied, config


def move(model, size=0.05):
    """Move the trained weights, as steps would."""
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += size * torch.randn(parameter.shape, generator=rng)


@pytest.mark.parametrize("name", METHODS_OF_PEFT)
def test_training_starts_from_the_base_model(name):
    batch, base = make_batch(), make_model()
    model, applied, config = start(METHODS_OF_PEFT[name])
    expected = base(batch).logprobs
    assert torch.allclose(model(batch).logprobs, expected, atol=2e-5)
    assert prove(applied, model, build_optimizer(model, config.train), config)["adapters"].amount
    move(model)
    assert not torch.allclose(model(batch).logprobs, expected, atol=1e-3)


@pytest.mark.parametrize(
    "name",
    ["lora", "rslora", "dora", "pissa", "olora", "embedding and head", "one layer", "ia3"]
    + ["whole modules", "loha", "lokr", "oft", "vera"],
)
def test_transformers_and_peft_read_the_files(name, tmp_path):
    files_agree(METHODS_OF_PEFT[name], tmp_path, make_model())


def test_files_of_a_tied_model_that_trains_its_embedding(tmp_path):
    section = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}
    files_agree(section, tmp_path, make_model(tie_word_embeddings=True))


EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "head_dim": 8,
    "norm_topk_prob": True,
}


def test_experts_are_adapted_as_parameters(tmp_path):
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    section = {"target_modules": ["q_proj"], "r": 2, "options": {"target_parameters": targets}}
    files_agree(section, tmp_path, make_model(**EXPERTS))


def files_agree(section, tmp_path, base):
    transformers = pytest.importorskip("transformers")
    save_model(base, tmp_path / "base")
    model, applied, _ = start(section, base)
    move(model)
    adapters = applied.find(Adapters)
    save_adapter(model, adapters, adapter_weights(model, adapters), tmp_path / "adapter")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    ids = torch.arange(1, 20)
    batch = build_batch([Example(ids.numpy())])
    with torch.no_grad():
        logits = theirs(ids[None]).logits[0]
        expected = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        got = model(batch).logprobs
    assert (got - expected).abs().max() < 2e-5
    # And this library goes on from them.
    again, _, _ = start({"adapter_path": str(tmp_path / "adapter")}, load_model(tmp_path / "base"))
    assert (again(batch).logprobs - got).abs().max() < 2e-5


def test_the_head_is_adapted_without_folding():
    """Log-probs and gradients as with a head of weight W + s B A."""
    batch = make_batch()
    model, _, _ = start({"target_modules": ["lm_head"], "r": 4, "lora_alpha": 6.0})
    move(model)
    layer = model.lm_head
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    base = make_model()
    folded = (base.lm_head.weight + 6 / 4 * b @ a).detach()
    with torch.no_grad():
        base.lm_head.weight.copy_(folded)
    scores = model(batch, ("entropy",))
    assert torch.allclose(scores.logprobs, base(batch).logprobs, atol=1e-6)
    hidden = base.hidden(batch).detach()
    assert torch.allclose(model.logits(hidden), base.logits(hidden), atol=1e-5)
    scores.logprobs.sum().backward()
    base(batch).logprobs.sum().backward()
    whole = base.lm_head.weight.grad  # of W: that of B is s dW A^T
    assert torch.allclose(b.grad, 1.5 * whole @ a.T, atol=1e-5)
    assert torch.allclose(a.grad, 1.5 * b.T @ whole, atol=1e-5)


@pytest.mark.parametrize("checkpointing", [{}, {"selective": True}, {"every": 2}, None])
def test_gradients_reach_every_adapter(checkpointing):
    memory = {"activation_checkpointing": checkpointing is not None}
    if checkpointing:
        memory["activation_checkpointing_kwargs"] = checkpointing
    model, around, _ = start(EVERYWHERE, memory=memory)
    move(model)
    with around():
        model(make_batch()).logprobs.sum().backward()
    found = gradients(model)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * (2 * 4 + 2)
    assert all(found[name].abs().max() > 0 for name in trained)
    assert all(grad is None for name, grad in found.items() if name not in trained)


def test_dropout_is_the_adapters_alone_and_runs_again_the_same():
    batch = make_batch()
    results = []
    for checkpointing in (True, False):
        model, around, _ = start(
            ALL | {"lora_dropout": 0.5}, memory={"activation_checkpointing": checkpointing}
        )
        move(model)
        model.train()
        torch.manual_seed(4)
        with around():
            model(batch).logprobs.sum().backward()
        results.append(gradients(model))
    for name, grad in results[0].items():
        if grad is not None:
            assert torch.equal(grad, results[1][name]), name


# -- the reference --


def pairs():
    def pair(number, *ids):
        return Example([3, 4, *ids], [False, False] + [True] * len(ids), pair=number)

    return build_batch([pair(0, 5, 6), pair(0, 7), pair(1, 8, 9, 10), pair(1, 11, 5)])


REFERENCES = {
    "lora": (ALL, AdaptersOff),
    "dora": (ALL | {"use_dora": True}, AdaptersOff),
    "pissa": (ALL | {"init_lora_weights": "pissa"}, StartingWeights),
    "olora": (ALL | {"init_lora_weights": "olora"}, StartingWeights),
    "ia3": ({"method": "ia3"}, StartingWeights),
    "whole modules": (METHODS_OF_PEFT["whole modules"], AdaptersOff),
    "head": (EVERYWHERE, AdaptersOff),
    "adapter_path": (None, StartingWeights),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_dpo_starts_at_log_2_and_the_reference_stays(name, tmp_path):
    section, kind = REFERENCES[name]
    if section is None:  # an adapter that was trained before
        trained, applied, _ = start(ALL)
        move(trained)
        adapters = applied.find(Adapters)
        save_adapter(trained, adapters, adapter_weights(trained, adapters), tmp_path)
        section = {"adapter_path": str(tmp_path)}
    model, around, config = start(section, method="dpo", train={"learning_rate": 0.01})
    reference = adapter_reference(model)
    assert type(reference) is kind
    method, batch = METHODS["dpo"].bind(config.loss), pairs()
    optimizer = build_optimizer(model, config.train)
    losses, references = [], []
    for _ in range(2):
        window = [with_ref_logprobs(reference, batch)]
        references.append(window[0].extras["ref_logprobs"])
        report = train_step(
            model,
            window,
            method,
            optimizer,
            totals=count_totals(window),
            max_grad_norm=None,
            around=around,
        )
        losses.append(report.loss.item())
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses[1] < losses[0] - 1e-3
    assert torch.equal(references[0], references[1])


# -- refusals and settings --


@pytest.mark.parametrize(
    "section, message",
    [
        ({"method": "prefix_tuning"}, "packed sequences have no place for"),
        ({"method": "lorra"}, "peft.method lorra is unknown"),
        ({"options": {"rank": 3}}, "peft.rank is no setting of peft's LoraConfig"),
        ({"method": "ia3", "r": 4}, "peft.r is no setting of peft's IA3Config"),
        ({"target_modules": ["lm_head"], "use_dora": True}, "must be plain LoRA"),
        ({"target_modules": ["proj_q"]}, "not found in the base model"),
    ],
)
def test_what_cannot_be_is_refused(section, message):
    with pytest.raises(ValueError, match=message):
        start(section)


def test_a_tied_head_cannot_be_adapted_alone():
    with pytest.raises(ValueError, match="shares with embed_tokens"):
        start(EVERYWHERE, make_model(tie_word_embeddings=True))


def test_settings_at_odds():
    with pytest.raises(ValueError, match="sync_ref_model"):
        config_from_dict({"method": "dpo", "peft": {}, "loss": {"sync_ref_model": True}})
    scored = {"precompute_ref_log_probs": True}
    with pytest.raises(ValueError, match="costs no second model"):
        config_from_dict({"method": "dpo", "peft": {"adapter_path": "x"}, "loss": scored})
    with pytest.raises(ValueError, match="leave out peft.r"):
        config_from_dict({"peft": {"adapter_path": "x", "r": 3}})


def test_a_peft_config_file(tmp_path):
    peft.LoraConfig(r=3, target_modules=["q_proj"], lora_alpha=9).save_pretrained(tmp_path)
    model, _, _ = start({"config": str(tmp_path), "lora_alpha": 12.0})
    layer = model.blocks[0].self_attn.q_proj
    assert layer.lora_A["default"].weight.shape == (3, 32)
    assert layer.scaling["default"] == 4.0


def test_a_reward_model_trains_its_head_whole():
    from lean_trl.model.loader import new_model

    from .tiny import RAW

    model, _, _ = start(ALL, new_model(RAW, kind=RewardModel), method="reward")
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert "score.modules_to_save.default.weight" in trained
    rewards = model(make_batch()).reward
    rewards.sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_frozen_weights_keep_their_dtype():
    model, _, _ = start(ALL, make_model().to(torch.bfloat16))
    for name, parameter in model.named_parameters():
        expected = torch.float32 if parameter.requires_grad else torch.bfloat16
        assert parameter.dtype == expected, name


@pytest.mark.parametrize("quantized", [False, True])
def test_sampling_goes_through_the_adapters(quantized):
    """Greedy tokens of the adapted model are those with the largest log-probs under it."""
    from lean_trl.model.generate import generate

    section = {"quantization": {"load_in_4bit": True}} if quantized else {}
    model, _, _ = start({"target_modules": ["q_proj", "down_proj", "lm_head"], "r": 4}, **section)
    prompt = [5, 9, 3]
    before = generate(model, [prompt], max_tokens=6, stop_ids=())[0]
    move(model, 0.3)
    (answer,) = generate(model, [prompt], max_tokens=6, stop_ids=())
    assert list(answer) != list(before)
    top = model(build_batch([Example([*prompt, *answer])]), ("top1",)).top1
    assert top[len(prompt) - 1 :].all()
