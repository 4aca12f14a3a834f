"""Runs what sinkscope exports in the tools it is for, and compares their losses with the predicted ones.

    make consumers

The tools have an environment of their own (.venv/consumers). llm-compressor runs the recipes of `quantize`, scheme by
scheme. It calibrates each layer with the earlier layers quantized; sinkscope measures static ranges in the model in
full precision. So the schemes with static ranges (FP8, NVFP4) may differ by TOLERANCE, the others by round-off that
moves entries to a neighboring number. kvpress runs the plans of `kv-plan` that evict, text by text, and has presses of
its own for evictions after the prompt; the losses differ by ROUND_OFF.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

import sinkscope
from sinkscope.commands.quantize.options import QuantizeOptions
from sinkscope.measuring.console import Messages
from sinkscope.measuring.subject import open_subject

PYTHON = Path(".venv/consumers/bin/python")
WRITTEN: dict[str, Any] = {"overwrite": True, "page": False, "figures": ()}
TOLERANCE, ROUND_OFF = 0.02, 1e-4  # nats per token
PLANS = ("beyond-window", "output-loss", "retrieval")

COMPRESSOR = """
import json, sys
import numpy as np
import torch
from datasets import Dataset
from llmcompressor import oneshot
from transformers import AutoModelForCausalLM

folder, recipe = sys.argv[1:]
ids = torch.tensor(np.load(f"{folder}/ids.npy"))
model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32)

def loss():
    with torch.no_grad():
        logits = model(ids[:16]).logits[:, :-1].double()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:16, 1:].flatten()).item()

before = loss()
mask = torch.ones_like(ids[16:]).tolist()
texts = Dataset.from_dict({"input_ids": ids[16:].tolist(), "attention_mask": mask})
oneshot(model=model, recipe=recipe, dataset=texts, num_calibration_samples=16, max_seq_length=64)
print(json.dumps(loss() - before))
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
        subject.loaded.model.save_pretrained(folder / "model")
        subject.loaded.tokenizer.save_pretrained(folder / "model")  # llm-compressor looks for it
    wrong = [*pressed(folder, ids.reshape(-1, 128)[:3]), *compressed(folder, ids)]
    if wrong:
        raise SystemExit(f"not as predicted: {', '.join(wrong)}")


def compressed(folder: Path, ids: np.ndarray) -> list[str]:
    """Return the schemes of `quantize` whose cost on ids (N,T) is another in llm-compressor."""
    np.save(folder / "ids.npy", ids)
    where = WRITTEN | {"out": folder / "run"}
    run = sinkscope.quantize(folder / "model", input=list(ids), num_seqs=16, seq_len=64, calibration=16, **where)
    costs = run.tables["formats"].query("part == 'all'").set_index("scheme")["cost"]
    wrong = []
    for recipe in sorted((folder / "run").glob("llm-compressor-*.yaml")):
        scheme = recipe.stem.removeprefix("llm-compressor-")
        if differs(scheme, np.array(costs[scheme]), TOLERANCE, COMPRESSOR, folder, recipe):
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
    actual = np.array(json.loads(done.stdout.splitlines()[-1])) if done.returncode == 0 else np.nan * predicted
    print(f"{name:15} predicted {predicted.round(5)}, actual {actual.round(5)} nats per token", flush=True)
    is_another = not (np.abs(predicted - actual) <= tolerance).all()
    if is_another:
        print(done.stderr[-2000:], file=sys.stderr)
    return is_another


if __name__ == "__main__":
    main(Path(sys.argv[1]))
