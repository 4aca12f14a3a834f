"""Architectures by name, followed by fields of their configuration."""

import pytest

from sinkscope.errors import InputError
from sinkscope.models.loading import count_parameters
from sinkscope.options.option import checked
from sinkscope.options.training import TrainOptions
from sinkscope.training.architectures import architecture


def test_llama_60m_has_its_number_of_parameters() -> None:
    config = architecture("llama-60m")
    assert count_parameters(config) - 2 * 768 * config.vocab_size == pytest.approx(60e6, rel=0.02)


def test_fields_behind_the_name_take_the_place_of_its_own() -> None:
    config = architecture("llama-1m:position_scheme=alibi,num_attention_heads=4,tie_word_embeddings=true")
    assert (config.position_scheme, config.num_attention_heads, config.tie_word_embeddings) == ("alibi", 4, True)
    assert (config.num_key_value_heads, config.head_dim, config.hidden_size) == (4, 64, 256)
    assert architecture("tiny-llama:num_attention_heads=8").num_key_value_heads == 8
    folders = {str(checked(TrainOptions, {"config": f"llama-1m:rms_norm_eps={eps}"}).folder()) for eps in (0.5, 0.25)}
    assert len(folders) == 2
    assert all(folder.startswith("runs/llama-1m-rms_norm_eps=0.") for folder in folders)


def test_wrong_fields_are_refused() -> None:
    for text, message in (
        ("llama-1m:position_shceme=alibi", "field 'position_shceme' is unknown; did you mean 'position_scheme'"),
        ("llama-1m:position_scheme", "write fields as key=value"),
        ("llama-1m:position_scheme=albi", "position_scheme 'albi' is unknown; did you mean 'alibi'"),
        ("llama-1m:num_attention_heads=7", "not a multiple"),
        ("llama-2m:num_hidden_layers=2", "'llama-2m:num_hidden_layers=2' is unknown"),
    ):
        with pytest.raises(InputError, match=message):
            architecture(text)
