"""Settings: what a recipe and a command line come to, and what a wrong one is answered."""

import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lean_trl import config as config_module
from lean_trl.config import (
    FOREIGN_NAMES,
    LEARNING_RATES,
    Config,
    LossConfig,
    TrainConfig,
    config_from_command_line,
    config_from_dict,
    config_to_yaml,
    load_config,
    save_config,
    units_per_step,
)
from lean_trl.recipe import SettingsError, parse_yaml, read_recipe, to_yaml
from lean_trl.settings import build, help_text, keys, setting

ROOT = Path(__file__).resolve().parents[1]


def problems(*arguments: str) -> list[str]:
    with pytest.raises(SettingsError) as raised:
        load_config(arguments)
    return str(raised.value).split("\n")


# ------------------------------------------------------------------------ what is accepted


def test_recipe_then_overrides(tmp_path):
    recipe = tmp_path / "a.yaml"
    recipe.write_text(
        "seed: 7\n"
        "train:\n  learning_rate: 1e-5\n  max_steps: 60\n"
        "data:\n  columns: {prompt: question}\n"
    )
    config = load_config(
        [str(recipe), "--train.max_steps", "5", "--train.max_grad_norm=null", "--eval_only"]
        + ["--data.columns.completion", "answer", "--data.shuffle", "false", "--seed=-0"]
    )
    assert config.train.learning_rate == 1e-5
    assert config.train.max_steps == 5
    assert config.train.max_grad_norm is None
    assert config.data.columns == {"prompt": "question", "completion": "answer"}
    assert (config.data.shuffle, config.eval_only, config.seed) == (False, True, 0)
    assert config.train.micro_batch_size == 4  # untouched


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12345", "12345"),  # a commit that looks like a number
        ("true", "true"),
        ("1e5", "1e5"),
        ("my #1 branch", "my #1 branch"),  # YAML would see a comment
        ("a: b", "a: b"),
        ("[x", "[x"),
        ("'null'", "null"),
        ("null", None),
        ("", None),
    ],
)
def test_text_from_the_command_line_needs_no_quotes(text, value):
    assert load_config(["--model.path=x", f"--model.revision={text}"]).model.revision == value


def test_the_last_override_wins():
    assert load_config(["--seed", "1", "--seed", "2"]).seed == 2


def test_an_empty_recipe_and_an_empty_section_are_the_defaults(tmp_path):
    empty, section = tmp_path / "empty.yaml", tmp_path / "section.yaml"
    empty.write_text("# nothing\n")
    section.write_text("train:\n")
    assert load_config([str(empty)]) == load_config([str(section)]) == Config()


def test_the_defaults_that_are_promised():
    config = Config()
    assert (config.method, config.seed, config.data.max_length) == ("sft", 0, 1024)
    assert (config.train.micro_batch_size, config.train.learning_rate) == (4, 2e-5)
    assert (config.train.adam_beta1, config.train.adam_beta2) == (0.9, 0.999)
    assert (config.train.adam_epsilon, config.train.max_grad_norm) == (1e-8, 1.0)
    assert config.memory.activation_checkpointing and config.train.deterministic
    assert config.data.padding_free and config.data.shuffle and config.checkpoint.export_hf
    assert config.loss == LossConfig(loss_type="nll", beta=0.1, disable_dropout=True)


def test_a_default_by_method_fills_a_missing_value_and_leaves_shared_sections_alone():
    train = TrainConfig(max_steps=3)
    assert Config(train=train).train.learning_rate == LEARNING_RATES["sft"] == 2e-5
    assert train.learning_rate is None
    assert Config(train=TrainConfig(learning_rate=0.0)).train.learning_rate == 0.0


# --------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("argument", "answer"),
    [
        ("--train.batchsize=3", "train.batchsize: unknown key; did you mean train.batch_size?"),
        ("--trian.max_steps=3", "trian: unknown key; did you mean train?"),
        ("--learning_rate=1", "learning_rate: unknown key; did you mean train.learning_rate?"),
        ("--model.max_length=1", "model.max_length: unknown key; did you mean data.max_length?"),
        ("--max_seq_length=1", "max_seq_length: unknown key; that setting is data.max_length here"),
        ("--train.lr=1", "train.lr: unknown key; that setting is train.learning_rate here"),
        (
            "--rollout.max_new_tokens=1",
            "rollout.max_new_tokens: unknown key; "
            "that setting is rollout.max_completion_length here",
        ),
        ("--train.micro_batch_size=0", "train.micro_batch_size: got '0', expected int >= 1"),
        ("--train.micro_batch_size=4.0", "train.micro_batch_size: got '4.0', expected int >= 1"),
        ("--train.micro_batch_size", "train.micro_batch_size: got 'true', expected int >= 1"),
        ("--train.learning_rate=nan", "train.learning_rate: got 'nan', expected number >= 0"),
        ("--train.learning_rate=.nan", "train.learning_rate: got '.nan', expected number >= 0"),
        ("--train.adam_beta2=1", "train.adam_beta2: got '1', expected number >= 0 and < 1"),
        ("--data.shuffle=no", "data.shuffle: got 'no', expected true or false"),
        (
            "--train.lr_scheduler=cosin",
            "train.lr_scheduler: got 'cosin', expected linear | cosine | constant | wsd; "
            "did you mean cosine?",
        ),
        ("--train=3", "train: got '3', expected a section, a map of keys"),
        ("--data.columns=x", "data.columns: got 'x', expected map of text to anything | null"),
    ],
)
def test_one_wrong_override_has_one_answer(argument, answer):
    assert problems(argument) == [answer]


def test_wrong_types_in_a_recipe_are_shown_as_they_are():
    with pytest.raises(SettingsError) as raised:
        config_from_dict(
            {
                "train": {"max_steps": "60", "learning_rate": True, "batch_size": [1]},
                "model": {"revision": 12345},
                "data": {"shuffle": 1, "columns": {"prompt": 3}},
                "seed": None,
                "nonsense": {"deep": 1},
            }
        )
    assert str(raised.value).split("\n") == [
        "train.max_steps: got '60' (text), expected int >= 1 | null",
        "train.learning_rate: got true, expected number >= 0",
        "train.batch_size: got [1] (list), expected int >= 1 | null",
        "model.revision: got 12345 (int), expected text | null; quote it",
        "data.shuffle: got 1 (int), expected true or false",
        "seed: got null, expected int >= 0",
        "nonsense: unknown key; known in a recipe: method, output_dir, seed, eval_only, model, "
        "data, loss, rollout, train, memory, peft, quantization, distributed, checkpoint, logging",
    ]


def test_every_foreign_name_leads_somewhere():
    ours = {key.path for key in keys(Config)}
    for name, target in FOREIGN_NAMES.items():
        assert name not in {path.rpartition(".")[2] for path in ours}, f"{name} is a key of ours"
        section = any(path.startswith(f"{target}.") for path in ours)
        assert target in ours or section or " " in target, (name, target)


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (
            ["--train.param_dtype=bfloat16", "--model.dtype=bfloat16"],
            "train.param_dtype: bfloat16 lo",
        ),
        (
            ["--loss.loss_type=nl"],
            "loss.loss_type: got 'nl', expected one of nll, dft for method sft",
        ),
        (
            ["--train.batch_size=10", "--train.gradient_accumulation_steps=2"],
            "train.batch_size 10 is no multiple of micro_batch_size x gradient_accumulation_steps",
        ),
        (
            ["--train.warmup_steps=11", "--train.max_steps=10"],
            "train.warmup_steps 11 is more than train.max_steps 10",
        ),
        (
            ["--data.max_length=null", "--data.truncation_mode=keep_end"],
            "data.truncation_mode: keep_end has no effect",
        ),
        (
            ["--data.overlong=drop", "--data.truncation_mode=keep_end"],
            "data.truncation_mode: keep_end has no effect while data.overlong is drop",
        ),
        (
            ["--data.packing_strategy=wrapped"],
            "data.packing_strategy has no effect while data.pack",
        ),
        (
            ["--data.packing", "--data.packing_strategy=bfd_split", "--data.overlong=drop"],
            "data.overlong drop has no effect while data.packing_strategy is bfd_split",
        ),
        (
            ["--data.packing", "--data.wrapped_attention"],
            "data.wrapped_attention needs data.packing",
        ),
        (["--data.revision=main"], "data.revision has no effect on the built-in rows"),
        (["--model.revision=main"], "model.revision has no effect on the built-in model"),
        (["--data.path=a", "--train.eval_every=5"], "train.eval_every needs held-out rows"),
        (["--data.path=a", "--eval_only"], "eval_only needs held-out rows"),
    ],
)
def test_contradictions_are_found_before_anything_loads(arguments, answer):
    (problem,) = problems(*arguments)
    assert problem.startswith(answer)


def test_the_run_of_ci_has_settings_that_fit_the_default_recipe():
    script = (ROOT / ".ci" / "run").read_text().replace("\\\n", " ")
    line = next(line for line in script.splitlines() if "scripts/train.py" in line)
    arguments = shlex.split(line.partition("scripts/train.py")[2])
    assert load_config([str(ROOT / "recipes" / "sft.yaml"), *arguments]).train.max_steps == 4


def test_every_problem_is_told_at_once():
    wrong = ("--train.warmup_steps=2", "--train.max_steps=1", "--loss.loss_type=x")
    assert len(problems(*wrong, "--model.revision=y")) == 3
    assert len(problems("--a=1", "--b=2", "--seed=x")) == 3


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["--seed", "1", "b.yaml"], "'b.yaml' is not --section.key value; the recipe comes first"),
        (["nowhere.yaml"], "recipe 'nowhere.yaml' is not a file"),
        (["--seed", "1", "-x"], "'-x' is not --section.key value"),
    ],
)
def test_arguments_out_of_place(arguments, answer):
    (problem,) = problems(*arguments)
    assert answer in problem


def test_an_override_below_something_that_is_no_section(tmp_path):
    recipe = tmp_path / "a.yaml"
    recipe.write_text("seed: 3\n")
    assert problems(str(recipe), "--seed.x=1") == ["--seed.x: seed is 3, not a section"]


# ------------------------------------------------------------------------------------- YAML


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),  # text in YAML 1.1
        ("-2E+3", -2000.0),
        ("5.", 5.0),
        (".5", 0.5),
        ("no", "no"),  # false in YAML 1.1
        ("on", "on"),
        ("017", 17),  # 15 in YAML 1.1
        ("0o17", "0o17"),
        ("0x1f", "0x1f"),
        ("1:30", "1:30"),  # 90 in YAML 1.1
        ("1_000", "1_000"),  # 1000 in YAML 1.1
        ("2026-01-01", "2026-01-01"),  # a date in YAML 1.1
        ("~", None),
        ("", None),
        ("<<", "<<"),
        ("=", "="),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text, value):
    parsed = parse_yaml(text)
    assert parsed == value and type(parsed) is type(value)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("seed: 1\nmodel:\n  path: a\n  path: b\n", r"line 4: key 'path' is given twice: keep one"),
        ("no: 1\ntrue: 2\n", r"line 2: a key must be text, got True: quote it"),
        ("? [a]\n: 1\n", r"line 1: a key must be text, got \['a'\]"),
        ("a: [1\n", r"is not valid YAML"),
        ("a: !!python/object/apply:os.system [ls]\n", r"is not valid YAML"),
        ("a: !!int x\n", r"is not valid YAML"),
        ("- 1\n", r"must be a map of sections, got \[1\]"),
        ("\x00", r"is not valid YAML"),
        ("[" * 5000, r"is not valid YAML"),
    ],
)
def test_a_bad_recipe_says_where(tmp_path, text, answer):
    recipe = tmp_path / "bad.yaml"
    recipe.write_text(text)
    with pytest.raises(SettingsError, match=answer) as raised:
        read_recipe(recipe)
    assert "bad.yaml" in str(raised.value)


def test_a_recipe_that_is_not_utf8(tmp_path):
    recipe = tmp_path / "latin.yaml"
    recipe.write_bytes(b"output_dir: caf\xe9\n")
    with pytest.raises(SettingsError, match="is not UTF-8"):
        read_recipe(recipe)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.sampled_from(
        ["1e-5", "no", "null", "~", "true", "017", ".inf", "1.", "<<", "=", " x", "'"]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(), values, max_size=3))
def test_what_is_written_reads_back_equal(tree):
    assert parse_yaml(to_yaml(tree)) == tree


def test_resolved_settings_load_again_to_the_same(tmp_path):
    config = load_config(
        ["--train.learning_rate=3e-7", "--model.path=x", "--model.revision='1e5'", "--eval_only"]
        + ["--data.columns={prompt: no, completion: '1'}", "--output_dir=a: #b"]
    )
    save_config(config, tmp_path / "config.yaml")
    assert load_config([str(tmp_path / "config.yaml")]) == config
    # Other programs read the file with plain PyYAML: numbers must be numbers for them too.
    assert yaml.safe_load(config_to_yaml(config))["train"] == asdict(config)["train"]


# ------------------------------------------------------------------------- sizes of a step


@pytest.mark.parametrize(
    ("train", "world", "units"),
    [
        (TrainConfig(), 1, 4),
        (TrainConfig(gradient_accumulation_steps=3), 2, 24),
        (TrainConfig(batch_size=7), 2, 7),
        (TrainConfig(batch_size=24, gradient_accumulation_steps=3), 2, 24),
        (TrainConfig(batch_size=16, max_tokens_per_micro_batch=100), 2, 16),
    ],
)
def test_units_of_a_step(train, world, units):
    assert units_per_step(train, world) == units


def test_batch_size_beside_an_unequal_accumulation_is_refused():
    train = TrainConfig(batch_size=24, gradient_accumulation_steps=3)
    with pytest.raises(
        SettingsError, match=r"batch_size 24 is not .* 4 x .* 3 x 1 ranks = 12: leave"
    ):
        units_per_step(train, 1)


# ------------------------------------------------------------------------------------- help


def test_help_lists_every_key_with_type_default_and_a_line():
    text = help_text(Config)
    for key in keys(Config):
        assert f"--{key.path}  <" in text
        assert key.help and "\n" not in key.help and len(key.help) <= 92, key.path  # 100 columns
    assert "--train.lr_scheduler  <linear | cosine | constant | wsd>  [linear]" in text
    assert "[2e-05 for sft, 1e-06 for dpo/kto/grpo/rloo, 0.0001 for reward, 5e-07 for onli" in text


def test_a_script_answers_help_and_mistakes_without_a_traceback(capsys):
    with pytest.raises(SystemExit) as stopped:
        config_from_command_line("usage: train.py", ["a.yaml", "--help"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith("usage: train.py\n")
    with pytest.raises(SystemExit) as stopped:
        config_from_command_line("usage: train.py", ["--sede=1"])
    assert stopped.value.code == 2
    assert "sede: unknown key; did you mean seed?" in capsys.readouterr().err


def test_settings_do_not_wait_for_torch():
    code = (
        "import sys, lean_trl.config as c\n"
        "c.load_config(['--seed=1'])\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# ------------------------------------------------- sections that may be absent (the machinery)


@dataclass(frozen=True)
class Adapter:
    r: int = setting(8, "rank")


@dataclass(frozen=True)
class Root:
    peft: Adapter | None = field(default=None)
    name: str = setting("x", "a name")


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({}, Root()),
        ({"peft": None}, Root()),
        ({"peft": {}}, Root(peft=Adapter())),
        ({"peft": {"r": 2}}, Root(peft=Adapter(2))),
    ],
)
def test_an_optional_section_is_on_when_it_is_present(tree, expected):
    assert build(Root, tree, {}) == expected


def test_the_documented_example_is_true():
    assert "60" in (config_module.__doc__ or "")
    assert load_config(["--train.max_steps", "60"]).train.max_steps == 60
