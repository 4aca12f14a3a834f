"""Simulated post-training quantisation: what W8A8 costs a model, and which sites' outliers make it so.

with quantised(model, calibrate_ranges(model, sequences), except_sites=["mlp.down_proj"]):
    model.generate(…)
"""

from sinkscope.quantisation.arithmetic import quantise_asymmetric, quantise_symmetric
from sinkscope.quantisation.bench import w8a8
from sinkscope.quantisation.calibration import Bits, Range, calibrate_ranges
from sinkscope.quantisation.experiment import quantize
from sinkscope.quantisation.simulation import quantised
from sinkscope.quantisation.sites import Site

__all__ = [
    "Bits",
    "Range",
    "Site",
    "calibrate_ranges",
    "quantise_asymmetric",
    "quantise_symmetric",
    "quantised",
    "quantize",
    "w8a8",
]
