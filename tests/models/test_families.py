"""The table of families: every row's wiring holds, a wrong one's does not, and an unknown model is refused."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import reference
import torch
from support.naming import naming
from tiny import TINY, padded, ragged_tokens, tiny_model, tiny_tokens
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from sinkscope.errors import InputError
from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.measuring.observables.observable import Settings
from sinkscope.measuring.tracer import open_tracer
from sinkscope.models import families
from sinkscope.models.calibrate import calibrate, layer_stack
from sinkscope.models.families import FAMILIES, find_family
from sinkscope.models.family import RESIDUAL_SITES, Family, Term
from sinkscope.models.wiring import check_wiring, read_sites

ROUND_OFF = 1e-6


def worst_error(model: PreTrainedModel, family: Family) -> float:
    return max(check_wiring(family.block(0), sites) for sites in read_sites(model, family, tiny_tokens(2, 9)))


# ------------------------------------------------------------------------------------------------ rows


def test_the_wiring_equation_holds_at_every_layer() -> None:
    for name in TINY:
        with naming(name):
            model = tiny_model(name)
            records = read_sites(model, find_family(model), tiny_tokens(2, 9))
            assert len(records) == 3
            for sites in records:
                assert check_wiring(find_family(model).block(0), sites) < ROUND_OFF


def test_sites_are_where_the_reference_finds_them() -> None:
    """Another list of places, written by hand (reference.py), and h+½ as a sum."""
    for name in TINY:
        with naming(name):
            model = tiny_model(name)
            ids = tiny_tokens(1, 9)[0].numpy()
            found = read_sites(model, find_family(model), torch.as_tensor(ids)[None])
            for mine, layer in zip(found, reference.record(reference.eager_twin(model), ids).layers, strict=True):
                assert {site for site in mine if not site.endswith("norm")} == set(layer.sites)
                for site, expected in layer.sites.items():
                    torch.testing.assert_close(mine[site][0].double(), torch.as_tensor(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", TINY)
def test_the_norms_are_the_branches_inputs(name: str) -> None:
    """attn_norm and mlp_norm are in no equation: they are what the attention and the MLP are given."""
    model = tiny_model(name)
    family = find_family(model)
    layer = family.layer_modules(model)[1]
    given: dict[str, torch.Tensor] = {}

    def keep(site: str) -> None:
        path = family.attention if site == "attn_norm" else MLPS.get(family.name, "mlp")
        module = layer.get_submodule(path)
        module.register_forward_pre_hook(
            lambda module, args, kwargs: given.update({site: (*args, *kwargs.values())[0].clone()}), with_kwargs=True
        )

    present = [site for site in ("attn_norm", "mlp_norm") if site in family.sites]
    for site in present:
        keep(site)
    found = read_sites(model, family, tiny_tokens(2, 9))[1]
    assert given.keys() == set(present)
    for site in present:
        assert torch.equal(found[site], given[site].view_as(found[site]))


MLPS = {"opt": "fc1", "mpt": "ffn"}


def test_absent_sites_have_a_reason() -> None:
    for name in TINY:
        with naming(name):
            family = find_family(tiny_model(name))
            assert set(family.sites) | set(family.absent_sites()) == set(RESIDUAL_SITES)
            assert not set(family.sites) & set(family.absent_sites())
            assert all(family.absent_sites().values())
            assert ("mid" in family.absent_sites()) == (family.wiring == "parallel")


def test_a_row_for_every_kind_of_wiring_and_position() -> None:
    found = [find_family(tiny_model(name)) for name in TINY]
    assert {family.wiring for family in found} == {"sequential", "parallel", "post-norm"}
    assert {family.positions for family in found} == {"rotary", "learned", "alibi"}
    assert {family.door for family in found} == {"interface", "interceptor"}


@pytest.mark.parametrize(
    ("name", "positions"),
    [("llama", "rotary"), ("gpt2", "learned"), ("gptj", "rotary"), ("gpt_neo", "learned"), ("opt", "learned"),
     ("falcon", "rotary"), ("falcon-alibi", "alibi"), ("bloom", "alibi"), ("mpt", "alibi")],
)  # fmt: skip
def test_how_positions_get_in(name: str, positions: str) -> None:
    assert find_family(tiny_model(name)).positions == positions


def test_every_row_has_a_tiny_model() -> None:
    """A row that no test goes through is no row. (`gemma3` is `gemma3_text` with a vision tower: test_seam.py; of
    `varied_llama`: test_varied_llama.py.)
    """
    covered = {id(row) for rows in FAMILIES.values() for row in rows}
    for name in TINY:
        model = tiny_model(name)
        row = find_family(model)
        covered -= {
            id(known) for known in FAMILIES[model.config.model_type] if replace(known, positions=row.positions) == row
        }
    left = {kind for kind, rows in FAMILIES.items() for row in rows if id(row) in covered}
    assert left <= {"gemma3", "varied_llama"}


# ------------------------------------------------------------------------------------------ wrong rows

WRONG = {
    # family → what is wrong with its row
    "llama": {"attn_out": "post_attention_layernorm.output"},
    "gemma2": {"attn_out": "self_attn.output"},  # before the norm after the branch
    "gemma3": {"mlp_out": "mlp.output"},
    "olmo2": {"attn_out": "self_attn.output"},
    "gpt2": {"mid": "ln_2.output"},
    "bloom": {"attn_out": "self_attention.output"},  # the residual is in it already
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


def test_the_check_notices_a_sequential_row_of_a_parallel_block() -> None:
    """Both are rows of GPT-NeoX."""
    model = tiny_model("gpt_neox")
    (row,) = (row for row in FAMILIES["gpt_neox"] if row.wiring == "sequential")
    assert worst_error(model, find_family(model)) < ROUND_OFF
    assert worst_error(model, row) > 1e-2


def test_a_missing_residual_is_noticed_in_a_post_norm_block() -> None:
    model = tiny_model("opt-post-norm")
    sites = read_sites(model, find_family(model), tiny_tokens(2, 9))[0]
    family = find_family(model)
    assert check_wiring(family.block(0), sites) < ROUND_OFF
    assert check_wiring(family.block(0), sites | {"attn_out": sites["mid"]}) > 1e-2
    assert check_wiring(replace(family, wiring="sequential").block(0), sites) > 1e-2


# ---------------------------------------------------------------------------------------------- finding


def test_an_unknown_architecture_is_named() -> None:
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gpt_bigcode", vocab_size=16, n_embd=8, n_layer=1, n_head=2, n_positions=8)
    )
    with pytest.raises(InputError, match=r"'gpt_bigcode' has no row"):
        find_family(model)


def test_a_variant_without_a_row_is_refused() -> None:
    model = tiny_model("bloom")
    find_family(model)
    model.config.apply_residual_connection_post_layernorm = True
    with pytest.raises(InputError, match=r"no row for a bloom wired like this one.*apply_residual"):
        find_family(model)


def test_that_variants_wiring_is_indeed_another() -> None:
    """The refusal is no fuss: Bloom's row is wrong for it."""
    model = tiny_model("bloom")
    family = find_family(model)
    for block in model.transformer.h:
        block.apply_residual_connection_post_layernorm = True
    assert worst_error(model, family) > 1e-2


# ------------------------------------------------------------------------------------------ calibration


def calibrated(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> Family:
    """The row found for a model whose type has none."""
    others = {kind: rows for kind, rows in FAMILIES.items() if kind != model.config.model_type}
    with monkeypatch.context() as patch:
        patch.setattr(families, "FAMILIES", others)
        with pytest.raises(InputError):
            find_family(model)
        return calibrate(model, tiny_tokens(2, 9))


@pytest.mark.parametrize("name", TINY)
def test_calibration_finds_a_known_family_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is measured through the calibrated row is what is measured through the known one."""
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


class Nonsense(nn.Module):
    """A block with a llama's names, whose residual stream is scaled: no equation holds."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        for name, module in block.named_children():
            self.add_module(name, module)

    def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        middle = 0.9 * hidden_states + attended
        return middle + self.mlp(self.post_attention_layernorm(middle))


def test_of_a_layer_whose_sums_are_not_known_only_the_ends_are_read() -> None:
    model = tiny_model("llama")
    model.model.layers = nn.ModuleList(Nonsense(layer) for layer in model.model.layers)
    family = calibrate(model, tiny_tokens(2, 9))
    assert (family.wiring, family.attention) == ("unknown", "self_attn")
    assert dict(family.sites) == {"layer_in": "input", "layer_out": "output"}
    assert all("it is not known which sum" in reason for reason in family.absent_sites().values())


class Scaled(Nonsense):
    """The same, with each branch multiplied by a constant of its own."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        middle = hidden_states + 0.25 * attended
        return middle - 1.5 * self.mlp(self.post_attention_layernorm(middle))


def test_calibration_finds_by_what_a_branch_is_multiplied() -> None:
    model = tiny_model("llama")
    model.model.layers = nn.ModuleList(Scaled(layer) for layer in model.model.layers)
    family = calibrate(model, tiny_tokens(2, 9))
    for block in family.blocks:
        assert block.terms("attn_out") == (Term("self_attn.output", 0.25),)
        assert block.terms("mlp_out") == (Term("mlp.output", -1.5),)
    assert worst_error(model, family) < ROUND_OFF


class Shared(Nonsense):
    """The feed-forward network and a second one parallel to it are added together."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__(block)
        self.shared = copy.deepcopy(self.mlp)

    def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        middle = hidden_states + attended
        normed = self.post_attention_layernorm(middle)
        return middle + 0.5 * (self.mlp(normed) + self.shared(normed.flip(-1)))


def test_calibration_finds_two_modules_that_are_added_together() -> None:
    model = tiny_model("llama")
    model.model.layers = nn.ModuleList(Shared(layer) for layer in model.model.layers)
    family = calibrate(model, tiny_tokens(2, 9))
    expected = (Term("mlp.output", 0.5), Term("shared.output", 0.5))
    assert all(block.terms("mlp_out") == expected for block in family.blocks)
    assert worst_error(model, family) < ROUND_OFF


def test_what_attends_twice_is_refused() -> None:
    class Twice(Nonsense):
        def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
            first, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
            second, _ = self.self_attn(hidden_states=first, **kwargs)
            return hidden_states + second

    model = tiny_model("llama")
    model.model.layers = nn.ModuleList(Twice(layer) for layer in model.model.layers)
    with pytest.raises(InputError, match="layer 0 attends 2 times"):
        calibrate(model, tiny_tokens(2, 9))


def test_one_attention_for_several_layers_is_refused() -> None:
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn = model.model.layers[0].self_attn
    with pytest.raises(InputError, match="share one attention module"):
        calibrate(model, tiny_tokens(2, 9))


def test_what_later_tokens_change_is_not_causal() -> None:
    model = tiny_model("llama")
    assert calibrate(model, tiny_tokens(2, 9)).causal
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda module, args, output: (output[0] + output[0].flip(1), *output[1:]))
    assert not calibrate(model, tiny_tokens(2, 9)).causal


def test_calibration_needs_a_stack_of_layers() -> None:
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = SimpleNamespace(model_type="beside")
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([expert(x) for expert in self.experts]).sum(0)

    with pytest.raises(InputError, match="'beside': no list of layers"):
        layer_stack(Beside(), {"x": torch.ones(1, 2, 4)}, {"x": torch.zeros(1, 2, 4)})


# ---------------------------------------------------------------------------------------------- reading


def test_reading_sites_leaves_no_hook_and_no_change() -> None:
    model = tiny_model("falcon")  # adds into its MLP's output in place
    ids = tiny_tokens(2, 9)
    with torch.no_grad():
        before = model(ids).logits
        first, second = (read_sites(model, find_family(model), ids) for _ in range(2))
        assert torch.equal(before, model(ids).logits)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(one[site], other[site]) for site in one)
