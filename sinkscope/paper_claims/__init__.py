"""Claims of papers as data, and their judgment from a model's runs. This package reads tables and runs no model.

A new claim is an entry of `CLAIMS` in the file of its paper or topic in `papers/`; `register.py` lists the files.
"""
