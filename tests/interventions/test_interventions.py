"""Interventions compared with models edited by hand in plain transformers, and the state of a model after them."""

import copy
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from support.attention_rows import Rows
from support.everything import assert_as_before, state_of
from support.naming import naming
from tiny import REPRESENTATIVE, TINY, padded, ragged_tokens, tiny_model, tiny_tokens
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from sinkscope import InputError, intervening, retrofit_model
from sinkscope.attention import weights as attention_weights
from sinkscope.attention.seam import open_seam
from sinkscope.attention.weights import AttentionRead, column_sums
from sinkscope.interventions import INTERVENTIONS, Intervention, Known, Target, applied, parse
from sinkscope.interventions.intervention import Expectation, expectation, random_controls
from sinkscope.interventions.super_weight import usual_pairs
from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.measuring.observables.observable import Observable, Reading, Settings
from sinkscope.measuring.tracer import open_tracer
from sinkscope.models.families import find_family
from sinkscope.models.projections import effective_positions, projections
from sinkscope.text.batch import Batch

# One of each; a query bias is perturbed before it is zeroed, because a zero bias cannot be perturbed.
TEXT_OF_EACH = (
    "perturb-query-bias:seed=3", "nullify-query-bias:layers=1-2", "replace-epe:source=5", "transplant-epe:target=3",
    "nullify-first-embedding", "zero-key-columns:coordinates=3,17", "zero-massive:layers=0,coordinates=3,17",
    "mean-massive:layers=1,coordinates=3,17,means=5,-7", "scale-sink-value:factor=3", "mean-sink-value:means=3",
    "mask-sink", "isolate:positions=4", "rescale-norm:layers=1", "zero-super-weight:layer=1,rows=3,column=5",
    "zero-super-expert:layer=1,expert=1", "ablate-heads:numbers=1,6", "scale-head-outputs:positions=4",
    "streaming-window:window=4,keep=1",
)  # fmt: skip
EACH = {text.partition(":")[0]: text for text in TEXT_OF_EACH}
BIASED = ("gpt2", "gpt_neox", "gpt_neox-sequential", "bloom", "opt", "opt-post-norm", "qwen2", "phi", "gpt_oss")
LEARNED = {"gpt2": 0, "gpt_neo": 0, "opt": 2, "opt-post-norm": 2}  # family → row of position 0
MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss")
WITHOUT_NORMS = ("olmo2", "opt-post-norm")  # no norms before the branches
OWN_CODE = ("bloom", "falcon", "falcon-alibi", "falcon-new", "mpt", "gptj", "gpt_neo")  # no attention interface
# Row chunks and ungrouped heads are computed by other operations than in the bare model's own kernel (test_tracer.py).
ROUNDED = ("gemma2", "gpt_oss", "falcon")
IDS = tiny_tokens(2, 9)


@torch.no_grad()
def logits(model: PreTrainedModel, ids: torch.Tensor = IDS, **inputs: Any) -> torch.Tensor:
    return model(ids, use_cache=False, **inputs).logits


def under(model: PreTrainedModel, *do: str | Intervention, **inputs: Any) -> torch.Tensor:
    with intervening(model, *do):
        return logits(model, **inputs)


def assert_close(ours: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    """Compare up to round-off, relative to the largest logit."""
    torch.testing.assert_close(ours, expected, rtol=0, atol=tolerance * float(expected.abs().max()))


def assert_same(name: str, ours: torch.Tensor, expected: torch.Tensor) -> None:
    if name in ROUNDED:
        assert_close(ours, expected, 1e-5)
    else:
        assert torch.equal(ours, expected)


@contextmanager
def target_of(model: PreTrainedModel) -> Iterator[Target]:
    family = find_family(model)
    with open_seam(model, family) as seams:
        yield Target(model, family, seams)


def known_of(model: PreTrainedModel, length: int = 9, **more: Any) -> Known:
    with target_of(model) as target:
        return Known(target, length, **more)


def applicable(model: PreTrainedModel, combined: bool = False) -> dict[str, str]:
    """Return the texts of EACH that apply; `combined` leaves out streaming-window, which cannot be combined."""
    with target_of(model) as target:
        names = [name for name in EACH if INTERVENTIONS[name].inapplicable(target) is None]
    expert = ",expert=1" if "zero-super-expert" in names else ""
    texts = EACH | {"zero-super-weight": EACH["zero-super-weight"] + expert}
    return {name: texts[name] for name in names if not (combined and name == "streaming-window")}


def inputs_of(model: PreTrainedModel, batch: Batch) -> dict[str, Any]:
    inputs = {"ids": batch.token_ids, "attention_mask": batch.attention_mask}
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = batch.position_ids
    return inputs


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    return list(find_family(model).layer_modules(model))


def attentions_of(model: PreTrainedModel) -> list[nn.Module]:
    return list(find_family(model).attentions(model).values())


def position_table(model: PreTrainedModel) -> torch.Tensor:
    opt = model.config.model_type == "opt"
    return model.get_submodule("model.decoder.embed_positions" if opt else "transformer.wpe").weight.data


def without_query_bias(
    model: PreTrainedModel, layers: Iterable[int] = range(3), heads: Sequence[int] = range(4)
) -> Any:
    model = copy.deepcopy(model)
    for layer in layers:
        query = projections(model, find_family(model), layer)["query"]
        query.module.bias.data[query.places[list(heads)]] = 0
    return model


def without_key_columns(
    model: PreTrainedModel, coordinates: list[int], layers: Iterable[int] = range(3), heads: Any = ...
) -> PreTrainedModel:
    model = copy.deepcopy(model)
    for layer in layers:
        key = projections(model, find_family(model), layer)["key"]
        weight = key.module.weight.data.T if isinstance(key.module, Conv1D) else key.module.weight.data
        weight[key.places[heads][..., None], coordinates] = 0
    return model


def without_embeddings(model: PreTrainedModel, positions: list[int]) -> PreTrainedModel:
    model = copy.deepcopy(model)
    embedding = model.get_input_embeddings()
    embedding.register_forward_hook(lambda module, args, x: x.index_fill(1, torch.tensor(positions), 0.0))
    return model


def with_entries(model: PreTrainedModel, entries: dict[tuple[int, int, int], float]) -> PreTrainedModel:
    """Set entries (layer, position, coordinate) of the layers' outputs, by forward hooks."""

    def edit(layer: int, module: nn.Module, args: tuple, output: Any) -> Any:
        x = (output[0] if isinstance(output, tuple) else output).clone()
        for (at, position, coordinate), value in entries.items():
            if at == layer:
                x[:, position, coordinate] = value
        return (x, *output[1:]) if isinstance(output, tuple) else x

    model = copy.deepcopy(model)
    for number, module in enumerate(layers_of(model)):
        module.register_forward_hook(partial(edit, number))
    return model


def with_scaled_inputs(model: PreTrainedModel, layers: Sequence[int], positions: list[int], factor: float) -> Any:
    """Multiply the layers' inputs at the positions, by hooks before the layers."""

    def scaled(module: nn.Module, args: tuple) -> tuple:
        factors = torch.ones_like(args[0])
        factors[:, positions] = factor
        return args[0] * factors, *args[1:]

    model = copy.deepcopy(model)
    for layer in layers:
        layers_of(model)[layer].register_forward_pre_hook(scaled)
    return model


def without_entries(model: PreTrainedModel, parts: dict[str, tuple[int, Sequence[int], Sequence[int]]]) -> Any:
    """Set the entries at rows and columns of linear maps m = W x to 0; paths in a layer → layer, rows, columns."""
    model = copy.deepcopy(model)
    for path, (layer, rows, columns) in parts.items():
        module = dict(layers_of(model)[layer].named_modules()).get(path)
        if module is not None:
            weight = module.weight.data.T if isinstance(module, Conv1D) else module.weight.data
            weight[np.ix_(rows, columns)] = 0
    return model


# the last map of the feed-forward network, whatever its name
DOWN = ("mlp.down_proj", "mlp.c_proj", "mlp.fc_out", "mlp.fc2", "mlp.dense_4h_to_h", "fc2", "ffn.down_proj")
OUT = ("self_attn.o_proj", "self_attn.dense", "attn.c_proj", "attention.dense", "self_attn.out_proj", "attn.out_proj",
    "self_attention.dense", "attn.attention.out_proj")  # fmt: skip
ROWS = list(range(32))


AT = "layers=0,2,positions=0,3,coordinates=3,17"
RESCALED = "rescale-norm:layers=0,2,positions=0,3,factor=4"
PLACES = [(layer, position, coordinate) for layer in (0, 2) for position in (0, 3) for coordinate in (3, 17)]
MEANS = (1.5, -20.0, 3.25, 40.0, -5.0, 6.0, 70.0, -8.5)
MEAN_AT = dict(zip(PLACES, MEANS, strict=True))
# text → the model edited by hand
BY_HAND: dict[str, Callable[[PreTrainedModel], PreTrainedModel]] = {
    "nullify-query-bias": without_query_bias,
    "nullify-query-bias:layers=1-2,heads=0,3": partial(without_query_bias, layers=(1, 2), heads=(0, 3)),
    "zero-key-columns:coordinates=3,17,20-22": partial(without_key_columns, coordinates=[3, 17, 20, 21, 22]),
    "zero-key-columns:layers=1,heads=0,coordinates=5,9": partial(
        without_key_columns, coordinates=[5, 9], layers=[1], heads=[0]
    ),
    "nullify-first-embedding": partial(without_embeddings, positions=[0]),
    "nullify-first-embedding:positions=0,4": partial(without_embeddings, positions=[0, 4]),
    f"zero-massive:{AT}": partial(with_entries, entries=dict.fromkeys(PLACES, 0.0)),
    f"mean-massive:{AT},means={','.join(map(str, MEANS))}": partial(with_entries, entries=MEAN_AT),
    "zero-super-weight:layer=1,rows=3,7,column=5": partial(
        without_entries, parts=dict.fromkeys(DOWN, (1, [3, 7], [5]))
    ),
    RESCALED: partial(with_scaled_inputs, layers=(0, 2), positions=[0, 3], factor=4.0),
}


@pytest.mark.parametrize("name", dict.fromkeys([*REPRESENTATIVE, *BIASED]))
def test_an_intervention_is_the_model_edited_by_hand(name: str) -> None:
    model = tiny_model(name)
    for text, edited in BY_HAND.items():
        if text.partition(":")[0] in applicable(model) and not (name in MIXTURES and "weight" in text):
            with naming(text):
                assert_same(name, under(model, text), logits(edited(model)))


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_an_ablated_head_is_one_that_the_output_projection_does_not_read(name: str) -> None:
    model = tiny_model(name)
    paths = [path for path in OUT if path in dict(layers_of(model)[1].named_modules())]
    assert len(paths) == 1
    module = layers_of(model)[1].get_submodule(paths[0])
    width = (module.nx if isinstance(module, Conv1D) else module.in_features) // 4
    columns = [*range(width), *range(2 * width, 3 * width)]  # heads 0 and 2 of layer 1
    edited = without_entries(model, {paths[0]: (1, ROWS, columns)})
    assert_close(under(model, "ablate-heads:numbers=4,6"), logits(edited), 1e-5)


@pytest.mark.parametrize("name", REPRESENTATIVE)
@pytest.mark.parametrize("around", ["mean", "zero"])
def test_scaled_head_outputs_are_those_that_the_output_projection_reads_in_plain_transformers(
    name: str, around: str
) -> None:
    """The hook of the reference scales columns of heads 0 and 2 at position 4 by 3, around the mean of 5 tokens."""
    model, twin = (tiny_model(name, dtype=torch.float64) for _ in range(2))
    (path,) = [path for path in OUT if path in dict(layers_of(twin)[1].named_modules())]

    def scale(module: nn.Module, args: tuple) -> tuple:
        x = args[0].clone()
        width = x.shape[-1] // 4
        for column in [*range(width), *range(2 * width, 3 * width)]:
            center = x[:, :5, column].sum(1) / 5 if around == "mean" else 0.0
            x[:, 4, column] = center + 3 * (x[:, 4, column] - center)
        return (x, *args[1:])

    layers_of(twin)[1].get_submodule(path).register_forward_pre_hook(scale)
    text = f"scale-head-outputs:positions=4,layers=1,heads=0+2,factor=3,around={around}"
    assert_close(under(model, text), logits(twin), 1e-5)  # the softmax of some families is in float32


def test_the_mean_of_head_outputs_leaves_out_padding_and_needs_all_tokens_in_one_pass() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    model.set_attn_implementation("eager")  # whose padding has outputs, where SDPA's are 0
    with intervening(model, "scale-head-outputs:positions=4+5"):
        left = torch.cat([IDS[1:, :2], IDS[:1, :7]], dim=1)
        mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1]])
        together = model(left, attention_mask=mask, position_ids=mask.cumsum(1) - 1).logits
        assert_close(together[:, 2:], logits(model, IDS[:1, :7]), 1e-6)  # its softmax is in float32
        prompt = model(IDS[:, :5], use_cache=True)
        with pytest.raises(InputError, match="around=mean needs all tokens up to position 5 in one pass"):
            model(IDS[:, 5:6], past_key_values=prompt.past_key_values)
    with intervening(model, "scale-head-outputs:positions=4,around=zero"):
        prompt = model(IDS[:, :4], use_cache=True)
        decoded = model(IDS[:, 4:5], past_key_values=prompt.past_key_values, use_cache=True).logits[:, 0]
    assert_close(decoded, under(model, "scale-head-outputs:positions=4,around=zero")[:, 4], 1e-12)
    with pytest.raises(InputError, match="would change nothing: its factor is 1"):
        under(model, "scale-head-outputs:positions=4,factor=1")
    # the means are of unedited outputs, so that the order of the positions does not matter
    both = [under(model, f"scale-head-outputs:layers=1,positions={each}") for each in ("4+6", "6+4")]
    assert_close(*both, 1e-12)


@pytest.mark.parametrize("name", MIXTURES)
def test_an_expert_or_a_weight_of_it_is_zeroed_alone(name: str) -> None:
    model = tiny_model(name)
    for text, rows, column in (
        ("zero-super-expert:layer=1,expert=2", slice(None), slice(None)),
        ("zero-super-weight:layer=1,expert=2,rows=4,column=9", 4, 9),
    ):
        edited = copy.deepcopy(model)
        experts = layers_of(edited)[1].mlp.experts
        own = experts.down_proj.data[2]
        (own.T if experts.is_transposed else own)[rows, column] = 0
        if experts.has_bias and column == slice(None):
            experts.down_proj_bias.data[2] = 0
        assert_same(name, under(model, text), logits(edited))
    with pytest.raises(InputError, match="layer 1 has 4 experts: name one"):
        under(model, "zero-super-weight:layer=1,rows=4,column=9")


def gradients(model: PreTrainedModel) -> list[torch.Tensor]:
    loss = model(IDS, labels=IDS, use_cache=False).loss
    learning = [x for x in model.parameters() if x.requires_grad]
    slopes = torch.autograd.grad(loss, learning, allow_unused=True)
    return [torch.zeros(()) if x is None else x for x in slopes]


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_a_model_is_bit_for_bit_what_it_was_when_an_intervention_ends(name: str) -> None:
    assert EACH.keys() == INTERVENTIONS.keys()
    model = tiny_model(name).requires_grad_(True)
    before, slopes = state_of(model), gradients(model)
    for intervention, text in applicable(model).items():
        with intervening(model, text):
            changed = logits(model)
        assert not torch.equal(changed, before["logits"]), f"{intervention} did nothing"
        with naming(intervention):
            assert_as_before(model, before)
    loss, learning = model(IDS, labels=IDS, use_cache=False).loss, list(model.parameters())
    with intervening(model, *applicable(model, combined=True).values()):
        logits(model)
        edited_slopes = torch.autograd.grad(loss, learning, allow_unused=True)  # edits never write to the weights
    assert all(ours is None or torch.equal(ours, theirs) for ours, theirs in zip(edited_slopes, slopes, strict=True))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients(model), slopes, strict=True))
    with target_of(model) as target:  # one arm after the other, while the seams stay installed
        seams = [(seam.forbidden, seam.kernel) for seam in target.seams.values()]
        for text in applicable(tiny_model(name)).values():
            with applied(target, [parse(text)]):
                logits(model)
            assert [(seam.forbidden, seam.kernel) for seam in target.seams.values()] == seams


def test_what_does_not_apply_says_why_and_is_refused() -> None:
    for name in TINY:
        with naming(name):
            model = tiny_model(name)
            before = state_of(model)
            refused = EACH.keys() - applicable(model).keys() - {"streaming-window"}  # tested in test_streaming.py
            biased = {"nullify-query-bias", "perturb-query-bias"} if name not in BIASED else set()
            learned = {"replace-epe", "transplant-epe"} if name not in LEARNED else set()
            normed = {"rescale-norm"} if name in WITHOUT_NORMS else set()
            mixed = {"zero-super-expert"} if name not in MIXTURES else set()
            assert refused == biased | learned | normed | mixed
            for intervention in refused:
                with pytest.raises(InputError, match=f"{intervention} does not apply to this model: .+"):
                    under(model, EACH[intervention])
            assert_as_before(model, before)
    registers = retrofit_model(tiny_model("llama"), None, "register-tokens", count=2)
    assert EACH.keys() - applicable(registers).keys() >= {"nullify-first-embedding"}


def biases(model: PreTrainedModel) -> torch.Tensor:
    return torch.stack([projections(model, find_family(model), layer)["query"].bias for layer in range(3)])  # type: ignore[misc]


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "gpt_oss"])
def test_perturb_query_bias_changes_each_chosen_head_by_the_norm_of_its_bias(name: str) -> None:
    model = tiny_model(name)
    before = biases(model)
    text = "perturb-query-bias:layers=0,2,heads=1,2"
    with intervening(model, f"{text},seed=5"):
        change = biases(model) - before
        first = logits(model)
    expected = before.norm(dim=-1)
    expected[1] = expected[:, [0, 3]] = 0.0
    torch.testing.assert_close(change.norm(dim=-1), expected)
    assert torch.cosine_similarity(change, before, dim=-1).abs().max() < 0.99
    assert torch.equal(under(model, f"{text},seed=5"), first)
    assert not torch.equal(under(model, f"{text},seed=6"), first)


def test_equal_query_biases_are_perturbed_differently_in_each_layer_and_head() -> None:
    model = tiny_model("gpt2")
    for attention in attentions_of(model):
        attention.c_attn.bias.data[:32] = torch.arange(1.0, 9.0).repeat(4)
    with intervening(model, "perturb-query-bias"):
        assert len(torch.unique(biases(model).flatten(0, 1), dim=0)) == 3 * 4


EXCHANGES = {
    "replace-epe:source=5": [5, 1, 2, 3, 4, 5, 6, 7, 8],
    "replace-epe:positions=0,2,source=6": [6, 1, 6, 3, 4, 5, 6, 7, 8],
    "transplant-epe:target=3": [3, 1, 2, 0, 4, 5, 6, 7, 8],
    "transplant-epe:source=1,target=8": [0, 8, 2, 3, 4, 5, 6, 7, 1],
}


@pytest.mark.parametrize(("name", "text"), zip(LEARNED, EXCHANGES, strict=True))
def test_positions_are_exchanged_as_position_ids_do_and_epe_in_what_the_first_layer_gives(name: str, text: str) -> None:
    model = tiny_model(name)
    position_ids = torch.tensor([EXCHANGES[text]] * 2)  # with a mask, so that they are not taken for packed sequences
    expected = logits(model, attention_mask=torch.ones_like(IDS), position_ids=position_ids)
    assert_close(under(model, text), expected, 1e-6)
    if name == "opt-post-norm":  # it has no EPE
        return
    model = tiny_model(name, dtype=torch.float64, spread=4.0)
    ours = under(model, f"{text},at=epe")
    epe = effective_positions(model, find_family(model), 9)

    def exchanged(module: Any, args: tuple, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        hidden = hidden + epe[EXCHANGES[text]] - epe
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    with layers_of(model)[0].register_forward_hook(exchanged):
        assert_close(ours, logits(model), 1e-10)
    assert (ours - under(model, text)).abs().max() > 1e-3  # the vectors also reach the first layer's attention


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_rescale_norm_is_read_at_its_own_layer_and_not_after_the_one_before(name: str) -> None:
    class Stream(Observable):
        sites = ("layer_in", "layer_out")

        def __init__(self) -> None:
            super().__init__(Settings(positions=4, window=4))
            self.read: dict[tuple[int, str], torch.Tensor] = {}

        def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
            self.read[layer, site] = reading.tensor.clone()

    model, stream = tiny_model(name), Stream()
    with open_tracer(model, find_family(model), interventions=[parse("rescale-norm:layers=1,factor=4")]) as tracer:
        tracer.forward(whole(), [stream])
    expected = stream.read[0, "layer_out"].clone()
    expected[:, 0] *= 4
    assert torch.equal(stream.read[1, "layer_in"], expected)


@pytest.mark.parametrize(
    ("name", "text"), [("llama", f"zero-massive:{AT}"), ("bloom", RESCALED), ("gpt2", "nullify-query-bias")]
)
def test_gradients_are_those_of_the_edited_model(name: str, text: str) -> None:
    """Edited weights have gradients if the model's own have them."""
    model = tiny_model(name, dtype=torch.float64).requires_grad_(True)
    next(model.parameters()).requires_grad_(False)
    expected = gradients(BY_HAND[text](model))
    with intervening(model, text):
        assert [x.requires_grad for x in model.parameters()].count(False) == 1
        computed = gradients(model)
    scale = max(float(x.abs().max()) for x in expected)
    for ours, theirs in zip(computed, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6 * scale)


def taps(model: PreTrainedModel, layer: int, *do: str) -> dict[str, torch.Tensor]:
    """Return the key and value (B,K,T,d) in a layer's attention."""
    seen = {}
    with intervening(model, *do):
        seam = attentions_of(model)[layer].get_submodule("sinkscope")
        for role in ("key", "value"):
            getattr(seam, role).register_forward_hook(lambda tap, args, x, role=role: seen.update({role: x.clone()}))
        logits(model)
    return seen


def test_values_are_changed_in_the_heads_with_a_sink_alone() -> None:
    """Two query heads read each key/value head here: a sink in one of them is enough, in half of the sequences."""
    model, sinks = tiny_model("llama"), {(1, 0), (2, 3)}
    rows = [(layer, head, head // 2, 0, 0.5 * ((layer, head) in sinks)) for layer in range(3) for head in range(4)]
    rows += [(layer, 3, 1, 5, 1.0) for layer in range(3)]  # sinks at another position
    table = pd.DataFrame(rows, columns=["layer", "head", "kv_head", "position", "sink_rate"])
    by_head = ("layers=1,heads=0", "layers=2,heads=1")
    for change in ("scale-sink-value:factor=3", "mean-sink-value:means=0.5"):
        with target_of(model) as target:
            decided = parse(f"{change},where=sinks").resolved(Known(target, 9, {"attention": table}))
            with applied(target, [decided]):
                edited = logits(model)
        assert torch.equal(edited, under(model, *(f"{change},{heads}" for heads in by_head)))
        known = known_of(model, tables={"attention": table})
        elsewhere = decided.control(known, torch.Generator().manual_seed(0)).resolved(known)
        assert (elsewhere.positions != (0,), elsewhere._sinks) == (True, {(1, 0), (2, 1)})
        with pytest.raises(InputError, match="decided by measuring"), intervening(model, f"{change},where=sinks"):
            pass
        none = known_of(model, tables={"attention": table.assign(sink_rate=0.4)})
        with pytest.raises(InputError, match="no head has a sink at position 0"):
            parse(f"{change},where=sinks").resolved(none)


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_scale_sink_value_scales_the_values_at_the_positions_and_nothing_else(name: str) -> None:
    model = tiny_model(name)
    before = taps(model, 1)
    last = before["value"].shape[1] - 1
    after = taps(model, 1, f"scale-sink-value:layers=1,heads={last},positions=0,4,factor=-2.5")
    expected = before["value"].clone()
    expected[:, last, [0, 4]] *= -2.5
    assert torch.equal(after["value"], expected)
    assert torch.equal(after["key"], before["key"])


def with_forbidden(model: PreTrainedModel, positions: list[int], heads: list[int], layers: Sequence[int]) -> Any:
    """Return the model's eager twin, with another mask in some layers."""
    pairs = torch.zeros(1, 4, 9, 9, dtype=torch.bool)
    for position in positions:
        pairs[:, heads, position + 1 :, position] = True

    def masked(module: nn.Module, args: tuple, kwargs: dict) -> tuple:
        mask = kwargs["attention_mask"]
        return args, kwargs | {"attention_mask": mask.masked_fill(pairs, torch.finfo(mask.dtype).min)}

    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    for layer in layers:
        attentions_of(twin)[layer].register_forward_pre_hook(masked, with_kwargs=True)
    return twin


@pytest.mark.parametrize("name", [name for name in REPRESENTATIVE if name not in OWN_CODE])
def test_mask_sink_is_an_eager_model_with_the_pairs_masked(name: str) -> None:
    model = tiny_model(name)
    assert_close(under(model, "mask-sink"), logits(with_forbidden(model, [0], [0, 1, 2, 3], [0, 1, 2])))
    some = under(model, "mask-sink:layers=0,2,heads=1,2,positions=0,3")
    assert_close(some, logits(with_forbidden(model, [0, 3], [1, 2], [0, 2])))


@torch.no_grad()
def with_rows(name: str, mask: torch.Tensor) -> torch.Tensor:
    """Return the logits of a model in float64 whose attention layers get this mask (B,1,T,T) of hidden pairs."""
    twin = tiny_model(name, dtype=torch.float64)
    twin.set_attn_implementation("sdpa")  # eager softmax is in float32
    additive = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, torch.finfo(torch.float64).min)
    return twin(IDS, attention_mask=additive, use_cache=False).logits


@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "qwen3", "olmo2", "gpt_neox", "qwen2", "phi", "cohere", "mixtral", "stablelm"]
)
def test_an_isolated_token_is_plain_transformers_with_another_mask(name: str) -> None:
    """Row i of each attention map is 1 at i alone; all other rows are as they are."""
    model, ahead = tiny_model(name, dtype=torch.float64), torch.ones(9, 9).triu(1).bool()
    for text, rows, seen in (
        ("isolate:positions=4", [4], [4]),
        ("isolate:positions=4,beside=2", [4], [2, 4]),
        ("isolate:positions=4,hidden=0", [4], [1, 2, 3, 4]),
        ("isolate:positions=4,last=2", [4], [3, 4]),
        ("isolate:positions=4,last=2,beside=1", [4], [1, 3, 4]),
        ("isolate:positions=3+8,hidden=0-3", [3, 8], None),
    ):
        mask = ahead.clone()
        for row in rows:
            visible = seen or [position for position in range(row + 1) if position > 3 or position == row]
            mask[row] = ~torch.isin(torch.arange(9), torch.tensor(visible))
        with naming(text):
            assert_close(under(model, text), with_rows(name, mask[None, None]), 1e-12)


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_the_attention_that_is_read_at_an_isolated_token_is_all_to_itself(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(name)
    before, _ = traced(model, whole())
    after, _ = traced(model, whole(), "isolate:positions=4,layers=1,heads=0+2")
    expected = before.weights[1].clone()
    expected[:, [0, 2], 4] = torch.eye(9)[4]
    others = [row for row in range(9) if row != 4]
    torch.testing.assert_close(after.weights[1][:, :, others], expected[:, :, others])
    weights = after.weights[1][:, [0, 2], 4]
    assert not weights[..., others].any()
    torch.testing.assert_close(weights[..., 4] + after.missing[1][:, [0, 2], 4], torch.ones(2, 2))
    monkeypatch.setattr(attention_weights, "SHORT_SEQUENCE", 0)  # sums of long sequences are computed otherwise
    sums = WindowMasses()
    with open_tracer(model, find_family(model), interventions=[parse("isolate:positions=4")]) as tracer:
        tracer.forward(whole(), [sums, rows := Rows()])
    for window, weights in zip(sums.windows, rows.weights, strict=True):
        torch.testing.assert_close(window, weights.sum(2), rtol=1e-4, atol=1e-5)


class WindowMasses(Observable):
    """The sums down the columns of each layer's attention weights, as for long sequences."""

    sites = ("attention",)

    def __init__(self) -> None:
        super().__init__(Settings())
        self.windows: list[torch.Tensor] = []

    def see_attention(self, layer: int, read: AttentionRead, batch: Batch) -> None:
        self.windows.append(column_sums(read, columns=4, window=9).window)


def test_a_padded_batch_and_a_cache_isolate_the_same_token() -> None:
    """Positions count from each sequence's first token, also for a token that is decoded after a prompt."""
    model = tiny_model("llama", dtype=torch.float64)
    sequences = [IDS[0, :9].numpy(), IDS[1, :7].numpy()]
    with intervening(model, "isolate:positions=4"):
        batch = padded(sequences)
        together = logits(model, **inputs_of(model, batch))
        for number, ids in enumerate(sequences):
            alone = logits(model, torch.from_numpy(ids)[None])[0]
            assert_close(together[number][batch.attention_mask[number].bool()], alone, 1e-12)
        prompt = model(IDS[:, :4], use_cache=True)
        decoded = model(IDS[:, 4:5], past_key_values=prompt.past_key_values, use_cache=True).logits[:, 0]
    assert_close(decoded, under(model, "isolate:positions=4")[:, 4], 1e-12)


def test_the_control_of_isolate_sees_one_random_earlier_token() -> None:
    known = known_of(tiny_model("llama"), length=64)
    assert parse("isolate").watched == (10,)
    draws = {str(parse("isolate:positions=3").control(known, torch.Generator().manual_seed(seed))) for seed in range(9)}
    assert draws == {f"isolate:positions=3,beside={position}" for position in (1, 2)}
    for text in (
        "isolate:positions=1",
        "isolate:positions=5,hidden=0",
        "isolate:positions=5,beside=2",
        "isolate:positions=5,last=2",
    ):
        assert parse(text).control(known, torch.Generator()) is None
    with pytest.raises(InputError, match="either the positions that are hidden or those that it sees"):
        under(tiny_model("llama"), "isolate:positions=4,hidden=0,beside=1")
    with pytest.raises(InputError, match="either the positions that are hidden or those that it sees"):
        under(tiny_model("llama"), "isolate:positions=4,hidden=0,last=2")


def traced(model: PreTrainedModel, batch: Batch, *do: str) -> tuple[Rows, torch.Tensor]:
    rows = Rows()
    with open_tracer(model, find_family(model), interventions=[parse(text) for text in do]) as tracer:
        tracer.forward(batch, [rows])
        return rows, tracer.logits(batch)


def whole() -> Batch:
    return padded(list(IDS.numpy()))


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_what_leaves_a_module_is_edited_after_the_users_hooks(name: str) -> None:
    """The hook replaces what the intervention would otherwise have changed before it."""
    model = tiny_model(name)

    def constant(module: nn.Module, args: tuple, output: Any) -> Any:
        first = torch.full_like(output[0] if isinstance(output, tuple) else output, 3.0)
        return (first, *output[1:]) if isinstance(output, tuple) else first

    find_family(model).layer_modules(model)[1].register_forward_hook(constant)
    expected = torch.full((*IDS.shape, 32), 3.0)
    expected[:, :2, 5] = 0
    entered = list[torch.Tensor]()
    find_family(model).layer_modules(model)[2].register_forward_pre_hook(lambda module, args: entered.append(args[0]))
    under(model, "zero-massive:layers=1,positions=0+1,coordinates=5")
    assert torch.equal(entered[-1], expected)


def test_hidden_states_that_a_model_returns_are_the_edited_ones() -> None:
    """Also if transformers' hooks that collect them are older than the edit. The order of hooks stays."""
    model = tiny_model("llama")
    model(IDS, output_hidden_states=True)
    edited = model.model.layers[1]
    edited.register_forward_hook(lambda module, args, output: None)
    order = list(edited._forward_hooks)
    with intervening(model, "zero-massive:layers=1,positions=0+1,coordinates=5"):
        states = model(IDS, output_hidden_states=True).hidden_states[2]
    assert not states[:, :2, 5].any()
    assert list(edited._forward_hooks) == order
    assert len(order) > 1


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_the_attention_that_is_read_under_mask_sink_is_none_to_the_sink(name: str) -> None:
    """The other keys share the freed weight: each weight ÷ the sum over the keys that are not forbidden."""
    model = tiny_model(name)
    before, _ = traced(model, whole())
    after, _ = traced(model, whole(), "mask-sink:layers=1,heads=0,2,positions=0,3")
    weights, expected = after.weights[1], before.weights[1].clone()
    torch.testing.assert_close(after.weights[0], before.weights[0])
    for position in (0, 3):
        expected[:, [0, 2], position + 1 :, position] = 0
        assert not weights[:, [0, 2], position + 1 :, position].any()
    expected /= expected.sum(-1, keepdim=True) + before.missing[1][..., None]
    torch.testing.assert_close(weights, expected, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(weights.sum(-1) + after.missing[1], torch.ones(2, 4, 9))


BY_POSITION = (
    "nullify-first-embedding:positions=0,2",
    "zero-massive:layers=0-1,positions=0,2,coordinates=3,17",
    "mean-massive:layers=0,positions=2,coordinates=3,means=9",
    "scale-sink-value:positions=0,2,factor=3",
    "mask-sink:positions=0,2",
    "rescale-norm:layers=0-1,positions=0,2",
)


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_a_padded_batch_gives_each_sequences_own_logits(name: str) -> None:
    model = tiny_model(name)
    sequences = ragged_tokens((9, 5, 7))
    for text in BY_POSITION:
        if name in WITHOUT_NORMS and text.startswith("rescale-norm"):
            continue
        alone = [under(model, text, ids=torch.as_tensor(ids)[None])[0] for ids in sequences]
        for side in ("left", "right"):
            batch = padded(sequences, side)
            together = under(model, text, **inputs_of(model, batch))
            for row, expected in enumerate(alone):
                assert_close(together[row][batch.attention_mask[row].bool()], expected)


def generated(model: PreTrainedModel, batch: Batch, text: str, **how: Any) -> torch.Tensor:
    """Return the logits (tokens, B, V) of greedy decoding."""
    how |= {"do_sample": False, "max_new_tokens": 5, "min_new_tokens": 5}
    how |= {"output_logits": True, "return_dict_in_generate": True}
    with intervening(model, text):
        output = model.generate(batch.token_ids, attention_mask=batch.attention_mask, **how)
    return torch.stack(output.logits)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "opt", "bloom", "falcon", "gptj"])  # each kind of cache
def test_generating_with_a_cache_is_generating_without(name: str) -> None:
    """This includes a sliding window (6 tokens) whose cache has dropped the sink's column, and a static cache."""
    model = tiny_model(name)
    batch = padded(ragged_tokens((9, 7)), "left")
    by_position = [text for text in BY_POSITION if "rescale" not in text]
    for text in (*by_position, "mask-sink:positions=0,5", "zero-massive:layers=0,positions=8,coordinates=3"):
        assert_close(generated(model, batch, text), generated(model, batch, text, use_cache=False))
    if name in ("llama", "gemma3", "gpt_oss"):
        for text in ("mask-sink:positions=0,5", "scale-sink-value:factor=3"):
            static = generated(model, whole(), text, cache_implementation="static")
            assert_close(static, generated(model, whole(), text, use_cache=False))


@pytest.mark.parametrize("name", ["mistral", "opt", "bloom", "gptj"])
def test_a_text_may_be_read_in_parts(name: str) -> None:
    model = tiny_model(name)
    for text in ("mask-sink:positions=0,5", "scale-sink-value:positions=0,7,factor=3"):
        expected = under(model, text)
        for cut in (4, 8):
            with torch.no_grad(), intervening(model, text):
                first = model(IDS[:, :cut], use_cache=True)
                second = model(IDS[:, cut:], past_key_values=first.past_key_values).logits
            assert_close(torch.cat([first.logits, second], dim=1), expected)
    with torch.no_grad():
        cache = model(IDS[:, :4], use_cache=True).past_key_values  # computed before the model is changed
        with intervening(model, "scale-sink-value:positions=5,factor=3"):
            second = model(IDS[:, 4:], past_key_values=cache).logits
    assert_close(second, under(model, "scale-sink-value:positions=5,factor=3")[:, 4:])


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_observables_see_the_edited_stream_and_the_tracers_logits_are_the_edited_models(name: str) -> None:
    model = tiny_model(name)
    batch = padded(ragged_tokens((9, 6)), "left")
    text = "mean-massive:layers=1,positions=0,2,coordinates=3,17,means=9,-9,8,-8"
    (before, _), (after, ours) = traced(model, batch), traced(model, batch, text)
    for row, start in enumerate((0, 3)):
        before.hidden[1][row, start, [3, 17]] = torch.tensor([9.0, -9.0])
        before.hidden[1][row, start + 2, [3, 17]] = torch.tensor([8.0, -8.0])
    same = [torch.equal(*states) for states in zip(after.hidden, before.hidden, strict=True)]
    assert same == [True, True, False]
    real = batch.attention_mask.bool()
    assert torch.equal(ours[real], under(model, text, **inputs_of(model, batch))[real])
    if name in ("llama", "opt", "bloom"):  # all interventions together
        texts = applicable(model, combined=True).values()
        assert torch.equal(traced(model, whole(), *texts)[1], under(model, *texts))


def test_each_edit_is_done_to_the_model_that_those_before_it_have_left() -> None:
    model = tiny_model("gpt2")
    before = state_of(model)
    ours = under(model, "nullify-query-bias:layers=0", "zero-key-columns:layers=0-1,coordinates=3,17")
    assert torch.equal(ours, logits(without_key_columns(without_query_bias(model, (0,)), [3, 17], (0, 1))))
    ours = under(model, "nullify-query-bias:heads=0", "nullify-query-bias:layers=1,heads=2")  # of one parameter
    assert torch.equal(ours, logits(without_query_bias(without_query_bias(model, heads=(0,)), (1,), (2,))))
    with pytest.raises(InputError, match="transplant-epe would change nothing"):
        under(model, "replace-epe", "transplant-epe")  # after the first, both positions have the same vector
    edited = copy.deepcopy(model)
    position_table(edited)[:3] = position_table(model)[[2, 1, 1]]  # via 1, 1, 2
    assert torch.equal(under(model, "replace-epe", "transplant-epe:target=2"), logits(edited))
    assert_as_before(model, before)


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_two_interventions_at_one_position(name: str) -> None:
    """The later of two values is used, the masks' forbidden keys are united, and scales multiply."""
    model = tiny_model(name)
    zero, mean = "zero-massive:layers=1,coordinates=3,17", "mean-massive:layers=1,coordinates=17,means=9"
    assert torch.equal(under(model, zero, mean), logits(with_entries(model, {(1, 0, 3): 0.0, (1, 0, 17): 9.0})))
    both = under(model, "mask-sink:layers=0-1,heads=1", "mask-sink:layers=1,heads=1-2,positions=3")
    parts = ("mask-sink:layers=0,heads=1", "mask-sink:layers=1,heads=1,positions=0,3")
    assert torch.equal(both, under(model, *parts, "mask-sink:layers=1,heads=2,positions=3"))
    scaled = under(model, "scale-sink-value:factor=4", "scale-sink-value:factor=0.5")
    assert torch.equal(scaled, under(model, "scale-sink-value:factor=2"))


WRONG = [
    ("llama", "mask-snk", "'mask-snk' is unknown; did you mean 'mask-sink'"),
    ("llama", "mask-sink:layers=1,layers=2", "'layers' is given twice"),
    ("llama", "mask-sink:layers=-1", "layers: input should be greater than or equal to 0"),
    ("llama", "mask-sink:layers=0-1000000", "the range 0-1000000 has more than 1000000 numbers"),
    ("llama", "mask-sink:positions=all", "positions: all cannot be used here"),
    ("llama", "mean-massive:layers=0,coordinates=3,means=inf", "means: input should be a finite number"),
    ("gpt2", "transplant-epe:target=-1", "counts from the end, and no length is known here"),
    ("gpt2", "replace-epe:at=layer", "at: input should be 'embedding' or 'epe'"),
    ("opt-post-norm", "replace-epe:at=epe", "replace-epe: at=epe: the first layer's output is not a sum"),
    ("llama", "mask-sink:layers=0,3", "no layer 3: this model has 3, from 0 on"),
    ("llama", "mask-sink:heads=4", "no query head 4: this model has 4"),
    ("llama", "zero-key-columns:heads=2,coordinates=0", "no key head 2: this model has 2"),
    ("llama", "zero-massive:layers=0,coordinates=40", "no coordinate 40: this model has 32"),
    ("opt", "transplant-epe:target=256", "no position 256: the sequences have 256"),
    ("gpt2", "replace-epe:positions=4,source=4,at=epe", "would change nothing"),
    ("llama", "scale-sink-value:factor=1", "would change nothing"),
    ("llama", "zero-massive", "no massive activations at position 0 are known: name layers and coordinates"),
    ("llama", "mean-massive:layers=1,coordinates=3", "name the means"),
    ("llama", "mean-sink-value:layers=1,heads=0,means=1,2", "8 means are needed"),
    ("llama", "mean-massive:layers=0-1,positions=0,2,coordinates=3,17,means=1,2,3", "2 × 2 × 2 means are needed"),
    ("gpt2", "zero-key-columns", "EPE_0 has no massive coordinates here"),
]


def test_what_cannot_be_done_is_refused_and_leaves_the_model_alone() -> None:
    for name, text, message in WRONG:
        with naming(name, text, message):
            model = tiny_model(name)
            before = state_of(model)
            with pytest.raises(InputError, match=re.escape(message)), intervening(model, "mask-sink", text):
                pytest.fail("entered")
            assert_as_before(model, before)


def test_weights_that_cannot_be_edited_are_refused() -> None:
    model = without_key_columns(without_query_bias(tiny_model("gpt2")), [3])
    for text in ("nullify-query-bias", "perturb-query-bias", "zero-key-columns:coordinates=3"):
        with pytest.raises(InputError, match="would change nothing"):  # the values are already zero
            under(model, text)
    add_hook_to_module(attentions_of(model)[1].c_attn.to("meta"), ModelHook())  # as accelerate offloads it
    for text in ("nullify-query-bias:layers=1", "zero-key-columns:layers=1,coordinates=3"):
        with pytest.raises(InputError, match="offloaded"), intervening(model, text):
            pytest.fail("entered")
    model = tiny_model("qwen2")
    attentions_of(model)[1].q_proj.bias = None
    with pytest.raises(InputError, match="layer 1 has no query bias"):
        under(model, "nullify-query-bias")
    assert torch.equal(under(model, "nullify-query-bias:layers=0,2"), logits(without_query_bias(model, (0, 2))))


TEXTS = {
    "mask-sink:layers=1-3,5,heads=0": {"layers": (1, 2, 3, 5), "heads": (0,)},
    "mask-sink:layers=all,positions=0,2-3": {"layers": None, "positions": (0, 2, 3)},
    "zero-massive: layers = 11 , coordinates = 138+447+138": {"layers": (11,), "coordinates": (138, 447)},
    "mean-massive:means=-1e3,2.5": {"means": (-1000.0, 2.5)},
    "streaming-window:window=64,128,keep=0": {"window": (64, 128), "keep": (0,)},
}
AWKWARD = {
    **{"at": "epe", "where": "sinks", "layers": (0, 5), "heads": (3,), "positions": (0, 1000000), "seed": 2**31 - 1},
    **{"coordinates": (138, 1234567), "means": (1 / 3, -123456.789, 1e22, -1e-22), "factor": 1 / 3, "keep": (0, 3)},
    **{"elsewhere": (11.0, 507.0, 9388.058, -9515.98), "source": 1234567, "target": 7654321, "window": (64, 1234567)},
    **{"layer": 11, "expert": 3, "rows": (0, 1234567), "column": 1229, "which": "largest", "by": "first-mass"},
    **{"begin": "massive", "hidden": (0, 5), "beside": (3,), "last": 7, "around": "zero"},
    **{"share": 1 / 3, "numbers": (0, 1234567)},
}


def test_text_is_read_and_the_name_of_an_intervention_is_read_as_the_same() -> None:
    for text, expected in TEXTS.items():
        assert parse(text) == INTERVENTIONS[text.partition(":")[0]](**expected), text
    for name, kind in INTERVENTIONS.items():
        with naming(name):
            assert str(kind()) == name
            every = {key: AWKWARD[key] for key in kind.model_fields}
            for parameters in (every, *({key: value} for key, value in every.items())):  # together, and each alone
                made = kind(**parameters)
                assert all(getattr(made, key) != kind.model_fields[key].default for key in parameters)
                assert parse(str(made)) == made


@pytest.mark.parametrize(
    ("text", "counted"),
    [
        ("mask-sink:positions=-1,3", "mask-sink:positions=9+3"),
        ("isolate:positions=-2,8,hidden=-10,0", "isolate:positions=8,hidden=0"),
        ("isolate:positions=2,beside=-9", "isolate:positions=2,beside=1"),
        ("transplant-epe:source=-1,target=-3", "transplant-epe:source=9,target=7"),
    ],
)
def test_positions_below_0_count_from_the_end_of_sequences_of_one_length(text: str, counted: str) -> None:
    assert str(parse(text).from_the_start([10, 10])) == counted
    assert parse(counted).from_the_start([8, 10]) == parse(counted)
    with pytest.raises(InputError, match=r"counts from the end, and the sequences have 9 to 12 tokens: count"):
        parse(text).from_the_start([12, 9])
    model = tiny_model("gpt2")
    with (
        pytest.raises(InputError, match=r"counts from the end, and no length is known here: count from 0 on"),
        intervening(model, text),
    ):
        pass


def test_what_is_left_open_is_what_is_massive_in_half_of_the_sequences() -> None:
    # layer, position, coordinate, number of sequences of four in which it is massive
    counts = [(0, 0, 30, 1), (1, 0, 5, 3), (1, 0, 9, 2), (1, 0, 7, 0), (1, 4, 8, 2), (2, 0, 11, 3)]
    rows = [(*at, sequence, sequence < count) for *at, count in counts for sequence in range(4)]
    columns = ["layer", "position", "coordinate", "sequence", "is_massive"]
    tables = {"massive": pd.DataFrame(rows, columns=columns).assign(value=500.0)}
    means = lambda layer, position: torch.arange(32.0) + 100 * layer + 1000 * position  # noqa: E731
    known = known_of(tiny_model("llama"), tables=tables, means=means)

    def decided(text: str) -> Any:
        return parse(text).resolved(known)

    assert decided("zero-massive") == parse("zero-massive:layers=1,2,coordinates=5,9,11")
    assert decided("zero-massive:layers=0,2") == parse("zero-massive:layers=0,2,coordinates=11")
    assert decided("zero-massive:positions=4") == parse("zero-massive:layers=1,positions=4,coordinates=8")
    assert decided("zero-massive:coordinates=3") == parse("zero-massive:layers=1,2,coordinates=3")
    assert decided("zero-massive:coordinates=11") == parse("zero-massive:layers=2,coordinates=11")
    assert decided("zero-key-columns:layers=0") == parse("zero-key-columns:layers=0,coordinates=5,9,11")
    assert decided("mean-massive:layers=1-2,positions=0,4,coordinates=3,7").means == (
        103, 107, 4103, 4107, 203, 207, 4203, 4207,
    )  # fmt: skip
    assert decided("mean-massive:layers=1,coordinates=3,means=2").means == (2,)
    with pytest.raises(InputError, match="no massive activations at position 6"):
        decided("zero-massive:positions=6")


def test_what_is_massive_at_most_tokens_is_not_the_sinks() -> None:
    """The table is like Gemma3-270M's: coordinate 400 at few tokens of layer 0, most of layers 1 and 2 and the first of
    later ones; 163 at the sink from layer 3 on, and at one delimiter, which is too few tokens to exclude it.
    """
    length = 64
    places = {(0, 400): range(4), (1, 400): range(53), (2, 400): range(34)}
    places |= {(layer, 400): [0] for layer in range(3, 7)} | {(layer, 163): [0, 9] for layer in range(3, 14)}
    rows = [(*at, sequence, position) for at, where in places.items() for sequence in range(4) for position in where]
    massive = pd.DataFrame(rows, columns=["layer", "coordinate", "sequence", "position"]).assign(is_massive=True)
    massive["value"] = 1000.0 * massive["layer"] + massive["sequence"]
    known = known_of(tiny_model("llama"), length, tables={"massive": massive})
    for text in ("zero-massive", "mean-massive:means=0"):
        resolved = parse(text).resolved(known)
        assert (resolved.layers, resolved.coordinates) == (tuple(range(3, 14)), (163,))
        assert resolved.elsewhere[:8] == (3, 163, 3000.0, 3001.5, 4, 163, 4000.0, 4001.5)  # at the delimiter
        assert len(resolved.elsewhere) == 4 * 11
    massive["value"] *= -1.0
    resolved = parse("zero-massive").resolved(known)
    assert resolved.elsewhere[:4] == (3, 163, 3000.0, -3001.5)  # a magnitude, whatever the sign
    assert parse("rescale-norm:factor=2").resolved(known) == parse("rescale-norm:layers=4,factor=2")
    assert parse("rescale-norm:layers=0").resolved(known) == parse("rescale-norm:layers=0")
    with pytest.raises(InputError, match="no massive activations"):
        parse("zero-massive:layers=1").resolved(known)


@pytest.mark.parametrize(
    ("text", "first", "others"), [("zero-massive:", 0.0, 0.0), ("mean-massive:means=9,", 9.0, 7.0)]
)
def test_massive_activations_of_other_tokens_are_edited_too(text: str, first: float, others: float) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        states = model(IDS, output_hidden_states=True).hidden_states[2][..., 3]  # after layer 1
    least = float(states[:, 1:].abs().median())

    def edited(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[..., 3] = torch.where(states.abs() >= least, others, states)
        output[:, 0, 3] = first
        return output

    do = f"{text}layers=1,coordinates=3"
    edited_elsewhere = under(model, f"{do},elsewhere=1,3,{least!r},7")
    assert not torch.allclose(edited_elsewhere, under(model, do))
    for wrong in ("1,3,5", "2,3,5,7", "1,4,5,7"):
        with pytest.raises(InputError, match="elsewhere needs"):
            under(model, f"{do},elsewhere={wrong}")
    model.model.layers[1].register_forward_hook(edited)
    torch.testing.assert_close(edited_elsewhere, logits(model))


def test_with_learned_positions_the_key_columns_are_those_massive_in_epe_0() -> None:
    model = tiny_model("gpt2")
    position_table(model)[0, [7, 21]] = torch.tensor([5e4, -8e4])
    model.transformer.h[0].mlp.c_proj.weight.data.zero_()
    assert parse("zero-key-columns").resolved(known_of(model)).coordinates == (7, 21)


CONTROLLED = {
    "replace-epe:at=epe,positions=0,2,source=3": ("positions", "source"),
    "transplant-epe:at=epe,target=2": ("source",),
    "zero-key-columns:layers=1,heads=0,coordinates=3,17": ("coordinates",),
    "mean-massive:layers=1,positions=2,coordinates=3,17,means=1,2": ("coordinates",),
    "scale-sink-value:layers=1,heads=1,positions=0,4,factor=3": ("positions",),
    "mask-sink:layers=1,heads=2,positions=0,4": ("positions",),
}


def numbers_of(intervention: Any, keys: Sequence[str]) -> list[int]:
    values = [getattr(intervention, key) for key in keys]
    return [int(x) for value in values for x in (value if isinstance(value, tuple) else (value,))]


@pytest.mark.parametrize("text", CONTROLLED)
def test_a_control_is_the_same_at_as_many_random_places_elsewhere(text: str) -> None:
    known = known_of(tiny_model("gpt2"), length=20)
    original = parse(text)
    moved = CONTROLLED[text]
    mine = numbers_of(original, moved)
    seen = set()
    for seed in range(20):
        made = original.control(known, torch.Generator().manual_seed(seed))
        assert made == original.control(known, torch.Generator().manual_seed(seed))
        others = numbers_of(made, moved)
        assert len(set(others)) == len(mine)
        assert not set(others) & ({*mine} if "coordinates" in moved else {0, *mine, *original.watched})
        assert max(others) < (known.target.width if "coordinates" in moved else 20)
        kept = type(original).model_fields.keys() - {*moved, "means"}  # the means are measured again
        assert {key: getattr(made, key) for key in kept} == {key: getattr(original, key) for key in kept}
        seen.add(tuple(others))
    assert len(seen) > 5
    draw = torch.Generator().manual_seed(0)
    if original.name == "mean-massive":  # the control of mean-massive measures the means of its own coordinates
        known.means = lambda layer, position: torch.arange(32.0)
        measured: Any = original.control(known, draw)
        assert measured.resolved(known).means == measured.coordinates


def test_controls_are_other_biases_or_weights_of_the_row_or_the_column_and_as_many_random_heads() -> None:
    draw, known = torch.Generator().manual_seed(1), known_of(tiny_model("gpt2"))
    original = parse("nullify-query-bias:layers=0-1,heads=2")
    first, second = original.control(known, draw), original.control(known, draw)
    assert str(first).startswith("perturb-query-bias:layers=0+1,heads=2,seed=")
    assert first == original.control(known, torch.Generator().manual_seed(1)) != second
    assert first.control(known, draw) is None
    weight: Any = parse("zero-super-weight:layer=1,rows=3,column=5")
    heads = parse("ablate-heads:numbers=1,6,7")
    drawn: list[Any] = [weight.control(known, torch.Generator().manual_seed(seed)) for seed in range(30)]
    assert all((each.rows == (3,)) != (each.column == 5) and each.layer == 1 for each in drawn)
    assert {each.rows == (3,) for each in drawn} == {True, False}
    drawn = [weight.control(known, draw) for _ in range(2000)]
    height, width = weight.part(known.target).weight(0).shape
    assert {each.rows for each in drawn if each.column == 5} == {(row,) for row in range(height) if row != 3}
    assert {each.column for each in drawn if each.rows == (3,)} == {*range(width)} - {5}
    sets: list[Any] = [heads.control(known, torch.Generator().manual_seed(seed)) for seed in range(30)]
    assert all(len(each.numbers) == 3 for each in sets)
    assert {number for each in sets for number in each.numbers} == set(range(12))


def test_the_heads_and_the_weight_are_those_of_the_tables() -> None:
    """The paper expects a collapse from the super weight alone."""
    expected = [parse(f"zero-super-weight:which={which}").expects for which in ("super", "largest")]
    assert expected == [Expectation.PERPLEXITY_COLLAPSES, None]
    scores = pd.DataFrame({
        "layer": [0, 0, 1, 1], "head": [0, 1, 0, 1], "relative_norm": [1.0, 0.2, 0.3, 1.0],
        "first_mass": [0.9, 0.1, 0.2, 0.8],
    })  # fmt: skip
    columns = ["layer", "expert", "row", "column", "sequence", "written", "input", "output", "weight", "share"]
    weights = pd.DataFrame(
        [
            (0, -1, 7, 9, 0, -50.0, 3.0, -50.0, 1.0, 0.5), (0, -1, 7, 9, 1, 50.0, 3.0, 50.0, 1.0, 0.5),
            (0, -1, 8, 9, 2, 900.0, 3.0, 50.0, 1.0, 0.5),
            *((1, -1, 2, 3, at, 9.0, 3.0, 9.0, 1.0, 0.5) for at in range(3)),
            *((2, -1, 1, 1, at, 70.0, 3.0, 9.0, 1.0, 0.5) for at in range(3)),
            *((3, -1, 1, 1, at, 99.0, 3.0, 9.0, 1.0, 0.5) for at in range(3)),  # the last quarter of the layers
        ],
        columns=columns,
    )  # fmt: skip
    experts = pd.DataFrame({"layer": [0, 1, 2], "expert": [1, 2, 3], "largest": [5.0, 4.0, 9.0]})
    supers = {"super_experts": experts.assign(is_super=[True, True, False])}
    model = tiny_model("gpt2")
    layers_of(model)[2].mlp.c_proj.weight.data[5, 7] = -9.0  # columns of inputs, and rows of outputs, the other way
    known = known_of(model, tables={"head_scores": scores, "super_weights": weights} | supers)
    for text, decided in (
        ("ablate-heads:share=0.5", "ablate-heads:share=0.5,numbers=1+2"),
        ("ablate-heads:by=first-mass,share=0.5", "ablate-heads:by=first-mass,share=0.5,numbers=0+3"),
        ("ablate-heads:share=0.4", "ablate-heads:share=0.4,numbers=1+2"),  # 1.6 heads
        ("ablate-heads", "ablate-heads:numbers=1"),
        ("zero-super-weight", "zero-super-weight:layer=2,rows=1,column=1"),
        ("zero-super-weight:layer=0", "zero-super-weight:layer=0,rows=7,column=9"),  # of most sequences
        ("zero-super-weight:which=largest", "zero-super-weight:which=largest,layer=2,rows=7,column=5"),
        ("zero-super-expert", "zero-super-expert:layer=0,expert=1"),
    ):
        assert parse(text).resolved(known) == parse(decided)
    without = known_of(tiny_model("gpt2"), tables={"super_experts": experts.assign(is_super=False)})
    assert parse("zero-super-expert").resolved(without) == parse("zero-super-expert:layer=2,expert=3")


@pytest.mark.parametrize(("name", "applies"), [("gpt2", True), ("qwen2", False), ("llama", False)])
def test_what_nu_expects_holds_for_learned_positions_with_a_query_bias(name: str, applies: bool) -> None:
    with target_of(tiny_model(name)) as target:
        of_nu, of_others = (expectation(parse(text), target) for text in ("nullify-query-bias", "mask-sink"))
    assert of_nu == (parse("nullify-query-bias").expects if applies else None)
    assert of_others == parse("mask-sink").expects


def test_a_stack_keeps_the_parts_that_have_no_control() -> None:
    stack = (parse("mask-sink"), parse("perturb-query-bias:seed=5"))
    drawn = random_controls(stack, known_of(tiny_model("gpt2")), seed=0, draws=3)
    assert len({control[0] for control in drawn} - {stack[0]}) == 3
    assert {control[1:] for control in drawn} == {stack[1:]}
    assert random_controls(stack[1:], known_of(tiny_model("gpt2")), seed=0, draws=3) == []


@pytest.mark.parametrize(("layers", "early"), [(1, 1), (3, 3), (4, 3), (5, 4), (8, 6)])
def test_a_super_weight_is_in_the_first_three_quarters_of_the_layers(layers: int, early: int) -> None:
    table = pd.DataFrame({"layer": range(layers), "sequence": 0, "expert": -1, "row": 0, "column": 0})
    pairs = usual_pairs(table.assign(written=1.0, input=1.0, output=1.0, weight=1.0, share=1.0))
    assert pairs.loc[pairs["is_early"], "layer"].tolist() == [*range(early)]


@pytest.mark.parametrize("columns", [4, 300])
def test_a_hidden_key_of_a_long_text_has_the_statistics_of_a_dense_mask(columns: int) -> None:
    """Above 256 tokens, window sums of a plain causal mask are computed by a separate function."""
    model, ids = tiny_model("llama"), tiny_tokens(2, 300)
    batch = Batch(ids, torch.ones_like(ids))
    tables = {}
    for kernel in ("sdpa", "eager"):
        with open_tracer(model, find_family(model), kernel, [parse("mask-sink:positions=0,2,heads=0,3")]) as tracer:
            observable = OBSERVABLES["attention"](Settings(positions=columns, window=64, epsilon=0.3))
            tracer.forward(batch, [observable])
        tables[kernel] = observable.tables()
    for layer, weights in enumerate(traced(model, batch, "mask-sink:positions=0,2,heads=0,3")[0].weights):
        assert weights[:, [0, 3], 3:, 0].abs().max() == 0
        expected = torch.stack([weights[:, :, s : s + 64, s].sum(2) / min(64, 300 - s) for s in range(columns)], dim=-1)
        for table in tables.values():
            rows = table["attention"][table["attention"]["layer"] == layer].sort_values(["head", "position"])
            mine = torch.tensor(rows["window_mass"].to_numpy()).view(4, columns)
            torch.testing.assert_close(mine, expected.mean(0).double(), rtol=1e-4, atol=1e-6)


def test_a_sink_is_masked_after_the_massive_layers_only_if_a_layer_follows_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("llama")
    known = known_of(model)
    last = known.target.attending()[-1]
    first: list[tuple[int, ...]] = [(last - 1, last), (last,)]
    monkeypatch.setattr("sinkscope.interventions.sink.sink_massive", lambda *_, **__: (first.pop(0), ()))
    mask = parse("mask-sink:begin=massive")
    assert mask.resolved(known).layers == (last,)
    with pytest.raises(InputError, match=f"no layer with attention follows layer {last}"):
        mask.resolved(known)


@pytest.mark.parametrize(
    ("change", "asked_for"),
    [
        ("ablate-heads", "the numbers of heads"),
        ("zero-super-weight:layer=0", "the rows and the column"),
        ("streaming-window", "one window and one number of tokens to keep"),
        ("zero-massive", "the layers and the coordinates"),
    ],
)
def test_what_was_not_measured_is_asked_for(change: str, asked_for: str) -> None:
    model = tiny_model("llama")
    with (
        pytest.raises(InputError, match=f"name {asked_for}"),
        open_seam(model, find_family(model)) as seams,
        applied(Target(model, find_family(model), seams), [parse(change)]),
    ):
        pass
