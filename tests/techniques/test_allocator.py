"""Allocator settings: one string for torch and vLLM, the user's own kept, odd ones refused."""

import pytest

from lean_trl.techniques.allocator import NAMES, Allocator, with_expandable_segments
from lean_trl.techniques.apply import before_cuda

from .tiny import make_config

NEW, OLD = NAMES
ON = "expandable_segments:True"


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, ON),
        ({OLD: ""}, ON),
        ({OLD: "backend:native"}, f"backend:native,{ON}"),
        ({NEW: "max_split_size_mb:64"}, f"max_split_size_mb:64,{ON}"),
        ({OLD: ON}, ON),
        ({NEW: "a:1,b:2", OLD: "a:1,b:2"}, f"a:1,b:2,{ON}"),
    ],
)
def test_both_names_get_one_string(given, expected):
    assert with_expandable_segments(given) == {NEW: expected, OLD: expected}


@pytest.mark.parametrize(
    "given, message",
    [
        ({NEW: "a:1", OLD: "a:2"}, "differ, and torch and vLLM read one each"),
        ({OLD: "expandable_segments:False"}, "set memory.expandable_segments false"),
    ],
)
def test_contradictions_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        with_expandable_segments(given)


def test_before_cuda_sets_what_the_run_asks_for():
    environment = {"OTHER": "1"}
    before_cuda(make_config(memory={"expandable_segments": False}), environment)
    assert environment == {"OTHER": "1"}
    before_cuda(make_config(memory={"expandable_segments": True}), environment)
    assert environment == {"OTHER": "1", NEW: ON, OLD: ON}


def test_without_a_gpu_there_is_no_evidence():
    technique = Allocator(make_config(memory={"expandable_segments": True}))
    assert technique.enabled
    assert technique.evidence(None).amount == 0
