"""The outcome for every model type, and comparison of measurements with plain transformers.

The comparison covers every column of the tables `attention`, `attention_heads`, `sink_positions`, `activation`,
`massive` and `gradient`, in float64, for a single sequence and for a batch that is padded on either side.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradient_reference
import numpy as np
import pandas as pd
import pytest
import reference
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from sinkscope import SinkscopeError, analyze
from sinkscope.measuring import subject
from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.measuring.observables.activation import Activation
from sinkscope.measuring.observables.observable import Settings
from sinkscope.measuring.subject import family_of
from sinkscope.measuring.tracer import Tracer, open_tracer
from sinkscope.models.family import RESIDUAL_SITES, Family
from sinkscope.models.in_memory import undisturbed
from sinkscope.text.batch import IGNORED, Batch
from sinkscope.text.inputs import masked
from support.encoders import word_tokenizer
from support.every_model import NOT_BUILT, TOLD, VOCAB, tiny_of
from support.everything import differences as differences_of_state
from support.everything import snapshot
from support.plain import Plain, only_float64, run_plainly


@dataclass(frozen=True)
class Row:
    """The outcome for one model type.

    `outcome` is row (of the table of families), wiring (found numerically), refused, or not built; `layers` is the
    number of layers of each kind. `reason` is that of a refusal, or why the attention of some layers is not read.
    `padded`, for a causal model, is whether measurements of a padded batch equal those
    of plain transformers, on either side; "yes, but" if transformers' own numbers then differ from those of a sequence
    alone.
    """

    model_type: str
    outcome: str
    layers: str = ""
    wiring: str = ""
    positions: str = ""
    padded: str = ""
    reason: str = ""


def row_of(model_type: str, auto: Any = AutoModelForCausalLM) -> Row:
    """Build the model, and analyze it as a user does, with all default observables."""
    if model_type in NOT_BUILT:
        return Row(model_type, "not built", reason=NOT_BUILT[model_type])
    model = tiny_of(model_type, auto=auto)
    known: list[tuple[Family, bool]] = []  # the search would take as long a second time

    def remembered(model: PreTrainedModel) -> tuple[Family, list[str]]:
        family, notices = family_of(model)
        known.append((family, bool(notices)))
        return family, notices

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(subject, "family_of", remembered)
            run = analyze(model, input=[[*range(3, 15)]], bos="never", seq_len=12, batch_size=1)
    except SinkscopeError as error:
        return Row(model_type, "refused", reason=str(error).splitlines()[-1])
    wiring = run.manifest["family"]
    kinds = Counter(wiring["kinds"] or ["attention"] * (1 + run.tables["activation"]["layer"].max()))
    layers = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    family, is_wired = known[0]
    padded = padding(model_type, padded_differences(model.double(), family, whole=False)) if family.causal else ""
    reason = next((f"layer {at}: {block.unread}" for at, block in enumerate(family.blocks) if block.unread), "")
    outcome = "wiring" if is_wired else "row"
    return Row(model_type, outcome, layers, wiring["wiring"], wiring["positions"], padded, reason)


def padding(model_type: str, by_side: Mapping[str, Mapping[str, float]]) -> str:
    if not all(is_equal(model_type, differences) for differences in by_side.values()):
        return "NO"
    changed = [side for side, differences in by_side.items() if differences[ALONE] > ROUND_OFF]
    return f"yes, but transformers itself changes with padding on the {' and '.join(changed)}" if changed else "yes"


LENGTH = 20
SHORTER = 13  # length of the second sequence of a padded batch
WINDOW = 7  # width of window masses
SIDES = ("right", "left")
MEASURED = ("attention", "activation", "massive", "gradient")
COMPARED = ("attention", "attention_heads", "sink_positions", "activation", "massive", "gradient")
ROUND_OFF = 1e-10  # relative, in float64
# Types with larger errors: sums that are kept in float32 for weights of any dtype; code for float32 only
LESS_EXACT = {"recurrent_gemma": 1e-6, "mobilebert": 1e-6}
# columns that concern only plain transformers
ALONE = "bare model, alone and padded"
UNDEFINED = "entries that are NaN by plain transformers"

Tables = Mapping[str, pd.DataFrame]


def differences(model_type: str, file: Path, auto: Any = AutoModelForCausalLM) -> dict[str, float]:
    """Return each column's largest relative difference from plain transformers and autograd, for one float64 sequence.

    The ids are written to `file`; `auto` is the class of transformers that makes the model.
    """
    model = tiny_of(model_type, torch.float64, auto=auto)
    np.save(file, _sequence(LENGTH).numpy()[None])
    with only_float64(), pytest.MonkeyPatch.context() as patch:
        before = snapshot(model)
        with undisturbed(model):
            known = family_of(model)
        family, _ = known
        patch.setattr(subject, "family_of", lambda model: known)  # the search would take as long a second time
        tables = analyze(
            model,
            tokenizer=None if family.causal else word_tokenizer(),
            input=str(file),
            observables=[name for name in MEASURED if OBSERVABLES[name].inapplicable(model, family) is None],
            **{"seq_len": LENGTH, "positions": LENGTH, "window": WINDOW, "batch_size": 1, "bos": "never"},
        ).tables
        changed = differences_of_state(before, snapshot(model))
        plain = _run(model, family, _batch([LENGTH], "right", family.causal))
    return _apart(tables, _expected(plain, family)) | {"model left as it was": np.inf if changed else 0.0}


def padded_differences(model: PreTrainedModel, family: Family, whole: bool) -> dict[str, dict[str, float]]:
    """Return the differences for a padded batch of two sequences in float64, for each side of the padding.

    ALONE is the difference of the bare model's logits from those of the shorter sequence alone. If not `whole`, only
    sink mass and norms of the stream are compared, instead of every column and the logits.
    """
    batches = {side: _batch([LENGTH, SHORTER], side, family.causal) for side in SIDES}
    by_side = {}
    with undisturbed(model), only_float64():
        alone = _run(model, family, _batch([SHORTER], "right", family.causal), backward=False)
        with open_tracer(model, family) as tracer:
            tables = {side: _traced(tracer, batch, whole) for side, batch in batches.items()}
            logits = {side: tracer.logits(batch) for side, batch in batches.items() if whole}
        for side, batch in batches.items():
            plain, real = _run(model, family, batch, whole), batch.attention_mask.bool()
            by_side[side] = _apart(tables[side], _expected(plain, family) if whole else _masses_and_norms(plain))
            if whole:
                by_side[side]["logits"] = _difference(logits[side][real], plain.logits[real])
            by_side[side][ALONE] = _difference(plain.logits[1][real[1]], alone.logits[0])
    return by_side


def is_equal(model_type: str, differences: Mapping[str, float]) -> bool:
    """Return whether measurements differ from plain transformers by no more than round-off."""
    largest = max(value for name, value in differences.items() if name not in (ALONE, UNDEFINED))
    return largest < LESS_EXACT.get(model_type, ROUND_OFF)


# --- measurements


def _sequence(length: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(length))


def _batch(lengths: Iterable[int], side: str, causal: bool) -> Batch:
    """Return sequences of these lengths; for an encoder also with masked tokens."""
    rows = [_sequence(length) for length in lengths]

    def padded(rows: Iterable[Any], value: int) -> torch.Tensor:
        rows = [torch.as_tensor(row) for row in rows]
        gaps = [max(lengths) - len(row) for row in rows]
        return torch.stack([
            F.pad(row, (gap, 0) if side == "left" else (0, gap), value=value)
            for row, gap in zip(rows, gaps, strict=True)
        ])  # fmt: skip

    ids, mask = padded(rows, 0), padded(map(torch.ones_like, rows), 0)
    if causal:
        return Batch(ids, mask)
    hidden = masked([row.numpy() for row in rows], word_tokenizer(), VOCAB, seed=0)
    labels = padded([each.labels for each in hidden], IGNORED)
    return Batch(ids, mask, masked=Batch(padded([each.ids for each in hidden], 0), mask, labels=labels))


class Inputs(Activation):
    sites = ("layer_in",)


def _traced(tracer: Tracer, batch: Batch, whole: bool) -> Tables:
    settings = Settings(positions=LENGTH, window=WINDOW)
    kinds = [OBSERVABLES[name] for name in MEASURED] if whole else [OBSERVABLES["attention"], Inputs]
    observables = [kind(settings) for kind in kinds if kind.inapplicable(tracer.model, tracer.family) is None]
    for observable in observables:
        observable.prepare(tracer.model, tracer.family, int(((batch.masked or batch).targets != IGNORED).sum()))
    (tracer.forward_backward if whole else tracer.forward)(batch, observables)
    tables = {name: table for observable in observables for name, table in observable.tables().items()}
    return tables if whole else {name: tables[name] for name in ("attention", "activation") if name in tables}


# --- plain transformers


def _run(model: PreTrainedModel, family: Family, batch: Batch, backward: bool = True) -> Plain:
    """Run a batch; an encoder reads the plain text, and its gradients are those of the masked text."""
    unread = [at for at, block in enumerate(family.blocks) if block.unread]
    options = {"first_position": family.first_position, "backward": backward, "unread": unread}
    arguments = TOLD.get(model.config.model_type, {}) | options
    ids, mask, hidden = batch.token_ids, batch.attention_mask, batch.masked
    if hidden is None:
        return run_plainly(model, family.layers, ids, mask, **arguments)
    plain = run_plainly(model, family.layers, ids, mask, labels=ids, **arguments)
    of_hidden = run_plainly(model, family.layers, hidden.token_ids, mask, labels=hidden.labels, **arguments)
    for own, gradients in zip(plain.attended, of_hidden.attended, strict=True):
        own.gradients_of = gradients
    return plain


def _masses_and_norms(plain: Plain) -> Tables:
    """Return two columns of the tables of a forward pass: sink masses, and the norms of the layers' inputs."""
    sequences, longest = plain.sequences(), int(plain.lengths.max())
    inputs = reference.activation(sequences, longest).query("site == 'layer_in'")
    tables = {"activation": inputs.drop(columns="norm_max")}
    if plain.attended:
        masses = reference.attention(sequences, longest, longest, 0.0, plain.causal)
        tables["attention"] = masses[["layer", "head", "position", "sink_mass"]]
    return tables


def _expected(plain: Plain, family: Family) -> Tables:
    """Return the tables by plain transformers, without branches of layers that sinkscope reports as unknown."""
    sequences, epsilon = plain.sequences(), Settings().epsilon
    activation = reference.activation(sequences, LENGTH)
    blocks = {at: family.block(at) for at in range(len(plain.layers))}
    unknown = {at: {*RESIDUAL_SITES} - {*block.sites} for at, block in blocks.items() if block.wiring == "unknown"}
    places = zip(activation["layer"], activation["site"], strict=True)
    known = activation[[site not in unknown.get(at, ()) for at, site in places]]
    tables = {"activation": known, "massive": reference.massive(sequences)}
    if not plain.attended:
        return tables
    return tables | {
        "attention": reference.attention(sequences, LENGTH, WINDOW, epsilon, plain.causal),
        "attention_heads": reference.attention_heads(sequences),
        "sink_positions": reference.sink_positions(sequences, WINDOW, epsilon, plain.causal),
        "gradient": gradient_reference.gradient(sequences, LENGTH),
    }


# --- differences

KEYS = ("layer", "head", "kv_head", "pathway", "site", "sequence", "position", "token_id", "coordinate", "is_massive")


def _apart(tables: Tables, expected: Tables) -> dict[str, float]:
    """Return each column's largest difference ÷ the largest entry there (layer and site); infinite if rows differ."""
    tables = {name: _compared(table) for name, table in tables.items()}
    apart = {f"{name}.rows": np.inf for name in COMPARED if (name in tables) != (name in expected)}
    apart |= {
        f"{name}.{column}": value
        for name, table in expected.items()
        for column, value in _columns_apart(tables[name], table).items()
    }
    return apart | {UNDEFINED: sum(float(table.isna().sum().sum()) for table in expected.values())}


def _compared(table: pd.DataFrame) -> pd.DataFrame:
    """Remove autograd's gradient of query 0, which is round-off."""
    return table[table["pathway"] != "query_measured"] if "pathway" in table else table


def _columns_apart(ours: pd.DataFrame, expected: pd.DataFrame) -> dict[str, float]:
    keys = [name for name in KEYS if name in expected]
    ours, expected = (table.sort_values(keys, ignore_index=True) for table in (ours, expected))
    if len(ours) != len(expected) or any((ours[key].to_numpy() != expected[key].to_numpy()).any() for key in keys):
        return {"rows": np.inf}
    if expected.empty:
        return {}
    place = expected.groupby([name for name in ("layer", "site", "pathway") if name in keys]).ngroup().to_numpy()
    return {
        name: _column_apart(ours[name].to_numpy(float), expected[name].to_numpy(float), place, name == "missing_mass")
        for name in expected
        if name not in keys
    }


def _column_apart(measured: np.ndarray, expected: np.ndarray, place: np.ndarray, absolute: bool) -> float:
    """Return the largest difference, relative to the largest entry at the same place; absolute for 1 minus a sum."""
    largest = np.zeros(place.max() + 1)
    np.fmax.at(largest, place, np.abs(expected))
    apart = np.abs(measured - expected) / (1.0 if absolute else np.where(largest > 0, largest, 1.0)[place])
    return float(np.where(np.isnan(expected), 0.0, np.where(np.isnan(apart), np.inf, apart)).max())


def _difference(measured: torch.Tensor, expected: torch.Tensor) -> float:
    return float((measured - expected).abs().max() / expected.abs().max())
