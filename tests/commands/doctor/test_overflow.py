"""Overflow in a dtype: the predicted first place is that of a run in the dtype; remedies do what they say."""

import copy
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from support.encoders import encoder, word_tokenizer
from tiny import tiny_model, tiny_tokens
from torch import nn
from transformers import PreTrainedModel

from sinkscope.attention.kernels import ROW_CHUNK
from sinkscope.commands.doctor import overflow
from sinkscope.commands.doctor.overflow import CLIPPED, DECOMPOSED, FULL, RESCALED, SCALED, OverflowCheck, Prediction
from sinkscope.errors import InputError
from sinkscope.measuring.observables.gradient import norm_gains
from sinkscope.measuring.subject import Subject, family_of, inputs_for, load_model, options_of
from sinkscope.models.edits import attending_by, edited_output
from sinkscope.models.loading import LoadedModel
from sinkscope.options.measuring import RunConfig
from sinkscope.results.statistics import DRAWS, RESAMPLING_SEED

BEYOND = 2e5  # in float16


def subject_of(model: PreTrainedModel, num_seqs: int = 2, seq_len: int = 12) -> Subject:
    config = options_of(RunConfig, model, {"input": "random", "num_seqs": num_seqs, "seq_len": seq_len})
    loaded, (family, _) = load_model(model, None, config), family_of(model)
    return Subject(loaded, family, inputs_for(loaded, config, family))


def examined(model: PreTrainedModel, dtype: str = "float16", num_seqs: int = 2) -> OverflowCheck:
    return OverflowCheck(subject_of(model, num_seqs), dtype)


def planted(
    model: PreTrainedModel, layer: int, largest: float = BEYOND, plain: OverflowCheck | None = None
) -> AbstractContextManager[None]:
    """Multiply the output of a layer's MLP so that its largest entry is `largest` within a block.

    `plain` is the result without it, if it is known.
    """
    table = (plain or examined(model)).tables["overflow"]
    before = table.query("site == 'mlp_out'").set_index("layer")["largest"]
    family, _ = family_of(model)
    path, _, _ = family.block(layer).sites["mlp_out"].rpartition(".")
    factor = largest / before[layer]
    return edited_output(family.layer_modules(model)[layer].get_submodule(path), lambda module, x: factor * x)


def first(table: pd.DataFrame) -> Any:
    return next(table.sort_values("order")[["layer", "site"]].itertuples(index=False), None)


# wirings, fused and own attention code, experts, additions in place, both kinds of norms
@pytest.mark.parametrize(
    ("name", "layer"),
    [("llama", 1), ("gemma2", 0), ("gpt_oss", 2), ("gpt2", 1), ("falcon", 2), ("bloom", 0), ("opt-post-norm", 1)],
)
def test_the_predicted_first_layer_is_the_first_that_is_not_finite(name: str, layer: int) -> None:
    model = tiny_model(name)
    plain = examined(model)
    assert plain.tables["overflow"]["is_finite"].all()
    assert not plain.tables["overflow"]["overflows"].any()
    assert_first_is(model, layer, plain)


def assert_first_is(model: PreTrainedModel, layer: int, plain: OverflowCheck) -> None:
    with planted(model, layer, plain=plain):
        table = examined(model, num_seqs=len(plain.subject.inputs.sequences)).tables["overflow"]
    predicted = first(table[table["overflows"] & ~table["is_inside"]])
    assert predicted == first(table[~table["is_finite"]]) == (layer, "mlp_out")


@pytest.mark.slow
@pytest.mark.real_model
def test_a_late_layer_of_a_real_model(smollm_on_cpu: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remedies, which are tested on tiny models, are left out: a pass in float16 takes seconds."""
    monkeypatch.setattr(OverflowCheck, "_remedies", lambda check: ())
    plain = examined(smollm_on_cpu.model, num_seqs=1)
    assert not plain.tables["overflow"].query("not is_inside")["overflows"].any()
    assert_first_is(smollm_on_cpu.model, 25, plain)


@pytest.mark.parametrize(("name", "settings"), [("gemma2", {"rms_norm_eps": 0.5}), ("gpt2", {})])
def test_what_branches_add_is_divided_by_norms_or_linear_layers(name: str, settings: dict[str, Any]) -> None:
    """Gemma's residual stream is divided by dividing the embeddings and the outputs of norms, which keep their ε."""
    model, ids = tiny_model(name, **settings), tiny_tokens(1, 12)
    own = model(ids, output_hidden_states=True)
    with overflow.rescaled(Prediction(subject_of(model)), 8.0):
        divided = model(ids, output_hidden_states=True)
    torch.testing.assert_close(divided.logits, own.logits, rtol=1e-4, atol=1e-4)
    for before, after in zip(own.hidden_states[:-1], divided.hidden_states[:-1], strict=True):  # the last is normed
        torch.testing.assert_close(8 * after, before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "norm", "square"), [("llama", "input_layernorm", "x²"), ("gpt2", "ln_1", "(x − mean)²")]
)
def test_magnitudes_and_places_are_those_of_plain_transformers(name: str, norm: str, square: str) -> None:
    model = tiny_model(name)
    check = examined(model)
    table = check.tables["overflow"]
    ids = [torch.tensor(sequence)[None] for sequence in check.subject.inputs.sequences]
    states = torch.stack([torch.stack(model(each, output_hidden_states=True).hidden_states[:-1]) for each in ids])
    for layer in (0, 1):  # the output of layers 0 and 1; the last hidden state is normed
        row = table.query("site == 'layer_out' and layer == @layer").iloc[0]
        own = states[:, layer + 1, 0]
        assert row["largest"] == pytest.approx(float(own.abs().max()), rel=1e-5)
        place = [int(at) for at in torch.unravel_index(own.abs().argmax(), own.shape)]
        assert list(row[["sequence", "position", "coordinate"]]) == place
        assert row["token_id"] == int(ids[place[0]][0, place[1]])
        largest = table.query("layer == @layer").set_index("site")["largest"]
        read = states[:, layer, 0]
        squares = (read if name == "llama" else read - read.mean(-1, keepdim=True)).square()
        assert largest[f"{norm} {square}"] == pytest.approx(float(squares.max()), rel=1e-5)
        assert largest[f"{norm} sum of squares"] == pytest.approx(float(squares.sum(-1).max()), rel=1e-5)
        assert {"query", "key", "value", "attn_mix"} <= {*largest.index}


def test_places_of_queries_are_tokens_where_there_are_as_many_heads() -> None:
    model = tiny_model("llama", num_attention_heads=8, num_key_value_heads=8, head_dim=4)
    subject, places = subject_of(model, 1, 8), list[int]()

    def keep(own: Any, module: nn.Module, query: torch.Tensor, *args: Any, **named: Any) -> Any:
        places.append(int(torch.unravel_index(query.abs().argmax(), query.shape)[2]))
        return own(module, query, *args, **named)

    rows = [one for one in Prediction(subject).magnitudes.values() if one.site == "query"]
    with attending_by(model, keep):
        model(torch.tensor(np.array(subject.inputs.sequences)))
    assert [one.position for one in rows] == places


def test_the_first_that_is_not_finite_is_that_of_the_first_layer_in_any_order_of_the_texts() -> None:
    model, ids = cast(Any, tiny_model("llama")), list[torch.Tensor]()
    model.model.embed_tokens.register_forward_pre_hook(lambda module, args: ids.append(args[0]))
    for layer, token in ((0, 90), (2, 91)):  # the output for this token is larger than float16 can hold

        def enlarge(module: nn.Module, args: tuple, out: torch.Tensor, token: int = token) -> torch.Tensor:
            return torch.where((ids[-1] == token)[..., None], 1e6 * out.sign(), out)

        model.model.layers[layer].mlp.register_forward_hook(enlarge)
    for tokens in ((90, 91), (91, 90)):
        subject = subject_of(model)
        texts = tuple(np.append(text[:-1], token) for text, token in zip(subject.inputs.sequences, tokens, strict=True))
        check = OverflowCheck(replace(subject, inputs=replace(subject.inputs, sequences=texts)), "float16")
        assert check.tables["overflow_runs"]["layer"].iloc[0] == 0, tokens


def test_products_of_queries_and_keys_are_those_of_plain_transformers() -> None:
    """Also of queries in a later chunk of rows."""
    model, products = tiny_model("llama"), list[tuple[float, float, int]]()
    subject = subject_of(model, 1, 120)
    table = Prediction(subject).magnitudes.values()

    def keep(own: Any, module: nn.Module, query: torch.Tensor, key: torch.Tensor, *args: Any, **named: Any) -> Any:
        x = query @ key.repeat_interleave(2, dim=1).transpose(2, 3)
        query_position = int(torch.unravel_index(x.argmax(), x.shape)[2])
        products.append((float(x.max()), float(x.max()) * named["scaling"], query_position))
        return own(module, query, key, *args, **named)

    with attending_by(model, keep):
        model(torch.tensor(np.array(subject.inputs.sequences)))
    plain, scaled = ([one for one in table if one.site == site] for site in ("q·k", "scaled q·k"))
    for layer, (largest, times_scaling, position) in enumerate(products):
        assert (plain[layer].largest, plain[layer].position) == (pytest.approx(largest, rel=1e-4), position)
        assert scaled[layer].largest == pytest.approx(times_scaling, rel=1e-4)
    assert max(position for *_, position in products) >= ROW_CHUNK


@pytest.mark.parametrize(("kernel", "is_inside"), [("eager", False), ("sdpa", True)])
def test_products_are_tensors_of_eager_attention(kernel: str, is_inside: bool) -> None:
    model = tiny_model("llama")
    model.set_attn_implementation(kernel)
    magnitudes = Prediction(subject_of(model)).magnitudes.values()
    assert {one.is_inside for one in magnitudes if one.site in ("q·k", "scaled q·k")} == {is_inside}


@pytest.mark.parametrize("address", ["0.input", "0.output"])
def test_a_clip_has_two_sides(address: str) -> None:
    model: Any = nn.Sequential(nn.Identity())
    with overflow.clipped(model, {address: 2.0}):
        assert model(torch.tensor([-3.0, -1.0, 2.5])).tolist() == [-2.0, -1.0, 2.0]


def test_an_encoder_is_compared_on_its_masked_text() -> None:
    model, tokenizer = encoder("bert", torch.float32), word_tokenizer()
    config = options_of(RunConfig, model, {"input": "random", "num_seqs": 2, "seq_len": 12})
    loaded, (family, _) = load_model(model, tokenizer, config), family_of(model)
    runs = OverflowCheck(Subject(loaded, family, inputs_for(loaded, config, family)), "float16").tables["overflow_runs"]
    assert runs["difference"].iloc[0] < 0.05


def test_a_rescaling_leaves_the_function_and_a_clip_leaves_it_finite() -> None:
    model = tiny_model("llama")
    weights = {name: id(weight) for name, weight in model.named_parameters()}
    with torch.no_grad():
        model.get_submodule("model.layers.1.mlp.down_proj").weight.mul_(2e4)
    check = examined(model)
    runs = check.tables["overflow_runs"].set_index(["setting", "dtype"])
    assert runs.loc[(FULL, "float16"), "site"] == "mlp_out"
    rescaled, clipped = runs.loc[RESCALED], runs.loc[CLIPPED]
    assert rescaled.loc["float32", "difference"] < 1e-6  # a power of two, but for the norms' ε
    assert 1e-5 < rescaled.loc["float16", "difference"] < 0.02
    assert (rescaled["site"] == "").all()
    assert clipped.loc["float32", "difference"] > 0.1  # another function
    assert {name: id(weight) for name, weight in model.named_parameters()} == weights
    ids = torch.tensor(np.array(check.subject.inputs.sequences))
    plain, own = (runs["loss"] - runs["cost"]).dropna(), model(ids, labels=ids)
    assert plain.tolist() == pytest.approx([float(own.loss)] * len(plain), rel=1e-5)
    with overflow.clipped(model, check.bounds):
        logits = model(ids).logits
    apart = (logits - own.logits).norm(dim=-1) / own.logits.norm(dim=-1)
    assert clipped.loc["float32", "difference"] == pytest.approx(float(apart.max()), rel=1e-4)
    logs, own_logs = logits.log_softmax(-1), own.logits.log_softmax(-1)
    divergence = float((own_logs.exp() * (own_logs - logs)).sum(-1).mean())
    assert clipped.loc["float32", "divergence"] == pytest.approx(divergence, rel=1e-4)


def test_a_number_within_a_factor_of_two_of_the_limit_is_clipped_and_rescaled() -> None:
    model = tiny_model("llama")
    with planted(model, 1, 4e4):
        check = examined(model)
    table, runs = check.tables["overflow"], check.tables["overflow_runs"]
    assert not table.query("not is_inside")["overflows"].any()
    stream = table[table["site"].isin(overflow.RESIDUAL_STREAM)]
    is_near = stream["largest"] > 65504 / 2
    assert is_near.any()
    assert stream["clip"].fillna(0).tolist() == (is_near * 65504 / 2).tolist()
    assert runs.query("setting == @RESCALED")["factor"].tolist() == [2.0, 2.0]
    assert (runs["setting"] == CLIPPED).sum() == 2
    with planted(model, 1, 65510.0):  # rounds to 65504
        assert not examined(model).tables["overflow"].query("site == 'mlp_out'")["overflows"].any()


@pytest.mark.parametrize(("name", "reason"), [("opt-post-norm", "post-norm"), ("llama", "something else")])
def test_a_rescaling_is_refused_where_not_only_norms_read_the_stream(name: str, reason: str) -> None:
    model = tiny_model(name)
    if name == "llama":  # without a norm after the last layer
        model.model.norm = nn.Identity()
    with planted(model, 1):
        check = examined(model)
    assert reason in check.refused[RESCALED]
    assert RESCALED not in set(check.tables["overflow_runs"]["setting"])


@pytest.mark.parametrize(("name", "square"), [("gpt2", "ln_1{} (x − mean)²"), ("llama", "input_layernorm{} x²")])
def test_a_norm_decomposed_in_float16_is_finite_and_wrong(name: str, square: str) -> None:
    model = tiny_model(name)
    with planted(model, 1, 2_000.0):
        check = examined(model)
    runs = check.tables["overflow_runs"].set_index("setting")
    table = check.tables["overflow"]
    assert table["is_finite"].all()
    assert runs.loc[FULL, "difference"] < 0.02
    assert runs.loc[DECOMPOSED, "site"] == ""
    assert runs.loc[DECOMPOSED, "difference"] > 0.5
    assert first(table[table["overflows"]]) == (2, square.format(""))
    assert table[table["overflows"]]["path"].iloc[0].endswith(square.format(".input"))


def scaled(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round rows (…,D) to float8, each with its own scale."""
    scale = x.abs().amax(-1, keepdim=True) / torch.finfo(dtype).max
    return (x / scale).to(dtype).float() * scale


@pytest.mark.parametrize("name", ["float8_e4m3", "float8_e5m2"])
def test_float8_is_scaled_by_output_channel_and_by_token(name: str) -> None:
    model, dtype = tiny_model("llama", spread=1.0), overflow.OVERFLOW_DTYPES[name]
    check = examined(model, name, num_seqs=6)
    ids = torch.tensor(np.array(check.subject.inputs.sequences))

    def losses(model: PreTrainedModel) -> np.ndarray:
        with torch.no_grad():
            logits = model(ids).logits[:, :-1]
        return F.cross_entropy(logits.transpose(1, 2).double(), ids[:, 1:], reduction="none").sum(1).numpy()

    rounded = copy.deepcopy(model)
    for path, module in rounded.named_modules():
        if isinstance(module, nn.Linear) and path != "lm_head":
            module.weight.data = scaled(module.weight.data, dtype)
            module.register_forward_pre_hook(lambda module, args: (scaled(args[0], dtype),))
    costs, row = losses(rounded) - losses(model), check.tables["overflow_scaled"].iloc[0]
    # 3 of 6 texts: their means spread like Student's interval of six numbers
    drawn = np.random.default_rng(RESAMPLING_SEED).multinomial(3, np.full(6, 1 / 6), size=DRAWS) @ costs / 33
    assert row["cost"] == pytest.approx(costs.sum() / 66, abs=1e-6)
    assert [row["cost_low"], row["cost_high"]] == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=1e-6)
    runs = check.tables["overflow_runs"].set_index("setting")
    assert runs.loc[SCALED, "cost"] == pytest.approx(row["cost"], abs=1e-12)


@pytest.mark.parametrize("dtype", ["float8_e4m3", "float8_e5m2"])
def test_float8_without_scales_rounds_the_inputs_of_linear_layers(dtype: str) -> None:
    model = tiny_model("llama")
    assert examined(model, dtype).tables["overflow"]["is_finite"].all()
    with torch.no_grad():
        model.get_submodule("model.layers.1.mlp.up_proj").weight.mul_(BEYOND)
    check = examined(model, dtype)
    table, runs = check.tables["overflow"], check.tables["overflow_runs"].set_index("setting")
    assert first(table[table["overflows"]]) == first(table[~table["is_finite"]]) == (1, "mlp.down_proj.input")
    assert runs.loc[SCALED, "site"] == ""
    assert np.isfinite(runs.loc[SCALED, "difference"])


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e5m2"])
def test_the_smallest_magnitude_that_overflows(name: str) -> None:
    dtype = overflow.OVERFLOW_DTYPES[name]
    edge = overflow.overflows_from(dtype)
    below = torch.tensor(edge).nextafter(torch.tensor(0.0))
    assert bool(torch.isinf(torch.tensor(edge).to(dtype).float()))
    assert bool(torch.isfinite(below.to(dtype).float()))


def test_a_model_in_float16_cannot_be_predicted_from() -> None:
    with pytest.raises(InputError, match="float32 or bfloat16"):
        examined(tiny_model("llama", dtype=torch.float16))


def test_a_decomposed_norm_has_the_mean_and_the_squares_of_each_token_in_its_dtype() -> None:
    """In float16 squares above 65,504 are infinite, so that the deviation's inverse, and the output, are 0."""
    norm = nn.LayerNorm(4).half()
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        norm.bias.copy_(torch.tensor([0.5, -0.5, 0.25, 0.0]))
    model = nn.Sequential(norm)
    x = torch.tensor([[[300.0, -300.0, 0.0, 0.0], [1.0, -2.0, 3.0, 4.0], [1000.0, 1001.0, 1002.0, 1003.0]]]).half()
    with overflow.decomposed_norms(cast("Any", model), norm_gains({"0": (norm, 4)})):
        output = model(x)
    torch.testing.assert_close(output[0, 0], norm.bias)
    centered = x[0] - x[0].mean(-1, keepdim=True)
    inverse = (centered.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    torch.testing.assert_close(output[0, 1:], (centered * inverse * norm.weight + norm.bias)[1:], rtol=3e-3, atol=3e-3)
    torch.testing.assert_close(model(x), norm(x))


def test_a_norm_has_one_gain_a_coordinate() -> None:
    table = nn.Embedding(3, 4)
    cast("Any", table).eps = 1e-5
    assert [overflow._epsilon(module) for module in (nn.LayerNorm(4), table, nn.Linear(2, 2), nn.ReLU())] == [
        "eps", None, None, None,
    ]  # fmt: skip


def test_weights_that_transformers_keeps_in_float32_are_not_cast() -> None:
    model = tiny_model("llama")
    model._keep_in_fp32_modules, model._keep_in_fp32_modules_strict = {"down_proj"}, {"o_proj"}
    layer = model.model.layers[1]
    parts = [layer.mlp.down_proj, layer.self_attn.o_proj, layer.mlp.up_proj]
    for dtype, expected in ((torch.float16, [False, False, True]), (torch.bfloat16, [True, False, True])):
        edits = {id(module): copied.dtype for module, _, copied in overflow.cast_weights(model, dtype)}
        assert [edits.get(id(part)) == dtype for part in parts] == expected
