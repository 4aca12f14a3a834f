"""Projections of every family, compared with the queries, keys and values of its own attention code."""

import pytest
import torch
from support.every_model import tiny_of
from tiny import TINY, tiny_model, tiny_tokens

from sinkscope.attention.seam import open_seam
from sinkscope.errors import InputError
from sinkscope.interventions import INTERVENTIONS, Target
from sinkscope.measuring.subject import family_of
from sinkscope.models.families import find_family
from sinkscope.models.projections import ROLES, effective_positions, position_vectors, projections
from sinkscope.models.wiring import read_sites


def seen_at_the_taps(model, family, ids):
    """Return query, key and value (B,heads,T,d) of every layer, after any norm and rotation."""
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
def test_projections_of_known_families(name):
    """They equal the tensors in attention, and writing back the same weights changes nothing.

    Rotation keeps each vector's norm (YaRN scales all alike), and position 0 is not rotated; a norm after the
    projection hides both, so only the value is compared in that case.
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
    for projection in projections(model, family, 1).values():
        assert torch.equal(projection.with_part("weight", projection.weight), projection.module.weight)
        edited = projection.with_part("weight", torch.zeros_like(projection.weight))
        assert edited.count_nonzero() == projection.module.weight.numel() - projection.weight.numel()
        if projection.bias is not None:
            assert torch.equal(projection.with_part("bias", projection.bias), projection.module.bias)


@pytest.mark.parametrize("name", ["gpt2", "opt", "opt-post-norm", "gpt_neo"])
def test_learned_positions(name):
    model = tiny_model(name, dtype=torch.float64)
    family = find_family(model)
    vectors, layer, ids = position_vectors(model, family)[:5], family.layer_modules(model)[0], tiny_tokens(1, 5)
    if name != "opt-post-norm":  # the vectors are added to the embeddings
        first = read_sites(model, family, ids)[0]["layer_in"][0]
        torch.testing.assert_close(first - model.get_input_embeddings()(ids)[0], vectors)
    if name.startswith("opt"):
        mlp = torch.relu(vectors @ layer.fc1.weight.T + layer.fc1.bias) @ layer.fc2.weight.T + layer.fc2.bias
    else:
        first, second = layer.mlp.c_fc, layer.mlp.c_proj
        w1, w2 = (each.weight if name == "gpt2" else each.weight.T for each in (first, second))
        hidden = torch.nn.functional.gelu(vectors @ w1 + first.bias, approximate="tanh")
        mlp = hidden @ w2 + second.bias
    torch.testing.assert_close(effective_positions(model, family, 5), vectors + mlp)
    with pytest.raises(InputError, match=r"has \d+ positions"):
        effective_positions(model, family, 257)


@pytest.mark.parametrize(
    ("model_type", "roles"),
    [
        ("deepseek_v3", {"query", "value"}),  # a latent's up-projection; its keys share a rotary part
        ("dbrx", set(ROLES)),  # one projection for all roles
        ("gpt_bigcode", set(ROLES)),  # one key head
        ("qwen3_next", {"key", "value"}),  # queries and their gates in one projection, normed keys
        ("inkling_text", {"query", "key"}),  # a convolution after the values
    ],
)
def test_found_projections_give_what_attention_sees(model_type, roles):
    model = tiny_of(model_type)
    family, _ = family_of(model)
    ids = tiny_tokens(2, 1)  # position 0 is not rotated
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
