"""Sharding changes where numbers live, not what they are: losses, gradients, norms on 1-4 ranks."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from lean_trl.config import Config, DistributedConfig, LossConfig, MemoryConfig, ModelConfig
from lean_trl.data.batch import build_batch, filler_batch
from lean_trl.model.generate import generate
from lean_trl.model.loader import new_model
from lean_trl.techniques.apply import apply_techniques
from lean_trl.techniques.shard import Precision, kept_whole, shard_model, units
from lean_trl.train.distributed import World, local_part, make_mesh, reshard
from lean_trl.train.methods import METHODS
from lean_trl.train.step import clip_gradients, count_totals, train_step
from lean_trl.types import Batch, Example, StepReport
from tests.ranks import on_ranks

RAW = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 61,  # no multiple of the ranks: the last shard is smaller
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "hidden_act": "silu",
    "initializer_range": 0.1,
}
SFT = METHODS["sft"].bind(LossConfig(loss_type="nll"))
BF16 = Precision(compute=torch.bfloat16)


def tiny(tied: bool):
    return new_model({**RAW, "tie_word_embeddings": tied}, seed=1)


def examples(count: int = 14) -> list[Example]:
    rng = np.random.default_rng(0)
    return [Example(rng.integers(0, 61, int(rng.integers(2, 12)))) for _ in range(count)]


def windows(size: int, rows: int = 2) -> list[list[Batch]]:
    """The same 14 rows dealt to `size` ranks, in micro-batches of `rows`; as many on each rank."""
    parts = [examples()[rank::size] for rank in range(size)]
    cut = [[build_batch(p[i : i + rows]) for i in range(0, len(p), rows)] for p in parts]
    longest = max(map(len, cut))
    return [window + [filler_batch()] * (longest - len(window)) for window in cut]


@dataclass
class Steps:
    """What two steps of one rank showed."""

    reports: list[StepReport] = field(default_factory=list)
    grads: dict[str, torch.Tensor] = field(default_factory=dict)  # of the first step, clipped


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def two_steps(model, window: list[Batch], world: World) -> Steps:
    steps = Steps()

    class SGD(torch.optim.SGD):
        def step(self):
            if not steps.grads:
                grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
                steps.grads |= {name: whole(grad).clone() for name, grad in grads.items()}
            super().step()

    optimizer = SGD(model.parameters(), lr=0.1)
    totals = count_totals(window, world.group)
    for _ in range(2):
        report = train_step(
            model, window, SFT, optimizer, totals=totals, max_grad_norm=1.0, group=world.group
        )
        steps.reports.append(report)
    return steps


def sharded(
    tied: bool, kind: str | None, window: list[Batch], world: World, replicas=None, **how
) -> Steps:
    model = tiny(tied)
    if kind is not None:
        shard_model(
            model, make_mesh(kind, replicas, "cpu"), how.pop("precision", Precision()), **how
        )
    return two_steps(model, window, world)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def reference(request) -> tuple[bool, Steps]:
    """One process, no sharding, the whole window in one micro-batch."""
    [steps] = on_ranks(1, lambda world: two_steps(tiny(request.param), windows(1, 14)[0], world))
    return request.param, steps


def check_equal(steps: Steps, reference: Steps) -> None:
    for ours, theirs in zip(steps.reports, reference.reports, strict=True):
        assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=1e-6)
        assert ours.grad_norm.item() == pytest.approx(theirs.grad_norm.item(), rel=1e-6)
        for name, value in theirs.metrics.items():
            if name != "padding_fraction":  # fillers are padding
                assert ours.metrics[name].item() == pytest.approx(value.item(), rel=1e-5), name
    for name, grad in reference.grads.items():
        assert (steps.grads[name] - grad).abs().max() <= 1e-5 * grad.abs().max(), name


LAYOUTS = {
    "mesh of one": (1, "fsdp", {}),
    "fsdp 2": (2, "fsdp", {}),
    "fsdp 4": (4, "fsdp", {}),
    "hsdp 2x2": (4, "hsdp", {"replicas": 2}),
    "kept after forward": (2, "fsdp", {"reshard_after_forward": False}),
    "offloaded": (2, "fsdp", {"cpu_offload": True}),
    "replicas": (2, None, {}),
    "replicas as meshes of one": (2, "none", {}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_numbers_on_any_layout(layout, reference):
    size, kind, how = LAYOUTS[layout]
    tied, want = reference
    cut = windows(size)
    for steps in on_ranks(size, lambda w: sharded(tied, kind, cut[w.rank], w, **how)):
        check_equal(steps, want)


@pytest.mark.parametrize("kind", ["fsdp", None])
def test_ranks_with_one_and_seven_micro_batches_of_work(kind, reference):
    tied, want = reference
    rows = examples()
    heavy = [build_batch(rows[2 * i : 2 * i + 2]) for i in range(6)] + [build_batch(rows[12:13])]
    light = [build_batch(rows[13:]), *[filler_batch()] * 6]
    assert [len(heavy), len(light)] == [7, 7]
    for steps in on_ranks(2, lambda w: sharded(tied, kind, (heavy, light)[w.rank], w)):
        check_equal(steps, want)


def test_a_rank_without_any_row(reference):
    tied, want = reference
    work = windows(1, 14)[0], [filler_batch()]
    for steps in on_ranks(2, lambda w: sharded(tied, "fsdp", work[w.rank], w)):
        check_equal(steps, want)


@pytest.mark.parametrize("size", [1, 2])
def test_bf16_compute_keeps_fp32_weights_and_gradients(size, reference):
    tied, want = reference
    cut = windows(size)
    seen = on_ranks(size, lambda w: sharded(tied, "fsdp", cut[w.rank], w, precision=BF16))
    for steps in seen:
        assert {grad.dtype for grad in steps.grads.values()} == {torch.float32}
        assert steps.reports[1].loss.item() == pytest.approx(want.reports[1].loss.item(), rel=3e-3)
        for name, grad in want.grads.items():
            error = (steps.grads[name] - grad).norm() / grad.norm()
            assert 1e-4 < error < 0.05, (name, error)  # above 0: it was computed in bf16


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_gradients_summed_in_bf16_are_kept_in_fp32(compute, reference):
    tied, want = reference
    precision = Precision(compute=compute, reduce=torch.bfloat16)
    cut = windows(2)
    for steps in on_ranks(2, lambda w: sharded(tied, "fsdp", cut[w.rank], w, precision=precision)):
        assert {grad.dtype for grad in steps.grads.values()} == {torch.float32}
        for name, grad in want.grads.items():
            error = (steps.grads[name] - grad).norm() / grad.norm()
            assert 1e-5 < error < 0.05, (name, error)


@pytest.mark.parametrize("tied", [False, True])
def test_the_vocabularys_gradient_does_not_stop_growing_in_bf16(tied):
    """1500 equal tokens: in a bf16 buffer their gradients stop adding up at 256 of them."""
    batch = build_batch([Example([7] * 500) for _ in range(3)])

    def gradient(world: World, precision: Precision) -> torch.Tensor:
        model = tiny(tied)
        shard_model(model, make_mesh("fsdp", None, "cpu"), precision)
        (-model(batch).logprobs).sum().backward()
        return whole(model.model.embed_tokens.weight.grad)[7]

    [exact] = on_ranks(1, lambda w: gradient(w, Precision()))
    [ours] = on_ranks(1, lambda w: gradient(w, BF16))
    assert (ours - exact).norm() < 0.03 * exact.norm()


def test_units_and_their_layout():
    def look(world: World) -> tuple[list[str], set, set]:
        model = tiny(tied=False)
        shard_model(model, make_mesh("hsdp", 2, "cpu"), Precision())
        names = {id(module): name for name, module in model.named_modules()}
        placements = {p.placements for p in model.parameters()}
        local = {p.to_local().shape[0] for p in model.parameters() if p.shape[0] == 61}
        return [names[id(unit)] for unit in units(model)], placements, local

    for names, placements, local in on_ranks(4, look):
        assert names == ["", "model.layers.0", "model.layers.1", "lm_head"]
        assert placements == {(Replicate(), Shard(0))}
        assert local <= {31, 30}


@pytest.mark.parametrize("tied", [False, True])
def test_generation_from_a_sharded_model(tied):
    prompts = [[5, 6, 7], [8, 9]]
    expected = generate(tiny(tied), prompts, max_tokens=6)

    def answer(world: World) -> list[list[int]]:
        model = tiny(tied)
        shard_model(model, make_mesh("fsdp", None, "cpu"), Precision())
        first = generate(model, prompts, max_tokens=6)  # before any other forward
        reshard(model)
        model(windows(2)[world.rank][0]).logprobs.sum().backward()
        with kept_whole(model, Config()):
            assert generate(model, prompts, max_tokens=6) == first
            assert not isinstance(model.blocks[0].self_attn.q_proj.weight, DTensor)
        assert all(isinstance(p, DTensor) for p in model.parameters())
        assert generate(model, prompts, max_tokens=6) == first
        assert isinstance(model.blocks[0].self_attn.q_proj.weight, DTensor)
        return first

    assert on_ranks(2, answer) == [expected, expected]


def test_replicas_that_do_not_divide_the_ranks():
    with pytest.raises(ValueError, match=r"replicas 3 does not divide the 4 ranks: .* 1, 2, 4"):
        on_ranks(4, lambda world: make_mesh("hsdp", 3, "cpu"))


def test_the_settings_choose_the_layout():
    def look(world: World, config: Config) -> bool:
        model = tiny(tied=True)
        apply_techniques(model, config)
        return isinstance(model.model.embed_tokens.weight, DTensor)

    plain, replicas = Config(), Config(distributed=DistributedConfig(sharding="none"))
    assert on_ranks(1, lambda w: look(w, plain)) == [False]
    assert on_ranks(2, lambda w: look(w, plain)) == [True, True]
    assert on_ranks(2, lambda w: look(w, replicas)) == [False, False]
    for config in (
        Config(model=ModelConfig(dtype="bfloat16")),
        Config(memory=MemoryConfig(cpu_offload=True)),
    ):
        assert on_ranks(1, lambda w, c=config: look(w, c)) == [True]


def test_clipping_over_several_meshes_and_plain_tensors():
    def norm(world: World) -> tuple[float, list[torch.Tensor]]:
        values = [torch.arange(8.0).view(4, 2) + 1, torch.full((6,), 2.0), torch.ones(3)]
        meshes = [make_mesh("fsdp", None, "cpu"), make_mesh("hsdp", 2, "cpu"), None]
        parameters = []
        for value, mesh in zip(values, meshes, strict=True):
            if mesh is not None:
                placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
                value = torch.distributed.tensor.distribute_tensor(value, mesh, placements)
            parameters.append(torch.nn.Parameter(torch.zeros_like(value)))
            parameters[-1].grad = value.clone()
        total = clip_gradients(parameters, 1.0)
        return total.item(), [whole(p.grad) for p in parameters]

    exact = (204 + 24 + 3) ** 0.5  # 1 + 4 + ... + 64, 6 * 4, 3
    for total, grads in on_ranks(4, norm):
        assert total == pytest.approx(exact, rel=1e-6)
        assert torch.cat([g.flatten() for g in grads]).norm().item() == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_local_part_finds_its_place(size):
    def look(world: World) -> tuple[torch.Tensor, int]:
        whole = torch.arange(5 * 3.0).view(5, 3)
        mesh = make_mesh("fsdp", None, "cpu")
        part, first = local_part(
            torch.distributed.tensor.distribute_tensor(whole, mesh, [Shard(0)])
        )
        return part, first

    rows = torch.arange(15.0).view(5, 3)
    parts = on_ranks(size, look)
    assert torch.equal(torch.cat([part for part, _ in parts]), rows)
    for part, first in parts:
        assert torch.equal(part, rows[first : first + len(part)])


def test_a_forward_without_backward_leaves_nothing_gathered_after_reshard(reference):
    tied, want = reference

    def with_evaluation(world: World) -> Steps:
        model = tiny(tied)
        shard_model(model, make_mesh("fsdp", None, "cpu"), Precision())
        with torch.no_grad():
            model(windows(2)[world.rank][0])
        assert not isinstance(model.model.norm.weight, DTensor)  # the root stays whole
        reshard(model)
        assert all(isinstance(p, DTensor) for p in model.parameters())
        return two_steps(model, windows(2)[world.rank], world)

    for steps in on_ranks(2, with_evaluation):
        check_equal(steps, want)
