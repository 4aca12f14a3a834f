"""A press for kvpress that evicts what a plan of `sinkscope kv-plan` evicts. It needs only kvpress and plan.json.

kvpress 0.5.5 runs with transformers before 5.3, whose attention modules still get `cache_position`.

    press = PlanPress.of("plan.json", 0.25, "output-loss")
    with press(model):
        outputs = model(input_ids, past_key_values=cache)

As in kvpress's DuoAttentionPress, evicted tokens of the prompt are hidden from the tokens that are generated after it.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kvpress import BasePress


@dataclass
class PlanPress(BasePress):
    """Keeps all tokens in some key/value heads, and sinks and the last tokens in the others."""

    windows: list[list[int | None]]  # by layer and head: last tokens that it keeps; None: all
    sinks: dict[str, Any]  # the rule that predicts them

    @classmethod
    def of(cls, path: str | Path, budget: float, plan: str) -> "PlanPress":
        """Return the press of a plan in plan.json. Its windows count; the press does not quantize."""
        content = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
        matching = [each for each in content["plans"] if (each["budget"], each["plan"]) == (budget, plan)]
        if not matching:
            known = sorted({(each["budget"], each["plan"]) for each in content["plans"]})
            raise ValueError(f"{path} has no plan {(budget, plan)}: its plans are {known}")
        return cls(matching[0]["windows"], content["sinks"])

    def find_sinks(self, layer: Any, args: Any, output: Any) -> None:
        """Keep which tokens are sinks (B,T), of the residual stream after the layer of the rule."""
        hidden = output[0] if isinstance(output, tuple) else output
        if self.sinks["coordinates"] and hidden.shape[1] > 1:  # only in the prompt
            entries = hidden[..., self.sinks["coordinates"]].abs().amax(-1)
            self.is_sink = entries >= self.sinks["at_least"]

    def compress(
        self,
        module: Any,
        hidden_states: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        attentions: Any,
        kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hide the evicted tokens of all layers, once the last layer has read the prompt and sinks are known."""
        if module.layer_idx == 0:  # a new prompt begins
            self.modules.clear()
        self.modules[module.layer_idx] = module
        if len(self.modules) == len(self.windows):
            length = keys.shape[2]
            is_first = torch.arange(length, device=keys.device) < self.sinks["first"]
            is_sink = is_first if self.sinks["layer"] < 0 else self.is_sink
            for at, each in self.modules.items():
                windows = torch.tensor([length if window is None else window for window in self.windows[at]])
                old = torch.arange(length) < length - windows[:, None]  # (K,T)
                evicted = old.to(keys.device) & ~is_sink.expand(len(keys), length)[:, None]
                each.masked_key_indices = torch.nonzero(evicted, as_tuple=True)
        return keys, values

    @contextmanager
    def __call__(self, model: Any) -> Iterator[None]:
        self.modules: dict[int, Any] = {}
        layers = model.model.layers
        hook = layers[max(0, self.sinks["layer"])].register_forward_hook(self.find_sinks)
        try:
            with super().__call__(model):
                yield
        finally:
            hook.remove()
