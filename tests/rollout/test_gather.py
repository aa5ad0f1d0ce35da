"""Generation from sharded weights: the same tokens, whole or block by block, and what is held."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from lean_trl.config import Config, DistributedConfig, ModelConfig
from lean_trl.data.batch import build_batch
from lean_trl.rollout.engine import Request, generate
from lean_trl.rollout.gather import open_native
from lean_trl.rollout_config import RolloutConfig
from lean_trl.techniques.shard import Precision, shard_model
from lean_trl.train.distributed import World, make_mesh
from lean_trl.types import Example
from tests.ranks import on_ranks
from tests.rollout.test_native import prompts, tiny

ASKED = prompts(5)


def requests(rank, size):
    """Rank 0 has more to do than the others, the last rank nothing."""
    if rank == size - 1:
        return []
    return [
        Request(i, ids, n=2, seed=i, max_tokens=6 + 5 * (rank == 0))
        for i, ids in enumerate(ASKED)
        if i % (size - 1) == rank
    ]


def whole_blocks(model) -> int:
    return sum(not isinstance(next(b.parameters()), DTensor) for b in model.blocks)


@pytest.mark.parametrize("gather", [True, False])
def test_the_same_tokens_from_shards(gather):
    config = Config(
        method="grpo",
        rollout=RolloutConfig(gather_for_generation=gather, kv_cache_gib=0.01),
        distributed=DistributedConfig(sharding="fsdp"),
    )
    size, held = 3, [0, 0, 0]
    plain = tiny()
    config_one = Config(method="grpo", distributed=DistributedConfig(sharding="none"))
    alone = World(0, 1, torch.device("cpu"), None)
    expected = [
        [c.ids for c in generate(open_native(plain, config_one, alone), requests(rank, size))]
        for rank in range(size)
    ]

    def note(rank: int, model) -> None:
        held[rank] = max(held[rank], whole_blocks(model))

    def answer(world: World) -> list:
        model = tiny()
        shard_model(model, make_mesh("fsdp", None, "cpu"), Precision())
        for block in model.blocks:  # inside of it, where its weights are whole
            block.mlp.register_forward_pre_hook(lambda *_: note(world.rank, model))
        engine = open_native(model, config, world)
        got = []
        for _ in range(2):  # a training step between two generations
            engine.wake()
            got.append([c.ids for c in generate(engine, requests(world.rank, world.size))])
            engine.sleep()
            assert whole_blocks(model) == 0
            seen, held[world.rank] = held[world.rank], 0
            model(build_batch([Example([3, 4, 5])])).logprobs.sum().backward()
            held[world.rank] = seen
        assert got[0] == got[1]
        return got[0]

    assert on_ranks(size, answer) == expected
    assert held == ([2, 2, 0] if gather else [1, 1, 1])  # the last rank has nothing to say


def test_computing_in_another_dtype_than_stored():
    config = Config(method="grpo", model=ModelConfig(dtype="bfloat16"))

    def answer(world: World) -> torch.dtype:
        model = tiny()
        shard_model(model, make_mesh("none", None, "cpu"), Precision(compute=torch.bfloat16))
        engine = open_native(model, config, world)
        engine.wake()
        assert len(generate(engine, [Request(0, (1, 2, 3), n=3, max_tokens=5)])) == 3
        dtype = engine._cache.keys[0].dtype
        engine.sleep()
        return dtype

    assert on_ranks(1, answer) == [torch.bfloat16]
