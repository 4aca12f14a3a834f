"""Simulated post-training quantization: grids of numbers, the sites of a model, and the quantized model."""
