"""The table of families: its rows and their projections; a wrong row is detected, an unknown model is refused."""

from dataclasses import replace

import pytest
import reference
import torch
from support.every_model import tiny_of
from support.hooked import calls_of
from tiny import TINY, measured, padded, ragged_tokens, tiny_model, tiny_tokens
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from sinkscope.attention.seam import open_seam, recorded_taps
from sinkscope.errors import InputError
from sinkscope.interventions import INTERVENTIONS, Target
from sinkscope.measuring.observables.observable import Settings
from sinkscope.measuring.subject import family_of
from sinkscope.models import families
from sinkscope.models.calibrate import calibrate
from sinkscope.models.families import FAMILIES, find_family
from sinkscope.models.family import RESIDUAL_SITES, Family
from sinkscope.models.projections import ROLES, effective_positions, position_vectors, projections
from sinkscope.models.wiring import check_wiring, read_sites

ROUND_OFF = 1e-6


def worst_error(model: PreTrainedModel, family: Family) -> float:
    return max(check_wiring(family.block(0), sites) for sites in read_sites(model, family, tiny_tokens(2, 9)))


MLPS = {"opt": "fc1", "mpt": "ffn"}


@pytest.mark.parametrize("name", TINY)
def test_rows(name: str) -> None:
    """The wiring equation holds, sites are where plain transformers have them, and norms are inputs."""
    model = tiny_model(name)
    family, block = find_family(model), find_family(model).block(0)
    layer = family.layer_modules(model)[1]
    branch_inputs: dict[
        str, torch.Tensor
    ] = {}  # inputs of the two branches: attn_norm and mlp_norm, which are in no equation
    for site, path in (("attn_norm", family.attention), ("mlp_norm", MLPS.get(family.name, "mlp"))):

        def keep(module: object, args: tuple, kwargs: dict, site: str = site) -> None:
            branch_inputs[site] = (*args, *kwargs.values())[0].clone()

        if site in family.sites:
            layer.get_submodule(path).register_forward_pre_hook(keep, with_kwargs=True)
    records = read_sites(model, family, tiny_tokens(2, 9))
    assert branch_inputs.keys() == {"attn_norm", "mlp_norm"} & set(family.sites)
    for site, x in branch_inputs.items():
        assert torch.equal(records[1][site], x.view_as(records[1][site]))
    assert len(records) == 3
    assert all(check_wiring(block, sites) < ROUND_OFF for sites in records)
    ids = tiny_tokens(1, 9)
    plain = reference.record(model, ids[0]).layers
    for mine, layer in zip(read_sites(model, family, ids), plain, strict=True):
        assert {site for site in mine if not site.endswith("norm")} == set(layer.sites)
        for site, expected in layer.sites.items():
            torch.testing.assert_close(mine[site][0].double(), torch.as_tensor(expected), rtol=1e-4, atol=1e-4)
    absent = family.absent_sites()
    assert all(absent.values())
    assert set(family.sites) ^ set(absent) == set(RESIDUAL_SITES)
    assert ("mid" in absent) == (family.wiring == "parallel")


def test_every_row_has_a_tiny_model() -> None:
    """Tested elsewhere: `gemma3` in test_every_model.py, `varied_llama`, and `bert` in test_encoders.py."""
    covered = {id(row) for rows in FAMILIES.values() for row in rows}
    for name in TINY:
        model = tiny_model(name)
        row = find_family(model)
        rows = FAMILIES[model.config.model_type]
        covered -= {id(known) for known in rows if replace(known, positions=row.positions) == row}
    left = {kind for kind, rows in FAMILIES.items() for row in rows if id(row) in covered}
    assert left <= {"gemma3", "varied_llama", "bert"}


WRONG = {
    # family → the error in its row
    "llama": {"attn_out": "post_attention_layernorm.output"},
    "gemma2": {"attn_out": "self_attn.output"},  # before the norm after the branch
    "gemma3": {"mlp_out": "mlp.output"},
    "olmo2": {"attn_out": "self_attn.output"},
    "gpt2": {"mid": "ln_2.output"},
    "bloom": {"attn_out": "self_attention.output"},  # this already includes the residual
    "mpt": {"mlp_out": "ffn.output"},
    "falcon": {"mlp_out": "self_attention.output"},
    "opt-post-norm": {"mid": "self_attn_layer_norm.output"},
}


@pytest.mark.parametrize("name", WRONG)
def test_the_check_notices_a_wrong_row(name: str) -> None:
    model = tiny_model(name)
    family = find_family(model)
    wrong = replace(family, sites={**family.sites, **WRONG[name]})
    assert worst_error(model, family) < ROUND_OFF
    assert worst_error(model, wrong) > 1e-2


def test_models_without_a_row_are_refused() -> None:
    config = AutoConfig.for_model("gpt_bigcode", vocab_size=16, n_embd=8, n_layer=1, n_head=2, n_positions=8)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(InputError, match=r"'gpt_bigcode' has no row"):
        find_family(model)
    model = tiny_model("bloom")
    family = find_family(model)
    model.config.apply_residual_connection_post_layernorm = True
    with pytest.raises(InputError, match=r"no row for a bloom wired like this one.*apply_residual"):
        find_family(model)
    for block in model.transformer.h:
        block.apply_residual_connection_post_layernorm = True
    assert worst_error(model, family) > 1e-2  # Bloom's row is indeed wrong for this model


def calibrated(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> Family:
    others = {kind: rows for kind, rows in FAMILIES.items() if kind != model.config.model_type}
    with monkeypatch.context() as patch:
        patch.setattr(families, "FAMILIES", others)
        with pytest.raises(InputError):
            find_family(model)
        return calibrate(model, tiny_tokens(2, 9))


@pytest.mark.parametrize("name", TINY)
def test_calibration_finds_a_known_family_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements with the calibrated row equal measurements with the known row."""
    model = tiny_model(name)
    known, calibration = find_family(model), calibrated(model, monkeypatch)
    assert calibration.name == model.config.model_type
    for field in ("layers", "attention", "wiring", "door", "down"):
        assert getattr(calibration, field) == getattr(known, field), field
    assert list(calibration.sites) == list(known.sites)
    assert not calibration.blocks
    assert calibration.positions in (known.positions, "unknown")
    mine, theirs = read_sites(model, calibration, tiny_tokens(2, 9)), read_sites(model, known, tiny_tokens(2, 9))
    for sites, expected in zip(mine, theirs, strict=True):
        assert all(torch.equal(sites[site], expected[site]) for site in expected)
    asked = [padded(ragged_tokens((9, 6)))], Settings(positions=4, window=4), ("attention",)
    tables = [measured(model, *asked, family=family)["attention"] for family in (known, calibration)]
    assert max(reference.errors(*tables).values()) < 1e-5


def seen_at_the_taps(model, family, ids):
    """Return query, key and value (B,heads,T,d) of every layer, after any norm and rotation."""
    with open_seam(model, family) as seams, recorded_taps(seams) as seen:
        model(ids)
    return list(seen.values())


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
    for layer, seen in zip(family.attentions(model), seen_at_the_taps(model, family, ids), strict=True):
        assert roles == set(family.projections[layer])
        projected = projections(model, family, layer)
        calls = calls_of(model, {role: projected[role].module for role in roles}, ids)
        for role in roles:
            ((_, output),), theirs = calls[role], seen[role]
            mine = output.flatten(1, -2)[..., projected[role].places].transpose(1, 2)
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
