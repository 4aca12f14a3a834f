"""The memory of a pass: its estimate, and layers that are computed again in the backward pass instead of being kept."""

from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from hub import Hub, Repo
from support.live_memory import LiveMemory
from support.retrofitted import each_pair
from tiny import FORWARD, REPRESENTATIVE, TINY, batched, measured, padded, ragged_tokens, tiny_model
from transformers import LlamaConfig

import sinkscope
from sinkscope.errors import InputError
from sinkscope.measuring import memory, tracer
from sinkscope.measuring.memory import Memory, bytes_per_token
from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.measuring.observables.observable import Settings
from sinkscope.models.families import find_family
from sinkscope.models.memory import free_memory
from sinkscope.options.measuring import make_config
from sinkscope.retrofits import retrofit_model

ALL = (*FORWARD, "gradient")
SETTINGS = Settings(positions=4, window=8)
TOKENS = 512
HUGE = {"hidden_size": 4096, "intermediate_size": 8192, "num_hidden_layers": 15, "vocab_size": 32000}


@pytest.fixture
def recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no activations of a layer fit into memory."""
    monkeypatch.setattr(tracer, "tokens_that_fit", lambda model, backward: 0)


def grown(name: str, layers: int, dtype: torch.dtype = torch.float32) -> Any:
    """Return a tiny model with more layers and positions."""
    depth = "n_layer" if "n_layer" in TINY[name][1] else "num_hidden_layers"
    return tiny_model(name, dtype=dtype, max_position_embeddings=TOKENS, **{depth: layers})


def peak(name: str, layers: int, backward: bool, dtype: torch.dtype) -> tuple[int, float]:
    """Return the largest number of bytes that live in a pass over TOKENS tokens, and its estimate."""
    model = grown(name, layers, dtype)
    names = ALL if backward else FORWARD
    with tracer.open_tracer(model, find_family(model)) as opened:
        observables = [OBSERVABLES[each](SETTINGS) for each in names]
        for observable in observables:
            observable.prepare(model, opened.family, 1)
        batch = padded(ragged_tokens((TOKENS,)))
        with LiveMemory() as live:
            (opened.forward_backward if backward else opened.forward)(batch, observables)
    return live.most, TOKENS * bytes_per_token(model, backward)


@each_pair(["llama", "gpt2", "gemma2", "mixtral"], [torch.bfloat16, torch.float32], ("name", "dtype"))
def test_layers_keep_less_than_the_estimate(name: str, dtype: torch.dtype) -> None:
    """These narrow models have as many statistics of a token as channels, which the estimate leaves out."""
    few, more = (peak(name, layers, True, dtype) for layers in (6, 12))
    kept, estimated = (more[at] - few[at] for at in (0, 1))
    statistics = 6 * TOKENS * 64 * torch.float32.itemsize
    assert 0.3 * estimated < kept < estimated + statistics


@pytest.mark.usefixtures("recomputed")
def test_layers_that_are_computed_again_keep_little() -> None:
    """Only their inputs, what the observables' hooks hold, and statistics until the end of the batch."""
    few, more = (peak("llama", layers, True, torch.float32) for layers in (3, 6))
    assert more[0] - few[0] < 0.3 * (more[1] - few[1])


@pytest.mark.parametrize("name", [*REPRESENTATIVE, "gated"])
def test_layers_that_are_computed_again_have_the_same_gradients(name: str, request: pytest.FixtureRequest) -> None:
    def tables() -> dict[str, pd.DataFrame]:
        model: Any = tiny_model("llama" if name == "gated" else name)
        if name == "gated":
            torch.manual_seed(0)
            model = retrofit_model(model, None, "vga").requires_grad_(False)
        return measured(model, batched(ragged_tokens((24, 17, 5)), 2), SETTINGS, ALL, backward=True)

    plain = tables()
    request.getfixturevalue("recomputed")
    again = tables()
    for table, rows in plain.items():
        pd.testing.assert_frame_equal(again[table], rows, check_exact=True, obj=table)


def test_the_run_says_what_batch_it_took(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"input": "random", "num_seqs": 6, "seq_len": 10, "observables": ("massive",)}
    options |= {"quiet": False}
    model = tiny_model("llama")
    for room, size in ((100, 6), (35, 3), (1, 1)):
        free = int(room * bytes_per_token(model, backward=False) / memory.USABLE) + 1
        monkeypatch.setattr(memory, "free_memory", lambda device, free=free: free)
        assert sinkscope.analyze(model, **options).manifest["batch_size"] == size
        assert f"6 sequences in batches of {size} × 10" in capsys.readouterr().err
    sinkscope.analyze(model, batch_size=2, **options)
    assert "in batches of" not in capsys.readouterr().err


def test_the_peak_of_a_run_is_estimated() -> None:
    """Of the libraries, of which a test knows nothing, the weights and one batch."""
    measured_peak, batch = peak("llama", 6, True, torch.float32)
    model = grown("llama", 6)
    options = make_config(seq_len=TOKENS, batch_size=3, num_seqs=1)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    estimated = Memory(model, options, True, 1 << 40).peak(torch.float32) - memory.LIBRARY_BYTES
    estimated -= memory.TOKENIZER * model.config.vocab_size
    assert estimated == pytest.approx(weights + batch, rel=1e-6)
    assert 0.5 < estimated / (weights + measured_peak) < 2.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bfloat16"}, "(5.2 GiB of weights in bfloat16), and 4.5 GiB are free: no other dtype=…, seq_len=…"),
        ({"dtype": "float32"}, "org/huge needs 10.4 GiB of memory (10.4 GiB of weights in float32)"),
        ({"dtype": "bfloat16", "free": 5.5, "seq_len": 8192}, "are free: seq_len="),
        ({"dtype": "float32", "free": 5.5}, "are free: dtype=bfloat16 would fit; force=True goes on"),
        ({"dtype": "bfloat16", "free": 5.5, "batch_size": 20, "seq_len": 512}, "batch_size=1 or seq_len="),
    ],
)
def test_a_model_that_cannot_fit_is_refused_before_its_weights_are_downloaded(
    options: dict[str, Any], message: str, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LlamaConfig(**HUGE, architectures=["LlamaForCausalLM"])
    hub.repos["org/huge"] = Repo({"main": {"config.json": config.to_json_string().encode(), "model.safetensors": b""}})
    free = int(options.pop("free", 4.5) * 2**30)
    monkeypatch.setattr(memory, "free_memory", lambda device: free)
    with pytest.raises(InputError) as refused:
        sinkscope.analyze("org/huge", **options)
    assert message in str(refused.value)
    assert not any("model.safetensors" in request for request in hub.requests)
    with pytest.raises(InputError, match="damaged or cut short"):  # which only reading the weights shows
        sinkscope.analyze("org/huge", force=True, **options)


@pytest.mark.parametrize("kind", ["cpu", "meta", "mps"])
def test_a_device_without_memory_of_its_own_has_the_cpus(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=7))
    assert free_memory(torch.device(kind)) == 7
