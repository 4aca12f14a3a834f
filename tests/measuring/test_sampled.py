"""Texts that the model generates."""
