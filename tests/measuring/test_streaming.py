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
from support.everything import assert_as_before, state_of
from support.retrofitted import each_pair, retrofitted
from tiny import TINY, ragged_tokens, tiny_model, tiny_tokens
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from sinkscope.attention.seam import open_seam
from sinkscope.attention.streaming import streamed_attention, streaming
from sinkscope.errors import InputError
from sinkscope.measuring.streaming import measure_streaming
from sinkscope.measuring.subject import Subject
from sinkscope.measuring.tables import shape_table
from sinkscope.models.families import find_family
from sinkscope.models.loading import LoadedModel
from sinkscope.retrofits.retrofit import RETROFIT, registers_before
from sinkscope.text.inputs import TokenInputs

CACHES = [(0, 1), (0, 5), (1, 1), (1, 4), (2, 3), (3, 4), (4, 9)]  # keep, window; the tiny models look back 6 tokens
LEARNED = ["gpt2", "opt", "opt-post-norm"]
REFUSED = ["bloom", "mpt", "falcon-alibi", "falcon", "falcon-new", "gptj", "gpt_neo"]
ROTARY = [name for name in TINY if name not in (*LEARNED, *REFUSED)]


def smooth(name: str) -> PreTrainedModel:
    """Return a model in float64 with smaller weights than elsewhere, so that softmax weights are spread over keys."""
    return tiny_model(name, dtype=torch.float64, spread=6.0)


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


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_cannot_stream_is_refused_with_the_reason(name: str) -> None:
    model = tiny_model(name)
    reason = "ALiBi" if name in ("bloom", "mpt", "falcon-alibi") else "attention code of its own"
    with pytest.raises(InputError, match=rf"streaming does not apply to \w+, because .*{reason}"), opened(model):
        pass
    with pytest.raises(InputError, match=reason):
        measure_streaming(subject_of(model, 2, 40), (4,), (1,))


def test_frequencies_that_go_with_the_length_are_refused_past_it() -> None:
    model = tiny_model("phi3")
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0] * 4}
    model.config.rope_parameters |= {"rope_type": "longrope", "original_max_position_embeddings": 16} | factors
    with opened(model):
        plain(model, tiny_tokens(1, 16))
        with pytest.raises(InputError, match="past 16 the rotary frequencies of this phi3"):
            plain(model, tiny_tokens(1, 17))


def subject_of(model: PreTrainedModel, sequences: int, length: int) -> Subject:
    inputs = TokenInputs("natural", tuple(ragged_tokens((length,) * sequences)), "", "")
    return Subject(LoadedModel(model, None, "tiny", "tiny", None, None, ()), find_family(model), inputs)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_table_holds_every_way_of_reading(name: str) -> None:
    model = smooth(name)
    subject = subject_of(model, 3, 40)
    ids = torch.as_tensor(np.stack(subject.inputs.sequences))
    table, alone = (measure_streaming(subject, (7, 3), (2, 0, 1), size)["streaming"] for size in (2, 1))
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


def test_a_bucket_has_the_tokens_from_its_first_one_on_and_a_cache_has_to_slide() -> None:
    model, length = smooth("llama"), 64
    subject = subject_of(model, 2, length)
    ids = torch.as_tensor(np.stack(subject.inputs.sequences))
    tables = measure_streaming(subject, (8,), (), batch_size=2)
    rows = tables["streaming"].query("window < 0 and bucket >= 0").set_index("bucket")
    losses = -plain(model, ids).log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[..., 0].double()
    assert list(rows.index) == list(range(0, length, 2))
    assert rows["tokens"].tolist() == [2] + [4] * 31  # token 0 is not predicted
    expected = [losses[:, max(0, start - 1) : start + 1].mean() for start in rows.index]  # losses are of tokens 1 …
    assert rows["loss"].tolist() == pytest.approx([float(loss) for loss in expected], rel=1e-5)
    by_sequence = tables["streaming_by_sequence"].query("window < 0")["loss"]
    assert by_sequence.tolist() == pytest.approx(losses.mean(1).tolist(), rel=1e-5)
    assert len(measure_streaming(subject_of(model, 1, 12), (8,), (2,))["streaming"])
    with pytest.raises(InputError, match=r"a cache of 2 \+ 9 tokens never slides over a text of 12.* at most 8 or"):
        measure_streaming(subject_of(model, 1, 12), (9,), (2,))
