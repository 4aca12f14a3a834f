"""One lock for state of the whole process, such as torch's random numbers: one thread at a time changes it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

one_thread = threading.RLock()


@contextmanager
def drawing(seed: int) -> Iterator[None]:
    """torch draws from the seed until the end of the block, and then from where it was before."""
    with one_thread, torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
