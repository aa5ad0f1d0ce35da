import json
import math

import torch

from lean_trl.train.metrics import Meter, MetricsLog
from lean_trl.types import Metric

CPU = torch.device("cpu")


def test_each_way_to_combine_over_micro_batches():
    meter = Meter(CPU)
    for values, weights in (([1.0, 5.0], [1.0, 1.0]), ([9.0], [0.0]), ([], [])):
        v, w = torch.tensor(values), torch.tensor(weights)
        meter.add({f"{how}": Metric(v, w, how) for how in ("mean", "sum", "min", "max")})
        meter.add({"last": Metric(v, how="last")})
    meter.add_host("host", 0.5, 3)
    meter.add_host("host", 0.0, 1)
    got = {name: value.item() for name, value in meter.reduce().items()}
    # The 9 has no weight, so it counts nowhere; an empty micro-batch changes nothing.
    assert got == {"mean": 3.0, "sum": 6.0, "min": 1.0, "max": 5.0, "last": 9.0, "host": 0.375}


def test_a_contrast_is_a_difference_of_two_means():
    meter = Meter(CPU)
    for values, weights in (([1.0, 5.0, 2.0], [1.0, 3.0, -1.0]), ([9.0, 4.0], [0.0, -1.0])):
        meter.add({"gap": Metric(torch.tensor(values), torch.tensor(weights), "contrast")})
    assert {name: value.item() for name, value in meter.reduce().items()} == {"gap": 4.0 - 3.0}
    meter.add({"gap": Metric(torch.tensor([8.0]), torch.tensor([12.0]), "contrast")})
    assert meter.reduce()["gap"].item() == (1 + 15 + 96) / 16 - 3
    one_kind = Meter(CPU)
    one_kind.add({"gap": Metric(torch.tensor([3.0]), torch.tensor([8.0]), "contrast")})
    assert math.isnan(one_kind.reduce()["gap"].item())


def test_no_weight_leaves_out_what_is_no_number():
    meter = Meter(CPU)
    values, weights = torch.tensor([2.0, math.nan, math.inf]), torch.tensor([1.0, 0.0, 0.0])
    for how in ("mean", "sum", "min", "max"):
        meter.add({how: Metric(values, weights, how)})
    assert {name: value.item() for name, value in meter.reduce().items()} == dict.fromkeys(
        ("mean", "sum", "min", "max"), 2.0
    )


def test_a_mean_over_nothing_is_nan_and_is_written_as_null(tmp_path):
    meter = Meter(CPU)
    empty = torch.zeros(0)
    meter.add(
        {"mean": Metric(empty), "max": Metric(empty, how="max"), "sum": Metric(empty, how="sum")}
    )
    got = {name: value.item() for name, value in meter.reduce().items()}
    assert math.isnan(got["mean"]) and math.isnan(got["max"]) and got["sum"] == 0
    log = MetricsLog(tmp_path / "run" / "metrics.jsonl")
    log.write({"step": 1, **got})
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text()) == {
        "step": 1,
        "mean": None,
        "max": None,
        "sum": 0,
    }
    log.close()


def test_lines_that_stay_in_an_earlier_log(tmp_path):
    file = tmp_path / "metrics.jsonl"
    whole = [
        '{"step": 0, "eval_loss": 3.0}',
        '{"step": 1, "loss": 2.0}',
        '{"step": 2, "loss": 1.0}',
    ]
    for steps, kept in ((0, 0), (1, 2), (2, 3), (math.inf, 3)):
        file.write_text("\n".join([*whole, "[]", "{}", '{"step": 2, "lo']))
        MetricsLog(file, steps).close()
        assert file.read_text().splitlines() == whole[:kept]


def test_a_mean_over_many_tokens_keeps_its_digits():
    meter = Meter(CPU)
    for _ in range(1000):
        meter.add({"x": Metric(torch.full((1000,), 0.1))})
    assert abs(meter.reduce()["x"].item() - 0.1) < 1e-8
