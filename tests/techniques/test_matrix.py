"""Techniques change memory, not results: each with each method, full and with adapters."""

from pathlib import Path

import pytest
import torch

from lean_trl.techniques.compile import Compile
from lean_trl.train.methods import METHODS

from .matrix import IN_BACKWARD, MODES, QUANTIZED, Cell, baseline, cells, run_cell, switches, table

pytest.importorskip("peft")
OTHER_STEPS = (IN_BACKWARD, *QUANTIZED)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "cell", [c for c in cells() if c.reason is None], ids=lambda c: f"{c.row}-{c.method}-{c.mode}"
)
def test_same_step(cell: Cell, monkeypatch):
    monkeypatch.setattr(Compile, "backend", "aot_eager")  # inductor takes a minute here
    plain = baseline(cell.method, cell.mode, cell.row if cell.row in OTHER_STEPS else "")
    assert all(grad.abs().max() > 0 for grad in plain.grads.values())
    for result in run_cell(cell):
        assert result.loss == pytest.approx(plain.loss, rel=1e-6, abs=1e-7)
        assert result.grad_norm == pytest.approx(plain.grad_norm, rel=1e-6)
        if cell.row == IN_BACKWARD:  # gradients are gone; what they did is there
            for name, weight in plain.weights.items():
                assert torch.equal(result.weights[name], weight), name
            continue
        assert result.grads.keys() == plain.grads.keys()
        for name, grad in plain.grads.items():
            difference = (result.grads[name] - grad).abs().max()
            assert difference <= 1e-5 * grad.abs().max() + 1e-9, name


def test_every_technique_and_method_is_there():
    found = cells()
    assert {cell.method for cell in found} == set(METHODS)
    assert len(found) == (len(switches()) + 1) * len(METHODS) * len(MODES)
    tested = [cell for cell in found if cell.reason is None]
    assert len(tested) >= 0.75 * len(found)


def test_the_document_has_this_table(root: Path):
    assert table() in (root / "docs/techniques.md").read_text(encoding="utf-8")
