"""Models in and out: HF's config.json and safetensors, one file or several.

Loading checks everything that can be wrong with the files before it takes memory for the weights:
the config, every header, every name and every shape. Then each weight is read into its place; there
is no second copy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lean_trl.data.hub import resolve_model
from lean_trl.model.config import ModelConfig, read_config
from lean_trl.model.decoder import CausalLM
from lean_trl.model.kinds import Json
from lean_trl.model.mxfp4 import Mxfp4, unpack_names
from lean_trl.model.names import Piece, pieces
from lean_trl.model.safetensors_io import (
    Stored,
    read_folder,
    read_json,
    write_file,
    write_json,
)
from lean_trl.train.distributed import local_part

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
Source = Stored | Mxfp4
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Written by old versions of transformers; made from config.json here.
IGNORED = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
INDEX = "model.safetensors.index.json"
WEIGHTS = r"model(-\d{5}-of-\d{5})?\.safetensors"  # the names that save_model writes
MAX_SHARD_BYTES = 5_000_000_000


def load_model(
    path: str | Path,
    *,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu",
    attention: str = "auto",
    kind: Callable[..., CausalLM] = CausalLM,
) -> CausalLM:
    """The model of a folder in HF layout (config.json, model.safetensors or its shards).

    path: a local folder, or a hub id, which is downloaded.
    dtype: of the weights in memory, whatever the files have. attention: a backend of ops.attention.
    device "meta": everything is checked, and no weight read; `fill_model` does that later. kind:
    what is built over the body, such as a RewardModel.

    Raises ValueError, before memory is taken, for an architecture that is not in the table, files
    that are broken or cut short, missing or extra tensors, shapes that do not fit config.json, a
    tied flag that the files contradict; and while reading for values that are not finite.
    """
    folder = resolve_model(path)
    config = read_config(read_json(folder / "config.json"))
    stored = _stored(folder, config)
    if config.num_layers > len(stored):
        raise ValueError(
            f"{folder}: config.json has {config.num_layers} layers for {len(stored)} tensors"
        )
    _check_size(config, stored, folder)
    model = kind(config, attention=attention, dtype=_dtype(dtype), device="meta")
    _plan(model, model.adapt_files(stored), folder)
    if torch.device(device).type != "meta":
        fill_model(model, folder, device)
    return model


def fill_model(model: CausalLM, path: str | Path, device: str | torch.device) -> None:
    """Give a model on meta its memory on `device` and its weights from a folder.

    Of sharded parameters each rank reads the rows that it keeps, and no others.
    """
    stored = model.adapt_files(_stored(Path(path), model.config))
    _take_memory(model, device)
    for name, weight in model.state_dict().items():
        rows, first = local_part(weight)
        for piece in pieces(model.config.family.names, name, tuple(weight.shape)):
            destination, row = piece.within(rows, first, weight.shape[0])
            if destination.numel():
                stored[piece.name].copy_into(destination, piece.name, row)


def new_model(
    raw: Json,
    seed: int = 0,
    *,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu",
    attention: str = "auto",
    kind: Callable[..., CausalLM] = CausalLM,
) -> CausalLM:
    """A model with random weights from a config.json dict, see randomise_model.

    device "meta": without its weights. kind: as for load_model.
    """
    config = read_config(raw)
    model = kind(config, attention=attention, dtype=_dtype(dtype), device="meta")
    if torch.device(device).type != "meta":
        randomise_model(model, seed, device)
    return model


def randomise_model(model: CausalLM, seed: int, device: str | torch.device) -> None:
    """Give a model on meta its memory on `device` and random weights: matrices normal with
    initializer_range, biases 0.

    The same seed gives the same weights in fp32 on every device and any number of ranks.
    """
    generator = torch.Generator().manual_seed(seed)
    _take_memory(model, device)
    for name, weight in model.state_dict().items():
        whole = torch.zeros(weight.shape, dtype=torch.float32)
        if name.endswith("norm.weight"):
            whole.fill_(1.0 - model.config.family.norm_offset)
        elif not name.endswith("bias"):
            whole.normal_(0.0, model.config.initializer_range, generator=generator)
        rows, first = local_part(weight)
        rows.copy_(whole[first : first + rows.shape[0]])


def save_model(
    model: CausalLM,
    folder: str | Path,
    *,
    weights: Mapping[str, Tensor] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write config.json and the weights in HF layout, as transformers and vLLM load it.

    weights: {parameter name: full tensor} where the model's own are sharded or adapted; None: the
    model's. Files appear under their names only when they are complete. config.json is the one that
    the model was loaded with, unknown keys included, with the dtype of what is written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = model.state_dict() if weights is None else weights
    names = model.config.family.names
    tensors = {
        piece.name: piece.of(tensor)
        for name, tensor in state.items()
        for piece in pieces(names, name, tuple(tensor.shape))
    }
    shards = _shards(tensors, max_shard_bytes)
    total = len(shards)
    files = {f"model-{n:05}-of-{total:05}.safetensors": s for n, s in enumerate(shards, 1)}
    if total == 1:
        files = {"model.safetensors": shards[0]}
    for file, shard in files.items():
        write_file(folder / file, {name: tensors[name] for name in shard})
    if total > 1:
        weight_map = {name: file for file, shard in files.items() for name in shard}
        index = {
            "metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
            "weight_map": dict(sorted(weight_map.items())),
        }
        write_json(folder / INDEX, index)
        files[INDEX] = []
    # Weights of an earlier save go when the new ones are complete, and must not be read with them.
    for old in (folder / INDEX, *folder.glob("model*.safetensors")):
        if old.name not in files and (old.name == INDEX or re.fullmatch(WEIGHTS, old.name)):
            old.unlink(missing_ok=True)
    write_json(folder / "config.json", _config_out(model.config, state[EMBEDDING].dtype))


def _take_memory(model: CausalLM, device: str | torch.device) -> None:
    """Uninitialised weights on `device` for a model on meta."""
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        model.to_empty(device=device)  # FSDP notices that its shards have moved
        return
    # Assigned, because FakeTensorMode cannot change a parameter in place.
    weights = {name: torch.empty_like(t, device=device) for name, t in model.state_dict().items()}
    model.load_state_dict(weights, assign=True)
    model.model.rotary_emb.to(device)


def _stored(folder: Path, config: ModelConfig) -> dict[str, Source]:
    quantization = config.raw.get("quantization_config")
    if quantization is None:
        return dict(read_folder(folder))
    method = quantization.get("quant_method")
    if method != "mxfp4":
        raise ValueError(
            f"{folder} is quantised ({method}); of quantised checkpoints only mxfp4 is read: use "
            "the one with 16 or 32 bits"
        )
    return unpack_names(read_folder(folder))


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _plan(model: CausalLM, stored: Mapping[str, Source], folder: Path) -> dict[str, list[Piece]]:
    """Which stored tensors fill which weight. ValueError unless names and shapes fit one to one."""
    config = model.config
    expected = model.state_dict()  # meta tensors: names, shapes, no memory
    plan = {
        name: list(pieces(config.family.names, name, tuple(tensor.shape)))
        for name, tensor in expected.items()
    }
    wanted = {piece.name for group in plan.values() for piece in group}
    missing = [name for name in wanted if name not in stored]
    ignored = [p.replace("{num_layers}", str(config.num_layers)) for p in config.family.ignored]
    ignored += IGNORED
    extra = [
        name
        for name in stored
        if name not in wanted and not any(re.fullmatch(p, name) for p in ignored)
    ]
    if config.tied and HEAD in extra:
        extra.remove(HEAD)
        _check_tied(stored, folder)
    if missing == [HEAD]:
        raise ValueError(
            f"{folder} has no {HEAD}, and config.json says tie_word_embeddings false: set it to "
            "true if the head is the embedding"
        )
    if missing:
        raise ValueError(f"{folder} lacks {_some(missing)} of this {config.family.architecture}")
    if extra:
        raise ValueError(
            f"{folder} has {_some(extra)}, which {config.family.architecture} does not have"
        )
    for name, group in plan.items():
        for piece in group:
            shape, given = tuple(piece.of(expected[name]).shape), stored[piece.name]
            if given.shape != shape:
                raise ValueError(
                    f"{given.file}: {piece.name} is {list(given.shape)}, but config.json makes it "
                    f"{list(shape)}"
                )
            if not given.dtype.is_floating_point or given.dtype.itemsize < 2:
                raise ValueError(
                    f"{given.file}: {piece.name} is {given.dtype}: quantised "
                    "checkpoints are not supported, use the one with 16 or 32 bits"
                )
    return plan


def _check_tied(stored: Mapping[str, Source], folder: Path) -> None:
    """config.json says tied, and the files have a head all the same: it must be the embedding."""
    if EMBEDDING not in stored or not _equal(stored[HEAD], stored[EMBEDDING]):
        raise ValueError(
            f"{folder}: config.json says tie_word_embeddings true, but {HEAD} differs from "
            f"{EMBEDDING}: set it to false to keep both, or remove {HEAD}"
        )


def _equal(a: Source, b: Source) -> bool:
    if not (isinstance(a, Stored) and isinstance(b, Stored)):
        return False
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return all(torch.equal(x, y) for (_, x), (_, y) in zip(a.chunks(), b.chunks(), strict=True))


def _check_size(config: ModelConfig, stored: Mapping[str, Source], folder: Path) -> None:
    """A config.json that asks for far more than the files hold must fail before anything is built
    from it.
    """
    embedding = next(iter(pieces(config.family.names, EMBEDDING, ()))).name
    shape = (config.vocab_size, config.hidden_size)
    if embedding in stored and stored[embedding].shape != shape:
        raise ValueError(
            f"{stored[embedding].file}: {embedding} is {list(stored[embedding].shape)}, but "
            f"config.json makes it {list(shape)} (vocab_size, hidden_size)"
        )


def _shards(tensors: Mapping[str, Tensor], max_bytes: int) -> list[list[str]]:
    """Names in groups of at most max_bytes (a larger tensor is a group of its own), in order."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    return shards


def _config_out(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    out = {key: value for key, value in config.raw.items() if key != "quantization_config"}
    name = str(dtype).removeprefix("torch.")
    for key in ("torch_dtype", "dtype"):
        if key in out:
            out[key] = name
    if "torch_dtype" not in out:
        out["dtype"] = name
    out.setdefault("architectures", [config.family.architecture])
    return out


def _some(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
