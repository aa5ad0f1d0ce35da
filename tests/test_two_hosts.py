"""Two hosts: network namespaces with a cable between them, a torchrun in each, HSDP 2 x 2."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lean_trl.config import save_config
from lean_trl.train import loop
from lean_trl.train.distributed import World
from tests.train.test_resume import settings

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(shutil.which("ip") is None, reason="needs iproute2"),
]
ROOT = Path(__file__).resolve().parents[1]
HOSTS = {"ltrl_a": ("ltrl_va", "10.77.0.1"), "ltrl_b": ("ltrl_vb", "10.77.0.2")}


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=10)


@pytest.fixture
def hosts() -> Iterator[dict[str, tuple[str, str]]]:
    """{namespace: (its network device, its address)}."""
    made = []
    try:
        for name in HOSTS:
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError:
                pytest.skip("network namespaces are not allowed here")
            made.append(name)
        (a, (device_a, _)), (b, (device_b, _)) = HOSTS.items()
        ip("link", "add", device_a, "type", "veth", "peer", "name", device_b)
        for name, (device, address) in HOSTS.items():
            ip("link", "set", device, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", device, "up")
        yield HOSTS
    finally:
        for name in made:
            ip("netns", "del", name)


def launch(hosts: dict, script: Path, *arguments: str) -> list[subprocess.Popen]:
    master = next(iter(hosts.values()))[1]
    processes = []
    for rank, (name, (device, _)) in enumerate(hosts.items()):
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run"]
        command += ["--nnodes=2", f"--node-rank={rank}", "--nproc-per-node=2"]
        command += [f"--master-addr={master}", "--master-port=29555", str(script), *arguments]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": device, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command,
            env=environment | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        processes.append(process)
    return processes


def finish(processes: list[subprocess.Popen]) -> list[str]:
    try:
        return [process.communicate(timeout=60)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


def losses(folder: Path) -> list[float]:
    text = (folder / "out" / "metrics.jsonl").read_text()
    return [json.loads(line)["loss"] for line in text.splitlines()]


def test_hsdp_over_two_hosts_has_the_losses_of_one_process(hosts, tmp_path):
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    loop.train_as(World(0, 1, torch.device("cpu"), None), settings(folders[0]))
    # One copy of the model on each host, cut over its two ranks.
    config = settings(folders[1], distributed={"sharding": "hsdp"}, train={"micro_batch_size": 1})
    save_config(config, folders[1] / "recipe.yaml")
    processes = launch(hosts, ROOT / "scripts" / "train.py", str(folders[1] / "recipe.yaml"))
    out = finish(processes)
    assert [process.returncode for process in processes] == [0, 0], "\n---\n".join(out)
    assert losses(folders[1]) == pytest.approx(losses(folders[0]), rel=1e-5)
    ours, theirs = (load_file(folder / "out" / "model" / "model.safetensors") for folder in folders)
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-4, atol=1e-6)


def test_a_rank_that_fails_ends_both_hosts(hosts, tmp_path):
    save_config(settings(tmp_path), tmp_path / "recipe.yaml")
    script = ROOT / "tests" / "train" / "rank.py"
    arguments = (str(tmp_path / "recipe.yaml"), "--fail", "3:2:raise", "--train.micro_batch_size=1")
    processes = launch(hosts, script, *arguments)
    first, second = finish(processes)
    assert all(process.returncode for process in processes)
    assert "rank 0 ends at step 2" in first and "rank 3 failed at step 2" in first
    assert "KeyError: 'broken row" in second
