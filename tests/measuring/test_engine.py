"""The engine: passes that begin at a later layer are bit for bit complete ones; the interval of a cost."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from support.every_model import tiny_of
from support.tables import assert_same_tables
from tiny import ragged_tokens, tiny_model, tiny_tokens, written
from transformers import PreTrainedModel

from sinkscope.commands.intervene.command import intervene
from sinkscope.commands.quantize.study import Simulation, calibrate_ranges
from sinkscope.interventions import INTERVENTIONS, Intervention, Target, parse
from sinkscope.interventions.massive import RescaleNorm
from sinkscope.measuring import engine
from sinkscope.measuring.engine import Setting, completed, resampled_cost, run_settings, tables_equal
from sinkscope.measuring.measure import prepared, tables_of
from sinkscope.measuring.observables.observable import Observable, Settings
from sinkscope.measuring.passes import Pass, pass_over
from sinkscope.measuring.subject import Subject, open_subject
from sinkscope.measuring.tracer import Tracer, open_tracer
from sinkscope.options.measuring import make_config
from sinkscope.quantization.formats import Precision

LATE = (  # interventions on later layers alone, in the order of layers; in the hybrid, layers 1 and 3 attend
    "zero-massive:layers=1,coordinates=3,17",
    "mean-massive:layers=1,coordinates=3,17,means=5,-7",
    "zero-key-columns:layers=1,coordinates=3,17",
    "nullify-query-bias:layers=1",
    "perturb-query-bias:layers=1",
    "mask-sink:layers=1",
    "isolate:layers=1,positions=4",
    "scale-sink-value:layers=1,factor=3",
    "mean-sink-value:layers=1,means=0.5",
    "zero-super-weight:layer=1,rows=3,column=5",
    "ablate-heads:numbers=5",
    "scale-head-outputs:layers=1,positions=4",
    "rescale-norm:layers=2",
)
EARLY = ("zero-super-expert", "replace-epe", "transplant-epe", "nullify-first-embedding", "streaming-window")
FEW = ("zero-massive", "mask-sink", "rescale-norm")  # an output, an attention layer and an input changed
FAMILIES = {"llama": INTERVENTIONS, "gpt2": INTERVENTIONS, "gpt_neox": FEW, "gemma3": FEW, "qwen3_next": FEW}
OBSERVABLES = ("attention", "massive", "mean-maps", "activation", "outlier")

Tables = dict[str, pd.DataFrame]


def made(name: str) -> PreTrainedModel:
    return tiny_of(name) if name == "qwen3_next" else tiny_model(name)


@pytest.fixture
def ragged(tmp_path: Path) -> dict[str, Any]:
    """Return the options of an input whose batches are padded."""
    path = written(tmp_path / "ragged.jsonl", ragged_tokens((9, 12)))
    return {"input": str(path), "num_seqs": 2, "seq_len": 12, "positions": 6, "window": 8}


def fresh(subject: Subject) -> list[Observable]:
    return prepared(OBSERVABLES, Settings(positions=6, window=8), subject)


def setting(subject: Subject, layer: int, *stack: Intervention) -> Setting:
    loaded = subject.loaded
    return Setting(
        lambda beginning: open_tracer(loaded.model, subject.family, "sdpa", stack, beginning),
        layer=layer,
        observables=lambda: fresh(subject),
    )


def given(done: Pass) -> tuple[Tables, list[float]]:
    return tables_of(done.observables), done.losses.tolist()


def resumed_passes(subject: Subject, settings: Sequence[Setting]) -> list[tuple[Tables, list[float]]]:
    return [given(each) for each in run_settings(subject, settings, batch_size=2, by_batch=True)]


def whole_pass(subject: Subject, *stack: Intervention) -> tuple[Tables, list[float]]:
    model = subject.loaded.model
    with open_tracer(model, subject.family, "sdpa", stack) as tracer:
        return given(pass_over(model, subject.inputs, lambda: fresh(subject), tracer.forward_with_loss, 2))


def is_same(layer: int, resumed: tuple, unchanged: tuple, whole: tuple) -> bool:
    (tables, losses), (expected, expected_losses) = resumed, whole
    return tables_equal(completed(tables, layer, unchanged[0]), expected) and losses == expected_losses


@pytest.mark.parametrize("name", FAMILIES)
def test_what_begins_at_a_layer_is_a_whole_pass(name: str, ragged: dict[str, Any]) -> None:
    model = made(name)
    with open_subject(model, None, make_config(**ragged), Console(quiet=True)) as subject:
        target = Target(model, subject.family, {})
        parts = [part for part in map(parse, LATE) if part.name in FAMILIES[name]]
        parts = [part for part in parts if part.inapplicable(target) is None]
        assert len(parts) >= 3
        layers = [part.begins_at(target) for part in parts]
        assert set(layers) == {1, 2}
        passes = resumed_passes(subject, [setting(subject, *pair) for pair in zip(layers, parts, strict=True)])
        unchanged = whole_pass(subject)
        for layer, part, resumed in zip(layers, parts, passes, strict=True):
            assert is_same(layer, resumed, unchanged, whole_pass(subject, part)), part
        assert {parse(text).begins_at(target) for text in EARLY} == {0}
    assert {text.partition(":")[0] for text in (*LATE, *EARLY)} == set(INTERVENTIONS)


@pytest.mark.parametrize(("shift", "is_resumed"), [(0, True), (1, False)])
def test_an_experiment_has_the_same_tables_wherever_its_arms_are_said_to_begin(
    shift: int, is_resumed: bool, ragged: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An arm whose first layer is declared too late is measured by complete passes."""
    model, do = tiny_model("llama"), "rescale-norm:layers=1"
    begins = RescaleNorm.begins_at
    monkeypatch.setattr(RescaleNorm, "begins_at", lambda self, target: 0)
    options = {"draws": 1, "batch_size": 1, **ragged}
    whole = intervene(model, do, **options)
    monkeypatch.setattr(RescaleNorm, "begins_at", lambda self, target: begins(self, target) + shift)
    firsts: list[int] = []
    forward = Tracer.forward_with_loss

    def noting(tracer: Tracer, *args: Any) -> Any:
        firsts.append(tracer.first)
        return forward(tracer, *args)

    monkeypatch.setattr(Tracer, "forward_with_loss", noting)
    run = intervene(model, do, **options)
    assert firsts[-4:] == [1 if is_resumed else 0] * 4  # the arm and its control, on two batches
    assert_same_tables(run.tables, whole.tables, check_exact=True)


def test_a_model_whose_layers_share_something_is_measured_whole(ragged: dict[str, Any]) -> None:
    """The last layer uses a value that the first layer has stored."""
    model, left = tiny_model("llama"), list[int]()
    first, *_, last = model.model.layers
    first.register_forward_hook(lambda *_: left.append(1))
    last.register_forward_pre_hook(lambda *_: left.clear() if left.pop() else None)
    run = intervene(model, "rescale-norm:layers=1", draws=1, **ragged)
    assert not run.manifest["failed"]
    with open_subject(model, None, make_config(**ragged), Console(quiet=True)) as subject:
        simulation = Simulation(subject, Precision(4, 4))
        ranges = calibrate_ranges(model, list(tiny_tokens(1, 12)))
        (site,) = (site for site in ranges if str(site) == "layer 2 mlp.down_proj input")
        quantized = simulation.setting({site: ranges[site]})
        (done,), (whole,) = (run_settings(subject, [quantized], batch_size=2, by_batch=how) for how in (None, False))
        assert done.losses.tolist() == whole.losses.tolist()


def test_sites_of_single_layers_cost_what_they_cost_in_a_whole_pass(
    ragged: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    with open_subject(model, None, make_config(**ragged), Console(quiet=True)) as subject:
        simulation = Simulation(subject, Precision(4, 4))
        ranges = calibrate_ranges(model, list(tiny_tokens(2, 12)))
        sites = [site for site in ranges if site.layer > 0 and site.kind == "mlp.down_proj"]
        settings = [simulation.setting({site: ranges[site]}) for site in reversed(sites)]
        plain, counted = engine.pass_over, list[int]()
        monkeypatch.setattr(engine, "pass_over", lambda *args, **how: counted.append(1) or plain(*args, **how))
        together = run_settings(subject, settings, batch_size=2)
        assert len(counted) == 3  # all of them together, and both passes of the trial
        alone = [run_settings(subject, [each], batch_size=2, by_batch=False)[0] for each in settings]
        assert [done.losses.tolist() for done in together] == [done.losses.tolist() for done in alone]
        assert len({done.loss for done in together}) == len(sites)


def test_the_interval_of_a_cost_resamples_sequences_in_pairs() -> None:
    random = np.random.default_rng(0)
    full, predicted = 100.0 + 10 * random.normal(size=400), [10] * 400
    losses = full + 5 + random.normal(size=400)
    drawn = resampled_cost(losses, full, predicted, range(400))
    assert drawn[0] == pytest.approx(0.5, abs=0.02)
    assert drawn[1:].std() == pytest.approx(0.1 / 20, rel=0.1)  # the spread of the costs only, not of the losses
    copies = resampled_cost(losses[:20].repeat(20), full[:20].repeat(20), predicted, np.arange(20).repeat(20).tolist())
    np.testing.assert_allclose(copies, resampled_cost(losses[:20], full[:20], predicted[:20], range(20)))
