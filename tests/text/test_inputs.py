"""Inputs: the cutting of text, the token at position 0, and the refusal of every wrong input with a reason."""

import json
import os
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset, DatasetDict
from support.retrofit_command import tokenizer_of
from tiny import tiny_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from sinkscope.errors import InputError
from sinkscope.measuring.subject import inputs_for, position_limit
from sinkscope.models.loading import LoadedModel
from sinkscope.options.measuring import make_config
from sinkscope.options.option import MAX_INT
from sinkscope.text.batch import IGNORED
from sinkscope.text.inputs import TokenInputs, build_inputs
from sinkscope.text.sources import DOCUMENTS, documents
from sinkscope.text.sources import TEXTS as SHIPPED
from sinkscope.text.tokens import first_tokens, special_token_ids

WORDS = ["<unk>", "<s>", "</s>", "<pad>", "x", *(f"w{at}" for at in range(35))]
VOCAB = 48  # the model's: larger than the tokenizer's 40, because vocabularies may be padded
UNK, BOS, EOS, PAD = range(4)


def word_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return tokenizer_of(WORDS, template, **names)


CHAT = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]
PLAIN = word_tokenizer()  # has a BOS but, like GPT-2's, does not add it
LLAMA = word_tokenizer("<s> $A")  # adds a BOS


@pytest.fixture(scope="module")
def byte_level():
    """Return a tokenizer with one token per byte, so that a character of two bytes is two tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: at for at, letter in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def words(count: int, start: int = 0) -> str:
    return " ".join(f"w{at % 35}" for at in range(start, start + count))


def ids_of(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


def lists(inputs: TokenInputs) -> list[list[int]]:
    return [ids.tolist() for ids in inputs.sequences]


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def write_lines(path: Path, *records: object) -> Path:
    return write(path, "".join(json.dumps(record) + "\n" for record in records))


def made(source: str | Path = "natural", **options) -> TokenInputs:
    """Return two sequences of eight tokens, unless the options change that."""
    return build_inputs(source, **{"vocab_size": VOCAB, "tokenizer": PLAIN, "num_seqs": 2, "seq_len": 8, **options})


def refused(match: str, source: str | Path = "natural", **options) -> None:
    with pytest.raises(InputError, match=match) as caught:
        made(source, **options)
    assert len(str(caught.value).splitlines()) <= 2


def test_texts_are_cut_into_windows(byte_level, tmp_path):
    inputs = made(tokenizer=byte_level, vocab_size=256, num_seqs=100, seq_len=64)
    assert (inputs.condition, inputs.token_zero, inputs.notices) == ("natural", "first text token", ())
    assert all(len(ids) == 64 and ids.dtype == np.int64 for ids in inputs.sequences)
    corpus = files("sinkscope.text").joinpath("corpus.txt").read_text(encoding="utf-8")
    assert byte_level.decode(np.concatenate(inputs.sequences)) == corpus[:6400]
    assert inputs.per_passage == 512 // 64
    assert made(num_seqs=1, seq_len=400, tokenizer=byte_level, vocab_size=256).per_passage == 1
    inputs = made(tokenizer=byte_level, vocab_size=256, num_seqs=5, seq_len=100_000)
    assert inputs.notices == ("--input natural holds 3 sequences of 100000 tokens; 5 were requested",)
    path = write(tmp_path / "notes.txt", b"\xef\xbb\xbf" + words(25).encode())  # with a byte order mark
    inputs = made(path, num_seqs=100)
    assert lists(inputs) == [ids_of(words(8, start)) for start in (0, 8, 16)]
    assert inputs.condition == "notes"
    # only the beginning of a long text is tokenized; long words make the first guess of its length too short
    path = write(tmp_path / "long.txt", " ".join("w1" if at % 2 else "y" * 100 for at in range(5000)))
    inputs = made(path, num_seqs=30, seq_len=10)
    assert np.concatenate(inputs.sequences).tolist() == [UNK, WORDS.index("w1")] * 150


def test_each_sequence_is_from_another_document(byte_level, tmp_path) -> None:
    """The names are of one author each; the authors have all paragraphs of the shipped text, and each its own."""
    names = [
        "Walden",
        "Queequeg",
        "Territories",
        "Alice",
        "Crystal",
        "Darcy",
        "Polly",
        "Navy",
        "interstate",
        "recession",
    ]
    names += ["Barrundia", "Kentucky"]
    named = {"tokenizer": byte_level, "vocab_size": 256, "by_document": True}
    inputs = made(num_seqs=100, seq_len=5000, **named)
    authors = DOCUMENTS["natural"]()
    assert [byte_level.decode(ids) for ids in inputs.sequences] == [author[:5000] for author in authors]
    assert (inputs.documents, len(authors), inputs.condition) == (12, 12, "natural")
    whole = SHIPPED["natural"]().strip().split("\n\n")
    assert sorted("\n\n".join(authors).split("\n\n")) == sorted(whole)
    assert [[name for name in names if name in author] for author in authors] == [[name] for name in names]
    assert made("code", num_seqs=9, seq_len=64, **named).documents == 4
    assert made(num_seqs=9, tokenizer=byte_level, vocab_size=256).documents == 1
    path = write(tmp_path / "notes.txt", words(25).encode())
    assert made(path, num_seqs=100, by_document=True).documents == 1


def test_a_word_that_is_cut_with_the_beginning_of_a_text_is_no_token() -> None:
    """The tenth word would end after the first characters that are tokenized."""
    tokenizer = tokenizer_of(["<unk>", "y" * 59], None, unk_token="<unk>")
    for count in (10, 11):
        assert first_tokens(tokenizer, " ".join(["y" * 59] * 40), count) == [1] * count


def test_texts_that_cannot_be_used(dataset_folder, tmp_path):
    refused(r"natural text needs a tokenizer.*\.npy.*random or repeated", tokenizer=None)
    for path in (write(tmp_path / "a.txt", words(20)), write_lines(tmp_path / "a.jsonl", {"text": "w1 w2"})):
        refused("needs a tokenizer", path, tokenizer=None)
    refused("--dataset .*stories needs a tokenizer", dataset=dataset_folder, tokenizer=None)
    refused("--prompt needs a tokenizer", prompt="w1 w2", tokenizer=None)
    path = write(tmp_path / "a.txt", words(20, start=20))
    refused("tokenizer.*id 30 at position 5 is outside the model's vocabulary of 30", path, vocab_size=30)
    tokenizer = word_tokenizer()
    tokenizer.model_max_length = "x"
    refused("tokenizer fails on text: repair its files", path, tokenizer=tokenizer)


def sampler(first, count, length, seed):
    return np.tile(np.r_[first, np.arange(5, 5 + length - 1)], (count, 1))


@pytest.mark.parametrize(
    ("template", "bos", "prefix", "token_zero"),
    [
        (None, "auto", [], "first text token"),
        (None, "always", [BOS], "bos <s> (id 1)"),
        ("<s> $A", "auto", [BOS], "bos <s> (id 1)"),
        ("<s> $A", "never", [], "first text token"),
        ("$A </s>", "auto", [], "first text token"),  # a trailing EOS is dropped
        ("<pad> <s> $A", "auto", [PAD, BOS], "special token <pad> (id 3)"),
    ],
)
def test_bos_policy(template, bos, prefix, token_zero, tmp_path):
    """The policy is the same for texts, documents and drawn tokens: two runs differ only in their input."""
    options = {"tokenizer": word_tokenizer(template), "bos": bos}
    step = 8 - len(prefix)
    text = made(write(tmp_path / "a.txt", words(30)), **options)
    assert lists(text) == [prefix + ids_of(words(step, start)) for start in (0, step)]
    path = write_lines(tmp_path / "a.jsonl", {"text": words(30)}, {"text": words(2)})
    heads = made(path, **options)
    assert lists(heads) == [prefix + ids_of(words(step)), prefix + ids_of(words(2))]
    assert text.token_zero == heads.token_zero == token_zero
    for source in ("random", "repeated"):
        drawn = made(source, **options)
        assert all(ids[: len(prefix)] == prefix and len(ids) == 8 for ids in lists(drawn))
        assert not {BOS, PAD} & {token for ids in lists(drawn) for token in ids[len(prefix) :]}
        assert drawn.token_zero == (token_zero if prefix else f"{source} token")
        assert drawn.repeats_one_token == (source == "repeated" and not prefix)
        assert bool(drawn.notices) == (source == "repeated" and bool(prefix) and bos == "auto")
    sampled = made("sampled", bos_token_id=BOS, sampler=sampler, **options)
    assert all((ids[0] == BOS) == bool(prefix) and len(ids) == 8 for ids in lists(sampled))


def test_bos_of_other_tokenizers(byte_level, tmp_path):
    """One names no BOS, but the model's config does; another does not know our probe."""
    options = {"tokenizer": byte_level, "vocab_size": 256, "num_seqs": 1, "seq_len": 4, "bos": "always"}
    for bos in (7, 0):  # 0 is an id, as in Pythia's config
        inputs = made(**options, bos_token_id=bos)
        assert inputs.sequences[0][0] == bos
        assert inputs.token_zero.startswith("bos ")
    refused("--bos always: neither", **options)
    refused("before every sequence: token id 999", **options, bos_token_id=999)
    refused("2 tokens are in front", tokenizer=word_tokenizer("<pad> <s> $A"), seq_len=2)
    inputs = made("random", tokenizer=None, bos="always", bos_token_id=2)
    assert (inputs.token_zero, {ids[0] for ids in lists(inputs)}) == ("bos (id 2)", {2})
    assert made("random", tokenizer=None, bos_token_id=2).token_zero == "random token"
    for bos in ("auto", "never"):  # the beginning of texts is unknown: generated text stays as it is
        inputs = made("sampled", tokenizer=None, bos_token_id=BOS, bos=bos, sampler=sampler)
        assert {ids[0] == BOS for ids in lists(inputs)} == {bos == "auto"}
    core = Tokenizer(models.BPE({"<s>": 0, "A": 1, "C": 2, "G": 3, "T": 4}, []))
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>")
    path = write(tmp_path / "genome.txt", "ACGT" * 4)
    assert lists(made(path, tokenizer=tokenizer, vocab_size=5, num_seqs=1, seq_len=5)) == [[0, 1, 2, 3, 4]]


def test_drawn_tokens_are_uniform_over_ordinary_tokens():
    """χ² of 25 600 draws over 36 tokens; special tokens and ids that no text can give are never drawn."""
    inputs = made("random", num_seqs=400, seq_len=64)
    counts = np.bincount(np.concatenate(inputs.sequences), minlength=VOCAB)
    assert counts[:4].sum() == counts[len(WORDS) :].sum() == 0
    ordinary = counts[4 : len(WORDS)]
    chi_square = ((ordinary - ordinary.mean()) ** 2 / ordinary.mean()).sum()
    assert chi_square < 75  # 35 degrees of freedom: exceeded by chance once in 10 000
    inputs = made("repeated", num_seqs=50, seq_len=16)
    assert all(len(ids) == 16 and len(set(ids.tolist())) == 1 for ids in inputs.sequences)
    drawn = {int(ids[0]) for ids in inputs.sequences}
    assert len(drawn) > 15
    assert drawn.isdisjoint({UNK, BOS, EOS, PAD})
    inputs = made("random", tokenizer=None, vocab_size=6, bos_token_id=2, special_ids=[3, None, 0], num_seqs=20)
    assert set(np.concatenate(inputs.sequences).tolist()) == {1, 4, 5}
    refused("all 3 tokens of the vocabulary are special", "random", vocab_size=3, special_ids=range(3), tokenizer=None)
    for source in ("random", "repeated"):
        first, again, reseeded = (made(source, num_seqs=20, seed=seed) for seed in (1, 1, 2))
        assert lists(first) == lists(again) != lists(reseeded)
    tokenizer = word_tokenizer()
    tokenizer.add_tokens([AddedToken("<image>", special=True), AddedToken("ordinary")])
    assert special_token_ids(tokenizer) == {UNK, BOS, EOS, PAD, len(WORDS)}  # also one that only the added tokens name


def test_documents_may_be_short_and_keep_their_order(tmp_path):
    path = write_lines(tmp_path / "docs.jsonl", *({"text": words(count, 9)} for count in (3, 1, 20, 5)))
    write(path, path.read_text() + "\n\n")  # blank lines are not records
    inputs = made(path, num_seqs=10)
    assert (inputs.condition, inputs.token_zero) == ("docs", "first text token")
    assert lists(inputs) == [ids_of(words(count, 9)) for count in (3, 8, 5)]
    left_out, cut, padded, short = inputs.notices
    assert "1 document cut to 8 tokens" in cut
    assert "1 document of fewer than 2 tokens left out" in left_out
    assert "3 to 8 tokens" in padded
    assert "holds 3 sequences of at most 8 tokens; 10 were requested" in short


def test_given_ids_are_taken_as_they_are(tmp_path):
    """No BOS is put before them, even if the tokenizer adds one; a record's ids take precedence over its text."""
    records = [{"input_ids": [5, 6, 7], "text": "w1"}, {"input_ids": list(range(5, 25))}, {"input_ids": [9, 9]}]
    path = write_lines(tmp_path / "ids.json", *records)
    inputs = made(path, tokenizer=LLAMA)
    assert lists(inputs) == [[5, 6, 7], list(range(5, 13))]
    assert inputs.token_zero == "token w0 (id 5)"
    assert any("1 document cut to 8 tokens" in notice for notice in inputs.notices)
    assert made(path, tokenizer=None, num_seqs=3).token_zero == "varies"
    path = write_lines(tmp_path / "bos.jsonl", {"input_ids": [2, 5]}, {"input_ids": [2, 6]})
    assert made(path, tokenizer=None, bos_token_id=2).token_zero == "bos (id 2)"
    path = write_lines(tmp_path / "mixed.jsonl", {"text": "w0 w1"}, {"input_ids": [1, 8, 9]})
    inputs = made(path, tokenizer=LLAMA)
    assert lists(inputs) == [[1, 5, 6], [1, 8, 9]]
    assert inputs.token_zero == "bos <s> (id 1)"
    refused("--bos always does not apply", path, bos="always")
    assert lists(made(path, bos="never")) == [[5, 6], [1, 8, 9]]


def save_array(path: Path, array: np.ndarray) -> Path:
    np.save(path, array)
    return path


def test_arrays_of_ids(tmp_path):
    for dtype in ("uint16", "uint64", ">i4"):
        array = np.arange(4, 34).reshape(3, 10).astype(dtype)
        inputs = made(save_array(tmp_path / "ids.npy", array), tokenizer=LLAMA)
        assert lists(inputs) == array[:2, :8].tolist()
        assert all(ids.dtype == np.int64 for ids in inputs.sequences)
        assert (inputs.condition, inputs.token_zero) == ("ids", "varies")
        assert inputs.notices == ("ids.npy: its sequences of 10 ids are cut to 8",)
    path = save_array(tmp_path / "random.npy", np.arange(8))  # one sequence
    inputs = made(path, num_seqs=1)
    assert lists(inputs) == [list(range(8))]
    assert (inputs.condition, inputs.notices) == ("random.npy", ())  # distinct from the input kind
    assert any("one dimension" in notice for notice in made(path).notices)
    refused("random.npy gives token ids.*--bos always does not apply", path, bos="always")


UNUSABLE = (
    ("bad.txt", b" \n\n ", "is empty"),
    ("bad.txt", words(20).encode("utf-16"), "is not UTF-8 .*save it as UTF-8"),
    ("bad.txt", b"w1 caf\xe9 w2", "is not UTF-8 .byte 0xe9 at 6"),
    ("bad.txt", words(7), "has 7 tokens, fewer than one sequence of 8"),
    ("bad.jsonl", '{"text": "w1"}\n', "no document of at least 2 tokens"),
    ("bad.jsonl", b'{"text": "w1 w2"}\n{"text": "caf\xe9"}\n', "bad.jsonl, line 2 is not UTF-8"),
    ("bad.jsonl", '{"text": "w1 w2"}\n{"text": \n', "line 2 is not JSON .*one JSON object a line"),
    ("bad.jsonl", "[" * 100_000, "line 1 is not JSON"),
    ("bad.jsonl", '[{"text": "w1 w2"}]', "line 1 is not a JSON object: give one JSON object a line"),
    ("bad.jsonl", '{"body": "w1 w2", "n": 1}', "needs `text`, `messages` or `input_ids`; this one has body, n"),
    ("bad.jsonl", '{"text": "w1 \\ud800 w2"}', r"`text` cannot be used: it should be text without \\ud800"),
    ("bad.jsonl", '{"input_ids": 5}', "`input_ids` cannot be used: it should be a valid list, not 5"),
    ("bad.jsonl", '{"input_ids": [5, 6.0]}', "`input_ids.1` cannot be used: it should be a valid integer, not 6.0"),
    ("bad.jsonl", '{"input_ids": [5, 48]}', r"bad.jsonl, line 1: token id 48 .* of 48 \(0 … 47\)"),
    ("bad.jsonl", '{"messages": "hello"}', "line 1: `messages` cannot be used: it should be a valid list, not 'hello'"),
    ("bad.jsonl", json.dumps({"messages": CHAT[:1]}), "chat template does not render it"),  # there is none
    ("bad.jsonl", json.dumps({"messages": [{"role": "user", "content": 3}]}), "`messages.0.content` cannot be used: "),
    ("ids.npy", np.zeros((2, 5), int), "sequences of 5 ids, fewer than --seq-len 8: give --seq-len 5"),
    ("ids.npy", np.zeros((2, 8)), "holds float64, not integers"),
    ("ids.npy", np.zeros((2, 2, 8), int), r"has shape \(2, 2, 8\)"),
    ("ids.npy", np.array([[5] * 8, [5] * 7 + [48]]), "row 1: token id 48 at position 7 is outside .* of 48"),
    ("ids.npy", np.array([[2**63 + 5] * 8], dtype="uint64"), "token id 9223372036854775813 at position 0"),
)


@pytest.mark.parametrize(("name", "content", "match"), UNUSABLE)
def test_files_that_cannot_be_used(name, content, match, tmp_path):
    path = tmp_path / name
    refused(match, save_array(path, content) if isinstance(content, np.ndarray) else write(path, content))


@pytest.fixture(scope="module")
def dataset_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stories") / "stories"
    folder.mkdir()
    texts = [words(4), words(12), None, words(30, 5), words(9, 7)]
    write_lines(folder / "train.jsonl", *({"id": at, "text": text} for at, text in enumerate(texts)))
    write_lines(folder / "test.jsonl", *({"id": at, "text": words(20, at)} for at in range(3)))
    return str(folder)


def test_dataset_gives_the_heads_of_its_long_documents(dataset_folder, monkeypatch):
    inputs = made(dataset=dataset_folder, num_seqs=3)
    assert (inputs.condition, inputs.notices) == ("stories", ())
    assert lists(inputs) == [ids_of(words(8)), ids_of(words(8, 5)), ids_of(words(8, 7))]
    inputs = made(dataset=dataset_folder, tokenizer=LLAMA, num_seqs=5)
    assert lists(inputs)[0] == [BOS, *ids_of(words(7))]
    assert inputs.token_zero == "bos <s> (id 1)"
    assert "holds 3 sequences of 8 tokens; 5 were requested" in inputs.notices[-1]
    for spec in (f"{dataset_folder}::test", f"{dataset_folder}:default:test"):
        assert lists(made(dataset=spec, num_seqs=3)) == [ids_of(words(8, start)) for start in range(3)]
    refused("none of its first 4 documents has 100 tokens", dataset=dataset_folder, seq_len=100)
    monkeypatch.setattr("sinkscope.text.sources.DOCUMENTS_PER_SEQUENCE", 1)
    inputs = made(dataset=dataset_folder)
    assert len(inputs) == 1
    assert "only its first 2 documents were read" in inputs.notices[0]


def test_datasets_that_cannot_be_used(dataset_folder, monkeypatch):
    import datasets

    with monkeypatch.context() as without:
        without.setitem(sys.modules, "datasets", None)
        refused(r"--dataset some/where needs the package datasets: .*sinkscope\[datasets\]", dataset="some/where")

    refused("cannot be read: .*no_such", dataset=f"{dataset_folder}:no_such")
    refused("NAME:CONFIG:SPLIT", dataset="a:b:c:d")
    refused("give one of the two", "random", dataset="some/where")

    for records, match in (
        ([{"a": "w1", "b": "w2"}], "no column `text`, .* and 2 columns of strings"),
        ([{"a": None, "url": "w1"}, {"a": "w2 w3", "url": "w1"}], "2 columns of strings, among a, url"),
        ([{"text": ["w1 w2"], "url": "w1"}], "row 0: `text` cannot be used: it should be a valid string"),
        ([{"text": "w1 \ud800"}], r"--dataset some/where, row 0: `text` cannot be used: .* \\ud800"),
    ):
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, records=records, **__: iter(records))
        refused(match, dataset="some/where")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: iter([{"story": words(9), "n": 1}] * 2))
    assert len(made(dataset="some/where")) == 2
    missing = datasets.exceptions.DatasetNotFoundError
    for error, match in (
        (ConnectionError("Couldn't reach 'some/where' on the Hub\n(no network)"), "without a network"),
        (missing("Dataset 'some/where' doesn't exist on the Hub"), "if it is private"),
    ):

        def load(*_, error=error, **__):
            raise error

        monkeypatch.setattr(datasets, "load_dataset", load)
        refused(f"--dataset some/where cannot be read: .*{match}", dataset="some/where")


def test_documents_to_train_on_come_from_the_same_readers(dataset_folder, tmp_path):
    name, texts = documents(str(write(tmp_path / "notes.txt", b"\xef\xbb\xbfw1\r\nw2\n")))
    assert (name, list(texts)) == ("notes", ["w1\r\nw2\n"])
    path = write_lines(tmp_path / "docs.jsonl", {"text": "w1"}, {"text": "w2 w3", "input_ids": [5]})
    assert list(documents(str(path))[1]) == ["w1", "w2 w3"]
    name, texts = documents("natural", f"{dataset_folder}::test")
    assert (name, list(texts)) == ("stories", [words(20, at) for at in range(3)])
    for record, match in (
        ({"input_ids": [5, 6]}, "bad.jsonl, line 1: a record needs `text` to train on"),
        ({"messages": [{"role": "user", "content": "w1"}]}, "has only `messages`"),
    ):
        with pytest.raises(InputError, match=match):
            list(documents(str(write_lines(tmp_path / "bad.jsonl", record)))[1])
    with pytest.raises(InputError, match=r"--text a\.txt and --dataset some/where: give one of the two"):
        documents("a.txt", "some/where")


def test_sources_and_lengths_that_do_not_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "shakespeare.txt", words(20))
    write(tmp_path / "tokens.bin", b"123")
    os.mkfifo("pipe.txt")
    refused("did you mean random", "ramdom")
    refused(r"neither an input.*; a text of your own is --prompt TEXT, or in Python a list", "wholly-other")
    refused("no such file; did you mean shakespeare.txt", "shakspeare.txt")
    refused("is a folder", tmp_path)
    refused("must end in one of", "tokens.bin")
    refused("pipe.txt is a pipe", "pipe.txt")
    refused("characters that no path has", "x\ud800.txt")
    refused("--seq-len 257 is beyond the model's 256 positions", "random", seq_len=257, max_positions=256)
    assert made("random", seq_len=256, max_positions=256).longest == 256
    refused("beginning-of-sequence token: token id 99", "sampled", tokenizer=None, bos_token_id=99, sampler=print)


def test_batches(tmp_path):
    inputs = made("random", num_seqs=5, seq_len=7)
    before = lists(inputs)
    batches = [batch.token_ids for batch in inputs.batches(2) if batch.attention_mask.all()]
    assert [ids.tolist() for ids in batches] == [before[:2], before[2:4], before[4:]]
    for ids in batches:
        ids.zero_()
    assert lists(inputs) == before
    rows = ({"input_ids": row} for row in ([5, 6], [7, 8, 9, 10], [11, 12, 13]))
    inputs = made(write_lines(tmp_path / "rows.jsonl", *rows), num_seqs=3)
    batch = next(inputs.batches(2))
    assert batch.token_ids.tolist() == [[5, 6, 0, 0], [7, 8, 9, 10]]
    assert batch.attention_mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    batch = next(inputs.batches(3, padding_side="left"))
    assert batch.token_ids.tolist() == [[0, 0, 5, 6], [7, 8, 9, 10], [0, 11, 12, 13]]
    assert batch.attention_mask.tolist() == [[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]]


def test_the_hash_depends_on_ids_lengths_and_order(tmp_path):
    def digest(*rows):
        return made(write_lines(tmp_path / "rows.jsonl", *({"input_ids": ids} for ids in rows))).sha256

    first, second = [5, 6, 7, 8], [9, 10]
    several = ((first, second), ([5, 6, 7, 9], second), ([5, 6], [7, 8, 9, 10]), (second, first), (first,))
    assert len({digest(*rows) for rows in several}) == 5
    assert digest(first, second) == digest(first, second)


def test_a_prompt_is_one_sequence():
    inputs = made(prompt=words(9), tokenizer=LLAMA, seq_len=4)
    assert lists(inputs) == [[BOS, *ids_of(words(3))]]
    assert (inputs.condition, inputs.token_zero) == ("prompt", "bos <s> (id 1)")
    assert inputs.notices == ("--prompt: the first 4 of its 10 tokens; --seq-len 10 reads all",)
    assert made(prompt=words(3), tokenizer=LLAMA, seq_len=4).notices == ()
    refused("--prompt.*1 token;", prompt="w1")


def test_a_chat_is_what_transformers_makes_of_it(tmp_path):
    """Several chats have special tokens, characters beyond ASCII and a function of the template's environment."""
    tokenizer = word_tokenizer("<s> $A")
    repeated = "{% for m in messages %}{{ m['content'] | trim }} w4 {% endfor %}"
    tokenizer.chat_template = "{{ bos_token }} " + repeated + "{{ eos_token }}"
    chats = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": " w2 "}] for text in ("w1", "é\u2028w3")
    ]
    path = write_lines(tmp_path / "x.jsonl", *({"messages": chat} for chat in chats))
    inputs = made(path, tokenizer=tokenizer)
    assert lists(inputs) == [tokenizer.apply_chat_template(chat, return_dict=False) for chat in chats]
    assert inputs.token_zero == "bos <s> (id 1)"
    assert lists(inputs)[0] == ids_of("<s> w1 w4 w2 w4 </s>")  # no further BOS, because the template has it
    assert lists(made(path, tokenizer=tokenizer, num_seqs=1, seq_len=3)) == [ids_of("<s> w1 w4")]


TEXTS = ["w1 w2 w3 w4", "w5 w6 w7"]
CHATS = "{% for message in messages %}<s> {{ message['content'] }} {% endfor %}"
IDS = [[5, 6, 7, 8], [9, 10, 11]]
PADDED = {"input_ids": torch.tensor([[5, 6, 7, 8], [9, 10, 11, PAD]]), "attention_mask": [[1] * 4, [1, 1, 1, 0]]}
# objects → what they are, and their token ids after LLAMA's BOS
OBJECTS: dict[str, tuple[Any, str, list[list[int]]]] = {
    "prompts": (TEXTS, "prompts", [[BOS, *ids_of(text)] for text in TEXTS]),
    "a generator": ((text for text in TEXTS), "prompts", [[BOS, *ids_of(text)] for text in TEXTS]),
    "records": ([{"text": TEXTS[0]}], "prompts", [[BOS, *ids_of(TEXTS[0])]]),
    "a chat": (CHAT, "chats", [[BOS, *ids_of("w1 w2"), BOS, *ids_of("w3")]]),
    "chats": ([CHAT[:1], CHAT[1:]], "chats", [[BOS, *ids_of("w1 w2")], [BOS, *ids_of("w3")]]),
    "ids": (IDS[0], "token-ids", IDS[:1]),
    "ragged ids": (IDS, "token-ids", IDS),
    "tensors": ([torch.tensor(ids) for ids in IDS], "token-ids", IDS),
    "an array": (np.array([IDS[0], IDS[0]]), "token-ids", [IDS[0], IDS[0]]),
    "a tokenizer's output": (PADDED, "token-ids", IDS),
    "a dataset of ids": (Dataset.from_dict({"input_ids": IDS}).with_format("torch"), "dataset", IDS),
    "a torch dataset": (torch.utils.data.Subset(IDS, [1, 0]), "dataset", IDS[::-1]),
    "a column": (Dataset.from_dict({"story": TEXTS})["story"], "prompts", [[BOS, *ids_of(text)] for text in TEXTS]),
    "a streamed column of ids": (Dataset.from_dict({"a": IDS}).to_iterable_dataset()["a"], "dataset", IDS),
    "a dataset of chats": (Dataset.from_dict({"messages": [CHAT], "n": [1]}), "dataset", [[BOS, 6, 7, BOS, 8]]),
}


@pytest.mark.parametrize("what", OBJECTS)
def test_objects_are_read_to_their_end_as_lines_of_json_are(what: str) -> None:
    read, kind, expected = OBJECTS[what]
    tokenizer = word_tokenizer("<s> $A")
    tokenizer.chat_template = CHATS
    config = make_config(input=read)
    assert json.loads(config.model_dump_json())["input"] == str(config.input) == kind
    assert kind == "dataset" or (config.num_seqs, config.seq_len) == (len(expected), MAX_INT)
    asked = {"num_seqs": config.num_seqs, "seq_len": 64}
    inputs = build_inputs(config.input, vocab_size=VOCAB, tokenizer=tokenizer, **asked)
    assert (inputs.condition, lists(inputs)) == (kind, expected)


def given(thing: Any, **options: Any) -> TokenInputs:
    """Return the sequences of an object, as `analyze(input=thing)` reads it."""
    config = make_config(input=thing)
    usual = {"vocab_size": VOCAB, "tokenizer": LLAMA, "num_seqs": config.num_seqs}
    return build_inputs(config.input, **usual | options)


def test_a_dataset_of_texts_is_read_as_by_name_and_wrong_objects_are_refused(tmp_path) -> None:
    columns = {"story": [words(9), "w1", words(12, 3)], "n": [1, 2, 3]}
    for table in (Dataset.from_dict(columns), pd.DataFrame(columns)):
        inputs = given(table, num_seqs=5, seq_len=6)
        assert lists(inputs) == [[BOS, *ids_of(words(5))], [BOS, *ids_of(words(5, 3))]]  # shorter texts are left out
        assert inputs.condition == "dataset"
    dataset = Dataset.from_dict(columns)
    for thing, message in (
        (3, "a int is neither texts, token ids, chats nor a dataset"),
        (b"w1 w2", "a bytes is neither texts"),
        (bytearray(b"w1"), "a bytearray is neither"),
        ({"w1 w2", "w3 w4"}, "a set is neither"),
        ({"a": "w1 w2"}.values(), "a dict_values is neither"),
        (write(tmp_path / "a.txt", words(20)).open(encoding="utf-8"), "a TextIOWrapper is neither"),
        ([], "it is empty"),
        (pd.DataFrame({"text": []}), "it is empty"),
        (["w1 w2", 3], r"input.1.: a int is neither a text, token ids, a chat nor a record"),
        ([b"w1 w2"], r"input.0.: a bytes is neither a text"),
        (pd.Series(["w1 w2", None]), r"input.1.: a (NoneType|float) is neither a text"),
        ({"train": dataset}, "input.0.: a record needs `text`, `messages` or `input_ids`; this one has train"),
        (DatasetDict(train=dataset, test=dataset), "it has the splits train, test: give one of them"),
        (pd.DataFrame({"a": ["w1"], "b": ["w2"]}), "2 columns of strings, among a, b"),
        (pd.DataFrame({"text": [b"w1"]}), "input, row 0: `text` cannot be used"),
        ([[1.5, 2.5]], "`input_ids.0` cannot be used: it should be a valid integer"),
        ([["w1", "w2"]], "`input_ids.0` cannot be used: it should be a valid integer"),
        ({"input_ids": IDS, "attention_mask": [[1, 1, 1]]}, "`attention_mask` is not one row for each of the 2 rows"),
        (["w1 w2", ""], "input: 1 document of fewer than 2 tokens, which attention needs"),
    ):
        with pytest.raises(InputError, match=message):
            given(thing, tokenizer=PLAIN)


# the entries of a record → its sequences, or what is wrong
LAYOUTS: tuple[tuple[dict[str, Any], Any], ...] = (
    ({"attention_mask": [0, 1, 1, 1, 0]}, [[6, 7, 8]]),
    ({"attention_mask": [1, 1, 1, 2, 2]}, [[5, 6, 7], [8, 9]]),
    ({"position_ids": [0, 1, 2, 0, 1]}, [[5, 6, 7], [8, 9]]),
    ({"position_ids": [1, 0, 1, 0, 1], "attention_mask": [0, 1, 1, 1, 1]}, [[6, 7], [8, 9]]),
    ({"seq_lengths": [3, 2]}, [[5, 6, 7], [8, 9]]),
    ({"seq_lengths": [2, 2], "attention_mask": [0, 1, 1, 1, 1]}, [[6, 7], [8, 9]]),
    ({"seq_lengths": [3, 2], "attention_mask": [0, 1, 1, 1, 1]}, [[6, 7], [8, 9]]),  # the first has the padding
    ({"position_ids": None, "messages": None, "text": "w1"}, [[5, 6, 7, 8, 9]]),
    ({"attention_mask": [1, 1]}, "`attention_mask` has 2 numbers for 5 `input_ids`"),
    ({"attention_mask": [1, 1, 0, 1, 1]}, "`attention_mask` hides tokens between others"),
    ({"attention_mask": [[1] * 5] * 5}, "`attention_mask.0` cannot be used"),
    ({"position_ids": [0, 1, 2, 7, 8]}, "`position_ids` go on with 7 at token 3"),
    ({"position_ids": [4, 5, 6, 7, 8]}, "`position_ids` go on with 4 at token 0"),
    ({"seq_lengths": [3, 3]}, "`seq_lengths` do not add up to its 5 `input_ids`"),
    ({"seq_idx": [0, 0, 0, 1, 1]}, "`seq_idx` says where sequences begin: give `position_ids` or `seq_lengths`"),
    ({"seq_idx": [0, 0, 0, 1, 1], "seq_lengths": [3, 2]}, [[5, 6, 7], [8, 9]]),
)


class Streamed(torch.utils.data.IterableDataset):
    """A dataset with a length, which cannot be indexed all the same."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


@pytest.mark.parametrize("number", range(len(LAYOUTS)))
def test_a_record_is_read_in_one_way_wherever_it_comes_from(number: int, tmp_path: Path) -> None:
    """In a line of JSON, an object, a dataset, a DataFrame and a batch."""
    more, expected = LAYOUTS[number]
    record = {"input_ids": [5, 6, 7, 8, 9], **more}
    path = write_lines(tmp_path / "rows.jsonl", record)
    rows = {name: [value] for name, value in record.items()}
    arrays = {name: np.array([value]) for name, value in record.items() if isinstance(value, list)}
    ways: list[Callable[[], TokenInputs]] = [
        lambda: made(path),
        lambda: given([record]),
        lambda: given(Dataset.from_dict(rows)),
        lambda: given(pd.DataFrame(rows)),
        lambda: given(arrays),
        lambda: given(torch.utils.data.DataLoader([arrays], collate_fn=lambda batch: batch[0])),
        lambda: given(Streamed([record])),
    ]
    for way in ways:
        if isinstance(expected, str):
            with pytest.raises(InputError, match=expected):
                way()
        else:
            inputs = way()
            assert lists(inputs) == expected
            assert (len(expected) > 1) == any("packed rows are split" in notice for notice in inputs.notices)


def test_a_row_without_text_is_left_out_and_never_read_from_another_column(tmp_path: Path) -> None:
    rows = [{"text": None, "url": words(9)}, {"text": words(9), "url": "w1"}]
    for inputs in (given(pd.DataFrame(rows), seq_len=8), given(Dataset.from_list(rows), seq_len=8)):
        assert lists(inputs) == [[BOS, *ids_of(words(7))]]
    inputs = given([{"input_ids": None, "messages": None, "text": words(3)}])
    assert (inputs.condition, lists(inputs)) == ("prompts", [[BOS, *ids_of(words(3))]])
    inputs = made(write_lines(tmp_path / "rows.jsonl", *rows))
    assert lists(inputs) == [ids_of(words(8))]
    assert "1 document of fewer than 2 tokens left out" in inputs.notices[0]


def test_every_input_says_what_was_read(tmp_path: Path) -> None:
    texts, chat = [words(7), words(7, 3)], [{"role": "user", "content": "w1 w2"}]
    tokenizer = word_tokenizer("<s> $A")
    tokenizer.chat_template = CHATS
    begins = "2 sequences, the first begins `<s> w0 w1 w2 w3 w4 w5 w6`"
    (tmp_path / "escape.txt").write_text("w1 w2 \x1b[31m w3 w4 w5 w6 w7", encoding="utf-8")
    for inputs, said in (
        (given(pd.DataFrame({"text": texts}), seq_len=8), f"column `text`, {begins}"),
        (given(Dataset.from_dict({"story": texts, "n": [1, 2]}), seq_len=8), f"column `story`, {begins}"),
        (given(texts), f"prompts, {begins}"),
        (made(write_lines(tmp_path / "a.jsonl", *({"text": text} for text in texts)), tokenizer=LLAMA),
         f"`text` of a.jsonl, {begins}"),
        (made(write_lines(tmp_path / "b.jsonl", {"messages": chat}, {"input_ids": [5, 6]}), tokenizer=tokenizer),
         "`messages` and `input_ids` of b.jsonl, 2 sequences, the first begins `<s> w1 w2`"),
        (made(save_array(tmp_path / "ids.npy", np.arange(4, 12)), tokenizer=None, num_seqs=1),
         "ids.npy, 1 sequence, the first begins `4, 5, 6, 7, 8, 9, 10, 11`"),
        (made(prompt="w1 w2", tokenizer=LLAMA), "prompt, 1 sequence, the first begins `<s> w1 w2`"),
    ):  # fmt: skip
        assert inputs.said == said
    assert made("random").said.startswith("random tokens, 2 sequences, the first begins `")
    assert made().said.startswith("natural text, 2 sequences, the first begins `")


@pytest.mark.parametrize(("template", "suffix"), [("<s> $A", ""), ("<pad> <s> $A", ""), ("<s> $A </s>", " </s>")])
def test_a_text_that_begins_with_what_would_be_added_is_not_framed_again(template, suffix, tmp_path) -> None:
    """As a chat template renders it; `--bos always` is no exception."""
    before = template.partition("$A")[0]
    tokenizer, closed = word_tokenizer(template), {"closed": bool(suffix)}
    rendered = [f"{before}w1 w2 w3{suffix}", f"{before}{words(20)}"]
    plain = made(given_lines := write_lines(tmp_path / "a.jsonl", {"text": "w1 w2 w3"}, {"text": words(20)}),
                 tokenizer=tokenizer, **closed)  # fmt: skip
    write_lines(given_lines, *({"text": text} for text in rendered))
    dataset = Dataset.from_dict({"text": [rendered[1]]})
    for bos in ("auto", "always"):
        for inputs in (
            made(given_lines, tokenizer=tokenizer, bos=bos, **closed),
            given(rendered, tokenizer=tokenizer, seq_len=8, bos=bos, **closed),
        ):
            assert lists(inputs) == lists(plain)
            assert inputs.token_zero == plain.token_zero
            (notice,) = (notice for notice in inputs.notices if "not added again" in notice)
            assert f"2 texts begin with {before.replace(' ', '')}, which" in notice
        options = {"tokenizer": tokenizer, "seq_len": 8, "bos": bos, **closed}
        assert lists(given(dataset, **options)) == lists(plain)[1:]
        assert lists(made(prompt=rendered[0], **options)) == lists(plain)[:1]
        text = write(tmp_path / "a.txt", rendered[1])
        assert lists(made(text, num_seqs=1, **options)) == lists(plain)[1:]
    # where nothing is added, the text keeps its own tokens, and the first one is named
    inputs = given(rendered, bos="never", seq_len=8, tokenizer=tokenizer)
    assert lists(inputs)[1] == ids_of(rendered[1])[:8]
    assert inputs.token_zero == plain.token_zero


def test_texts_that_are_cut_are_counted() -> None:
    inputs = given([words(9), "w1 w2", words(12)], seq_len=8)
    assert inputs.cut == 2
    assert any("input: 2 documents cut to 8 tokens" in notice for notice in inputs.notices)


@pytest.mark.parametrize("is_text", [True, False])
def test_objects_that_are_cut_at_the_models_positions_are_named(is_text: bool) -> None:
    model = tiny_model("llama")
    limit = position_limit(model)
    assert limit
    text = words(limit + 5)
    config = make_config(input=[text if is_text else ids_of(text), "w1 w2"])
    inputs = inputs_for(LoadedModel(model, LLAMA, "tiny", "tiny", None, None, ()), config)
    assert inputs.longest == limit
    assert any(f"input: 1 document cut to {limit} tokens" in notice for notice in inputs.notices)


def test_texts_that_begin_with_an_unknown_word_begin_with_no_special_token() -> None:
    assert UNK in PLAIN.all_special_ids
    assert given(["unknown w1", "unheard-of w2"], tokenizer=PLAIN).token_zero == "first text token"
    assert given(["<pad> w1", "<pad> w2"], tokenizer=PLAIN).token_zero == "special token <pad> (id 3)"


def test_tokens_of_a_prefix_are_not_predicted() -> None:
    inputs = TokenInputs("", (np.arange(8), np.arange(3)), "", "", first_predicted=4)
    assert (inputs.predicted, inputs.num_predicted) == ([4, 0], 4)
    targets = [(batch.targets != IGNORED).sum(1).tolist() for batch in inputs.batches(2)]
    assert targets == [[4, 0]]


def test_copies_of_a_text_have_its_number() -> None:
    inputs = given(["w1 w2", "w3 w4", "w1 w2", "w1 w2 w3"], tokenizer=LLAMA)
    assert inputs.texts == (0, 1, 0, 2)
    assert any("only 3 of its 4 sequences are distinct" in notice for notice in inputs.notices)
    assert given(["w1 w2", "w1 w2 w3"]).texts == (0, 1)
    assert [batch.numbers for batch in inputs.batches(2)] == [[0, 1], [0, 2]]
