"""Attention to anything other than tokens of the text, against plain transformers' eager weights."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.plain import only_float64
from support.retrofitted import plain_model, retrofitted
from tiny import written

from sinkscope import analyze, new_parameters
from sinkscope.results.run import RunData

LENGTHS = (24, 9)  # lengths of the two sequences
TEXTS = [torch.randint(3, 64, (length,), generator=torch.Generator().manual_seed(length)) for length in LENGTHS]


def measured(model: object, folder: Path, epsilon: float = 0.16) -> RunData:
    path = written(folder / "ids.jsonl", TEXTS)
    with only_float64():
        return analyze(model, input=path, seq_len=24, bos="never", epsilon=epsilon, observables=("attention",))


@torch.no_grad()
def eager_weights(model: torch.nn.Module, **inputs: torch.Tensor) -> torch.Tensor:
    """Return the weights of one sequence, (layers,H,T,T)."""
    model.set_attn_implementation("eager")  # type: ignore[operator]
    with only_float64():
        return torch.cat(model(**inputs, use_cache=False, output_attentions=True).attentions)


def check(run: RunData, outside: list[torch.Tensor], keys: int = 1) -> None:
    """Compare the run with `outside`, each sequence's mass (layers,H,T) on `keys` keys outside the text."""
    means, epsilon = torch.stack([mass.mean(-1) for mass in outside]), run.manifest["config"]["epsilon"]
    uniform = torch.tensor([(keys / (keys + torch.arange(1.0, mass.shape[-1] + 1))).mean() for mass in outside])
    has_rate = uniform <= epsilon  # in the shorter sequence uniform attention gives more
    rates = (means[has_rate] > epsilon).double().mean(0)
    table = run.tables["attention_outside"].sort_values(["layer", "head"])
    assert table["uniform_mass"].to_numpy() == pytest.approx(float(uniform.mean()))
    assert 0 < rates.mean() < 1  # some heads have a sink
    assert table["outside_mass"].to_numpy() == pytest.approx(means.mean(0).flatten().numpy(), abs=1e-10)
    assert table["sink_rate_outside"].to_numpy() == pytest.approx(rates.flatten().numpy())
    assert run.metric("sink_rate_outside") == pytest.approx(float(rates.mean()))


def test_learned_sink_logits_of_the_models_own(tmp_path: Path) -> None:
    run = measured(plain_model("gpt_oss"), tmp_path, epsilon=0.13)
    bare = plain_model("gpt_oss")
    check(run, [1 - eager_weights(bare, input_ids=ids[None]).sum(-1) for ids in TEXTS])
    assert run.manifest["outside"] == {"the model's own sink logits": [0, 1, 2]}
    assert "goes to the model's own sink logits in" in run.verdict


def test_registers_are_outside_and_are_no_queries(tmp_path: Path) -> None:
    model = retrofitted("llama", "register-tokens")
    run = measured(model, tmp_path, epsilon=0.55)
    bare, registers = plain_model("llama"), next(iter(new_parameters(model).values())).detach()
    outside = []
    for ids in TEXTS:
        embedded = torch.cat([registers, bare.get_input_embeddings()(ids)])[None]
        outside.append(eager_weights(bare, inputs_embeds=embedded)[:, :, len(registers) :, : len(registers)].sum(-1))
    check(run, outside, keys=len(registers))
    assert run.manifest["outside"] == {"register tokens": [0, 1, 2]}


@pytest.mark.parametrize(("label", "called"), [("learnable-sink", "learned sink logits"), ("key-bias", "key biases")])
def test_a_retrofits_term_is_named(label: str, called: str, tmp_path: Path) -> None:
    run = measured(retrofitted("llama", label), tmp_path)
    assert list(run.manifest["outside"]) == [called]
    mass = run.tables["attention_outside"]["outside_mass"]
    assert np.allclose(mass, run.tables["attention_heads"]["missing_mass"], atol=1e-12)
    assert mass.min() > 0
    run = measured(plain_model("llama"), tmp_path)
    assert "attention_outside" not in run.tables
    assert np.isnan(run.metric("sink_rate_outside"))
    assert "outside" not in run.verdict
