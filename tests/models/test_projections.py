"""Projections of every family against the queries, keys and values that its own attention code computes."""

import pytest
import torch
from tiny import TINY, tiny_model, tiny_tokens

from sinkscope.attention.seam import open_seam
from sinkscope.errors import InputError
from sinkscope.models.families import find_family
from sinkscope.models.positions import effective_positions, position_vectors
from sinkscope.models.projections import ROLES, projections
from sinkscope.models.wiring import read_sites


def seen_at_the_taps(model, family, ids):
    """query, key, value (B,heads,T,d) of every layer, after any norm and rotation."""
    seen = []
    with open_seam(model, family) as seams:
        for seam in seams.values():
            record = {}
            seen.append(record)
            for role in ROLES:
                getattr(seam, role).register_forward_hook(
                    lambda tap, args, output, role=role, record=record: record.__setitem__(role, output)
                )
        model(ids)
    return seen


@pytest.mark.parametrize("name", TINY)
def test_projecting_the_attention_input_gives_what_attention_sees(name):
    """Rotation keeps each vector's norm (YaRN scales all alike), position 0 is not rotated at all; a norm behind the
    projection hides both, so there only the value is compared.
    """
    model = tiny_model(name, spread=3.0)
    family = find_family(model)
    ids = tiny_tokens(2, 8)
    inputs = read_sites(model, family, ids)
    for layer, record in enumerate(seen_at_the_taps(model, family, ids)):
        x = inputs[layer].get("attn_norm", inputs[layer]["layer_in"])
        attention = family.layer_modules(model)[layer].get_submodule(family.attention)
        normed = any("norm" in path for path, _ in attention.named_modules())
        for role, projection in projections(model, family, layer).items():
            projected = torch.einsum("btc,hdc->bhtd", x, projection.weight)
            if projection.bias is not None:
                projected = projected + projection.bias[:, None]
            projected = projected.double()
            seen = record[role].double()  # some families rotate in float32
            assert projected.shape == seen.shape
            if role == "value":
                torch.testing.assert_close(projected, seen, rtol=1e-4, atol=1e-5)
            elif not normed:
                ratio = seen.norm(dim=-1) / projected.norm(dim=-1)
                torch.testing.assert_close(ratio, torch.full_like(ratio, float(ratio.mean())), rtol=1e-4, atol=0)
                torch.testing.assert_close(seen[:, :, 0], projected[:, :, 0] * ratio.mean(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", TINY)
def test_writing_back_what_was_read_changes_nothing(name):
    model = tiny_model(name)
    family = find_family(model)
    for projection in projections(model, family, 1).values():
        assert torch.equal(projection.with_weight(projection.weight), projection.module.weight)
        edited = projection.with_weight(torch.zeros_like(projection.weight))
        assert int((edited == 0).sum()) >= projection.weight.numel()
        assert edited.count_nonzero() == projection.module.weight.numel() - projection.weight.numel()
        if projection.bias is not None:
            assert torch.equal(projection.with_bias(projection.bias), projection.module.bias)


@pytest.mark.parametrize("name", ["gpt2", "opt", "gpt_neo"])
def test_position_vectors_are_what_is_added_to_the_embeddings(name):
    model = tiny_model(name, dtype=torch.float64)
    family = find_family(model)
    ids = tiny_tokens(1, 6)
    first = read_sites(model, family, ids)[0]["layer_in"][0]
    tokens = model.get_input_embeddings()(ids)[0]
    torch.testing.assert_close(first - tokens, position_vectors(model, family, 6))


@pytest.mark.parametrize("name", ["gpt2", "opt", "opt-post-norm", "gpt_neo"])
def test_effective_positions_are_the_first_mlp_of_the_position_plus_the_position(name):
    model = tiny_model(name, dtype=torch.float64)
    family = find_family(model)
    vectors = position_vectors(model, family, 5)
    layer = family.layer_modules(model)[0]
    if name.startswith("opt"):
        mlp = torch.relu(vectors @ layer.fc1.weight.T + layer.fc1.bias) @ layer.fc2.weight.T + layer.fc2.bias
    else:
        act = torch.nn.functional.gelu
        first, second = layer.mlp.c_fc, layer.mlp.c_proj
        conv = name == "gpt2"
        w1, w2 = (first.weight, second.weight) if conv else (first.weight.T, second.weight.T)
        mlp = act(vectors @ w1 + first.bias, approximate="tanh") @ w2 + second.bias
    torch.testing.assert_close(effective_positions(model, family, 5), vectors + mlp)


def test_what_a_family_does_not_have_is_refused():
    model = tiny_model("llama")
    family = find_family(model)
    with pytest.raises(InputError, match="no learned positions"):
        position_vectors(model, family, 4)
    gpt2 = tiny_model("gpt2")
    with pytest.raises(InputError, match="knows 256 positions"):
        position_vectors(gpt2, find_family(gpt2), 257)
