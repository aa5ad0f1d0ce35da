"""A frozen base in 4 or 8 bits (QLoRA, Dettmers et al. 2023): every linear layer of the blocks.

The codes are our own plain tensors (ops/quantized.py), with bitsandbytes' NF4 values and blocks.
torchao has no NF4 any more, and the scales of bitsandbytes' parameters lie outside of them, where
FSDP2 cuts, gathers and saves nothing; plain tensors run on CPU, CUDA and under FSDP2 alike.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lean_trl.config import Config
from lean_trl.model.decoder import CausalLM
from lean_trl.ops.quantized import Format, Quantized, dequantize, quantize, quantized_linear
from lean_trl.techniques.technique import Evidence, Switch, Technique, Trial


class QuantizedLinear(nn.Linear):
    """A frozen linear layer in few bits; a linear layer to peft. `weight` makes the matrix anew."""

    codes: Tensor
    scales: Tensor
    row_scales: Tensor

    def __init__(self, linear: nn.Linear, kind: str, double: bool, device: torch.device) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.form = Format(kind, linear.in_features, double)
        self.dtype = linear.weight.dtype
        stored = quantize(linear.weight.detach().to(device), self.form)
        for name, tensor in zip(Quantized._fields, stored, strict=True):
            if tensor.numel():
                setattr(self, name, nn.Parameter(tensor, requires_grad=False))
            else:
                self.register_buffer(name, tensor, persistent=False)
        self.bias = linear.bias

    @property
    def stored(self) -> Quantized:
        return Quantized(self.codes, self.scales, self.row_scales)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return dequantize(self.stored, self.form, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return quantized_linear(x, self.stored, self.form, self.bias)


class Quantization(Technique):
    """`quantization`: the linear layers of the blocks, one by one."""

    name = "quantization"
    settings = ("quantization",)

    def __init__(self, config: Config) -> None:
        self.options = config.quantization
        self.enabled = config.quantization is not None

    @classmethod
    def switches(cls) -> tuple[Switch, ...]:
        return tuple(
            Switch(
                name,
                {f"quantization.{key}": True, "peft.target_modules": "all-linear"},
                {},
                exact=False,
            )
            for name, key in (("nf4", "load_in_4bit"), ("int8", "load_in_8bit"))
        )

    def on_model(self, model: CausalLM) -> None:
        assert self.options is not None
        kind = "int8" if self.options.load_in_8bit else self.options.quant_type
        device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
        for block in model.blocks:
            for name, module in list(block.named_modules()):
                if type(module) is nn.Linear:
                    new = QuantizedLinear(module, kind, self.options.double_quant, device)
                    block.set_submodule(name, new)
        model.to(device)

    def evidence(self, trial: Trial) -> Evidence:
        layers = [m for m in trial.model.modules() if isinstance(m, QuantizedLinear)]
        weights = sum(layer.in_features * layer.out_features for layer in layers)
        stored = [p for layer in layers for p in layer.stored]
        size = sum(p.numel() for p in stored) / max(weights, 1)  # all of them are bytes
        kinds = ", ".join(sorted({layer.form.kind for layer in layers}))
        return Evidence(
            len(layers), f"{len(layers)} linear layers in {kinds}: {size:.3f} bytes a weight"
        )
