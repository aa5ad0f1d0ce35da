"""What each memory technique is worth on a recipe: memory, speed and the same losses.

    python benchmarks/memory.py recipes/smollm2_gsm8k.yaml [--section.key value ...]
    python benchmarks/memory.py RECIPE --slope 256,512,1024     bytes per token, and what fits

Two walks over the techniques that the library registers (lean_trl/techniques/apply.py) and that
this recipe and machine can use:

    ladder          none, then each switched on in turn on top of those before it
    leave-one-out   all, then all but one

Every arm is a run of the real loop in a fresh process (harness.py says how they are measured). In
--out: results.csv, report.md, memory.png (matplotlib) and report.html, one file that needs nothing
else; with --snapshots on a GPU a memory_viz pickle of each arm.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import ROOT, Arm, Plan, Runs, facts, interleave
from page import report_html
from picture import draw
from report import report_markdown, write_csv
from slope import measure_slope

from lean_trl.config import Config, config_from_command_line, config_from_dict, units_per_step
from lean_trl.recipe import SettingsError
from lean_trl.techniques.apply import TECHNIQUES
from lean_trl.techniques.technique import Switch

# What saves memory but is no change of the model: how a window is cut, where the reference lives.
OTHERS = (
    Switch(
        "one_row_micro_batches",
        on={"train.micro_batch_size": 1, "train.gradient_accumulation_steps": None},
        off={},
    ),
    Switch(
        "precompute_ref_log_probs",
        on={"loss.precompute_ref_log_probs": True},
        off={"loss.precompute_ref_log_probs": False},
    ),
)


def make_plan(config: Config, switches: Sequence[Switch], *, ranks: int, device_type: str) -> Plan:
    """The arms for a run's settings."""
    # One window of the same rows in every arm, however it is cut.
    size = units_per_step(config.train, ranks)
    config = override(config, {"train.batch_size": size, "data.shuffle": False})
    skipped = {s.name: cannot(config, s, ranks, device_type) for s in switches}
    usable = [switch for switch in switches if skipped[switch.name] is None]
    usable.sort(key=lambda switch: not switch.exact)  # those that change the losses come last
    names = [switch.name for switch in usable]
    settings: dict[str, Config] = {}
    failures: dict[str, str] = {}
    inexact: set[str] = set()

    def add(name: str, on: Sequence[str]) -> str:
        """The arm with these techniques: a new one of that name, or the one that is the same."""
        changes = [s.on if s.name in on else s.off for s in usable]
        try:
            arm = override(config, {key: v for change in changes for key, v in change.items()})
        except SettingsError as error:
            failures[name] = str(error)
            return name
        same = next((known for known, other in settings.items() if other == arm), name)
        settings.setdefault(same, arm)
        if not all(s.exact for s in usable if s.name in on):
            inexact.add(same)
        return same

    ladder = {"none": add("none", [])}
    for count, name in enumerate(names, start=1):
        ladder[f"+ {name}"] = add(f"+ {name}", names[:count])
    leave = {"all": ladder[f"+ {names[-1]}"]} if names else {}
    for name in names:
        label = f"all but {name}"
        leave[label] = add(label, [other for other in names if other != name])
    reasons = {name: reason for name, reason in skipped.items() if reason is not None}
    return Plan(ladder, leave, settings, failures, reasons, inexact)


def override(config: Config, changes: Mapping[str, Any]) -> Config:
    """The settings with some dotted keys changed. Raises SettingsError when they do not fit."""
    tree = asdict(config)
    for key, value in changes.items():
        *sections, name = key.split(".")
        place = tree
        for section in sections:
            place[section] = {} if place[section] is None else place[section]
            place = place[section]
        place[name] = value
    return config_from_dict(tree)


def cannot(config: Config, switch: Switch, ranks: int, device_type: str) -> str | None:
    """Why the technique has no arm for this recipe on this machine."""
    if ranks < switch.ranks:
        return f"needs {switch.ranks} ranks (--ranks {switch.ranks})"
    if switch.device_type not in (None, device_type):
        return f"needs {switch.device_type}"
    try:
        on, off = (override(config, changes) for changes in (switch.on, switch.off))
    except SettingsError as error:
        return str(error)
    return "changes nothing in this recipe" if on == off else None


def command_of(ranks: int) -> list[str]:
    """What runs an arm: this Python, or torchrun for several ranks."""
    script = str(ROOT / "benchmarks" / "arm.py")
    if ranks == 1:
        return [sys.executable, script]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", str(ranks), script]


def write_report(
    title: str, plan: Plan, runs: Mapping[str, Runs], about: Mapping[str, str], out: Path
) -> str:
    """Write all four files; returns the markdown. The picture needs matplotlib."""
    write_csv(plan, runs, out / "results.csv")
    text = report_markdown(title, plan, runs, about)
    (out / "report.md").write_text(text, encoding="utf-8")
    picture = draw(title, plan, runs, out / "memory.png")
    page = report_html(title, plan, runs, about, picture)
    (out / "report.html").write_text(page, encoding="utf-8")
    return f"{text}\nwritten to {out}"


def arguments() -> tuple[argparse.Namespace, list[str]]:
    """(our options, overrides of the recipe)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", help="a YAML recipe; --section.key value overrides it")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a run")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before them")
    parser.add_argument("--repeats", type=int, default=3, help="runs of every arm")
    parser.add_argument("--ranks", type=int, default=1, help="processes of a run")
    parser.add_argument("--out", type=Path, help="folder [benchmarks/out/NAME OF THE RECIPE]")
    parser.add_argument("--snapshots", action="store_true", help="GPU: a memory_viz pickle an arm")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds of a run")
    parser.add_argument("--deadline", type=float, default=math.inf, help="seconds of all runs")
    parser.add_argument("--slope", help="lengths: peak against length, bytes per token, what fits")
    parser.add_argument("--budget-gib", type=float, help="--slope: what has to fit [the device]")
    return parser.parse_known_args()


def main() -> None:
    options, overrides = arguments()
    import torch

    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    out = options.out or ROOT / "benchmarks" / "out" / Path(options.recipe).stem
    out.mkdir(parents=True, exist_ok=True)
    title = " ".join([Path(options.recipe).name, *overrides])
    about = facts() | {"command": shlex.join(["python", "benchmarks/memory.py", *sys.argv[1:]])}
    config = config_from_command_line(__doc__, [options.recipe, *overrides])
    if options.slope:
        lengths = [int(length) for length in options.slope.split(",")]
        measure_slope(config, lengths, options, about, out)
        return
    switches = [switch for technique in TECHNIQUES for switch in technique.switches()]
    plan = make_plan(config, [*switches, *OTHERS], ranks=options.ranks, device_type=device_type)
    for name, reason in plan.skipped.items():
        print(f"no arm for {name}: {reason}", file=sys.stderr)
    arms = [
        Arm(
            name,
            {
                "config": asdict(settings),
                "warm_up": options.warm_up,
                "steps": options.steps,
                "snapshot": str(out / f"{name}.pickle") if options.snapshots else None,
            },
            command_of(options.ranks),
        )
        for name, settings in plan.settings.items()
    ]
    runs = interleave(arms, options.repeats, timeout_s=options.timeout, deadline_s=options.deadline)
    runs |= {name: Runs(name, failure=reason) for name, reason in plan.failures.items()}
    print(write_report(title, plan, runs, about, out))


if __name__ == "__main__":
    main()
