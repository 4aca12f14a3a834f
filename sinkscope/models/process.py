"""A lock for state that is global to the process, such as torch's random numbers."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

one_thread = threading.RLock()


@contextmanager
def drawing(seed: int) -> Iterator[None]:
    """Let torch draw random numbers from the seed for the length of the block, and restore its state afterwards."""
    with one_thread, torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
