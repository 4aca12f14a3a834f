"""The short form of `make torture`."""

from pathlib import Path

import pytest
from torture.kills import torture


@pytest.mark.usefixtures("no_figures")
def test_a_handful_of_kills(tmp_path: Path) -> None:
    found, wrong = torture(2, tmp_path, ("analyze", "retrofit"))
    assert not wrong
    assert sum(counts["kills"] for counts in found.values()) >= 2
