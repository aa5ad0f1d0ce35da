"""The worked examples in docstrings are true."""

import doctest
import importlib

import pytest

from tests.test_imports import MODULES

WITH_EXAMPLES = [name for name, file in MODULES.items() if ">>> " in file.read_text("utf-8")]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples(name):
    results = doctest.testmod(importlib.import_module(name), verbose=False)
    assert results.attempted > 0
    assert results.failed == 0, "doctest printed the difference above"
