"""compare_loss.py: equal runs are equal to the bit, others not, and the exit code says which."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lean_trl.config import save_config
from tests.train.golden import recorded_config

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "compare_loss.py"

# Stands for the training script of a commit: the loss depends on the code and on the settings.
TRAIN = """
import json, sys
words = sys.argv[1:]
value = lambda name: words[words.index(name) + 1]
from pathlib import Path
out = Path(value("--output_dir")); out.mkdir(parents=True)
rate = float(value("--train.learning_rate")) if "--train.learning_rate" in words else 1.0
lines = [{"step": n, "loss": FACTOR * rate / (n + 1), "grad_norm": 1.0, "eval": 0}
         for n in range(int(value("--train.max_steps")))]
lines.insert(0, {"step": 0, "eval_loss": 3.0})
(out / "metrics.jsonl").write_text("".join(json.dumps(x) + "\\n" for x in lines))
"""


def compare(*arguments: str, script: Path = SCRIPT) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def repository(tmp_path) -> Path:
    """Three commits: the second is a refactor, the third is not."""
    folder = tmp_path / "repository"
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(SCRIPT, folder / "scripts")

    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=n", "-c", "user.email=e")
        subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, timeout=30)

    git("init", "-q")
    for tag, factor in (("first", "2.0"), ("second", "(1.0 + 1.0)"), ("third", "2.0000001")):
        train = TRAIN.replace("FACTOR", factor)
        (folder / "scripts" / "train.py").write_text(train)
        git("add", "-A")
        git("commit", "-q", "-m", tag)
        git("tag", tag)
    return folder


def test_two_commits(repository):
    script = repository / "scripts" / "compare_loss.py"
    code, out = compare("first", "second", "--steps", "4", script=script)
    assert code == 0 and "all 4 steps agree bit for bit" in out, out
    code, out = compare("first", "third", "--steps", "4", script=script)
    assert code == 1 and "4 of 4 steps differ (bit for bit), the first is 0" in out
    code, out = compare("first", "third", "--tolerance", "1e-6", script=script)
    assert code == 0 and "all 20 steps agree within 1e-06" in out, out
    settings = ("--", "--train.learning_rate", "0.5")
    code, out = compare("first", "second", "--steps", "1", *settings, script=script)
    assert code == 0 and " 1 " in out, out  # 2 x 0.5 / 1


def test_what_is_neither_commit_nor_file(repository):
    code, out = compare("nonsense", "first", script=repository / "scripts" / "compare_loss.py")
    assert code == 2 and "nonsense is no recipe, run or commit" in out


def lines(folder: Path, losses: list[float | None]) -> Path:
    folder.mkdir()
    records = [{"step": n + 1, "loss": x, "grad_norm": 1.0} for n, x in enumerate(losses)]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(text)
    return folder


def test_finished_runs(tmp_path):
    a, b = lines(tmp_path / "a", [1.0, 0.5]), lines(tmp_path / "b", [1.0, 0.500001])
    assert compare(a, a / "metrics.jsonl")[0] == 0
    code, out = compare(a, b)
    assert code == 1 and "1 of 2 steps differ (bit for bit), the first is 2" in out
    assert compare(a, b, "--tolerance", "1e-5")[0] == 0
    code, out = compare(a, lines(tmp_path / "c", [1.0]))
    assert code == 1 and "A has 2 steps, B 1" in out
    code, out = compare(a, lines(tmp_path / "d", [1.0, None]))
    assert code == 1 and "null" in out


@pytest.mark.slow
def test_two_recipes_of_the_real_thing(tmp_path):
    recipes = []
    for name, size in (("a", 4), ("b", 2)):
        shape = {"micro_batch_size": size, "batch_size": 4, "gradient_accumulation_steps": None}
        recipes.append(tmp_path / f"{name}.yaml")
        save_config(recorded_config(tmp_path, "text", train=shape), recipes[-1])
    assert compare(*recipes[:1] * 2, "--steps", "2")[0] == 0
    code, out = compare(*recipes, "--steps", "2", "--tolerance", "1e-5")
    assert code == 0, out
