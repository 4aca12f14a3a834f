"""FSDP without a GPU: accelerate ignores it on the CPU, where torch's own FSDP2 works through gloo."""

from typing import Any

from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from sinkscope.training import sharding


def shard_on_cpu() -> None:
    """Let accelerate shard on the CPU as on GPUs, in this process from now on."""
    begin = AcceleratorState.__init__

    def with_sharding(self: Any, *args: Any, **rest: Any) -> None:
        begin(self, *args, **rest)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = FullyShardedDataParallelPlugin()

    AcceleratorState.__init__ = with_sharding  # type: ignore[method-assign]
    sharding.check_sharding = lambda: None
