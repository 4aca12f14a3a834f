"""The command `doctor`: shows the wiring of a model, and checks before a long run that measurements would be right."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Unpack

import torch
from transformers import PreTrainedModel

from sinkscope.attention.seam import attention_implementation
from sinkscope.attention.taps import attends_by_us
from sinkscope.commands.result import Result
from sinkscope.errors import counted
from sinkscope.interventions import INTERVENTIONS, Target
from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.measuring.observables.gradient import undefined_ratios
from sinkscope.measuring.observables.observable import ATTENTION_SITES, NO_ATTENTION
from sinkscope.measuring.parity import Comparison, Parity, comparing, round_off
from sinkscope.measuring.subject import ModelLike, family_of, load_model, options_of
from sinkscope.measuring.tracer import model_inputs, open_tracer
from sinkscope.models.family import RESIDUAL_SITES, Family, embedding_weight, input_device, tower_notice
from sinkscope.models.in_memory import undisturbed
from sinkscope.models.loading import LoadedModel
from sinkscope.models.wiring import check_wiring, layer_output, read_sites
from sinkscope.options.keywords import DoctorKeywords
from sinkscope.options.measuring import DoctorOptions, RunConfig
from sinkscope.options.output import OutputOptions
from sinkscope.options.signatures import with_options
from sinkscope.text.batch import Batch
from sinkscope.verdict.report import layers_text

TOKENS = 64
Check = tuple[str, bool, str]  # the check, whether it passed, a detail


@dataclass
class Report:
    """The result of `doctor`."""

    name: str
    facts: dict[str, str] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
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
    return Result(report, text=str(report), data=vars(report) | {"ok": report.ok}, failure=wrong)


@with_options(DoctorOptions)
def doctor(model: ModelLike = None, **options: Unpack[DoctorKeywords]) -> Report:
    """Examine one model before it is measured.

    Args:
        model: as for `analyze`.
        **options: those of the command line, which are listed below.

    Returns:
        A Report whose `ok` is True if every check passed.

    Raises:
        InputError: the model cannot be loaded, or its architecture is unknown and cannot be calibrated.
    """
    loaded = load_model(model, None, options_of(RunConfig, model, options))
    with undisturbed(loaded.model):
        return _examined(loaded)


def _examined(loaded: LoadedModel) -> Report:
    model = loaded.model
    family, notices = family_of(model)
    report = Report(loaded.name, _facts(loaded, family))
    calibrated = _calibrated(family) if notices else []
    report.notes = [*loaded.notices, *tower_notice(model), *notices, *calibrated, *_not_applicable(model, family)]
    # one sequence of random ids, for which no tokenizer is needed
    vocabulary = embedding_weight(model).shape[0]
    ids = torch.randint(vocabulary // 10, vocabulary, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids, torch.ones_like(ids))
    inputs = model_inputs(model, batch, False, family.first_position)
    bare = layer_output(model, family, family.last_layer(model), inputs)
    own = round_off(model, family, batch, bare)
    records = read_sites(model, family, batch.token_ids.to(input_device(model)))
    worst = max(check_wiring(family.block(layer), sites) for layer, sites in enumerate(records))
    tolerance = 20 * torch.finfo(next(model.parameters()).dtype).eps
    detail = f"the {family.wiring} equation holds to {worst:.1e} at every layer"
    report.checks = [("residual stream", worst < tolerance, detail)]
    report.checks += [_output(model, family, batch, kernel, bare, own.tolerance) for kernel in ("sdpa", "eager")]
    if own.attention:
        report.checks.append(_attention("each layer's attention equals the bare model's", own.attention))
    if any(map(attends_by_us, model.modules())):
        report.notes.append(
            "attention weights: transformers' eager attention lacks the retrofit, so there is nothing to compare with"
        )
    elif not family.has_attention:
        report.notes.append(f"attention weights: {NO_ATTENTION}")
    elif family.door == "interface":  # compare our weights with the weights of transformers' eager attention
        with torch.no_grad(), attention_implementation(model, "eager"), comparing(model, family, batch) as found:
            model(batch.token_ids.to(input_device(model)), use_cache=False)
        report.checks.append(_attention("attention to position 0 equals transformers' eager attention", found))
    else:
        report.notes.append("attention weights come from the model's own code: there is nothing to compare them with")
    return report


def _calibrated(family: Family) -> list[str]:
    """Describe the calibrated row, with the addresses of the sites in a layer of each kind."""
    row = f"layers at '{family.layers}', attention '{family.attention}', {family.wiring}, door {family.door}"
    lines = [f"the calibrated row: {row}"]
    kinds = {block.kind: (layer, block) for layer, block in reversed(list(enumerate(family.blocks)))}
    for layer, block in sorted(kinds.values() or [(0, family.block(0))], key=lambda at: at[0]):
        addresses = []
        for site in (site for site in RESIDUAL_SITES if site in block.sites):
            terms = [
                f"{term.scale:g} · {term.address}" if term.scale != 1 else term.address for term in block.terms(site)
            ]
            if terms not in (["input"], ["output"]):
                addresses.append(f"{site} = {' + '.join(terms)}")
        lines.append(f"layer {layer} ({block.kind}): {', '.join(addresses)}")
    return lines


def _not_applicable(model: PreTrainedModel, family: Family) -> list[str]:
    """Return the sites, gradients and observables that do not apply to this model, with the reasons."""
    notes = [f"no site '{site}': {reason}" for site, reason in family.absent_sites().items()]
    notes += [f"gradients: {ratio} undefined: {reason}" for ratio, reason in undefined_ratios(family).items()]
    target = Target(model, family, seams={})
    reasons = {name: kind.inapplicable(model, family) for name, kind in OBSERVABLES.items() if kind.expected}
    reasons |= {name: kind.inapplicable(target) for name, kind in INTERVENTIONS.items() if kind.expected}
    return notes + [f"{name} does not apply: {reason}" for name, reason in reasons.items() if reason]


def _facts(loaded: LoadedModel, family: Family) -> dict[str, str]:
    model, text = loaded.model, loaded.model.config.get_text_config()
    parameter = next(model.parameters())
    counts = Counter(block.kind for block in family.blocks)
    kinds = f" ({', '.join(f'{count} {kind}' for kind, count in counts.items())})" if len(counts) > 1 else ""
    where = {
        kind: [at for at, own in enumerate(family.layer_positions) if own == kind]
        for kind in sorted(family.kinds_of_positions)
    }
    rare = sorted(where, key=lambda kind: len(where[kind]))[:-1]
    positions = "; ".join(f"{kind} in {layers_text(where[kind])}" for kind in rare)
    sliding = sum(kind == "sliding_attention" for kind in getattr(text, "layer_types", None) or [])
    windows = f"; {sliding} layers slide a window of {text.sliding_window}" if sliding else ""
    observables = [
        name
        for name, kind in OBSERVABLES.items()
        if any(site in ATTENTION_SITES or site in family.sites for site in kind.sites)
        and kind.inapplicable(model, family) is None
    ]
    target = Target(model, family, seams={})
    interventions = [
        name for name, kind in INTERVENTIONS.items() if not kind.is_control and not kind.inapplicable(target)
    ]
    layers = counted(len(family.layer_modules(model)), "layer")
    return {
        "architecture": f"{type(model).__name__}, {layers}{kinds}, family '{family.name}'",
        "wiring": f"{family.wiring}, positions {family.positions}" + (f" ({positions})" if positions else ""),
        "attention": f"{model.config._attn_implementation} by itself; seam through the {family.door}{windows}",
        "dtype": f"{str(parameter.dtype).removeprefix('torch.')} on {parameter.device}",
        "tokenizer": type(loaded.tokenizer).__name__ if loaded.tokenizer else "none: only token ids, random, repeated",
        "sites": ", ".join(
            (*(site for site in RESIDUAL_SITES if site in family.sites), "query", "key", "value", "attn_mix")
        ),
        "observables": ", ".join(observables),
        "interventions": ", ".join(interventions),
    }


@torch.no_grad()
def _output(
    model: PreTrainedModel, family: Family, batch: Batch, kernel: str, bare: torch.Tensor, tolerance: float
) -> Check:
    """Compare the outputs as every run does in its first batch; a difference is reported, not raised."""
    parity = Parity(family.last_layer(model), bare, tolerance=inf)
    with open_tracer(model, family, kernel) as tracer:
        tracer.forward(batch, [parity])
    assert parity.error is not None
    detail = "bit for bit" if parity.error == 0 else f"within {parity.error:.1e}, by round-off at most {tolerance:.1e}"
    what = f"the last layer's output through the seam ({kernel}) equals the bare model's"
    return (what, parity.error <= tolerance, detail)


def _attention(what: str, found: Sequence[Comparison]) -> Check:
    """Compare attention of all layers with a function of transformers, both on the same queries, keys and values."""
    worst = max(found, key=lambda one: one.excess)
    within = f"within {worst.difference:.1e} of its values' norm on the same queries and keys"
    return (what, worst.excess <= 1, f"{within}, {worst.excess:.1g} times what round-off explains")
