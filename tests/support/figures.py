"""Runs without figures: drawing them all takes seconds, and tests/report does it."""

import pytest

import sinkscope.report.figures


def skip_figures(patch: pytest.MonkeyPatch) -> None:
    """No run has an applicable figure any more, wherever figures are saved from."""
    patch.setattr(sinkscope.report.figures, "applicable", lambda run: [])
