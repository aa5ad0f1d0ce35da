"""The native engine over a model that may be sharded: whole for the generation, or block by block.

Whole, no forward is a collective and ranks generate at their own pace. Block by block, no rank
holds more than one block and what is never sharded, and all take as many forwards as the slowest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from lean_trl.config import Config
from lean_trl.model.decoder import CausalLM
from lean_trl.rollout.native import NativeEngine
from lean_trl.techniques.shard import DTYPES, sharding_kind, units
from lean_trl.train.distributed import World, reshard


def open_native(model: CausalLM, config: Config, world: World) -> NativeEngine:
    """The engine that the settings ask for."""
    whole = config.rollout.gather_for_generation
    sharded = world.group is not None and sharding_kind(config) != "none"
    again = config.distributed.reshard_after_forward
    return NativeEngine(
        model,
        kv_cache_gib=config.rollout.kv_cache_gib,
        awake=partial(_resharding, model, not whole, again),
        any_rank_busy=_any_busy(world.group) if sharded and not whole else None,
        dtype=DTYPES[config.model.dtype],
    )


@contextmanager
def _resharding(model: CausalLM, each_forward: bool, again: bool) -> Iterator[None]:
    """Blocks are freed after each forward, or stay gathered. again: what training does."""
    blocks = [block for block in model.blocks if isinstance(block, FSDPModule)]
    for block in blocks:
        block.set_reshard_after_forward(each_forward, recurse=False)
    if not each_forward:
        for unit in units(model):
            unit.unshard()
    try:
        yield
    finally:
        for block in blocks:
            block.set_reshard_after_forward(again, recurse=False)
        reshard(model)


def _any_busy(group: dist.ProcessGroup | None) -> Callable[[bool], bool]:
    def any_busy(busy: bool) -> bool:
        flag = torch.tensor([int(busy)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        return bool(flag.item())

    return any_busy
