"""The accelerators of the tests: two simulated ones, or the GPUs of this machine with `SINKSCOPE_TEST_DEVICE=cuda`."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from transformers import PreTrainedModel

IS_REAL = os.environ.get("SINKSCOPE_TEST_DEVICE") == "cuda"

if not IS_REAL:
    from support.simulated import NAME, counting, moved, simulated

    PLACES = 2
else:
    NAME, PLACES = "cuda", min(2, torch.cuda.device_count())
    LAUNCHES = {"cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"}
    WAITS = {"cudaStreamSynchronize", "cudaEventSynchronize"}

    @contextmanager
    def simulated(capability: tuple[int, int] = (8, 0)) -> Iterator[None]:
        """Simulate nothing, and skip a test for GPUs before Ampere, or for Ampere on an older one."""
        if (capability >= (8, 0)) != (torch.cuda.get_device_capability() >= (8, 0)):
            pytest.skip(f"is for compute capability {capability}")
        yield

    @contextmanager
    def counting() -> Iterator[Counter[str]]:
        """Count launches, waits for the device and copies to it by PyTorch's profiler, until the end of the block."""
        counts: Counter[str] = Counter()
        torch.cuda.synchronize()
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        ) as profiler:
            yield counts
        for event in profiler.events():
            counts["launches"] += event.name in LAUNCHES
            counts["synchronizations"] += event.name in WAITS
            counts["copies"] += event.name.startswith("Memcpy HtoD")

    def moved(model: PreTrainedModel, places: int = 1) -> PreTrainedModel:
        """Move a model to one GPU, or spread it over two."""
        from accelerate import dispatch_model, infer_auto_device_map

        if places > PLACES:
            pytest.skip(f"needs {places} GPUs")
        if places == 1:
            return model.to(NAME)
        blocks = {"no_split_module_classes": model._no_split_modules}
        half = sum(x.numel() * x.element_size() for x in model.parameters()) // 2
        return dispatch_model(model, infer_auto_device_map(model, {0: half, 1: 2 * half}, **blocks))
