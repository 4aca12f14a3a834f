"""Runs what sinkscope exports in the tools it is for, and compares their losses with the predicted ones.

    make consumers

The tools have an environment of their own (.venv/consumers). llm-compressor runs the recipes of `quantize`, scheme by
scheme; costs may differ by TOLERANCE. With static ranges (FP8, NVFP4) round-off decides what becomes of the entries at
the end of the range: a factor of 1 ± 1e-6 on the ranges moves the cost of FP8 on these texts by 0.01 nats. So the
cost that is predicted has to be within those of the ranges times FACTORS, give or take TOLERANCE. Modules that a
recipe ignores have to compute with their weights as they were.

The models are SmolLM2 and a mixture of experts made of it, where llm-compressor 0.14 and compressed-tensors 0.19 differ
from what is served in three points, which are put right here: layer by layer, a Mixtral is calibrated without a causal
mask; the gate and the up projection of an expert get a scale each under FP8; and an expert's inputs, which have no
batch axis, get one scale in place of one for each token.

kvpress runs the plans of `kv-plan` that evict, text by text, and has presses of its own for evictions after the prompt;
the losses differ by ROUND_OFF.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import MixtralConfig, MixtralForCausalLM

import sinkscope
from sinkscope.commands.quantize.options import QuantizeOptions
from sinkscope.measuring.console import Messages
from sinkscope.measuring.subject import open_subject

PYTHON = Path(".venv/consumers/bin/python")
WRITTEN: dict[str, Any] = {"overwrite": True, "page": False, "figures": ()}
TOLERANCE, ROUND_OFF = 0.02, 1e-4  # nats per token
FACTORS = ("1", "0.99999", "0.999999", "1.000001", "1.00001")  # nearly one
BASIC = "basic"  # llm-compressor's pipeline that calibrates the whole model in full precision
PLANS = ("beyond-window", "output-loss", "retrieval")

COMPRESSOR = """
import json, sys
import numpy as np
import torch
import yaml
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modeling.moe.linearize import linearize_moe
from transformers import AutoModelForCausalLM

folder, recipe, pipeline, *nearly_one = sys.argv[1:]
ids = torch.tensor(np.load(f"{folder}/ids.npy"))
evaluated, calibrating = ids.chunk(2)
model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32)
linearize_moe(model)  # as oneshot does

def loss():
    with torch.no_grad():
        logits = model(evaluated).logits[:, :-1].double()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), evaluated[:, 1:].flatten())

(modifier,) = yaml.safe_load(open(recipe))["quant_stage"]["quant_modifiers"].values()
ignored = {name: model.get_submodule(name) for name in modifier["ignore"]}
weights = {name: module.weight.clone() for name, module in ignored.items()}
before = loss()
mask = torch.ones_like(calibrating).tolist()
texts = Dataset.from_dict({"input_ids": calibrating.tolist(), "attention_mask": mask})
about = {"num_calibration_samples": len(calibrating), "max_seq_length": 64, "pipeline": pipeline}
oneshot(model=model, recipe=recipe, dataset=texts, **about)
with torch.no_grad():
    for name, module in ignored.items():
        x = torch.randn(3, module.in_features)
        assert torch.equal(module(x), torch.nn.functional.linear(x, weights[name])), f"{name} is quantized"
experts = {name: module for name, module in model.named_modules() if ".experts." in name and hasattr(module, "weight")}
for name, module in experts.items():
    module.forward = lambda x, forward=module.forward: forward(x[None])[0]
    up = experts.get(name.replace("gate_proj", "up_proj"))
    if "gate_proj" in name and getattr(module, "weight_scale", before.new_zeros(2)).numel() == 1:
        both = torch.maximum(module.weight_scale, up.weight_scale)
        module.weight_scale.data, up.weight_scale.data = both, both.clone()
scales = [x for name, x in model.state_dict().items() if name.endswith(("input_scale", "input_global_scale"))]
ranges = [scale.clone() for scale in scales]
costs = []
for factor in map(float, nearly_one if scales else ["1"]):
    for scale, largest in zip(scales, ranges):
        scale.copy_(largest * factor)
    costs.append((loss() - before).item())
print(json.dumps([min(costs), max(costs)]))
"""

PRESS = """
import json, sys
import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

folder, plan = sys.argv[1:]
sys.path.append(f"{folder}/plans")
from plan_press import PlanPress

ids = torch.tensor(np.load(f"{folder}/long.npy"))[:2]
model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32)
losses = []
with torch.no_grad(), PlanPress.of(f"{folder}/plans/plan.json", 0.25, plan)(model):
    for text in ids:
        cache = DynamicCache()
        logits = [model(token[None, None], past_key_values=cache).logits[0, 0] for token in text[:-1]]
        losses.append(torch.nn.functional.cross_entropy(torch.stack(logits), text[1:]).item())
print(json.dumps(losses))
"""

EVICTION = """
import json, sys
import numpy as np
import torch
from kvpress import ExpectedAttentionPress, SnapKVPress, TOVAPress
from transformers import AutoModelForCausalLM, DynamicCache

folder, name = sys.argv[1:]
ids = torch.tensor(np.load(f"{folder}/long.npy"))[:2]
model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32)
length, copied = ids.shape[1], ids.shape[1] // 8
presses = {
    "snapkv": SnapKVPress(0.75, window_size=length // 8),
    "tova": TOVAPress(0.75),
    "expected-attention": ExpectedAttentionPress(0.75, n_future_positions=length + copied),
}
losses = []
with torch.no_grad():
    for text in ids:
        cache, copy = DynamicCache(), text[1 : 1 + copied]
        with presses[name](model):
            model(text[None], past_key_values=cache, cache_position=torch.arange(length))  # kvpress reads it
        places = torch.arange(length, length + copied)[None]
        logits = model(copy[None], past_key_values=cache, position_ids=places).logits[0, 7:-1]
        losses.append(torch.nn.functional.cross_entropy(logits, copy[8:]).item())
print(json.dumps(sum(losses) / len(losses)))
"""


def main(folder: Path) -> None:
    """Write the model and its texts, simulate presets and plans, run each recipe and press, and print both losses."""
    folder.mkdir(parents=True, exist_ok=True)
    config = QuantizeOptions(num_seqs=32, seq_len=64)
    with open_subject(None, None, config, Messages(quiet=True)) as subject:
        ids = np.stack(subject.inputs.sequences)
        models = {folder: subject.loaded.model, folder / "experts": mixture_of(subject.loaded.model)}
        for place, model in models.items():
            model.save_pretrained(place / "model")
            subject.loaded.tokenizer.save_pretrained(place / "model")  # llm-compressor looks for it
    wrong = pressed(folder, ids.reshape(-1, 128)[:3])
    wrong += compressed(folder, ids, "sequential")
    wrong += compressed(folder / "experts", ids[::2], BASIC) + spared(folder / "experts")
    if wrong:
        raise SystemExit(f"not as predicted: {', '.join(wrong)}")


def mixture_of(llama: Any) -> MixtralForCausalLM:
    """Return a Llama as a mixture of experts: four perturbed copies of each MLP, of which a random router takes two."""
    options = {name: getattr(llama.config, name) for name in MixtralConfig().to_dict() if hasattr(llama.config, name)}
    ours = {"model_type": "mixtral", "architectures": None, "num_local_experts": 4, "num_experts_per_tok": 2}
    mixture = MixtralForCausalLM(MixtralConfig(**options | ours)).eval()
    generator, tensors = torch.Generator().manual_seed(0), dict(llama.state_dict())

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    for layer in range(llama.config.num_hidden_layers):
        mlp = f"model.layers.{layer}.mlp"
        gate, up, down = (tensors.pop(f"{mlp}.{name}_proj.weight") for name in ("gate", "up", "down"))
        for name, weight in (("gate_up_proj", torch.cat([gate, up])), ("down_proj", down)):
            tensors[f"{mlp}.experts.{name}"] = weight + 0.2 * weight.std() * noise(4, *weight.shape)
        tensors[f"{mlp}.gate.weight"] = 0.1 * noise(4, llama.config.hidden_size)
    mixture.load_state_dict(tensors)
    return mixture


def spared(folder: Path) -> list[str]:
    """Compare the cost of MXFP4 with some modules, experts among them, in full precision; return what differs."""
    ids, scheme = np.load(folder / "ids.npy"), "MXFP4"
    run = predicted(folder, ids, scheme=scheme, cure="spare", out=folder / "spared")
    (row,), recipe = run.tables["formats_cures"].to_dict("records"), folder / "spared" / f"llm-compressor-{scheme}.yaml"
    if ".experts." not in recipe.read_text():
        return [f"the recipe for {scheme}, which ignores no expert"]
    cost = np.array(row["cost"] - row["recovered"])
    return (
        [f"{scheme} spared"]
        if differs(f"{scheme} spared", cost, TOLERANCE, COMPRESSOR, folder, recipe, BASIC, *FACTORS)
        else []
    )


def predicted(folder: Path, ids: np.ndarray, **options: Any) -> sinkscope.Run:
    """Measure schemes on the first half of ids (N,T); the second half calibrates."""
    half = len(ids) // 2
    of_text = {"input": list(ids), "num_seqs": half, "calibration": half, "seq_len": ids.shape[1]}
    return sinkscope.quantize(folder / "model", **WRITTEN | of_text | options)


def compressed(folder: Path, ids: np.ndarray, pipeline: str) -> list[str]:
    """Return the schemes of `quantize` whose cost on ids (N,T) is another in llm-compressor."""
    np.save(folder / "ids.npy", ids)
    run = predicted(folder, ids, out=folder / "run")
    costs = run.tables["formats"].query("part == 'all'").set_index("scheme")["cost"]
    wrong = []
    for recipe in sorted((folder / "run").glob("llm-compressor-*.yaml")):
        scheme = recipe.stem.removeprefix("llm-compressor-")
        if differs(scheme, np.array(costs[scheme]), TOLERANCE, COMPRESSOR, folder, recipe, pipeline, *FACTORS):
            wrong.append(scheme)
    return wrong


def pressed(folder: Path, ids: np.ndarray) -> list[str]:
    """Return the plans of `kv-plan` whose loss on the first two of three texts (3,T) is another in kvpress."""
    np.save(folder / "long.npy", ids)
    where = WRITTEN | {"out": folder / "plans"}
    run = sinkscope.kv_plan(folder / "model", input=list(ids), num_seqs=2, seq_len=ids.shape[1], **where)
    losses = run.tables["kv_plan_by_sequence"].set_index("plan")["loss"]
    wrong = [plan for plan in PLANS if differs(plan, losses[plan].to_numpy(), ROUND_OFF, PRESS, folder, plan)]
    of_copy = run.tables["kv_tasks"].query("task == 'copy'").set_index("plan")["loss"]
    evictions = {name: np.array(of_copy[name]) for name in ("snapkv", "tova", "expected-attention")}
    return wrong + [name for name, loss in evictions.items() if differs(name, loss, ROUND_OFF, EVICTION, folder, name)]


def differs(name: str, predicted: np.ndarray, tolerance: float, script: str, *arguments: Path | str) -> bool:
    """Print what a script of a tool gives next to what is predicted, and return whether they differ."""
    done = subprocess.run([PYTHON, "-c", script, *arguments], capture_output=True, text=True, check=False)
    actual = np.array(json.loads(done.stdout.splitlines()[-1])) if done.returncode == 0 else np.full(2, np.nan)
    print(f"{name:15} predicted {predicted.round(5)}, actual {actual.round(5)} nats per token", flush=True)
    if script is COMPRESSOR:
        actual = predicted.clip(*actual)
    is_another = not (np.abs(predicted - actual) <= tolerance).all()
    if is_another:
        print(done.stderr[-2000:], file=sys.stderr)
    return is_another


if __name__ == "__main__":
    main(Path(sys.argv[1]))
