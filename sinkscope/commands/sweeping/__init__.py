"""The parts of `sweep`: the worker that measures cells, and the engines that run workers."""
