"""What belongs to the whole process, such as torch's random numbers, is changed by one thread at a time."""

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
