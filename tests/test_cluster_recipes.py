"""The cluster recipes are well formed and start what exists, with settings that exist."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from lean_trl.config import load_config

ROOT = Path(__file__).resolve().parents[1]
SLURM = ROOT / "recipes" / "cluster" / "slurm.sh"
KUBERNETES = ROOT / "recipes" / "cluster" / "kubernetes.yaml"


def torchrun_parts(words: list[str]) -> tuple[dict[str, str], Path, list[str]]:
    """(torchrun's options, the script, its arguments) of a command line."""
    place = next(index for index, word in enumerate(words) if word.endswith(".py"))
    options = " ".join(words[:place]).replace("=", " ").split()
    return (
        dict(zip(options[::2], options[1::2], strict=True)),
        ROOT / words[place],
        words[place + 1 :],
    )


def test_the_slurm_script_is_bash_with_directives_before_the_first_command():
    subprocess.run([shutil.which("bash") or "bash", "-n", str(SLURM)], check=True, timeout=10)
    lines = SLURM.read_text().splitlines()
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    directives = [i for i, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert len(directives) >= 7 and max(directives) < first_command
    options = dict(lines[i].split("#SBATCH --")[1].partition("=")[::2] for i in directives)
    assert options["ntasks-per-node"] == "1"  # torchrun starts the ranks of its node
    assert options["signal"].startswith("B:USR1@")  # to this script: torchrun would die of it


def test_the_slurm_script_starts_the_training_script_with_settings_that_exist():
    text = SLURM.read_text().replace("\\\n", " ")
    command = next(line for line in text.splitlines() if line.startswith("srun"))
    words = command.partition("torchrun")[2].removesuffix(" &").split()
    options, script, arguments = torchrun_parts(words)
    assert script.is_file()
    assert {"--nnodes", "--nproc-per-node", "--rdzv-endpoint", "--max-restarts"} <= options.keys()
    assert (
        load_config([word for word in arguments if word != '"$@"']).distributed.sharding == "hsdp"
    )


def test_the_slurm_script_asks_the_ranks_to_save_and_queues_itself_again(tmp_path):
    """With stand-ins for SLURM's programs: USR1 becomes SIGTERM for srun, then a requeue."""
    log = tmp_path / "log"
    programs = {
        "scontrol": f'echo "scontrol $@" >> {log}; echo node1',
        "srun": f"trap 'echo terminated >> {log}; exit 143' TERM; echo started >> {log}; "
        "for i in $(seq 200); do sleep 0.1; done",
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node1"}
    environment |= {"SLURM_NNODES": "1", "SLURM_JOB_ID": "7"}
    process = subprocess.Popen(["bash", str(SLURM), "recipe.yaml"], env=environment)
    deadline = time.monotonic() + 20
    while not (log.exists() and "started" in log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(20) == 0
    told = log.read_text().splitlines()
    assert told == ["scontrol show hostnames node1", "started", "terminated", "scontrol requeue 7"]


def test_the_kubernetes_manifest_fits_together():
    service, job = yaml.safe_load_all(KUBERNETES.read_text())
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert spec["completions"] == spec["parallelism"] and spec["completionMode"] == "Indexed"
    assert service["spec"]["selector"]["job-name"] == job["metadata"]["name"]
    assert (
        pod["subdomain"] == service["metadata"]["name"] and service["spec"]["clusterIP"] == "None"
    )
    mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}


def test_the_kubernetes_manifest_starts_one_torchrun_a_pod():
    _, job = yaml.safe_load_all(KUBERNETES.read_text())
    spec, container = job["spec"], job["spec"]["template"]["spec"]["containers"][0]
    program, *words = container["command"]
    options, script, arguments = torchrun_parts(words)
    assert program == "torchrun" and script.is_file()
    assert int(options["--nnodes"]) == spec["completions"]
    assert int(options["--nproc-per-node"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert options["--node-rank"] == "$(JOB_COMPLETION_INDEX)"
    assert options["--master-addr"] == f"{job['metadata']['name']}-0.lean-trl"
    recipe, *settings = arguments
    assert (ROOT / recipe).is_file()
    config = load_config(settings)
    assert config.distributed.sharding == "hsdp"
    assert any(
        config.output_dir.startswith(mount["mountPath"]) for mount in container["volumeMounts"]
    )


@pytest.mark.parametrize("file", [SLURM, KUBERNETES])
def test_no_line_runs_off_the_page(file):
    assert max(map(len, file.read_text().splitlines())) <= 120
    assert not re.search(r"\t| $", file.read_text(), re.MULTILINE)
