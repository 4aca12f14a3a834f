"""Value-state gated attention (VGA §3.2): g = scale · σ(V W_g), V all key/value heads' values side by side."""

from typing import ClassVar

from sinkscope.retrofits.gates import Gated


class VGA(Gated):
    name: ClassVar[str] = "vga"
    about: ClassVar[str] = "gates made from the values (placement: value or output; scale: 2, so that gates start at 1)"
    paper: ClassVar[str] = "VGA §3.2, app. B"
    reads: ClassVar[str] = "value"
