"""A retrofitted model is saved and loaded again: the logits are equal bit for bit, and the plain class refuses it."""

import json
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.retrofit_command import words_tokenizer
from support.retrofitted import FURTHER, NAMES, pairs
from support.retrofitted import METHODS as ALL_METHODS
from tiny import tiny_model, tiny_tokens
from transformers import AutoModelForCausalLM, AutoTokenizer

import sinkscope
from sinkscope import InputError, gate_displacement, new_parameters, retrofit_model
from sinkscope.attention.taps import NAME
from sinkscope.models.families import find_family

# with parameters that are not at their defaults
METHODS = (
    ALL_METHODS
    | FURTHER
    | {
        "vscale": ("vscale", {"sigma": 0.3}),
        "vscale-fixed": ("vscale", {"learned": False, "strength": 30.0}),
        "vga": ("vga", {"scale": 1.5}),
        "learnable-sink": ("learnable-sink", {"first": -1}),
    }
)
IDS = tiny_tokens(2, 9)
ROOT = Path(__file__).parents[2]


def as_loaded(name: str, dtype: torch.dtype) -> Any:
    """Return a tiny model as read from a file, because GPT-J's table of positions is then in float32 in any dtype."""
    if dtype == torch.float32:
        return tiny_model(name)
    with TemporaryDirectory() as folder:
        tiny_model(name, dtype=dtype).save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).requires_grad_(False)


def trained(name: str, label: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return a retrofitted model, with every new parameter moved from its start."""
    if (name, label) == ("gpt_oss", "learnable-sink"):
        pytest.skip("has learnable sinks of its own")
    method, parameters = METHODS[label]
    model = retrofit_model(as_loaded(name, dtype), None, method, **parameters)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in new_parameters(model).values():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(IDS, use_cache=False).logits


@cache
def plain_logits(name: str, dtype: torch.dtype) -> torch.Tensor:
    return logits(as_loaded(name, dtype))


HALVED = ("llama", "mixtral", "gemma2", "gpt_oss", "gpt2", "gptj", "falcon", "bloom")


@pytest.mark.parametrize(
    ("name", "label", "dtype"),
    [(*pair, torch.float32) for pair in pairs(NAMES, list(ALL_METHODS))]
    + [(*pair, torch.bfloat16) for pair in pairs(HALVED, list(ALL_METHODS))]
    + [("llama", label, torch.float32) for label in ("mlp-kernel", "p-norm", "kv-bias", "key-bias-axis")],
)
def test_saved_and_loaded_it_gives_the_same_logits(name: str, label: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = trained(name, label, dtype)
    model.save_pretrained(tmp_path)
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, output_loading_info=True)
    assert type(again) is type(model)
    assert not any(report.values())
    assert torch.equal(logits(again), logits(model))
    assert not torch.equal(logits(model), plain_logits(name, dtype))
    assert gate_displacement(again).equals(gate_displacement(model))
    assert find_family(again) == find_family(tiny_model(name))


def test_the_folder_says_what_was_done(tmp_path: Path) -> None:
    trained("qwen2", "vga").save_pretrained(tmp_path, max_shard_size="20KB")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "sinkscope_qwen2"
    assert config["architectures"] == ["SinkscopeQwen2ForCausalLM"]
    assert config["retrofit"].pop("sinkscope")
    assert config["retrofit"] == {"method": "vga", "parameters": {"placement": "value", "scale": 1.5}}
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    weights = {name: x for file in files for name, x in load_file(file).items()}
    assert weights["model.layers.2.self_attn.retrofit.weight"].shape == (16, 2)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(trained("qwen2", "vga")))
    retrofit_model(tiny_model("llama"), None, "none").save_pretrained(tmp_path / "plain")
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "plain")).__name__ == "LlamaForCausalLM"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("retrofits") / "vga"
    trained("llama", "vga").save_pretrained(path)
    return path


# The results of a process that imports sinkscope, transformers and then the retrofits: a line of JSON each.
TRANSFORMERS_FIRST = """
import json, sys
import sinkscope
light = sorted({{"torch", "transformers", "pydantic"}} & set(sys.modules))
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
folder, finders, kind = {folder!r}, list(sys.meta_path), type(CONFIG_MAPPING)

def note(name, step):
    try:
        found = step()
    except Exception as error:
        found = f"{{type(error).__name__}}: {{error}}"
    print(json.dumps([name, found]))

def load():
    config, model = AutoConfig.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    return [config.retrofit["method"], type(model).__name__]

note("imported by sinkscope", lambda: light)
note("plain transformers", load)
note("type known to sinkscope", lambda: "sinkscope_llama" in CONFIG_MAPPING)
import sinkscope.retrofits
note("type known to its retrofits", lambda: "sinkscope_llama" in CONFIG_MAPPING)
note("finders and mapping left alone", lambda: [sys.meta_path == finders, type(CONFIG_MAPPING) is kind])
note("with the retrofits", load)
note("sinkscope itself", lambda: type(sinkscope.load(folder).model).__name__)
"""


@pytest.mark.slow
def test_plain_transformers_refuses_it_and_importing_the_retrofits_is_enough(folder: Path) -> None:
    """Only `import sinkscope.retrofits` registers the retrofits' model types."""
    program = TRANSFORMERS_FIRST.format(folder=str(folder))
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
    printed = dict(json.loads(line) for line in result.stdout.splitlines())
    refusal = "`sinkscope_llama` but Transformers does not recognize this architecture"
    assert refusal in printed.pop("plain transformers")
    assert printed == {
        "imported by sinkscope": [],
        "type known to sinkscope": False,
        "type known to its retrofits": True,
        "finders and mapping left alone": [True, True],
        "with the retrofits": ["vga", "SinkscopeLlamaForCausalLM"],
        "sinkscope itself": "SinkscopeLlamaForCausalLM",
    }


@pytest.mark.parametrize("label", ["key-bias", "register-tokens"])
def test_sinkscope_loads_and_analyzes_the_folder(label: str, tmp_path: Path) -> None:
    model = trained("llama", label)
    model.save_pretrained(tmp_path)
    words_tokenizer().save_pretrained(tmp_path)
    loaded = sinkscope.load(str(tmp_path))
    assert torch.equal(logits(loaded.model), logits(model))
    assert loaded.tokenizer is not None
    assert AutoTokenizer.from_pretrained(tmp_path)("w9")["input_ids"] == loaded.tokenizer("w9")["input_ids"]
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    run = sinkscope.analyze(str(tmp_path), input="random", num_seqs=2, seq_len=12)
    if label == "register-tokens":
        tokens = run.tables["massive"].set_index("position")["token"]
        assert set(tokens[tokens.index < 3]) <= {"<register>"}
        assert set(tokens[tokens.index >= 3]) != {"<register>"}
    if label == "key-bias":
        for kernel in ("eager", "sdpa", None):
            again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=kernel)
            assert again.config._attn_implementation == NAME
            assert torch.equal(logits(again), logits(model))


def test_a_folder_that_is_damaged_or_of_a_later_sinkscope_is_refused(folder: Path, tmp_path: Path) -> None:
    later = {"method": "vgb", "parameters": {}, "sinkscope": "9.9"}
    config = json.loads((folder / "config.json").read_text())
    for record, message in (
        (later, r"saved by sinkscope 9.9: retrofit 'vgb' is unknown; did you mean 'vga'"),
        (None, "`retrofit` is damaged"),
        ("vga", "`retrofit` is damaged"),
        ({"method": "vga"}, "`retrofit` is damaged"),
    ):
        path = shutil.copytree(folder, tmp_path / "edited", dirs_exist_ok=True)
        (path / "config.json").write_text(json.dumps(config | {"retrofit": record}))
        for load in (AutoModelForCausalLM.from_pretrained, sinkscope.load)[record is not later :]:
            with pytest.raises(InputError, match=message):
                load(str(path))
    path = shutil.copytree(folder, tmp_path / "less")
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.self_attn.retrofit.weight"]
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"lacks weights of the model \(model.layers.1.self_attn.retrofit.weight\)"):
        sinkscope.load(str(path))
