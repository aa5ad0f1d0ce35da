"""Activation offloading of a sharded model: gathered parameters stay, gradients are the same."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from lean_trl.techniques.apply import apply_techniques
from lean_trl.techniques.offload import ActivationOffloading

from ..ranks import on_ranks
from .tiny import RAW, gradients, make_batch, make_config, make_model


@pytest.mark.parametrize("checkpointing", [True, False])
def test_under_fsdp(checkpointing):
    batches = [make_batch(30, 34), make_batch(20, 9, seed=1)]
    plain = make_model()
    for batch in batches:
        plain(batch).logprobs.sum().backward()
    expected = gradients(plain)

    def work(world):
        model = make_model()
        memory = {"activation_offloading": True, "activation_checkpointing": checkpointing}
        config = make_config(memory=memory, distributed={"sharding": "fsdp"})
        applied = apply_techniques(model, config)
        with applied():
            model(batches[world.rank]).logprobs.sum().backward()
        store = next(t.store for t in applied.active if isinstance(t, ActivationOffloading))
        assert not store.known
        grads = {n: p.grad for n, p in model.named_parameters()}
        whole = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}
        return whole, store.moved_bytes

    results = on_ranks(2, work)
    if checkpointing:
        inputs = [(RAW["num_hidden_layers"] - 1) * b.num_tokens * 32 * 4 for b in batches]
        assert [moved for _, moved in results] == inputs
    for name, grad in expected.items():
        torch.testing.assert_close(results[0][0][name], grad, rtol=1e-5, atol=1e-6)
