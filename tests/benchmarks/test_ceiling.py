"""Products and operations of a step, counted by hand for a model of two small layers."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from ceiling import Product, flops, seconds_of, step_products

from lean_trl.data.batch import build_batch
from lean_trl.model.loader import new_model
from lean_trl.types import Example

D, F, V, N, K, H, L = 32, 48, 64, 4, 2, 8, 2
RAW = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": L,
    "num_attention_heads": N,
    "num_key_value_heads": K,
    "head_dim": H,
    "tie_word_embeddings": True,
}
BLOCK = D * N * H + 2 * D * K * H + N * H * D + 3 * D * F  # q, k and v, o, MLP


@pytest.fixture(scope="module")
def model():
    return new_model(RAW, 0)


def batch(**options):
    scored = [False] * 6 + [True] * 4
    return build_batch([Example(range(10), scored=scored), Example(range(5))], **options)


def test_products_of_a_step(model):
    products = step_products(model, [batch()])
    assert products[Product("forward", 15, D, F)] == 2 * L  # gate and up
    assert products[Product("grad_x", 15, F, D)] == 2 * L
    assert products[Product("grad_w", F, 15, D)] == 2 * L
    # 4 + 4 scored tokens; the logits are computed again in the backward.
    assert products[Product("forward", 8, D, V)] == 2
    assert products[Product("grad_x", 8, V, D)] == products[Product("grad_w", V, 8, D)] == 1
    work = sum(2 * p.rows * p.inner * p.columns * n for p, n in products.items())
    assert work == 15 * 6 * L * BLOCK + 8 * 8 * V * D


def test_recomputation_and_a_reference_add_forwards(model):
    plain = step_products(model, [batch()])
    more = step_products(model, [batch()], forwards=2, reference=True)
    shape = Product("forward", 15, D, F)
    assert more[shape] == 3 * plain[shape]
    assert more[Product("grad_w", F, 15, D)] == plain[Product("grad_w", F, 15, D)]
    assert more[Product("forward", 8, D, V)] == 3


def test_operations_in_both_conventions(model):
    work = flops(model, [batch()])
    pairs = 10**2 + 5**2
    assert work["palm"] == 15 * 6 * (L * BLOCK + V * D) + 12 * L * N * H * pairs
    assert work["needed"] == 15 * 6 * L * BLOCK + 8 * 6 * V * D + 6 * L * N * H * pairs


def test_padding_is_no_work_in_the_needed_sense_but_a_product(model):
    padded = batch(padding_free=False)
    assert padded.num_tokens == 20
    assert flops(model, [padded])["needed"] >= flops(model, [batch()])["needed"]
    assert step_products(model, [padded])[Product("forward", 20, D, F)] == 2 * L


def test_a_frozen_weight_has_no_gradient_product():
    model = new_model(RAW, 0).requires_grad_(False)
    products = step_products(model, [batch()])
    assert not any(product.kind == "grad_w" for product in products)
    work = flops(model, [batch()])
    assert work["palm"] == 15 * 4 * (L * BLOCK + V * D) + 12 * L * N * H * 125


def test_experts_count_as_many_as_a_token_meets():
    raw = RAW | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    raw |= {"num_local_experts": 8, "num_experts_per_tok": 2}
    model = new_model(raw, 0)
    attention = D * N * H + 2 * D * K * H + N * H * D
    router = 0  # a parameter, not a Linear
    block = attention + router + 2 * 3 * D * F
    work = flops(model, [batch()])
    assert work["palm"] == 15 * 6 * (L * block + V * D) + 12 * L * N * H * 125


def test_bare_products_take_time(model):
    products = step_products(model, [batch()])
    taken = seconds_of(products, torch.device("cpu"), torch.float32)
    assert 0 < taken.cpu < 60 and 0 < taken.wall
    # Shapes are timed once, however often they occur.
    thousand = Counter({product: 1000 * times for product, times in products.items()})
    more = seconds_of(thousand, torch.device("cpu"), torch.float32)
    assert more.cpu > 50 * taken.cpu


def test_shared_rows_are_computed_once(model):
    whole = batch()
    rows, index = torch.unique(torch.tensor([6, 6, 7, 7, 10, 11, 12, 13]), return_inverse=True)
    shared = replace(whole, row_map=(rows, index))
    assert step_products(model, [shared])[Product("forward", 6, D, V)] == 2
