"""Files as people make them: read right, or refused with one line that says what to do."""

import io
import json
import lzma
import sys
import zipfile

import numpy as np
import pytest

from lastlayer.data import DataError, Limits, read, read_parts, stream
from lastlayer.data.labels import Ambiguous, guess_separator, split_labels
from lastlayer.data.rewrite import Change, rewrite

TOXIC = """id,comment_text,toxic,obscene,threat,insult
a1,"you are, well, nice",0,0,0,0
a2,"you
fool",1,0,0,1
a3,I will find you,1,1,1,0
"""


def write(path, text, encoding="utf-8"):
    path.write_bytes(text.encode(encoding))
    return path


def names(data):
    return [data.names(i) for i in range(len(data))]


def refusal(path, **options) -> str:
    with pytest.raises(DataError) as caught:
        read_parts(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


# One column of 0 and 1 per label


def test_columns_of_0_and_1_are_labels(tmp_path):
    data = read(write(tmp_path / "a.csv", TOXIC))
    assert data.texts == ["you are, well, nice", "you\nfool", "I will find you"]
    assert data.ids == ["a1", "a2", "a3"]
    assert list(data.label_names) == ["toxic", "obscene", "threat", "insult"]
    assert names(data) == [[], ["toxic", "insult"], ["toxic", "obscene", "threat"]]
    assert "labels: 4 columns of 0 and 1 ('toxic', 'obscene', 'threat', 'insult') (guessed)" in data.source["how"]


@pytest.mark.parametrize("asked", ["toxic,insult", ["toxic", "insult"], "2,5", "Toxic , INSULT"])
def test_label_columns_can_be_named(tmp_path, asked):
    data = read(write(tmp_path / "a.csv", TOXIC), label_column=asked)
    assert names(data) == [[], ["toxic", "insult"], ["toxic"]]
    assert "not used: 'obscene', 'threat'" in data.source["how"]
    assert list(read(tmp_path / "a.csv", label_column="obscene..insult").label_names) == ["obscene", "threat", "insult"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("text,a,b\nx y,0.0,1.0\nz,1,0\n", [["b"], ["a"]]),  # pandas makes floats of columns with gaps
        ("text,a,b\nx y,True,False\nz,True,True\n", [["a"], ["a", "b"]]),  # pandas' dummies
        ("text\ta\tb\nx y\t0\t1\nz\t1\t0\n", [["b"], ["a"]]),
        ('{"text": "x y", "a": 0, "b": 1}\n{"text": "z", "a": 1, "b": 0}\n', [["b"], ["a"]]),
        ('{"text": "x y", "labels": [0, 1, 0]}\n{"text": "z", "labels": [0, 1, 1]}\n', [["1"], ["1", "2"]]),
        ('{"text": "x y", "labels": [0, 1]}\n{"text": "z", "labels": [1]}\n', [["0", "1"], ["1"]]),  # numbers of labels
        (
            '{"text": "x y", "labels": [0, 1]}\n{"text": "z", "labels": [1, 0]}\n',
            [["1"], ["0"]],
        ),  # two labels, one each
        (
            '{"text": "x y", "labels": [1, 0]}\n' * 201 + '{"text": "z", "labels": [1, 1]}\n',
            [["0"]] * 201 + [["0", "1"]],
        ),
        ('text,labels\nx y,"[1, 0]"\nz,"[0, 1]"\n', [["0"], ["1"]]),
        ("text,labels,is_reply,is_quote\nx y,b,0,1\nz,a,1,0\n", [["b"], ["a"]]),
    ],
)
def test_kinds_of_0_and_1(tmp_path, text, expected):
    suffix = "jsonl" if text.startswith("{") else "tsv" if "\t" in text else "csv"
    assert names(read(write(tmp_path / f"a.{suffix}", text))) == expected


@pytest.mark.parametrize(("no", "yes"), [("0", "1"), ("False", "True")])
def test_a_label_column_with_gaps_is_not_left_out(tmp_path, no, yes):
    rows = [f"x,{no},{yes},{yes}", f"y,{yes},{no},", f"z,{yes},{yes},{no}"]
    file = write(tmp_path / "a.csv", "\n".join(["text,a,b,c", *rows, ""]))
    assert "'c' may be a label like a,b, but is not 0 or 1 in every row." in refusal(file)
    assert "line 3: 'c' must be 0 or 1, not ''" in refusal(file, label_column="a,b,c")
    assert names(read(file, label_column="a,b")) == [["b"], ["a"], ["a", "b"]]
    assert read(file, label_column="none").texts == ["x", "y", "z"]


def test_vectors_of_two_labels_are_read_as_before(tmp_path):
    rows = ['{"text": "x", "labels": [0, 1]}\n', '{"text": "y", "labels": [1, 0]}\n']
    vectors, numbers = write(tmp_path / "a.jsonl", "".join(rows)), write(tmp_path / "b.jsonl", rows[0] * 2)
    one = write(tmp_path / "one.jsonl", rows[0])
    assert names(read(one)) == [["0", "1"]]
    assert names(read(one, like=read(vectors).source)) == [["1"]]
    assert names(read(numbers, label_separator=",")) == [["0", "1"]] * 2
    assert names(read(numbers, like=read(numbers, label_separator=",").source)) == [["0", "1"]] * 2


def test_cells_that_are_neither_0_nor_1_are_named(tmp_path):
    file = write(tmp_path / "a.csv", TOXIC + "a4,ok,0,0,,0\n")
    message = refusal(file, label_column="toxic..insult")
    assert "line 6: 'threat' must be 0 or 1, not ''" in message
    assert len(read(file, label_column="toxic..insult", on_error="skip")) == 3


def test_two_readings_of_0_and_1_ask(tmp_path):
    file = write(tmp_path / "a.csv", "text,label,spam\nx y,0,1\nz,1,0\n")
    assert "Say which: --label-column label, or --label-column label,spam" in refusal(file)
    assert names(read(file, label_column="label")) == [["0"], ["1"]]
    assert names(read(file, label_column="label,spam")) == [["spam"], ["label"]]
    file = write(tmp_path / "b.csv", "some words here,0,1\nother words there,1,0\n")
    assert "no header. Name the label columns by their numbers: --label-column 1,2" in refusal(file)
    assert names(read(file, label_column="1,2")) == [["2"], ["1"]]


def test_numbers_are_features_where_the_labels_are_named(tmp_path):
    file = write(tmp_path / "a.csv", "f1,f2,happy,sad\n0.5,2,0,1\n1.5,3,1,0\n")
    assert "no column that looks like a text" in refusal(file)
    data = read(file, label_column="happy,sad")
    np.testing.assert_array_equal(data.features, [[0.5, 2], [1.5, 3]])
    assert names(data) == [["sad"], ["happy"]]
    data = read(file, label_column="happy,sad", vector_column="f2")
    np.testing.assert_array_equal(data.features, [[2], [3]])


@pytest.mark.parametrize("gap", ["", "nan", "NA", "?"])
def test_a_column_of_numbers_with_gaps_is_no_text(tmp_path, gap):
    body = "".join(f"{i}.5,{i % 3 if i != 4 else gap},{'ab'[i % 2]}\n" for i in range(9))
    file = write(tmp_path / "a.csv", f"f1,f2,kind\n{body}")
    assert f"line 6: 'f2' must be a finite number, not '{gap}'" in refusal(file, label_column="kind")
    assert read(file, label_column="kind", on_error="skip").features.shape == (8, 2)
    assert read(file, label_column="kind", vector_column="f1").features.shape == (9, 1)


@pytest.mark.parametrize("name", ["", "Unnamed: 0", "__index_level_0__"])
def test_row_numbers_of_pandas_are_no_feature(tmp_path, name):
    file = write(tmp_path / "a.csv", f"{name},f1,kind\n0,0.5,a\n1,1.5,b\n")
    assert read(file, label_column="kind").features.tolist() == [[0.5], [1.5]]
    if name:
        assert read(file, label_column="kind", vector_column=f"{name},f1").features.shape == (2, 2)


# Headers, separators and quotes


def test_the_text_is_found_by_name_by_part_of_a_name_and_by_length(tmp_path):
    body = "a,{}\n1,a long text of words,x\n2,another text of words,y\n3,some more text,x\n"
    for header in ("tweet,labels", "tweet_content,labels", "Utterance,labels", "review,genres"):
        data = read(write(tmp_path / "a.csv", body.format(header)))
        assert data.texts[0] == "a long text of words"
    file = write(tmp_path / "b.csv", "headline,story,labels\nfirst one,second one,x\nanother,some more,y\n")
    assert "the text may be in" in refusal(file)
    assert read(file, text_column="headline,story").texts == ["first one\nsecond one", "another\nsome more"]


def test_columns_named_twice_are_found_by_number_later_too(tmp_path):
    file = write(tmp_path / "a.csv", "text,labels,labels\na b,x,p\nc d,y,q\n")
    data = read(file, label_column="2", label_separator=",")
    assert names(data) == [["p"], ["q"]]
    assert names(read(file, like=data.source)) == [["p"], ["q"]]
    made = rewrite(file, tmp_path / "b", data, {0: Change(add=frozenset("z"))})
    assert made.read_text() == 'text,labels,labels\na b,x,"p,z"\nc d,y,q\n'


def test_label_columns_need_names_of_their_own(tmp_path):
    file = write(tmp_path / "a.csv", "text,foo,foo,\na b,1,0,0\nc d,0,1,0\ne f,0,0,1\n")
    assert "has 2 label columns named 'foo'. Rename them" in refusal(file)
    assert "has a label column without a name" in refusal(file, label_column="2..3")


@pytest.mark.parametrize("cells", [("red", "blue"), ("2024-01-31", "2024-02-28"), ("09:30", "10:45 CET")])
def test_dates_and_categories_beside_numbers_are_not_taken_for_the_text(tmp_path, cells):
    rows = "".join(f"1.5,{cells[i % 2]},{i % 2},{i % 3 % 2}\n" for i in range(6))
    file = write(tmp_path / "a.csv", f"width,kind,A,B\n{rows}")
    for options in ({}, {"label_column": "A,B"}):
        message = refusal(file, **options)
        assert "'kind' may be the text, or a feature like 'width'" in message
        assert "--text-column kind, or --text-column none" in message
    assert read(file, text_column="kind").texts[1] == cells[1]
    assert read(file, text_column="none", label_column="A,B").features.shape == (6, 1)


def test_wrong_numbers_name_their_column(tmp_path):
    file = write(tmp_path / "a.csv", "width,height,A,B\n1,2,0,1\n3,,1,0\n5,6,1,0\n")
    assert "line 3: 'height' must be a finite number, not ''" in refusal(file, label_column="A,B")
    file = write(tmp_path / "b.csv", "width,height,A,B\n1,2,0,1\n3,inf,1,0\n5,6,1,0\n")
    assert "line 3: 'height' must be a finite number, not 'inf'" in refusal(file, label_column="A,B")


def test_decimal_commas_are_refused_by_name(tmp_path):
    file = write(tmp_path / "a.csv", "width;height;A;B\n1,5;2;0;1\n3;4;1;0\n-5,25;6;1;0\n")
    for options in ({}, {"label_column": "A,B"}, {"label_column": "A,B", "text_column": "none"}):
        assert "'width' has decimal commas, as in '1,5'. Write them as points" in refusal(file, **options)
    beside = write(tmp_path / "b.csv", 'story,codes,labels\nred ripe apple,"1,5",x\nblue sky above,"2,7",y\n')
    assert read(beside).texts == ["red ripe apple", "blue sky above"]
    vectors = {"label_column": "A,B", "vector_column": "width,height"}
    assert "line 2: 'width' must be a number with a decimal point, not '1,5'" in refusal(file, **vectors)


@pytest.mark.parametrize(("no", "yes"), [("no", "yes"), ("N", "Y"), ("No", "Yes")])
def test_label_columns_of_yes_and_no(tmp_path, no, yes):
    file = write(tmp_path / "a.csv", f"text,A,B\na b,{yes},{no}\nc d,{no},{yes}\ne f,{no},{no}\n")
    data = read(file)
    assert names(data) == names(read(file, label_column="A,B")) == [["A"], ["B"], []]
    made = rewrite(file, tmp_path / "b", data, {2: Change(add=frozenset("A"))})
    assert made.read_text().splitlines()[3] == f"e f,{yes},{no}"


def test_empty_cells_of_label_columns_are_refused_with_what_to_do(tmp_path):
    file = write(tmp_path / "a.csv", "text,A,B\na b,1,\nc d,,1\ne f,,1\n")
    assert "'B' must be 0 or 1, not '' (write 0 where the label does not apply)" in refusal(file, label_column="A,B")


@pytest.mark.parametrize(("delimiter", "name"), [("\t", "tab"), (",", ","), ("|", "'|'")])
def test_another_separator_than_that_of_the_run_is_named(tmp_path, delimiter, name):
    file = write(tmp_path / "a.csv", "text;labels\na b;x\nc d;y\n")
    later = write(tmp_path / "b.csv", "text;labels\na b;x\n".replace(";", delimiter))
    before = read(file).source
    assert f"has no column 'text', unless its columns are separated otherwise: --delimiter {name}." in refusal(
        later, like=before
    )
    assert names(read(later, like=before, delimiter=delimiter)) == [["x"]]


def test_columns_named_twice_and_missing_are_refused(tmp_path):
    file = write(tmp_path / "a.csv", "text,labels,labels\nx y,a,b\n")
    assert "has 2 columns named 'labels'" in refusal(file)
    assert names(read(file, label_column="2")) == [["b"]]
    assert "`label_column` must be a column of the file (text, labels, labels), got 'tags'" in refusal(
        file, label_column="tags"
    )


@pytest.mark.parametrize(
    ("text", "delimiter"),
    [
        ("text;labels\nred, ripe;a,b\nblue;b\n", ";"),
        ("text|labels\nred, ripe|a,b\nblue|b\n", "|"),
        ("text\tlabels\nred, ripe\ta,b\nblue\tb\n", "\t"),
        ('text,labels\n"red, ripe","a,b"\nblue,b\n', ","),
        ('text,labels,\n"red, ripe","a,b",\nblue,b,\n', ","),  # separators at the end of all lines
        ('text,labels\n"red, ripe","a,b",\nblue,b,,\n', ","),  # of some
        ("text;labels\r\nred, ripe;a,b\r\nblue;b\r\n", ";"),
        ("text;labels\rred, ripe;a,b\rblue;b\r", ";"),
        ("sep=;\ntext;labels\nred, ripe;a,b\nblue;b\n", ";"),  # spreadsheets
        ("\ufefftext;labels\nred, ripe;a,b\nblue;b\n", ";"),
    ],
)
def test_separators_of_columns(tmp_path, text, delimiter):
    data = read(write(tmp_path / "a.csv", text))
    assert data.texts == ["red, ripe", "blue"]
    assert names(data) == [["a", "b"], ["b"]]
    assert data.source["options"]["delimiter"] == delimiter
    assert ("(guessed)" in data.source["how"].split(";")[0]) == (delimiter != "," and "sep=" not in text)
    assert data.row_numbers().tolist() == [0, 1]


def test_two_separators_of_columns_that_fit_ask(tmp_path):
    file = write(tmp_path / "a.csv", "red apple;a,b\nblue sky;c,d\n")
    assert "may be separated by ',' or ';'" in refusal(file)
    assert "--delimiter" in refusal(file)
    assert names(read(file, delimiter=";")) == [["a", "b"], ["c", "d"]]
    assert "`delimiter` must be one character" in refusal(file, delimiter="ab")


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["a,b", "c"], ","),
        (["a;b", "c d"], ";"),
        (["a|b", "c"], "|"),
        (["new york, new jersey", "new york"], ","),
        (["joy", "fear"], ","),
        (["red blue", "red", "blue green", "green"], " "),
        (["science fiction", "drama", "romantic comedy"] * 10, ""),
        (["['a', 'b']", '["c"]'], ","),
    ],
)
def test_separators_of_labels(cells, expected):
    assert guess_separator(cells) == expected


@pytest.mark.parametrize("cells", [["a;b,c"], ["a,b", "c|d"], ["science fiction", "drama"]])
def test_two_separators_of_labels_that_fit_ask(tmp_path, cells):
    with pytest.raises(Ambiguous, match="may be"):
        guess_separator(cells)
    file = write(tmp_path / "a.tsv", "text\tlabels\n" + "".join(f"x\t{c}\n" for c in cells))
    assert "--label-separator" in refusal(file)
    assert names(read(file, label_separator="none")) == [[c] for c in cells]
    file = write(tmp_path / "a.jsonl", "".join(json.dumps({"text": "x", "labels": c}) + "\n" for c in cells))
    assert "--label-separator" in refusal(file)


def labelled(path, cells):
    """Write a table of texts with these cells of labels."""
    if path.suffix == ".parquet":
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.table({"text": ["x"] * len(cells), "labels": cells}), path)
        return path
    if path.suffix == ".jsonl":
        lines = [json.dumps({"text": "x", "labels": cell}) for cell in cells]
    else:
        lines = ["text,labels", *(f'x,"{cell}"' for cell in cells)]
    return write(path, "\n".join([*lines, ""]))


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize(
    ("first", "later", "message"),
    [
        (["a", "b"], ["a;b"], "may be separated by ';', as in 'a;b'"),
        (["a", "b"], ["a, b|c"], "may be separated by ',' or by '|', as in 'a, b|c'"),
        (["a", "b"], ["a b"], "may be separated by spaces, as in 'a b'"),
        (["a", "b"], ["a b", "c d"] * 40, "may be one name or several separated by spaces"),
        (["a b", "b a", "a c", "c b"], ["a,b"], "may be separated by ',', as in 'a,b'"),
        (["new york", "los angeles"], ["new york, santa fe"], "may be separated by ',', as in 'new york, santa fe'"),
    ],
)
def test_a_separator_of_labels_that_only_later_rows_show_asks(tmp_path, kind, first, later, message):
    cells = (first * 150)[:300] + later
    file = labelled(tmp_path / f"a.{kind}", cells)
    assert message in (said := refusal(file))
    assert "Say which: --label-separator" in said
    assert message in refusal(file, on_error="skip")
    assert names(read(file, label_separator="none")) == [[cell] for cell in cells]


@pytest.mark.parametrize(
    ("first", "later", "expected"),
    [
        (["a", "b"], ["a,b", "b c", "x;y"], [["a", "b"], ["b c"], ["x;y"]]),  # the comma is shown before the others
        (["a", "b"], ["new york"], [["new york"]]),
        (["", "a"], ["['a b', 'c;d']"], [["a b", "c;d"]]),
        (["new york", "los angeles"], ["santa fe"], [["santa fe"]]),
    ],
)
def test_later_rows_that_fit_the_separator_are_read(tmp_path, first, later, expected):
    assert names(read(labelled(tmp_path / "a.csv", (first * 150)[:300] + later)))[300:] == expected


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_a_header_longer_than_what_is_looked_at_shows_the_separator(tmp_path, delimiter, mark):
    more = [f"column{i}" for i in range(30_000)]
    rows = [["text", "labels", *more], *([f"a text {i}", "ab"[i % 2], *(["0"] * len(more))] for i in range(3))]
    path = tmp_path / "wide.csv"
    path.write_text(mark + "".join(delimiter.join(row) + "\n" for row in rows), "utf-8")
    data = read(path)
    assert (len(data), data.label_names, data.texts[0]) == (3, ["a", "b"], "a text 0")


def test_a_header_longer_than_what_is_looked_at_may_leave_the_separator_open(tmp_path):
    path = tmp_path / "wide.csv"
    path.write_text(";".join(f"name,{i}" for i in range(40_000)) + "\n" + "1;2\n")
    with pytest.raises(DataError, match=r"may be separated by ',' or ';', as in .*Say which: --delimiter"):
        read(path)


def test_a_header_is_told_from_rows_or_asked_for(tmp_path):
    file = write(
        tmp_path / "a.tsv", "what\twhy\n" + "a text of several words\tgood\n" * 3 + "and some more words\tbad\n"
    )
    assert "may be a header or a row" in refusal(file)
    assert len(read(file, header=True)) == 4
    assert len(read(file, header=False)) == 5
    assert len(read(file, text_column="what", label_column="why")) == 4
    file = write(tmp_path / "b.tsv", "what\twhy\na text of words\t1,3\nsome words\t2\n")
    assert len(read(file, header=False)) == 3
    file = write(tmp_path / "c.tsv", "utterance\tmood\nsome words\t2\nmore of the words\t1\n")  # numbers below a word
    assert names(read(file, label_column="mood")) == [["2"], ["1"]]


def test_quotes_in_tsv(tmp_path):
    file = write(tmp_path / "a.tsv", 'text\tlabels\n"a ""b""\nc"\t"[""x"", ""y""]"\nd\tz\n')  # as pandas writes it
    data = read(file)
    assert data.texts == ['a "b"\nc', "d"]
    assert names(data) == [["x", "y"], ["z"]]
    file = write(tmp_path / "b.tsv", 'text\tlabels\n"Hi" she said\tx\n"quoted"\ty\n"open\tz\n')
    assert read(file).texts == ['"Hi" she said', '"quoted"', '"open']


def test_empty_label_cells_and_repeated_labels(tmp_path):
    data = read(write(tmp_path / "a.csv", 'text,labels\nx,"a,a, b,"\ny,\nz,  \n'))
    assert names(data) == [["a", "b"], [], []]


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("['a', 'b']", ["a", "b"]),
        ('["a", "b"]', ["a", "b"]),
        ("['it\\'s', \"x\"]", ["it's", "x"]),
        ("['a' 'b'\n 'c']", ["a", "b", "c"]),  # NumPy
        ("{'a', 'b'}", ["a", "b"]),
        ("('a',)", ["a"]),
        ("[np.str_('a')]", ["a"]),
        ("[1, 2]", ["1", "2"]),
        ("['a, b', 'c']", ["a, b", "c"]),
        ("[]", []),
        ("set()", []),
        ("()", []),
        ("(none)", ["(none)"]),
    ],
)
def test_lists_in_cells(cell, expected):
    assert split_labels(cell, ",") == expected


@pytest.mark.parametrize("cell", ["[a]", "[{'id': 1}]", "['a'", "['a', ...]", "{'a': 1}", '["\\ud83d"]', "['\\ud83d']"])
def test_lists_that_cannot_be_read(cell):
    if cell == "['a'":
        assert split_labels(cell, ",") == ["['a'"]
    else:
        with pytest.raises(ValueError, match="labels must be"):
            split_labels(cell, ",")


# Other formats


def test_a_txt_file_is_one_text_per_line(tmp_path):
    file = write(tmp_path / "a.txt", "First, a line with, commas\n\nand; another\tone\nthird line\n")
    data = read(file)
    assert data.texts == ["First, a line with, commas", "and; another\tone", "third line"]
    assert data.row_numbers().tolist() == [0, 2, 3]
    assert data.source["how"] == "one text per line"
    assert [t for p in stream(file, 2) for t in p.texts] == data.texts


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("3 5 9\n0,8 0:0.5 4:2\n1:1\n8 2:1\n", "svm"),
        ("1,2 3:4\n5 1:1\n", "svm"),
        ("__label__a __label__b some text\n", "fasttext"),
        ('{"text": "a"}\n', "jsonl"),
        ('[{"text": "a"}]\n', "json"),
        ("a text\tx,y\nanother\tz\n", "tsv"),
        ("text,labels\nred,a\n", "csv"),
        ("at 10:30 we left\nso it is\n", "txt"),
        ("a, b\nc, d\n", "txt"),
        ("1 2 3 go\n", "txt"),
    ],
)
def test_what_a_txt_file_may_hold(tmp_path, text, kind):
    from lastlayer.data.read import sniff

    assert sniff(write(tmp_path / "a.txt", text)) == kind


def test_fasttext(tmp_path):
    data = read(write(tmp_path / "a.txt", "__label__red __label__big-one a red, big thing\nno label\n__label__red x\n"))
    assert data.texts == ["a red, big thing", "no label", "x"]
    assert names(data) == [["big-one", "red"], [], ["red"]]


@pytest.mark.parametrize("indent", [None, 1])
def test_json_arrays(tmp_path, indent):
    rows = [{"text": f"row {i} " + "x" * 1000 * (i == 2), "labels": ["a"] * (i % 2), "id": i} for i in range(5)]
    file = write(tmp_path / "a.json", json.dumps(rows, indent=indent))
    data = read(file)
    assert data.texts == [r["text"] for r in rows]
    assert data.ids == ["0", "1", "2", "3", "4"]
    assert names(data) == [r["labels"] for r in rows]
    write(file, "\n".join(map(json.dumps, rows)))  # JSON lines under the name .json
    assert read(file).texts == data.texts


@pytest.mark.parametrize("name", ["a.json", "a.json.xz", "a"])
def test_json_array_in_one_long_line(tmp_path, name):
    rng = np.random.default_rng(0)  # random letters stay long when they are compressed
    rows = [{"text": rng.bytes(500).hex(), "labels": ["a"] * (i % 2)} for i in range(1000)]
    text = json.dumps(rows)
    (tmp_path / name).write_bytes(lzma.compress(text.encode()) if name.endswith("xz") else text.encode())
    assert read(tmp_path / name).texts == [row["text"] for row in rows]
    write(tmp_path / "b", "\n".join(json.dumps(row) for row in [{"text": "x" * 300_000}, *rows]))
    assert len(read(tmp_path / "b")) == 1001


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"data": 1', "must be JSON"),
        ("[1]", "line 1: must be a JSON object, got '1'"),
        ('[\n{"text": "a"},\n{"text": }]', "line 3: must be a JSON array of objects"),
        ('[{"text": "a"}', "line 1: the JSON array must end with ]"),
        ("[" * 100_000, "must be a JSON array of objects"),
        ('[{"text": "a"}]\n[{"text": "b"}]\n', 'line 2: the JSON array must be the whole file, got \'[{"text": "b"}]'),
        ('[{"text": "a"}]' + " " * 300_000 + "x", "line 1: the JSON array must be the whole file, got 'x' behind it."),
    ],
)
def test_wrong_json_arrays(tmp_path, text, message):
    assert message in refusal(write(tmp_path / "a.json", text))


def test_zip_archives_and_what_is_no_table(tmp_path):
    with zipfile.ZipFile(tmp_path / "train.csv.zip", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("train.csv", TOXIC)
        file.writestr("__MACOSX/._train.csv", "x")
    assert len(read(tmp_path / "train.csv.zip")) == 3
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as file:
        file.writestr("a.csv", TOXIC)
        file.writestr("b.csv", TOXIC)
    assert "must hold one file, holds 2 (a.csv, b.csv)" in refusal(tmp_path / "two.zip")
    with zipfile.ZipFile(tmp_path / "a.xlsx", "w") as file:
        file.writestr("[Content_Types].xml", "")
    assert "Save the sheet as CSV" in refusal(tmp_path / "a.xlsx")
    with zipfile.ZipFile(tmp_path / "bomb.csv.zip", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("bomb.csv", "text,labels\n" + "a,b\n" * 500_000)
    assert "decompresses to more than" in refusal(tmp_path / "bomb.csv.zip", limits=Limits(base_bytes=1000))
    (tmp_path / "a.csv").write_bytes(b"\x28\xb5\x2f\xfd1234")
    assert "compressed with zstd" in refusal(tmp_path / "a.csv")


def test_standard_input(monkeypatch):
    def give(text):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))

    give(TOXIC.encode())
    assert len(read("-")) == 3
    give(TOXIC.encode("utf-16"))
    assert len(read("-", format="csv")) == 3
    give(b'{"text": "a", "labels": ["x"]}\n' * 20_000)
    assert sum(len(p) for p in stream("-", 512)) == 20_000
    give(b"\x93NUMPY" + bytes(100))
    assert "standard input: npy cannot be read from a pipe" in refusal("-")


# Encodings


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "latin-1", "cp1252", "utf-8-sig"])
def test_encodings(tmp_path, encoding):
    file = write(tmp_path / "a.csv", "text,labels\ncafé Ċ,é\n".replace("Ċ", "x"), encoding)
    told = encoding in ("latin-1", "cp1252", "utf-16-le")
    data = read(file, encoding=encoding if told else None)
    assert data.texts == ["café x"]
    assert names(data) == [["é"]]
    if encoding in ("utf-16", "latin-1"):
        assert "encoding" in data.source["how"]
    again = list(stream(file, 1, like=data.source))
    assert again[0].texts == data.texts


def test_the_wrong_encoding_is_named(tmp_path):
    file = write(tmp_path / "a.csv", "text,labels\ncafé,x\n", "latin-1")
    assert "line 2: must be UTF-8 text (another encoding must be named: --encoding latin-1" in refusal(file)
    assert "`encoding` must be an encoding of text that Python knows" in refusal(file, encoding="nope")
    assert "`encoding` must be" in refusal(file, encoding="base64")
    assert "is it UTF-16?" in refusal(write(tmp_path / "b.csv", "text,labels\na,x\n", "utf-16-le"))
    (tmp_path / "c.csv").write_bytes("text,labels\na,x\n".encode("utf-16")[:-1])
    assert "must be utf-16 text" in refusal(tmp_path / "c.csv")


def test_half_an_emoji_is_mended_in_texts_and_refused_in_names(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "ok", "labels": ["a"]}\n{"text": "lovely \\ud83d", "labels": ["a"]}\n')
    data = read(file)
    assert data.texts == ["ok", "lovely \ufffd"]
    assert data.problems.mended == 1
    assert "a.jsonl, line 2: half of a surrogate pair in the text" in data.problems.mended_first
    "".join(data.texts).encode()
    for wrong in ('"labels": ["\\ud83d"]', '"labels": ["a"], "id": "\\ud83d"', '"labels": ["a"], "group": "\\ude00"'):
        file.write_text('{"text": "ok", ' + wrong + "}\n")
        assert "line 1" in refusal(file)
        assert "surrogate" in refusal(file)
        refusal(file).encode()
    file.write_text('{"text": "fine \\ud83d\\ude00", "labels": ["a"]}\n')
    assert read(file).texts == ["fine \U0001f600"]


# Weights, and the numbers of rows


def test_weights(tmp_path):
    file = write(tmp_path / "a.csv", "text,labels,weight\nx,a,1\ny,b,0.25\nz,a,0\n")
    data = read(file)
    assert data.weights.tolist() == [1, 0.25, 0]
    assert data.take(np.array([1])).weights.tolist() == [0.25]
    assert data.fingerprint() != read(file, weight_column="none").fingerprint()
    assert "weight in 'weight'" in data.source["how"]
    assert read(write(tmp_path / "b.jsonl", '{"text": "x", "labels": ["a"], "weight": 2}')).weights.tolist() == [2]
    for wrong in ("-1", "nan", "inf", "x", ""):
        assert "line 2: weight must be" in refusal(write(tmp_path / "c.csv", f"text,labels,weight\nx,a,{wrong}\n"))
    np.savez(tmp_path / "a.npz", X=np.ones((2, 1)), Y=np.ones((2, 1)), weights=np.array([1, 3]))
    assert read(tmp_path / "a.npz").weights.tolist() == [1, 3]
    np.savez(tmp_path / "a.npz", X=np.ones((2, 1)), Y=np.ones((2, 1)), weights=np.array([1, -3]))
    assert "weights must be" in refusal(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.tsv", "text\tlabels\nx\ta\n\ny\tb\nbad\nz\ta\n", [0, 2, 4]),
        ("a.csv", 'text,labels\n"x\nx",a\n\ny,b\nbad\nz,a\n', [0, 2, 4]),
        ("a.jsonl", '{"text": "x"}\n\n{"text": "y"}\nbad\n{"text": "z"}\n', [0, 2, 4]),
        ("a.svm", "1 1:1\n\n1 2:1\nbad x\n2 1:1\n", [0, 2, 4]),
        ("a.json", '[{"text": "x"}, 1, {"text": "y"}, 2, {"text": "z"}]', [0, 2, 4]),
        ("a.csv", b"text,labels\nx,a\n\xff\xfe,b\ny,b\nbad\nz,a\n", [0, 2, 4]),
    ],
)
def test_rows_keep_their_numbers(tmp_path, name, text, expected):
    file = tmp_path / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert read(file, on_error="skip").row_numbers().tolist() == expected
    streamed = [i for part in stream(file, 2, on_error="skip") for i in part.row_numbers().tolist()]
    assert streamed == expected
    assert read(file, on_error="skip").take(np.array([2, 0])).row_numbers().tolist() == [4, 0]


# As before


def test_a_file_is_read_like_the_one_before(tmp_path):
    train = read(write(tmp_path / "a.csv", "what;why;when\nred, ripe;a|b;1\nblue;b;2\n"), text_column="what",
                 label_column="why", id_column="when", label_separator="|")  # fmt: skip
    like = json.loads(json.dumps(train.source))  # as a run folder keeps it
    data = read(write(tmp_path / "b.csv", "when;what\n7;new, one\n"), like=like)
    assert data.texts == ["new, one"]
    assert data.ids == ["7"]
    data = read(write(tmp_path / "c.csv", "why;what;extra\nb|a;new;1\n"), like=like)
    assert names(data) == [["a", "b"]]
    assert "has no column 'what', where the run's training rows have their text" in refusal(
        write(tmp_path / "d.csv", "text;why\nx;a\n"), like=like
    )
    assert read(tmp_path / "d.csv", like=like, text_column="text").texts == ["x"]
    assert read(write(tmp_path / "e.txt", "a, b\nc\n"), like=like).texts == ["a, b", "c"]
    assert read(write(tmp_path / "f.jsonl", '{"what": "x", "text": "y"}'), like=like).texts == ["x"]
    assert read(write(tmp_path / "g", "what;why\nx;a\n"), like=like).texts == ["x"]
    assert read(write(tmp_path / "h", "what\nx\n"), like=like).texts == ["x"]
    assert read(write(tmp_path / "i", "hello, world\n"), like=like).texts == ["hello, world"]


def test_a_file_without_a_header_is_read_like_the_one_before(tmp_path):
    train = read(write(tmp_path / "a.tsv", "a\tsome red text of words\nb,a\tand a blue one\n"))
    like = json.loads(json.dumps(train.source))
    assert read(write(tmp_path / "b.tsv", "a long cell of label names here\tx\n"), like=like).texts == ["x"]
    assert "the run's training rows had none" in refusal(write(tmp_path / "d.tsv", "labels\ttext\na\tred\n"), like=like)
    assert read(tmp_path / "d.tsv", like=like, header=True).texts == ["red"]
    assert "has no column '1'" in refusal(write(tmp_path / "c.tsv", "only a text\n"), like=like)
    assert read(tmp_path / "c.tsv", like=like, text_column="0", label_column="none").texts == ["only a text"]


def test_label_columns_like_before_are_all_there_or_none(tmp_path):
    like = read(write(tmp_path / "a.csv", TOXIC)).source
    data = read(write(tmp_path / "b.csv", "id,comment_text\n1,hello\n"), like=like)
    assert data.texts == ["hello"]
    assert data.n_labels == 0
    assert "not 'obscene'" in refusal(write(tmp_path / "c.csv", "id,comment_text,toxic\n1,hello,0\n"), like=like)
    assert read(tmp_path / "c.csv", like=like, label_column="none").texts == ["hello"]


# Hostile files


def test_the_indices_of_a_stream_are_checked(tmp_path):
    file = write(tmp_path / "a.svm", "a 1:7 90000000:1\n")
    with pytest.raises(DataError, match="line 1: feature indices must be below 4"):
        list(stream(file, 2, n_features=3))
    with pytest.raises(DataError, match="must start at 1"):
        list(stream(write(file, "a 1:7\nb 0:1\n"), 1, n_features=3))
    with pytest.raises(DataError, match="line 1: feature indices must be below 3"):
        list(stream(write(file, "a 3:7\n"), 1, n_features=3, zero_based=True))
    assert [p.features.shape for p in stream(write(file, "a 3:7\n"), 1, n_features=3)] == [(1, 3)]


def test_declared_sizes_are_bounded_by_the_file(tmp_path):
    file = write(tmp_path / "a.svm", "2 5 100000000\n0 0:1\n1 1:1\n")
    for read_it in (read, lambda f: list(stream(f, 1))):
        with pytest.raises(DataError, match="line 1: the header must declare at most"):
            read_it(file)
    for shape in ("(288230376151711744, 0)", "(0, 100000000)"):
        header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
        raw = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()
        (tmp_path / "a.npy").write_bytes(raw)
        assert "must hold the shape of an array with entries" in refusal(tmp_path / "a.npy")
        with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
            archive.writestr("X.npy", raw)
        assert "must hold the shape of an array with entries" in refusal(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", X=np.ones((1, 1)), Y_indices=np.array([99_999_999]), Y_indptr=np.array([0, 1]))
    assert "must declare at most" in refusal(tmp_path / "b.npz")
    np.savez(tmp_path / "b.npz", X=np.ones((3, 0)))
    assert "at least one column" in refusal(tmp_path / "b.npz")


@pytest.mark.parametrize(
    "raw", [b"\x93NUMPY\x01\0", b"\x93NUMPY", b"\x93NUMPY\x01\0\0\0\0\0", b"\x93NUMPY\x02\0\1\0\0\0"]
)
def test_short_npy_files(tmp_path, raw):
    (tmp_path / "a.npy").write_bytes(raw)
    assert "must be a NumPy array" in refusal(tmp_path / "a.npy")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-be"])
def test_xml_entities_are_refused_in_every_encoding(tmp_path, encoding):
    write(tmp_path / "a.arff", "@relation a\n@attribute x numeric\n@attribute y {0,1}\n@data\n1,1\n")
    text = '<!DOCTYPE a [<!ENTITY b "y">]><labels><label name="&b;"/></labels>'
    text = f'<?xml version="1.0" encoding="{encoding[:6] if encoding != "utf-8" else encoding}"?>' + text
    write(tmp_path / "a.xml", ("\ufeff" if encoding.endswith("be") else "") + text, encoding)
    assert "XML without a document type" in refusal(tmp_path / "a.arff")
    write(tmp_path / "a.xml", '<?xml version="1.0"?><labels><label name="y"/></labels>')
    assert names(read(tmp_path / "a.arff")) == [["y"]]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"text": "a b", "labels": [""]}\n{"text": "c d", "labels": ["x", " "]}\n'),
        ("a.json", '[{"text": "a b", "labels": [""]}, {"text": "c d", "labels": ["x", " "]}]'),
        ("a.tsv", 'text\tlabels\na b\t[""]\nc d\t["x", " "]\n'),
        ("b.tsv", "text\tlabels\na b\t['']\nc d\t['x', ' ']\n"),
    ],
)
def test_an_empty_name_in_a_list_is_no_label(tmp_path, name, content):
    data = read(write(tmp_path / name, content))
    assert data.label_names == ["x"]
    assert [data.names(row) for row in range(2)] == [[], ["x"]]
