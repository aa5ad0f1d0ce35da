"""Adapters (LoRA and its relatives) through the `peft` package, on our modules with HF's names.

peft replaces modules inside the model. The base is frozen and stays in model.dtype, what is trained
is stored in train.param_dtype. peft is imported when a run asks for it, not before.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lean_trl.config import Config
from lean_trl.model.decoder import CausalLM, Head
from lean_trl.peft_config import PeftConfig
from lean_trl.techniques.technique import Evidence, Switch, Technique, Trial

ADAPTER = "default"  # peft's name for the one adapter that is trained
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Adapters(Technique):
    """`peft`: adapters are trained, the rest is frozen."""

    name = "adapters"
    settings = ("peft",)

    def __init__(self, config: Config) -> None:
        self.enabled = config.peft is not None
        self.config = config
        self.base_names: set[str] = set()  # of the weights that the model had before
        # Of an adapter that took a part of the base out of it: its first values, on the CPU.
        self.start: dict[str, Tensor] = {}

    @classmethod
    def switches(cls) -> tuple[Switch, ...]:
        return (Switch("lora", {"peft.target_modules": "all-linear"}, {}, exact=False),)

    def on_model(self, model: CausalLM) -> None:
        self.base_names = set(model.state_dict())
        inject(model, self.config)
        if takes_from_base(peft_settings(model)):
            trained = ((n, p) for n, p in model.named_parameters() if p.requires_grad)
            self.start = {name: p.detach().cpu().clone() for name, p in trained}

    def evidence(self, trial: Trial) -> Evidence:
        trained = [(n, p) for n, p in trial.model.named_parameters() if p.requires_grad]
        without = [name for name, p in trained if p.grad is None]
        if without:
            return Evidence(0, f"no gradient reaches {without[0]} and {len(without) - 1} others")
        size = sum(p.numel() for _, p in trained)
        whole = sum(p.numel() for p in trial.model.parameters())
        assert self.config.peft is not None
        if size == whole:
            return Evidence(0, "nothing is frozen")
        return Evidence(
            size, f"{self.config.peft.method}: {size:,} of {whole:,} weights trained, all have one"
        )


def inject(model: CausalLM, config: Config) -> None:
    """Put the adapter of the settings into the model; only what it brings requires gradients.

    Raises ValueError for a method or target that cannot be.
    """
    import peft

    assert config.peft is not None
    settings = make_settings(model, config)
    saved = config.peft.adapter_path
    # Not inject_adapter_in_model, which refuses the methods whose layers share weights (VeRA).
    tuner = peft.PEFT_TYPE_TO_TUNER_MAPPING[settings.peft_type]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(config.seed)  # the same weights on every rank
        tuner(model, settings, adapter_name=ADAPTER)
    if saved is not None:
        load(model, Path(saved))
    dtype = DTYPES[config.train.param_dtype]
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def peft_settings(model: CausalLM) -> Any:
    """The peft config object of the adapter in a model."""
    settings: Any = model.peft_config
    return settings[ADAPTER]


def takes_from_base(settings: Any) -> bool:
    """Whether the adapter starts as a part of the weight, which the base then lacks.

    >>> from types import SimpleNamespace
    >>> [takes_from_base(SimpleNamespace(peft_type="LORA", init_lora_weights=w)) for w in
    ...  (True, "gaussian", "pissa_niter_4", "olora")]
    [False, False, True, True]
    """
    if settings.peft_type != "LORA" or not isinstance(settings.init_lora_weights, str):
        return False
    return settings.init_lora_weights not in ("gaussian", "eva", "orthogonal")


def make_settings(model: CausalLM, config: Config) -> Any:
    """The peft config object of the run's settings."""
    import peft

    given = config.peft
    assert given is not None
    if given.adapter_path is not None:
        settings = peft.PeftConfig.from_pretrained(given.adapter_path)
        settings.inference_mode = False
        if hasattr(settings, "init_lora_weights"):
            settings.init_lora_weights = True  # what it started from is over: weights are loaded
        settings.ensure_weight_tying = False  # a tied head reads the embedding anyway
    else:
        kind = peft.PEFT_TYPE_TO_CONFIG_MAPPING.get(given.method.upper())
        if kind is None:
            known = sorted(str(name.value).lower() for name in peft.PEFT_TYPE_TO_CONFIG_MAPPING)
            raise ValueError(f"peft.method {given.method} is unknown: choose {', '.join(known)}")
        options = _options(given)
        if options.get("target_modules") == "all-linear":
            options["target_modules"] = linear_names(model)
        unknown = [name for name in options if name not in {item.name for item in fields(kind)}]
        if unknown:
            raise ValueError(f"peft.{unknown[0]} is no setting of peft's {kind.__name__}")
        settings = kind(**options)
    if settings.is_prompt_learning or settings.is_adaption_prompt:
        raise ValueError(
            f"peft.method {given.method} learns tokens in front of a prompt, which packed "
            "sequences have no place for: use a method that adapts layers, such as lora"
        )
    settings.task_type = "SEQ_CLS" if config.method == "reward" else "CAUSAL_LM"
    settings.base_model_name_or_path = config.model.path
    if config.method == "reward":  # its head is new
        settings.modules_to_save = sorted({*(settings.modules_to_save or ()), "score"})
    _adapt_head(settings, model)
    return settings


def _options(given: PeftConfig) -> dict[str, Any]:
    """Keyword arguments of the method's peft config: a file's, then options, then our keys."""
    options: dict[str, Any] = {}
    if given.config is not None:
        path = Path(given.config)
        path = path / "adapter_config.json" if path.is_dir() else path
        options |= json.loads(path.read_text(encoding="utf-8"))
        for key in ("peft_type", "base_model_name_or_path", "inference_mode", "task_type"):
            options.pop(key, None)
    options |= given.options or {}
    for item in fields(given):
        value = getattr(given, item.name)
        if item.name not in ("method", "config", "options", "adapter_path") and value is not None:
            options[item.name] = value
    return options


def _adapt_head(settings: Any, model: CausalLM) -> None:
    """Let LoRA on lm_head run inside the fused op; refuse what cannot."""
    targets = settings.target_modules
    if targets is None or isinstance(targets, str) or "lm_head" not in targets:
        return
    if model.lm_head is None:
        raise ValueError(
            "peft.target_modules names lm_head, which this model shares with embed_tokens: leave "
            "it out, or train a copy of both with modules_to_save [embed_tokens]"
        )
    if settings.peft_type != "LORA" or settings.use_dora:
        raise ValueError(
            f"an adapter on lm_head must be plain LoRA, not {settings.peft_type}"
            f"{' with DoRA' if settings.peft_type == 'LORA' else ''}: logits are never made"
        )
    from lean_trl.techniques.adapter_head import AdaptedHead

    settings._register_custom_module({Head: AdaptedHead})


def linear_names(model: CausalLM) -> list[str]:
    """Last names of all linear layers of the blocks."""
    found = {name for name, module in model.blocks.named_modules() if isinstance(module, nn.Linear)}
    return sorted({name.rpartition(".")[2] for name in found})


def base_name(name: str) -> str:
    """The name that a weight of the base had before peft came.

    >>> base_name("model.layers.0.self_attn.q_proj.base_layer.weight")
    'model.layers.0.self_attn.q_proj.weight'
    """
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")


def load(model: CausalLM, folder: Path) -> None:
    """Fill the injected adapter from a folder that peft wrote."""
    import peft
    from safetensors.torch import load_file

    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise ValueError(f"peft.adapter_path {folder} has no adapter_model.safetensors")
    tensors = {name.removeprefix("base_model.model."): t for name, t in load_file(file).items()}
    if model.config.tied:
        tensors.pop("lm_head.weight", None)
    settings = peft_settings(model)
    shared = {n: tensors.pop(n) for n in list(tensors) if n.startswith("base_model.vera_")}
    if shared:  # peft looks for them in its outer model, which there is none of here
        settings.save_projection = False
        for name, buffer in model.named_buffers():
            for factor, tensor in shared.items():
                if f"{factor.removeprefix('base_model')}." in name:
                    buffer.copy_(tensor)
    result = peft.set_peft_model_state_dict(model, tensors, adapter_name=ADAPTER)
    if shared:
        settings.save_projection = True
    wanted = {name for name, p in model.named_parameters() if p.requires_grad}
    missing = sorted(wanted & set(result.missing_keys))
    if result.unexpected_keys or missing:
        odd = (result.unexpected_keys or missing)[0]
        raise ValueError(f"peft.adapter_path {folder} does not fit the model: {odd}")
