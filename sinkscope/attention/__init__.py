"""The way into attention: taps, kernels, and any rectangle of the weights."""
