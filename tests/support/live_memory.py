"""The bytes of the tensors that live at once."""

import weakref
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of the tensors that are made within the block: those alive now, and their largest number."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known = weakref.WeakSet[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        made = func(*args, **kwargs or {})
        read = {x.untyped_storage()._cdata for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for tensor in pytree.tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in read and storage not in self._known:
                    self._known.add(storage)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._freed, storage.nbytes())
        self.most = max(self.most, self.now)
        return made

    def _freed(self, size: int) -> None:
        self.now -= size
