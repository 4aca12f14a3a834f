"""`scan` against planted neurons, the matrices of models as plain transformers holds them, and other formats."""

import json
import re
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from gguf import GGUFWriter
from hub import Hub, Repo
from safetensors.torch import load_file, save_file
from support.forked import forked
from tiny import TINY, edit_json, tiny_model
from transformers import PreTrainedModel

import sinkscope
from sinkscope import InputError, SinkscopeError
from sinkscope.commands.scan.command import Scan
from sinkscope.commands.scan.findings import FLOAT16, findings, overview
from sinkscope.commands.scan.networks import KEPT
from sinkscope.models import checkpoint
from sinkscope.models.families import CENTERED_GAINS, find_family
from sinkscope.models.feed_forward import feed_forwards
from sinkscope.models.projections import projections

LAYER, ROW, COLUMN = 1, 7, 5  # of the planted entry
# family → the modules that read the norm's output, the norm, and the norm behind the network
NAMES = {
    "llama": (("mlp.gate_proj", "mlp.up_proj"), "post_attention_layernorm", ""),
    "phi3": (("mlp.gate_up_proj",), "post_attention_layernorm", ""),
    "gemma2": (("mlp.gate_proj", "mlp.up_proj"), "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    "olmo2": (("mlp.gate_proj", "mlp.up_proj"), "", "post_feedforward_layernorm"),
    "cohere": (("mlp.gate_proj", "mlp.up_proj"), "input_layernorm", ""),
    "gpt2": (("mlp.c_fc",), "ln_2", ""),
    "gpt_neox": (("mlp.dense_h_to_4h",), "post_attention_layernorm", ""),
    "opt": (("fc1",), "final_layer_norm", ""),
    "opt-post-norm": (("fc1",), "self_attn_layer_norm", ""),
    "falcon": (("mlp.dense_h_to_4h",), "input_layernorm", ""),
    "falcon-new": (("mlp.dense_h_to_4h",), "ln_mlp", ""),
    "gptj": (("mlp.fc_in",), "ln_1", ""),
}


def saved(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def scan(model: Path | str, **options: Any) -> Scan:
    return sinkscope.scan(str(model), **options)


def places(scanned: Scan) -> list[tuple[int, ...]]:
    """Return layer, expert, coordinate and neuron of all listed neurons, the largest gain first."""
    table = scanned.tables["scan"].sort_values("gain", ascending=False)
    return list(table[["layer", "expert", "coordinate", "neuron"]].itertuples(index=False, name=None))


@pytest.mark.parametrize("name", TINY)
def test_a_planted_super_weight_is_first(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    part = feed_forwards(model, find_family(model))[LAYER]
    expert = 2 if part.experts else -1
    part.weight(expert)[ROW, COLUMN] = -1e4
    scanned = scan(saved(model, tmp_path / "model"))
    assert places(scanned)[0] == (LAYER, expert, ROW, COLUMN)
    first = scanned.tables["scan"].set_index(["layer", "rank"]).loc[LAYER, 1]
    assert first["weight"] == -1e4
    assert scanned.findings[0].numbers == {"layer": LAYER, "coordinate": ROW, "neuron": COLUMN}
    assert ("expert" in overview(scanned.tables)) == bool(part.experts)
    if (norms := scanned.tables.get("scan_norms")) is not None:
        said = next(finding for finding in scanned.findings if finding.name == "norm-gain")
        row = norms.loc[norms["largest"].idxmax()]
        place = f"{row['largest']:,.4g}, at coordinate {row['coordinate']} {row['side']} that of layer {row['layer']}"
        assert said.sentence.endswith(f" is {place}, and its median {row['median']:,.3g}.")
    assert (scanned.tables["scan"].groupby("layer").size() == KEPT).all()


@pytest.mark.parametrize("name", NAMES)
def test_gains_are_those_of_the_definition(name: str, tmp_path: Path) -> None:
    """max_i |m_i W[i,j]| · ‖g_j ∘ n‖ · ‖u_j ∘ n‖, from the modules of plain transformers."""
    model, (names, before, after) = tiny_model(name), NAMES[name]
    family = find_family(model)
    for layer in family.layer_modules(model) if after else ():  # as a gain in half precision may be
        layer.get_submodule(after).weight.data[0] = 0.0 if name == "gemma2" else 1.0
        layer.get_submodule(after).weight.data[1] = -3.0
    table = scan(saved(model, tmp_path / "model")).tables["scan"].set_index(["layer", "neuron"])

    def gain(layer: Any, path: str) -> torch.Tensor:
        if not path:
            return torch.ones(32)
        return layer.get_submodule(path).weight + (1.0 if name == "gemma2" else 0.0)

    for number, layer in enumerate(family.layer_modules(model)):
        weights = [layer.get_submodule(path).weight for path in names]
        rows = torch.cat([weight.T if name == "gpt2" else weight for weight in weights])
        down = feed_forwards(model, family)[number].weight()
        norms = (rows * gain(layer, before)).double().norm(dim=1).view(-1, down.shape[1])
        written = (down * gain(layer, after)[:, None]).double().abs().amax(0)
        expected, neurons = (norms.prod(0) * written).sort(descending=True)
        ours = table.loc[number]
        assert ours.index.tolist() == neurons[:KEPT].tolist()
        np.testing.assert_allclose(ours["gain"], expected[:KEPT], rtol=1e-5)
        bound = expected[:KEPT] * 32 ** (len(norms) / 2)
        if after:  # a norm's output is at most √D times its gain
            bound = gain(layer, after)[ours["coordinate"].tolist()].abs() * 32**0.5
        np.testing.assert_allclose(ours["bound"], bound, rtol=1e-5)


def test_gains_that_are_stored_as_their_difference_from_1_are_those_of_transformers_code() -> None:
    written, kinds = re.compile(r"1(\.0)? \+ self\.weight|self\.weight \+ 1"), set[str]()
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        if written.search(path.read_text("utf-8")):
            for config in path.parent.glob("configuration_*.py"):
                kinds |= {*re.findall(r'model_type = "(\w+)"', config.read_text("utf-8"))}
    # no language models alone; Muse has norms of several kinds
    others = re.compile("t5_?gemma|videoprism|muse|vision|audio|_vl$|qwen4_exp$|step3p7$")
    assert {kind for kind in kinds if not others.search(kind)} == CENTERED_GAINS


@pytest.mark.parametrize(("name", "changes"), [("gpt2", {"n_inner": 32}), ("gpt_oss", {"intermediate_size": 32})])
def test_square_matrices_are_read_in_the_direction_of_their_family(
    name: str, changes: dict[str, int], tmp_path: Path
) -> None:
    model = tiny_model(name, **changes)
    part = feed_forwards(model, find_family(model))[LAYER]
    expert = 2 if part.experts else -1
    part.weight(expert)[ROW, COLUMN] = -1e4
    assert places(scan(saved(model, tmp_path / "model")))[0] == (LAYER, expert, ROW, COLUMN)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model: Any = tiny_model("llama")
    model.model.layers[1].mlp.up_proj.weight[3, 4] = torch.nan
    with pytest.raises(InputError, match=r"layer 1 of .* has NaN or infinite weights"):
        scan(saved(model, tmp_path / "model"))


@pytest.mark.parametrize(
    ("name", "changes"), [("mixtral", {}), ("gpt_oss", {}), ("gpt_oss", {"intermediate_size": 32})]
)
def test_gains_of_experts_are_those_of_their_own_matrices(name: str, changes: dict[str, int], tmp_path: Path) -> None:
    model = tiny_model(name, **changes)
    table = scan(saved(model, tmp_path / "model")).tables["scan"]
    layers = find_family(model).layer_modules(model)
    for row in table.itertuples():
        layer: Any = layers[row.layer]
        experts, norm = layer.mlp.experts, layer.post_attention_layernorm.weight
        fused, down = experts.gate_up_proj[row.expert], experts.down_proj[row.expert]
        if name == "gpt_oss":  # (in, out), with gate and up of a neuron side by side
            fused, down = torch.cat([fused[:, ::2], fused[:, 1::2]], dim=1).T, down.T
        gate, up = (fused * norm).norm(dim=1).view(2, -1)[:, row.neuron]
        assert row.gain == pytest.approx(float(gate * up * down[:, row.neuron].abs().max()), rel=1e-5)
        assert abs(row.weight) == float(down[:, row.neuron].abs().max())


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_oss"])
def test_no_number_depends_on_how_many_rows_are_read_at_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tiny_model(name), tmp_path / "model", max_shard_size="20KB")
    whole = scan(folder).tables["scan"]
    monkeypatch.setattr(checkpoint, "CHUNK", 100)  # one to three rows
    cut = scan(folder).tables["scan"]
    names = ["layer", "expert", "coordinate", "neuron", "rank", "weight"]
    assert cut[names].equals(whole[names])
    assert not whole.duplicated(["layer", "rank"]).any()  # experts of a layer are ranked together
    np.testing.assert_allclose(cut["gain"], whole["gain"], rtol=1e-6)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "qwen2", "opt", "bloom", "phi"])
def test_logits_of_biases_are_those_of_a_model_whose_queries_and_keys_are_its_biases(name: str, tmp_path: Path) -> None:
    """Biases are drawn, and heads of q and k are taken from the projections that plain transformers holds."""
    model, draw = tiny_model(name, dtype=torch.float64), torch.Generator().manual_seed(3)
    family = find_family(model)
    for path, weight in model.named_parameters():
        if path.endswith("bias"):
            weight.normal_(generator=draw)
    table = scan(saved(model, tmp_path / "model")).tables["scan_biases"].set_index(["layer", "head"])
    for layer in range(3):
        query, key = (projections(model, family, layer)[role].bias.double() for role in ("query", "key"))
        for head in range(len(query)):
            ours, kv_head = table.loc[layer, head], head // (len(query) // len(key))
            assert ours["kv_head"] == kv_head
            q, k, root = query[head], key[kv_head], query.shape[1] ** 0.5
            expected = q @ k / root, q.norm() * k.norm() / root, q.norm(), k.norm()
            numbers = ours[["logit", "bound", "query_norm", "key_norm"]].astype(float)
            np.testing.assert_allclose(numbers, expected, rtol=1e-5, atol=1e-6)
    assert len(table) == 3 * len(query)


def test_a_model_without_one_of_the_biases_has_no_table_of_them(tmp_path: Path) -> None:
    assert "scan_biases" not in scan(saved(tiny_model("llama"), tmp_path / "model")).tables


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_statistics_of_every_matrix_are_those_of_the_stored_tensors(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(name)
    folder = saved(model, tmp_path / "model")
    monkeypatch.setattr(checkpoint, "CHUNK", 200)  # several chunks of a matrix
    scanned = scan(folder, matrices=True)
    table = scanned.tables["scan_matrices"]
    stored = {path: x for path, x in load_file(folder / "model.safetensors").items() if x.dim() > 1}
    assert len(table) == len(stored)
    for row in table.itertuples():
        inside = f".{row.layer}.{row.tensor}"
        (x,) = (x for path, x in stored.items() if path == row.tensor or path.removesuffix(".weight").endswith(inside))
        rows = x.flatten(0, -2)
        assert row.largest == float(rows.abs().max()) == float(rows[row.row, row.column].abs())
        np.testing.assert_allclose((row.largest_norm, row.median_norm), (
            rows.norm(dim=1).max(), rows.norm(dim=1).median()), rtol=1e-6)  # fmt: skip
    sentence = next(finding.sentence for finding in scanned.findings if finding.name == "matrices")
    first = table.loc[table["largest"].idxmax()]
    assert f"The largest weight is {first['largest']:.4g}, in `{first['tensor']}`" in sentence
    ratios = table["largest_norm"] / table["median_norm"]
    assert f"most outlying in `{table['tensor'][ratios.idxmax()]}`" in sentence
    assert f"{ratios.max():.3g} × the median of its rows" in sentence


@pytest.mark.parametrize(("settings", "stored", "tied"), [
    ({}, False, True), ({"tie_word_embeddings": False}, True, False), ({"tie_word_embeddings": True}, True, True),
])  # fmt: skip
def test_ends_are_tied_if_one_is_stored_or_the_settings_say_so(
    settings: dict, stored: bool, tied: bool, tmp_path: Path
) -> None:
    model = tiny_model("llama")
    folder = saved(model, tmp_path / "model")
    tensors = {path: x.clone() for path, x in model.state_dict().items() if stored or path != "lm_head.weight"}
    save_file(tensors, folder / "model.safetensors")
    edit_json(folder / "config.json", **settings)
    scanned = scan(folder)
    assert scanned.manifest["tied_embeddings"] is tied
    sentence = scanned.findings[-1].sentence
    assert ("is the input embedding" in sentence, "a matrix of its own" in sentence) == (tied, not tied)


def test_memory_is_that_of_one_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No read is larger than a chunk, and none outside feed-forward networks and their norms."""
    model = tiny_model("llama", intermediate_size=480)
    folder, read = saved(model, tmp_path / "model"), []
    whole = checkpoint._read_file
    monkeypatch.setattr(checkpoint, "_read_file", lambda *at: read.append(at[2] - at[1]) or whole(*at))
    monkeypatch.setattr(checkpoint, "CHUNK", 1000)
    scan(folder)
    header = read[1]
    assert max(read[2:]) <= 4 * 1000
    assert sum(read[2:]) == sum(4 * prod(x.shape) for x in networks_of(model))
    assert header == int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")


def test_the_process_stays_far_smaller_than_the_checkpoint(tmp_path: Path) -> None:
    """300 MB of zeros, which take no room on the disk, in chunks of 4 MB (the benchmark: 13 GB within 2 GB)."""
    shapes = {"gate_proj": (12_000, 4096), "up_proj": (12_000, 4096), "down_proj": (4096, 12_000)}
    names = {f"model.layers.0.mlp.{name}.weight": shape for name, shape in shapes.items()}
    names |= {f"model.layers.0.{name}.weight": (4096,) for name in ("input_layernorm", "post_attention_layernorm")}
    ends = np.cumsum([0, *(2 * prod(shape) for shape in names.values())]).tolist()
    header = json.dumps({
        name: {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
        for (name, shape), begin, end in zip(names.items(), ends[:-1], ends[1:], strict=True)
    }).encode()  # fmt: skip
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + ends[-1])
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')

    def grown() -> None:
        resident = lambda: int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1])  # type: ignore[index]  # noqa: E731
        sizes = [resident()]
        with pytest.MonkeyPatch.context() as patch:
            whole = checkpoint._read_file
            patch.setattr(checkpoint, "_read_file", lambda *at: (whole(*at), sizes.append(resident()))[0])
            patch.setattr(checkpoint, "CHUNK", 1 << 20)
            table = scan(tmp_path).tables["scan"]
        assert (table["gain"] == 0).all()
        assert table["rank"].tolist() == list(range(1, KEPT + 1))  # although all gains are equal
        assert (max(sizes) - sizes[0]) * 1024 < 100e6 < ends[-1] / 2

    with forked(grown) as process:
        assert process.wait() == 0


def networks_of(model: Any) -> list[torch.Tensor]:
    """Return the weights that a scan needs."""
    layers = [[*layer.mlp.parameters(), layer.post_attention_layernorm.weight] for layer in model.model.layers]
    return [weight for weights in layers for weight in weights]


GGUF = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
GGUF_NORMS = {
    "llama": {"post_attention_layernorm": "ffn_norm"},
    "gemma3": {
        "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", GGUF_NORMS)
def test_gguf_gives_the_numbers_of_safetensors(name: str, tmp_path: Path) -> None:
    """GGUF stores the gains of norms, and safetensors of Gemma their difference from 1."""
    model = tiny_model(name)
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_file_type(0)
    for number, layer in enumerate(find_family(model).layer_modules(model)):
        for ours, theirs in (GGUF | GGUF_NORMS[name]).items():
            weight = layer.get_submodule(ours).weight + (1.0 if name == "gemma3" and "norm" in ours else 0.0)  # type: ignore[operator]
            writer.add_tensor(f"blk.{number}.{theirs}.weight", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours, theirs = (scan(path).tables for path in (tmp_path / "model.gguf", saved(model, tmp_path / "model")))
    for table in ("scan", "scan_norms"):
        assert ours[table].drop(columns="model").equals(theirs[table].drop(columns="model"))


@pytest.mark.parametrize("second", ["ffn_norm", "post_attention_norm"])  # the latter in gpt-oss and Qwen 3.5
def test_experts_of_gguf_are_the_parts_of_their_tensors(second: str, tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    for number, layer in enumerate(find_family(model).layer_modules(model)):
        experts: Any = layer.mlp.experts
        gate, up = experts.gate_up_proj.chunk(2, dim=1)
        tensors = {"gate_exps": gate, "up_exps": up, "down_exps": experts.down_proj}
        tensors = {f"ffn_{name}": weight for name, weight in tensors.items()} | {"ffn_gate_inp": torch.ones(4, 32)}
        tensors |= {second: layer.post_attention_layernorm.weight, "attn_norm": torch.full((32,), 3.0)}
        for name, weight in tensors.items():
            writer.add_tensor(f"blk.{number}.{name}.weight", weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours, theirs = (scan(path).tables["scan"] for path in (tmp_path / "model.gguf", saved(model, tmp_path / "model")))
    assert ours.drop(columns="model").equals(theirs.drop(columns="model"))


def test_of_a_hub_id_only_the_needed_bytes_are_read(hub: Hub, tmp_path: Path) -> None:
    model = tiny_model("llama", vocab_size=5000)
    folder = saved(model, tmp_path / "model", max_shard_size="100KB")
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(shards) > 1
    hub.repos["org/tiny"] = Repo({"main": folder})
    hub.sent.clear()
    ours, theirs = scan("org/tiny").tables["scan"], scan(folder).tables["scan"]
    assert ours.drop(columns="model").equals(theirs.drop(columns="model"))
    headers = [int.from_bytes((folder / name).read_bytes()[:8], "little") + 8 for name in shards]
    needed = sum(headers) + sum(4 * prod(x.shape) for x in networks_of(model))
    assert sum(hub.sent[name] for name in shards) == needed
    hub.sends_parts = False
    with pytest.raises(SinkscopeError, match="sends no parts of files: download org/tiny"):
        scan("org/tiny")
    hub.sends_parts = True


def test_an_unknown_type_is_scanned_by_the_names_of_a_family_and_its_code_is_not_run(tmp_path: Path) -> None:
    model = tiny_model("llama")
    folder = saved(model, tmp_path / "model")
    expected = places(scan(folder))
    edit_json(folder / "config.json", model_type="new", auto_map={"AutoConfig": "code.Config"})
    (folder / "code.py").write_text("raise SystemExit('this code was run')")
    unknown = scan(folder)
    assert places(unknown) == expected
    assert unknown.manifest["family"]["name"] == "llama"
    tensors = model.state_dict() | {"model.layers.0.post_mlp_layernorm.weight": torch.ones(32)}
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors")
    assert {layer for layer, *_ in places(scan(folder))} == {1, 2}  # layer 0 has a norm that is no Llama's


def test_the_text_tower_is_found_beside_another_tower(tmp_path: Path) -> None:
    model = tiny_model("llama")
    folder = saved(model, tmp_path / "model")
    expected = places(scan(folder))
    tensors = {f"model.language_model.{name.removeprefix('model.')}": x for name, x in model.state_dict().items()}
    for layer in range(2):
        place = f"model.vision_tower.encoder.layers.{layer}"
        shapes = {"mlp.fc1": (96, 24), "mlp.fc2": (24, 96), "layer_norm1": (24,), "layer_norm2": (24,)}
        tensors |= {f"{place}.{name}.weight": torch.full(shape, 1e4) for name, shape in shapes.items()}
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": config}))
    assert places(scan(folder)) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "gpt2"},
            r"no layer has the feed-forward network and the norms of a known family \(type gpt2\)",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "packed by fp8: scan a checkpoint in full precision"),
    ],
)
def test_what_cannot_be_scanned_is_refused_in_one_line(changes: dict, message: str, tmp_path: Path) -> None:
    folder = saved(tiny_model("llama"), tmp_path / "model")
    edit_json(folder / "config.json", **changes)
    with pytest.raises(InputError, match=message) as caught:
        scan(folder)
    assert "\n" not in str(caught.value)


def test_damaged_files_and_other_dtypes_are_refused(tmp_path: Path) -> None:
    folder = saved(tiny_model("llama"), tmp_path / "model")
    path = folder / "model.safetensors"
    content = path.read_bytes()
    for damaged, message in (
        (content[: len(content) // 2], "cut short"), (b"\x10" + bytes(40), "cut short"),
        (content.replace(b'"F32"', b'"U32"'), r"packed weights \(U32\)"),
    ):  # fmt: skip
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=message):
            scan(folder)
    with pytest.raises(InputError, match="adapter=… does not apply: merge it into the weights first"):
        scan(folder, adapter="lora")


def test_a_pickle_is_read_if_it_is_allowed(tmp_path: Path) -> None:
    model = tiny_model("gpt2")
    folder = saved(model, tmp_path / "model")
    expected = scan(folder).tables["scan"]
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="add allow_pickle=True"):
        scan(folder)
    assert scan(folder, allow_pickle=True).tables["scan"].equals(expected)


def test_the_page_has_the_findings(tmp_path: Path) -> None:
    scanned = scan(saved(tiny_model("gemma3"), tmp_path / "model"), out=tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "run.json").read_text(encoding="utf-8"))
    assert manifest["tables"] == ["scan", "scan_norms"]
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert all(finding.sentence.split(":")[0] in page for finding in scanned.findings)
    gains = scanned.tables["scan_norms"].groupby("side").size().to_dict()
    assert gains == {"after": 3, "before": 3}
    again = sinkscope.show(tmp_path / "out", again=True).read_text(encoding="utf-8")
    assert all(finding.sentence.split(":")[0] in again for finding in scanned.findings)


@pytest.mark.parametrize(
    ("name", "norm", "side"),
    [("llama", "post_attention_layernorm", "before"), ("olmo2", "post_feedforward_layernorm", "after")],
)
def test_norms_have_their_largest_gain_and_their_median(name: str, norm: str, side: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    with torch.no_grad():
        gain = model.get_submodule(f"model.layers.1.{norm}").weight
        gain.copy_(torch.linspace(0.5, 1.5, len(gain)))
        gain[5] = -40.0
    model.save_pretrained(tmp_path / "model")
    row = sinkscope.scan(str(tmp_path / "model")).tables["scan_norms"].set_index(["layer", "side"]).loc[(1, side)]
    assert (row["coordinate"], row["largest"], row["median"]) == (5, 40.0, float(gain.abs().median()))


def test_findings_are_those_of_their_tables() -> None:
    """Layers 0 to 3 of five are early. The last one has the largest gain, layers 0 and 1 have the largest bounds."""
    rows = [(0, 7, 10.0), (1, 7, 20.0), (2, 3, 30.0), (3, 9, 50.0), (4, 7, 100.0)]  # layer, coordinate, gain
    rows = [(*row, 1) for row in rows] + [(layer, 9, gain / 2, 2) for layer, _, gain in rows]
    table = pd.DataFrame(rows, columns=["layer", "coordinate", "gain", "rank"]).assign(expert=-1, weight=1.0, bound=1.0)
    table["neuron"] = 10 * table["layer"] + table["rank"]
    table.loc[table["layer"] < 2, "bound"] = [FLOAT16, *[2 * FLOAT16] * 3]  # beyond it: one in layer 0, two in layer 1
    heads = pd.DataFrame({"layer": [0, 1], "head": [3, 2], "logit": [0.5, 2.0], "bound": [9.0, 3.0]})
    matrices = pd.DataFrame({"layer": [4, -1], "tensor": ["mlp.up_proj", "wte"], "largest": [5.0, 1.0]})
    matrices = matrices.assign(largest_norm=[4.0, 30.0], median_norm=[2.0, 3.0])
    tables = {"scan": table, "scan_biases": heads, "scan_matrices": matrices}
    said = {finding.name: finding for finding in findings({"tied_embeddings": False}, tables)}
    assert (said["candidate"].value, said["candidate"].numbers) == (50.0, {"layer": 3, "coordinate": 9, "neuron": 31})
    assert (said["coordinate"].value, said["coordinate"].numbers) == (3.0, {"coordinate": 7, "layers": 5})
    of_four = findings({"tied_embeddings": False}, tables | {"scan": table[table["layer"] < 4]})[0]
    assert of_four.numbers["layer"] == 2  # of four layers, three are early
    beyond = said["float16-bound"]
    assert (beyond.value, beyond.outcome) == (3.0, "weak")
    assert beyond.numbers == {"layers": 2, "largest": 2 * FLOAT16, "kept": 10}
    within = findings({"tied_embeddings": False}, {"scan": table.assign(bound=FLOAT16)})[2]
    assert (within.name, within.value, within.outcome) == ("float16-bound", 0.0, "absent")
    assert (said["biases"].value, said["biases"].numbers) == (2.0, {"layer": 1, "head": 2, "bound": 9.0})
    assert (said["matrices"].value, said["matrices"].numbers) == (
        5.0,
        {"layer": 4, "ratio": 10.0, "layer_of_ratio": -1},
    )
    places = "The largest weight is 5, in `mlp.up_proj` of layer 4. The norm of a row is most outlying in `wte`: 10 × "
    assert said["matrices"].sentence.startswith(places)
    assert overview(tables)["layer"].tolist()[:3] == ["4", "3", "4"]  # by gain
