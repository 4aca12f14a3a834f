"""Simulated post-training quantization: what W8A8 costs a model, and which sites' outliers make it so."""
