"""`intervene` from end to end on tiny models: every arm equals a model of plain transformers that is edited by hand."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import reference
import torch
from rich.console import Console
from support.figures import skip_figures
from support.retrofit_command import command_line, succeeded
from support.tables import assert_same_tables
from tiny import ragged_tokens, tiny_model, tiny_tokens, written
from transformers import PreTrainedModel

import sinkscope
from sinkscope import InputError, Run, SinkscopeError, intervene, retrofit_model
from sinkscope.commands.intervene.command import wanted_arms
from sinkscope.commands.intervene.experiment import Experiment
from sinkscope.commands.intervene.findings import effect_of
from sinkscope.commands.intervene.options import InterveneOptions
from sinkscope.interventions import parse_all
from sinkscope.measuring.subject import inputs_for, load_model, open_subject
from sinkscope.measuring.summary import with_next
from sinkscope.measuring.tracer import Tracer
from sinkscope.options.measuring import make_config
from sinkscope.options.option import checked

SMALL: dict[str, Any] = {"input": "random", "num_seqs": 4, "seq_len": 20, "positions": 8, "window": 12}


@pytest.fixture(scope="module")
def gpt2() -> PreTrainedModel:
    """A GPT-2 with a massive coordinate in EPE_0, which causes a strong sink."""
    model = tiny_model("gpt2")
    model.transformer.wpe.weight[0, 7] = 60.0
    return model


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def all_of_gpt2(gpt2: PreTrainedModel) -> Run:
    return intervene(gpt2, arms="all", draws=2, **SMALL)


def plain_perplexity(model: PreTrainedModel, sequences: list[np.ndarray]) -> float:
    losses = []
    for ids in sequences:
        tokens = torch.as_tensor(ids)[None]
        logits = model(tokens).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits.double(), tokens[0, 1:], reduction="none"))
    return float(torch.cat(losses).mean().exp())


def edited(model: PreTrainedModel, columns: bool = False) -> PreTrainedModel:
    twin = copy.deepcopy(model)
    for block in twin.transformer.h:
        block.attn.c_attn.bias[:32] = 0.0
        if columns:
            block.attn.c_attn.weight[7, 32:64] = 0.0
    return twin


def inputs_of(model: PreTrainedModel) -> list[np.ndarray]:
    config = make_config(**SMALL)
    return list(inputs_for(load_model(model, None, config), config).sequences)


def test_after_is_what_plain_transformers_give_of_an_edited_copy(gpt2: PreTrainedModel, all_of_gpt2: Run) -> None:
    twin, sequences = edited(gpt2), inputs_of(gpt2)
    recorded = reference.record_each(twin, sequences)
    expected = reference.attention(recorded, 12, 12, 0.3)  # `isolate` watches positions 10 and 11
    after = all_of_gpt2.at("nullify-query-bias").tables
    tables, keys = (after["attention"], expected), ["layer", "head", "position"]
    for column in ("window_mass", "sink_mass", "sink_rate"):
        mine, theirs = (table.set_index(keys)[column].sort_index().to_numpy() for table in tables)
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)
    effect = effect_of(all_of_gpt2, "nullify-query-bias", "perplexity")
    assert effect.before == pytest.approx(plain_perplexity(gpt2, sequences), rel=1e-5)
    assert effect.after == pytest.approx(plain_perplexity(twin, sequences), rel=1e-5)
    mass = expected.query("position == 0")["window_mass"].mean()
    assert effect_of(all_of_gpt2, "nullify-query-bias", "window_mass", 0).after == pytest.approx(mass, rel=1e-4)
    for layer in range(3):
        weights = np.stack([one.layers[layer].weights for one in recorded])
        rows = after["arm_maps"].query(f"layer == {layer}")  # means over heads and sequences
        mine = np.zeros(weights.shape[-2:])
        mine[rows["query"], rows["key"]] = rows["weight"]
        np.testing.assert_allclose(mine, weights.mean((0, 1)), atol=1e-5)


def test_a_stack_on_sequences_of_different_lengths(gpt2: PreTrainedModel, tmp_path: Path) -> None:
    sequences = ragged_tokens((20, 9, 14))
    path = written(tmp_path / "ragged.jsonl", sequences)
    do = ["nullify-query-bias", "zero-key-columns:coordinates=7"]
    run = intervene(gpt2, do, draws=1, **SMALL | {"input": str(path), "num_seqs": 3})
    (label,) = run.manifest["arms"]
    arm = run.manifest["arms"][label]
    assert (arm["do"], arm["expects"], arm["paper"]) == (do, "", "")  # no paper says what both do
    expected = plain_perplexity(edited(gpt2, columns=True), sequences)
    assert effect_of(run, label, "perplexity").after == pytest.approx(expected, rel=1e-5)
    assert run.tables["arm_maps"].query("condition == 'before'")["query"].max() == 19
    run.verdict  # noqa: B018


def test_a_stack_watches_the_positions_of_all_its_parts(llama: PreTrainedModel) -> None:
    run = intervene(llama, ["isolate:positions=2", "isolate:positions=5+2"], draws=0, **SMALL)
    ((label, arm),) = run.manifest["arms"].items()
    assert arm["watched"] == [2, 5]
    positions = run.tables["effect"].query("metric == 'sink_rate'")["position"]
    assert {2, 5} <= set(positions)
    with pytest.raises(InputError, match="is an arm of an experiment: analyze its model within `intervening`"):
        run.at(label).attention(0)
    torch.testing.assert_close(run.at("before").attention(0, model=llama), run.attention(0, model=llama))


def test_the_tables_hold_every_arm(gpt2: PreTrainedModel, all_of_gpt2: Run) -> None:
    arms = set(all_of_gpt2.manifest["arms"]) - {"streaming-window"}
    assert "perturb-query-bias" not in arms  # it is a control
    controls = {f"{arm} control {draw}" for arm in arms for draw in range(2)}
    assert set(all_of_gpt2.tables["attention"]["condition"]) == {"before", *arms, *controls}
    watched = {0, *(x for arm in arms for x in with_next(all_of_gpt2.manifest["arms"][arm]["watched"]))}
    mapped = {"before", *arms, *(f"{arm} control 0" for arm in arms)}
    assert set(all_of_gpt2.tables["arm_maps"]["condition"]) == mapped
    by_sequence = all_of_gpt2.tables["attention_by_sequence"].groupby("condition")["position"].unique()
    assert all(
        set(positions) == (watched if arm in controls else {*range(12)}) for arm, positions in by_sequence.items()
    )
    effect = all_of_gpt2.tables["effect"]
    assert list(effect.columns) == [
        *("model", "condition", "layer", "name", "arm", "draw", "metric", "position", "value"),
    ]  # fmt: skip
    assert effect.query("arm == 'control'").groupby("condition")["draw"].nunique().eq(2).all()
    assert set(all_of_gpt2.tables["streaming"]["keep"]) == {0, 1, 2, 4}
    before = all_of_gpt2.at("before")
    alone = sinkscope.analyze(gpt2, observables=("attention",), **SMALL).tables["attention"].drop(columns="condition")
    table = before.tables["attention"].query("position < 8")
    table = table.drop(columns="condition").reset_index(drop=True)
    pd.testing.assert_frame_equal(table, alone)
    with pytest.raises(InputError, match="shows a single arm"):
        all_of_gpt2.figure("sink-map")
    with pytest.raises(InputError, match="arm 'befor' is unknown; did you mean 'before'"):
        all_of_gpt2.at("befor")
    record = all_of_gpt2.manifest["arms"]["zero-key-columns"]  # its open parameter is recorded
    assert (record["asked"], record["do"]) == (["zero-key-columns"], ["zero-key-columns:coordinates=7"])
    assert all("coordinates=7" not in part for draw in record["controls"] for part in draw)


def test_all_skips_what_does_not_apply_or_changes_nothing(llama: PreTrainedModel) -> None:
    run = intervene(llama, arms="all", draws=0, **SMALL | {"seq_len": 9, "window": 9})
    assert run.manifest["skipped"]["isolate"] == "there is no position 10: the sequences have 9, from 0 on"
    assert {"replace-epe", "transplant-epe", "nullify-query-bias"} <= set(run.manifest["skipped"])
    assert "no bias" in run.manifest["skipped"]["nullify-query-bias"]
    assert {"mask-sink", "scale-sink-value", "nullify-first-embedding"} <= set(run.manifest["arms"])
    assert "`nullify-query-bias` does not apply" in run.verdict
    plain = tiny_model("gpt2")
    for block in plain.transformer.h:
        block.attn.c_attn.bias.zero_()
    run = intervene(plain, arms="all", draws=0, **SMALL)
    assert "nullify-query-bias" in run.manifest["skipped"]
    assert run.manifest["failed"] == {}
    assert "mask-sink" in run.manifest["arms"]


def test_mean_massive_puts_the_mean_over_sequences(llama: PreTrainedModel) -> None:
    run = intervene(llama, "mean-massive:layers=1,positions=2,coordinates=3", draws=1, **SMALL)
    hidden = llama(torch.as_tensor(np.stack(inputs_of(llama))), output_hidden_states=True).hidden_states[2]
    (said,) = run.manifest["arms"]["mean-massive"]["do"]
    assert float(said.split("means=")[1].split(",")[0]) == pytest.approx(float(hidden[:, 2, 3].mean()), rel=1e-5)


def test_a_stack_is_applied_in_its_order(llama: PreTrainedModel) -> None:
    first, second = (f"mean-massive:layers=1,coordinates=3,means={mean}" for mean in ("10.0", "20.0"))
    run = intervene(llama, arms={"both": [first, second], "second": second}, draws=0, **SMALL | {"num_seqs": 2})
    both, last = (effect_of(run, label, "perplexity").after for label in ("both", "second"))
    assert both == last


def test_a_control_in_an_earlier_layer_is_what_it_is_as_an_arm(llama: PreTrainedModel) -> None:
    options = SMALL | {"num_seqs": 2}
    last = f"ablate-heads:numbers={llama.config.num_hidden_layers * llama.config.num_attention_heads - 1}"
    run = intervene(llama, last, draws=2, **options)
    ((label, arm),) = run.manifest["arms"].items()
    arms = {str(draw): do for draw, do in enumerate(arm["controls"])}
    alone = intervene(llama, arms=arms, draws=0, **options)
    expected = [effect_of(alone, draw, "perplexity").after for draw in arms]
    assert effect_of(run, label, "perplexity").controls == pytest.approx(expected)


@pytest.mark.parametrize(("name", "projection"), [("llama", "v_proj"), ("gpt2", "c_attn")])
def test_mean_sink_value_puts_the_mean_over_sequences(name: str, projection: str) -> None:
    """The same edit by hooks on the plain model, in float64; the means are those of the unchanged model."""
    model = tiny_model(name, spread=1.0).double()
    modules = [module for path, module in model.named_modules() if path.endswith(projection)][1:3]
    twin = copy.deepcopy(model)
    edited = [module for path, module in twin.named_modules() if path.endswith(projection)][1:3]
    means = []
    for module in modules:
        module.register_forward_hook(lambda _, args, x: means.append(x[:, 0].mean(0)))
    model(torch.as_tensor(np.stack(inputs_of(model))))
    for module in modules:
        module._forward_hooks.clear()
    for module, mean in zip(edited, means, strict=True):
        first = 64 if name == "gpt2" else 0  # the values are the last third of the output of gpt2's projection

        def constant(_, args, x, mean=mean, first=first):
            x = x.clone()
            x[:, 0, first:] = mean[first:]
            return x

        module.register_forward_hook(constant)
    do = "mean-sink-value:layers=1+2"
    run = intervene(model, do, draws=1, **SMALL)
    (label,) = run.manifest["arms"]
    effect = effect_of(run, label, "perplexity")
    assert effect.after == pytest.approx(plain_perplexity(twin, inputs_of(model)), rel=1e-9)
    assert effect.after != pytest.approx(effect.before, rel=1e-6)
    assert run.manifest["arms"][label]["do"] == [do]  # the means are many, and are measured again
    one_by_one = intervene(model, do, draws=1, **SMALL, batch_size=1)
    assert effect_of(one_by_one, label, "perplexity").after == pytest.approx(effect.after, rel=1e-9)


def test_controls_are_drawn_by_the_seed(gpt2: PreTrainedModel) -> None:
    def controls(do: str, **options: Any) -> list:
        run = intervene(gpt2, do, draws=3, **SMALL | {"num_seqs": 1} | options)
        return run.manifest["arms"][do.partition(":")[0]]["controls"]

    first, again, reseeded = (controls("zero-key-columns:coordinates=7", seed=seed) for seed in (0, 0, 1))
    assert first == again != reseeded
    assert len({str(draw) for draw in first}) == 3
    others = "+".join(map(str, range(16, 32)))
    assert controls("zero-key-columns:coordinates=0-15") == [[f"zero-key-columns:coordinates={others}"]]
    few = controls("mask-sink", seq_len=4, positions=2, window=4)  # of two that are possible
    assert sorted(few) == [["mask-sink:positions=1"], ["mask-sink:positions=2"]]


@pytest.mark.parametrize("registers", [0, 2])
def test_a_position_below_0_is_counted_from_the_end_of_the_sequences(llama: PreTrainedModel, registers: int) -> None:
    model = retrofit_model(copy.deepcopy(llama), None, "register-tokens", count=registers) if registers else llama
    length, settings = 12 + registers, SMALL | {"input": "random", "seq_len": 12, "draws": 1}
    last, same = (intervene(model, do=f"mask-sink:positions={position}", **settings) for position in (-3, length - 3))
    assert last.manifest["arms"]["mask-sink"]["watched"] == [length - 3, length - 2]
    for name, table in last.tables.items():
        pd.testing.assert_frame_equal(table, same.tables[name])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"do": "zero-massive:layers=3,coordinates=1"}, "no layer 3"),
        ({"arms": {"first": "mask-sink", "second": "zero-massive"}}, "no massive activations"),
        ({"do": "streaming-window:window=64"}, "window"),
        ({}, "name what to do"),
        ({"arms": {"before": "mask-sink"}}, "cannot be called 'before'"),
        ({"arms": {"x": []}}, "does nothing"),
        ({"do": ["mask-sink", "streaming-window"]}, "needs an arm of its own"),
        (
            {"do": "mask-sink:positions=-1", "input": ragged_tokens([9, 12])},
            "from the end, and the sequences have 9 to 12 tokens",
        ),
        ({"do": "mask-sink:positions=10", "input": ragged_tokens([9, 12])}, "no position 10"),
        ({"do": "mask-sink:positions=-14", "input": ragged_tokens([12])}, "no position -14: the sequences have 12"),
        ({"do": "mask-sink", "observables": ("query-bias",)}, "observables=query-bias does not apply"),
    ],
)
def test_wrong_experiments(gpt2: PreTrainedModel, llama: PreTrainedModel, options: dict, message: str) -> None:
    model = llama if "query-bias" in message and "observables" in options else gpt2
    ids, before = tiny_tokens(1, 12), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    logits = model(ids).logits
    with pytest.raises(InputError, match=message):
        intervene(model, **{"draws": 0} | SMALL | options)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model(ids).logits, logits)


OPTIONS = ("--input", "random", "--num-seqs", 3, "--seq-len", 16)
ARMS = {"first": "mask-sink", "second": "scale-sink-value", "third": "nullify-first-embedding"}


def failing_at(call: int, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Raise an error in the call-th pass over the text; the model, each arm and each control take one pass."""
    forward, calls = Tracer.forward_with_loss, []

    def failing(self: Tracer, *args: Any) -> float:
        calls.append(1)
        if len(calls) == call:
            raise error
        return forward(self, *args)

    monkeypatch.setattr(Tracer, "forward_with_loss", failing)


@pytest.mark.parametrize("call", [4, 5])  # the second arm itself, and its control
def test_an_arm_that_fails_takes_no_other_with_it(
    llama: PreTrainedModel, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete = intervene(llama, arms=ARMS, draws=1, **SMALL)
    with monkeypatch.context() as patched:
        failing_at(call, patched, RuntimeError("broken\nin two"))
        run = intervene(llama, arms=ARMS, draws=1, **SMALL)
    assert list(run.manifest["arms"]) == ["first", "third"]
    assert run.manifest["failed"] == {"second": "RuntimeError: broken in two"}
    assert "`second` could not be measured: RuntimeError: broken in two" in run.verdict
    others = {name: table[~table["condition"].str.startswith("second")] for name, table in complete.tables.items()}
    others = {name: table.reset_index(drop=True) for name, table in others.items()}
    assert_same_tables(run.tables, others, check_exact=True)


def test_an_interrupt_keeps_the_finished_arms_and_names_those_that_would_have_followed(
    llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_at(3, monkeypatch, KeyboardInterrupt())  # in the second arm
    with pytest.raises(SinkscopeError, match=r"^interrupted: 1 of \d+ arms are kept in "):
        intervene(llama, arms="all", draws=0, out=tmp_path / "run", figures=(), page=False, **SMALL)
    manifest = Run.open(tmp_path / "run").manifest
    followed = set(wanted_arms("all")) - {*manifest["arms"], *manifest["skipped"]}
    assert len(manifest["arms"]) == 1
    assert "nullify-query-bias" in manifest["skipped"]
    assert manifest["failed"] == dict.fromkeys(followed, "interrupted")


def test_an_arm_that_fails_ends_the_command_with_status_1(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_figures: None
) -> None:
    failing_at(3, monkeypatch, RuntimeError("broken"))
    recipe = tmp_path / "three.yaml"
    recipe.write_text(f"title: x\ncommand: intervene\noptions: {{arms: {json.dumps(ARMS)}, draws: 0}}\n")
    done = command_line("run", recipe, models / "gpt2", *OPTIONS, "--out", tmp_path / "run")
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-2:] == [
        f"written to {tmp_path / 'run'}",
        "sinkscope: 1 of 3 arms failed, and the others are kept: second: RuntimeError: broken",
    ]
    assert list(Run.open(tmp_path / "run").manifest["arms"]) == ["first", "third"]


def test_the_command_writes_a_run_and_repeats_it(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("--do", "nullify-query-bias", "--draws", 2, *OPTIONS)
    done = succeeded("intervene", models / "gpt2", *asked, "--out", tmp_path / "run")
    assert "| nullify-query-bias |" in done.stdout
    run = Run.open(tmp_path / "run")
    assert run.is_experiment
    assert done.stdout.strip() == run.verdict.strip()
    assert {path.stem for path in (tmp_path / "run" / "figures").glob("*.png")} == {
        *("arm-maps", "arm-maps-by-layer", "effects", "effects-by-layer"),
    }  # fmt: skip
    skip_figures(monkeypatch)
    succeeded("intervene", "--from", tmp_path / "run", "--out", tmp_path / "again")
    assert_same_tables(Run.open(tmp_path / "again").tables, run.tables)


def test_a_run_folder_is_named_by_all_arms_or_by_their_number() -> None:
    def folder(*arms: str) -> str:
        return checked(InterveneOptions, {"model": "org/m", "arm": arms}).folder().as_posix()

    assert folder("mask-sink") == "runs/m-mask-sink"
    assert folder("mask-sink", "isolate:positions=2+3") == "runs/m-mask-sink-and-isolate-positions=2+3"
    many = [f"zero-key-columns:coordinates={number}" for number in range(30)]
    assert folder(*many).startswith("runs/m-30-arms-")
    assert folder(*many) != folder(*many[::-1])
    assert len(folder(*many)) < 50


def test_arms_of_the_command_line_are_separate_and_named_with_their_parameters(
    models: Path, tmp_path: Path, no_figures: None
) -> None:
    stacks = {
        "zero-key-columns:coordinates=1+2": ["zero-key-columns:coordinates=1+2"],
        "zero-key-columns:coordinates=3+mask-sink": ["zero-key-columns:coordinates=3", "mask-sink"],
    }
    asked = [part for stack in stacks for part in ("--arm", stack)]
    succeeded("intervene", models / "gpt2", *asked, "--draws", 1, *OPTIONS, "--out", tmp_path / "run")
    run = Run.open(tmp_path / "run")
    assert {label: arm["do"] for label, arm in run.manifest["arms"].items()} == stacks
    assert all(len(arm["controls"]) == 1 for arm in run.manifest["arms"].values())
    settings: dict[str, Any] = {"draws": 1, "input": "random", "num_seqs": 3, "seq_len": 16}
    for arms in ({"arms": stacks}, {"arm": [*stacks]}):
        assert_same_tables(run.tables, intervene(models / "gpt2", **arms, **settings).tables, check_exact=True)
    with pytest.raises(InputError, match="do=… is one stack of interventions, and arm=… a stack of its own each"):
        intervene(models / "gpt2", "mask-sink", arm="mask-sink")


def test_sinks_at_the_next_position_and_anywhere_are_those_of_each_arm(llama: PreTrainedModel) -> None:
    options: dict[str, Any] = {"input": "random", "num_seqs": 4, "seq_len": 24, "positions": 1, "epsilon": 0.25}
    run = intervene(llama, "mask-sink", draws=1, observables=("entropy",), **options)
    assert set(run.tables["entropy"]["condition"]) == {"before", "mask-sink", "mask-sink control 0"}
    sinks = run.tables["sink_positions"]
    sinks = sinks[(sinks["queries"] >= 16) & (sinks["window_mass"] / (1 - sinks["window_mass"])
        > 5 * sinks["uniform_mass"] / (1 - sinks["uniform_mass"]))]  # fmt: skip
    rates = run.tables["attention"].query("position == 1").groupby("condition")["sink_rate"].mean()
    heads = run.tables["attention"].query("condition == 'before' and position == 0").shape[0]
    for condition, part in (("before", "before"), ("mask-sink", "after")):
        pairs = sinks[sinks["condition"] == condition].drop_duplicates(["layer", "head", "sequence"])
        anywhere = getattr(effect_of(run, "mask-sink", "sink_rate_anywhere"), part)
        assert anywhere == pytest.approx(len(pairs) / heads / 4)
        assert getattr(effect_of(run, "mask-sink", "sink_rate", 1), part) == pytest.approx(rates[condition])
    assert len(sinks[sinks["condition"] == "mask-sink"]) > 0
    assert len(effect_of(run, "mask-sink", "sink_rate_anywhere").controls) == 1
    masses = run.tables["attention"].query("position == 1").groupby("condition")["window_mass"].mean()
    effect = effect_of(run, "mask-sink", "window_mass", 1)
    expected = [masses[condition] for condition in ("before", "mask-sink", "mask-sink control 0")]
    assert [effect.before, effect.after, effect.control] == pytest.approx(expected)
    assert len({round(mass, 4) for mass in expected}) == 3
    assert "Any position is a sink in " in run.verdict


@pytest.mark.parametrize(
    ("do", "observables", "without", "is_reused"),
    [
        ("mask-sink", None, "", True),
        ("mask-sink", None, "loss_by_sequence", False),
        ("mask-sink", ("attention", "entropy"), "", False),
        ("mask-sink:positions=6", None, "", True),
        ("mask-sink:positions=7", None, "", False),  # the next position is not in the run's tables
    ],
)
def test_a_run_replaces_the_unchanged_model_if_it_has_all_that_is_asked(
    llama: PreTrainedModel, do: str, observables: Any, without: str, is_reused: bool
) -> None:
    run = sinkscope.analyze(llama, **SMALL)
    tables = {name: table for name, table in run.tables.items() if name != without}
    config = checked(InterveneOptions, {"model": "", "do": (do,), "observables": observables, **SMALL})
    with open_subject(llama, None, config, console := Console(quiet=True)) as subject:
        analyzed = Run(run.manifest, tables)
        experiment = Experiment(subject, config, {do: parse_all([do])}, 0, False, console, analyzed=analyzed)
        experiment.resolved()
    assert (experiment.analyzed is analyzed) == is_reused


def test_the_loss_of_a_run_that_is_reused_is_per_predicted_token(llama: PreTrainedModel) -> None:
    options = SMALL | {"input": (sequences := ragged_tokens((20, 9, 14))), "num_seqs": 3}
    config = checked(InterveneOptions, {"model": "", "do": ("mask-sink",), **options})
    run = sinkscope.analyze(llama, **options)
    with open_subject(llama, None, config, console := Console(quiet=True)) as subject:
        experiment = Experiment(subject, config, {"arm": parse_all(["mask-sink"])}, 0, False, console, analyzed=run)
        tables = experiment.run()
    assert set(tables["attention"]["condition"]) == {"before", "arm"}
    assert experiment.before.loss == pytest.approx(np.log(plain_perplexity(llama, sequences)))


def test_means_of_outputs_and_of_values_at_one_position_are_their_own() -> None:
    arms = {"massive": "mean-massive:layers=1,coordinates=3", "values": "mean-sink-value:layers=1"}
    options: dict[str, Any] = {"draws": 0, "input": "random", "num_seqs": 2, "seq_len": 12, "page": False}
    together = intervene(tiny_model("llama"), arms=arms, **options).manifest["arms"]
    for label, arm in arms.items():
        alone = intervene(tiny_model("llama"), arms={label: arm}, **options).manifest["arms"]
        assert together[label]["do"] == alone[label]["do"]
