"""Runs from end to end on tiny models: their tables, their manifest, and the behavior when memory runs out."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import reference
import torch
from tiny import VOCAB, ragged_tokens, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import sinkscope
from sinkscope.errors import InputError, SinkscopeError
from sinkscope.measuring import passes
from sinkscope.measuring.observables.activation import Outlier
from sinkscope.measuring.observables.close_ups import OTHER_COORDINATES, TOP_COORDINATES
from sinkscope.measuring.tables import all_tables
from sinkscope.measuring.tracer import Tracer
from sinkscope.models import families
from sinkscope.models.families import FAMILIES
from sinkscope.options.measuring import AnalyzeOptions
from sinkscope.output.run import Run
from sinkscope.results.tables import LEADING, names_of

LENGTHS = (20, 7, 13, 20, 3)
POSITIONS, WINDOW = 10, 6
# tables that a plain Llama does not have, or not on this input, and tables of other commands
ABSENT = {
    *("query_bias", "query_bias_by_sequence", "gamma", "delta_distribution", "logit_terms_by_sequence", "epe_by_group"),
    *("epe_rest_by_sequence", "window_edge_by_sequence", "equal_tokens", "gate", "attention_outside", "effect"),
    *("arm_maps", "streaming", "streaming_by_sequence", "training", "gates", "retrofit", "value_norms"),
    *("quantization", "quantization_sites"),
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """A file of JSON lines with five sequences, some shorter than `positions` and `window`."""
    path = tmp_path / "ragged.jsonl"
    path.write_text("".join(json.dumps({"input_ids": ids.tolist()}) + "\n" for ids in ragged_tokens(LENGTHS)))
    return path


def run_of(model: PreTrainedModel, source: Any = "random", **options: Any) -> Run:
    defaults = {"num_seqs": 5, "seq_len": 20, "positions": POSITIONS, "window": WINDOW}
    return sinkscope.analyze(model, **defaults | {"input": source} | options)


def forward_of(model: PreTrainedModel, source: Any = "random", **options: Any) -> Run:
    """Measure without a backward pass, so that all passes go through Tracer.forward."""
    return run_of(model, source, observables=("activation", "attention", "geometry", "massive", "outlier"), **options)


def assert_equal_tables(mine: Run, other: Run, tolerance: float = 0.0) -> None:
    assert mine.tables.keys() == other.tables.keys()
    for name, table in mine.tables.items():
        pd.testing.assert_frame_equal(table, other.tables[name], rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------------------------------- the numbers


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "falcon-alibi"])
def test_the_tables_are_the_references(name: str, lines: Path) -> None:
    """Ragged sequences are padded in batches of two."""
    model = tiny_model(name)
    twin = reference.eager_twin(model)
    recorded = [reference.record(twin, ids) for ids in ragged_tokens(LENGTHS)]
    epsilon = reference.clear_threshold(recorded, WINDOW)
    run = run_of(model, lines, batch_size=2, epsilon=epsilon)
    reference.assert_same(dict(run.tables), reference.tables(recorded, POSITIONS, WINDOW, epsilon), 1e-5)


def test_neither_kernel_nor_repetition_changes_a_table(model: PreTrainedModel, lines: Path) -> None:
    fused, again, eager = (run_of(model, lines, attn=kernel) for kernel in ("sdpa", "sdpa", "eager"))
    assert eager.manifest["kernel"] == "eager"
    assert_equal_tables(fused, again)  # bit for bit
    assert_equal_tables(fused, eager, tolerance=1e-5)
    assert fused.manifest["input"] == again.manifest["input"]
    hashes = {forward_of(model, seed=seed).manifest["input"]["sha256"] for seed in (0, 1)}
    assert len(hashes) == 2


# ------------------------------------------------------------------------------- tables and sites


@pytest.mark.parametrize(
    ("observables", "tables"),
    [
        (
            ("attention",),
            {
                *("attention", "attention_heads", "attention_by_sequence", "attention_heads_by_sequence"),
                *("sink_positions", "attention_maps"),
            },
        ),
        (("massive",), {"massive", "massive_elsewhere", "massive_map"}),
        (("geometry", "outlier"), {"geometry", "geometry_by_sequence", "outlier", "outlier_norms"}),
        (None, set(all_tables()) - {"summary"} - ABSENT),
    ],
)
def test_only_the_chosen_observables_are_measured(
    model: PreTrainedModel, observables: tuple[str, ...] | None, tables: set[str]
) -> None:
    run = run_of(model, observables=observables)
    assert set(run.tables) == tables | {"summary", "finding"}
    assert run.manifest["tables"] == sorted(run.tables)


def test_a_subset_reads_only_its_sites(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """All other addresses are invalid, so that reading one would fail."""
    (row,) = FAMILIES["llama"]
    nowhere = dict.fromkeys(row.sites, "no.such.module.output") | {"layer_out": "output"}
    whole = run_of(model, observables=("attention", "massive"))
    monkeypatch.setitem(FAMILIES, "llama", (replace(row, sites=nowhere),))
    assert_equal_tables(run_of(model, observables=("attention", "massive")), whole)
    with pytest.raises(AttributeError):
        run_of(model, observables=("activation",))


def test_tables_have_their_published_columns(model: PreTrainedModel, lines: Path) -> None:
    run = run_of(model, lines)
    for name, table in run.tables.items():
        assert table.columns.tolist() == [*LEADING, *names_of(Run.columns[name])]
        assert set(table["model"]) == {"LlamaForCausalLM"}
        assert set(table["condition"]) == {"ragged"}
    assert sorted(run.tables["attention"]["position"].unique()) == list(range(POSITIONS))
    assert run.tables["sink_positions"]["position"].max() >= POSITIONS  # sinks are looked for at every position


def test_positions_and_window_are_cut_to_the_longest_sequence(model: PreTrainedModel, tmp_path: Path) -> None:
    path = tmp_path / "short.jsonl"
    path.write_text("".join(json.dumps({"input_ids": ids.tolist()}) + "\n" for ids in ragged_tokens((4, 6))))
    run = run_of(model, path, num_seqs=2)
    attention = run.tables["attention"]
    assert sorted(attention["position"].unique()) == list(range(6))
    assert attention.notna().all(axis=None)
    np.testing.assert_allclose(attention["window_mass"], attention["sink_mass"], rtol=1e-5)


# ------------------------------------------------------------------------------------------ a close look


def test_maps_are_those_of_the_first_sequence(model: PreTrainedModel, lines: Path) -> None:
    """The maps show the weights of some heads, and the magnitudes in the layer with the largest ratio."""
    run = run_of(model, lines)
    recorded = reference.record(reference.eager_twin(model), ragged_tokens(LENGTHS)[0])
    maps = run.tables["attention_maps"]
    assert 1 <= len(maps.groupby(["layer", "head"])) <= 6
    for (layer, head), rows in maps.groupby(["layer", "head"]):
        assert len(rows) == 20 * 21 / 2
        weights = recorded.layers[layer].weights[head]
        np.testing.assert_allclose(rows["weight"], weights[rows["query"], rows["key"]], rtol=1e-4, atol=1e-8)
        assert rows["token_id"].tolist() == recorded.ids[rows["key"]].tolist()
    layer = run.tables["massive"].loc[run.tables["massive"]["ratio"].idxmax(), "layer"]
    rows = run.tables["massive_map"]
    assert set(rows["layer"]) == {layer}
    hidden = np.abs(recorded.layers[layer].sites["layer_out"])
    np.testing.assert_allclose(rows["magnitude"], hidden[rows["position"], rows["coordinate"]], rtol=1e-4)
    assert set(rows[rows["is_top"]]["coordinate"]) == set(np.argsort(hidden.max(0))[-TOP_COORDINATES:])
    assert TOP_COORDINATES < rows["coordinate"].nunique() <= TOP_COORDINATES + OTHER_COORDINATES
    longer = run_of(model, seq_len=100, observables=("attention",)).tables["attention_maps"]
    assert longer["query"].max() == longer["key"].max() == 63


# ------------------------------------------------------------------------------------------ out of memory

OUT_OF_MEMORY = {
    "gpu": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "cpu": RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to …"),
}


@pytest.mark.parametrize(("kind", "where"), [("gpu", "tracer"), ("cpu", "model"), ("cpu", "observable")])
def test_out_of_memory_halves_the_batch(kind: str, where: str, lines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch is also halved if nnsight passes the error on; earlier sums are discarded."""
    model, tried = tiny_model("llama"), []
    expected = forward_of(model, lines, batch_size=2)

    def check(sequences: int) -> None:
        tried.append(sequences)
        if sequences > 2:
            raise OUT_OF_MEMORY[kind]

    def checked(plain: Any, batch_at: int) -> Any:
        return lambda *args: check(len(args[batch_at].lengths)) or plain(*args)

    if where == "tracer":
        monkeypatch.setattr(Tracer, "forward", checked(Tracer.forward, 1))
    elif where == "model":
        model.model.layers[2].register_forward_pre_hook(lambda module, args: check(len(args[0])))
    else:
        monkeypatch.setattr(Outlier, "see", checked(Outlier.see, 4))
    run = forward_of(model, lines, batch_size=5)
    batches = [size for size in tried if size > 1]  # the parity check reads single sequences
    assert batches[:2] == [5, 2]  # 5 // 2
    assert run.manifest["batch_size"] == 2
    assert_equal_tables(run, expected)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), SinkscopeError, r"even with one sequence.*--seq-len"),
        (RuntimeError("size mismatch"), RuntimeError, "size mismatch"),  # this is not taken for a lack of memory
    ],
)
def test_errors_that_no_smaller_batch_prevents(
    error: Exception, kind: type, message: str, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def broken(*args: Any) -> None:
        calls.append(1)
        raise error

    monkeypatch.setattr(Tracer, "forward", broken)
    with pytest.raises(kind, match=message) as failure:
        forward_of(model)
    assert not isinstance(failure.value, InputError)
    assert kind is SinkscopeError or len(calls) == 1


def test_out_of_memory_late_in_the_run_starts_anew(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, calls = Tracer.forward, []

    def third_is_too_much(self: Tracer, batch: Any, *args: Any) -> None:
        calls.append(len(batch.lengths))
        if len(calls) == 3:
            raise OUT_OF_MEMORY["gpu"]
        forward(self, batch, *args)

    expected = forward_of(model, batch_size=1)
    monkeypatch.setattr(Tracer, "forward", third_is_too_much)
    run = forward_of(model, batch_size=2)
    assert calls == [2, 2, 1, 1, 1, 1, 1, 1, 1]  # the last batch of two sizes; then five of one, and the close look
    assert run.manifest["batch_size"] == 1
    assert_equal_tables(run, expected)


def test_the_automatic_batch_size_is_a_number_of_tokens(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "TOKENS_PER_BATCH", {"cpu": 60})
    assert forward_of(model, seq_len=20, num_seqs=9).manifest["batch_size"] == 3
    assert forward_of(model, seq_len=100, num_seqs=2).manifest["batch_size"] == 1
    assert forward_of(model, seq_len=20, num_seqs=2).manifest["batch_size"] == 2  # at most all sequences
    assert run_of(model, seq_len=20, num_seqs=9).manifest["batch_size"] == 1  # a backward pass takes more


# ------------------------------------------------------------------------------------------ the run folder


def test_a_run_folder_holds_what_was_measured(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sinkscope.figures.applicable", lambda run: ["sink-map"])  # drawing all takes ten seconds
    run = run_of(model, out=tmp_path / "run")
    again = Run.open(tmp_path / "run")
    assert {**again.manifest, "files": None} == {**json.loads(json.dumps(run.manifest)), "files": None}
    assert_equal_tables(run, again)
    written = {"run.json", "tables", "figures", "verdict.md", "index.html"}
    assert {path.name for path in (tmp_path / "run").iterdir()} == written
    assert (tmp_path / "run" / "verdict.md").read_text().strip() == run.verdict.strip()


def test_the_manifest_says_how_to_read_the_numbers(model: PreTrainedModel) -> None:
    manifest = run_of(model).manifest
    wired = {"name": "llama", "wiring": "sequential", "positions": "rotary", "door": "interface"}
    absent = dict.fromkeys(("kinds", "unknown", "copies", "layer_positions"))
    assert manifest["family"] == wired | absent | {"gated": False, "causal": True, "prefix": 0}
    assert manifest["scaling"] == pytest.approx([8**-0.5] * 3)
    assert manifest["dtype"] == "float32"
    assert manifest["kernel"] == "sdpa"
    assert manifest["input"]["sequences"] == 5
    assert manifest["input"]["tokens"] == 100
    assert manifest["model"]["parameters"] == sum(p.numel() for p in model.parameters())
    assert json.loads(json.dumps(manifest, allow_nan=False)) == manifest  # JSON has no NaN
    assert AnalyzeOptions(**manifest["config"]).positions == POSITIONS
    parallel = run_of(tiny_model("phi"), observables=("attention",)).manifest
    assert set(parallel["absent"]) == {"mid", "mlp_norm"}
    assert "parallel" in parallel["absent"]["mid"]
    unknown = run_of(tiny_model("bloom"), observables=("attention",)).manifest  # its scaling cannot be read
    assert unknown["scaling"] == [None] * 3
    assert json.dumps(unknown, allow_nan=False)
    sliding = run_of(tiny_model("gemma3"), observables=("attention",)).manifest["model"]
    assert sliding["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]
    assert sliding["sliding_window"] == 6


# -------------------------------------------------------------------------------- families and inputs


def test_a_calibrated_family_is_said(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    whole = run_of(model)
    monkeypatch.setattr(families, "FAMILIES", {kind: rows for kind, rows in FAMILIES.items() if kind != "llama"})
    run = run_of(model, quiet=False)
    assert "'llama' has no row in the table of families: wired numerically as sequential" in capsys.readouterr().err
    assert_equal_tables(run, whole)


def test_an_architecture_that_cannot_be_calibrated_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = AutoConfig.for_model("diffllama", vocab_size=VOCAB, intermediate_size=8, **sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(InputError, match=r"'diffllama' has no row(.|\n)*layer 0 attends 2 times"):
        run_of(model, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
