"""activations.safetensors: raw tensors of a run's first sequences, named SITE.LAYER."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sinkscope.errors import InputError, Known, UnknownKey, one_line, unknown
from sinkscope.results.swap import new_file

if TYPE_CHECKING:
    import torch

FILE = "activations.safetensors"
MASK_FILE = "spike_mask.safetensors"  # written by `analyze --export-mask`
ATTENTION = "attention"
MAPPED = 64  # number of first tokens of the first sequence of which all weights are kept


class KeptSite(NamedTuple):
    """The tensors of a name, for `sinkscope list activations`."""

    shape: str
    about: str


# what `analyze --keep` can name
KEPT_SITES = {
    "layer_in": KeptSite("N × T × D", "the layer's input"),
    "attn_norm": KeptSite("N × T × D", "the output of the norm before attention"),
    "attn_out": KeptSite("N × T × D", "the output of attention, as it is added to the residual stream"),
    "mid": KeptSite("N × T × D", "the residual stream between the branches"),
    "mlp_norm": KeptSite("N × T × D", "the output of the norm before the MLP"),
    "mlp_out": KeptSite("N × T × D", "the output of the MLP, as it is added to the residual stream"),
    "out_sum": KeptSite("N × T × D", "in post-norm models, the sum before the norm that ends the layer"),
    "layer_out": KeptSite("N × T × D", "the layer's output"),
    "query": KeptSite("N × T × heads × d", "queries as they attend: after norms and rotation"),
    "key": KeptSite("N × T × key/value heads × d", "keys as they are attended to"),
    "value": KeptSite("N × T × key/value heads × d", "values as they are attended to"),
    ATTENTION: KeptSite(
        "N × heads × T × T",
        f"weights of queries × keys, float16; without --keep among the first {MAPPED} tokens of the first sequence",
    ),
}
ALL_SITES = KEPT_SITES | {
    "token_ids": KeptSite("N × T", "ids of the tokens; one tensor for all layers, like the next one"),
    "attention_mask": KeptSite("N × T", "1 for a token, 0 past the end of a sequence"),
}


@dataclass(frozen=True, eq=False)
class Activations(Mapping[str, "dict[int, torch.Tensor]"]):
    """The kept tensors of a run: `run.activations["layer_out"][3]` is layer 3's, (N,T,D).

    Those of a folder are read at each access. Raises InputError if their file is damaged.
    """

    tensors: "Mapping[str, torch.Tensor]" = field(default_factory=dict)  # SITE.LAYER → tensor

    @classmethod
    def of_folder(cls, folder: Path) -> "Activations":
        path = folder / FILE
        return cls(_TensorsOnDisk(path)) if path.is_file() else cls()

    def __getitem__(self, site: str) -> "dict[int, torch.Tensor]":
        layers = self._layers.get(site)
        if layers is None:
            raise UnknownKey(f"site {unknown(site, self)}; `analyze --keep` keeps others")
        return Known("layer", {layer: self.tensors[f"{site}.{layer}"] for layer in layers})

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def _layers(self) -> dict[str, list[int]]:
        """Site → its layers."""
        by_site: dict[str, list[int]] = {}
        for name in self.tensors:
            site, _, layer = name.partition(".")
            if layer.isdecimal():
                by_site.setdefault(site, []).append(int(layer))
        return {site: sorted(layers) for site, layers in sorted(by_site.items())}

    @property
    def token_ids(self) -> "torch.Tensor":
        """The ids of the sequences, (N,T), with zeros past their ends."""
        return self.tensors["token_ids"]

    @property
    def attention_mask(self) -> "torch.Tensor":
        """(N,T): 1 for a token, 0 past the end of a sequence."""
        return self.tensors["attention_mask"]

    def write(self, folder: Path, name: str = FILE) -> None:
        """Write the file, if there are tensors."""
        from safetensors.torch import save_file  # imported late, because it loads torch

        if self.tensors:
            with new_file(folder / name) as fresh:
                permissions = fresh.stat().st_mode
                save_file(dict(self.tensors), fresh, {"format": "pt"})  # readable for its owner only
                fresh.chmod(permissions)


@dataclass(frozen=True, eq=False)
class _TensorsOnDisk(Mapping[str, "torch.Tensor"]):
    """The tensors of a file, which are read at each access."""

    path: Path

    def __getitem__(self, name: str) -> "torch.Tensor":
        with self._open_file() as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        with self._open_file() as file:
            names = list(file.keys())
        return iter(names)

    def __len__(self) -> int:
        return len(list(self))

    @contextmanager
    def _open_file(self) -> Iterator[Any]:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path, framework="pt") as file:
                yield file
        except (OSError, SafetensorError) as error:
            raise InputError(f"{self.path} is damaged: {one_line(error)}") from error
