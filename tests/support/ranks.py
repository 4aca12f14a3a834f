"""Two processes that train together, forked from this one, which has imported everything.

They have the environment that torchrun or `accelerate launch` sets.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed import TCPStore
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import Trainer

from sinkscope.cli.app import app
from sinkscope.commands.train import sharding
from sinkscope.commands.train.sharding import CONFIGURATION
from sinkscope.retrofits import new_parameters
from support.figures import skip_figures
from support.forked import forked

COUNT = 2


def shard_on_cpu() -> None:
    """Let accelerate, which ignores FSDP on the CPU, shard there by torch's FSDP2 in this process from now on."""
    begin = AcceleratorState.__init__

    def with_sharding(self: Any, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = FullyShardedDataParallelPlugin()

    AcceleratorState.__init__ = with_sharding  # type: ignore[method-assign]
    sharding.check_sharding = lambda: None


def sharding_environment() -> dict[str, str]:
    """Return the environment that `accelerate launch` makes from sinkscope's configuration of FSDP."""
    configured = yaml.safe_load(CONFIGURATION.read_text(encoding="utf-8"))["fsdp_config"]
    values = {name.upper(): str(value) for name, value in configured.items()}
    switches = {name: value.lower() for name, value in values.items() if value in ("True", "False")}
    return {"ACCELERATE_USE_FSDP": "true"} | values | switches


def on_two_ranks(work: Callable[[], Any], log: Path, **environment: str) -> list[int]:
    """Do `work` on two processes of the CPU with their output in `log`, and return their exit statuses.

    They communicate through gloo, and have `environment` in addition to a launcher's variables. As with a launcher, an
    error in one process ends the other.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=3))
    variables = environment | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # this process keeps the store, as torchrun does
        "WORLD_SIZE": str(COUNT),
        "LOCAL_WORLD_SIZE": str(COUNT),
    }

    def begin(rank: int) -> None:
        os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(rank))
        for number in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        try:
            work()
        finally:
            sys.stdout.flush()

    with ExitStack() as stack:
        ranks = [stack.enter_context(forked(lambda rank=rank: begin(rank))) for rank in range(COUNT)]  # type: ignore[misc]
        ended = [rank.poll() for rank in ranks]
        while None in ended and not any(ended):
            time.sleep(0.02)
            ended = [rank.poll() for rank in ranks]
    return [rank.wait() for rank in ranks]


def sharded_retrofit(notes: Path, arguments: Sequence[str], kills: bool = False) -> None:
    """Run `sinkscope retrofit` without figures on one of two processes of the CPU.

    Every step's wrapped modules and this process's parameters are written to `notes`; `kills` kills the second process
    in step 5.
    """
    rank, plain_step = os.environ["RANK"], Trainer.training_step

    def step(self: Any, model: Any, *args: Any, **options: Any) -> Any:
        if kills and rank == "1" and self.state.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        layers = {path: type(part).__name__ for path, part in model.named_modules() if isinstance(part, FSDPModule)}
        parts = {name: list(p.to_local().shape) for name, p in new_parameters(model).items() if isinstance(p, DTensor)}
        (notes / "wrapped.json").write_text(json.dumps([layers, parts]))
        with open(notes / f"steps-{rank}.txt", "a") as steps:
            print(self.state.global_step, file=steps)
        return plain_step(self, model, *args, **options)

    Trainer.training_step = step
    skip_figures(pytest.MonkeyPatch())
    shard_on_cpu()
    app(list(arguments), prog_name="sinkscope")
