"""The commands: one folder for each, named as it is typed, with all that the command alone needs.

__init__.py   its record (options/register.py), from which the rest of the package knows it
options.py    its options, without torch
command.py    the command from end to end, and its function in Python
Further files are what it alone measures, finds, draws and writes.

Only `train` has two commands, which share all but a page of code, and `steps` has no command of its own: `analyze`
measures the steps of a training with it.
"""

# in the order of `sinkscope --help`; deleting a line and its folder takes the command out
FOLDERS = (
    "analyze",
    "claims",
    "intervene",
    "quantize",
    "kv_plan",
    "benchmark",
    "train",
    "run",
    "sweep",
    "compare",
    "card",
    "show",
    "doctor",
    "list",
    "steps",
)
