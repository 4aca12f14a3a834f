"""What `sweep` is made of: the plan, the worker that measures cells, the engines that run workers, and the display."""
