import copy
import pickle
import warnings

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from tools import slow

import lastlayer as ll
from lastlayer import LabelSetClassifier
from lastlayer.train.config import Config
from lastlayer.train.estimator import _epochs
from lastlayer.train.fit_network import quiet, trainer
from lastlayer.train.module import LabelSetData, LabelSetModule, fit_in_process

REASON = "minibatches of weighted rows are not those of rows that are repeated"  # as for scikit-learn's own SGD
EXPECTED_FAILURES = {f"check_sample_weight_equivalence_on_{kind}_data": REASON for kind in ("dense", "sparse")}


@pytest.mark.slow
@parametrize_with_checks(
    [
        LabelSetClassifier(random_state=0),
        LabelSetClassifier(loss="lml", random_state=0),
        LabelSetClassifier(loss="binary", hidden=(16,), random_state=0, lr=0.02),
    ],
    expected_failed_checks=lambda _: EXPECTED_FAILURES,
)
def test_scikit_learn_checks(estimator, check):
    check(estimator)


def make(n=400, features=12, labels=5, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, features))
    weight = np.random.default_rng(99).normal(size=(features, labels))
    return X, (X @ weight > 1.5).astype(np.int64)


def test_label_sets_as_indicator_sparse_or_lists_are_the_same():
    X, Y = make()
    names = np.array(list("abcde"))
    lists = [names[row == 1].tolist() for row in Y]
    a, b, c = (
        LabelSetClassifier(loss="lml", epochs=5, random_state=0).fit(X, labels)
        for labels in (Y, sp.csr_matrix(Y), lists)
    )
    np.testing.assert_array_equal(a.predict_proba(X), b.predict_proba(X))
    np.testing.assert_array_equal(a.predict_proba(X), c.predict_proba(X))
    assert a.classes_.tolist() == [0, 1, 2, 3, 4]
    assert c.classes_.tolist() == list("abcde")
    assert c.predict_labels(X[:3], k=2) == [names[r].tolist() for r in (-a.predict_proba(X[:3])).argsort(1)[:, :2]]


def test_it_learns_and_generalises():
    X, Y = make()
    Z, V = make(seed=1)
    assert (LabelSetClassifier(loss="binary", random_state=0).fit(X, Y).predict(Z) == V).mean() > 0.9
    model = LabelSetClassifier(loss="lml", random_state=0).fit(X, Y)
    assert model.score(Z, V) > 0.9
    assert model.predict(Z).dtype == Y.dtype
    expected = ll.mean_average_precision(torch_of(model.decision_function(Z)), torch_of(V).bool(), per="sample")
    assert model.score(Z, V) == pytest.approx(float(expected), abs=1e-6)
    np.testing.assert_allclose(model.predict_proba(Z).sum(1), model.k_, atol=1e-6)


@pytest.mark.parametrize(("sparse", "hidden"), [(True, ()), (True, (6,)), (False, (6,))])
def test_the_short_loop_makes_the_weights_of_a_lightning_trainer(sparse, hidden):
    X, Y = make(n=150)
    X = sp.csr_matrix(np.where(X > 0, X, 0)) if sparse else X
    options = {"loss": "lml", "epochs": 3, "batch_size": 32, "hidden": hidden, "dropout": 0.2 if hidden else 0}
    model = LabelSetClassifier(random_state=0, **options)
    X, y = model._checked(X, Y, reset=True)
    model._start(X, y, None)
    config, labels, x = model._config(seed=model.seed_), model._labels(y), model.features_.transform(X)
    modules = [LabelSetModule(copy.deepcopy(model.network_), config, model.resolved_, total_steps=15) for _ in "ab"]
    data = LabelSetData(x, labels, batch_size=32, seed=model.seed_)
    fit_in_process(modules[0], data, 3)
    with quiet():
        trainer(config, epochs=3, logger=False, enable_checkpointing=False).fit(modules[1], datamodule=data)
    for ours, theirs in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        assert ours.abs().sum() > 0
        np.testing.assert_array_equal(ours.detach(), theirs.detach())


@pytest.mark.parametrize(("rows", "epochs"), [(1, 50), (1024, 50), (10_000, 16), (10**7, 8)])
def test_auto_epochs_fall_with_the_number_of_rows(rows, epochs):
    assert _epochs(rows) == epochs
    if rows <= 1024:
        X, Y = make(n=max(rows, 20))
        assert LabelSetClassifier(loss="lml", random_state=0).fit(X, Y).n_iter_ == epochs


def torch_of(array):
    import torch

    return torch.from_numpy(np.ascontiguousarray(array))


def test_predicted_k_follows_the_rows():
    X, Y = make(800)
    model = LabelSetClassifier(loss="lml", k="predicted", random_state=0).fit(X, Y)
    counts = model.predict_proba(X).sum(1)
    assert np.corrcoef(counts, Y.sum(1))[0, 1] > 0.5
    assert model.k_ is None


def test_sparse_rows():
    X, Y = make()
    X = np.where(np.abs(X) > 1, X, 0)
    model = LabelSetClassifier(loss="lml", random_state=0, scale="l2").fit(sp.csr_matrix(X), Y)
    np.testing.assert_allclose(model.predict_proba(sp.csr_matrix(X))[:3], model.predict_proba(sp.csr_matrix(X)[:3]))
    assert model.score(sp.csr_matrix(X), Y) > 0.8


@pytest.mark.parametrize(
    "loss", ["lml", "two_way", *map(slow, ("binary", "asymmetric", "expected_positive", "multihot_softmax"))]
)
def test_losses_by_name(loss):
    X, Y = make()
    model = LabelSetClassifier(loss=loss, random_state=0).fit(X, Y)
    assert model.score(X, Y) > 0.8


def test_partial_fit_goes_on():
    X, Y = make()
    model = LabelSetClassifier(random_state=0)
    scores = []
    for _ in range(12):
        for rows in np.array_split(np.arange(len(X)), 4):
            model.partial_fit(X[rows], Y[rows])
        scores.append(model.score(X, Y))
    assert scores[-1] > scores[0]
    assert model.n_iter_ == 48
    single = LabelSetClassifier(random_state=0).partial_fit(X, Y[:, 0], classes=[0, 1])
    with pytest.raises(ValueError, match="`classes` must be those of the first call"):
        single.partial_fit(X, Y[:, 0], classes=[0, 2])


def test_pipelines_search_and_cross_validation():
    X, Y = make(160)
    search = GridSearchCV(
        make_pipeline(StandardScaler(), LabelSetClassifier(epochs=4, random_state=0)),
        {"labelsetclassifier__k": ["auto", 2.0], "labelsetclassifier__loss": ["lml", "binary"]},
        cv=2,
        error_score="raise",
    ).fit(X, Y)
    assert len(search.cv_results_["params"]) == 4
    model = LabelSetClassifier(loss="lml", epochs=4, random_state=0)
    assert cross_val_predict(model, X, Y, cv=2, method="predict_proba").shape == Y.shape
    assert cross_val_predict(model, X, Y, cv=2).shape == Y.shape


def test_pickles():
    X, Y = make(100)
    model = LabelSetClassifier(epochs=3, random_state=0, hidden=(4,)).fit(X, Y)
    back = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(back.predict_proba(X), model.predict_proba(X))


def test_global_random_state_is_left_alone():
    import torch

    X, Y = make(60)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    LabelSetClassifier(epochs=2, hidden=(4,), dropout=0.5).fit(X, Y)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"loss": "nope"}, "`loss` must be one of"), ({"k": 99.0}, "`k` must be at most the number of labels"),
     ({"k": -1}, "`k` must be a positive number"), ({"epochs": 0}, "`epochs` must be a whole number"),
     ({"labels": "some"}, "`labels` must be one of"), ({"threshold": 3.0}, "`threshold` must be a probability"),
     ({"threshold": "0.5"}, "`threshold` must be a probability or None, got '0.5'"),
     ({"k": None}, "`k` must be a positive number or auto or predicted, got None"),
     ({"tree": 2.5}, "`tree` must be a whole number of trees or auto or off, got '2.5'"),
     ({"threshold": float("nan")}, "`threshold` must be a probability"), ({"hidden": None}, "`hidden` must be a list"),
         ({"loss": "lml", "loss_options": {"nope": 1}}, "`loss_options` of lml must be")],
)  # fmt: skip
def test_wrong_parameters_are_named(options, message):
    X, Y = make(40)
    with pytest.raises(ValueError, match=message):
        LabelSetClassifier(**options).fit(X, Y)


@pytest.mark.parametrize("options", [{"loss": "binary"}, {"loss": "squared_hinge"}, {"loss": "binary", "tree": 1}])
def test_bad_input_is_an_error_or_a_right_answer(options):
    x = np.random.default_rng(0).normal(size=(80, 4)).astype(np.float32)
    y = (x[:, :3] > 0.3).astype(int)
    model = LabelSetClassifier(random_state=0, **options)
    for value, message in ((np.nan, "contains NaN"), (np.inf, "contains infinity")):
        broken = x.copy()
        broken[7, 1] = value
        with pytest.raises(ValueError, match=message):
            model.fit(broken, y)
    with pytest.raises(ValueError, match="`C` must be a positive number or auto, got 0"):
        LabelSetClassifier(C=0, **options).fit(x, y)
    more = np.concatenate([y, np.zeros((80, 1), int)], axis=1)  # the last label has no rows
    p = model.fit(x, more).predict_proba(x)
    assert p[:, 3].max() < 0.01
    assert (model.predict(x)[:, :3] == y).mean() > 0.8
    assert not model.predict(x)[:, 3].any()
    alike = np.tile([1, 0, 1], (80, 1))
    assert (model.fit(x, alike).predict(x) == alike).all()
    assert not model.fit(x, np.zeros_like(y)).predict(x).any()


@pytest.mark.parametrize("values", [(-1, 1), (-1, 0, 1), (0, 2)])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_matrix_of_other_numbers_than_0_and_1_is_refused(values, sparse):
    x = np.random.default_rng(0).normal(size=(30, 3))
    y = np.random.default_rng(1).choice(values, (30, 4))
    y = sp.csr_matrix(y) if sparse else y
    with pytest.raises(ValueError, match="`y` must be a matrix of 0 and 1"):
        LabelSetClassifier(random_state=0).fit(x, y)
    fitted = LabelSetClassifier(random_state=0, epochs=1, loss="lml").fit(x, x[:, [0, 1, 2, 0]] > 0)
    with pytest.raises(ValueError, match="`y` must be a matrix of 0 and 1"):
        fitted.score(x, y)


@pytest.mark.parametrize("names", [("a", 1, 2.5), (("a", 0), ("a", 1), ("b",)), ("a", None, "b")])
def test_names_of_any_type_stay_as_they_are(names):
    X, Y = make(120)
    lists = [[names[i] for i in np.flatnonzero(row)] for row in Y[:, :3]]
    model = LabelSetClassifier(random_state=0).fit(X, lists)
    assert set(model.classes_.tolist()) == set(names)
    place = [model.classes_.tolist().index(name) for name in names]
    same = LabelSetClassifier(random_state=0).fit(X, Y[:, np.argsort(place)])
    np.testing.assert_array_equal(model.predict_proba(X), same.predict_proba(X))
    more = LabelSetClassifier(loss="lml", random_state=0).partial_fit(X, lists, classes=list(names))
    assert set(more.partial_fit(X, lists, classes=list(names)).classes_.tolist()) == set(names)
    with pytest.raises(ValueError, match="`y` must hold labels among `classes`, got 'new'"):
        more.partial_fit(X, [["new"]] * len(X))


def test_lists_in_a_column_of_a_table():
    pandas = pytest.importorskip("pandas")
    X, Y = make(120)
    lists = [[f"l{i}" for i in np.flatnonzero(row)] for row in Y]
    model = LabelSetClassifier(random_state=0).fit(X, pandas.Series(lists, index=range(7, 127)))
    expected = LabelSetClassifier(random_state=0).fit(X, lists)
    np.testing.assert_array_equal(model.predict_proba(X), expected.predict_proba(X))
    assert model.score(X, pandas.Series(lists)) == expected.score(X, lists)


def test_a_row_that_is_no_list_of_labels_is_named():
    X, _ = make(60)
    for y, got in (([["a"], None] * 30, "None in row 1"), (["b"] + [["a"]] * 59, "'b' in row 0")):
        for given in (y, np.array(y, dtype=object)):
            with pytest.raises(
                ValueError, match=f"`y` must be a list of labels in every row, got {got}. A row without"
            ):
                LabelSetClassifier().fit(X, given)


def test_numbers_of_a_call_are_checked():
    X, Y = make(60)
    model = LabelSetClassifier(loss="lml", hidden=4, epochs=1, random_state=0).fit(X, Y)  # one layer of 4
    same = LabelSetClassifier(loss="lml", hidden=(4,), epochs=1, random_state=0).fit(X, Y)
    np.testing.assert_array_equal(model.predict_proba(X), same.predict_proba(X))
    for k in (-1, 1.5, True):
        with pytest.raises(ValueError, match="`k` must be None or a whole number of at least 0"):
            model.predict_labels(X, k=k)
    with pytest.raises(ValueError, match="`sample_weight` must have one number per row, 60, got shape"):
        model.score(X, Y, sample_weight=np.ones(3))
    assert model.score(X, Y, sample_weight=np.zeros(60)) == 0


def test_labels_that_were_not_seen_in_training_are_told_by_score():
    X, Y = make(60)
    lists = [[f"label{j}" for j in np.flatnonzero(row)] for row in Y]
    model = LabelSetClassifier(loss="lml", epochs=1, random_state=0).fit(X, lists)
    more = [[*names, "new"] if i < 3 else ["newer"] if i == 3 else names for i, names in enumerate(lists)]
    message = r"^LabelSetClassifier: 4 labels of `y` were not seen in training and do not count: new, newer\.$"
    with pytest.warns(UserWarning, match=message) as warned:
        value = model.score(X, more)
    assert len(warned) == 1
    kept = [[name for name in names if name.startswith("label")] for names in more]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.score(X, kept) == value


@pytest.mark.parametrize("k", ["auto", "predicted"])
@pytest.mark.parametrize("labels", ["complete", "incomplete"])
def test_rows_count_by_their_weight_for_the_number_of_labels(k, labels):
    X, Y = make(120)
    weight = np.repeat([1.0, 0.0], 60)
    more = np.where(np.arange(120)[:, None] < 60, Y, 1)  # rows without weight have every label
    model = LabelSetClassifier(k, labels=labels, loss="lml", epochs=2, scale="none", random_state=0)
    model.fit(X, more, sample_weight=weight)
    alone = clone(model).fit(X[:60], Y[:60])
    if k == "predicted":
        np.testing.assert_allclose(model.count_(X).mean(), alone.count_(X).mean(), rtol=0.02)
    else:
        assert model.k_ == pytest.approx(alone.k_)
    twice = clone(model).fit(X, Y, sample_weight=np.full(120, 2.0))  # equal weights change nothing
    np.testing.assert_allclose(twice.predict_proba(X), clone(model).fit(X, Y).predict_proba(X), rtol=1e-6)


def test_rows_of_labels_may_be_arrays():
    X, Y = make(120)
    lists = [np.flatnonzero(row) for row in Y]
    expected = LabelSetClassifier(random_state=0).fit(X, [row.tolist() for row in lists])
    column = np.empty(120, dtype=object)  # what a table from a Parquet file holds
    column[:] = lists
    for y in (lists, column):
        model = LabelSetClassifier(random_state=0).fit(X, y)
        np.testing.assert_array_equal(model.predict_proba(X), expected.predict_proba(X))
        assert model.score(X, y) == expected.score(X, lists)
    indicator = LabelSetClassifier(random_state=0).fit(X, list(Y.astype(bool)))
    np.testing.assert_array_equal(indicator.predict(X), LabelSetClassifier(random_state=0).fit(X, Y).predict(X))


def test_sets_are_no_indicator():
    X, _ = make(60)
    model = LabelSetClassifier(random_state=0).fit(X, [{0, 1}] * 60)
    assert model.predict_labels(X[:1], k=2) == [[0, 1]]


def test_labels_are_the_names_of_the_columns_of_a_frame():
    pandas = pytest.importorskip("pandas")
    X, Y = make(120)
    names = [f"label {i}" for i in range(Y.shape[1])][::-1]
    frame = pandas.DataFrame(Y, columns=names, index=range(7, 127))
    plain = LabelSetClassifier(random_state=0, loss="lml", epochs=2).fit(X, Y)
    model = clone(plain).fit(X, frame)
    assert model.classes_.tolist() == names
    assert model.predict_labels(X[:5], k=2) == [[names[i] for i in row] for row in plain.predict_labels(X[:5], k=2)]
    np.testing.assert_array_equal(model.predict(X), plain.predict(X))
    assert model.score(X, frame) == model.score(X, Y) == plain.score(X, frame)
    for call in (model.score, model.partial_fit):
        with pytest.raises(ValueError, match="`y` must have the columns of `classes_`, in their order"):
            call(X, frame[sorted(names)])
    assert model.partial_fit(X, frame).classes_.tolist() == names
    numbered = clone(plain).fit(X, frame.set_axis(range(Y.shape[1]), axis=1))
    assert numbered.classes_.tolist() == list(range(Y.shape[1]))


def test_a_sparse_column_is_one_label_per_row():
    X, Y = make(120)
    dense = LabelSetClassifier(random_state=0, loss="lml", epochs=1)
    with pytest.warns(UserWarning, match="column-vector"):
        sparse = clone(dense).fit(X, sp.csr_matrix(Y[:, :1]))
    np.testing.assert_array_equal(sparse.predict(X), dense.fit(X, Y[:, 0]).predict(X))


def test_nan_is_no_label():
    X, _ = make(60)
    with pytest.raises(ValueError, match=r"`y` must hold labels, got nan\. A row without any is an empty list\."):
        LabelSetClassifier().fit(X, [["a"], ["a", float("nan")]] * 30)


def test_settings_may_be_numbers_of_numpy():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 3))
    options = {"epochs": np.int64(2), "batch_size": np.int32(16), "dropout": np.float32(0.5), "hidden": np.array([4])}
    options |= {"loss": "asymmetric", "loss_options": {"gamma_negative": np.float32(2)}}
    model = LabelSetClassifier(**options, random_state=0).fit(X, (X > 0).astype(int))
    plain = {"epochs": 2, "batch_size": 16, "dropout": 0.5, "hidden": (4,)}
    plain |= {"loss": "asymmetric", "loss_options": {"gamma_negative": 2.0}}
    other = LabelSetClassifier(**plain, random_state=0).fit(X, (X > 0).astype(int))
    np.testing.assert_array_equal(model.predict_proba(X), other.predict_proba(X))
    assert Config(loss="asymmetric", loss_options={"gamma_negative": np.float64(2)}).to_yaml()
