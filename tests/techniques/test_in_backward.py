"""The optimizer in backward: the same steps, fewer gradients at a time, clipping as it says."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from lean_trl.data.batch import build_batch
from lean_trl.techniques.apply import apply_techniques
from lean_trl.techniques.trial import prove
from lean_trl.train.methods import METHODS
from lean_trl.train.optim import OPTIMIZERS, build_optimizer
from lean_trl.train.step import count_totals, train_step
from lean_trl.types import Example

from ..ranks import on_ranks
from .tiny import make_batch, make_config, make_model

PLAIN = {"max_grad_norm": None}


def steps(config, number=3, world=None, batches=None, **shape):
    """(weights after so many steps, reports, the largest bytes of gradients seen at an arrival)"""
    model = make_model(**shape)
    around = apply_techniques(model, config)
    optimizer = build_optimizer(model, config.train, config.memory.optimizer_in_backward)
    most = [0]

    def count(_):
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        most[0] = max(most[0], sum(grad.nbytes for grad in grads))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    method, reports = METHODS["sft"].bind(config.loss), []
    for step in range(number):
        window = [make_batch(19, 12, seed=step)] if batches is None else batches
        totals = count_totals(window, None if world is None else world.group)
        reports.append(
            train_step(
                model,
                window,
                method,
                optimizer,
                totals=totals,
                max_grad_norm=config.train.max_grad_norm,
                around=around,
                group=None if world is None else world.group,
            )
        )
    weights = {n: p.detach() for n, p in model.named_parameters()}
    whole = {n: w.full_tensor() if isinstance(w, DTensor) else w for n, w in weights.items()}
    return whole, reports, most[0]


def configs(clip=None, optimizer="adamw", **train):
    train = {"learning_rate": 0.01, "optimizer": optimizer, "max_grad_norm": None, **train}
    after = make_config(train=train)
    return after, make_config(train=train, memory={"optimizer_in_backward": {"clip": clip}})


def assert_equal(one, other, tolerance=0.0):
    for name, weight in one.items():
        assert (weight - other[name]).abs().max() <= tolerance, name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_same_steps(optimizer, tied):
    after, inside = configs(optimizer=optimizer)
    plain, reports, _ = steps(after, tie_word_embeddings=tied)
    weights, others, _ = steps(inside, tie_word_embeddings=tied)
    assert_equal(plain, weights)
    for one, other in zip(reports, others, strict=True):
        assert torch.equal(one.loss, other.loss)
        assert one.grad_norm.item() == pytest.approx(other.grad_norm.item(), rel=1e-6)


def test_gradients_of_all_layers_are_never_there():
    deep = {"num_hidden_layers": 8}
    after, inside = configs()
    _, _, all_of_them = steps(after, 1, **deep)
    _, _, some = steps(inside, 1, **deep)
    model = make_model(**deep)
    head = 2 * model.lm_head.weight.nbytes  # its gradient, or the embedding's, is there as well
    block = sum(p.nbytes for p in model.blocks[0].parameters())
    assert all_of_them == sum(p.nbytes for p in model.parameters())
    assert some <= head + block


BF16 = {"param_dtype": "bfloat16", "max_grad_norm": None}


@pytest.mark.parametrize(
    "train, memory, most",
    [
        ({"max_grad_norm": None}, {}, 16.1),
        (BF16 | {"optimizer": "adamw_8bit"}, {}, 7.0),
        (BF16 | {"optimizer": "adamw_8bit"}, {"optimizer_in_backward": {}}, 5.0),
        (BF16 | {"optimizer": "adamw_4bit"}, {"optimizer_in_backward": {}}, 4.0),
    ],
)
def test_bytes_a_parameter(train, memory, most):
    """Storages of parameters, gradients and state at the step's peak, over the parameters."""
    dtype = train.get("param_dtype", "float32")
    config = make_config(train=train, memory=memory, model={"dtype": dtype})
    model = make_model(hidden_size=256, intermediate_size=512, num_hidden_layers=12)
    model = model.to(getattr(torch, dtype))
    optimizer = build_optimizer(model, config.train, config.memory.optimizer_in_backward)
    gradient_bytes = [0]

    def count(_):
        grads = [p.grad.nbytes for p in model.parameters() if p.grad is not None]
        gradient_bytes[0] = max(gradient_bytes[0], sum(grads))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    window = [make_batch()]
    train_step(
        model,
        window,
        METHODS["sft"].bind(config.loss),
        optimizer,
        totals=count_totals(window),
        max_grad_norm=None,
    )
    states = sum(t.nbytes for state in optimizer.state.values() for t in state.values())
    weights = sum(p.nbytes for p in model.parameters())
    number = sum(p.numel() for p in model.parameters())
    assert (weights + gradient_bytes[0] + states) / number < most


def test_clipping_by_two_passes_is_exact():
    after, inside = configs("two_passes", max_grad_norm=0.5)
    plain, reports, _ = steps(after)
    weights, others, _ = steps(inside)
    assert reports[0].grad_norm > 1.0  # it clips
    assert_equal(plain, weights, 1e-6)
    for one, other in zip(reports, others, strict=True):
        assert one.grad_norm.item() == pytest.approx(other.grad_norm.item(), rel=1e-5)
        assert one.loss.item() == pytest.approx(other.loss.item(), rel=1e-6)


def test_clipping_by_the_previous_norm():
    """The first step measures; the second is scaled by the first one's norm."""
    after, inside = configs("previous_norm", max_grad_norm=0.5)
    assert_equal(steps(after, 1)[0], steps(inside, 1)[0], 1e-6)
    plain, reports, _ = steps(after, 2)
    weights, _, _ = steps(inside, 2)
    assert max((plain[n] - weights[n]).abs().max().item() for n in plain) > 1e-6
    sgd = reports[1].grad_norm / reports[0].grad_norm
    assert sgd != 1


def test_a_window_with_nothing_to_learn_changes_nothing():
    _, inside = configs("two_passes", max_grad_norm=1.0, weight_decay=0.1)
    empty = [build_batch([Example([5, 6, 7], [False] * 3)])]
    weights, reports, _ = steps(inside, 1, batches=empty)
    assert reports[0].loss == 0 and reports[0].grad_norm == 0
    assert_equal(dict(make_model().named_parameters()), weights)


@pytest.mark.parametrize("clip, norm", [(None, None), ("two_passes", 0.5)])
def test_under_fsdp(clip, norm):
    batches = [make_batch(19, 12), make_batch(9, 21, seed=3)]
    after, inside = configs(clip, max_grad_norm=norm)
    plain, reports, _ = steps(after, 2, batches=batches)

    def work(world):
        return steps(inside, 2, world, [batches[world.rank]])

    for weights, others, _ in on_ranks(2, work):
        assert_equal(plain, weights, 2e-5)
        assert others[1].grad_norm.item() == pytest.approx(reports[1].grad_norm.item(), rel=1e-4)


def test_replicas_are_refused():
    config = make_config(
        train=PLAIN, memory={"optimizer_in_backward": {}}, distributed={"sharding": "none"}
    )
    with pytest.raises(ValueError, match="set it fsdp"):
        on_ranks(2, lambda world: apply_techniques(make_model(), config))


def test_evidence():
    config = make_config(train=PLAIN, memory={"optimizer_in_backward": {}})
    model = make_model()
    applied = apply_techniques(model, config)
    with pytest.raises(ValueError, match="steps after backward"):
        prove(applied, model, build_optimizer(model, config.train), config)
    optimizer = build_optimizer(model, config.train, config.memory.optimizer_in_backward)
    found = prove(applied, model, optimizer, config)["optimizer_in_backward"]
    assert found.text == "39 of 39 parameters step as their gradient arrives"
    fresh = make_model()
    assert all(torch.equal(p, fresh.get_parameter(n)) for n, p in model.named_parameters())


@pytest.mark.parametrize(
    "train, clip, message",
    [
        (PLAIN | {"gradient_accumulation_steps": 4}, None, "set train.micro_batch_size 16"),
        (PLAIN | {"batch_size": 8, "micro_batch_size": 2}, None, "set train.micro_batch_size 8"),
        (PLAIN | {"max_tokens_per_micro_batch": 99}, None, "leave out train.max_tokens_per"),
        ({}, None, "set train.max_grad_norm null, or its clip to two_passes"),
        (PLAIN, "two_passes", "clip has no effect without train.max_grad_norm"),
    ],
)
def test_settings_at_odds(train, clip, message):
    with pytest.raises(ValueError, match=message):
        make_config(train=train, memory={"optimizer_in_backward": {"clip": clip}})
