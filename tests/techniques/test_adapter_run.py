"""Runs with adapters through the loop: what is written, resumed, merged; one rank and two."""

import json
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from lean_trl.model.loader import load_model, save_model
from lean_trl.techniques.merge import merge_adapter
from lean_trl.train import loop
from lean_trl.train.distributed import World

from ..ranks import on_ranks
from ..train.golden import recorded_config
from ..train.test_resume import rows
from .tiny import make_batch, make_model

pytest.importorskip("peft")
ONE = World(0, 1, torch.device("cpu"), None)


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def settings(folder, steps=4, **changes):
    folder.mkdir(exist_ok=True)
    sections = {
        "data": {"path": str(rows(folder)), "max_length": 64},
        "train": {
            "batch_size": 4,
            "micro_batch_size": 2,
            "gradient_accumulation_steps": None,
            "max_steps": steps,
            "learning_rate": 1e-2,
            "lr_scheduler": "constant",
        },
        "checkpoint": {"every": 2, "keep": 10, "export_hf": True},
        "peft": {"target_modules": "all-linear", "r": 4},
    }
    for section, keys in changes.items():
        sections[section] = sections.get(section, {}) | keys
    return recorded_config(folder, "text", **sections)


def adapter_of(config):
    return load_file(f"{config.output_dir}/adapter/adapter_model.safetensors")


def assert_same(a, b, tolerance=0.0):
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert (tensor - b[name]).abs().max() <= tolerance, name


@pytest.mark.parametrize(
    "section", [{}, {"init_lora_weights": "pissa"}, {"lora_dropout": 0.2}], ids=str
)
def test_resumed_is_not_stopped(tmp_path, section):
    def run(name, steps):
        config = settings(tmp_path / name, steps, peft=section)
        loop.train_as(ONE, config)
        return adapter_of(config)

    run("half", 2)
    saved = load_file(next((tmp_path / "half").glob("**/step-2/*.safetensors")))
    assert all("lora" in name for name in saved if name.startswith("model."))
    assert_same(run("whole", 4), run("half", 4))


def test_two_ranks_are_one(tmp_path):
    # From a file: ranks that are threads would draw from one generator.
    first = settings(tmp_path / "first", 1, peft={"options": {"layers_to_transform": [0]}})
    loop.train_as(ONE, first)
    section = {"adapter_path": f"{first.output_dir}/adapter", "r": None, "target_modules": None}
    one = settings(tmp_path / "one", 2, peft=section)
    loop.train_as(ONE, one)
    for sharding in ("fsdp", "none"):
        two = settings(tmp_path / sharding, 2, peft=section, distributed={"sharding": sharding})
        on_ranks(2, lambda world, config=two: loop.train_as(world, config))
        assert_same(adapter_of(one), adapter_of(two), 2e-5)


def test_frozen_weights_in_bf16_learn_through_fp32_adapters(tmp_path):
    config = settings(tmp_path / "mixed")
    config = replace(config, model=replace(config.model, dtype="bfloat16"))
    on_ranks(1, lambda world: loop.train_as(world, config))
    lines = (tmp_path / "mixed" / "out" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert losses[-1] < losses[0]
    assert all(t.dtype == torch.float32 for t in adapter_of(config).values())


def test_export_merges_and_checks(tmp_path, root):
    config = settings(
        tmp_path / "run", peft={"target_modules": ["q_proj", "up_proj", "embed_tokens"]}
    )
    loop.train_as(ONE, config)
    command = [
        sys.executable,
        root / "scripts/export.py",
        tmp_path / "run/out/adapter",
        tmp_path / "m",
    ]
    done = subprocess.run([*command, "--dtype", "float32"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    merged, base = load_model(tmp_path / "m"), load_model(config.model.path)
    batch = make_batch()
    moved = (merged(batch).logprobs - base(batch).logprobs).abs().max()
    assert moved > 1e-2
    # The adapter is on the embedding alone, so the head, once the same matrix, is another now.
    assert base.config.tied and not merged.config.tied
    assert torch.equal(merged.lm_head.weight, base.model.embed_tokens.weight)


def test_merged_is_the_same_model(tmp_path):
    """alpha / r is used once, and a module that was trained whole replaces the original."""
    from .test_adapters import EVERYWHERE, adapter_weights, move, save_adapter, start

    base = make_model()
    save_model(base, tmp_path / "base")
    for number, section in enumerate((EVERYWHERE, {"modules_to_save": ["lm_head"]})):
        model, applied, _ = start(section, load_model(tmp_path / "base"))
        move(model)
        adapters = applied.find(loop.Adapters)
        folder = tmp_path / f"adapter{number}"
        save_adapter(model, adapters, adapter_weights(model, adapters), folder)
        merged, change = merge_adapter(load_model(tmp_path / "base"), folder)
        assert change < 1e-5
        batch = make_batch()
        assert torch.allclose(merged(batch).logprobs, model(batch).logprobs, atol=1e-5)
