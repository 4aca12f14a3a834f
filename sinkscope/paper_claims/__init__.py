"""Claims: what papers say happens, as data, and the judgment of a model's runs by them. Reads tables, runs no model.

A new claim is an entry in its paper's file, which `register.py` lists.
"""
