"""The short form of `make torture`."""

from pathlib import Path

import pytest
from torture import kills


@pytest.mark.slow
@pytest.mark.usefixtures("no_figures")
def test_a_handful_of_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MEASURED", "TRAINED"):
        monkeypatch.setattr(kills, name, (*getattr(kills, name), "--observables", "attention"))
    by_command, wrong = kills.torture(2, tmp_path, ("analyze", "retrofit"))
    assert not wrong
    assert sum(counts["kills"] for counts in by_command.values()) >= 2
