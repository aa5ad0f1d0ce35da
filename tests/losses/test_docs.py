"""docs/losses.md is true: its loops run, its table names what is exported; doctests hold."""

import doctest
import importlib
import math
import pkgutil
import re
from pathlib import Path

import pytest

import lean_trl.losses

PAGE = (Path(__file__).parents[2] / "docs" / "losses.md").read_text(encoding="utf-8")
LOOPS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
MODULES = [info.name for info in pkgutil.iter_modules(lean_trl.losses.__path__)]


def run(code):
    names = {"__name__": "__main__"}
    exec(compile(code, "docs/losses.md", "exec"), names)
    return names


def test_plain_loop():
    history = run(LOOPS[0])["history"]
    assert history[0] == pytest.approx(math.log(2), abs=1e-5)
    assert history[-1] < 0.2


def test_transformers_loop():
    pytest.importorskip("transformers")
    names = run(LOOPS[1])
    assert len(LOOPS) == 2
    assert names["history"][-1] < 0.5 * names["history"][0]
    assert names["accuracy"] == 1.0


def test_every_function_in_the_table_is_exported():
    table = "\n".join(line for line in PAGE.splitlines() if line.startswith("|"))
    called = set(re.findall(r"\b([a-z]+_[a-z_]+)\(", table))  # methods of tensors have no "_"
    assert {"dpo_loss", "kto_loss", "reward_loss", "sft_loss", "kl_estimate"} <= called
    assert called <= set(lean_trl.losses.__all__)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    module = importlib.import_module(f"lean_trl.losses.{name}")
    result = doctest.testmod(module, extraglobs={"torch": importlib.import_module("torch")})
    assert result.failed == 0


def test_every_small_loss_has_an_example_and_a_source():
    rows = [row.loss for row in lean_trl.losses.DPO_LOSSES.values()]
    for function in (*rows, *lean_trl.losses.KTO_LOSSES.values()):
        assert ">>>" in function.__doc__, function
        assert "arXiv" in function.__doc__, function
