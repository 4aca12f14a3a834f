"""Runs simulated_devices.py in a process of its own.

PyTorch starts a thread of autograd for a registered device, and a process with such a thread cannot be forked.
"""

import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("simulated_devices.py")


@pytest.mark.slow
def test_on_simulated_devices() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(FILE)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
