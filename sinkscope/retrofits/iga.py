"""Input-state gated attention (VGA §3.1, Bondarenko et al. 2023): g = scale · σ(X W_g), X what the attention reads."""

from typing import ClassVar

from sinkscope.retrofits.gates import Gated


class IGA(Gated):
    name: ClassVar[str] = "iga"
    about: ClassVar[str] = "gates made from the attention's input (placement: value or output; scale: 2)"
    paper: ClassVar[str] = "VGA eq. 4, Bondarenko 2023"
    reads: ClassVar[str] = "input"
