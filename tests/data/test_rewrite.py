"""Files written again with other labels: every format, and the characters of what does not change."""

import json

import pytest

from lastlayer.data import DataError, read
from lastlayer.data.rewrite import Change, rewrite

CHANGES = {0: Change(add=frozenset({"red"}), drop=frozenset({"fruit"})), 2: Change(drop=frozenset({"blue"}))}
FILES = {
    "a.tsv": "text\tlabels\nan apple\tfruit,round\na 'tomato\tred\nthe sky\tblue\n",
    "b.csv": 'id,text,tags\r\n7,"an, apple","fruit; round"\r\n8,"two\nlines",red\r\n9,the sky,blue\r\n',
    "c.csv": "text,fruit,round,red,blue\nan apple here,1,1,0,0\na tomato here,0,0,1,0\nthe sky here,0,0,0,1\n",
    "d.jsonl": '{"text": "an apple", "labels": ["fruit", "round"]}\n{"text":"x","labels":["red"]}\n'
    '{"text": "the sky", "labels": "blue"}\n',
    "e.json": '[{"text": "an apple", "labels": ["fruit", "round"]}, {"text": "x", "labels": ["red"]},\n'
    '{"text": "the sky", "labels": ["blue"]}]',
    "f.txt": "__label__fruit __label__round an apple\n__label__red a tomato\n__label__blue the sky\n",
    "g.svm": "fruit,round 1:0.5 2:1\nred 1:1\nblue 3:2\n",
    "h.tsv": "text\tlabels\nan apple\t['fruit', 'round']\na tomato\t['red']\nthe sky\t['blue']\n",
}
MADE = {
    "a.tsv": "text\tlabels\nan apple\tround,red\na 'tomato\tred\nthe sky\t\n",
    "b.csv": 'id,text,tags\r\n7,"an, apple",round; red\r\n8,"two\nlines",red\r\n9,the sky,\r\n',
    "c.csv": "text,fruit,round,red,blue\nan apple here,0,1,1,0\na tomato here,0,0,1,0\nthe sky here,0,0,0,0\n",
    "d.jsonl": '{"text": "an apple", "labels": ["round", "red"]}\n{"text":"x","labels":["red"]}\n'
    '{"text": "the sky", "labels": ""}\n',
    "e.json": '[{"text": "an apple", "labels": ["round", "red"]}, {"text": "x", "labels": ["red"]},\n'
    '{"text": "the sky", "labels": []}]',
    "f.txt": "__label__round __label__red an apple\n__label__red a tomato\nthe sky\n",
    "g.svm": "round,red 1:0.5 2:1\nred 1:1\n 3:2\n",
    "h.tsv": 'text\tlabels\nan apple\t["round", "red"]\na tomato\t[\'red\']\nthe sky\t[]\n',
}


@pytest.mark.parametrize("name", sorted(FILES))
def test_only_the_labels_change(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(FILES[name].encode())
    data = read(path)
    made = rewrite(path, tmp_path / "corrected", data, CHANGES)
    again = read(made)
    assert [sorted(again.names(i)) for i in range(3)] == [["red", "round"], ["red"], []]
    assert again.texts == data.texts
    if data.features is not None:
        assert (again.features != data.features).nnz == 0
    assert made.read_bytes().decode() == MADE[name]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "latin-1"])
@pytest.mark.parametrize("name", sorted(FILES))
def test_the_encoding_and_its_mark_stay(tmp_path, name, encoding):
    path = tmp_path / name
    path.write_bytes(FILES[name].replace("apple", "äpple").encode(encoding))
    data = read(path, **({"encoding": encoding} if encoding == "latin-1" else {}))
    made = rewrite(path, tmp_path / "corrected", data, CHANGES)
    assert made.read_bytes() == MADE[name].replace("apple", "äpple").encode(encoding)


def test_what_cannot_be_written_is_an_error_and_writes_nothing(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text(FILES["a.tsv"])
    with pytest.raises(DataError, match="row 1: the labels red, a,b cannot be written"):
        rewrite(path, tmp_path / "corrected", read(path), {1: Change(add=frozenset({"a,b"}))})
    assert not (tmp_path / "corrected.tsv").exists()
    data = read(path)
    data.source["format"] = "npz"
    with pytest.raises(DataError, match="format npz cannot be written again"):
        rewrite(path, tmp_path / "corrected", data, CHANGES)


def test_the_copy_does_not_replace_the_file(tmp_path):
    path = tmp_path / "corrected.csv"
    path.write_text("text,labels\none two,a\n")
    with pytest.raises(DataError, match="would be overwritten by its corrected copy"):
        rewrite(path, tmp_path / "corrected", read(path), {0: Change(add=frozenset("b"))})
    assert path.read_text() == "text,labels\none two,a\n"


def test_counts_rows_as_the_readers_do(tmp_path):
    """Blank lines, skipped lines and a header do not shift the rows."""
    path = tmp_path / "a.jsonl"
    rows = [{"text": f"text {i}", "labels": ["a"]} for i in range(4)]
    path.write_text("\n".join(["", json.dumps(rows[0]), "", "not json", *map(json.dumps, rows[1:])]) + "\n")
    data = read(path, on_error="skip")
    change = {int(data.row_numbers()[2]): Change(add=frozenset({"b"}))}
    again = read(rewrite(path, tmp_path / "out", data, change), on_error="skip")
    assert [again.names(i) for i in range(4)] == [["a"], ["a"], ["a", "b"], ["a"]]
    text = "text,labels\nfirst text,a\n\nsecond text,a\n"
    for quoted in ("", '"q, r",a\n'):
        path = tmp_path / "b.csv"
        path.write_text(text + quoted)
        data = read(path, header=True, label_column="labels")
        again = read(
            rewrite(path, tmp_path / "out", data, {int(data.row_numbers()[1]): Change(add=frozenset({"b"}))}),
            header=True,
            label_column="labels",
        )
        assert [again.names(i) for i in range(2)] == [["a"], ["a", "b"]]


def test_comments_before_the_header_of_an_svm_file_do_not_shift_the_rows(tmp_path):
    path = tmp_path / "a.svm"
    path.write_text("# made by hand\n3 4 3\n0,1 1:0.5 2:1\n2 1:1\n1 3:2\n")
    data = read(path)
    made = rewrite(path, tmp_path / "out", data, {int(data.row_numbers()[1]): Change(add=frozenset({"0"}))})
    assert made.read_text() == "# made by hand\n3 4 3\n0,1 1:0.5 2:1\n2,0 1:1\n1 3:2\n"


@pytest.mark.parametrize(
    ("name", "text", "made"),
    [
        ("a.csv", 'text,labels\nx,"[0, 1, 0]"\ny,"[1, 0, 0]"\n', 'text,labels\nx,"[1, 0, 0]"\ny,"[1, 0, 0]"\n'),
        ("a.tsv", "text\tlabels\nx\t[0,1,0]\ny\t[1,1,0]\n", "text\tlabels\nx\t[1,0,0]\ny\t[1,1,0]\n"),
        (
            "a.jsonl",
            '{"text": "x", "labels": "[0, 1, 0]"}\n{"text": "y", "labels": "[1, 0, 0]"}\n',
            '{"text": "x", "labels": "[1, 0, 0]"}\n{"text": "y", "labels": "[1, 0, 0]"}\n',
        ),
        (
            "a.jsonl",
            '{"text": "x", "labels": [1]}\n{"text": "y", "labels": [0, 1]}\n{"text": "z", "labels": []}\n',
            '{"text": "x", "labels": [0]}\n{"text": "y", "labels": [0, 1]}\n{"text": "z", "labels": []}\n',
        ),
        (
            "a.json",
            '[{"text": "x", "label": 1}, {"text": "y", "label": 0}]',
            '[{"text": "x", "label": [0]}, {"text": "y", "label": 0}]',
        ),
    ],
)
def test_labels_that_are_numbers(tmp_path, name, text, made):
    path = tmp_path / name
    path.write_text(text)
    change = Change(add=frozenset({"0"}), drop=frozenset({"1"}))
    assert rewrite(path, tmp_path / "out", read(path), {0: change}).read_text() == made


def test_numbers_of_labels_may_stand_alone_beside_lists_of_them(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x", "label": 3}\n{"text": "y", "label": [4, 3]}\n')
    data = read(path)
    assert [data.names(0), data.names(1)] == [["3"], ["3", "4"]]
    made = rewrite(path, tmp_path / "out", data, {0: Change(add=frozenset({"4"}))})
    assert made.read_text() == '{"text": "x", "label": [3, 4]}\n{"text": "y", "label": [4, 3]}\n'
