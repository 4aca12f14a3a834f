"""Access to attention: taps, kernels, and any rectangle of the weights."""
