"""Which arms a recipe gets, and the files that a benchmark writes; one real run, marked slow."""

import csv
import subprocess
import sys
from dataclasses import asdict

import pytest
from harness import ROOT, Runs, child_environment
from memory import OTHERS
from page import report_html
from peak import CATEGORIES
from report import losses, report_markdown, write_csv
from walks import Plan, make_plan, override

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


def test_the_walks_share_their_arms():
    plan = plan_of([A, B])
    assert plan.walks == {
        "alone": {"none": "none", "a": "a", "b": "b"},
        "ladder": {"none": "none", "+ a": "a", "+ b": "+ b"},
        "leave-one-out": {"all": "+ b", "all but a": "b", "all but b": "a"},
    }
    chosen = {
        name: (c.data.padding_free, c.memory.activation_checkpointing)
        for name, c in plan.settings.items()
    }
    assert chosen == {
        "none": (False, False),
        "a": (True, False),
        "b": (False, True),
        "+ b": (True, True),
    }


def test_walks_and_techniques_can_be_chosen():
    plan = plan_of([A, B], walks=["ladder"], chosen=["b", "a"])
    assert plan.walks == {"ladder": {"none": "none", "+ b": "+ b", "+ a": "+ a"}}
    with pytest.raises(ValueError, match="unknown technique 'c'; known: a, b"):
        plan_of([A, B], chosen=["c"])


def test_what_changes_the_losses_stands_alone_unless_it_is_asked_for():
    lora = Switch("lora", {"peft.r": 4}, {}, exact=False)
    plan = plan_of([lora, A])
    assert list(plan.walks["alone"]) == ["none", "lora", "a"]
    assert list(plan.walks["ladder"]) == ["none", "+ a"]
    assert plan.inexact == {"lora"}
    assert plan.settings["lora"].peft.r == 4 and plan.settings["none"].peft is None
    asked = plan_of([lora, A], chosen=["a", "lora"])
    assert list(asked.walks["ladder"]) == ["none", "+ a", "+ lora"]
    assert asked.inexact == {"lora", "+ lora"}
    assert losses(runs_of()[1]["+ b"], runs_of()[1]["none"], exact=False).endswith("something else")


def test_techniques_that_exclude_each_other_do_not_break_the_ladder():
    off = {"train.max_grad_norm": 1.0}
    one = Switch("one", {"train.max_grad_norm": 2.0}, off)
    two = Switch("two", {"train.max_grad_norm": 3.0}, off)
    # Without shards there is nothing to count replicas of.
    odd = Switch("odd", {"distributed.replicas": 2}, {"distributed.replicas": None})
    plan = plan_of([one, two, A], chosen=["one", "two", "a"])
    assert list(plan.walks["ladder"]) == ["none", "+ one", "+ a"]
    assert plan.notes["two"] == "not in the ladder: sets train.max_grad_norm, as one does"
    assert [plan.settings[n].train.max_grad_norm for n in ("none", "one", "two")] == [1.0, 2.0, 3.0]
    assert "hsdp" in plan_of([odd]).notes["odd"]


def test_a_technique_that_another_needs_is_not_left_out():
    shards = {"distributed.sharding": "hsdp"}
    base = Switch("base", shards, {"distributed.sharding": None})
    more = Switch("more", {"distributed.replicas": 2} | shards, {"distributed.replicas": None})
    plan = plan_of([A, more])
    assert "all but a" in plan.walks["leave-one-out"]
    plan = plan_of([base, Switch("replicas", {"distributed.replicas": 2}, {})])
    assert "hsdp" in plan.notes["replicas"]  # alone it contradicts itself: no arm


def test_every_arm_sees_the_same_window():
    tree = {"train": {"micro_batch_size": 4, "gradient_accumulation_steps": 2}}
    plan = plan_of(OTHERS, tree, ranks=2)
    assert "name it" in plan.notes["precompute_ref_log_probs"]  # it scores all rows at start
    named = plan_of(OTHERS, tree, chosen=["precompute_ref_log_probs"])
    assert "no effect on method sft" in named.notes["precompute_ref_log_probs"]
    one = plan.settings["one_row_micro_batches"].train
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
    assert plan.walks == {"alone": {"none": "none"}, "ladder": {"none": "none"}}
    assert plan.notes["far"] == "needs 2 ranks (--ranks 2)"
    assert plan.notes["gpu"] == "needs cuda"
    assert plan.notes["same"] == "changes nothing in this recipe"
    assert set(plan_of(switches, ranks=2, device_type="cuda").notes) == {"same"}


def test_every_technique_has_an_arm_somewhere():
    config = config_from_dict({})
    switches = [switch for technique in TECHNIQUES for switch in technique.switches()]
    names = [switch.name for switch in switches]
    assert len(set(names)) == len(names)
    assert {"padding_free", "activation_checkpointing", "fsdp"} <= set(names)
    machines = ((1, "cpu"), (2, "cuda"))
    plans = [make_plan(config, switches, ranks=n, device_type=kind) for n, kind in machines]
    for technique in TECHNIQUES:
        for switch in technique.switches():
            reasons = [plan.notes.get(switch.name) for plan in plans]
            assert any(switch.name in plan.settings for plan in plans), (switch.name, reasons)
            assert technique(override(config, {**switch.off, **switch.on})).enabled, switch.name


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
        {
            "ladder": {"none": "none", "+ a": "+ a", "+ b": "+ b"},
            "leave-one-out": {"all": "+ b", "all but a": "all but a", "all but b": "+ a"},
        },
        notes={"gpu": "needs cuda"},
    )
    return plan, runs


def test_markdown_has_both_walks_with_ratios_and_failures():
    plan, runs = runs_of()
    text = report_markdown("title", plan, runs, {"load": "0.1"})
    ladder, leave = text.split("## Leave-one-out")
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
    assert (none["walks"], b["walks"]) == ("ladder", "ladder leave-one-out")
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
    command += ["--steps", "2", "--warm-up", "1", "--out", str(tmp_path), "--walks", "ladder"]
    command += ["--techniques", "padding_free,activation_checkpointing,adamw_8bit"]
    command += ["--train.batch_size", "4", "--train.micro_batch_size", "4"]
    done = subprocess.run(
        command, cwd=ROOT, env=child_environment(), capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stderr
    arms = {row["arm"]: row for row in csv.DictReader(open(tmp_path / "results.csv"))}
    assert not any(row["failure"] for row in arms.values())
    differences = {name: float(row["loss_difference"]) for name, row in arms.items()}
    assert differences.pop("+ adamw_8bit") < 1e-2
    assert max(differences.values()) < 1e-5
    peaks = {name: float(row["peak_live"]) for name, row in arms.items()}
    assert peaks["+ padding_free"] < peaks["none"]
    assert peaks["+ activation_checkpointing"] < peaks["+ padding_free"]
    for row in arms.values():
        parts = sum(int(row[f"at_peak_{name}"]) for name in CATEGORIES)
        assert parts == float(row["peak_live"]) < float(row["peak_rss"])
        assert float(row["saved_for_backward"]) > 0 < float(row["share_of_ceiling"])
    assert {"report.md", "report.html", "memory.png"} <= {f.name for f in tmp_path.iterdir()}
