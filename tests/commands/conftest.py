"""The models of the tests of commands, with tokenizers of eight words. Tests must not change them."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.retrofit_command import words_tokenizer
    from tiny import tiny_model

    folder = tmp_path_factory.mktemp("models")
    for name in ("llama", "gpt2"):
        tiny_model(name).save_pretrained(folder / name)
        words_tokenizer().save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="session")
def tiny(models: Path) -> Path:
    return Path(shutil.copytree(models / "llama", models.with_name("tiny")))
