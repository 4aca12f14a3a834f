"""Projections of every family, compared with the queries, keys and values of its own attention code."""

import pytest
import torch
from support.every_model import tiny_of
from support.naming import naming
from tiny import TINY, tiny_model, tiny_tokens

from sinkscope.attention.seam import open_seam
from sinkscope.errors import InputError
from sinkscope.interventions import INTERVENTIONS, Target
from sinkscope.measuring.subject import family_of
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


def test_writing_back_what_was_read_changes_nothing() -> None:
    for name in TINY:
        with naming(name):
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
    with pytest.raises(InputError, match="has 256 positions"):
        position_vectors(gpt2, find_family(gpt2), 257)


# ------------------------------------------------------------------------------------ found numerically


@pytest.mark.parametrize(
    ("model_type", "roles"),
    [
        ("deepseek_v3", {"query", "value"}),  # a latent's up-projection; its keys share a rotary part
        ("dbrx", set(ROLES)),  # all in one
        ("gpt_bigcode", set(ROLES)),  # one key head
        ("qwen3_next", {"key", "value"}),  # queries and their gates in one, keys normed
        ("inkling_text", {"query", "key"}),  # a convolution after the values
    ],
)
def test_found_projections_give_what_attention_sees(model_type, roles):
    model = tiny_of(model_type)
    family, _ = family_of(model)
    ids = tiny_tokens(2, 1)  # at position 0 nothing is rotated
    given = {}
    for layer in family.attentions(model):
        for role, projection in projections(model, family, layer).items():
            projection.module.register_forward_hook(
                lambda module, args, output, key=(layer, role), places=projection.places: given.__setitem__(
                    key, output.flatten(1, -2)[..., places].transpose(1, 2)
                )
            )
        assert roles == set(family.projections[layer])
    for layer, seen in zip(family.attentions(model), seen_at_the_taps(model, family, ids), strict=True):
        for role in roles:
            mine, theirs = given[layer, role], seen[role]
            is_normed = not torch.equal(mine, theirs)
            assert is_normed == (model_type in ("qwen3_next", "inkling_text") and role != "value")
            cosine = torch.cosine_similarity(mine, theirs, dim=-1)
            assert cosine.min() > (0.5 if is_normed else 0.999)


def test_values_are_scaled_where_a_latent_makes_them():
    model = tiny_of("deepseek_v3")
    family, _ = family_of(model)
    ids = tiny_tokens(1, 8)
    (bare, *_), target = seen_at_the_taps(model, family, ids), Target(model, family, {})
    with INTERVENTIONS["scale-sink-value"](factor=0.5, layers=(0,)).applied(target):
        (scaled, *_) = seen_at_the_taps(model, family, ids)
    torch.testing.assert_close(scaled["value"][:, :, 0], 0.5 * bare["value"][:, :, 0])
    for role in ROLES:
        assert torch.equal(scaled[role][:, :, 1:], bare[role][:, :, 1:])


def test_what_would_be_undone_behind_the_projection_is_refused():
    """Gemma 3n norms its values: scaled by 0.5 they would be what they were."""
    model = tiny_of("gemma3n_text")
    target = Target(model, family_of(model)[0], {})
    assert "value states are not the outputs of one projection" in INTERVENTIONS["scale-sink-value"].inapplicable(
        target
    )
    assert INTERVENTIONS["zero-key-columns"].inapplicable(target) is None
