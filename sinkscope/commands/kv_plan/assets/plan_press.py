"""A press for kvpress that hides what a plan of `sinkscope kv-plan` evicts. It needs only kvpress and plan.json.

    press = PlanPress.of("plan.json", 0.25, "output-loss")
    with press(model):
        outputs = model(input_ids, past_key_values=cache)

As in kvpress's DuoAttentionPress, evicted tokens are hidden from those that are read later, and no memory is freed.
Tokens that are read one by one within the block see what the table of kv-plan measures: sinks and the last tokens. A
prompt that is read at once sees all its tokens; after the block, windows stay at its end.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from kvpress import BasePress


@dataclass
class PlanPress(BasePress):
    """Keeps all tokens in some key/value heads, and sinks and the last tokens in the others."""

    layers: list[int]
    windows: list[list[int | None]]  # by layer and head: last tokens that it keeps; None: all
    sinks: dict[str, Any]  # the rule that predicts them
    is_sink: torch.Tensor = field(init=False)  # (B,T), of the tokens that have been read

    @classmethod
    def of(cls, path: str | Path, budget: float, plan: str) -> "PlanPress":
        """Return the press of a plan in plan.json. Its windows count; the press does not quantize."""
        content = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
        matching = [each for each in content["plans"] if (each["budget"], each["plan"]) == (budget, plan)]
        if not matching:
            known = sorted({(each["budget"], each["plan"]) for each in content["plans"]})
            raise ValueError(f"{path} has no plan {(budget, plan)}: its plans are {known}")
        return cls(content["layers"], matching[0]["windows"], content["sinks"])

    def find_sinks(self, layer: Any, args: Any, output: Any) -> None:
        """Keep which of the tokens that are being read are sinks (B,T), after the layer of the rule."""
        hidden = output[0] if isinstance(output, tuple) else output
        self.new = torch.zeros(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
        if self.sinks["coordinates"]:
            self.new = hidden[..., self.sinks["coordinates"]].abs().amax(-1) >= self.sinks["at_least"]

    def hide(self, model: Any, args: Any, output: Any) -> None:
        """Hide evicted tokens from the next token in all layers, once tokens have been read."""
        cache = output.past_key_values
        length = cache.get_seq_length()  # the position of the next token
        before = length - self.new.shape[1]
        self.is_sink = torch.cat([self.is_sink[:, :before], self.new], dim=1) if before else self.new
        tokens = torch.arange(length, device=self.new.device)
        is_sink = tokens < self.sinks["first"] if self.sinks["layer"] < 0 else self.is_sink
        for layer, windows in zip(self.layers, self.windows, strict=True):
            last = [length + 1 if window is None else window for window in windows]
            is_old = length - tokens >= torch.tensor(last, device=tokens.device)[:, None]  # (K,T)
            evicted = is_old & ~is_sink.expand(len(self.new), length)[:, None]
            in_cache = evicted[..., -cache.layers[layer].keys.shape[2] :]  # a sliding window has dropped the others
            model.layers[layer].self_attn.masked_key_indices = torch.nonzero(in_cache, as_tuple=True)

    @contextmanager
    def __call__(self, model: Any) -> Iterator[None]:
        layers = model.model.layers
        hooks = [layers[max(0, self.sinks["layer"])].register_forward_hook(self.find_sinks)]
        hooks.append(model.model.register_forward_hook(self.hide))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
