"""Fixtures that more than one file of tests needs."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub import Hub
from huggingface_hub import constants

pytest.register_assert_rewrite("gradient_reference", "reference", "support", "tiny")


def pytest_collection_finish() -> None:
    """`analyze` collects garbage before every pass, which takes 0.1 s with all libraries and tests to look at."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def hub_server() -> Iterator[Hub]:
    with Hub() as server:
        yield server


@pytest.fixture
def hub(hub_server: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    """An empty hub that huggingface_hub takes for the real one, with an empty cache and nobody logged in.

    huggingface_hub reads its environment once, at import, so its constants are what there is to change.
    """
    hub_server.repos.clear()
    hub_server.requests.clear()
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
