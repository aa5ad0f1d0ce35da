"""The hand-made tokenizers, written once."""

from pathlib import Path

import pytest

from lean_trl.data.tokenizer import Tokenizer, load_tokenizer

from .fixtures import write_tokenizer


@pytest.fixture(scope="session")
def tok(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """No BOS, a template without marks."""
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tok")))


@pytest.fixture(scope="session")
def tok_bos(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Its post-processor prepends <bos>, and its template writes one."""
    from .fixtures import PLAIN_TEMPLATE

    folder = tmp_path_factory.mktemp("tok-b")
    return load_tokenizer(
        write_tokenizer(folder, adds_bos=True, template="{{ bos_token }}" + PLAIN_TEMPLATE)
    )


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Where rows are prepared."""
    return tmp_path / "cache"
