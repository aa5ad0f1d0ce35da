"""The tracker: hand-worked peaks, and the allocator's own peak of a real training step."""

import numpy as np
import pytest
import torch
from peak import PeakTracker, saved_bytes
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from lean_trl import builtin
from lean_trl.config import config_from_dict
from lean_trl.data.batch import build_batch
from lean_trl.model.config import read_config
from lean_trl.model.decoder import CausalLM
from lean_trl.model.safetensors_io import read_json
from lean_trl.techniques import apply_techniques
from lean_trl.train.methods import METHODS
from lean_trl.train.optim import build_optimizer
from lean_trl.train.step import train_step
from lean_trl.types import Example

KIB = 256  # floats


def test_peak_is_the_most_that_lived_at_once():
    with PeakTracker(nn.Identity()) as tracker:
        a = torch.zeros(4 * KIB)
        b = torch.zeros(2 * KIB)
        del b
        c = torch.zeros(KIB)  # 4 + 1 is less than 4 + 2
        view = a[:KIB]
        del a  # the view still holds all of it
        d = torch.zeros(3 * KIB)  # 4 + 1 + 3
    assert tracker.peak == 8 * 1024
    assert [(h.count, h.nbytes) for h in tracker.largest(2)] == [(1, 4096), (1, 3072)]
    assert view.numel() + c.numel() + d.numel()


def test_what_is_held_before_counts_from_the_start():
    tracker = PeakTracker(nn.Identity())
    weight = torch.zeros(KIB)
    tracker.hold("parameters", [("w", weight), ("again", weight.view(2, -1))])
    with tracker:
        weight + 1
    assert tracker.peak == 2048
    assert tracker.breakdown()["parameters"] == tracker.breakdown()["temporaries"] == 1024


def test_a_resized_storage_is_followed():
    with PeakTracker(nn.Identity()) as tracker:
        a = torch.zeros(4 * KIB)
        a.untyped_storage().resize_(0)
        b = torch.zeros(KIB)
        a.untyped_storage().resize_(8 * 1024)
        del b
    del a
    assert [change for _, change in tracker.events] == [4096, -4096, 1024, 8192, -1024, -8192]
    assert tracker.peak == 9 * 1024
    assert torch.UntypedStorage.resize_ is torch._C.StorageBase.resize_


def test_fake_tensors_take_the_bytes_that_real_ones_would():
    with FakeTensorMode(), PeakTracker(nn.Identity()) as tracker:
        a = torch.zeros(2**40)
        b = a + 1
    assert tracker.peak == 2 * 2**42 == a.nbytes + b.nbytes


def make_training(recompute: bool):
    """(model, optimizer, batch, step) of a run that has done one step."""
    config = config_from_dict({"memory": {"activation_checkpointing": recompute}})
    model = CausalLM(read_config(read_json(builtin.model_folder() / "config.json")))
    around, optimizer = apply_techniques(model, config), build_optimizer(model, config.train)
    method = METHODS["sft"].bind(config.loss)
    batch = build_batch([Example(np.arange(n) % 300) for n in (300, 200, 411)])

    def step():
        train_step(
            model,
            [batch],
            method,
            optimizer,
            totals=batch.totals,
            max_grad_norm=1.0,
            around=around,
        )

    step()  # the optimizer's state exists afterwards
    return model, optimizer, batch, step


@pytest.fixture(params=[False, True], ids=["kept", "recomputed"])
def training(request):
    return make_training(request.param)


def held(model, optimizer, batch) -> PeakTracker:
    tracker = PeakTracker(model)
    tracker.hold("parameters", model.named_parameters())
    states = (item for state in optimizer.state.values() for item in state.items())
    tracker.hold("optimizer", states)
    tensors = {n: v for n, v in vars(batch).items() if isinstance(v, torch.Tensor)}
    tracker.hold("temporaries", tensors.items())
    return tracker


def allocator_peak(step) -> int:
    """Most bytes that torch's CPU allocator handed out at one time, over those before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        step()
    events = [e for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return int(np.cumsum(sizes).max())


def test_a_training_step_peaks_where_the_allocator_says(training):
    model, optimizer, batch, step = training
    tracker = held(model, optimizer, batch)
    before = sum(a.nbytes for a in tracker.allocations)
    with tracker, tracker.gradients_of(optimizer, model):
        step()
    assert tracker.peak == before + allocator_peak(step)
    parts = tracker.breakdown()
    assert sum(parts.values()) == tracker.peak
    weights = sum(p.nbytes for p in model.parameters())
    scalars = 4 * len(optimizer.state)  # AdamW counts the steps of each parameter
    assert parts["parameters"] == weights and parts["optimizer"] == 2 * weights + scalars
    assert parts["reference"] == 0 and parts["activations"] > 0
    assert all(not h.place.startswith("model.layers.0") for h in tracker.largest())
    # All that lives after the step was there before.
    assert sum(change for _, change in tracker.events) == before


@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_without_memory_has_the_same_peak(recompute):
    """On fake tensors the peak is known without a byte, where no kernel's scratch space is it."""

    def peak_of():
        model, optimizer, batch, step = make_training(recompute)
        tracker = held(model, optimizer, batch)
        with tracker, tracker.gradients_of(optimizer, model):
            step()
        return tracker.peak, tracker.breakdown()

    real = peak_of()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert peak_of() == real


def test_bytes_saved_for_backward(training):
    """Kept: per block x, its two norms and their rstd, ...; recomputed: x of each block."""
    model, _, batch, step = training
    with saved_bytes() as sizes:
        step()
    tokens, width = batch.num_tokens, model.config.hidden_size
    hidden = 4 * tokens * width
    layers = len(model.blocks)
    if any("checkpoint" in repr(block.forward) for block in model.blocks):
        assert layers * hidden < sum(sizes) < (layers + 2.5) * hidden
    else:
        assert sum(sizes) > 15 * layers * hidden


def test_saved_tensors_are_freed():
    weight = torch.ones(KIB, requires_grad=True)
    with saved_bytes() as sizes, PeakTracker(nn.Identity()) as tracker:
        for _ in range(3):
            weight.exp().sum().backward()  # exp keeps its own output
    assert sizes == [1024] * 3
    assert tracker.peak == 3 * 1024 + 8  # exp, its gradient, .grad; the sum, the scalar 1.0
