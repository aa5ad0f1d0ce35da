"""Load balancing of experts, added to any method's objective when the model has experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from lean_trl.loss_config import LossConfig
from lean_trl.losses.router import expert_shares, router_aux_loss
from lean_trl.model.config import ModelConfig
from lean_trl.types import Batch, LossTerms, Method, Metric, Scores, Term


def with_router_loss(method: Method, loss: LossConfig, model: ModelConfig) -> Method:
    """The bound method with the balancing term, or as it is where that has no weight.

    The coefficient is loss.router_aux_loss_coef, else the model's own. Raises ValueError for a
    coefficient on a model without experts.
    """
    if model.moe is None:
        if loss.router_aux_loss_coef:
            raise ValueError(
                f"loss.router_aux_loss_coef {loss.router_aux_loss_coef} has no effect on a model "
                "without experts: leave it out"
            )
        return method
    coef = loss.router_aux_loss_coef
    coef = model.moe.aux_loss_coef if coef is None else coef
    if not coef:
        return method
    top_k, num_experts = model.moe.top_k, model.moe.num_experts

    def objective(scores: Scores, batch: Batch) -> LossTerms:
        terms = method.objective(scores, batch)
        assert scores.router_probs is not None
        values = router_aux_loss(scores.router_probs, batch.extras["expert_shares"])
        real = (scores.router_probs.detach().sum(0) > 0).float()  # 0 for padding
        return LossTerms(
            (*terms.terms, Term(values, None, "processed", coef)),
            {**terms.metrics, "aux_loss": Metric(values, real)},
        )

    def statistics(
        score: Callable[[Batch], Scores], batches: list[Batch], group: dist.ProcessGroup | None
    ) -> list[Batch]:
        if method.window_statistics is not None:
            batches = method.window_statistics(score, batches, group)
        counts = torch.zeros(num_experts, device=batches[0].input_ids.device)
        for batch in batches:
            chosen = score(batch).expert_counts
            assert chosen is not None
            counts += chosen
        if group is not None:
            dist.all_reduce(counts, group=group)
        shares = expert_shares(counts, top_k)
        return [batch.with_extras(expert_shares=shares) for batch in batches]

    return replace(method, objective=objective, window_statistics=statistics)
