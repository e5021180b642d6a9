"""Texts to features: the analyzers, which one is chosen, and rows without a known word."""

import json
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.feature_extraction.text import TfidfVectorizer
from train_tools import make_rows

from lastlayer import load
from lastlayer.data import DataError, LabelData, read
from lastlayer.train import Config, FeatureMap, train
from lastlayer.train.config import ConfigError
from lastlayer.train.features import _analyzer, _vectorizer, choose_analyzer

TEXTS = ["A red apple, and a red sky", "the sky is blue; the sea too", "red wine", "blue cheese and red wine"]


def rows(texts):
    return LabelData.from_lists([["a"]] * len(texts), texts=texts)


@pytest.mark.parametrize(
    ("analyzer", "ngrams", "expected"),
    [("word", "auto", (1, 1)), ("word", "2", (1, 2)), ("char", "auto", (1, 3)), ("char", "2-4", (2, 4)),
     ("char_wb", "3-3", (3, 3)), ("word", 2, (1, 2))],
)  # fmt: skip
def test_each_analyzer_is_that_of_scikit_learn(analyzer, ngrams, expected):
    features = FeatureMap.fit(rows(TEXTS), Config(analyzer=analyzer, ngrams=ngrams, min_rows=1))
    peer = TfidfVectorizer(analyzer=analyzer, ngram_range=expected, sublinear_tf=True).fit(TEXTS)
    assert features.state["vocabulary"] == list(peer.get_feature_names_out())
    again = FeatureMap(json.loads(json.dumps(features.state)))
    np.testing.assert_allclose(again(rows(TEXTS)).toarray(), peer.transform(TEXTS).toarray(), atol=1e-6)


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(st.sampled_from("aB c\u0301d\n\t._9éßİ東京\u0e27 \u093f\U0001f600"), max_size=30),
    analyzer=st.sampled_from(["word", "char", "char_wb"]),
    low=st.integers(1, 3),
    more=st.integers(0, 3),
    marks=st.booleans(),
)
def test_words_and_sequences_are_those_of_scikit_learn(text, analyzer, low, more, marks):
    state = {"kind": "tfidf", "analyzer": analyzer, "ngrams": [low, low + more], "marks": marks}
    assert sorted(_analyzer(state)(text)) == sorted(_vectorizer(state).build_analyzer()(text))


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["今天天气很好。我们去公园散步。", "他们在学校学习数学。"], "char"),
        (["東京タワーへ行きました。"], "char"),
        (["วันนี้อากาศดีมาก"], "char"),
        (["ខ្ញុំស្រលាញ់អ្នក"], "char"),
        (["ACGTTAGCATCGATCGATCGGCTAGCTAGGATC", "TTAGCATCGATCGATCGGCTAGCTAGGATCAA"], "char"),
        (["오늘 날씨가 좋습니다"], "word"),
        (["aujourd'hui il fait beau", "東"], "word"),
        (["यह हिन्दी है"], "word"),
        (["", "!!!"], "word"),
    ],
)
def test_auto_looks_at_the_texts(texts, expected):
    assert choose_analyzer(texts) == expected


def test_texts_without_spaces_are_learnt():
    """Each label has two characters of its own, among others, without a space."""
    rng = np.random.default_rng(0)
    pairs = [chr(0x4E00 + 2 * i) + chr(0x4E01 + 2 * i) for i in range(4)]
    label = rng.integers(0, 4, 200)
    noise = lambda: "".join(chr(0x5E00 + rng.integers(50)) for _ in range(10))  # noqa: E731
    texts = [noise() + pairs[i] + noise() for i in label]
    data = LabelData.from_lists([[str(i)] for i in label], texts=texts)
    features = FeatureMap.fit(data, Config())
    assert features.state["analyzer"] == "char"
    assert features.unknown_rows(features(data)) == 0
    assert {p in features.state["vocabulary"] for p in pairs} == {True}
    words = FeatureMap.fit(data, Config(analyzer="word", min_rows=1))
    assert words.unknown_rows(words(rows([noise() + pairs[0] for _ in range(9)]))) == 9


def test_marks_stay_with_their_letters():
    features = FeatureMap.fit(rows(["हिन्दी में", "हिन्दी भाषा", "cafe\u0301 noir"]), Config(min_rows=1))
    assert "हिन्दी" in features.state["vocabulary"]
    assert "cafe\u0301" in features.state["vocabulary"]


def test_rows_without_a_known_word_are_counted_and_said():
    features = FeatureMap.fit(rows(TEXTS), Config(min_rows=1))
    x = features(rows(["red", "unseen thing", "", "sky"]))
    assert features.unknown_rows(x) == 2
    assert "2 of 4 rows have no known word" in features.note(2, 4)
    assert features.note(1, 100) is None
    assert features.note(2, 100) is not None
    assert features.note(0, 0) is None
    dense = FeatureMap.fit(LabelData.from_lists([["a"]], features=np.zeros((1, 2), np.float32)), Config())
    assert dense.unknown_rows(np.zeros((1, 2))) == 0


def test_states_of_version_0_1_mean_what_they_meant():
    state = {"kind": "tfidf", "n_features": 2, "ngrams": 2, "vocabulary": ["red", "red wine"], "idf": [1.0, 1.0]}
    x = FeatureMap(state)(rows(["red wine", "white wine"]))
    np.testing.assert_allclose(x.toarray(), [[2**-0.5, 2**-0.5], [0, 0]], atol=1e-6)
    hashed = FeatureMap({"kind": "hashing", "n_features": 16, "ngrams": 1})(rows(TEXTS))
    assert hashed.shape == (4, 16)


@pytest.mark.parametrize("change", [{"analyzer": "x"}, {"ngrams": [3, 2]}, {"ngrams": None}, {"ngrams": [1]}])
def test_damaged_states_are_refused(change):
    state = FeatureMap.fit(rows(TEXTS), Config(min_rows=1)).state
    with pytest.raises(DataError, match=r"features\.json: damaged"):
        FeatureMap({**state, **change})


@pytest.mark.parametrize("wrong", ["0", "3-2", "2-11", "x", "1-", "-", "", True])
def test_wrong_ngrams_are_refused(wrong):
    with pytest.raises(ConfigError, match="`ngrams` must be auto, a length from 1 to 10 or a range such as 2-4"):
        Config(ngrams=wrong)


def test_training_and_evaluation_note_rows_without_a_known_word(tmp_path):
    from lastlayer.train import evaluate, train

    data = make_rows(60)
    test = rows(["unseen"] * 5 + ["word1"] * 5).with_labels(data.label_names)[0]
    test = LabelData.from_lists([["label1"]] * 10, label_names=data.label_names, texts=test.texts)
    run = train(
        {"train": data, "test": test}, Config(loss="lml", epochs=1, bootstrap=0, accelerator="cpu"), tmp_path / "run"
    )
    assert any("5 of 10 rows of the test part have no known word" in note for note in run.metrics()["notes"])
    found = evaluate(run, test)
    assert any("5 of 10 rows have no known word" in note for note in found["notes"])
    with pytest.raises(DataError, match="all labels are unknown to the run: new"):
        evaluate(run, LabelData.from_lists([["new"]], texts=["word1"]))
    with pytest.raises(DataError, match="no row has a label"):
        evaluate(run, LabelData.from_lists([[]], texts=["word1"]))


def test_features_are_scaled_by_row_weights():
    rng = np.random.default_rng(0)
    x, times = rng.normal(size=(50, 3)).astype(np.float32) * [1.0, 5.0, 0.0] + [0.0, 2.0, 0.1], rng.integers(0, 4, 50)
    x[times == 0] = 1e4  # rows of weight 0 are as if they were absent
    again = np.repeat(np.arange(50), times)

    def scaled(rows, weights=None):
        labels = LabelData.from_lists([["a"]] * len(rows), features=x[rows], weights=weights)
        return FeatureMap.fit(labels, Config()).transform(x)

    np.testing.assert_allclose(scaled(np.arange(50), times.astype(float)), scaled(again), rtol=1e-5, atol=1e-6)
    used = np.flatnonzero(times)
    np.testing.assert_array_equal(scaled(np.arange(50), (times > 0).astype(float)), scaled(used))
    np.testing.assert_array_equal(scaled(np.arange(50), np.full(50, 2.0)), scaled(np.arange(50)))


def test_a_constant_feature_is_not_blown_up():
    labels = LabelData.from_lists([["a"]] * 49, features=np.full((49, 1), 0.1))
    new = FeatureMap.fit(labels, Config()).transform(np.array([[0.1], [0.2]]))
    np.testing.assert_allclose(new, [[0], [0.1]], atol=1e-6)


def test_rows_of_weight_0_teach_no_words():
    rows = LabelData.from_lists([["a"]] * 6, texts=["red apple"] * 3 + ["green pear"] * 3)
    weighted = replace(rows, weights=np.array([1.0, 2, 1, 0, 0, 0]))
    expected = FeatureMap.fit(rows.take(np.arange(3)), Config())
    assert FeatureMap.fit(weighted, Config()).state == expected.state
    assert FeatureMap.fit(replace(rows, weights=np.zeros(6)), Config()).state == FeatureMap.fit(rows, Config()).state


def test_large_numbers_keep_their_spread():
    x = np.random.default_rng(0).normal(size=(200, 2))
    rows = LabelData.from_lists([["a"]] * 200, features=x + 1e12)
    found = FeatureMap.fit(rows, Config()).transform(x + 1e12)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, (x - x.mean(0)) / x.std(0), atol=1e-3)


@pytest.mark.parametrize("form", ["columns", "vector"])
def test_large_numbers_of_a_file_keep_their_spread(tmp_path, form):
    x = np.random.default_rng(0).integers(0, 1000, (200, 2)) + np.array([1_700_000_000_000, 0])
    if form == "columns":
        file = tmp_path / "a.csv"
        file.write_text("when,what,labels\n" + "".join(f"{a},{b},c\n" for a, b in x))
        data = read(file, label_column="labels")
    else:
        file = tmp_path / "a.jsonl"
        file.write_text("".join(json.dumps({"vector": row.tolist(), "labels": ["c"]}) + "\n" for row in x))
        data = read(file)
    assert (data.features == x).all()
    np.testing.assert_allclose(FeatureMap.fit(data, Config())(data), (x - x.mean(0)) / x.std(0), rtol=1e-6, atol=1e-6)


def test_float32_and_float64_give_the_same_features():
    x = np.random.default_rng(0).integers(0, 10, (200, 1)) + 16_000_000.0
    rows = LabelData.from_lists([["a"]] * 200, features=x)
    features = FeatureMap.fit(rows, Config())
    assert (features.transform(x.astype(np.float32)) == features.transform(x)).all()


@pytest.mark.parametrize("sparse", [False, True])
def test_numbers_beyond_float32_are_refused(sparse):
    x = np.array([[1.0, 2.0], [1e39, 1.0]])
    rows = LabelData.from_lists([["a"], []], features=sp.csr_matrix(x) if sparse else x)
    features = FeatureMap.fit(rows, Config(scale="l2"))
    with pytest.raises(DataError, match="features must be finite, got inf in row 1"):
        features.transform(rows.features)


def test_a_loaded_run_reads_large_numbers_as_training_did(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 2)) + 1e12
    rows = LabelData.from_lists([["high"] if v > 1e12 else ["low"] for v in x[:, 0]], features=x)
    model = load(train({"all": rows}, Config(loss="binary", C="1", bootstrap=0), tmp_path / "run").path)
    found = model.predict(x, k=1)
    assert np.mean([rows.names(i) == found[i] for i in range(len(rows))]) > 0.95
