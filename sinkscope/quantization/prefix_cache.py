"""The keys and values of a prefix in full precision, as a file that transformers' cache can be filled from."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from sinkscope.errors import InputError
from sinkscope.models.family import input_device

CACHE, HOW = "prefix.safetensors", "prefix.md"
HOW_TO_READ = """# A prefix whose keys and values stay in full precision

`{cache}` holds the token ids of the prefix ({ids}), and the keys and values (1, heads, tokens, d) of each layer of
{model} in full precision. The text follows without a BOS of its own.

```python
import torch
from safetensors.torch import load_file
from transformers import DynamicCache

saved = load_file("{cache}")
length, cache = len(saved["token_ids"]), DynamicCache(config=model.config)
for layer in range(model.config.get_text_config().num_hidden_layers):
    key, value = (saved[f"{{layer}}.{{name}}"].to(model.device, model.dtype) for name in ("key", "value"))
    cache.update(key.repeat(len(text_ids), 1, 1, 1), value.repeat(len(text_ids), 1, 1, 1), layer)
mask = torch.ones(len(text_ids), length + text_ids.shape[1], dtype=torch.long, device=model.device)
logits = model(text_ids, attention_mask=mask, past_key_values=cache).logits
```
"""


@torch.no_grad()
def prefix_cache(model: PreTrainedModel, ids: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Return the token ids, and each layer's keys and values (1,Hkv,p,d), of a prefix.

    Raises:
        InputError: A layer keeps a state instead of keys and values.
    """
    token_ids = torch.tensor(ids, device=input_device(model))
    layers = getattr(model(token_ids[None], use_cache=True).past_key_values, "layers", None)
    if not layers or any(getattr(layer, "keys", None) is None for layer in layers):
        raise InputError("not every layer of this model caches keys and values")
    cache = {"token_ids": token_ids}
    for number, layer in enumerate(layers):
        cache |= {f"{number}.key": layer.keys, f"{number}.value": layer.values}
    return {name: x.detach().cpu().contiguous() for name, x in cache.items()}


def write_prefix(cache: dict[str, torch.Tensor], model: str, folder: Path) -> None:
    ids = cache["token_ids"].tolist()
    save_file(cache, folder / CACHE, {"model": model, "token_ids": json.dumps(ids)})
    text = HOW_TO_READ.format(cache=CACHE, ids=", ".join(map(str, ids)), model=model)
    (folder / HOW).write_text(text, encoding="utf-8")
