"""Claims of papers as data, and their judgment from a model's runs. This package reads tables and runs no model.

A new claim is an entry of `CLAIMS` in its paper's file in `papers/`; the files are listed in `register.py`.
"""
