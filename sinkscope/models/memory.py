"""The memory that is free on a device for this process."""

from pathlib import Path
from typing import Any

import psutil
import torch

# of this container, by version of control groups, in /sys/fs/cgroup: its limit, what it uses, and the entry of its
# statistics for cached files, which the system frees when memory is needed
CGROUPS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free on a device for this process, with those that PyTorch keeps for later tensors."""
    backend: Any = torch.cpu if device.type in ("cpu", "meta") else torch.get_device_module(device)
    if not hasattr(backend, "mem_get_info"):  # also for mps, which shares the CPU's memory
        return available_memory()
    return backend.mem_get_info(device)[0] + backend.memory_reserved(device) - backend.memory_allocated(device)


def available_memory() -> int:
    """Return the free bytes of this machine, or of this container if it has fewer."""
    free = int(psutil.virtual_memory().available)
    for limit, used, cached in CGROUPS:
        try:
            most, now = (int(Path("/sys/fs/cgroup", name).read_text(encoding="utf-8")) for name in (limit, used))
            file = Path("/sys/fs/cgroup", used).with_name("memory.stat")
            statistics = dict(line.split() for line in file.read_text(encoding="utf-8").splitlines())
        except (OSError, ValueError):  # no container of this version, or one without a limit («max»)
            continue
        free = min(free, max(0, most - now + int(statistics.get(cached, 0))))
    return free
