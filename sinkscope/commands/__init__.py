"""The commands: one folder for each, named like the command, with the code that only this command needs.

__init__.py   its record (options/register.py), through which the rest of the package finds it
options.py    its options, without torch
command.py    the command from end to end, and its function in Python
The other files hold the command's own measurements, findings, figures and output.

The folder `train` has two commands, which share nearly all their code, and `steps` has none: `analyze` uses it to
measure the steps of a training.
"""

# in the order of `sinkscope --help`; deleting a line and its folder removes the command
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
    "scan",
    "list",
    "steps",
)
