"""Spared entries, rotations and prefixes against plain hooks, plain transformers and exact small cases."""

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from safetensors.torch import load_file
from support.encoders import word_tokenizer
from support.everything import assert_as_before, state_of
from support.retrofitted import each_pair, retrofitted
from tiny import VOCAB, tiny_model, tiny_tokens

from sinkscope import InputError, quantize
from sinkscope.commands.quantize import split as quantization_split
from sinkscope.commands.quantize.command import _named_prefix
from sinkscope.commands.quantize.options import QuantizeOptions
from sinkscope.commands.quantize.prefixes import Prefixes, SparingText, outlier_prefix
from sinkscope.commands.quantize.split import Split, SplitArm
from sinkscope.commands.quantize.study import Simulation, measured_ranges
from sinkscope.measuring.subject import Subject, family_of, open_subject
from sinkscope.measuring.tracer import open_tracer
from sinkscope.models.rotation import random_rotation, rotated
from sinkscope.options.measuring import make_config
from sinkscope.options.option import checked
from sinkscope.quantization import settings
from sinkscope.quantization.formats import Precision
from sinkscope.quantization.grids import asymmetric_grid
from sinkscope.quantization.prefix_cache import CACHE, HOW, prefix_cache, write_prefix
from sinkscope.quantization.simulation import quantized_sites
from sinkscope.quantization.sites import CACHED, INPUT, OUTPUT, SUM, WEIGHT, Site, sites_of
from sinkscope.quantization.spared import Spared
from sinkscope.text.batch import Batch

BITS = 4


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_spared_entries_are_exact_and_in_no_range(name: str) -> None:
    """The reference is a copy with plain hooks, whose ranges are of the other entries."""
    model, ids = tiny_model(name), tiny_tokens(3, 20)
    family = family_of(model)[0]
    tokens = torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)) < 0.3
    sites = [site for site in sites_of(model, family) if site.part in (INPUT, OUTPUT)]
    seen: dict[tuple[str, str], list[torch.Tensor]] = {}
    twin = copy.deepcopy(model)
    for path in {site.path for site in sites}:
        keep = seen.setdefault((path, INPUT), []), seen.setdefault((path, OUTPUT), [])
        twin.get_submodule(path).register_forward_hook(
            lambda m, args, output, keep=keep: (keep[0].append(args[0]), keep[1].append(output))[2:] or None
        )
    twin(ids)
    coordinates = {site: torch.arange(seen[site.path, site.part][0].shape[-1]) % 7 == 3 for site in sites}
    spared = Spared([mask.numpy() for mask in tokens], coordinates)
    with open_tracer(model, family) as tracer:
        ranges = measured_ranges(tracer, sites, ids, spared)
    twin = copy.deepcopy(model)
    for site in sites:
        (x,) = seen[site.path, site.part]
        exact = tokens[..., None] | coordinates[site]
        low, high = x[~exact].min(), x[~exact].max()
        low, high = min(float(low), 0.0), max(float(high), 0.0)
        assert (ranges[site].low, ranges[site].high) == pytest.approx((low, high), rel=1e-5)
        grid = asymmetric_grid(ranges[site].low, ranges[site].high, BITS)
        module = twin.get_submodule(site.path)
        if site.part == INPUT:
            module.register_forward_pre_hook(
                lambda m, args, grid=grid, exact=exact: (torch.where(exact, args[0], grid.snap(args[0])),)
            )
        else:
            module.register_forward_hook(
                lambda m, args, output, grid=grid, exact=exact: torch.where(exact, output, grid.snap(output))
            )
    spared.read(Batch(ids, torch.ones_like(ids)))
    with quantized_sites(model, ranges, Precision(8, BITS), spared):
        mine = model(ids).logits
    torch.testing.assert_close(mine, twin(ids).logits, rtol=1e-3, atol=1e-3 * float(mine.abs().max()))
    assert (mine - model(ids).logits).abs().max() > 0.01 * mine.abs().max()


def simulated(model: Any, scheme: str = "static", cache: Any = None, **options: Any) -> tuple[Simulation, Any]:
    """Return a simulation on the first three of five sequences, and the other two."""
    config = make_config(**{"input": "random", "num_seqs": 5, "seq_len": 20, "bos": "never"} | options)
    with open_subject(model, None, config, Console(quiet=True)) as subject:
        own = Subject(subject.loaded, subject.family, subject.inputs.part(0, 3))
        precision = Precision(BITS, BITS, BITS, kv_cache_per=cache)
        return Simulation(own, precision, scheme=scheme, batch_size=3), subject.inputs.part(3, 5)


def test_with_all_tokens_spared_nothing_is_quantized_but_the_weights() -> None:
    """Also in attention, in more than one chunk of rows."""
    simulation, held_out = simulated(tiny_model("llama"), "full", "tensor", seq_len=70)
    ranges = {site: known for site, known in simulation.ranges(held_out).items() if site.part != WEIGHT}
    inputs = simulation.subject.inputs
    everywhere = Spared([np.ones(len(ids), bool) for ids in inputs.sequences])
    settings = [simulation.setting(*sites) for sites in (({},), (ranges,), (ranges, everywhere))]
    full, none, all_spared = (done.losses.numpy() for done in simulation.run(settings))
    np.testing.assert_allclose(all_spared, full, rtol=1e-5)
    assert np.abs(none - full).min() > 1e-3 * full.min()


@each_pair(["llama", "qwen3", "phi3"], [0, 1, 2], ("name", "seed"))
def test_a_rotation_leaves_the_function_as_it_is(name: str, seed: int) -> None:
    model, ids = tiny_model(name), tiny_tokens()
    family, plain = family_of(model)[0], model(ids, output_hidden_states=True)
    before = state_of(model)
    with rotated(model, family, random_rotation(model.config.hidden_size, seed)):
        turned = model(ids, output_hidden_states=True)
    torch.testing.assert_close(turned.logits, plain.logits, rtol=1e-3, atol=1e-4 * float(plain.logits.abs().max()))
    stream, rotated_stream = plain.hidden_states[1], turned.hidden_states[1]
    torch.testing.assert_close(rotated_stream.norm(dim=-1), stream.norm(dim=-1), rtol=1e-4, atol=1e-4)
    assert (rotated_stream - stream).abs().max() > 0.1 * stream.abs().max()
    assert_as_before(model, before)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("gemma3", "post_attention_layernorm"), ("gpt2", "not an RMSNorm"), ("mixtral", "not a linear layer's")],
)
def test_a_model_that_cannot_be_rotated_says_why(name: str, reason: str) -> None:
    model = tiny_model(name)
    rotation = random_rotation(model.config.hidden_size, 0)
    with pytest.raises(InputError, match=reason), rotated(model, family_of(model)[0], rotation):
        pass


def test_the_rule_of_prefixquant() -> None:
    first, second = np.zeros((2, 5), bool), np.zeros((2, 5), bool)
    first[0, [0, 2]] = first[1, 2] = second[0, [0, 1, 3]] = True  # in layer 0, (2 + 3) ÷ 2 of a sequence
    sequences = [np.array([9, 8, 7, 6, 5]), np.array([9, 5, 4, 6, 3])]
    assert outlier_prefix([first, second], sequences) == (7, 5, 6)  # 7 in two layers; 9 is at position 0
    rare = [np.zeros((1, 5), bool) for _ in range(11)]
    rare[0][0, 1] = True
    assert outlier_prefix(rare, sequences[:1] * 11) == ()
    assert outlier_prefix(rare[:10], sequences[:1] * 10) == (8,)  # in a tenth of them
    rare[1][0, 2] = True
    assert outlier_prefix(rare + rare[5:] * 5, sequences[:1] * 41) == (8,)  # two rare ids


def test_the_best_prefix_and_the_largest_coordinates() -> None:
    simulation, held_out = simulated(tiny_model("llama"), cache="tensor")
    split, inputs = Split(simulation, held_out, 0), simulation.subject.inputs
    together = split._peaks(SparingText(inputs))
    for site, peaks in together.items():  # they are compared with (B,Hkv,T,D) and (…,D)
        assert peaks.shape[:-1] == ((1, 2, 1) if site.part in CACHED else ())
    alone = [split._peaks(SparingText(inputs.part(index, index + 1))) for index in range(3)]
    for site, peaks in together.items():
        torch.testing.assert_close(peaks, torch.stack([each[site] for each in alone]).amax(0), rtol=1e-4, atol=1e-6)
    first = inputs.part(0, 1)
    mask = np.arange(first.longest) % 2 == 0
    spared = [split._peaks(SparingText(first, [tokens])) for tokens in (mask, ~mask)]
    for site, peaks in alone[0].items():  # tokens that are spared choose no coordinate
        torch.testing.assert_close(torch.maximum(*(each[site] for each in spared)), peaks)
        assert not any(torch.equal(each[site], peaks) for each in spared)
    largest = quantization_split._top_entries(torch.arange(12).view(3, 4))
    assert largest.tolist() == [[False] * 4, [True] * 4, [True] * 4]
    outliers = [np.zeros((1, 20), bool) for _ in held_out.sequences]
    for mask in outliers:
        mask[0, [3, 5]] = True
    last = () if split.prefixes.bos is None else (split.prefixes.bos,)
    rule = (*outlier_prefix(outliers, held_out.sequences), *last)
    for losses, is_rule in (([1.0, 2.0], True), ([2.0, 1.0], False)):
        vars(split)["_measure"] = lambda arms, losses=losses: [np.array([loss]) for loss in losses]
        assert (split._best_prefix(outliers) == rule) == is_rule


def test_frequent_tokens_of_a_prefix_are_counted_behind_position_0() -> None:
    simulation, held_out = simulated(tiny_model("llama"))
    split = Split(simulation, replace(held_out, sequences=(np.array([9, 9, 4, 4, 7, 8]),) * 2), 0)
    vars(split)["_measure"] = lambda arms: [np.array([2.0]), np.array([1.0])]
    outliers = [np.array([[False] * 4 + [True] * 2])] * 2
    assert split._best_prefix(outliers)[:-1] == (4, 9)  # as many as the rule's tokens, 7 and 8


def test_the_prefix_is_found_in_the_outliers_of_the_texts_that_calibrate() -> None:
    split, arms = Split(*simulated(tiny_model("llama")), 0), list[SplitArm]()
    vars(split).update(_losses=lambda run: [np.ones(3)] * 3, _rotate=lambda: None, _measure_and_note=arms.extend)
    vars(split).update(_outliers=lambda inputs: [(len(inputs), "massive")], _sparing_arms=lambda *outliers: [])
    vars(split)["_best_prefix"] = lambda outliers: (5, *outliers)
    split.tables({}, None, 3)
    assert arms[0].prefix == (5, len(split.calibration))
    assert [(arm.draw, len(arm.prefix)) for arm in arms] == [(-1, 2), (0, 2), (1, 2), (2, 2)]
    assert len({arm.prefix for arm in arms}) == 4


def test_outliers_are_looked_for_where_the_mlp_and_the_layer_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization_split, "_outliers_of", lambda tracer, sites, ids: list(map(str, sites)))
    for name, last in (("llama", "mlp.down_proj input"), ("gpt2", "mlp.c_proj input")):
        split = Split(*simulated(tiny_model(name)), 0)
        expected = [f"layer {layer} {end}" for end in (last, "layer_out residual sum") for layer in range(3)]
        assert split._outliers(split.calibration) == [expected] * 2


def test_outliers_of_a_token_are_beyond_64_times_the_median_or_massive(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = torch.tensor([1.0, 1.0, 1.0, 1.0, 65.0, 64.0])[:, None].expand(-1, 8)
    stream = torch.ones(6, 8)
    stream[2, 5] = 1500.0
    seen = {Site("a", INPUT, 0, "down"): peaks, Site("b", SUM, 0, "layer_out"): stream}

    def read(tracer: Any, sites: Any, sequences: Any, see: Any) -> None:
        for site, x in seen.items():
            see(site, x)

    monkeypatch.setattr(quantization_split, "read", read)
    masks = quantization_split._outliers_of(None, (), np.arange(6))  # type: ignore[arg-type]
    assert [np.flatnonzero(mask.any(0)).tolist() for mask in masks] == [[4], [2]]
    split = Split(*simulated(tiny_model("llama"), seq_len=6), 0)
    vars(split)["_peaks"] = lambda text: {}
    arm = split._sparing_arms([masks] * 3, [masks] * 2)[0]
    assert [np.flatnonzero(mask).tolist() for mask in arm.text.spared] == [[0, 2, 4]] * 3


def test_the_loss_of_a_rotated_model_in_full_precision_is_measured_in_it() -> None:
    split = Split(*simulated(tiny_model("llama")), 0)
    sequences = tuple(ids[:length] for ids, length in zip(split.inputs.sequences, (20, 10, 5), strict=True))
    full, rotated_full, rotated_all, everything = np.array([[19, 9, 4], [95, 9, 8], [190, 18, 16], [218, 19, 19.0]])
    measured = {"_losses": lambda run: [rotated_full], "_measure": lambda arms, weights: [rotated_all]}
    inputs = replace(split.inputs, sequences=sequences)
    vars(split).update(inputs=inputs, full=full, everything=everything, weights={}, **measured)
    split._rotate()
    row = split.rows[0]  # of 32 predicted tokens
    assert [row["full_loss"], row["loss"], row["cost"], row["share"]] == pytest.approx([3.5, 7.0, 6.0, 1 / 7])


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_the_saved_keys_and_values_in_plain_transformers(name: str, tmp_path: Path) -> None:
    """The file's own instructions give the logits of the whole text."""
    model, prefix, text_ids = tiny_model(name), (5, 9, 7), tiny_tokens(2, 12)
    write_prefix(prefix_cache(model, prefix), "tiny", tmp_path)
    assert load_file(tmp_path / CACHE)["token_ids"].tolist() == list(prefix)
    (code,) = re.findall(r"```python\n(.+?)```", (tmp_path / HOW).read_text(), re.DOTALL)
    names = {"model": model, "text_ids": text_ids}
    exec(code.replace(CACHE, str(tmp_path / CACHE)), names)
    whole = model(torch.cat([torch.tensor(prefix).expand(2, -1), text_ids], dim=1)).logits[:, len(prefix) :]
    torch.testing.assert_close(names["logits"], whole, rtol=1e-3, atol=1e-4 * float(whole.abs().max()))


@pytest.mark.parametrize("bos", ["never", "always"])
def test_the_split_of_a_llama(bos: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first tokens have outliers, the same tokens are predicted in every setting, and the controls are as many."""
    monkeypatch.setattr(quantization_split, "RANDOM_DRAWS", 1)
    model = tiny_model("llama")
    simulation, held_out = simulated(model, bos=bos)
    split, inputs = Split(simulation, held_out, 1), simulation.subject.inputs
    arms: dict[tuple[str, int], SplitArm] = {}
    note = split._measure_and_note

    def noted(each: list[SplitArm]) -> None:
        arms.update({(arm.setting, arm.draw): arm for arm in each})
        note(each)

    monkeypatch.setattr(split, "_measure_and_note", noted)
    table = split.tables(simulation.ranges(held_out), split.prefixes.checked((5, 8)), 1)["quantization_split"]
    assert split.prefix == ((5, 8, 1) if bos == "always" else (5, 8))
    rows = table[table["draw"] == settings.NO_DRAW].set_index("setting")
    full, everything = rows.loc[settings.FULL], rows.loc[settings.ALL]
    assert full["loss"] == pytest.approx(plain_loss(model, inputs.sequences, 1), rel=1e-5)
    own = [ids[bos == "always" :] for ids in inputs.sequences]
    behind = [np.concatenate([split.prefix, ids]) for ids in own]
    first = len(split.prefix) + (bos == "never")
    assert rows["full_loss"][settings.PREFIX] == pytest.approx(plain_loss(model, behind, first), rel=1e-5)
    assert rows["full_loss"][settings.ROTATION] == pytest.approx(full["loss"], rel=1e-4)
    (quantized,) = simulation.run([simulation.setting(simulation.ranges(held_out))])
    assert everything["loss"] == pytest.approx(quantized.loss / inputs.num_predicted, rel=1e-6)
    with rotated(model, simulation.subject.family, random_rotation(model.config.hidden_size, 1)):
        (turned,) = simulation.run([simulation.setting(simulation.ranges(held_out))])
    assert rows["loss"][settings.ROTATION] == pytest.approx(turned.loss / inputs.num_predicted, rel=1e-6)
    assert rows["cost"].tolist() == pytest.approx((rows["loss"] - full["loss"]).tolist(), abs=1e-5)
    assert rows["cost"].between(rows["cost_low"], rows["cost_high"]).all()
    for setting in (settings.TOKENS, settings.COORDINATES, settings.PREFIX):
        control = table[(table["setting"] == setting) & (table["draw"] == 0)].iloc[0]
        assert (control[["tokens", "coordinates"]] == rows.loc[setting][["tokens", "coordinates"]]).all()
        assert control["loss"] != rows["loss"][setting]
        assert rows["share"][setting] == pytest.approx(1 - rows["cost"][setting] / everything["cost"])
    for setting in (settings.TOKENS, settings.COORDINATES, settings.PREFIX):
        arm = arms[setting, settings.NO_DRAW]
        with simulation.tracer() as tracer:
            spared = Spared(arm.calibration.spared, arm.coordinates)
            ranges = measured_ranges(tracer, simulation.sites, arm.calibration.inputs.read, spared)
        sparing = simulation.setting(ranges, Spared(arm.text.spared, arm.coordinates), inputs=arm.text.inputs)
        (done,) = simulation.run([sparing])
        assert rows["loss"][setting] == pytest.approx(done.loss / inputs.num_predicted, rel=1e-6)
    outliers, random = (arms[settings.TOKENS, draw] for draw in (settings.NO_DRAW, 0))
    both = arms[settings.BOTH, settings.NO_DRAW]
    assert both.text.spared is outliers.text.spared
    assert both.calibration.spared is outliers.calibration.spared
    for site, peaks in split._peaks(both.calibration).items():
        assert torch.equal(both.coordinates[site], quantization_split._top_entries(peaks))
    for ours, control in zip((outliers.text, outliers.calibration), (random.text, random.calibration), strict=True):
        assert [mask.sum() for mask in control.spared] == [mask.sum() for mask in ours.spared]
        assert not np.array_equal(control.spared, ours.spared)


def plain_loss(model: Any, sequences: list[np.ndarray], first: int) -> float:
    """Return the mean cross-entropy of the tokens from position `first` on."""
    ids = torch.tensor(np.array(sequences))
    return float(F.cross_entropy(model(ids).logits[:, first - 1 : -1].flatten(0, 1), ids[:, first:].flatten()))


def test_the_command_saves_the_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization_split, "RANDOM_DRAWS", 0)
    small = {"input": "random", "num_seqs": 2, "seq_len": 12, "calibration": 1, "prefix_draws": 2, "seed": 3}
    small |= {"bits_weights": 16, "bits_activations": 16}
    run = quantize(
        tiny_model("gemma3"), scheme="static", prefix="5,8,5", out=tmp_path / "run", figures=(), page=False, **small
    )
    assert {CACHE, HOW} <= set(json.loads((tmp_path / "run" / "run.json").read_text())["files"])
    assert run.manifest["quantization"]["prefix"] == load_file(tmp_path / "run" / CACHE)["token_ids"].tolist()
    assert run.manifest["quantization"]["prefix_text"][:21] == "<id 5><id 8><id 5>"
    drawn, table = np.random.default_rng(3), run.tables["quantization_split"]
    random = [" ".join(map(str, drawn.choice(VOCAB, len(run.manifest["quantization"]["prefix"])))) for _ in range(2)]
    assert table["prefix"][table["draw"] >= 0].tolist() == random
    assert "was not rotated: layer 0 adds the output of post_attention_layernorm" in run.verdict


def test_a_wrong_prefix_is_refused() -> None:
    prefixes = Split(*simulated(tiny_model("llama")), 0).prefixes
    for prefix, message in (
        ((3, VOCAB), f"token id {VOCAB}"),
        ((), "no token"),
    ):
        with pytest.raises(InputError, match=message):
            prefixes.checked(prefix)
    loaded = replace(prefixes.subject.loaded, model=retrofitted("llama", "register-tokens", torch.float32))
    with pytest.raises(InputError, match="it has registers before the text"):
        Prefixes(replace(prefixes.subject, loaded=loaded), prefixes.calibration)


@pytest.mark.parametrize(("bos", "most"), [("never", 256 - 20), ("always", 256 - 20 + 1)])
def test_a_prefix_and_the_longest_text_fill_the_positions(bos: str, most: int) -> None:
    simulation, held_out = simulated(tiny_model("llama"), bos=bos)
    shorter = replace(held_out, sequences=tuple(ids[:9] for ids in held_out.sequences))
    for texts in ((simulation.subject.inputs, shorter), (shorter, simulation.subject.inputs)):
        prefixes, prefix = Prefixes(replace(simulation.subject, inputs=texts[0]), texts[1]), (*(5,) * 300, 1)
        assert prefixes.checked(prefix[-most:]) == prefix[-most:]
        with pytest.raises(InputError, match=f"{most + 1} tokens and the text are beyond the model's 256"):
            prefixes.checked(prefix[-most - 1 :])


def test_a_prefix_ends_with_the_bos_of_the_texts() -> None:
    prefixes = Split(*simulated(tiny_model("llama"), bos="always"), 0).prefixes
    for prefix, before in (((5, 8), (5, 8, 1)), ((5, 1), (5, 1)), ((1, 5), (1, 5, 1))):
        assert prefixes.checked(prefix) == before
    without = replace(prefixes.calibration, sequences=(*prefixes.calibration.sequences, np.array([7, 8])))
    assert Prefixes(prefixes.subject, without).checked((5, 8)) == (5, 8)  # some of them begin with no BOS


def test_random_prefixes_have_no_special_token_of_the_tokenizer_whose_bos_comes_first() -> None:
    simulation, held_out = simulated(tiny_model("llama"))
    tokenizer = SimpleNamespace(bos_token_id=4, all_special_ids=[4, 5], added_tokens_decoder={})
    loaded = replace(simulation.subject.loaded, tokenizer=tokenizer)
    prefixes = Prefixes(replace(simulation.subject, loaded=loaded), held_out)
    assert prefixes.bos == 4
    assert {*range(VOCAB)} - {*prefixes.random(20 * VOCAB, np.random.default_rng(0))} == {4, 5}


@pytest.mark.parametrize(("named", "prefix"), [("auto", None), ("5,8", (5, 8)), ("w1 w2", (8, 9))])
def test_a_prefix_is_named_by_ids_or_a_text_without_special_tokens(named: str, prefix: tuple[int, ...] | None) -> None:
    split = Split(*simulated(tiny_model("llama")), 0)
    subject = split.simulation.subject
    split.simulation.subject = replace(subject, loaded=replace(subject.loaded, tokenizer=word_tokenizer()))
    assert _named_prefix(split, checked(QuantizeOptions, {"scheme": "static", "prefix": named})) == prefix
