"""What --device-map may name: a device, or how accelerate spreads a model over all there are."""

import re

from sinkscope.errors import unknown

POLICIES = ("auto", "balanced", "balanced_low_0", "sequential")
DEVICES = ("cpu", "cuda", "cuda:1", "xpu:0", "mps")  # and other numbers


def check_device_map(name: str) -> str:
    """The name. Raises ValueError for one that means nothing; whether the device is there is another matter."""
    if name in POLICIES or re.fullmatch(r"cpu|mps|(cuda|xpu)(:\d{1,3})?", name):
        return name
    raise ValueError(unknown(name, (*DEVICES, *POLICIES)))
