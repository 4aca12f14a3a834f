"""Measurements at every log of a training, compared with those computed from a model's weights in float64."""

import contextlib
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support.encoders import encoder, word_tokenizer
from support.retrofitted import plain_model
from support.training import config as training_config
from support.training import model as training_model
from support.training import repetitive, same
from tiny import VOCAB, spread_weights, tiny_model, tiny_tokens
from torch.nn.functional import layer_norm
from transformers import PreTrainedModel

import sinkscope
from sinkscope.commands.train import history
from sinkscope.commands.train.history import TotalWeight, measure_at_log, sinks_and_weights
from sinkscope.commands.train.trainer import train_model
from sinkscope.measuring.observables.attention import Attention
from sinkscope.measuring.observables.observable import Settings
from sinkscope.measuring.tracer import open_tracer
from sinkscope.models.families import find_family
from sinkscope.models.varied_llama import VariedLlamaConfig, VariedLlamaForCausalLM
from sinkscope.retrofits import retrofit_model
from sinkscope.text.batch import Batch
from sinkscope.text.inputs import masked

IDS = tiny_tokens(5, 12)
EPSILON = 0.27  # uniform attention over 12 tokens gives the first one 0.259


def of(model: PreTrainedModel, epsilon: float = EPSILON, position: int = 0) -> pd.Series:
    table = sinks_and_weights(model, find_family(model), IDS.numpy(), epsilon, position)
    return table.set_index(["layer", "metric"])["value"]


def changed(method: str, **parameters: Any) -> PreTrainedModel:
    return retrofit_model(plain_model("gpt2"), None, method, **parameters).requires_grad_(False)


def first_logits(model: Any) -> torch.Tensor:
    """Return the logits of the first layer of GPT-2 without a mask, from its weights."""
    block, width = model.transformer.h[0], model.config.n_embd
    h = model.transformer.wte.weight[IDS] + model.transformer.wpe.weight[: IDS.shape[1]]
    x = layer_norm(h, (width,), block.ln_1.weight, block.ln_1.bias, model.config.layer_norm_epsilon)
    query, key, _ = (x @ block.attn.c_attn.weight + block.attn.c_attn.bias).split(width, dim=-1)
    query, key = (part.unflatten(-1, (model.config.n_head, -1)).transpose(1, 2) for part in (query, key))
    return query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5


def test_negative_weights_count_like_positive_ones() -> None:
    model = changed("operation", kind="identity")
    total = first_logits(model).tril().abs().sum(-1)[..., 1:]
    assert of(model)[0, "total_weight"] == pytest.approx(np.median(total))


def test_the_total_weight_of_sigmoid_attention_is_its_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = changed("operation", kind="sigmoid")
    block, width = model.transformer.h[0], model.config.n_embd
    bias = block.attn.c_attn.bias
    bias[:width] *= 10  # a few keys get much of all weight, so that some are sinks by total weight
    bias[width : 2 * width] -= 0.5 * bias[:width]
    weights = first_logits(model).sigmoid().tril()
    for position in (3, 0):
        later = slice(position + 1, None)
        total, share = weights.sum(-1)[..., later], (weights[..., position] / weights.sum(-1))[..., later]
        to_token = share > EPSILON
        assert 0.05 < to_token.double().mean() < 0.9
        measured = of(model, position=position)
        assert measured[0, "total_weight"] == pytest.approx(np.median(total))
        assert measured[0, "total_weight_at_sink"] == pytest.approx(np.median(total[to_token]))
    shares = weights.sum(2) / torch.stack([weights.sum(-1)[..., at:].sum(-1) for at in range(12)], dim=-1)
    by_weight = shares > EPSILON
    assert measured[0, "sink_rate_by_weight"] == pytest.approx(by_weight[..., 0].double().mean())
    monkeypatch.setattr(history, "FEWEST_QUERIES", 6)
    anywhere = of(model)[0, "sink_rate_by_weight_anywhere"]
    assert anywhere == pytest.approx(by_weight[..., :7].any(-1).double().mean())
    assert anywhere > measured[0, "sink_rate_by_weight"] > 0
    low = of(model, epsilon=0.2)  # uniform attention would make the first token a sink, but no other
    assert np.isnan(low[0, "sink_rate_by_weight"])
    anywhere = (shares[..., 1:7] > 0.2).any(-1).double().mean()
    assert low[0, "sink_rate_by_weight_anywhere"] == pytest.approx(anywhere)
    layers = [measured[layer, "total_weight"] for layer in range(model.config.n_layer)]
    assert min(layers) < measured[-1, "total_weight"] < max(layers)


def test_totals_are_1_where_weights_are_divided_by_their_own_sum_and_less_elsewhere() -> None:
    for kind in ("softmax", "sigmoid-normalized", "identity-normalized"):
        measured = of(changed("operation", kind=kind))
        totals = measured[[metric.startswith("total") for _, metric in measured.index]]
        assert (totals.sub(1).abs() < 1e-12).all() == (kind != "identity-normalized")
        if kind != "identity-normalized":
            for layer in (0, -1):
                assert measured[layer, "sink_rate_by_weight"] == pytest.approx(measured[layer, "sink_rate"])
    assert of(changed("operation", kind="softmax", factor=0.2))[-1, "total_weight"] == pytest.approx(0.2)
    assert of(changed("key-bias"))[-1, "total_weight"] < 0.99


@pytest.mark.parametrize("name", ["bert", "prefix LM"])
def test_rates_by_weight_are_of_all_queries_that_see_a_key(name: str) -> None:
    """In an encoder and in the prefix of a prefix LM, queries before a key see it, too."""
    if name == "bert":
        model, epsilon = encoder("bert"), 0.1
    else:
        epsilon = EPSILON
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
        config = VariedLlamaConfig(vocab_size=VOCAB, prefix_length=8, **sizes)
        model = VariedLlamaForCausalLM(config).double().eval().requires_grad_(False)
        spread_weights(model, 8.0)
    weight = Attention(Settings(positions=IDS.shape[1], window=64, epsilon=epsilon))
    anywhere = []
    for position in (0, 3, 7, 11):
        of_weight = TotalWeight(Settings(epsilon=epsilon), position)
        with open_tracer(model, find_family(model)) as tracer:
            tracer.forward(Batch(IDS, torch.ones_like(IDS)), [weight, of_weight])
        measured = {(layer, metric): value for layer, metric, value in of_weight.rows()}
        rates = weight.tables()["attention"].query("position == @position").groupby("layer")["sink_rate"].mean()
        assert 0 < rates.mean() < 1 or position == 0
        for layer, rate in rates.items():
            assert measured[layer, "sink_rate_by_weight"] == pytest.approx(rate, nan_ok=True)
        anywhere.append(measured[-1, "sink_rate_by_weight_anywhere"])
    if name == "bert":  # every key has all queries
        assert len(set(anywhere)) == 1


@pytest.mark.parametrize(("method", "before"), [("none", 0), ("register-tokens", 2)])
def test_the_sink_rate_is_that_of_a_position_of_the_text(method: str, before: int) -> None:
    """Register tokens, whose own sink rate is another metric, are not counted."""
    model = changed(method, **({"count": before} if before else {}))
    table = sinks_and_weights(model, find_family(model), IDS.numpy(), EPSILON, position=3)
    later, first = table.set_index(["layer", "metric"])["value"], of(model)
    attention = Attention(Settings(positions=before + 4, window=64, epsilon=EPSILON))
    with open_tracer(model, find_family(model)) as tracer:
        tracer.forward(Batch(IDS, torch.ones_like(IDS)), [attention])
    by_position = attention.tables()["attention"].groupby("position")["sink_rate"].mean()
    assert later[-1, "sink_rate"] == pytest.approx(by_position[before + 3])
    assert later[-1, "sink_rate_by_weight"] == pytest.approx(by_position[before + 3])  # all weights are softmax's
    assert first[-1, "sink_rate"] == pytest.approx(by_position[before])
    assert first[-1, "total_weight"] == pytest.approx(1)
    at_log = measure_at_log(model, find_family(model), IDS.numpy(), EPSILON, observables=("attention",))
    assert at_log.set_index(["layer", "metric"])["value"][-1, "sink_rate"] == first[-1, "sink_rate"]
    assert by_position[before + 3] != by_position[before] > 0
    for at, has_rate in ((11, True), (12, False)):  # a token after the measured ones has no rate
        table = sinks_and_weights(model, find_family(model), IDS.numpy(), EPSILON, at)
        assert table["metric"].eq("sink_rate").any() == has_rate


@pytest.mark.parametrize(("method", "before"), [("none", 0), ("register-tokens", 2)])
def test_with_a_window_only_tokens_that_see_the_first_register_or_token_are_measured(method: str, before: int) -> None:
    model = tiny_model("mistral", sliding_window=10)
    model = retrofit_model(model, None, method, **({"count": before} if before else {})).requires_grad_(False)
    ids, family = IDS.numpy(), find_family(model)
    measured, seen = (sinks_and_weights(model, family, part, 0.3) for part in (ids, ids[:, : 10 - before]))
    pd.testing.assert_frame_equal(measured, seen)
    assert measured["value"].notna().all()
    for position, has_rate in ((9 - before, True), (10 - before, False)):
        table = sinks_and_weights(model, family, ids, 0.3, position)
        assert table["metric"].eq("sink_rate").any() == has_rate


@pytest.mark.parametrize("method", ["operation", "key-bias"])
def test_under_autocast_it_is_what_the_model_says_in_float32(method: str) -> None:
    """The Trainer wraps the model in this way with --bf16."""
    model = retrofit_model(plain_model("gpt2", torch.float32), None, method).requires_grad_(False)
    exact, forward = of(model), model.forward

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return forward(*args, **kwargs)

    model.forward = functools.wraps(forward)(wrapped)
    measured = of(model)
    assert measured.index.equals(exact.index)
    total = [metric == "total_weight" for _, metric in exact.index]
    np.testing.assert_allclose(measured[total], exact[total], rtol=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True])
def test_a_probe_does_not_influence_the_training_and_measures_as_analyze_does(bf16: bool, tmp_path: Path) -> None:
    blocks, names = repetitive(), ("attention", "activation", "massive", "gradient")
    trained, histories = [], []
    for at, probed in enumerate((names, ())):
        model = training_model()
        probe = functools.partial(
            measure_at_log, family=find_family(model), held_out=blocks.held_out, epsilon=EPSILON, observables=probed
        )
        histories.append(train_model(model, blocks, training_config(bf16=bf16), tmp_path / str(at), probe=probe))
        trained.append(model)
    assert same(*trained)
    shared = histories[0].merge(histories[1], on=["layer", "step", "metric"], suffixes=("", "_without"))
    assert len(shared) == len(histories[1])
    pd.testing.assert_series_equal(shared["value"], shared["value_without"], check_names=False)

    np.save(tmp_path / "ids.npy", blocks.held_out)
    asked = {"input": tmp_path / "ids.npy", "num_seqs": 2, "seq_len": 16, "epsilon": EPSILON, "observables": names}
    run = sinkscope.analyze(trained[0], bos="auto", **asked)
    last = histories[0].query("layer == -1 and step == 12").set_index("metric")["value"]
    metrics = {"held_out_loss": "loss"} | {name: name for name in ("first_norm", "norm_ratio", "value_gradient_ratio")}
    assert set(histories[0]["step"]) == {0, 2, 4, 6, 8, 10, 12}
    for probed_name, name in metrics.items():
        assert last[probed_name] == pytest.approx(run.metric(name), rel=1e-5)
    alone = measure_at_log(trained[0], find_family(model), blocks.held_out, EPSILON, observables=("attention",))
    assert alone.set_index(["layer", "metric"])["value"][-1, "held_out_loss"] == pytest.approx(last["held_out_loss"])


def test_a_block_of_autocast_around_a_training_keeps_no_weights_of_earlier_steps(tmp_path: Path) -> None:
    """`retrofit` trains inside a block that turns autocast off, and autocast clears its cache at the outermost end."""
    trained = []
    for at in range(2):
        model = training_model()
        with torch.autocast("cpu", enabled=False) if at else contextlib.nullcontext():
            train_model(model, repetitive(), training_config(bf16=True), tmp_path / str(at))
        trained.append(model)
    assert same(*trained)


def test_an_encoders_held_out_loss_is_of_masked_tokens() -> None:
    model, rows = encoder("bert"), repetitive().held_out
    ids, labels = (torch.tensor(np.stack(part)) for part in zip(*masked(rows, word_tokenizer(), VOCAB, 0), strict=True))
    expected = float(model(input_ids=ids, labels=labels).loss)
    for names in (("attention",), ("gradient",)):
        table = measure_at_log(model, find_family(model), rows, EPSILON, observables=names, masked_by=word_tokenizer())
        values = table.set_index(["layer", "metric"])["value"]
        assert values[-1, "held_out_loss"] == pytest.approx(expected, rel=1e-6)


def test_a_probe_measures_the_beginnings_of_the_first_blocks_with_its_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "SEQUENCES", 2)
    monkeypatch.setattr(history, "SEQ_LEN", 8)
    model = tiny_model("mistral", sliding_window=12)
    retrofit_model(model, None, "register-tokens", count=2).requires_grad_(False)
    whole, beginnings, high = (
        measure_at_log(model, find_family(model), rows, epsilon, observables=("attention",))
        for rows, epsilon in ((IDS.numpy(), 0.45), (IDS[:2, :8].numpy(), 0.45), (IDS.numpy(), 0.9))
    )
    pd.testing.assert_frame_equal(whole, beginnings)
    low, high = (table.set_index(["layer", "metric"])["value"][-1, "sink_rate_outside"] for table in (whole, high))
    assert low > high


def test_a_probe_measures_sinks_at_its_position() -> None:
    """Those of `--probe attention` are at position 0, and do not take their place."""
    model = changed("none")
    arguments = (model, find_family(model), IDS.numpy(), EPSILON)
    first, later = (sinks_and_weights(*arguments, position) for position in (0, 3))
    assert not first.equals(later)
    for observables in ((), ("attention",)):
        measured = measure_at_log(*arguments, position=3, observables=observables)
        pd.testing.assert_frame_equal(measured.head(len(later)), later)
        assert not measured.duplicated(["layer", "metric"]).any()
    beyond = measure_at_log(*arguments, position=IDS.shape[1], observables=("attention",))
    assert "sink_rate" not in set(beyond["metric"])
