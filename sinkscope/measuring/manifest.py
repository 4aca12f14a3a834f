"""What run.json says of the model and of its input, besides the head that every manifest has."""

import math
from dataclasses import dataclass, field
from typing import Any

from sinkscope.attention.taps import operations_of
from sinkscope.measuring.processes import team
from sinkscope.measuring.subject import Subject
from sinkscope.models.towers import text_tower
from sinkscope.options.measuring import RunConfig
from sinkscope.results import manifest
from sinkscope.retrofits.registers import registers_before


@dataclass
class Facts:
    """What only the pass itself knows."""

    batch_size: int = 0
    scaling: tuple[float, ...] = ()  # of the logits, by layer
    outside: dict[str, list[int]] = field(default_factory=dict)  # what is attended to besides the text → its layers
    loss: float | None = None  # cross-entropy per predicted token, if there was a backward pass
    parity: float | None = None  # largest relative difference from the bare model; None: not looked at
    notices: tuple[str, ...] = ()
    not_measured: dict[str, str] = field(default_factory=dict)  # observable that does not apply → the reason


def make_manifest(
    subject: Subject, config: RunConfig, facts: Facts, tables: list[str], start: float, command: str = "analyze"
) -> dict[str, Any]:
    """The whole manifest of one run."""
    return manifest.make_manifest(
        command, config.model_dump(mode="json"), start, tables, **_described(subject, config, facts)
    )


def _described(subject: Subject, config: RunConfig, facts: Facts) -> dict[str, Any]:
    loaded, family, inputs = subject.loaded, subject.family, subject.inputs
    parameters = next(loaded.model.parameters())
    text = loaded.model.config.get_text_config()
    path, tower = text_tower(loaded.model)
    return {
        "condition": inputs.condition,
        "model": {
            **loaded.origin,
            "adapter": loaded.adapter,
            "architecture": type(loaded.model).__name__,
            "text_tower": {"path": path, "architecture": type(tower).__name__} if path else None,
            "parameters": sum(p.numel() for p in loaded.model.parameters()),
            "registers": registers_before(loaded.model),  # tokens before the text
            "operations": operations_of(loaded.model),  # of attention, beside softmax
            "layer_types": getattr(text, "layer_types", None),
            "sliding_window": getattr(text, "sliding_window", None),
        },
        "family": {
            "name": family.name,
            "wiring": family.wiring,
            "positions": family.positions,
            "layer_positions": family.layer_positions if len(family.kinds_of_positions) > 1 else None,
            "door": family.door,
            "gated": family.gated,
            "causal": family.causal,
            "prefix": family.prefix,  # tokens at the beginning that all others see
            "copies": family.copies and family.copies.count,  # of the residual stream, whose mean is measured
            "unknown": [at for at, block in enumerate(family.blocks) if block.wiring == "unknown"] or None,  # layers
            "kinds": [block.kind for block in family.blocks] or None,  # of every layer, where they are not all alike
        },
        "outside": facts.outside,
        "absent": family.absent_sites(),
        "not_measured": facts.not_measured,
        "dtype": str(parameters.dtype).removeprefix("torch."),
        "device": str(parameters.device),
        "processes": team().count,
        "kernel": config.attn,
        "scaling": [None if math.isnan(scaling) else scaling for scaling in facts.scaling],
        "batch_size": facts.batch_size,
        "parity": facts.parity,
        "notices": list(facts.notices),
        "input": {
            "sequences": len(inputs),
            "tokens": inputs.num_tokens,
            "shortest": inputs.shortest,
            "longest": inputs.longest,
            "token_zero": inputs.token_zero,
            "masked": None if inputs.masked is None else inputs.num_predicted,
            "sha256": inputs.sha256,
            "per_passage": inputs.per_passage,
        },
        "seed": config.seed,
    }
