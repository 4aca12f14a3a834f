"""Passes that several benchmarks time, and the peak of resident memory of one pass."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from sinkscope.text.batch import Batch

# environment of a process in which every large tensor has its own memory mapping, so that freed memory is returned at
# once and the high-water mark is exact
EXACT = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def random_batch(shape: tuple[int, int], vocabulary: tuple[int, int] = (100, 40_000)) -> Batch:
    """Return a batch, which is on the CPU whatever the model's device: observables read its masks there."""
    ids = torch.randint(*vocabulary, tuple(shape), generator=torch.Generator().manual_seed(0))
    return Batch(ids, torch.ones_like(ids))


def bare_forward(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """Run the fused forward without logits, as measuring does."""
    with torch.no_grad():
        model(input_ids=ids, use_cache=False, logits_to_keep=1)


@torch.enable_grad()
def bare_backward(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """Run the frozen model forward and backward, with gradients from the embeddings."""
    embeddings = model.get_input_embeddings()(ids).requires_grad_(True)
    logits = model(inputs_embeds=embeddings, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    torch.autograd.grad(loss, embeddings)


def numbers_of(file: str, *arguments: object) -> list[float]:
    """Run a benchmark in a separate process and return the numbers in its last line."""
    command = [sys.executable, file, *map(str, arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | EXACT)
    return [float(part) for part in done.stdout.splitlines()[-1].split()]


def peak_of(one_pass: Callable[[], object]) -> float:
    """Return the peak memory in MB above the memory before the pass, after a short pass has loaded the libraries."""
    gc.collect()  # otherwise the pass would collect garbage, and free more memory than it allocates
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")  # resets the high-water mark
    before = _status("VmRSS")
    one_pass()
    return (_status("VmHWM") - before) / 1024


def _status(field: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field))
