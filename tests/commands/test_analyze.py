"""A run from end to end on tiny models: what is measured, what is recorded, what happens when memory runs out."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import reference
import torch
from tiny import VOCAB, padded, ragged_tokens, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import sinkscope
from sinkscope.errors import InputError, SinkscopeError
from sinkscope.measuring import passes
from sinkscope.measuring.observables.close_ups import OTHER_COORDINATES, TOP_COORDINATES, telling_heads
from sinkscope.measuring.passes import batches_of
from sinkscope.measuring.subject import inputs_for
from sinkscope.measuring.tables import all_tables
from sinkscope.measuring.tracer import Tracer
from sinkscope.models import families
from sinkscope.models.families import FAMILIES
from sinkscope.models.loading import LoadedModel
from sinkscope.options.measuring import AnalyzeOptions, make_config
from sinkscope.output.run import Run
from sinkscope.results.tables import LEADING, names_of

LENGTHS = (20, 7, 13, 20, 3)
POSITIONS, WINDOW = 10, 6
ABSENT = {
    "query_bias",
    "query_bias_by_sequence",
    "gamma",
    "delta_distribution",
    "logit_terms_by_sequence",
    "epe_by_group",
    "epe_rest_by_sequence",
    "window_edge_by_sequence",
    "equal_tokens",
    "gate",
    "attention_outside",
}  # of what a plain Llama does not have, or not on this input
ARMS = {
    "effect",
    "arm_maps",
    "streaming",
    "streaming_by_sequence",
    "training",
    "gates",
    "retrofit",
    "value_norms",
    "quantization",
    "quantization_sites",
}  # of other commands


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """Five sequences, some shorter than `positions` and `window`, as JSON lines."""
    path = tmp_path / "ragged.jsonl"
    path.write_text("".join(json.dumps({"input_ids": ids.tolist()}) + "\n" for ids in ragged_tokens(LENGTHS)))
    return path


def run_of(model: PreTrainedModel, source: Any = "random", **options: Any) -> Run:
    defaults = {"num_seqs": 5, "seq_len": 20, "positions": POSITIONS, "window": WINDOW}
    return sinkscope.analyze(model, **defaults | {"input": source} | options)


def forward_of(model: PreTrainedModel, source: Any = "random", **options: Any) -> Run:
    """Without the backward pass, which Tracer.forward_backward makes."""
    return run_of(model, source, observables=("activation", "attention", "geometry", "massive", "outlier"), **options)


def assert_equal_tables(mine: Run, other: Run, tolerance: float = 0.0) -> None:
    assert mine.tables.keys() == other.tables.keys()
    for name, table in mine.tables.items():
        pd.testing.assert_frame_equal(table, other.tables[name], rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------------------------------- the numbers


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "falcon-alibi"])
def test_the_tables_are_the_references(name: str, lines: Path) -> None:
    """Ragged sequences, padded in batches of two, through the whole of `analyze`."""
    model = tiny_model(name)
    twin = reference.eager_twin(model)
    recorded = [reference.record(twin, ids) for ids in ragged_tokens(LENGTHS)]
    epsilon = reference.clear_threshold(recorded, WINDOW)
    run = run_of(model, lines, batch_size=2, epsilon=epsilon)
    reference.assert_same(dict(run.tables), reference.tables(recorded, POSITIONS, WINDOW, epsilon), 1e-5)


def test_token_ids_of_an_npy_file_are_measured(model: PreTrainedModel, tmp_path: Path) -> None:
    ids = np.stack(ragged_tokens((20,) * 3))
    np.save(tmp_path / "mine.npy", ids)
    run = run_of(model, tmp_path / "mine.npy", num_seqs=3)
    twin = reference.eager_twin(model)
    recorded = [reference.record(twin, row) for row in ids]
    expected = {"activation": reference.activation(recorded, POSITIONS)}
    reference.assert_same(dict(run.tables), expected, 1e-5)
    assert run.condition == "mine"
    assert run.tables["massive"].set_index(["sequence", "position"])["token_id"].to_dict() == {
        (sequence, position): ids[sequence, position]
        for sequence, position in zip(run.tables["massive"]["sequence"], run.tables["massive"]["position"], strict=True)
    }


def test_the_eager_kernel_measures_the_same(model: PreTrainedModel, lines: Path) -> None:
    fused, eager = (run_of(model, lines, attn=kernel) for kernel in ("sdpa", "eager"))
    assert eager.manifest["kernel"] == "eager"
    assert_equal_tables(fused, eager, tolerance=1e-5)


def test_the_batch_size_changes_nothing(model: PreTrainedModel, lines: Path) -> None:
    whole = run_of(model, lines, batch_size=5)
    for size in (1, 2, 3):
        run = run_of(model, lines, batch_size=size)
        assert run.manifest["batch_size"] == size
        assert_equal_tables(run, whole, tolerance=1e-5)


def test_a_run_repeats_bit_for_bit(model: PreTrainedModel) -> None:
    first, second = (run_of(model) for _ in range(2))
    assert_equal_tables(first, second)
    assert first.manifest["input"] == second.manifest["input"]
    other = run_of(model, seed=1)
    assert other.manifest["input"]["sha256"] != first.manifest["input"]["sha256"]


def test_repeated_tokens_are_all_alike_to_a_rotary_model_and_not_to_one_with_learned_positions() -> None:
    """WSE, propositions 1 to 4: equal tokens stay equal, so no position has a larger norm."""
    for name, alike in (("llama", True), ("bloom", True), ("gpt2", False)):
        table = run_of(tiny_model(name), "repeated").tables["activation"]
        norms = table[table["site"] == "layer_out"].groupby("layer")["norm_mean"]
        spread = (norms.max() / norms.min() - 1).max()
        assert bool(spread < 1e-4) is alike, name


# ------------------------------------------------------------------------------- what is measured of what


@pytest.mark.parametrize(
    ("observables", "tables"),
    [
        (
            ("attention",),
            {
                "attention",
                "attention_heads",
                "attention_by_sequence",
                "attention_heads_by_sequence",
                "sink_positions",
                "attention_maps",
            },
        ),
        (("massive",), {"massive", "massive_elsewhere", "massive_map"}),
        (("geometry", "outlier"), {"geometry", "geometry_by_sequence", "outlier", "outlier_norms"}),
        (None, set(all_tables()) - {"summary"} - ABSENT - ARMS),
    ],
)
def test_only_the_chosen_observables_are_measured(
    model: PreTrainedModel, observables: tuple[str, ...] | None, tables: set[str]
) -> None:
    run = run_of(model, observables=observables)
    assert set(run.tables) == tables | {"summary", "finding"}
    assert run.manifest["tables"] == sorted(run.tables)


def test_a_subset_reads_only_its_sites(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other address leads nowhere here."""
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


def test_a_position_that_few_sequences_have_is_the_mean_over_those(model: PreTrainedModel, lines: Path) -> None:
    run = run_of(model, lines, num_seqs=5)
    longest = run_of(model, lines, num_seqs=1)
    assert LENGTHS[0] == max(LENGTHS)
    few = run.tables["activation"].query("position == 9 and site == 'layer_out'")
    assert few["norm_max"].gt(few["norm_mean"]).all()  # three of five
    alone = longest.tables["activation"].query("position == 9 and site == 'layer_out'")
    np.testing.assert_allclose(alone["norm_max"], alone["norm_mean"], rtol=1e-6)  # one of one


# ------------------------------------------------------------------------------------------ a close look


def test_attention_maps_are_the_first_sequences_weights(model: PreTrainedModel, lines: Path) -> None:
    maps = run_of(model, lines).tables["attention_maps"]
    recorded = reference.record(reference.eager_twin(model), ragged_tokens(LENGTHS)[0])
    assert 1 <= len(maps.groupby(["layer", "head"])) <= 6
    for (layer, head), rows in maps.groupby(["layer", "head"]):
        assert len(rows) == 20 * 21 / 2
        weights = recorded.layers[layer].weights[head]
        np.testing.assert_allclose(rows["weight"], weights[rows["query"], rows["key"]], rtol=1e-4, atol=1e-8)
        assert rows["token_id"].tolist() == recorded.ids[rows["key"]].tolist()


def test_attention_maps_stop_at_64_tokens(model: PreTrainedModel) -> None:
    maps = run_of(model, seq_len=100).tables["attention_maps"]
    assert maps["query"].max() == maps["key"].max() == 63


def test_the_massive_map_is_of_the_layer_with_the_largest_ratio(model: PreTrainedModel, lines: Path) -> None:
    run = run_of(model, lines)
    layer = run.tables["massive"].loc[run.tables["massive"]["ratio"].idxmax(), "layer"]
    rows = run.tables["massive_map"]
    assert set(rows["layer"]) == {layer}
    recorded = reference.record(reference.eager_twin(model), ragged_tokens(LENGTHS)[0])
    hidden = np.abs(recorded.layers[layer].sites["layer_out"])
    np.testing.assert_allclose(rows["magnitude"], hidden[rows["position"], rows["coordinate"]], rtol=1e-4)
    top = set(np.argsort(hidden.max(0))[-TOP_COORDINATES:])
    assert set(rows[rows["is_top"]]["coordinate"]) == top
    assert TOP_COORDINATES < rows["coordinate"].nunique() <= TOP_COORDINATES + OTHER_COORDINATES


def test_telling_heads_show_the_range() -> None:
    """The strongest, the weakest and quantiles at position 0, and the strongest elsewhere."""
    rows = [(layer, head, 0, (10 * layer + head) / 100) for layer in range(3) for head in range(3)]
    rows += [(0, 1, 5, 0.9), (2, 0, 5, 0.95), (1, 1, 3, 0.01)]
    table = pd.DataFrame(rows, columns=["layer", "head", "position", "window_mass"])
    heads = telling_heads(table.sample(frac=1, random_state=0))
    assert {(2, 2), (0, 0), (2, 0)} <= set(heads)  # strongest, weakest, strongest at a later position
    assert heads == sorted(set(heads))
    assert len(heads) <= 6


# ------------------------------------------------------------------------------------------ out of memory

OUT_OF_MEMORY = {
    "gpu": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "cpu": RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to …"),
}


@pytest.mark.parametrize("where", ["in the tracer", "in the model", "in an observable"])
@pytest.mark.parametrize("kind", OUT_OF_MEMORY)
def test_out_of_memory_halves_the_batch(kind: str, where: str, lines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nnsight passes the error on; what was summed before it does not count."""
    model, tried = tiny_model("llama"), []
    expected = forward_of(model, lines, batch_size=2)

    def check(sequences: int) -> None:
        tried.append(sequences)
        if sequences > 2:
            raise OUT_OF_MEMORY[kind]

    if where == "in the tracer":
        forward = Tracer.forward
        monkeypatch.setattr(
            Tracer, "forward", lambda self, batch, *args: check(len(batch.lengths)) or forward(self, batch, *args)
        )
    elif where == "in the model":
        model.model.layers[2].register_forward_pre_hook(lambda module, args: check(len(args[0])))
    else:
        from sinkscope.measuring.observables.outlier import Outlier

        see = Outlier.see
        monkeypatch.setattr(
            Outlier,
            "see",
            lambda self, layer, site, reading, batch: (
                check(len(batch.lengths)),
                see(self, layer, site, reading, batch),
            ),
        )
    run = forward_of(model, lines, batch_size=5)
    batches = [size for size in tried if size > 1]  # what is looked at beforehand is single sequences
    assert batches[:2] == [5, 2]  # 5 // 2
    assert run.manifest["batch_size"] == 2
    assert_equal_tables(run, expected)


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


def test_out_of_memory_with_one_sequence_says_what_to_do(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Tracer, "forward", never)
    with pytest.raises(SinkscopeError, match=r"out of memory even with one sequence.*--seq-len") as failure:
        forward_of(model)
    assert not isinstance(failure.value, InputError)


def test_another_error_is_not_taken_for_want_of_memory(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def broken(*args: Any) -> None:
        calls.append(1)
        raise RuntimeError("size mismatch")

    monkeypatch.setattr(Tracer, "forward", broken)
    with pytest.raises(RuntimeError, match="size mismatch"):
        forward_of(model)
    assert len(calls) == 1


def test_the_automatic_batch_size_is_a_number_of_tokens(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "TOKENS_PER_BATCH", {"cpu": 60})
    assert forward_of(model, seq_len=20, num_seqs=9).manifest["batch_size"] == 3
    assert forward_of(model, seq_len=100, num_seqs=2).manifest["batch_size"] == 1
    assert forward_of(model, seq_len=20, num_seqs=2).manifest["batch_size"] == 2  # no more than there are
    assert run_of(model, seq_len=20, num_seqs=9).manifest["batch_size"] == 1  # a backward pass takes more


# ------------------------------------------------------------------------------------------ the run folder


def test_a_run_folder_holds_what_was_measured(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sinkscope.figures.applicable", lambda run: ["sink-map"])  # all take ten seconds
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
    assert json.loads(json.dumps(manifest, allow_nan=False)) == manifest  # JSON knows no NaN
    assert AnalyzeOptions(**manifest["config"]).positions == POSITIONS


def test_what_does_not_exist_is_recorded_with_its_reason() -> None:
    manifest = run_of(tiny_model("phi")).manifest
    assert set(manifest["absent"]) == {"mid", "mlp_norm"}
    assert "parallel" in manifest["absent"]["mid"]


def test_a_scaling_that_cannot_be_read_off_is_null() -> None:
    manifest = run_of(tiny_model("bloom")).manifest
    assert manifest["scaling"] == [None] * 3
    assert json.dumps(manifest, allow_nan=False)


def test_layer_types_are_recorded() -> None:
    model = run_of(tiny_model("gemma3")).manifest["model"]
    assert model["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]
    assert model["sliding_window"] == 6


def test_the_model_is_as_it_was_and_the_run_cannot_be_told_from_a_second_one(model: PreTrainedModel) -> None:
    ids = torch.as_tensor(np.stack(ragged_tokens((20, 20))))
    with torch.no_grad():
        before = model(ids).logits
        run_of(model)
        assert torch.equal(before, model(ids).logits)
    assert not any("sinkscope" in name for name, _ in model.named_modules())
    assert not any("forward" in vars(module) for module in model.modules())


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


def test_inputs_are_fitted_to_the_model(model: PreTrainedModel) -> None:
    loaded = LoadedModel(model, None, "tiny", "tiny", None, None, ())
    inputs = inputs_for(loaded, make_config(input="random", num_seqs=50, seq_len=40))
    drawn = np.concatenate(inputs.sequences)
    assert drawn.max() < VOCAB
    assert not set(drawn) & {0, 1, 2}  # pad, bos, eos
    with pytest.raises(InputError, match="256 positions"):
        inputs_for(loaded, make_config(input="random", seq_len=300))


def test_batches_count_their_sequences_through(model: PreTrainedModel, lines: Path) -> None:
    loaded = LoadedModel(model, None, "tiny", "tiny", None, None, ())
    inputs = inputs_for(loaded, make_config(input=str(lines), num_seqs=5, seq_len=20))
    for side in ("right", "left"):
        found = list(batches_of(inputs, 2, padding_side=side))
        assert [batch.first for batch in found] == [0, 2, 4]
        for batch in found:
            expected = padded(ragged_tokens(LENGTHS)[batch.first : batch.first + 2], side)
            assert torch.equal(batch.attention_mask, expected.attention_mask)
            assert torch.equal(batch.token_ids * batch.attention_mask, expected.token_ids * expected.attention_mask)
