"""Runs a recorded setting through our loop and compares metrics.jsonl with the record."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lean_trl.config import config_from_dict

GOLDEN = Path(__file__).parent.parent / "golden"
RECORDS = {
    name: record
    for file in ("trl_offline.json", "trl_preference.json")
    for name, record in json.loads((GOLDEN / file).read_text()).items()
}


def model_folder(name: str, folder: Path) -> Path:
    """A tiny checkpoint with the tokenizer beside it, as a model is published."""
    target = folder / name
    if not target.exists():
        shutil.copytree(GOLDEN / "models" / name, target)
        shutil.copytree(GOLDEN / "tokenizer", target, dirs_exist_ok=True)
    return target


def recorded_config(folder: Path, rows: str, *, model: str = "qwen3", **changes: dict):
    """The settings that all records share, with keys of sections changed (None: left out)."""
    sections = {
        "output_dir": str(folder / "out"),
        "model": {"path": str(model_folder(model, folder))},
        "data": {"path": str(GOLDEN / "data" / f"{rows}.jsonl"), "shuffle": False},
        "train": {
            "micro_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-3,
            "lr_scheduler": "constant",
            "max_steps": 6,
        },
        "checkpoint": {"export_hf": False},
        "logging": {"progress": False},
    }
    for section, keys in changes.items():
        if not isinstance(keys, dict):
            sections[section] = keys
            continue
        merged = {**sections.get(section, {}), **keys}
        sections[section] = {key: value for key, value in merged.items() if value is not None}
    return config_from_dict(sections)


def lines(folder: Path) -> list[dict]:
    """The training lines of a run's metrics.jsonl."""
    records = map(json.loads, (folder / "out" / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if "loss" in record]


def check_against_record(ours: list[dict], name: str, tolerance: float = 1e-4) -> None:
    """loss and grad_norm of all six steps within a relative tolerance, tokens exactly."""
    record = RECORDS[name]["log"]
    steps = [
        entry
        for entry in (record["log"] if isinstance(record, dict) else record)
        if "loss" in entry
    ]
    assert len(ours) == len(steps) == 6
    for line, entry in zip(ours, steps, strict=True):
        for key in ("loss", "grad_norm"):
            assert line[key] == pytest.approx(entry[key], rel=tolerance), (name, entry["step"], key)
        assert line["num_tokens"] == entry["num_tokens"]
        assert line["learning_rate"] == pytest.approx(entry["learning_rate"])
