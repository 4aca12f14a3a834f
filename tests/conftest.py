"""Fixtures that more than one file of tests needs.

They import slow libraries when used, because the process that starts pytest-xdist's workers reads this file, too.
"""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

import sinkscope  # it imports its modules only when they are used

if TYPE_CHECKING:
    from hub import Hub

    from sinkscope.models.loading import LoadedModel

if os.environ.get("ATEN_CPU_CAPABILITY") in ("default", "avx2"):
    # oneDNN detects the CPU on its own, and PyTorch's attention fails if it packs for AVX-512 that PyTorch must not use
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

os.environ.pop("COLUMNS", None)  # tables are as wide as they need

pytest.register_assert_rewrite("gradient_reference", "reference", "support", "tiny")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests of real models first, so that one worker loads each model, and skip GPU tests without a GPU."""
    import torch

    items.sort(key=lambda item: item.get_closest_marker("real_model") is None)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """Leave libraries, tests and cached models out of the garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def few_collections() -> Iterator[None]:
    """Leave out the garbage collection before every pass over a text, which takes longer than passes of tiny models."""
    import accelerate.utils.memory

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(accelerate.utils.memory, "gc", SimpleNamespace(collect=lambda: 0))
        yield


@pytest.fixture(scope="session")
def hub_server() -> Iterator[Hub]:
    from hub import Hub

    with Hub() as server:
        yield server


@pytest.fixture
def hub(hub_server: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    """An empty hub in place of the real one, with an empty cache and no user logged in.

    huggingface_hub reads its environment once, at import, so its constants have to be changed.
    """
    from huggingface_hub import constants

    hub_server.repos.clear()
    hub_server.requests.clear()
    hub_server.faults.clear()
    template = hub_server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", hub_server.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return hub_server


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models with tokenizers of eight words. Tests must not change them."""
    from support.retrofit_command import words_tokenizer
    from tiny import tiny_model

    folder = tmp_path_factory.mktemp("models")
    for name in ("llama", "gpt2"):
        tiny_model(name).save_pretrained(folder / name)
        words_tokenizer().save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="session")
def tiny(models: Path) -> Path:
    """One of them, by the name `tiny`. Tests must not change it."""
    return Path(shutil.copytree(models / "llama", models.with_name("tiny")))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory in `tmp_path`."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip drawing, which takes seconds; tests/figures and complete runs of tests/cli and tests/commands draw."""
    from support.figures import skip_figures  # after the registration above

    skip_figures(monkeypatch)


@pytest.fixture(scope="session")
def smollm() -> LoadedModel:
    """SmolLM2-135M-Instruct, as `load` finds it without a name. Tests must not change it."""
    try:
        return sinkscope.load()
    except sinkscope.SinkscopeError as error:
        pytest.fail(f"SmolLM2 is missing: run `make install` ({error})")


@pytest.fixture(scope="session")
def smollm_on_cpu(smollm: LoadedModel) -> LoadedModel:
    """SmolLM2 in float32 on the CPU. Tests must not change it."""
    import torch

    on_cpu = smollm.model.device.type == "cpu" and smollm.model.dtype == torch.float32
    return smollm if on_cpu else sinkscope.load(dtype="float32", device_map="cpu")


@pytest.fixture(scope="session")
def mgm() -> LoadedModel:
    """The model MGM. Tests must not change it."""
    path = Path(__file__).parents[1] / ".models" / "mgm"
    if not path.exists():
        pytest.fail(".models/mgm is missing: run `make models`")
    return sinkscope.load(str(path), allow_pickle=True)
