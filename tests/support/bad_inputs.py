"""Wrong input of users, as hypothesis strategies: few for readers, thousands in tests/torture/attacks.py."""

import io
import json
from typing import Any

import numpy as np
from hypothesis import strategies as st

ODD_NUMBERS: list[Any] = [
    0, -1, 1, 2, 7, 2**31, 2**63, 2**64, 10**22, -(10**22), 10**400,
    0.0, -0.5, 1.5, 1e308, float("inf"), float("-inf"), float("nan"),
]  # fmt: skip
ODD_TEXTS = [
    "", " ", ".", "..", "/", "~", "~nosuchuser", "~nosuchuser/x", "\n", "a\nb\nc\nd", "a\0b", "x" * 300, "é", "\u2028",
    "\ud800", "\udcff", "null", "true", "-1", "1e400", ".inf", "nan", "all", ":", "=", ",", "a:b=c", "::==,,", "[[[",
    "../x", "a/../../x", "https://x", "x.txt", "x.npy", "x.gguf", "natural", "sampled", "none", "9" * 23, "9" * 5000,
]  # fmt: skip

odd_numbers = st.sampled_from(ODD_NUMBERS) | st.integers() | st.floats()
odd_texts = st.sampled_from(ODD_TEXTS) | st.text(max_size=12)
leaves = st.none() | st.booleans() | odd_numbers | odd_texts
json_values = st.recursive(
    leaves, lambda part: st.lists(part, max_size=3) | st.dictionaries(odd_texts, part, max_size=3), max_leaves=6
)


def written(value: Any) -> bytes:
    """Return JSON as Python writes it, including NaN and halves of surrogate pairs."""
    return json.dumps(value).encode()


NESTED = (b"[" * 100_000, b'{"a":' * 5_000 + b"1" + b"}" * 5_000, b"[" * 150 + b"]" * 150)
some_json = json_values.map(written) | st.sampled_from(NESTED)


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """Draw a file that is cut short, or has a few changed bytes."""
    if draw(st.booleans()):
        return whole[: draw(st.integers(0, len(whole)))]
    content = bytearray(whole)
    for at in draw(st.lists(st.integers(0, min(len(whole), 400) - 1), min_size=1, max_size=4)):
        content[at] = draw(st.integers(0, 255))
    return bytes(content)


@st.composite
def edited(draw: st.DrawFn, whole: dict[str, Any]) -> dict[str, Any]:
    """Draw an object with one or two of its entries replaced, at any depth, or removed."""
    content = json.loads(json.dumps(whole))
    for _ in range(draw(st.integers(1, 2))):
        place = content
        while True:
            key = draw(st.sampled_from(sorted(place)))
            if not (isinstance(place[key], dict) and place[key] and draw(st.booleans())):
                break
            place = place[key]
        if draw(st.integers(0, 4)) == 0:
            del place[key]
        else:
            place[key] = draw(json_values)
        if not content:
            break
    return content


def _saved(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _with_header(header: str) -> bytes:
    text = header.encode("latin-1", "replace").ljust(118) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(256)


text_files = st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass"))
shapes = st.lists(odd_numbers | odd_texts, max_size=3).map(tuple)
kinds = st.sampled_from(
    ["<i8", "<u8", ">i4", "|b1", "<f8", "|O", "<U3", "|V0", "<i8,<i8", "('<i4',(3,))", "nonsense", 5]
)
npy_files = (
    st.builds(
        lambda shape, kind: _with_header(repr({"descr": kind, "fortran_order": False, "shape": shape})), shapes, kinds
    )
    | st.text(max_size=40).map(_with_header)
    | damaged(_saved(np.arange(3, 27).reshape(2, 12)))
    | st.lists(st.integers(-5, 200), max_size=30).map(lambda ids: _saved(np.array(ids, dtype=np.int64)))
)
id_lists = st.lists(st.integers(-3, 200) | odd_numbers | odd_texts, max_size=20)
records = st.fixed_dictionaries(
    {}, optional={"text": json_values, "input_ids": id_lists | json_values, "other": leaves}
)
json_lines = st.lists(records.map(written) | some_json | text_files, max_size=4).map(b"\n".join)

# --- recipes

RECIPE = {
    "title": "x", "command": "analyze", "options": {"num-seqs": 2, "seq-len": 8, "observables": ["activation"]},
    "runs": {"a": {"seed": 1}, "b": {}}, "figures": ["sink-map"], "out": "runs/x",
}  # fmt: skip
YAMLS = [
    "a: &a [*a]",
    "\n".join(["a0: &a0 {x: 1, y: 2}", *(f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}" for n in range(1, 60))]),
    "\n".join(["a0: &a0 {x: 1}", *(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, 40))]),
    "- " * 3000, "[" * 20_000, "{" * 20_000, "? " * 3000, "title: !!python/object:os.system x", "title: !!binary x",
    "title: 2001-99-99", "title: !!int x", "title: !!float x", "? [a, b]\n: c", "title: x\ntitle: y", "title: &a",
    "%YAML 9.9", "title: x\noptions: {seq-len: .inf}", "title: x\noptions: {seed: 1e400}",
    "title: x\noptions: {epsilon: .nan}", 'title: "\\ud800"', "title: x\nmodel: ~nosuchuser", "title: x\nout: 5",
    "title: x\noptions: {? {a: b} : c}", "!!set {a, b}",
]  # fmt: skip
recipes = (
    st.sampled_from(YAMLS).map(str.encode)
    | edited(RECIPE).map(written)
    | text_files
    | damaged(json.dumps(RECIPE).encode())
)

# --- options

named = st.sampled_from([
    "zero-massive", "mask-sink", "mean-massive", "scale-sink-value", "mean-sink-value", "streaming-window",
    "nullify-query-bias", "nothing",
])  # fmt: skip
methods = st.sampled_from(["vga", "iga", "vscale", "learnable-sink", "key-bias", "register-tokens", "none", "nothing"])
keys = st.sampled_from(
    ["layers", "heads", "coordinates", "positions", "factor", "scale", "count", "seed", "window", "x", ""]
)
values = (
    odd_numbers.map(str) | odd_texts | st.sampled_from(["0", "1", "0-2", "2-0", "0-99999999999", "0,1", "1+2", "all"])
)
parameters = st.lists(st.tuples(keys, values).map("=".join) | odd_texts, max_size=3).map(",".join)
interventions = st.builds("{}:{}".format, named, parameters) | odd_texts
retrofits = st.builds("{}:{}".format, methods, parameters) | odd_texts
