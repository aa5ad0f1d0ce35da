"""Dashboards: the same numbers as metrics.jsonl, off by default, never the end of a run."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

from lean_trl.config import Config, LoggingConfig
from lean_trl.train.metrics import MetricsLog
from lean_trl.train.trackers import Trackers

RECORD = {"step": 3, "loss": 0.5, "grad_norm": float("nan"), "note": "text"}


def package(name: str, monkeypatch) -> list:
    """A stand-in for the package that notes what is done with it."""
    calls: list = []
    module = ModuleType(name)

    def init(**settings):
        calls.append(("init", settings))
        return SimpleNamespace(
            log=lambda numbers, step: calls.append(("log", step, numbers)),
            finish=lambda: calls.append(("finish",)),
        )

    module.init = init
    monkeypatch.setitem(sys.modules, name, module)
    return calls


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_project_gets_the_numbers(name, tmp_path, monkeypatch):
    calls = package(name, monkeypatch)
    config = Config(output_dir=str(tmp_path), logging=LoggingConfig(**{name: "mine"}))
    log = MetricsLog(tmp_path / "metrics.jsonl", trackers=Trackers(config))
    log.write(RECORD)
    log.close()
    (_, settings), *rest = calls
    assert settings["project"] == "mine" and settings["config"]["seed"] == 0
    assert rest == [("log", 3, {"loss": 0.5}), ("finish",)]
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["grad_norm"] is None


def test_tensorboard_writes_event_files(tmp_path, monkeypatch):
    written: list = []
    module = ModuleType("torch.utils.tensorboard")

    class SummaryWriter:
        def __init__(self, folder):
            written.append(folder)

        def add_scalar(self, name, number, step):
            written.append((name, number, step))

        def close(self):
            written.append("closed")

    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "tensorboard", ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    trackers = Trackers(Config(output_dir="here", logging=LoggingConfig(tensorboard=True)))
    trackers.write(7, {"loss": 2})
    trackers.close()
    assert written == ["here/tensorboard", ("loss", 2.0, 7), "closed"]


def test_real_tensorboard(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trackers = Trackers(Config(output_dir=str(tmp_path), logging=LoggingConfig(tensorboard=True)))
    for step in (1, 2):
        trackers.write(step, {"loss": 1.5 / step})
    trackers.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.5), (2, 0.75)]


def test_a_failure_is_told_once_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    good, bad = package("trackio", monkeypatch), package("wandb", monkeypatch)

    def down(**settings):
        return SimpleNamespace(log=lambda *a, **k: 1 / 0, finish=lambda: bad.append("finish"))

    monkeypatch.setattr(sys.modules["wandb"], "init", down)
    config = Config(logging=LoggingConfig(wandb="a", trackio="b"))
    log = MetricsLog(tmp_path / "metrics.jsonl", trackers=Trackers(config))
    for step in (1, 2):
        log.write({"step": step, "loss": 1.0})
    log.close()
    assert capsys.readouterr().err.count("logging.wandb failed and is off: ZeroDivisionError") == 1
    assert [call[0] for call in good] == ["init", "log", "log", "finish"] and bad == []
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_dashboard_that_cannot_start_is_no_reason_to_stop(monkeypatch, capsys):
    package("wandb", monkeypatch)
    monkeypatch.setattr(sys.modules["wandb"], "init", lambda **settings: 1 / 0)
    Trackers(Config(logging=LoggingConfig(wandb="a"))).write(1, {"loss": 1.0})
    assert "logging.wandb failed and is off" in capsys.readouterr().err


def test_a_missing_package_is_known_before_the_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ValueError, match=r"logging.trackio needs a package that is missing.*\[log"):
        Trackers(Config(logging=LoggingConfig(trackio="a")))


def test_off_by_default():
    trackers = Trackers(Config())
    assert not trackers._open
    trackers.write(1, {"loss": 1.0})
    trackers.close()
