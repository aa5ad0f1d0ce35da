"""Log-probs of a generation under a model that does not learn now: old ones and the reference's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from lean_trl.data.plan import Cut, Table, cut_window
from lean_trl.rollout.buffer import Rollout
from lean_trl.train.distributed import compute_device, reshard
from lean_trl.train.gather import gather_columns
from lean_trl.types import UNITS, Batch

MakeBatch = Callable[[Sequence[int]], Batch]  # positions of rollouts (none: a filler) -> Batch


def table_of(rollouts: Sequence[Rollout], items: Sequence[Sequence[int]]) -> Table:
    """What planning has to know of items, each some rollouts that stay together."""
    counts = {unit: np.zeros(len(items), np.int64) for unit in UNITS}
    cost = np.zeros(len(items), np.int64)
    for i, members in enumerate(items):
        counts["tokens"][i] = sum(rollouts[m].num_scored for m in members)
        counts["processed"][i] = sum(rollouts[m].length for m in members)
        counts["sequences"][i] = len(members)
        cost[i] = sum(rollouts[m].length ** 2 for m in members)
    return Table(counts, cost)


def cut_rollouts(
    rollouts: Sequence[Rollout], items: Sequence[Sequence[int]], cut: Cut, rank: int
) -> list[list[int]]:
    """This rank's micro-batches as positions of rollouts; as many on every rank, some empty."""
    if not items:
        return [[]]
    chunks = cut_window(np.arange(len(items)), table_of(rollouts, items), cut)[rank]
    return [[m for i in chunk.tolist() for m in items[i]] for chunk in chunks]


@torch.no_grad()
def score_rollouts(
    model: nn.Module,
    rollouts: Sequence[Rollout],
    make_batch: MakeBatch,
    cut: Cut,
    rank: int,
    group: dist.ProcessGroup | None,
) -> dict[int, np.ndarray]:
    """{position: log-probs fp32 [U]} of all rollouts that have something scored; every rank does
    its share and gets all. The model's training mode is restored.
    """
    wanted = [[i] for i, r in enumerate(rollouts) if r.num_scored and not r.masked]
    was_training, device = model.training, compute_device(model)
    model.eval()
    order: list[int] = []
    parts = []
    for members in cut_rollouts(rollouts, wanted, cut, rank):
        order += members
        parts.append(model(make_batch(members).to(device)).logprobs.float())
    model.train(was_training)
    reshard(model)
    values, _ = gather_columns(torch.cat(parts).cpu()[None], group)
    positions, _ = gather_columns(torch.tensor(order, dtype=torch.int64)[None], group)
    result, at = {}, 0
    for position in positions[0].tolist():
        count = rollouts[position].num_scored
        result[position] = values[0, at : at + count].numpy()
        at += count
    return result
