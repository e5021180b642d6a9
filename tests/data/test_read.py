"""Each format on files written by hand, and what a wrong line says."""

import bz2
import gzip
import json
import lzma

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.datasets import dump_svmlight_file

from lastlayer.data import DataError, LabelData, Limits, read, read_parts, stream
from lastlayer.data.lines import Problems, lines
from lastlayer.data.source import chunks

ROWS = [("red apple", ["fruit", "red"]), ("blue sky", ["blue"]), ("nothing", []), ("red sky", ["blue", "red"])]


def check(data: LabelData, texts: bool = True) -> None:
    assert len(data) == 4
    assert list(data.label_names) == ["blue", "fruit", "red"]
    assert [data.names(i) for i in range(4)] == [sorted(labels) for _, labels in ROWS]
    if texts:
        assert data.texts == [text for text, _ in ROWS]


def test_tsv_with_header(tmp_path):
    file = tmp_path / "a.tsv"
    file.write_text("labels\ttext\n" + "".join(f"{','.join(y)}\t{x}\n" for x, y in ROWS))
    check(read(file))


def test_tsv_without_header_finds_text_labels_and_id(tmp_path):
    file = tmp_path / "a.tsv"
    file.write_text("".join(f"id{i}\t{';'.join(y)}\t{x} and more words\n" for i, (x, y) in enumerate(ROWS)))
    data = read(file)
    assert data.ids == ["id0", "id1", "id2", "id3"]
    assert data.names(0) == ["fruit", "red"]
    assert data.source["options"]["label_separator"] == ";"


def test_csv_with_quotes_and_newlines(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text('text,labels\n"red, ""ripe""\napple","fruit,red"\nsky,blue\n')
    data = read(file)
    assert data.texts == ['red, "ripe"\napple', "sky"]
    assert data.names(0) == ["fruit", "red"]


def test_columns_can_be_named(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("what,why\nx y,a|b\nz,b\n")
    data = read(file, text_column="what", label_column="why", label_separator="|", header=True)
    assert data.texts == ["x y", "z"]
    assert data.names(0) == ["a", "b"]
    with pytest.raises(DataError, match="`text_column` must be a column of the file"):
        read(file, text_column="nope", header=True)


def test_json_lines_with_parts_and_groups(tmp_path):
    file = tmp_path / "a.jsonl"
    rows = [
        {"text": x, "labels": y, "split": ["train", "dev", "test"][i % 3], "group": "g"}
        for i, (x, y) in enumerate(ROWS)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    parts = read_parts(file)
    assert {name: len(part) for name, part in parts.items()} == {"train": 2, "valid": 1, "test": 1}
    assert parts["train"].names(1) == ["blue", "red"]
    assert parts["valid"].label_names == parts["test"].label_names
    assert parts["test"].groups == ["g"]


def test_json_lines_with_vectors(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"vector": [i, 0.5], "labels": y}) + "\n" for i, (_, y) in enumerate(ROWS)))
    data = read(file)
    check(data, texts=False)
    np.testing.assert_array_equal(data.features[:, 0], [0, 1, 2, 3])


@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress, bz2.compress])
def test_compressed_files(tmp_path, compress):
    whole = "".join(f"{','.join(y)}\t{x}\n" for x, y in ROWS).encode()
    file = tmp_path / "a.tsv.gz"  # the content decides, not the name
    file.write_bytes(compress(whole[:20]) + compress(whole[20:]))  # several streams in a row
    check(read(file))


def test_svm_counts_from_1_without_header_and_from_0_with_one(tmp_path):
    file = tmp_path / "a.svm"
    file.write_text("2,7 1:0.5 3:2\n 2:1\n7\n")
    data = read(file)
    assert list(data.label_names) == ["2", "7"]
    np.testing.assert_array_equal(data.features.toarray(), [[0.5, 0, 2], [0, 1, 0], [0, 0, 0]])
    assert data.row_counts().tolist() == [2, 0, 1]
    file.write_text("3 5 9\n0,8 0:0.5 4:2\n1:1\n8 2:1\n")
    data = read(file)
    assert data.features.shape == (3, 5)
    assert data.n_labels == 9
    assert data.names(0) == ["0", "8"]
    assert data.row_counts().tolist() == [2, 0, 1]


def test_svm_comments_at_the_head_are_left_out(tmp_path):
    file = tmp_path / "a.svm"
    y = sp.csr_matrix([[1, 0, 1], [0, 0, 0], [0, 1, 0]])
    dump_svmlight_file(np.eye(3), y, str(file), multilabel=True, comment="about\nthese rows")
    data = read(file)
    np.testing.assert_array_equal(data.features.toarray(), np.eye(3))
    assert data.row_counts().tolist() == [2, 0, 1]
    file.write_text("#\n#red,2 1:1\n")
    assert read(file).names(0) == ["#red", "2"]


def test_svm_zero_based_can_be_forced(tmp_path):
    file = tmp_path / "a.svm"
    file.write_text("1 1:1\n")
    assert read(file).features.shape == (1, 1)
    assert read(file, zero_based=True).features.shape == (1, 2)
    file.write_text("1 0:1 2:3\n")
    assert read(file).features.shape == (1, 3)
    with pytest.raises(DataError, match="must start at 1"):
        read(file, zero_based=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 1:x\n", r"a\.svm, line 1: feature values must be finite numbers, not '1:x', got '1 1:x'\."),
        ("1 1:1\n2 nan:1\n", r"line 2: features must be index:value"),
        ("1 1:inf\n", r"line 1: feature values must be finite"),
        ("1 1:1 1:2\n", r"line 1: feature indices must not repeat"),
        ("2 3 4\n0 0:1\n5 1:1\n", r"line 3: labels must be whole numbers from 0 to 3"),
        ("2 3 4\n0 0:1\n1 3:1\n", r"line 3: feature indices must be below 3"),
        ("9 3 4\n0 0:1\n", r"line 1: the header must count the rows, says 9, the file has 1"),
        ("1 999999999999999 4\n0 0:1\n", r"line 1: sizes must be between 0 and 100000000"),
    ],
)
def test_wrong_svm_lines_are_named(tmp_path, text, message):
    file = tmp_path / "a.svm"
    file.write_text(text)
    with pytest.raises(DataError, match=message):
        read(file)


def test_skip_counts_and_lists_wrong_lines(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a", "labels": ["x"]}\nnot json\n{"text": "b", "labels": 3}\n{"labels": []}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: must be JSON, got 'not json'\."):
        read(file)
    data = read(file, on_error="skip")
    assert len(data) == 1
    assert data.problems.count == 3
    assert "line 3: labels must be a list" in data.problems.listed[1]
    assert "line 4: must have a text" in data.problems.listed[2]


def test_wrong_tsv_lines_are_named(tmp_path):
    file = tmp_path / "a.tsv"
    file.write_bytes(b"text\tlabels\nok\ta\none cell\n")
    with pytest.raises(DataError, match=r"line 3: must have 2 columns, has 1, got 'one cell'"):
        read(file)
    file.write_bytes(b"text\tlabels\nok\ta\none cell\n\xff\xfe\ta\n")
    data = read(file, on_error="skip")
    assert data.texts == ["ok"]
    assert any("line 4: must be UTF-8 text" in message for message in data.problems.listed)


ARFF = """% comment
@relation 'a b'
@attribute 'a, b' numeric
@attribute color {red, 'dark blue'}
@attribute "x" {0,1}
@attribute y {0,1}
@data
0.5,'dark blue',1,0
{0 2, 3 1}
0,red,0,1
"""
XML = '<?xml version="1.0"?><labels xmlns="http://mulan"><label name="x"><label name="y"/></label></labels>'


def test_arff_with_xml(tmp_path):
    file = tmp_path / "a-train.arff"
    file.write_text(ARFF)
    with pytest.raises(DataError, match="no XML file with the label names"):
        read(file)
    (tmp_path / "a.xml").write_text(XML)
    data = read(file)
    assert list(data.label_names) == ["x", "y"]
    assert [data.names(i) for i in range(3)] == [["x"], ["y"], ["y"]]
    np.testing.assert_array_equal(data.features.toarray(), [[0.5, 1], [2, 0], [0, 0]])


def test_arff_by_the_names_of_attributes(tmp_path):
    """A later file may have its attributes, and the values of nominal ones, in another order."""
    head = "@relation a\n@attribute x numeric\n@attribute c {red,green,blue}\n@attribute L {0,1}\n@data\n"
    (tmp_path / "a.arff").write_text(head + "1.5,red,1\n2,blue,0\n{0 3}\n")
    (tmp_path / "a.xml").write_text("<labels><label name='L'/></labels>")
    before = read(tmp_path / "a.arff")
    wanted = [[1.5, 0], [2, 2], [3, 0]]
    assert before.features.toarray().tolist() == wanted

    head = "@attribute L {0,1}\n@attribute new numeric\n@attribute c {blue,red,green}\n@attribute x numeric\n@data\n"
    (tmp_path / "b.arff").write_text("@relation a\n" + head + "1,7,red,1.5\n0,7,blue,2\n{2 red,3 3}\n{3 2}\n")
    after = read(tmp_path / "b.arff", like=before.source)
    assert after.features.toarray().tolist() == [*wanted, [2, 2]]
    assert [after.names(i) for i in range(4)] == [["L"], [], [], []]

    (tmp_path / "c.arff").write_text("@relation a\n@attribute c {red,blue}\n@attribute x numeric\n@data\nblue,2\n")
    assert read(tmp_path / "c.arff", like=before.source).features.toarray().tolist() == [[2, 2]]


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (["c {red,green,blue}"], "has no attribute 'x'"),
        (["x numeric", "x numeric", "c {red,green,blue}"], "has 2 attributes 'x'"),
        (["x {low,high}", "c {red,green,blue}"], "'x' must be numeric"),
        (["x numeric", "c numeric"], "'c' must be nominal"),
    ],
)
def test_arff_without_the_attributes_of_the_training_rows(tmp_path, attributes, message):
    (tmp_path / "a.arff").write_text(
        "@relation 'a -C 1'\n@attribute L {0,1}\n@attribute x numeric\n@attribute c {red,green,blue}\n@data\n1,1,red\n"
    )
    head = "".join(f"@attribute {one}\n" for one in attributes)
    (tmp_path / "b.arff").write_text(f"@relation b\n{head}@data\n")
    with pytest.raises(DataError, match=message):
        read(tmp_path / "b.arff", like=read(tmp_path / "a.arff").source)


def test_arff_of_meka(tmp_path):
    file = tmp_path / "a.arff"
    file.write_text(
        "@relation 'z: -C 2'\n@attribute l0 {0,1}\n@attribute l1 {0,1}\n@attribute f real\n@data\n1,0,3.5\n"
    )
    data = read(file)
    assert data.names(0) == ["l0"]
    assert data.features.toarray().tolist() == [[3.5]]


@pytest.mark.parametrize(
    ("line", "message"),
    [("1,2", "must have 3 values, has 2"), ("{9 1}", "indices must be below 3"), ("1,0,x", "must be a finite number"),
     ("2,0,1", "must be one of its nominal values"), ("1,0,?", "must be a finite number"), ("{0 1", "must end with }"),
     ("'1,0,3", "quotes must close")],
)  # fmt: skip
def test_wrong_arff_lines_are_named(tmp_path, line, message):
    file = tmp_path / "a.arff"
    file.write_text(
        f"@relation 'z: -C 2'\n@attribute l0 {{0,1}}\n@attribute l1 {{0,1}}\n@attribute f real\n@data\n{line}\n"
    )
    with pytest.raises(DataError, match=f"line 6: .*{message}"):
        read(file)


def test_xml_bombs_are_refused(tmp_path):
    (tmp_path / "a.arff").write_text(ARFF)
    (tmp_path / "a.xml").write_text('<!DOCTYPE a [<!ENTITY b "bbbb">]><labels><label name="&b;"/></labels>')
    with pytest.raises(DataError, match="XML without a document type"):
        read(tmp_path / "a.arff")


def test_npz_dense_sparse_and_parts(tmp_path):
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    y = np.array([[0, 1, 1], [1, 0, 0], [0, 0, 0], [1, 0, 1]])
    names = np.array(["blue", "fruit", "red"])
    np.savez(tmp_path / "a.npz", X=x, Y=y, label_names=names)
    data = read(tmp_path / "a.npz")
    check(data, texts=False)
    np.testing.assert_array_equal(data.features, x)
    s, t = sp.csr_matrix(x), sp.csr_matrix(y)
    arrays = {
        f"{p}_{n}_{k}": getattr(m, k)
        for p in ("train", "test")
        for n, m in (("X", s), ("Y", t))
        for k in ("data", "indices", "indptr", "shape")
    }
    np.savez_compressed(tmp_path / "b.npz", label_names=names, **arrays)
    parts = read_parts(tmp_path / "b.npz")
    assert sorted(parts) == ["test", "train"]
    check(parts["test"], texts=False)
    np.testing.assert_array_equal(parts["train"].features.toarray(), x)
    with pytest.raises(DataError, match="holds the parts train, test"):
        read(tmp_path / "b.npz")
    sp.save_npz(tmp_path / "c.npz", s)
    assert read(tmp_path / "c.npz").features.shape == (4, 2)


def test_objects_are_never_unpickled(tmp_path):
    np.savez(tmp_path / "a.npz", X=np.array([{"a": 1}], dtype=object))
    with pytest.raises(DataError, match="never unpickled"):
        read(tmp_path / "a.npz")
    np.save(tmp_path / "a.npy", np.array([{"a": 1}], dtype=object))
    with pytest.raises(DataError, match="never unpickled"):
        read(tmp_path / "a.npy")


@pytest.mark.parametrize("shape", ["(1000000000000, 8)", "(-1, 8)", "(2, 3)"])
def test_sizes_in_npy_headers_are_not_believed(tmp_path, shape):
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    raw = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + b"\0" * 16
    (tmp_path / "a.npy").write_bytes(raw)
    with pytest.raises(DataError, match="header must"):
        read(tmp_path / "a.npy")
    import zipfile

    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        file.writestr("X.npy", raw)
    with pytest.raises(DataError, match="header"):
        read(tmp_path / "a.npz")


def test_bad_csr_is_refused(tmp_path):
    good = {
        "X_data": np.ones(2, "f4"),
        "X_indices": np.array([0, 1]),
        "X_indptr": np.array([0, 1, 2]),
        "X_shape": np.array([2, 2]),
    }
    for change, message in [
        ({"X_indptr": np.array([0, 3, 2])}, "indptr must rise"),
        ({"X_indices": np.array([0, 9])}, "must fit"),
        ({"X_indices": np.array([-1, 0])}, "indices must be between"),
        ({"X_data": np.array([1, np.nan], "f4")}, "finite numbers"),
        ({"X_shape": np.array([5, 2])}, "must fit 2 rows"),
    ]:
        np.savez(tmp_path / "a.npz", **{**good, **change})
        with pytest.raises(DataError, match=message):
            read(tmp_path / "a.npz")
    dense = np.zeros((5000, 3), np.float32)
    dense[4500, 2] = -np.inf
    np.savez(tmp_path / "a.npz", X=dense, Y=np.ones((5000, 1)))
    with pytest.raises(DataError, match=r"features must be finite, got -inf in row 4500, column 2\. Replace"):
        read(tmp_path / "a.npz")


@pytest.mark.parametrize(("text", "options"), [("a, b\nb\n\n", {}), ("a b\nb\n\n", {"label_separator": " "})])
def test_labels_of_a_folder_may_have_spaces_around_them_or_between(tmp_path, text, options):
    np.save(tmp_path / "X.npy", np.zeros((3, 2), np.float32))
    (tmp_path / "labels.txt").write_text(text)
    data = read(tmp_path, **options)
    assert [data.names(i) for i in range(3)] == [["a", "b"], ["b"], []]
    (tmp_path / "labels.txt").write_text("a\n[1\n[1]]\n")
    with pytest.raises(
        DataError,
        match=r"labels.txt, line 3: labels must be a JSON list of names or a Python list of names, got '\[1\]\]'",
    ):
        read(tmp_path, **options)


def test_npy_and_folders(tmp_path):
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    np.save(tmp_path / "a.npy", x)
    np.testing.assert_array_equal(read(tmp_path / "a.npy").features, x)
    for part in ("train", "test"):
        folder = tmp_path / "emb" / part
        folder.mkdir(parents=True)
        np.save(folder / "embeddings.npy", x)
        (folder / "labels.txt").write_text("".join(",".join(y) + "\n" for _, y in ROWS))
        (folder / "ids.txt").write_text("a\nb\nc\nd\n")
    parts = read_parts(tmp_path / "emb")
    check(parts["train"], texts=False)
    assert parts["test"].ids == ["a", "b", "c", "d"]


def test_parquet(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": [x for x, _ in ROWS], "labels": [y for _, y in ROWS]}), tmp_path / "a.parquet")
    check(read(tmp_path / "a.parquet"))
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    with pytest.raises(DataError, match="must be Parquet"):
        read(tmp_path / "b.parquet")


def test_formats_are_sniffed_without_a_name(tmp_path):
    for text, kind in [
        ('{"text": "a", "labels": []}', "jsonl"),
        ("a\tb", "tsv"),
        ("1,2 3:4", "svm"),
        ("1 2 3", "svm"),
        ("@relation x", "arff"),
        ("a,b", "csv"),
    ]:
        file = tmp_path / "data"
        file.write_text(text + "\n")
        from lastlayer.data.read import sniff

        assert sniff(file) == kind
    file.write_text("hello\n")
    with pytest.raises(DataError, match="cannot tell its format"):
        read(file)


def test_arguments_are_checked(tmp_path):
    file = tmp_path / "a.tsv"
    file.write_text("a\tb\n")
    for options, message in [
        ({"format": "x"}, "`format` must be"),
        ({"on_error": "x"}, "`on_error` must be"),
        ({"texts": 1}, "unknown option 'texts'"),
    ]:
        with pytest.raises(DataError, match=message):
            read(file, **options)
    with pytest.raises(DataError, match="no such file"):
        read(tmp_path / "none")


def test_decompression_bombs_stop(tmp_path):
    file = tmp_path / "a.tsv.xz"
    file.write_bytes(lzma.compress(b"a\tb\n" * 10_000_000))  # 40 MB in a few kB
    with pytest.raises(DataError, match="decompresses to more than"):
        for _ in chunks(file, Limits()):
            pass
    with pytest.raises(DataError, match="decompresses to more than"):
        read(file, limits=Limits(base_bytes=1000, ratio=1))


def test_long_lines_stop_or_are_skipped(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"x" * 5000 + b"\nok\n" + b"y" * 5000)
    limits = Limits(max_line=1000)
    with pytest.raises(DataError, match="line 1: must be shorter than 1000 bytes"):
        list(lines(file, limits, Problems()))
    problems = Problems("skip")
    assert list(lines(file, limits, problems)) == [(2, "ok")]
    assert problems.count == 2


def test_truncated_archives_are_named(tmp_path):
    file = tmp_path / "a.tsv.gz"
    file.write_bytes(gzip.compress(b"a\tb\n" * 10000)[:-30])
    with pytest.raises(DataError, match="cannot be decompressed"):
        read(file)


def test_stream_equals_read(tmp_path):
    file = tmp_path / "a.tsv"
    file.write_text("text\tlabels\n" + "".join(f"row {i}\tl{i % 3}\n" for i in range(10)))
    parts = list(stream(file, 4))
    assert [len(p) for p in parts] == [4, 4, 2]
    assert [text for p in parts for text in p.texts] == read(file).texts
    file = tmp_path / "a.svm"
    file.write_text("".join(f"{i} {i + 1}:1\n" for i in range(5)))
    parts = list(stream(file, 2, n_features=5))
    np.testing.assert_array_equal(sp.vstack([p.features for p in parts]).toarray(), np.eye(5))


def test_parquet_keeps_parts_and_forgets_columns_that_are_missing(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    columns = {"text": ["a b", "b c", "c d"], "labels": [["x"], ["y"], ["x"]], "split": ["train", "test", "train"]}
    pq.write_table(pa.table({**columns, "id": [1, 2, 3], "weight": [1.0, 0.5, 2.0]}), tmp_path / "a.parquet")
    parts = read_parts(tmp_path / "a.parquet")
    assert {name: part.texts for name, part in parts.items()} == {"train": ["a b", "c d"], "test": ["b c"]}
    assert parts["train"].weights.tolist() == [1, 2]
    assert list(read_parts(tmp_path / "a.parquet", split_column="none")) == ["all"]
    assert [data.texts for data in stream(tmp_path / "a.parquet", 2)] == [["a b", "b c"], ["c d"]]
    pq.write_table(pa.table({"text": ["new", "newer"]}), tmp_path / "b.parquet")
    later = read(tmp_path / "b.parquet", like=parts["train"].source)
    assert later.texts == ["new", "newer"]
    assert later.ids is None
    pq.write_table(pa.table({"body": ["new"]}), tmp_path / "c.parquet")
    with pytest.raises(DataError, match="has no column 'text', where the run's training rows"):
        read(tmp_path / "c.parquet", like=parts["train"].source)


def test_parquet_columns_of_numbers_are_features_where_labels_are_named(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    columns = {"f1": [1.0, 2.5], "f2": [3, 4], "sunny": [True, False], "a": [0, 1], "b": [1, 1]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"must have a text or vector column.* the other numbers become features\."):
        read(tmp_path / "a.parquet")
    data = read(tmp_path / "a.parquet", label_column="a,b")
    assert data.features.tolist() == [[1, 3], [2.5, 4]]
    assert [data.names(0), data.names(1)] == [["b"], ["a", "b"]]
    assert "not used: 'sunny'" in data.source["how"]
    pq.write_table(pa.table({"f2": [5, 6], "f1": [7, 8]}), tmp_path / "b.parquet")
    assert read(tmp_path / "b.parquet", like=data.source).features.tolist() == [[7, 5], [8, 6]]
    pq.write_table(pa.table({"f2": [5, 6]}), tmp_path / "c.parquet")
    with pytest.raises(DataError, match="has no column 'f1'"):
        read(tmp_path / "c.parquet", like=data.source)


def test_null_is_an_empty_cell_of_ids_and_groups(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    rows = [{"text": f"row {i}", "labels": ["a"], "id": i or None, "group": "g" if i > 1 else None} for i in range(4)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    del rows[0]["group"], rows[0]["id"]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name in ("a.parquet", "a.jsonl", "b.jsonl"):
        data = read(tmp_path / name)
        assert (data.ids, data.groups) == (["", "1", "2", "3"], ["", "", "g", "g"])
