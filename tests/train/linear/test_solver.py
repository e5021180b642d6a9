"""The solver against scikit-learn's liblinear, against its plain version, and its edges."""

import itertools
import os
import signal
import threading

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.linear_model import LogisticRegression
from sklearn.svm import LinearSVC
from tools import slow

from lastlayer._native import linear as native
from lastlayer.data import LabelData
from lastlayer.train.linear import SolverSettings, Weighting, fit_linear, fit_path

built = pytest.mark.skipif(bool(native.unavailable()), reason=f"no compiled solver: {native.unavailable()}")
IMPLS = (pytest.param("native", marks=built), "numpy")


def made_up(rows=60, features=40, labels=19, seed=0, density=0.2):
    """Rows and label lists with some signal; label 0 has one row, label 1 almost all."""
    rng = np.random.default_rng(seed)
    x = sp.random(rows, features, density, "csr", random_state=rng, data_rvs=rng.standard_normal)
    scores = x @ rng.normal(size=(features, labels)) + rng.normal(size=(rows, labels))
    cut = (rng.uniform(0.5, 0.95, labels) * rows).astype(int)
    y = scores > np.sort(scores, 0)[cut, np.arange(labels)]
    y[:, 0], y[0, 0], y[:, 1], y[0, 1] = False, True, True, False
    return x, y


def liblinear(x, y, loss, C, bias, row_weight, weights):
    """Weights and intercepts of scikit-learn's solver, one label after the other."""
    options = {"C": C, "fit_intercept": bias > 0, "intercept_scaling": bias or 1, "tol": 1e-10, "max_iter": 200_000}
    found = []
    for label in range(y.shape[1]):
        share = {True: weights[0][label], False: weights[1][label]}
        if loss == "squared_hinge":
            model = LinearSVC(loss="squared_hinge", dual=True, class_weight=share, random_state=0, **options)
        else:
            model = LogisticRegression(solver="liblinear", class_weight=share, **options)
        model.fit(x.astype(np.float64), y[:, label], sample_weight=row_weight)
        found.append(np.append(model.coef_[0], model.intercept_ if bias else 0))
    return np.array(found)


def objective(x, y, w, loss, C, bias, row_weight, weights):
    """The objective of each label; the last column of `w` is the intercept."""
    share = C * np.where(y, *weights) * (1 if row_weight is None else row_weight[:, None])
    margin = np.where(y, 1, -1) * (x @ w[:, :-1].T + w[:, -1])
    terms = np.maximum(0, 1 - margin) ** 2 if loss == "squared_hinge" else np.logaddexp(0, -margin)
    squares = (w[:, :-1] ** 2).sum(1) + (w[:, -1] ** 2 / bias**2 if bias else 0)
    return squares / 2 + (share * terms).sum(0)


@built
@pytest.mark.parametrize("loss", ["squared_hinge", "logistic"])
@pytest.mark.parametrize("C", [0.05, slow(1.0), 20.0])
@pytest.mark.parametrize("bias", [0.0, slow(1.0), 3.0])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dense", [False, True])
def test_equals_liblinear(loss, C, bias, weighted, dense):
    x, y = made_up()
    rng = np.random.default_rng(1)
    row_weight = rng.uniform(0.1, 3, len(y)) if weighted else None
    ones = np.ones(y.shape[1])
    weights = (rng.uniform(0.5, 4, y.shape[1]), rng.uniform(0.5, 2, y.shape[1])) if weighted else (ones, ones)
    want = liblinear(x, y, loss, C, bias, row_weight, weights)
    best = objective(x, y, want, loss, C, bias, row_weight, weights)
    for dtype, tolerance in ((np.float64, 1e-7), (np.float32, 1e-4)):
        rows = (x.toarray() if dense else x).astype(dtype)
        found = fit_linear(
            rows,
            sp.csr_matrix(y),
            loss=loss,
            C=C,
            bias=bias,
            row_weight=row_weight,
            positive_weight=weights[0],
            negative_weight=weights[1],
            tolerance=tolerance,
            max_passes=100_000,
        )
        w = np.column_stack([found.matrix().toarray(), found.intercept])
        reached = objective(x, y, w, loss, C, bias, row_weight, weights)
        np.testing.assert_allclose(reached, best, rtol=1e-4)
        assert (np.linalg.norm(w - want, axis=1) <= 1e-4 * np.linalg.norm(want, axis=1) + 1e-7).all()
        assert (found.passes > 0).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("loss", ["squared_hinge", slow("logistic")])
@pytest.mark.parametrize("dense", [False, slow(True)])
def test_warm_starts_weights_bias_and_cut_in_every_combination_equal_liblinear(impl, loss, dense):
    """The second step of a path, which starts warm and has shrunk rows; whatever is weighted, and what is cut."""
    x, y = made_up(rows=14, features=8, labels=3, density=0.4)
    rng = np.random.default_rng(1)
    rows, own = rng.uniform(0.1, 3, 14), (rng.uniform(0.5, 4, 3), rng.uniform(0.5, 2, 3))
    ones, cuts = (np.ones(3), np.ones(3)), (0.05,) if impl == "numpy" else (0.0, 0.05)
    for row_weight, weights, bias, cut in itertools.product((None, rows), (ones, own), (0.0, 2.0), cuts):
        want = liblinear(x, y, loss, 1.0, bias, row_weight, weights)
        want[:, :-1][np.abs(want[:, :-1]) < cut] = 0
        settings = SolverSettings(loss=loss, bias=bias, threshold=cut, tolerance=1e-5, max_passes=100_000, impl=impl)
        weighting = Weighting(row=row_weight, positive=weights[0], negative=weights[1])
        found = fit_path(x.toarray() if dense else x, y, [0.05, 1.0], settings, weighting)[-1]
        w = np.column_stack([found.matrix().toarray(), found.intercept])
        assert (np.linalg.norm(w - want, axis=1) <= 1e-4 * np.linalg.norm(want, axis=1)).all()


@built
@pytest.mark.parametrize("loss", ["squared_hinge", "logistic"])
def test_the_plain_version_gives_the_same_answers(loss):
    x, y = made_up(rows=30, labels=9)
    options = {"loss": loss, "tolerance": 1e-6, "threshold": 0.02}
    weighting = Weighting(row=np.linspace(0, 2, 30))
    settings = (SolverSettings(impl=impl, **options) for impl in ("numpy", "native"))
    plain, compiled = (fit_path(x, y, [0.1, 2.0], one, weighting) for one in settings)
    for a, b in zip(plain, compiled, strict=True):
        np.testing.assert_allclose(a.matrix().toarray(), b.matrix().toarray(), atol=1e-5)
        np.testing.assert_allclose(a.intercept, b.intercept, atol=1e-5)
        assert a.C == b.C


@built
@pytest.mark.parametrize("isa", [0, 1, 2])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("loss", ["squared_hinge", "logistic"])
def test_every_instruction_set_solves_the_same_problem(isa, dtype, loss):
    x, y = made_up(labels=40)
    want = fit_linear(x, y, loss=loss, tolerance=1e-7)
    native.library().linear_limit_isa(isa)
    try:
        found = fit_linear(x.astype(dtype), y, loss=loss, tolerance=1e-4 if dtype == np.float32 else 1e-7)
    finally:
        native.library().linear_limit_isa(2)
    np.testing.assert_allclose(
        found.matrix().toarray(), want.matrix().toarray(), atol=1e-3 if dtype == np.float32 else 1e-6
    )


@built
def test_a_path_gives_what_each_cost_alone_gives():
    x, y = made_up(rows=20, labels=5)
    for loss in ("squared_hinge", "logistic"):
        path = fit_path(x, y, [0.1, 1.0, 3.0], SolverSettings(loss=loss, tolerance=1e-5))
        for step in path:
            alone = fit_linear(x, y, C=step.C, loss=loss, tolerance=1e-5)
            np.testing.assert_allclose(step.matrix().toarray(), alone.matrix().toarray(), atol=1e-4)


@built
def test_threads_change_nothing_and_seeds_change_the_last_digits():
    x, y = made_up(rows=200, labels=150)
    one, four, other = (fit_linear(x, y, threads=t, seed=s) for t, s in ((1, 0), (4, 0), (1, 1)))
    assert (one.values == four.values).all()
    assert (one.indices == four.indices).all()
    assert (one.intercept == four.intercept).all()
    assert (one.passes == four.passes).all()
    assert not np.array_equal(one.values, other.values)


@built
def test_workers_of_joblib_give_the_same_answers():
    joblib = pytest.importorskip("joblib")
    x, y = made_up(rows=200, labels=150)
    weighting = Weighting(positive=np.linspace(1, 3, 150))
    alone = fit_path(x, y, [0.5, 1.0], None, weighting)
    shared = fit_path(x, y, [0.5, 1.0], None, weighting, parallel=joblib.Parallel(n_jobs=2, backend="threading"))
    for one, other in zip(alone, shared, strict=True):
        assert (one.values == other.values).all()
        assert (one.passes == other.passes).all()


@built
def test_cut_weights_are_not_stored():
    x, y = made_up(labels=40)
    whole, cut = fit_linear(x, y), fit_linear(x, y, threshold=0.1)
    dense = whole.matrix().toarray()
    assert np.abs(cut.values).min() >= 0.1
    np.testing.assert_array_equal(cut.matrix().toarray(), np.where(np.abs(dense) >= 0.1, dense, 0))
    np.testing.assert_array_equal(cut.intercept, whole.intercept)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("bias", [0.0, 2.0])
def test_labels_whose_rows_are_all_alike(impl, bias):
    x = sp.csr_matrix(np.eye(4))
    hinge = fit_linear(x, [[1], [1], [1], [1]], n_labels=3, bias=bias, C=0.5, impl=impl)
    mass = 4 * 0.5 * (bias**2 or 1)
    assert len(hinge.values) == 0
    np.testing.assert_allclose(hinge.intercept, 2 * mass / (1 + 2 * mass) * np.array([-1, 1, -1]))
    logistic = fit_linear(x, [[1], [1], [1], [1]], n_labels=3, bias=bias, C=0.5, loss="logistic", impl=impl).intercept
    np.testing.assert_allclose(logistic, mass / (1 + np.exp(logistic[1])) * np.array([-1, 1, -1]))


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_of_weight_0_are_left_out(impl):
    x, y = made_up(rows=40, labels=4)
    weight = np.repeat([1.0, 0.0], 20)
    found = fit_linear(x, y, row_weight=weight, tolerance=1e-8, impl=impl)
    want = fit_linear(x[:20], y[:20], tolerance=1e-8, impl=impl)
    np.testing.assert_allclose(found.matrix().toarray(), want.matrix().toarray(), atol=1e-6)


def test_labels_in_every_form():
    x, y = made_up(labels=6)
    lists = [np.flatnonzero(row).tolist() for row in y]
    data = LabelData.from_lists([[str(i) for i in row] for row in lists], label_names=[str(i) for i in range(6)])
    signs = 2 * y.astype(np.int8) - 1
    forms = (y, sp.csc_matrix(y), lists, data, y.astype(np.int8), signs, sp.csr_matrix(signs))
    found = [fit_linear(x, form).values for form in forms]
    for one in found[1:]:
        np.testing.assert_array_equal(one, found[0])


def test_rows_in_every_form():
    x, y = made_up(labels=3)
    want = fit_linear(x, y).values
    twice = sp.coo_matrix(
        (np.repeat(x.data / 2, 2), (np.repeat(x.tocoo().row, 2), np.repeat(x.tocoo().col, 2))), x.shape
    )
    long = sp.csr_matrix((x.data, x.indices.astype(np.int64), x.indptr.astype(np.int64)), x.shape)
    for form in (x.tocsc(), twice, long, sp.csr_array(x)):
        np.testing.assert_allclose(fit_linear(form, y).values, want, atol=1e-12)
    assert fit_linear((x != 0).astype(int), y).values.dtype == np.float32
    before = twice.tocsr().copy()
    given = before.copy()
    fit_linear(given, y)
    assert (given != before).nnz == 0


def test_no_rows_no_labels_no_features():
    assert fit_linear(sp.csr_matrix((5, 3)), [[]] * 5, n_labels=2).n_labels == 2
    assert fit_linear(sp.csr_matrix((5, 3)), [[]] * 5).n_labels == 0
    assert fit_linear(np.zeros((0, 3)), [], n_labels=2).intercept.tolist() == [0, 0]
    found = fit_linear(np.zeros((4, 0)), [[0], [0], [0], []], tolerance=1e-9)
    assert found.intercept[0] > 0  # (three rows against one)


def broken(x, part, value):
    """Rows with one wrong number, as a wrong shape or a damaged file makes them; SciPy does not look for it."""
    x = x.copy()
    getattr(x, part)[5] = value
    return x


WRONG = {
    "not finite": (lambda x, y: {"x": x * np.nan}, "`x` must be finite, got nan in row 0, column"),
    "infinite": (lambda x, y: {"x": np.where(np.arange(40) == 3, np.inf, x.toarray())}, "got inf in row 0, column 3"),
    "column": (lambda x, y: {"x": broken(x, "indices", x.shape[1])}, "`x` must have indices from 0 to 39, got 40"),
    "column below 0": (lambda x, y: {"x": broken(x, "indices", -3)}, "`x` must have indices from 0 to 39, got -3"),
    "row": (lambda x, y: {"x": broken(x.tocsc(), "indices", 60)}, "`x` must have indices from 0 to 59, got 60"),
    "ends": (lambda x, y: {"x": broken(x, "indptr", 10**6)}, "`x` must have an `indptr` that rises from 0 to"),
    "one dimension": (lambda x, y: {"x": np.zeros(4)}, "two dimensions, got ndarray of shape"),
    "C": (lambda x, y: {"C": 0}, "`C` must be positive and finite, got 0.0"),
    "C nan": (lambda x, y: {"C": np.nan}, "`C` must be positive and finite, got nan"),
    "loss": (lambda x, y: {"loss": "hinge"}, "`loss` must be one of squared_hinge, logistic, got 'hinge'"),
    "impl": (lambda x, y: {"impl": "c"}, "`impl` must be auto, native or numpy"),
    "bias": (lambda x, y: {"bias": -1}, "`bias` must be at least 0 and finite, got -1"),
    "threshold": (lambda x, y: {"threshold": -1}, "`threshold` must be at least 0"),
    "tolerance": (lambda x, y: {"tolerance": 0}, "`tolerance` must be positive"),
    "passes": (lambda x, y: {"max_passes": 0}, "`max_passes` must be at least 1"),
    "threads": (lambda x, y: {"threads": 0}, "`threads` must be at least 1"),
    "row weights": (lambda x, y: {"row_weight": np.ones(3)}, "`row_weight` must have one number per row, 60"),
    "negative": (lambda x, y: {"row_weight": np.full(60, -1)}, "`row_weight` must be finite and not negative, got -1"),
    "label weights": (
        lambda x, y: {"positive_weight": [1, 2]},
        "`positive_weight` must be one number or one per label",
    ),
    "weight of 0": (lambda x, y: {"negative_weight": 0}, "`negative_weight` must be positive, got 0"),
    "rows": (lambda x, y: {"y": y[:9]}, "`y` must have one entry per row of `x`, 60, got 9"),
    "label": (lambda x, y: {"y": [[-1]] * 60}, "`y` must hold label numbers from 0 to -1, got -1"),
    "label number": (lambda x, y: {"y": [[7]] * 60, "n_labels": 5}, "from 0 to 4, got 7"),
    "form of y": (lambda x, y: {"y": 3}, "`y` must be label data"),
    "one label per row": (lambda x, y: {"y": [1] * 60}, "`y` must be label data"),
    "names": (lambda x, y: {"y": [["a"]] * 60}, "`y` must hold label numbers, got <U1"),
    "shares": (lambda x, y: {"y": [[0.7]] * 60}, "`y` must hold label numbers, got float64"),
    "unknown": (lambda x, y: {"y": -np.eye(60)}, "`y` must be a matrix of 0 and 1, or of -1 and 1, got -1.0 as well"),
    "unknown, sparse": (lambda x, y: {"y": sp.coo_matrix(-np.eye(60))}, "or of -1 and 1, got -1.0 as well"),
    "nan": (lambda x, y: {"y": np.full((60, 2), np.nan)}, "or of -1 and 1, got nan as well"),
}


@pytest.mark.parametrize("case", WRONG)
def test_messages(case):
    x, y = made_up()
    change, message = WRONG[case]
    arguments = {"x": x, "y": y, **change(x, y)}
    with pytest.raises((ValueError, TypeError), match=r"^fit_linear: ") as found:
        fit_linear(arguments.pop("x"), arguments.pop("y"), **arguments)
    assert message in str(found.value)


def test_costs_must_increase():
    x, y = made_up()
    with pytest.raises(ValueError, match="fit_path: `costs` must increase"):
        fit_path(x, y, [1, 1])


@pytest.mark.parametrize("impl", IMPLS)
def test_too_few_passes_give_a_warning(impl):
    x, y = made_up(rows=30, labels=3)
    with pytest.warns(UserWarning, match="3 of 3 fits did not come within the tolerance"):
        found = fit_linear(x, y, C=100, tolerance=1e-9, max_passes=2, impl=impl)
    assert (found.passes == -2).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_progress_is_reported(impl):
    seen = []
    x, y = made_up(labels=30)
    fit_linear(x, y, impl=impl, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (30, 30)


@built
def test_an_interrupt_is_answered():
    x, y = made_up(rows=3000, features=300, labels=400)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a process in the background ignores
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            fit_linear(x, y, C=1e4, tolerance=1e-12, max_passes=10**8)  # which would need hours
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)


def test_the_slow_solver_is_named(monkeypatch):
    monkeypatch.setattr(native, "unavailable", lambda: "no library for the test")
    x = np.eye(4, dtype=np.float32)
    with pytest.warns(
        UserWarning, match=r"\(no library for the test\); the one in numpy is used, which is some hundred"
    ):
        fit_linear(x, [[0], [0], [1], [1]])
