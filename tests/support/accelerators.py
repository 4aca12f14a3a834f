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
else:
    NAME = "cuda"
    LAUNCHES = {"cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"}
    WAITS = {"cudaStreamSynchronize", "cudaEventSynchronize"}

    @contextmanager
    def simulated(capability: tuple[int, int] = (0, 0)) -> Iterator[None]:
        """Simulate nothing; skip a test for another compute capability than this GPU's, or a lesser one."""
        if capability > torch.cuda.get_device_capability():
            pytest.skip(f"needs compute capability {capability}")
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

        if places > torch.cuda.device_count():
            pytest.skip(f"needs {places} GPUs")
        if places == 1:
            return model.to(NAME)
        blocks = model._no_split_modules
        half = sum(x.numel() * x.element_size() for x in model.parameters()) // 2
        return dispatch_model(model, infer_auto_device_map(model, {0: half, 1: 2 * half}, no_split_module_classes=blocks))
