"""Arms in fresh processes: order, medians, failures; and what the figures are called."""

import json
import subprocess
import sys

import pytest
from harness import ROOT, Arm, Runs, child_environment, facts, interleave, loss_difference, markdown

# Writes down that it ran, and answers with the job's figures.
RECORDER = """
import json, os, sys
job = json.load(open(sys.argv[1]))
with open(job["log"], "a") as log: log.write(job["name"] + " " + str(os.getpid()) + "\\n")
if job.get("fail"): print("before"); raise SystemExit("out of memory: " + job["name"])
json.dump({"tokens_per_second": job["rate"], "losses": [2.0, 1.0]}, open(sys.argv[2], "w"))
"""


def recorder(tmp_path, name, **job):
    job = {"log": str(tmp_path / "log"), "name": name, **job}
    return Arm(name, job, (sys.executable, "-c", RECORDER))


def test_arms_take_turns_in_processes_of_their_own(tmp_path):
    said = []
    arms = [recorder(tmp_path, "a", rate=3.0), recorder(tmp_path, "b", rate=5.0)]
    runs = interleave(arms, 3, say=said.append)
    names, pids = zip(*(line.split() for line in open(tmp_path / "log")), strict=True)
    assert names == ("a", "b", "a", "b", "a", "b")
    assert len(set(pids)) == 6
    assert runs["a"].values("tokens_per_second") == [3.0] * 3
    assert runs["b"].median("tokens_per_second") == 5.0
    assert len(said) == 6 and "3.0 tokens/s" in said[0] and "load" in said[0]


def test_an_arm_that_fails_says_its_last_line_and_does_not_stop_the_others(tmp_path):
    arms = [recorder(tmp_path, "a", fail=True), recorder(tmp_path, "b", rate=5.0)]
    runs = interleave(arms, 2, say=lambda text: None)
    assert runs["a"].failure == "exit 1: out of memory: a" and not runs["a"].results
    assert len(runs["b"].results) == 2 and runs["b"].failure is None
    assert [line.split()[0] for line in open(tmp_path / "log")] == ["a", "b", "b"]


def test_an_arm_that_hangs_is_stopped():
    arm = Arm("slow", {}, (sys.executable, "-c", "import time; time.sleep(60)"))
    runs = interleave([arm], 1, timeout_s=1, say=lambda text: None)
    assert runs["slow"].failure == "no result after 1 s"


def test_nothing_starts_after_the_deadline(tmp_path):
    hang = Arm("slow", {}, (sys.executable, "-c", "import time; time.sleep(60)"))
    arms = [recorder(tmp_path, "a", rate=3.0), hang, recorder(tmp_path, "b", rate=5.0)]
    runs = interleave(arms, 2, deadline_s=3, say=lambda text: None)
    assert runs["a"].failure is None and len(runs["a"].results) == 1
    assert "no result after" in runs["slow"].failure
    assert runs["b"].failure == "not run: no time was left"


def test_median_and_spread():
    runs = Runs("x", [{"v": 3}, {"v": 1}, {"v": 10}, {"other": 0}])
    assert (runs.median("v"), runs.spread("v")) == (3, (1, 10))
    assert runs.median("unknown") is None and runs.spread("unknown") is None


def test_losses_are_compared_step_by_step_relative_to_the_base():
    base = Runs("base", [{"losses": [2.0, 4.0]}])
    assert loss_difference(Runs("x", [{"losses": [2.0, 4.4]}]), base) == pytest.approx(0.1)
    assert loss_difference(base, base) == 0
    assert loss_difference(Runs("failed"), base) is None
    with pytest.raises(ValueError):  # another number of steps is another benchmark
        loss_difference(Runs("x", [{"losses": [2.0]}]), base)


def test_children_find_the_checkout_and_wait_passively():
    environment = child_environment({"A": "b"})
    assert environment["OMP_WAIT_POLICY"] == "passive" and environment["A"] == "b"
    code = "import lean_trl, lean_kernels; print(lean_trl.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd="/", capture_output=True, text=True
    )
    assert done.stdout.strip() == str(ROOT / "lean_trl" / "__init__.py"), done.stderr


def test_facts_name_machine_versions_and_commit():
    about = facts()
    assert "GiB" in about["hardware"] and "torch" in about["versions"]
    assert len(about["commit"].rstrip("+")) == 10 or about["commit"] == "unknown"
    json.dumps(about)


def test_markdown():
    assert markdown(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |\n"
