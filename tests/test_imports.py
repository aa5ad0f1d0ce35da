"""What imports what: floors, light imports, the list of packages, the public names."""

import ast
import configparser
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import lean_trl

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"lean_trl": ROOT / "lean_trl", "lean_kernels": ROOT / "kernels" / "lean_kernels"}

# The longest matching name counts. A module imports from lower floors, or from its own package.
FLOORS = {
    "lean_kernels": 0,
    "lean_trl.builtin": 0,
    "lean_trl.config": 0,
    "lean_trl.foreign_names": 0,
    "lean_trl.loss_config": 0,
    "lean_trl.losses": 0,
    "lean_trl.memory_config": 0,
    "lean_trl.peft_config": 0,
    "lean_trl.recipe": 0,
    "lean_trl.rollout_config": 0,
    "lean_trl.settings": 0,
    "lean_trl.types": 0,
    "lean_trl.train.adafactor": 1,
    "lean_trl.train.compact": 1,
    "lean_trl.train.compact_adamw": 1,
    "lean_trl.train.distributed": 1,
    "lean_trl.train.muon": 1,
    "lean_trl.train.gather": 1,
    "lean_trl.train.in_backward": 1,
    "lean_trl.train.log": 1,
    "lean_trl.train.metrics": 1,
    "lean_trl.train.progress": 1,
    "lean_trl.train.schedule": 1,
    "lean_trl.train.signals": 1,
    "lean_trl.train.trackers": 1,
    "lean_trl.train.watchdog": 1,
    "lean_trl.data": 2,
    "lean_trl.ops": 2,
    "lean_trl.model": 3,
    "lean_trl.techniques": 4,
    "lean_trl.train.checkpoint": 4,
    "lean_trl.train.checkpoint_files": 4,
    "lean_trl.train.snapshot": 4,
    "lean_trl.train.evaluate": 4,
    "lean_trl.train.exact_match": 4,
    "lean_trl.train.optim": 4,
    "lean_trl.train.precompute": 5,
    "lean_trl.train.router": 4,
    "lean_trl.train.score": 4,
    "lean_trl.train.showcase": 4,
    "lean_trl.train.step": 4,
    "lean_trl.rollout": 5,
    "lean_trl.train.methods": 5,
    "lean_trl.train.online": 5,
    "lean_trl.train.preference": 5,
    "lean_trl.train.reference": 6,
    "lean_trl.plan": 6,
    "lean_trl.train.loop": 7,
    "lean_trl.train.resume": 7,
    "lean_trl.train.setup": 7,
}
# Each of these would make `import lean_trl.losses` slow or fragile for outsiders.
HEAVY = {"transformers", "datasets", "accelerate", "peft", "vllm", "triton", "pyarrow", "pydantic"}


def modules() -> dict[str, Path]:
    """Name -> file of every module of both packages."""
    found = {}
    for package, folder in PACKAGES.items():
        for file in sorted(folder.rglob("*.py")):
            parts = (package, *file.relative_to(folder).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


MODULES = modules()


def imports(name: str) -> set[str]:
    """Modules that a module imports when it runs (a TYPE_CHECKING block does not run)."""
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    unread = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in unread:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative imports hide the floor"
            assert node.module
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {path if path in MODULES else node.module for path in whole}
    return found


def ours(name: str) -> set[str]:
    return {target for target in imports(name) if target.partition(".")[0] in PACKAGES}


def floor(name: str) -> int:
    known = [prefix for prefix in FLOORS if name == prefix or name.startswith(f"{prefix}.")]
    assert known, f"{name} has no floor: give it one in {Path(__file__).name}"
    return FLOORS[max(known, key=len)]


def package(name: str) -> str:
    return name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]


# A package's own module may only gather what lies in it: importing it must not load other floors.
LEAVES = [name for name in MODULES if name not in ("lean_trl", "lean_trl.train")]


@pytest.mark.parametrize("name", LEAVES)
def test_imports_go_down(name):
    for target in ours(name):
        assert target in MODULES, f"{name} imports {target}, which does not exist"
        beside = package(target) == package(name) and floor(target) == floor(name)
        assert beside or floor(target) < floor(name), (
            f"{name} (floor {floor(name)}) imports {target} (floor {floor(target)})"
        )


@pytest.mark.parametrize("name", ["lean_trl", "lean_trl.train"])
def test_packages_across_floors_import_nothing_of_ours(name):
    assert ours(name) == set()


def test_no_module_imports_itself_in_a_circle():
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        if name not in done:
            for target in ours(name) - {package(name)}:
                visit(target, (*path, name))
            done.add(name)

    for name in MODULES:
        visit(name, ())


@pytest.mark.parametrize(
    "name", [n for n in MODULES if n.startswith(("lean_trl.losses", "lean_k"))]
)
def test_losses_and_kernels_import_only_torch(name):
    allowed = {"torch", "triton"} if name.startswith("lean_kernels") else {"torch"}
    outside = {target.partition(".")[0] for target in imports(name)} - set(sys.stdlib_module_names)
    assert outside <= allowed | {name.partition(".")[0]}
    assert all(target.startswith(("lean_trl.losses", "lean_kernels")) for target in ours(name))


def loaded_by(code: str, path: str = f"{ROOT}:{ROOT / 'kernels'}") -> set[str]:
    """Names in sys.modules after running code in a fresh interpreter."""
    code = f"import sys; before = set(sys.modules)\n{code}\nprint(*(set(sys.modules) - before))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": path},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(done.stdout.split())


def tops(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def test_importing_the_package_loads_nothing_but_the_standard_library():
    assert tops(loaded_by("import lean_trl")) - set(sys.stdlib_module_names) == {"lean_trl"}


def test_importing_the_losses_loads_nothing_beside_torch():
    plain = tops(loaded_by("import torch"))
    losses = loaded_by("import lean_trl.losses")
    assert tops(losses) - plain - set(sys.stdlib_module_names) == {"lean_trl"}
    assert not HEAVY & tops(losses)
    assert all(
        name == "lean_trl" or name.startswith("lean_trl.losses")
        for name in losses
        if name.startswith("lean_trl")
    )


def test_the_kernels_stand_alone_and_do_not_hide_hugging_faces():
    loaded = loaded_by("import lean_kernels", path=str(ROOT / "kernels"))
    assert "lean_trl" not in tops(loaded)
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize("name", lean_trl.__all__)
def test_every_public_name_loads(name):
    assert getattr(lean_trl, name) is not None
    assert name in dir(lean_trl)


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        lean_trl.nonsense  # noqa: B018


def test_the_packages_in_setup_cfg_are_those_in_the_tree():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    listed = parser["options"]["packages"].split()
    assert len(listed) == len(set(listed))
    assert set(listed) == {name for name, file in MODULES.items() if file.name == "__init__.py"}
    namespace = {file.parent for file in MODULES.values()} - {
        file.parent for file in MODULES.values() if file.name == "__init__.py"
    }
    assert not namespace, f"folders without an __init__.py are left out of the wheel: {namespace}"


def test_every_data_file_in_the_packages_is_listed_in_setup_cfg():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    for name, folder in PACKAGES.items():
        kept: set[Path] = set()
        for listed, patterns in parser["options.package_data"].items():
            if listed == name or listed.startswith(f"{name}."):
                below = folder.joinpath(*listed.split(".")[1:])
                kept |= {file for pattern in patterns.split() for file in below.glob(pattern)}
        files = {f for f in folder.rglob("*") if f.is_file() and "__pycache__" not in f.parts}
        assert {f for f in files if f.suffix != ".py"} == kept


def test_help_answers_without_loading_torch():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", str(ROOT / "scripts" / "train.py"), "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "--train.learning_rate" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "lean_trl.config" in imported
    assert "torch" not in imported


def test_the_import_benchmark_runs():
    benchmark = importlib.util.spec_from_file_location("imports", ROOT / "benchmarks/imports.py")
    assert benchmark and benchmark.loader
    module = importlib.util.module_from_spec(benchmark)
    benchmark.loader.exec_module(module)
    assert 0 < module.seconds("import json", repeats=1) < 30
