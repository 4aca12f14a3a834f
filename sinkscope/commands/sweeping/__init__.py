"""The parts of `sweep`: the plan, the worker that measures cells, and the engines that run workers."""
