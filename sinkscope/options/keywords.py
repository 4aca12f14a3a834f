"""The types of the options of Python functions: written by tests/keywords.py from the pydantic fields."""

from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict

from sinkscope.options.given import Given


class ModelKeywords(TypedDict, total=False):
    revision: str | None
    gguf_file: str | None
    adapter: str | None
    trust_remote_code: bool
    allow_pickle: bool


class DeviceKeywords(TypedDict, total=False):
    dtype: Literal["float32", "bfloat16", "float16"] | None
    device_map: str | None
    attn: Literal["sdpa", "eager"]


class TextKeywords(TypedDict, total=False):
    input: PathLike[str] | Iterable[Any] | str | Given
    seq_len: int
    bos: Literal["auto", "always", "never"]


class SequenceKeywords(TypedDict, total=False):
    dataset: str | None
    num_seqs: int


class SeedKeywords(TypedDict, total=False):
    seed: int


class InputKeywords(SeedKeywords, SequenceKeywords, TextKeywords, total=False):
    prompt: str | None


class ObservableKeywords(TypedDict, total=False):
    observables: str | Sequence[type] | Sequence[str] | None
    positions: int
    window: int
    epsilon: float


class RunConfigKeywords(ObservableKeywords, InputKeywords, DeviceKeywords, ModelKeywords, total=False):
    batch_size: int | Literal["auto"]
    skip_parity: bool
    force: bool


class CloseUpKeywords(RunConfigKeywords, total=False):
    heads: str | Sequence[tuple[int, int]] | Sequence[str] | None
    keep: str | Sequence[str]
    keep_seqs: int


class AnalyzeKeywords(CloseUpKeywords, total=False):
    export_mask: bool
    random_weights: bool
    generate: int | None
    images: str | PathLike[str] | None


class ControlKeywords(TypedDict, total=False):
    draws: int


class ClaimsKeywords(ControlKeywords, RunConfigKeywords, total=False):
    nulls: int
    from_: Sequence[str | PathLike[str]]


class InterveneKeywords(ControlKeywords, RunConfigKeywords, total=False):
    arm: str | Sequence[str]


class QuantizeKeywords(RunConfigKeywords, total=False):
    scheme: (
        str
        | Sequence[
            Literal["W8A8", "FP8", "FP8_DYNAMIC", "W4A16", "MXFP4", "MXFP4A16", "NVFP4", "NVFP4A16"]
            | Literal["static", "full"]
        ]
    )
    cure: str | Sequence[Literal["spare", "smoothquant", "awq", "rotation", "prefix"]] | None
    alpha: float
    bits_weights: int
    bits_activations: int
    bits_kv_cache: int
    weights_per: Literal["tensor", "channel"]
    activations_per: Literal["tensor", "token"]
    kv_cache_per: Literal["tensor", "token", "channel"] | None
    calibration: int
    prefix: str | None
    prefix_draws: int


class KvPlanKeywords(RunConfigKeywords, total=False):
    budget: str | float | Sequence[float]
    calibration: int


class BenchmarkKeywords(SeedKeywords, DeviceKeywords, ModelKeywords, total=False):
    tasks: str | Sequence[str]
    task_path: str | None
    shots: int | None
    limit: int | None
    batch_size: int


class TrainingConfigKeywords(SeedKeywords, total=False):
    steps: int
    block_length: int
    batch_size: int
    accumulation: int
    optimizer: Literal["adamw", "muon"]
    learning_rate: float
    new_learning_rate: float
    weight_decay: float
    decay: Literal["matrices", "all"]
    beta1: float
    beta2: float
    clip: float
    warmup: float
    schedule: Literal["linear", "cosine", "constant"]
    only_new: bool
    bf16: bool
    save_every: int
    log_every: int
    eval_share: float


class ArmKeywords(TrainingConfigKeywords, SequenceKeywords, ObservableKeywords, DeviceKeywords, total=False):
    seeds: int
    method: str | Sequence[str] | dict[str, str]
    text: PathLike[str] | str
    tokens: int | None
    bos: Literal["auto", "never"]
    random_tokens: int
    fixed_position: int | None
    probe: str | Sequence[str]
    save_models: Literal["all", "none"]


class RetrofitKeywords(ArmKeywords, ModelKeywords, total=False):
    pass


class TrainKeywords(ArmKeywords, total=False):
    pass


class RunKeywords(InputKeywords, DeviceKeywords, ModelKeywords, total=False):
    pass


class SweepKeywords(DeviceKeywords, ModelKeywords, total=False):
    quick: bool
    dry_run: bool
    gpu: Literal["H100", "H200", "A100", "L40S", "RTX4090"]
    engine: Literal["local", "ray"]
    address: str | None
    workers: int | Literal["auto"]
    shard: str | None
    retry: bool
    evict: bool


class DoctorKeywords(RunConfigKeywords, total=False):
    dtype: Literal["float32", "bfloat16", "float16", "float8_e4m3", "float8_e5m2"] | None  # type: ignore[misc]
    images: str | PathLike[str] | None
    compare: str | PathLike[str] | None


class ScanKeywords(ModelKeywords, total=False):
    matrices: bool
