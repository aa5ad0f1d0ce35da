"""The balancing term of experts: transformers' value, the same gradients for any split."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lean_trl.config import config_from_dict
from lean_trl.data.batch import build_batch
from lean_trl.model.loader import load_model
from lean_trl.train.methods import METHODS
from lean_trl.train.router import with_router_loss
from lean_trl.train.step import count_totals, train_step
from lean_trl.types import Example

from .golden import GOLDEN

LENGTHS = (9, 3, 6, 2, 7)
ROWS = [Example(np.random.default_rng(n).integers(4, 512, n)) for n in LENGTHS]


def moe():
    return load_model(GOLDEN / "models" / "qwen3_moe")


def balancing_alone(model, coef):
    """A method whose only term is the balancing one, so that its gradient shows."""
    config = config_from_dict({"loss": {"router_aux_loss_coef": coef}})
    method = METHODS["sft"].bind(config.loss)
    only = replace(method, objective=lambda s, b: replace(method.objective(s, b), terms=()))
    return with_router_loss(only, config.loss, model.config)


def run(window, coef=1.0):
    model = moe()
    gradients = {}

    class Keep(torch.optim.SGD):
        def step(self, closure=None):
            gradients.update(
                {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            )

    report = train_step(
        model,
        window,
        balancing_alone(model, coef),
        Keep(model.parameters(), lr=0.1),
        totals=count_totals(window),
        max_grad_norm=None,
    )
    return report, gradients


def test_any_split_of_the_window_gives_the_same_loss_and_gradients():
    whole, expected = run([build_batch(ROWS)])
    parts, got = run([build_batch(ROWS[:1]), build_batch(ROWS[1:4]), build_batch(ROWS[4:])])
    padded, _ = run([build_batch(ROWS, padding_free=False)])
    assert parts.loss.item() == pytest.approx(whole.loss.item(), rel=1e-6)
    assert padded.loss.item() == pytest.approx(whole.loss.item(), rel=1e-6)
    assert parts.metrics["aux_loss"].item() == pytest.approx(whole.loss.item(), rel=1e-6)
    gates = [name for name in expected if name.endswith("mlp.gate.weight")]
    assert gates
    for name in gates:
        scale = expected[name].abs().max()
        assert scale > 0
        torch.testing.assert_close(got[name], expected[name], rtol=0, atol=1e-5 * scale.item())


def test_value_is_transformers():
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        GOLDEN / "models" / "qwen3_moe", output_router_logits=True
    )
    row = ROWS[0]
    out = reference(torch.tensor(row.input_ids)[None].long(), labels=None)
    report, _ = run([build_batch([row])])
    assert report.loss.item() == pytest.approx(out.aux_loss.item(), rel=1e-5)


def test_coefficient_default_is_the_models_own_and_dense_models_refuse_one():
    model = moe()
    own, explicit = run([build_batch(ROWS)], None)[0], run([build_batch(ROWS)], 0.5)[0]
    coef = model.config.moe.aux_loss_coef
    assert own.loss.item() == pytest.approx(coef / 0.5 * explicit.loss.item(), rel=1e-6)
    dense = load_model(GOLDEN / "models" / "qwen3")
    with pytest.raises(ValueError, match="router_aux_loss_coef 0.5 has no effect"):
        balancing_alone(dense, 0.5)
    bound = METHODS["sft"].bind(config_from_dict({}).loss)
    assert with_router_loss(bound, config_from_dict({}).loss, dense.config) is bound
