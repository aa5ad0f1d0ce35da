"""What each memory technique is worth on a recipe: memory, speed and the same losses.

    python benchmarks/memory.py recipes/smollm2_gsm8k.yaml [--section.key value ...]
    python benchmarks/memory.py RECIPE --slope 256,512,1024     bytes per token, and what fits

Three walks over the techniques that the library registers (lean_trl/techniques/apply.py) and that
this recipe and machine can use; --walks and --techniques choose among them:

    alone           none, then each technique by itself
    ladder          none, then each switched on in turn on top of those before it
    leave-one-out   the whole ladder, then the same without one of them

Every arm is a run of the real loop in a fresh process (harness.py says how they are measured). In
--out: results.csv, report.md, memory.png (matplotlib) and report.html, one file that needs nothing
else; with --snapshots on a GPU a memory_viz pickle of each arm.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from harness import ROOT, Arm, Runs, facts, interleave
from page import report_html
from picture import draw
from report import report_markdown, write_csv
from slope import measure_slope
from walks import WALKS, Plan, make_plan

from lean_trl.config import config_from_command_line
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
    parser.add_argument("--walks", default=",".join(WALKS), help="some of them, with commas")
    parser.add_argument("--techniques", help="some of them, with commas; the ladder's order")
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
    try:
        plan = make_plan(
            config,
            [*switches, *OTHERS],
            ranks=options.ranks,
            device_type=device_type,
            walks=options.walks.split(","),
            chosen=options.techniques.split(",") if options.techniques else None,
        )
    except ValueError as error:
        raise SystemExit(str(error)) from None
    for name, reason in plan.notes.items():
        print(f"{name}: {reason}", file=sys.stderr)
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
    print(write_report(title, plan, runs, about, out))


if __name__ == "__main__":
    main()
