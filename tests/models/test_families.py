"""The table of families: every row's wiring is right, a wrong row is detected, and an unknown model is refused."""

from dataclasses import replace

import pytest
import reference
import torch
from tiny import TINY, padded, ragged_tokens, tiny_model, tiny_tokens
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from sinkscope.errors import InputError
from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.measuring.observables.observable import Settings
from sinkscope.measuring.tracer import open_tracer
from sinkscope.models import families
from sinkscope.models.calibrate import calibrate
from sinkscope.models.families import FAMILIES, find_family
from sinkscope.models.family import RESIDUAL_SITES, Family
from sinkscope.models.wiring import check_wiring, read_sites

ROUND_OFF = 1e-6


def worst_error(model: PreTrainedModel, family: Family) -> float:
    return max(check_wiring(family.block(0), sites) for sites in read_sites(model, family, tiny_tokens(2, 9)))


MLPS = {"opt": "fc1", "mpt": "ffn"}


@pytest.mark.parametrize("name", TINY)
def test_rows(name: str) -> None:
    """The wiring equation holds, sites are where the reference (written by hand) has them, and norms are inputs."""
    model = tiny_model(name)
    family, block = find_family(model), find_family(model).block(0)
    layer = family.layer_modules(model)[1]
    given: dict[str, torch.Tensor] = {}  # inputs of the two branches: attn_norm and mlp_norm, which are in no equation
    for site, path in (("attn_norm", family.attention), ("mlp_norm", MLPS.get(family.name, "mlp"))):

        def keep(module: object, args: tuple, kwargs: dict, site: str = site) -> None:
            given[site] = (*args, *kwargs.values())[0].clone()

        if site in family.sites:
            layer.get_submodule(path).register_forward_pre_hook(keep, with_kwargs=True)
    records = read_sites(model, family, tiny_tokens(2, 9))
    assert given.keys() == {"attn_norm", "mlp_norm"} & set(family.sites)
    for site, x in given.items():
        assert torch.equal(records[1][site], x.view_as(records[1][site]))
    assert len(records) == 3
    assert all(check_wiring(block, sites) < ROUND_OFF for sites in records)
    ids = tiny_tokens(1, 9)
    by_hand = reference.record(reference.eager_twin(model), ids[0].numpy()).layers
    for mine, layer in zip(read_sites(model, family, ids), by_hand, strict=True):
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
        covered -= {
            id(known) for known in FAMILIES[model.config.model_type] if replace(known, positions=row.positions) == row
        }
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
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gpt_bigcode", vocab_size=16, n_embd=8, n_layer=1, n_head=2, n_positions=8)
    )
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
    """Return the row found for a model whose type has none."""
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
    known, found = find_family(model), calibrated(model, monkeypatch)
    assert found.name == model.config.model_type
    assert (found.layers, found.attention, found.wiring, found.door) == (
        known.layers, known.attention, known.wiring, known.door
    )  # fmt: skip
    assert list(found.sites) == list(known.sites)
    assert not found.blocks
    assert found.positions in (known.positions, "unknown")
    mine, other = read_sites(model, found, tiny_tokens(2, 9)), read_sites(model, known, tiny_tokens(2, 9))
    for sites, expected in zip(mine, other, strict=True):
        assert all(torch.equal(sites[site], expected[site]) for site in expected)
    settings, batch = Settings(positions=4, window=4), padded(ragged_tokens((9, 6)))
    weights = []
    for family in (known, found):
        with open_tracer(model, family) as tracer:
            observable = OBSERVABLES["attention"](settings)
            tracer.forward(batch, [observable])
            weights.append(observable.tables()["attention"])
    assert max(reference.errors(weights[1], weights[0]).values()) < 1e-5
