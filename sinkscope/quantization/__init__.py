"""Simulated post-training quantization: what W8A8 costs a model, and which sites' outliers make it so.

arithmetic.py     grids, and rounding to them
sites.py          where a model is quantized
calibration.py    static ranges, and what a grid does to what a site holds
simulation.py     `quantized`: a model as it would run
bench.py          one setting measured; `w8a8` for other commands
experiment.py     `quantize`: setting after setting (settings.py), and the search for the costly sites
verdict.py        what came of it
"""
