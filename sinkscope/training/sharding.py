"""FSDP: a model that is too large to be trained on one GPU, its decoder layers cut up and shared out among several.

    accelerate launch --config_file $(python -m sinkscope.training.sharding) --num_processes 8 \\
        -m sinkscope.cli retrofit MODEL

accelerate tells the processes that it starts by environment variables. It cuts at the model's own `_no_split_modules`,
which a retrofitted model has from its parent class: a layer's new parameters are cut up and put together with it.
"""

import os
from pathlib import Path

from accelerate import PartialState

from sinkscope.errors import InputError

CONFIGURATION = Path(__file__).parent / "fsdp.yaml"
# what training.py rests on: parameters that keep their names, every process with the whole model before it is cut up,
# and checkpoints that are whole models
NEEDED = {
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}


def is_sharded() -> bool:
    """Whether `accelerate launch` has been told to."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def check_sharding() -> None:
    """Errors: InputError for a configuration that would train otherwise than it says."""
    if not is_sharded():
        return
    for name, needed in NEEDED.items():
        given = os.environ.get(name, "")
        if given.lower() != needed.lower():
            raise InputError(
                f"accelerate's {name.lower()} is {given or 'not given'}, and only {needed} is known to work: "
                f"begin with {CONFIGURATION}"
            )
    check_device()


def check_device() -> None:
    """Errors: InputError on the CPU, where accelerate takes no notice of FSDP: every process would have it all."""
    if PartialState().device.type == "cpu":
        raise InputError("accelerate shards models on GPUs only: on the CPU, launch without an FSDP configuration")


if __name__ == "__main__":
    print(CONFIGURATION)
