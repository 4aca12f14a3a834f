"""Training on the processes of `accelerate launch`, and FSDP, which shards a model's layers among GPUs.

    accelerate launch --config_file $(python -m sinkscope.commands.train.sharding) --num_processes 8 \\
        -m sinkscope.cli retrofit MODEL

accelerate configures the processes that it starts by environment variables. It shards at the model's own
`_no_split_modules`, which a retrofitted model has from its parent class: a layer's new parameters are sharded and
gathered with the layer.
"""

import os
from pathlib import Path

from accelerate import PartialState

from sinkscope.errors import InputError
from sinkscope.measuring.processes import joined

CONFIGURATION = Path(__file__).parent / "fsdp.yaml"
# trainer.py relies on these: parameters keep their names, every process holds the whole model before it is sharded,
# and checkpoints are complete models
NEEDED = {
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}


def launched(cpu: bool = False) -> PartialState:
    """Join the processes of `accelerate launch`, if this is one of them; with `cpu`, train there in spite of a GPU."""
    state = joined(cpu)
    check_sharding()
    return state


def is_sharded() -> bool:
    """Return whether `accelerate launch` was configured to use FSDP."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def check_sharding() -> None:
    """Raise InputError for an FSDP configuration under which training would silently behave differently.

    On the CPU accelerate ignores FSDP, and every process would hold the whole model.
    """
    if not is_sharded():
        return
    for name, needed in NEEDED.items():
        value = os.environ.get(name, "")
        if value.lower() != needed.lower():
            raise InputError(
                f"accelerate's {name.lower()} is {value or 'not given'}, and only {needed} is known to work: "
                f"begin with {CONFIGURATION}"
            )
    if PartialState().device.type == "cpu":
        raise InputError("accelerate shards models on GPUs only: on the CPU, launch without an FSDP configuration")


if __name__ == "__main__":
    print(CONFIGURATION)
