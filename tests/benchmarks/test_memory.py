"""Which arms a recipe gets, and the files that a benchmark writes; one real run, marked slow."""

import csv
import subprocess
import sys
from dataclasses import asdict

import pytest
from harness import ROOT, Plan, Runs, child_environment
from memory import OTHERS, make_plan, override
from page import report_html
from peak import CATEGORIES
from report import losses, report_markdown, write_csv

from lean_trl.config import config_from_dict
from lean_trl.recipe import SettingsError
from lean_trl.techniques.apply import TECHNIQUES
from lean_trl.techniques.technique import Switch
from tests.browser import open_page

A = Switch("a", {"data.padding_free": True}, {"data.padding_free": False})
B = Switch(
    "b",
    {"memory.activation_checkpointing": True},
    {"memory.activation_checkpointing": False},
)


def plan_of(switches, tree=None, **options):
    config = config_from_dict(tree or {"train": {"micro_batch_size": 2}})
    return make_plan(config, switches, **{"ranks": 1, "device_type": "cpu"} | options)


def test_ladder_and_leave_one_out_share_their_arms():
    plan = plan_of([A, B])
    assert plan.ladder == {"none": "none", "+ a": "+ a", "+ b": "+ b"}
    assert plan.leave_one_out == {"all": "+ b", "all but a": "all but a", "all but b": "+ a"}
    chosen = {
        name: (c.data.padding_free, c.memory.activation_checkpointing)
        for name, c in plan.settings.items()
    }
    assert chosen == {
        "none": (False, False),
        "+ a": (True, False),
        "+ b": (True, True),
        "all but a": (False, True),
    }


def test_what_changes_the_losses_comes_last_and_says_so():
    lora = Switch("lora", {"peft.r": 4}, {}, exact=False)
    plan = plan_of([lora, A])
    assert list(plan.ladder) == ["none", "+ a", "+ lora"]
    assert plan.inexact == {"+ lora", "all but a"}
    assert plan.settings["+ lora"].peft.r == 4 and plan.settings["none"].peft is None
    assert losses(runs_of()[1]["+ b"], runs_of()[1]["none"], exact=False).endswith("something else")


def test_every_arm_sees_the_same_window():
    tree = {"train": {"micro_batch_size": 4, "gradient_accumulation_steps": 2}}
    plan = plan_of(OTHERS, tree, ranks=2)
    assert plan.skipped.keys() == {"precompute_ref_log_probs"}  # SFT has no reference
    one = plan.settings["+ one_row_micro_batches"].train
    assert (one.micro_batch_size, one.batch_size) == (1, 16)
    assert {c.train.batch_size for c in plan.settings.values()} == {16}
    assert not any(c.data.shuffle for c in plan.settings.values())


def test_techniques_without_an_arm_say_why():
    switches = [
        Switch("far", {"distributed.sharding": "fsdp"}, {"distributed.sharding": "none"}, ranks=2),
        Switch("gpu", {"memory.cpu_offload": True}, {}, device_type="cuda"),
        Switch("same", {"data.padding_free": True}, {"data.padding_free": True}),
    ]
    plan = plan_of(switches)
    assert plan.ladder == {"none": "none"} and plan.leave_one_out == {}
    assert plan.skipped["far"] == "needs 2 ranks (--ranks 2)"
    assert plan.skipped["gpu"] == "needs cuda"
    assert plan.skipped["same"] == "changes nothing in this recipe"
    assert set(plan_of(switches, ranks=2, device_type="cuda").skipped) == {"same"}


def test_an_arm_whose_settings_contradict_each_other_is_a_failed_arm():
    rank = Switch("rank", {"distributed.sharding": "hsdp"}, {"distributed.sharding": None})
    more = Switch("more", {"distributed.replicas": 2}, {"distributed.replicas": None})
    tree = {"distributed": {"sharding": "hsdp"}}
    plan = plan_of([more, rank], tree)
    assert "all but rank" in plan.failures and "hsdp" in plan.failures["all but rank"]


def test_every_technique_has_switches_and_they_fit_its_settings():
    config = config_from_dict({})
    names = [switch.name for technique in TECHNIQUES for switch in technique.switches()]
    assert len(set(names)) == len(names)
    assert {"padding_free", "activation_checkpointing", "fsdp"} <= set(names)
    for technique in TECHNIQUES:
        for switch in technique.switches():
            assert technique(override(config, switch.on)).enabled, switch.name
            assert override(config, switch.on) != override(config, switch.off)


def test_overriding_does_not_touch_the_original():
    config = config_from_dict({})
    before = asdict(config)
    assert override(config, {"train.learning_rate": 1.0}).train.learning_rate == 1.0
    assert asdict(config) == before
    with pytest.raises(SettingsError):
        override(config, {"train.learning_rate": "fast"})


# -- what is written --


def runs_of() -> tuple[Plan, dict[str, Runs]]:
    def result(scale, loss=2.0):
        parts = {name: 2**20 * scale * (1 + i) for i, name in enumerate(CATEGORIES)}
        holder = {"nbytes": 2**20, "category": "head", "place": "<model>", "count": 3}
        return {
            "losses": [loss],
            "tokens_per_second": 100.0 * scale,
            "peak_rss": 2**30 * scale,
            "peak_live": sum(parts.values()),
            "breakdown": parts,
            "largest": [holder | {"shape": [2, 3], "dtype": "float32"}],
        }

    runs = {
        "none": Runs("none", [result(10), result(11), result(12)]),
        "+ a": Runs("+ a", [result(2)] * 3),
        "+ b": Runs("+ b", [result(1, loss=2.1)] * 3),
        "all but a": Runs("all but a", failure="exit 1: boom & <fizz>"),
    }
    plan = Plan(
        {"none": "none", "+ a": "+ a", "+ b": "+ b"},
        {"all": "+ b", "all but a": "all but a", "all but b": "+ a"},
        {},
        skipped={"gpu": "needs cuda"},
    )
    return plan, runs


def test_markdown_has_both_walks_with_ratios_and_failures():
    plan, runs = runs_of()
    text = report_markdown("title", plan, runs, {"load": "0.1"})
    ladder, leave = text.split("## Leave one out")
    assert "| none | 308.0 MiB | 11.00 GiB | 1100 +-9% | 0e+00 |" in ladder
    assert "| + a | 56.0 MiB (0.18x) | 2.00 GiB (0.18x) | 200 +-0% | 0e+00 |" in ladder
    assert "5e-02 NOT THE SAME WORK" in ladder
    assert "| all but a | exit 1: boom & <fizz> |" in leave
    assert "| all but b | 56.0 MiB (2.00x) |" in leave  # over `all`, the first of this walk
    assert "- gpu: needs cuda" in text and "- load: 0.1" in text


def test_csv_has_median_least_and_most(tmp_path):
    plan, runs = runs_of()
    write_csv(plan, runs, tmp_path / "r.csv")
    none, a, b, failed = csv.DictReader(open(tmp_path / "r.csv"))
    keys = [f"tokens_per_second{part}" for part in ("", "_least", "_most")]
    assert [none[key] for key in keys] == ["1100.0", "1000.0", "1200.0"]
    assert none["at_peak_temporaries"] == str(7 * 10 * 2**20)
    assert (a["ladder"], b["leave_one_out"]) == ("True", "True")
    assert failed["failure"].endswith("<fizz>") and failed["peak_rss"] == ""


def test_the_picture_has_a_bar_for_every_arm(tmp_path):
    pytest.importorskip("matplotlib")
    from picture import draw

    plan, runs = runs_of()
    path = draw("title", plan, runs, tmp_path / "memory.png")
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
    failed = {name: Runs(name, failure="no") for name in runs}
    assert draw("nothing ran", plan, failed, tmp_path / "empty.png").exists()


def test_the_page_sorts_in_a_browser_and_needs_nothing_else(tmp_path):
    plan, runs = runs_of()
    file = tmp_path / "report.html"
    file.write_text(report_html("a < b", plan, runs, {"load": "0.1"}, None), encoding="utf-8")
    assert "http" not in file.read_text()
    order = "return [...document.querySelectorAll('#arms tbody tr')].map(r => r.cells[0].innerText)"
    click = "document.querySelector(`#arms th[data-key='${arguments[0]}']`).click()"
    with open_page(file) as page:
        assert page.run("return document.title") == "a < b"
        assert page.run(order) == ["none", "+ a", "+ b", "all but a"]
        page.run(click, "tokens_per_second")  # numbers, not text: 100 < 200 < 1100
        assert page.run(order) == ["+ b", "+ a", "none", "all but a"]
        page.run(click, "tokens_per_second")  # and back; what failed stays last
        assert page.run(order) == ["none", "+ a", "+ b", "all but a"]
        page.run(click, "arm")
        assert page.run(order) == ["+ a", "+ b", "all but a", "none"]
        sorted_by = "return document.querySelector('th[aria-sort]').dataset.key"
        assert page.run(sorted_by) == "arm"
        text = page.run("return document.body.innerText")
        assert "boom & <fizz>" in text and "NOT THE SAME WORK" in text
        assert page.run("document.querySelector('details').open = true; return 1")
        assert "<model>" in page.run("return document.body.innerText")
        assert page.complaints() == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_ladder_of_the_built_in_model(tmp_path):
    command = [sys.executable, "benchmarks/memory.py", "recipes/sft.yaml", "--repeats", "1"]
    command += ["--steps", "2", "--warm-up", "1", "--out", str(tmp_path)]
    command += ["--train.batch_size", "4", "--train.micro_batch_size", "4"]
    done = subprocess.run(
        command, cwd=ROOT, env=child_environment(), capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stderr
    arms = {row["arm"]: row for row in csv.DictReader(open(tmp_path / "results.csv"))}
    assert not any(row["failure"] for row in arms.values())
    assert all(float(row["loss_difference"]) < 1e-5 for row in arms.values())
    peaks = {name: float(row["peak_live"]) for name, row in arms.items()}
    assert peaks["+ padding_free"] < peaks["none"]
    assert peaks["+ activation_checkpointing"] < peaks["+ padding_free"]
    for row in arms.values():
        parts = sum(int(row[f"at_peak_{name}"]) for name in CATEGORIES)
        assert parts == float(row["peak_live"]) < float(row["peak_rss"])
        assert float(row["saved_for_backward"]) > 0 < float(row["share_of_ceiling"])
    assert {"report.md", "report.html", "memory.png"} <= {f.name for f in tmp_path.iterdir()}
