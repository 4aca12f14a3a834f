"""Runs simulated_devices.py in processes of their own.

PyTorch starts a thread of autograd for a registered device, and a process with such a thread cannot be forked.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("simulated_devices.py")
NAMES = re.findall(r"^def (test_\w+)", FILE.read_text(encoding="utf-8"), re.MULTILINE)
PARTS = 3  # of about the same time, so that processes of pytest-xdist share them


@pytest.mark.parametrize("part", range(PARTS))
def test_on_simulated_devices(part: int) -> None:
    names = [f"{FILE}::{name}" for name in NAMES[part::PARTS]]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *names]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-5000:]
