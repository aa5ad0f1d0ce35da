"""What the model promises to techniques and the step: layouts, gradients, memory, fake tensors."""

from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lean_trl.data.batch import build_batch, filler_batch
from lean_trl.model import new_model
from lean_trl.types import Example

from .tiny import BASE, CONFIGS

FAMILIES = ["llama", "gemma2", "gpt_oss", "deepseek_v3"]


def tiny(family="llama", *, tied=False, **options):
    raw = BASE | CONFIGS[family] | {"model_type": family, "tie_word_embeddings": tied}
    return new_model(raw, **options)


def grads(model):
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def assert_grads_close(got, expected):
    """Off by at most 1e-4 of each parameter's largest entry."""
    for name, grad in expected.items():
        error, scale = (got[name] - grad).abs().max().item(), grad.abs().max().item()
        assert error <= 1e-4 * scale, f"{name}: {error} of {scale}"


def examples(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [Example(torch.randint(0, 96, (n,), generator=generator).numpy()) for n in lengths]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_padded_and_single_are_the_same(family):
    model = tiny(family)
    documents = examples(3, 25, 1, 6)  # 25 is beyond the windows; 1 has nothing to score
    results = []
    layouts = [[documents], [[each] for each in documents], [documents[::-1]]]
    options = [{}, {}, {"padding_free": False}]
    for cuts, option in zip(layouts, options, strict=True):
        model.zero_grad()
        scores = [model(build_batch(part, **option)).logprobs for part in cuts]
        torch.cat(scores).sum().backward()
        assert sum(len(each) for each in scores) == 2 + 24 + 0 + 5
        results.append((torch.cat(scores).sum(), grads(model)))
    for loss, gradient in results[1:]:
        torch.testing.assert_close(loss, results[0][0])
        assert_grads_close(gradient, results[0][1])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shared_prompt_changes_nothing_but_the_work(family):
    model = tiny(family)
    prompt = list(range(1, 22))
    scored = [False] * 21 + [True] * 4
    pair = [Example(prompt + tail, scored, group=0) for tail in ([5, 6, 7, 8], [9, 3, 2, 1])]
    apart, tree = build_batch(pair), build_batch(pair, share_prefixes=True)
    assert tree.num_tokens == 29 < apart.num_tokens == 50
    results = []
    for batch in (apart, tree):
        model.zero_grad()
        scores = model(batch, ("entropy",))
        (scores.logprobs.sum() + scores.entropy.sum()).backward()
        results.append((scores, grads(model)))
    torch.testing.assert_close(results[1][0].logprobs, results[0][0].logprobs)
    torch.testing.assert_close(results[1][0].entropy, results[0][0].entropy)
    assert_grads_close(results[1][1], results[0][1])


def test_an_id_beyond_the_vocabulary_is_named():
    model = tiny()
    size = model.config.vocab_size
    assert len(model(build_batch([Example([1, size - 1])])).logprobs) == 1
    with pytest.raises(ValueError, match=f"token id {size} is not one of the {size}"):
        model(build_batch([Example([1, size])]))


def test_scores_are_those_of_the_logits():
    model = tiny("granite", tied=True)
    batch = build_batch(examples(9, 4))
    scores = model(batch, ("entropy", "top1"), temperature=0.7)
    logprobs = (model.logits(model.hidden(batch)) / 0.7).log_softmax(-1)[batch.rows]
    expected = logprobs.gather(1, batch.targets[:, None])[:, 0]
    torch.testing.assert_close(scores.logprobs, expected)
    torch.testing.assert_close(scores.entropy, -(logprobs.exp() * logprobs).sum(-1))
    assert torch.equal(scores.top1, logprobs.argmax(-1) == batch.targets)
    assert scores.router_probs is None and scores.expert_counts is None and scores.reward is None


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_of_two_micro_batches_add_up(tied):
    model = tiny(tied=tied)
    first, second = examples(7, 5), examples(11, seed=1)
    model(build_batch(first)).logprobs.sum().backward()
    model(build_batch(second)).logprobs.sum().backward()
    added = grads(model)
    model.zero_grad()
    model(build_batch(first + second)).logprobs.sum().backward()
    assert_grads_close(added, grads(model))


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_are_those_of_autograd_alone(tied):
    """Through functional_call the weights are no leaves, so nothing is added to .grad behind it."""
    model = tiny(tied=tied)
    batch = build_batch(examples(7, 5))
    model(batch).logprobs.sum().backward()
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    views = {name: weight * 1.0 for name, weight in weights.items()}
    functional_call(model, views, (batch,)).logprobs.sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, msg=name)


class Allocations(TorchDispatchMode):
    """Counts tensors of one shape that ops make."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.storages, self.made = shape, set(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(each, torch.Tensor) and each.numel() >= self.shape.numel():
                pointer = each.untyped_storage().data_ptr()
                if pointer not in self.storages:
                    self.storages.add(pointer)
                    self.made.append((func, tuple(each.shape)))
        return out


@pytest.mark.parametrize(("tied", "expected"), [(True, 1), (False, 2)])
def test_no_second_gradient_of_vocabulary_size(tied, expected):
    """One buffer for the embedding and one for an untied head, in all of forward and backward."""
    raw = BASE | {"model_type": "llama", "vocab_size": 5000, "tie_word_embeddings": tied}
    model = new_model(raw)
    batch = build_batch(examples(6, 5))
    weight = model.model.embed_tokens.weight
    with Allocations(weight.shape) as seen:
        seen.storages |= {p.untyped_storage().data_ptr() for p in model.parameters()}
        model(batch).logprobs.sum().backward()
    assert len(seen.made) == expected, seen.made
    buffer = weight.grad.data_ptr()
    model(batch).logprobs.sum().backward()
    assert weight.grad.data_ptr() == buffer


@pytest.mark.parametrize("tied", [True, False])
def test_frozen_weights_have_no_gradient(tied):
    model = tiny(tied=tied)
    model.requires_grad_(False)
    projection = model.blocks[0].self_attn.q_proj.weight.requires_grad_()
    batch = build_batch(examples(5, 8))
    model(batch).logprobs.sum().backward()
    alone = projection.grad.clone()
    assert [n for n, p in model.named_parameters() if p.grad is not None] == [
        "model.layers.0.self_attn.q_proj.weight"
    ]
    model.requires_grad_(True)
    projection.grad = None
    model(batch).logprobs.sum().backward()
    torch.testing.assert_close(alone, projection.grad)


def test_scoring_takes_no_gradient_memory():
    model = tiny(tied=True)
    with torch.no_grad():
        model(build_batch(examples(5)))
    assert model.model.embed_tokens.weight.grad is None


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointed_blocks_give_the_same_bits(family):
    batch = build_batch(examples(15, 8))
    results = []
    for wrapped in (False, True):
        model = tiny(family, seed=4)
        for block in model.blocks if wrapped else ():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        scores = model(batch)
        loss = scores.logprobs.sum()
        if scores.router_probs is not None:  # its gradient goes through the blocks as well
            loss = loss + (scores.router_probs**2).sum()
        loss.backward()
        results.append((loss.detach(), grads(model)))
    assert torch.equal(results[0][0], results[1][0])
    for name, grad in results[0][1].items():
        assert torch.equal(grad, results[1][1][name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_with_nothing_to_score_runs_both_ways(family):
    model = tiny(family)
    scores = model(filler_batch(), ("entropy", "top1", "log_sum_sq"))
    assert scores.logprobs.shape == (0,)
    scores.logprobs.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "phi3", "olmo2"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_runs_under_fake_tensors(family, wrapped):
    batch = build_batch(examples(25, 3))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = tiny(family, tied=True)
        for block in model.blocks if wrapped else ():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        scores = model(batch, ("entropy", "top1", "log_sum_sq"))
        (scores.logprobs.sum() + scores.entropy.sum()).backward()
        assert scores.logprobs.shape == (26,) and scores.logprobs.dtype == torch.float32
        for name, parameter in model.named_parameters():
            assert parameter.grad.shape == parameter.shape, name


@pytest.mark.parametrize("family", CONFIGS)
def test_bf16_is_close_to_fp32(family):
    """Every family runs in bf16 with scores in fp32, off by what 8 bits explain."""
    exact, rounded = tiny(family, seed=2), tiny(family, seed=2, dtype="bfloat16")
    batch = build_batch(examples(20, 9))
    scores = rounded(batch)
    assert scores.logprobs.dtype == torch.float32
    assert rounded.hidden(batch).dtype == torch.bfloat16
    assert rounded.logits(rounded.hidden(batch)).dtype == torch.float32
    difference = (scores.logprobs - exact(batch).logprobs).abs()
    assert difference.median() < 0.1
    scores.logprobs.sum().backward()
    assert all(p.grad.isfinite().all() for p in rounded.parameters())


def test_names_are_those_of_the_files():
    model = tiny("llama", tied=True)
    names = [name for name, _ in model.named_parameters()]
    assert names[0] == "model.embed_tokens.weight" and names[-1] == "model.norm.weight"
    assert "model.layers.3.mlp.down_proj.weight" in names
    assert len(model.blocks) == 4 and model.blocks[2] is model.model.layers[2]
    assert "lm_head.weight" in tiny("llama").state_dict()
    assert set(model.state_dict()) == set(names)  # rotary tables are no part of it


def test_the_attention_backend_is_a_choice():
    batch = build_batch(examples(20, 9))
    scores = [tiny("gemma2", attention=name)(batch).logprobs for name in ("auto", "math")]
    torch.testing.assert_close(scores[0], scores[1])
    with pytest.raises(ValueError, match="unknown attention backend 'warp'"):
        tiny(attention="warp")(batch)
