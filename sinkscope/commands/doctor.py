"""`doctor`: how sinkscope sees a model, and whether what it would measure is right, before a long run."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
from transformers import PreTrainedModel

from sinkscope.attention.seam import attention_implementation
from sinkscope.attention.taps import attends_by_us
from sinkscope.commands.result import Result
from sinkscope.errors import counted
from sinkscope.interventions import INTERVENTIONS, Target
from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.measuring.observables.gradient import undefined_ratios
from sinkscope.measuring.observables.observable import ATTENTION_SITES, NO_ATTENTION, Observable
from sinkscope.measuring.parity import Comparison, Parity, comparing, round_off
from sinkscope.measuring.subject import ModelLike, family_of, load_model, options_of
from sinkscope.measuring.tracer import model_inputs, open_tracer
from sinkscope.models.family import RESIDUAL_SITES, Block, Family, embedding_weight, input_device
from sinkscope.models.in_memory import undisturbed
from sinkscope.models.loading import LoadedModel
from sinkscope.models.towers import tower_notice
from sinkscope.models.wiring import check_wiring, layer_output, read_sites
from sinkscope.options.measuring import DoctorOptions, RunConfig
from sinkscope.options.output import OutputOptions
from sinkscope.text.batch import Batch
from sinkscope.verdict.report import layers_text

TOKENS = 64


@dataclass
class Report:
    """What the doctor found."""

    name: str
    facts: dict[str, str] = field(default_factory=dict)
    checks: list[tuple[str, bool, str]] = field(default_factory=list)  # (what was checked, passed, detail)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(passed for _, passed, _ in self.checks)

    def __str__(self) -> str:
        lines = [self.name]
        lines += [f"  {name:<14} {value}" for name, value in self.facts.items()]
        lines += [f"  {'ok  ' if passed else 'FAIL'} {what}: {detail}" for what, passed, detail in self.checks]
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])


def command(options: DoctorOptions, output: OutputOptions) -> Result:
    report = doctor(**options.model_dump(exclude={"attn"}))
    wrong = "" if report.ok else "a check failed: numbers from this model cannot be trusted"
    return Result(report, text=str(report), failure=wrong)


def doctor(model: ModelLike = None, **options: Any) -> Report:
    """Examine one model before it is measured.

    Args:
        model: as for `analyze`.
        **options: those of `load`.

    Returns:
        A Report whose `ok` says whether every check passed.

    Raises:
        InputError: the model cannot be loaded, or its architecture is unknown and cannot be calibrated.
    """
    loaded = load_model(model, None, options_of(RunConfig, model, options))
    with undisturbed(loaded.model):
        return _examined(loaded)


def _examined(loaded: LoadedModel) -> Report:
    family, notices = family_of(loaded.model)
    calibrated = _calibrated(family) if notices else []
    report = Report(loaded.name, _facts(loaded, family))
    report.notes = [
        *loaded.notices,
        *tower_notice(loaded.model),
        *notices,
        *calibrated,
        *_not_applicable(loaded.model, family),
    ]
    batch = _tokens(loaded.model)
    inputs = model_inputs(loaded.model, batch, False, family.first_position)
    bare = layer_output(loaded.model, family, family.last_layer(loaded.model), inputs)
    own = round_off(loaded.model, family, batch, bare)
    report.checks = [_wiring(loaded.model, family, batch)]
    report.checks += [_output(loaded.model, family, batch, kernel, bare, own.tolerance) for kernel in ("sdpa", "eager")]
    if own.attention:
        report.checks.append(_attention("each layer attends as the bare model's does", own.attention))
    if any(map(attends_by_us, loaded.model.modules())):
        report.notes.append("attention weights: transformers' eager attention knows nothing of what is built in")
    elif not family.has_attention:
        report.notes.append(f"attention weights: {NO_ATTENTION}")
    elif family.door == "interface":
        report.checks.append(_weights(loaded.model, family, batch))
    else:
        report.notes.append("attention weights are those that the model's own code computes; there is no second way")
    return report


def _calibrated(family: Family) -> list[str]:
    """How a row was found, for a layer of each kind."""
    row = f"layers at '{family.layers}', attention '{family.attention}', {family.wiring}, door {family.door}"
    kinds = {block.kind: (layer, block) for layer, block in reversed(list(enumerate(family.blocks)))}
    found = kinds.values() or [(0, family.block(0))]
    lines = [
        f"layer {layer} ({block.kind}): {_addresses(block)}" for layer, block in sorted(found, key=lambda at: at[0])
    ]
    return [f"the calibrated row: {row}", *lines]


def _addresses(block: Block) -> str:
    """Where each site is read."""
    terms = {site: block.terms(site) for site in RESIDUAL_SITES if site in block.sites}
    sums = {
        site: " + ".join(f"{term.scale:g} · {term.address}" if term.scale != 1 else term.address for term in parts)
        for site, parts in terms.items()
    }
    return ", ".join(f"{site} = {total}" for site, total in sums.items() if total not in ("input", "output"))


def _not_applicable(model: PreTrainedModel, family: Family) -> list[str]:
    """What one would expect of any model and this one does not have, with the reasons."""
    notes = [f"no site '{site}': {reason}" for site, reason in family.absent_sites().items()]
    notes += [f"gradients: {ratio} undefined: {reason}" for ratio, reason in undefined_ratios(family).items()]
    target = Target(model, family, seams={})
    reasons = {name: kind.inapplicable(model, family) for name, kind in OBSERVABLES.items() if kind.expected}
    reasons |= {name: kind.inapplicable(target) for name, kind in INTERVENTIONS.items() if kind.expected}
    return notes + [f"{name} does not apply: {reason}" for name, reason in reasons.items() if reason]


def _positions(family: Family) -> str:
    """«rotary and none (none in layers 3, 7)»."""
    kinds = sorted(family.kinds_of_positions)
    where = {kind: [at for at, own in enumerate(family.layer_positions) if own == kind] for kind in kinds}
    rare = sorted(kinds, key=lambda kind: len(where[kind]))[:-1]
    named = "; ".join(f"{kind} in {layers_text(where[kind])}" for kind in rare)
    return f"{family.positions} ({named})" if named else family.positions


def _facts(loaded: LoadedModel, family: Family) -> dict[str, str]:
    text = loaded.model.config.get_text_config()
    parameter = next(loaded.model.parameters())
    layers = family.layer_modules(loaded.model)
    windows = getattr(text, "layer_types", None) or []
    sliding = sum(kind == "sliding_attention" for kind in windows)
    present = [site for site in RESIDUAL_SITES if site in family.sites]
    target = Target(loaded.model, family, seams={})
    changes = {name: kind for name, kind in INTERVENTIONS.items() if not kind.is_control}
    return {
        "architecture": f"{type(loaded.model).__name__}, {counted(len(layers), 'layer')}{_kinds(family)}, "
        f"family '{family.name}'",
        "wiring": f"{family.wiring}, positions {_positions(family)}",
        "attention": f"{loaded.model.config._attn_implementation} by itself; seam through the {family.door}"
        + (f"; {sliding} layers slide a window of {text.sliding_window}" if sliding else ""),
        "dtype": f"{str(parameter.dtype).removeprefix('torch.')} on {parameter.device}",
        "tokenizer": type(loaded.tokenizer).__name__ if loaded.tokenizer else "none: only token ids, random, repeated",
        "sites": ", ".join((*present, "query", "key", "value", "attn_mix")),
        "observables": ", ".join(name for name, kind in OBSERVABLES.items() if _applies(kind, loaded.model, family)),
        "interventions": ", ".join(name for name, kind in changes.items() if not kind.inapplicable(target)),
    }


def _kinds(family: Family) -> str:
    counts = Counter(block.kind for block in family.blocks)
    return f" ({', '.join(f'{count} {kind}' for kind, count in counts.items())})" if len(counts) > 1 else ""


def _applies(observable: type[Observable], model: PreTrainedModel, family: Family) -> bool:
    has_a_site = any(site in ATTENTION_SITES or site in family.sites for site in observable.sites)
    return has_a_site and observable.inapplicable(model, family) is None


def _tokens(model: PreTrainedModel) -> Batch:
    """One sequence of random ids: enough to compare, and no tokenizer needed."""
    vocabulary = embedding_weight(model).shape[0]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary // 10, vocabulary, (1, TOKENS), generator=generator)
    return Batch(ids, torch.ones_like(ids))


def _wiring(model: PreTrainedModel, family: Family, batch: Batch) -> tuple[str, bool, str]:
    records = read_sites(model, family, batch.token_ids.to(input_device(model)))
    worst = max(check_wiring(family.block(layer), sites) for layer, sites in enumerate(records))
    tolerance = 20 * torch.finfo(next(model.parameters()).dtype).eps
    return ("residual stream", worst < tolerance, f"the {family.wiring} equation holds to {worst:.1e} at every layer")


@torch.no_grad()
def _output(
    model: PreTrainedModel, family: Family, batch: Batch, kernel: str, bare: torch.Tensor, tolerance: float
) -> tuple[str, bool, str]:
    """Compare the outputs as every run does in its first batch; a difference is reported, not raised."""
    parity = Parity(family.last_layer(model), bare, tolerance=inf)
    with open_tracer(model, family, kernel) as tracer:
        tracer.forward(batch, [parity])
    assert parity.error is not None
    detail = "bit for bit" if parity.error == 0 else f"within {parity.error:.1e}, by round-off at most {tolerance:.1e}"
    what = f"the last layer's output through the seam ({kernel}) is the bare model's"
    return (what, parity.error <= tolerance, detail)


def _attention(what: str, found: Sequence[Comparison]) -> tuple[str, bool, str]:
    """Attention of all layers against a function of transformers, each on the same queries, keys and values."""
    worst = max(found, key=lambda one: one.excess)
    within = f"within {worst.difference:.1e} of its values' norm on the same queries and keys"
    return (what, worst.excess <= 1, f"{within}, {worst.excess:.1g} times what round-off explains")


@torch.no_grad()
def _weights(model: PreTrainedModel, family: Family, batch: Batch) -> tuple[str, bool, str]:
    """Compare our weights with those by which transformers' eager attention mixes values."""
    with attention_implementation(model, "eager"), comparing(model, family, batch) as found:
        model(batch.token_ids.to(input_device(model)), use_cache=False)
    return _attention("attention to position 0 is transformers' eager", found)
