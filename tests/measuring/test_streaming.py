"""Reading a text with a short cache in one pass equals reading token by token, and takes linear memory."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
import torch
from support.retrofitted import each_pair, retrofitted
from support.untouched import assert_as_before, state_of
from tiny import TINY, ragged_tokens, tiny_model, tiny_tokens
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from sinkscope.attention.seam import open_seam
from sinkscope.attention.streaming import streamed_attention, streaming
from sinkscope.errors import InputError, SinkscopeError
from sinkscope.figures import draw
from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.measuring.observables.observable import Settings
from sinkscope.measuring.streaming import measure_streaming
from sinkscope.measuring.tables import shape_table
from sinkscope.measuring.tracer import open_tracer
from sinkscope.models.families import find_family
from sinkscope.output.run import Run
from sinkscope.retrofits import retrofit_model
from sinkscope.retrofits.retrofit import RETROFIT, registers_before
from sinkscope.text.batch import Batch
from sinkscope.text.inputs import TokenInputs

CACHES = [(0, 1), (0, 5), (1, 1), (1, 4), (2, 3), (3, 4), (4, 9)]  # keep, window; the tiny models look back 6 tokens
LEARNED = ["gpt2", "opt", "opt-post-norm"]
REFUSED = ["bloom", "mpt", "falcon-alibi", "falcon", "falcon-new", "gptj", "gpt_neo"]
ROTARY = [name for name in TINY if name not in (*LEARNED, *REFUSED)]


def smooth(name: str) -> PreTrainedModel:
    """Return a model in float64 with smaller weights than elsewhere, so that softmax weights are spread over keys."""
    model = tiny_model(name, dtype=torch.float64, spread=6.0)
    model.set_experts_implementation("eager")  # the grouped product does not support float64
    return model


@torch.no_grad()
def plain(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, use_cache=False).logits


def streamed(model: PreTrainedModel, ids: torch.Tensor, keep: int, window: int) -> torch.Tensor:
    family = find_family(model)
    with open_seam(model, family) as seams, streaming(model, family, seams, keep, window):
        return plain(model, ids)


def assert_close(mine: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Compare with a tolerance for float32, in which transformers computes rotary tables and RMS norms."""
    assert float((mine - expected).abs().max() / expected.abs().max()) < tolerance


# --------------------------------------------------- every rotary family: keys are rotated again for every query


class Reread:
    """Attention of one query after the other over a cache of unrotated keys, with the family's own rotation.

    In the meantime the model's `apply_rotary_pos_emb` does not rotate; it only records its cosines and sines.
    """

    def __init__(self, keep: int, window: int, rotate: Callable) -> None:
        self.keep, self.window, self.rotate = keep, window, rotate
        self.tables: tuple[torch.Tensor, ...] = ()

    def unrotated(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **_: Any) -> tuple:
        self.tables = (cos, sin)
        return q, k

    def rotated(self, x: torch.Tensor, places: list[int], width: int) -> torch.Tensor:
        cos, sin = (table[:, places] for table in self.tables)
        return torch.cat([self.rotate(x[..., :width], x[..., :width], cos, sin)[0], x[..., width:]], dim=-1)

    def attend(
        self, attention: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None, **options: Any
    ) -> tuple[torch.Tensor, None]:
        softcap, sliding_window = options.get("softcap"), options.get("sliding_window")
        s_aux, scaling = options.get("s_aux"), options["scaling"]
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        width = getattr(attention, "rotary_ndims", query.shape[-1])
        mixes = []
        for t in range(query.shape[2]):
            cached = [*range(self.keep), *range(max(self.keep, t - self.window + 1), t + 1)][: t + 1]
            places = list(range(len(cached)))
            if sliding_window is not None:
                places = places[-sliding_window:]
            cached = [cached[place] for place in places]
            turned = self.rotated(query[:, :, t : t + 1], [len(places) - 1 + places[0]], width)
            logits = turned @ self.rotated(key[:, :, cached], places, width).transpose(-1, -2) * scaling
            if softcap is not None:
                logits = softcap * (logits / softcap).tanh()
            if s_aux is not None:
                logits = torch.cat([logits, s_aux[None, :, None, None].expand(len(query), -1, 1, 1)], dim=-1)
            if hasattr(attention, RETROFIT):
                logits = torch.cat([logits, outside_logit(attention, turned, scaling, softcap)], dim=-1)
            mixes.append(logits.softmax(-1)[..., : len(cached)] @ value[:, :, cached])
        return torch.cat(mixes, dim=2).transpose(1, 2), None


def outside_logit(attention: Any, turned: torch.Tensor, scaling: float, softcap: float | None) -> torch.Tensor:
    """Return a learned sink logit, or the logit of a key bias and a query at its index in the cache: (B,H,1,1)."""
    part = getattr(attention, RETROFIT)
    if hasattr(part, "logit"):
        return part.logit[None, :, None, None].expand(len(turned), -1, 1, 1)
    logit = (turned[:, :, 0] * part.key).sum(-1)[..., None, None] * scaling
    return logit if softcap is None else softcap * (logit / softcap).tanh()


def reread(model: PreTrainedModel, ids: torch.Tensor, keep: int, window: int) -> torch.Tensor:
    family = find_family(model)
    code = sys.modules[type(family.layer_modules(model)[0].get_submodule(family.attention)).__module__]
    oracle = Reread(keep, window, code.apply_rotary_pos_emb)
    AttentionInterface.register("reread", oracle.attend)
    AttentionMaskInterface.register("reread", lambda **_: None)
    before = model.config._attn_implementation
    with patch.object(code, "apply_rotary_pos_emb", oracle.unrotated):
        PreTrainedModel.set_attn_implementation(model, "reread")  # a retrofit's own method rejects other code
        try:
            return plain(model, ids)
        finally:
            PreTrainedModel.set_attn_implementation(model, before)


@each_pair(ROTARY, CACHES, ("name", "cache"), whole=("gemma3", "gpt_oss"))  # with sliding windows
def test_every_rotary_family_reads_as_if_its_keys_moved_up_in_the_cache(name: str, cache: tuple[int, int]) -> None:
    model, ids, (keep, window) = smooth(name), tiny_tokens(2, 20), cache
    mine = streamed(model, ids, keep, window)
    assert_close(mine, reread(model, ids, keep, window))
    if keep:  # the result differs from the plain window
        assert (mine - streamed(model, ids, 0, keep + window)).abs().max() > 1e-3 * mine.abs().max()


OUTSIDE = ["learnable-sink", "key-bias", "register-tokens"]  # retrofits with attention targets other than the text


@pytest.mark.parametrize(("keep", "window"), [(0, 5), (2, 4), (4, 9)])
@each_pair(["llama", "gemma2", "gpt_oss"], OUTSIDE)
def test_what_is_outside_the_text_is_read_as_from_a_cache(name: str, label: str, keep: int, window: int) -> None:
    model, ids = retrofitted(name, label), tiny_tokens(2, 20)
    mine = streamed(model, ids, keep, window)
    assert_close(mine, reread(model, ids, keep, window))
    assert_close(streamed(model, ids, keep, 30), plain(model, ids), 1e-6)
    bare = streamed(retrofitted(name, label, trained=False), ids, keep, window)
    if label != "register-tokens" or keep:  # a window alone has forgotten them soon
        assert (mine - bare)[:, 12:].abs().max() > 1e-4 * mine.abs().max()


def test_a_key_bias_with_a_value_is_refused_where_the_query_turns() -> None:
    """Its weight would depend on the position of the query in the text."""
    ids = tiny_tokens(2, 20)
    with pytest.raises(InputError, match="its key biases have values"):
        streamed(retrofit_model(smooth("llama"), None, "key-bias", value="learned"), ids, 0, 5)
    streamed(retrofit_model(smooth("gpt2"), None, "key-bias", value="learned"), ids, 0, 5)


# ------------------------------------------------------------- learned positions: transformers' own cache


@torch.no_grad()
def token_by_token(model: PreTrainedModel, ids: torch.Tensor, keep: int, window: int) -> torch.Tensor:
    cache, registers = DynamicCache(config=model.config), registers_before(model)
    logits = []
    for t in range(ids.shape[1]):
        place = torch.full((len(ids), 1), min(t, keep + window - 1 - registers))
        out = model(ids[:, t : t + 1], past_key_values=cache, position_ids=place, use_cache=True)
        logits.append(out.logits)
        for layer in cache.layers:  # room for the next token
            if layer.keys.shape[2] == keep + window:
                layer.keys, layer.values = (
                    torch.cat([x[:, :, :keep], x[:, :, keep + 1 :]], dim=2) for x in (layer.keys, layer.values)
                )
    return torch.cat(logits, dim=1)


@each_pair(LEARNED, CACHES, ("name", "cache"))
def test_a_family_with_learned_positions_reads_as_with_transformers_cache(name: str, cache: tuple[int, int]) -> None:
    model, ids, (keep, window) = smooth(name), tiny_tokens(2, 20), cache
    assert_close(streamed(model, ids, keep, window), token_by_token(model, ids, keep, window), 1e-12)


@pytest.mark.parametrize(("label", "keep", "window"), zip(OUTSIDE, (1, 3, 4), (4, 4, 9), strict=True))
def test_the_same_with_something_outside_the_text(label: str, keep: int, window: int) -> None:
    model, ids = retrofitted("gpt2", label), tiny_tokens(2, 20)
    assert_close(streamed(model, ids, keep, window), token_by_token(model, ids, keep, window), 1e-12)


# ------------------------------------------------------------------------------------------ invariance


@each_pair([*ROTARY, *LEARNED], [(0, 24), (4, 20), (24, 1), (30, 100)], ("name", "cache"))
def test_a_cache_that_holds_the_whole_text_is_dense_attention(name: str, cache: tuple[int, int]) -> None:
    model, ids, (keep, window) = smooth(name), tiny_tokens(2, 24), cache
    assert_close(streamed(model, ids, keep, window), plain(model, ids), 1e-6)


@pytest.mark.parametrize(("name", "block"), [("llama", 3), ("gemma3", 1), ("gpt_oss", 7), ("gpt2", 64)])
def test_the_block_of_queries_changes_nothing(name: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = smooth(name), tiny_tokens(2, 20)
    whole = streamed(model, ids, 2, 4)
    monkeypatch.setattr(streamed_attention, "__defaults__", (block,))
    assert_close(streamed(model, ids, 2, 4), whole, 1e-7)


# ---------------------------------------------------------------------------------------------------- memory


class Largest(TorchDispatchMode):
    """Records the largest number of elements in the output of any operation."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **kwargs or {})
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor) and x.untyped_storage().nbytes() > 0:
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_nothing_grows_with_the_square_of_the_length(name: str) -> None:
    model = tiny_model(name)
    largest = {}
    for length in (1024, 2048):
        with Largest() as seen:
            streamed(model, tiny_tokens(1, length), 4, 32)
        largest[length] = seen.numel
    assert largest[1024] < 1024**2 / 4
    assert largest[2048] <= 2 * largest[1024]


# ------------------------------------------------------------------------------------------------- restoring


@contextmanager
def opened(model: PreTrainedModel, keep: int = 2, window: int = 3) -> Iterator[None]:
    """Stream in a block; afterwards the model is as before."""
    family, before = find_family(model), state_of(model)
    try:
        with open_seam(model, family) as seams:
            kernels = [seam.kernel for seam in seams.values()]
            try:
                with streaming(model, family, seams, keep, window):
                    yield
            finally:
                assert [seam.kernel for seam in seams.values()] == kernels
    finally:
        assert_as_before(model, before)


@pytest.mark.parametrize("where", ["mlp", "self_attn.q_proj", "self_attn.o_proj"])
def test_the_model_is_as_before_after_an_exception(where: str) -> None:
    """This includes an exception in the forward call that only fetches a query."""
    model = tiny_model("llama")
    part, error = model.model.layers[1].get_submodule(where), torch.OutOfMemoryError("CUDA out of memory.")
    with pytest.raises(torch.OutOfMemoryError), opened(model), patch.object(part, "forward", side_effect=error):
        plain(model, tiny_tokens(2, 12))


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "gpt2"])
def test_in_a_trace_too_but_no_attention_weights_are_read(name: str) -> None:
    """The weights would be those of dense attention, with the log-sum-exp of a cache."""
    model, ids = tiny_model(name), tiny_tokens(2, 20)
    batch = Batch(ids, torch.ones_like(ids))
    family = find_family(model)
    expected = streamed(model, ids, 2, 5)
    before = state_of(model)
    with open_tracer(model, family) as tracer, streaming(model, family, tracer.seams, 2, 5):
        torch.testing.assert_close(tracer.logits(batch), expected)
        tracer.forward(batch, [OBSERVABLES["massive"](Settings(positions=4, window=4))])
        with pytest.raises(SinkscopeError, match="layer 0: its attention is not one softmax"):
            tracer.forward(batch, [OBSERVABLES["attention"](Settings(positions=4, window=4))])
    assert_as_before(model, before)


# -------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_cannot_stream_is_refused_with_the_reason(name: str) -> None:
    model = tiny_model(name)
    reason = "ALiBi" if name in ("bloom", "mpt", "falcon-alibi") else "attention code of its own"
    with pytest.raises(InputError, match=rf"streaming does not apply to \w+, because .*{reason}"), opened(model):
        pass
    with pytest.raises(InputError, match=reason):
        measure_streaming(model, find_family(model), inputs_of(2, 40), (4,), (1,))


def test_padding_and_a_cache_are_refused() -> None:
    model, ids = tiny_model("llama"), tiny_tokens(2, 12)
    mask = torch.ones_like(ids)
    with opened(model):
        model(ids, attention_mask=mask, use_cache=False)
        with pytest.raises(InputError, match="without padding"):
            model(ids, attention_mask=mask.index_fill(1, torch.tensor([11]), 0), use_cache=False)
        with pytest.raises(SinkscopeError, match="use_cache=False"):
            model(ids, use_cache=True)
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache, use_cache=True)
    with opened(model), pytest.raises(InputError, match="use_cache=False"):
        model(ids, past_key_values=cache, use_cache=True)


def test_frequencies_that_go_with_the_length_are_refused_past_it() -> None:
    model = tiny_model("phi3")
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0] * 4}
    model.config.rope_parameters |= {"rope_type": "longrope", "original_max_position_embeddings": 16} | factors
    with opened(model):
        plain(model, tiny_tokens(1, 16))
        with pytest.raises(InputError, match="past 16 the rotary frequencies of this phi3"):
            plain(model, tiny_tokens(1, 17))


@pytest.mark.parametrize(
    ("windows", "keep", "message"),
    [
        ((), (1,), "at least one window"),
        ((4, 0), (1,), "at least 1 token"),
        ((4,), (2, -1), "-1 of the first tokens"),
        ((4, 36), (1, 4), r"4 \+ 36 tokens never slides over a text of 40.* window of at most 34"),
    ],
)
def test_wrong_lists_are_refused(windows: tuple, keep: tuple, message: str) -> None:
    model = tiny_model("llama")
    with pytest.raises(InputError, match=message):
        measure_streaming(model, find_family(model), inputs_of(2, 40), windows, keep)


def test_other_lengths_and_impossible_caches_are_refused() -> None:
    model = tiny_model("llama")
    with pytest.raises(InputError, match="one length: these have 20 to 40 tokens"):
        measure_streaming(model, find_family(model), given(ragged_tokens((40, 20))), (4,), (1,))
    broken = tiny_model("llama")
    broken.lm_head.weight.fill_(float("nan"))
    with pytest.raises(SinkscopeError, match="NaN"):
        measure_streaming(broken, find_family(broken), inputs_of(1, 40), (5,), (1,))
    for keep, window in ((-1, 4), (1, 0)):
        with pytest.raises(InputError, match="at least 0 and 1"), opened(model, keep, window):
            pass


# --------------------------------------------------------------------------------------------------- the table


def given(sequences: list[np.ndarray]) -> TokenInputs:
    return TokenInputs("natural", tuple(sequences), "", "")


def inputs_of(sequences: int, length: int) -> TokenInputs:
    return given(ragged_tokens((length,) * sequences))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_table_holds_every_way_of_reading(name: str) -> None:
    model, inputs = smooth(name), inputs_of(3, 40)
    ids = torch.as_tensor(np.stack(inputs.sequences))
    family = find_family(model)
    table, alone = (measure_streaming(model, family, inputs, (7, 3), (2, 0, 1), size)["streaming"] for size in (2, 1))
    pd.testing.assert_frame_equal(table, alone)  # for any batch size
    ways = table[["method", "window", "keep"]].drop_duplicates().itertuples(index=False)
    assert list(ways) == [
        ("dense", -1, 0),
        *[("sinks kept" if keep else "window", window, keep) for window in (3, 7) for keep in (0, 1, 2)],
    ]
    for (_, window, keep), rows in table.groupby(["method", "window", "keep"]):
        logits = plain(model, ids) if window < 0 else streamed(model, ids, keep, window)
        losses = -logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[..., 0].mean(0)  # for tokens 1 … 39
        whole, buckets = rows[rows["bucket"] == -1], rows[rows["bucket"] >= 0]
        assert whole["tokens"].tolist() == [3 * 39]
        assert whole["loss"].tolist() == pytest.approx([float(losses.mean())], rel=1e-6)
        assert buckets["bucket"].tolist() == list(range(1, 40))  # 40 tokens: buckets of one, and none has token 0
        assert buckets["loss"].tolist() == pytest.approx(losses.tolist(), rel=1e-5)
        assert rows["perplexity"].tolist() == pytest.approx(np.exp(rows["loss"]).tolist())
    published = shape_table("streaming", table, "tiny", "natural", {})
    assert list(published.columns[:3]) == ["model", "condition", "layer"]
    assert set(published["layer"]) == {-1}


def test_buckets_of_a_longer_text() -> None:
    model = tiny_model("llama")
    table = measure_streaming(model, find_family(model), inputs_of(2, 100), (16,), (2,))["streaming"]
    for _, rows in table.groupby(["method", "keep"]):
        buckets = rows[rows["bucket"] >= 0]
        assert buckets["bucket"].tolist() == list(range(0, 100, 3))
        assert buckets["tokens"].tolist() == [4, *[6] * 32, 2]
        whole = rows[rows["bucket"] == -1]
        assert np.average(buckets["loss"], weights=buckets["tokens"]) == pytest.approx(whole["loss"].item())
    early = table[(table["bucket"] >= 0) & (table["bucket"] < 15)]
    assert early.groupby("bucket")["loss"].agg(np.ptp).max() < 1e-4  # the window has not slid yet


# -------------------------------------------------------------------------------------------------- the figure


def streaming_table(windows: tuple[int, ...], keep: tuple[int, ...]) -> pd.DataFrame:
    """Return a table in published form, in which the plain window collapses."""
    ways = [("dense", -1, 0), *[("sinks kept" if n else "window", w, n) for w in windows for n in keep]]
    rows = [
        (way, window, n, bucket, 12.0 + window / 10 + n + 4e3 * (way == "window" and bucket != 0))
        for way, window, n in ways
        for bucket in (-1, *range(0, 64, 2))
    ]
    table = pd.DataFrame(rows, columns=["method", "window", "keep", "bucket", "perplexity"])
    return shape_table("streaming", table.assign(layer=-1, tokens=2, loss=0.0), "tiny", "natural", {})


def drawn(table: pd.DataFrame) -> Any:
    figure = draw("streaming-perplexity", Run({"model": {"name": "org/Tiny"}, "condition": "x"}, {"streaming": table}))
    figure.draw_without_rendering()
    return figure


@pytest.mark.filterwarnings("error")
def test_the_figure_draws_what_the_table_says() -> None:
    for perplexity in (0.0, float("nan"), float("inf")):
        drawn(streaming_table((8,), (0,)).assign(perplexity=perplexity))
    by_token, by_kept = drawn(streaming_table((8, 32), (0, 1, 4))).axes
    lines = {line.get_label(): line for line in by_token.lines if not line.get_label().startswith("_")}
    assert list(lines) == ["dense", "last 8", "first 4 and last 8"]
    assert lines["last 8"].get_xdata() == pytest.approx(np.arange(0, 64, 2) + 0.5)
    assert lines["last 8"].get_ydata() == pytest.approx([12.8] + 31 * [4012.8])
    assert lines["first 4 and last 8"].get_ydata() == pytest.approx(32 * [16.8])
    kept = {line.get_label(): line.get_ydata() for line in by_kept.lines}
    assert kept["dense"] == pytest.approx([11.9, 11.9])
    assert kept["last 8"] == pytest.approx([4012.8, 13.8, 16.8])
    assert [tick.get_text() for tick in by_kept.get_xticklabels()] == ["0", "1", "4"]
