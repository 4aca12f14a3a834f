"""Turns a name into a model: loading, families, wiring."""
