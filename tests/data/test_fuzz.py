"""Hostile input: a table or a DataError, nothing else, and no allocation that a header asks for."""

import io
import tracemalloc
import zipfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lastlayer.data import DataError, LabelData, read_parts, stream

BOUND = 64 << 20  # for files of a few hundred bytes
ALLOWED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
SETTINGS = settings(max_examples=30, deadline=None, suppress_health_check=ALLOWED)
NUMBERS = ["0", "1", "-1", "7", "99999999999999999999", "1e999", "nan", "0.5", "1:2", "4:inf", ":", "1:", ":1", "1:1:1"]
PIECES = {
    "svm": [*NUMBERS, ",", " ", "\n", "3 4 5", "1000000000 1000000000 1000000000", "#", "\t", "é"],
    "tsv": ["text", "labels", "\t", "\n", ",", " ", "a", "[", "]", '["a"]', '"', "id", "split", "train", "\r\n", "\0"],
    "csv": ["text", "labels", ",", "\n", '"', '""', "a", "\r", "\r\n", ";", "\\"],
    "jsonl": ['{"text": "a"', ', "labels": ', "[", "]", "{", "}", '["a", 1]', ":", "null", "NaN", "1e999", "\n", '"'],
    "arff": ["@relation ", "@attribute ", "@data\n", "a", " numeric", "{0,1}", "'", '"', "\\", "\n", ",", "{", "}"],
}
PIECES["jsonl"] += ["[" * 2000, "9" * 5000]
PIECES["json"] = [*PIECES["jsonl"], "[{", "}, {", "}]", "\\ud83d"]
PIECES["txt"] = [
    "__label__",
    "__label__a ",
    "a, b",
    "\t",
    "\n",
    "1:2",
    "3 4 5",
    "{",
    "[",
    '"',
    ";",
    "\r",
    "\ufeff",
    "text,labels",
]
PIECES["csv"] += ["0", "1", "0,1,1", "True", "['a', 'b']", "{'a'", "weight", "a;b", "\ufeff"]
PIECES["arff"] += ["0 1", "?", "-C 2", "-C 999999999", "%"]


def attempt(path, **options) -> None:
    tracemalloc.start()
    try:
        parts = read_parts(path, **options)
        assert all(isinstance(p, LabelData) for p in parts.values())
        for part in parts.values():
            assert len(part.indices) == part.indptr[-1]
            assert not len(part.indices) or 0 <= part.indices.min() <= part.indices.max() < part.n_labels
            again = list(stream(path, 3, **options)) if len(parts) == 1 and part.source.get("format") != "svm" else []
            assert not again or [t for table in again for t in table.texts or []] == (part.texts or [])
        said = ""
    except DataError as error:
        said = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < BOUND
    assert "\n" not in said
    assert len(said) < 600


@pytest.mark.parametrize("kind", sorted(PIECES))
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_text_formats(tmp_path, kind, on_error):
    file = tmp_path / f"a.{kind}"

    @SETTINGS
    @given(st.lists(st.sampled_from(PIECES[kind]), max_size=40))
    def run(pieces):
        file.write_text("".join(pieces), encoding="utf-8")
        attempt(file, on_error=on_error)

    run()


@pytest.mark.parametrize("kind", ["svm", "tsv", "csv", "jsonl", "json", "txt", "arff", "npz", "npy", "parquet"])
def test_random_bytes(tmp_path, kind):
    file = tmp_path / f"a.{kind}"

    @SETTINGS
    @given(
        st.binary(max_size=300),
        st.sampled_from(
            [b"", b"\x1f\x8b\x08\0", b"\xfd7zXZ\0", b"BZh9", b"PK\x03\x04", b"\x93NUMPY", b"PAR1", b"\xff\xfe"]
        ),
    )
    def run(raw, start):
        file.write_bytes(start + raw)
        attempt(file)

    run()


def test_damaged_npz(tmp_path):
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        X=np.ones((5, 3), "f4"),
        Y_indices=np.array([0, 1, 1]),
        Y_indptr=np.array([0, 1, 2, 3, 3, 3]),
        labels=np.array(["a", "b"]),
    )
    whole = bytearray(buffer.getvalue())
    file = tmp_path / "a.npz"

    @SETTINGS
    @given(st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(0, 255)), min_size=1, max_size=4))
    def run(changes):
        raw = bytearray(whole)
        for place, value in changes:
            raw[place] = value
        file.write_bytes(raw)
        attempt(file)

    run()


@SETTINGS
@given(
    descr=st.sampled_from(["<f4", "<f8", "|O", "<i8", "|S5", "|V8", "<U100000000", "garbage"]),
    shape=st.lists(st.integers(-2, 10**15), max_size=3),
    body=st.binary(max_size=64),
)
def test_npy_headers(tmp_path_factory, descr, shape, body):
    folder = tmp_path_factory.mktemp("npy")
    header = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {tuple(shape)!r}}}\n".encode()
    raw = b"\x93NUMPY\x01\0" + len(header).to_bytes(2, "little") + header + body
    (folder / "a.npy").write_bytes(raw)
    attempt(folder / "a.npy")
    with zipfile.ZipFile(folder / "a.npz", "w") as file:
        file.writestr("X.npy", raw)
    attempt(folder / "a.npz")
