"""FSDP without a GPU. accelerate takes no notice of it on the CPU; torch's own FSDP2 works there, through gloo."""

from typing import Any

from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from sinkscope.training import sharding


def shard_on_cpu() -> None:
    """From now on, in this process, accelerate does on the CPU what it does on GPUs."""
    begin = AcceleratorState.__init__

    def with_sharding(self: Any, *args: Any, **rest: Any) -> None:
        begin(self, *args, **rest)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = FullyShardedDataParallelPlugin()

    AcceleratorState.__init__ = with_sharding  # type: ignore[method-assign]
    sharding.check_device = lambda: None
