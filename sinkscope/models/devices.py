"""Where a model computes: whether what --device-map names is there. See `options/measuring.py` for what it may name."""

from collections.abc import Callable

import torch

from sinkscope.errors import InputError
from sinkscope.options.measuring import POLICIES, check_device_map

COUNTS: dict[str, Callable[[], int]] = {
    "cuda": torch.cuda.device_count,
    "xpu": torch.xpu.device_count,
    "mps": torch.mps.device_count,
}


def check_devices(device_map: str) -> None:
    """Find, before anything is downloaded, that a model cannot compute where it is asked to.

    Raises:
        InputError: the name is unknown, or there is no such device, or it has no float64.
    """
    try:
        check_device_map(device_map)
    except ValueError as error:
        raise InputError(f"device map {error}") from None
    asked = f"device map '{device_map}' was asked for, but"
    kind, _, number = device_map.partition(":")
    if kind in COUNTS:
        there, index = COUNTS[kind](), int(number or 0)
        if not there:
            raise InputError(f"{asked} PyTorch sees no such device here: use cpu or auto")
        if index >= there:
            raise InputError(f"{asked} PyTorch sees {', '.join(f'{kind}:{at}' for at in range(there))} alone")
        if kind == "xpu" and not torch.xpu.get_device_properties(index).has_fp64:
            raise InputError(f"{asked} sums are in float64, which this device does not have: use cpu")
    if kind == "mps" or (kind in POLICIES and COUNTS["mps"]()):
        raise InputError(f"{asked} sums are in float64, which Apple's GPUs do not have: use cpu")


def stays_on_cpu(device_map: str | None) -> bool:
    """Whether a model comes to compute on the CPU alone."""
    spread = device_map in POLICIES and torch.xpu.is_available()
    return device_map == "cpu" or (device_map in (None, *POLICIES) and not (torch.cuda.is_available() or spread))
