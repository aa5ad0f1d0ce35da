"""Where models and data come from: a local path, otherwise a snapshot from the hub."""

from __future__ import annotations

from pathlib import Path

from lean_trl import builtin
from lean_trl.data.rows import COMPRESSED, FORMATS

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "generation_config.json",
    "config.json",
)


def resolve_model(
    path: str | Path | None, revision: str | None = None, *, weights: bool = True
) -> Path:
    """The local folder of a model: `path` itself, or the downloaded snapshot of hub id `path`.

    None is the built-in tiny model.

    weights=False fetches the tokenizer and the configs alone. Credentials are the hub client's own.
    Raises ValueError when `path` is neither a folder nor a hub id that can be had.
    """
    if path is None:
        return builtin.model_folder()
    local = Path(path)
    if local.is_dir():
        return local
    if local.exists():
        raise ValueError(
            f"a model is a folder, but {path} is a file: give the folder that holds config.json"
        )
    patterns = [
        *TOKENIZER_FILES,
        *(["*.safetensors", "*.safetensors.index.json"] if weights else []),
    ]
    return _snapshot(str(path), revision, "model", patterns)


def resolve_dataset(
    path: str | Path | None, revision: str | None = None, *, kind: str = "sft"
) -> Path:
    """The file or folder of rows: `path` itself, or the downloaded snapshot of dataset `path`.

    None is the built-in arithmetic, in rows of `kind`. Raises ValueError when it can be had from
    nowhere.
    """
    if path is None:
        return builtin.dataset_folder(kind)
    local = Path(path)
    if local.exists():
        return local
    # Not what else lies there (pictures, checkpoints, the same rows as scripts).
    patterns = [f"*{form}{packed}" for form in FORMATS for packed in ("", *COMPRESSED, ".zst")]
    return _snapshot(str(path), revision, "dataset", patterns)


def cache_folder(path: str | Path | None = None) -> Path:
    """Where prepared rows are kept: `path`, else lean_trl beside the hub's own cache, which the hub
    client's HF_HOME moves.
    """
    if path is not None:
        return Path(path).expanduser()
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME) / "lean_trl"


def _snapshot(repo_id: str, revision: str | None, kind: str, patterns: list[str]) -> Path:
    # Imported here: the client costs 0.3 s and most runs read local files.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(repo_id, repo_type=kind, revision=revision, allow_patterns=patterns)
        )
    except HFValidationError as error:
        raise ValueError(
            f"{repo_id}: no such file or folder, and no valid hub id ({error})"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ValueError(
            f"{repo_id}: no such file or folder here, the hub cannot be reached, and its cache "
            f"does not hold the "
            f"{kind}: check the path, or download it where there is a network"
        ) from error
    except HfHubHTTPError as error:
        raise ValueError(
            f"{repo_id}: no such file or folder here, and the hub refuses the {kind}: {error}"
        ) from error
