"""Entropy of states, sink tokens, residual sinks and the spike mask: formulas, small cases, plain transformers."""

from typing import Any

import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from support.attention_reads import EACH_KIND, make_read
from support.retrofit_command import words_tokenizer
from tiny import batched, measured, padded, ragged_tokens, tiny_model

import sinkscope
from sinkscope.measuring.observables.entropy import entropy, spectrum, valley
from sinkscope.measuring.observables.observable import Reading, Settings
from sinkscope.measuring.observables.spikes import (
    ResidualSinks,
    SinkTokens,
    attention_received,
    kinds_of,
    life,
    mean_cosine,
    sink_layers,
)
from sinkscope.measuring.spike_mask import MASK_OBSERVABLES
from sinkscope.models.loading import LoadedModel
from sinkscope.retrofits import retrofit_model
from sinkscope.text.batch import REGISTER

SETTINGS = Settings(positions=4, window=4)


def entropy_by_svd(x: np.ndarray) -> float:
    """The definition, from the singular values themselves."""
    p = np.linalg.svd(x, compute_uv=False) ** 2
    p = p / p.sum()
    return float(-(p[p > 0] * np.log(p[p > 0])).sum() / np.log(max(2, min(x.shape))))


def test_entropy_is_that_of_the_singular_values_and_bounded_by_norm_and_alignment() -> None:
    drawn = np.random.default_rng(0)
    for tokens, width in ((5, 9), (12, 4)):
        x = drawn.standard_normal((tokens, width)) + 2
        x[0] *= 50
        singular = np.linalg.svd(x, compute_uv=False) ** 2
        p = spectrum(torch.from_numpy(x))
        np.testing.assert_allclose(p.flip(-1), singular / singular.sum(), atol=1e-14)
        padded_x = torch.zeros(1, tokens + 3, width, dtype=torch.float64)
        padded_x[0, :tokens] = torch.from_numpy(x)
        columns = valley(padded_x, torch.tensor([tokens], dtype=torch.float64))
        numbers = {name: float(value[0]) for name, value in columns.items()}
        norms = np.linalg.norm(x, axis=1)
        rescaled = np.concatenate([x[:1] * np.quantile(norms[1:], 0.5, method="lower") / norms[0], x[1:]])
        for name, states in (("entropy", x), ("entropy_without_first", x[1:]), ("entropy_rescaled", rescaled)):
            assert numbers[name] == pytest.approx(entropy_by_svd(states), rel=1e-10), name
        cosines = (x[1:] @ x[0]) ** 2 / norms[0] ** 2
        share, alignment = norms[0] ** 2 / (norms[1:] ** 2).sum(), cosines.sum() / (norms[1:] ** 2).sum()
        assert numbers["norm_share"] == pytest.approx(share)
        assert numbers["alignment"] == pytest.approx(alignment)
        assert numbers["anisotropy_bound"] == pytest.approx((share + alignment) / (share + 1))
        assert numbers["anisotropy_bound"] <= numbers["anisotropy"] == pytest.approx(singular[0] / singular.sum())
        assert numbers["entropy"] <= numbers["entropy_bound"] < 1
    # both bounds are reached where all other tokens are orthogonal to the first and to each other, of one norm
    exact = valley(torch.diag(torch.tensor([3.0, 1, 1, 1], dtype=torch.float64))[None], torch.tensor([4.0]).double())
    assert float(exact["anisotropy"]) == pytest.approx(float(exact["anisotropy_bound"])) == pytest.approx(9 / 12)
    assert float(exact["entropy"]) == pytest.approx(float(exact["entropy_bound"]))
    assert float(entropy(torch.full((8,), 1 / 8, dtype=torch.float64))) == pytest.approx(np.log(8))


@pytest.mark.parametrize("side", ["left", "right"])
def test_tables_of_states_are_those_of_plain_transformers(side: str) -> None:
    model, sequences = tiny_model("llama", dtype=torch.float64), ragged_tokens((9, 24, 14))
    tables = measured(model, batched(sequences, 2, side), SETTINGS, ("entropy", "sink-tokens", "residual-sinks"))
    recorded = reference.record_each(model, sequences)
    states = [np.stack([layer.sites["layer_out"] for layer in each.layers]) for each in recorded]
    by_sequence = tables["entropy_by_sequence"].set_index(["layer", "sequence"])
    shares = tables["spikes_by_sequence"].set_index(["layer", "sequence"])
    for at, own in enumerate(states):
        for layer, x in enumerate(own):
            assert by_sequence["entropy"][layer, at] == pytest.approx(entropy_by_svd(x), rel=1e-6)
            ratios = np.abs(x) / np.quantile(np.abs(x), 0.5, axis=1, method="lower", keepdims=True)
            assert shares["largest_share"][layer, at] == pytest.approx((ratios > 20).mean(0).max())
    largest = np.mean([np.linalg.norm(own, axis=-1).max(-1) for own in states], axis=0)
    np.testing.assert_allclose(tables["spikes"]["norm"], largest)
    top = np.stack([own[2][np.linalg.norm(own[2], axis=1).argmax()] for own in states])
    top /= np.linalg.norm(top, axis=1, keepdims=True)
    pairs = (top @ top.T)[np.triu_indices(len(top), 1)]
    assert tables["spikes"]["cosine"][2] == pytest.approx(pairs.mean())
    assert np.isnan(mean_cosine(torch.ones(3), 1))


def test_a_token_is_a_sink_while_it_is_parallel_to_the_first_and_large() -> None:
    assert life(torch.tensor([1.0, 2, 50, 49, 10, 12])) == (1, 3)  # outputs of layers 1 and 2 are large
    assert life(torch.tensor([1.0, 2, 3, 9])) == (2, 3)  # the norm never falls
    depth = 8
    norms = torch.full((4, 1 + depth), 2.0)
    norms[0, 2:8] = 100  # the first sink: outputs of layers 1 to 6
    norms[2, 4:8] = 30  # joins in layer 3
    norms[3, 4:8] = 5  # large, but not parallel
    cosine = torch.zeros(4, depth)
    cosine[0], cosine[1], cosine[2] = 1, -0.95, 0.95  # token 1 is parallel, but not large
    is_parallel, is_sink = sink_layers(norms, cosine, first=0)
    assert is_parallel.sum(1).tolist() == [6, 6, 6, 0]
    assert [np.flatnonzero(row).tolist() for row in is_sink] == [[*range(1, 7)], [], [3, 4, 5, 6], []]
    assert kinds_of(is_sink, first=0).tolist() == ["first", "", "secondary", ""]  # fewer than 17/32 of 8 layers
    flat = torch.full((4, 1 + depth), 2.0).cumsum(1)
    assert not sink_layers(flat, torch.ones(4, depth), first=0)[1].any()  # without a spike, no token is a sink


def test_sink_tokens_are_listed_with_their_lives() -> None:
    """Three sequences of one layer stack: the first sink at position 1 of the second, and a token that joins it."""
    batch = padded(ragged_tokens((5, 6)), "left")
    observable, depth, width = SinkTokens(SETTINGS), 8, 6
    observable.depth = depth
    batch.token_ids[0, 3] = batch.token_ids[1, 4]  # the token that joins, where it is no sink
    for layer in range(depth):  # attention, which tells layers and sequences apart
        observable.received[layer] = torch.tensor([[10.0 * layer], [1.0 * layer]]).expand(2, 6)
    spike = torch.zeros(width)
    spike[2] = 100.0
    generator = torch.Generator().manual_seed(0)
    for layer in range(depth):
        x = torch.randn(2, 6, width, generator=generator)
        written = torch.randn(2, 6, width, generator=generator)
        if 1 <= layer < 7:
            x[0, 1] = x[1, 1] = spike  # positions 0 and 1
            written[:, 1] = spike
        if 3 <= layer < 6:
            x[1, 4] = 0.5 * spike
            written[1, 4] = spike / 7 if layer == 3 else -spike
        for site, tensor in (("layer_in", x), ("mlp_out", written), ("layer_out", x)):
            if site != "layer_in" or layer == 0:
                observable.see(layer, site, Reading(tensor, batch), batch)
        observable.finish(batch)  # which is called before the last layer if other observables keep much
    tables = observable.tables()
    table = tables["sink_tokens"].set_index(["sequence", "position"])
    assert table["kind"].to_dict() == {(0, 0): "first", (1, 1): "first", (1, 4): "secondary"}
    assert table.loc[(1, 4), ["layer", "last_layer", "lifetime"]].tolist() == [3, 5, 3]
    assert table.loc[(1, 4), ["norm", "written"]].tolist() == pytest.approx([50.0, 1.0])
    # layers 4 to 6 read the outputs of layers 3 to 5
    assert table.loc[(1, 4), ["attention", "attention_elsewhere"]].tolist() == pytest.approx([5.0, 50.0])
    assert table["token_id"].tolist() == [int(batch.token_ids[0, 1]), *batch.token_ids[1, [1, 4]].tolist()]
    assert tables["parallel_tokens"].query("sequence == 1")["sinks"].tolist() == pytest.approx(
        [0, 0, 0, 0.2, 0.2, 0.2, 0, 0]
    )


def test_residual_sinks_and_spikes_are_told_apart_by_the_share_of_their_tokens() -> None:
    """Coordinates that are large at all of ten tokens, at nine, at five and at one; elsewhere magnitudes are 1."""
    batch, observable = padded(ragged_tokens((6, 4)), "left"), ResidualSinks(SETTINGS)
    states, planted = torch.ones(2, 6, 64), {7: (30.0, 10), 4: (40.0, 9), 5: (25.0, 5), 2: (-50.0, 1)}
    of_tokens = states[batch.attention_mask.bool()]
    for coordinate, (size, count) in planted.items():
        of_tokens[:count, coordinate] = size
    states[batch.attention_mask.bool()] = of_tokens
    states[1, 0, 9] = 1e4  # at padding
    for site in ("layer_in", "layer_out"):
        observable.see(0, site, Reading(states, batch), batch)
    tables = observable.tables()
    coordinates = tables["residual_sinks"].set_index("coordinate")
    assert coordinates["kind"].to_dict() == {7: "residual sink", 4: "residual sink", 5: "between", 2: "spike"}
    assert coordinates.index.tolist() == [7, 4, 5, 2]
    for coordinate, (size, count) in planted.items():
        expected = [count / 10, (count * abs(size) + 10 - count) / 10, abs(size)]
        assert coordinates.loc[coordinate, ["share", "ratio_mean", "ratio_max"]].tolist() == pytest.approx(expected)
    assert tables["spikes"][["largest_share", "rotated_share"]].to_numpy().tolist() == [[1.0, 0.0]]


@EACH_KIND
def test_attention_received_is_that_of_the_loops(kind: str, lengths: tuple | None, side: str) -> None:
    read = make_read(kind, lengths=lengths, side=side)
    every = slice(0, read.length)
    weights, allowed = read.weights(every, every)[0], read.allowed(every, every)
    seen = (torch.ones_like(weights, dtype=torch.bool) if allowed is None else allowed).expand_as(weights)
    real = read.batch.attention_mask.bool()[:, None, :, None]
    later = torch.ones(read.length, read.length).tril(-1).bool()
    uniform = (seen / seen.sum(-1, keepdim=True).clamp(min=1)) * (later & real)
    expected = (weights * later).mean(1).sum(1) / uniform.mean(1).sum(1)
    is_token = read.batch.attention_mask.bool()
    received, expected = (x.nan_to_num(nan=-1.0, posinf=-1.0)[is_token] for x in (attention_received(read), expected))
    torch.testing.assert_close(received, expected)


def test_a_run_with_its_observables_needs_no_second_pass(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, options = tiny_model("llama"), {"input": "random", "num_seqs": 2, "seq_len": 16}
    expected = sinkscope.spike_mask(model, **options)
    monkeypatch.setattr("sinkscope.measuring.spike_mask.measure", None)
    run = tmp_path / "run"
    sinkscope.analyze(model, observables=MASK_OBSERVABLES, export_mask=True, out=run, figures=(), page=False, **options)
    mask = load_file(run / "spike_mask.safetensors")
    assert all(torch.equal(mask[name], tensor) for name, tensor in vars(expected).items())
    with pytest.raises(TypeError):  # without them, there is one
        sinkscope.analyze(model, observables=["massive"], export_mask=True, figures=(), page=False, **options)


def test_the_mask_has_the_models_registers_and_only_coordinates_that_are_large_at_most_tokens() -> None:
    model = retrofit_model(tiny_model("llama"), None, "register-tokens", count=2)

    def plant(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[..., 7] += 900.0
        output[:, 4, 9] += 1500.0
        return output

    ids = torch.randint(3, 90, (2, 10), generator=torch.manual_seed(1))
    with model.model.layers[2].mlp.register_forward_hook(plant):
        mask = sinkscope.spike_mask(model, ids)
    assert torch.equal(mask.token_ids, F.pad(ids, (2, 0), value=REGISTER))
    assert mask.attention_mask.all()
    assert mask.tokens.shape == (3, 2, 12)
    assert mask.residual_coordinates[2].nonzero().flatten().tolist() == [7]


@pytest.mark.parametrize(("named", "begins"), [({}, "the"), ({"bos": "always"}, "<s>")])
def test_given_texts_calibrate_a_filter_as_they_are_unless_a_bos_is_named(
    named: dict[str, Any], begins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, tokenizer = "sinkscope.commands.analyze.command", words_tokenizer()
    monkeypatch.setattr(f"{command}.calibrated_filter", lambda subject, config: subject.inputs.sequences)
    (ids,) = sinkscope.spike_filter(tiny_model("llama"), ["the drain"], tokenizer=tokenizer, **named)
    assert tokenizer.convert_ids_to_tokens(int(ids[0])) == begins
    mask = sinkscope.spike_mask(tiny_model("llama"), ["the drain"], tokenizer=tokenizer, **named)
    assert tokenizer.convert_ids_to_tokens(int(mask.token_ids[0, 0])) == begins


def test_the_mask_of_given_texts_has_no_bos_before_them() -> None:
    tokenizer = words_tokenizer()
    mask = sinkscope.spike_mask(tiny_model("llama"), ["w1 w2 w3"], tokenizer=tokenizer)
    assert mask.token_ids.tolist() == [tokenizer("w1 w2 w3", add_special_tokens=False)["input_ids"]]
    assert mask.tokens.shape == (3, 1, 3)
    named = sinkscope.spike_mask(tiny_model("llama"), input="natural", num_seqs=1, seq_len=8, tokenizer=tokenizer)
    assert named.token_ids[0, 0] == tokenizer.bos_token_id


def test_the_filter_has_the_rule_of_the_mask() -> None:
    """One planted sink direction, at token 1 of each sequence, in the output of layer 1 only."""
    model = tiny_model("llama")
    direction = torch.randn(model.config.hidden_size, generator=torch.manual_seed(0))

    def plant(size: float) -> Any:
        def add(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
            output = output.clone()
            output[:, 1] += size * direction
            return output

        return add

    ids = torch.randint(3, 90, (4, 12), generator=torch.manual_seed(1))
    mlps = [layer.mlp for layer in model.model.layers]
    with mlps[1].register_forward_hook(plant(100.0)), mlps[2].register_forward_hook(plant(-100.0)):
        spikes = sinkscope.spike_filter(model, ids)
        mask = sinkscope.spike_mask(model, ids)
        states = model(ids, output_hidden_states=True).hidden_states[1:3]
    assert mask.tokens.sum((1, 2)).tolist() == [0, 4, 0]
    for layer, output in enumerate(states):
        assert torch.equal(spikes(output, layer), mask.tokens[layer])
        assert torch.equal(spikes(output[1, 1].bfloat16(), layer), mask.tokens[layer, 1, 1])
    assert spikes.least_norm.isinf().tolist() == [True, False, True]
    norms = torch.linalg.vector_norm(states[1].detach(), dim=-1)
    torch.testing.assert_close(spikes.least_norm[1], 3 * norms.median(1).values.mean())
    sink = states[1][0, 1].detach()
    smallest = sink * spikes.least_norm[1] / sink.norm()
    assert spikes(torch.stack([1.01 * smallest, 0.99 * smallest, -1.01 * smallest]), 1).tolist() == [True, False, True]
    across = F.normalize(torch.randn(len(sink), generator=torch.manual_seed(2)), dim=0)
    across = F.normalize(across - (across @ spikes.direction[1]) * spikes.direction[1], dim=0)
    for cosine, expected in ((0.91, True), (0.89, False)):
        turned = cosine * spikes.direction[1] + (1 - cosine**2) ** 0.5 * across
        assert bool(spikes(1e4 * turned, 1)) == expected
    with pytest.raises(sinkscope.SinkscopeError, match="has no sink token in these 4 sequences"):
        sinkscope.spike_filter(tiny_model("llama"), ids)


def test_the_filter_has_the_mean_direction_of_all_sinks_and_the_mean_median_of_all_sequences() -> None:
    """Sinks at different positions, in batches of two; the third sequence has none."""
    model, ids = tiny_model("llama"), torch.randint(3, 90, (5, 12), generator=torch.manual_seed(1))
    draw, sinks = torch.manual_seed(0), {0: 0, 1: 2, 3: 1, 4: 0}
    direction, seen = torch.randn(model.config.hidden_size, generator=draw), dict[str, torch.Tensor]()
    off = 0.1 * torch.randn(5, model.config.hidden_size, generator=draw)
    for row, position in sinks.items():
        ids[row, position] = 90 + row

    def plant(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        which = (seen["ids"] - 90).clamp(min=-1)
        return output + 100 * (which >= 0)[..., None] * (direction + off[which])

    layers = model.model.layers
    with (
        model.model.embed_tokens.register_forward_pre_hook(lambda module, args: seen.update(ids=args[0])),
        layers[1].mlp.register_forward_hook(plant),
    ):
        spikes = sinkscope.spike_filter(model, ids, batch_size=2)
        with torch.no_grad():
            states = model(ids, output_hidden_states=True).hidden_states[2]
    of_sinks = torch.stack([F.normalize(states[row, position], dim=-1) for row, position in sinks.items()])
    torch.testing.assert_close(spikes.direction[1], F.normalize(of_sinks.sum(0), dim=-1))
    norms = torch.linalg.vector_norm(states, dim=-1)
    torch.testing.assert_close(spikes.least_norm[1], 3 * norms.median(1).values.mean())
    assert [tuple(place) for place in spikes(states, 1).nonzero().tolist()] == list(sinks.items())


@pytest.mark.real_model
def test_the_filter_of_a_real_model_is_the_mask_on_other_text(smollm: LoadedModel) -> None:
    spikes = sinkscope.spike_filter(smollm, num_seqs=4, seq_len=32)
    mask = sinkscope.spike_mask(smollm, input="code", num_seqs=4, seq_len=32)
    with torch.no_grad():  # the last of `hidden_states` is behind the norm, and no layer of a sink
        states = smollm.model(mask.token_ids, output_hidden_states=True).hidden_states[1:-1]
    assert mask.tokens.sum() == 4 * 17
    assert torch.equal(torch.stack([spikes(x, layer) for layer, x in enumerate(states)]), mask.tokens[:-1])


@pytest.mark.real_model
def test_the_mask_of_a_real_model_is_exported(smollm: LoadedModel, tmp_path: Any) -> None:
    """In SmolLM2 the first token is a sink in the outputs of layers 11 to 27, at coordinate 507."""
    asked: dict[str, Any] = {"num_seqs": 2, "seq_len": 16, "observables": ["massive"], "figures": (), "page": False}
    run = sinkscope.analyze(smollm, export_mask=True, out=tmp_path / "run", **asked)
    mask = load_file(tmp_path / "run" / "spike_mask.safetensors")
    assert run.manifest["config"]["export_mask"]
    again = sinkscope.spike_mask(smollm, mask["token_ids"])
    for name, tensor in vars(again).items():
        torch.testing.assert_close(mask[name], tensor)
    expected = torch.zeros(30, 2, 16, dtype=torch.bool)
    expected[11:28, :, 0] = True
    torch.testing.assert_close(again.tokens, expected)
    assert again.start[:, 0].tolist() == [11, 11]
    assert again.lifetime[:, 0].tolist() == [17, 17]
    assert again.massive_coordinates[12].nonzero().flatten().tolist() == [507]
