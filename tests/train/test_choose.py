"""The exact solver and the choice among losses in runs and in the estimator; calibration; thresholds."""

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from train_tools import make_rows

import lastlayer as ll
from lastlayer import metrics
from lastlayer.data import DataError, LabelData
from lastlayer.runs.rows import set_metrics
from lastlayer.train import Config, ConfigError, LabelSetClassifier, evaluate, train
from lastlayer.train.blend import Blend, added, outputs
from lastlayer.train.calibrate import Calibration, true_probability
from lastlayer.train.choose import FEW, GROUPED, Candidate, Pool, _Race, _splits
from lastlayer.train.decide import Decision
from lastlayer.train.engine import prepare
from lastlayer.train.export import Exported
from lastlayer.train.held_out import HeldOut, decided, with_share
from lastlayer.train.linear import fit_linear
from lastlayer.train.losses import LOSSES
from lastlayer.train.module import LabelSetModule
from lastlayer.train.network import LabelSetNetwork
from lastlayer.train.resolved import Resolved


def noisy(n=300, seed=0, labels=6):
    """Texts whose labels are those of their words but for some that were exchanged."""
    rows, rng = make_rows(n, seed, labels), np.random.default_rng(seed)
    lists = [
        [name if rng.random() < 0.8 else f"label{rng.integers(labels)}" for name in rows.names(i)] for i in range(n)
    ]
    return LabelData.from_lists(lists, texts=rows.texts, ids=rows.ids, label_names=rows.label_names)


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    config = Config(loss="squared_hinge", C=0.5, bootstrap=0, decide="macro_f1")
    return train({"all": noisy()}, config, tmp_path_factory.mktemp("run") / "a")


def test_the_exact_solver_fits_training_and_validation_rows(exact):
    model, parts = ll.load(exact.path), prepare({"all": noisy()}, Config())
    pool = Pool.of({name: model.features(data) for name, data in parts.items()}, parts)
    expected = fit_linear(pool.x, pool.labels, C=0.5)
    rows = noisy(20, seed=1)
    scores = model.features(rows) @ expected.matrix().T.toarray() + expected.intercept
    np.testing.assert_allclose(model.decision_function(rows), scores, atol=2e-2)  # within the tolerance of the solver
    assert "Loss: squared_hinge (C 0.5), chosen by ndcg@5 of" in exact.metrics()["notes"][0]


def test_the_run_of_an_exact_model_is_a_run_like_any_other(exact, tmp_path):
    from lastlayer import report
    from lastlayer.train.export import export

    model, rows = ll.load(exact.path), noisy(40, seed=2)
    y, level = model.predict_proba(rows), model.thresholds
    assert level.shape == (6,)
    for names, p in zip(model.predict(rows), y, strict=True):
        assert names == [model.labels[i] for i in np.argsort(-p, kind="stable") if p[i] > level[i]]
    assert [len(row) for row in model.predict(rows, threshold=0.01)] == (y >= 0.01).sum(1).tolist()
    assert [len(row) for row in model.predict(rows, k=4)] == [4] * 40
    found = evaluate(model, rows, resamples=20)["metrics"]
    assert found["micro_f1"]["low"] <= found["micro_f1"]["value"] <= found["micro_f1"]["high"]
    assert {"macro_f1", "sample_f1", "hamming_loss", "exact_match", "ece_label"} <= found.keys()
    report.write([exact.path], tmp_path / "report.html")
    assert "macro_f1: one threshold per label" in (tmp_path / "report.html").read_text()
    program = torch.export.load(export(exact.path, tmp_path / "model.pt2", "torch")).module()
    x = torch.from_numpy(model.matrix(rows).toarray())
    np.testing.assert_allclose(program(x)[1].detach().numpy(), y, atol=1e-6)


@pytest.mark.slow
def test_auto_says_what_it_chose_and_by_how_much(tmp_path):
    run = train({"all": noisy()}, Config(bootstrap=0, labels="incomplete", keep=0.7), tmp_path / "a")
    choice = run.read_json("choice.json")
    values = [line["value"] for line in choice["candidates"] if not line["left_out"]]
    assert values[0] == max(values)
    assert {(line["loss"], line["thinned"]) for line in choice["candidates"]} == {
        ("squared_hinge", False), ("binary", False), ("lml", False), ("lml", True), ("two_way", False)
    }  # fmt: skip
    chosen = {line["candidate"] for line in choice["candidates"] if line["chosen"]}
    assert choice["monitor"] == "recall@5"  # which hidden labels do not bias
    note = run.metrics()["notes"][1]
    said, rest = note.removeprefix("Loss: ").split(", chosen by recall@5 of")
    assert set(said.split(" + ")) == chosen
    assert ", against " in rest
    model = ll.load(run.path)
    assert said.startswith(model.resolved.loss)
    assert model.decision.rule == "top_k"


@pytest.mark.parametrize(("n", "thinned"), [(400, False), (1200, True)])
def test_lml_is_taken_unless_another_loss_is_clearly_better(n, thinned, monkeypatch):
    monkeypatch.setattr(_Race, "_grown", lambda self, first: Blend((first,)))
    rng = np.random.default_rng(0)
    labels = LabelData(None, None, np.arange(n + 1), rng.integers(0, 8, n), [f"label{i}" for i in range(8)])
    pool = Pool(sp.csr_matrix(rng.random((n, 3), np.float32)), labels, n)
    config = Config(monitor="recall@1", at=(1,), labels="incomplete" if thinned else "complete")

    def chosen(share: float, config: Config = config) -> tuple[str, str]:
        """Choose where the squared hinge is right in all rows and LML in all but a share of them."""
        race = _Race(pool, config, Resolved.of(config, labels), lambda line: None)
        right = np.eye(8, dtype=np.float32)[labels.indices]
        wrong = np.where(np.arange(n)[:, None] < share * n, -right, right)
        race.held = [labels]
        race.scores = {Candidate("squared_hinge", 1.0): [right], Candidate("lml", 0.0, thinned): [wrong]}
        race.networks = dict.fromkeys(race.scores)
        race._drop()
        made = race.finish([(np.arange(n), np.arange(n))])
        return made.blend.parts[0].loss, made.line

    name = "lml, thinned" if thinned else "lml"
    assert chosen(0.0) == (
        "lml",
        f"loss: {name}, chosen by recall@1 of {n} validation rows: 100.0, against 100.0 (squared_hinge)",
    )
    loss, line = chosen(2 / n)  # two rows
    assert loss == "lml"
    assert line.endswith("against 100.0 (squared_hinge); the difference may be chance, and LML is taken then")
    assert chosen(0.05)[0] == "squared_hinge"
    if thinned:  # as many rows with complete labels can tell
        assert chosen(2 / n, replace(config, labels="complete"))[0] == "squared_hinge"


def test_a_killed_choice_is_made_again_to_the_same_weights(exact, tmp_path, monkeypatch):
    config = Config(loss="squared_hinge", C=0.5, bootstrap=0, decide="macro_f1")
    monkeypatch.setattr("lastlayer.train.choose.fit", lambda *rest: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        train({"all": noisy()}, config, tmp_path / "a")
    monkeypatch.undo()
    again = train({"all": noisy()}, config, tmp_path / "a")
    assert (again / "weights.safetensors").read_bytes() == (exact / "weights.safetensors").read_bytes()


def test_the_estimator_makes_the_same_choices():
    rows = noisy()
    x = sp.csr_matrix(np.array([[text.count(f"word{j}") for j in range(6)] for text in rows.texts], float))
    y = [rows.names(i) for i in range(len(rows))]
    model = LabelSetClassifier(loss="binary", C=1.0, decide="micro_f1", random_state=0, scale="none").fit(x, y)
    assert model.loss_ == "binary"
    assert "binary (C 1)" in model.choice_
    np.testing.assert_array_equal(model.predict(x), model.predict_proba(x) > model.decision_.threshold)
    weight = (np.arange(300) < 200).astype(float)
    heavy = LabelSetClassifier(loss="binary", C=1.0, random_state=0, scale="none").fit(x, y, sample_weight=weight)
    light = fit_linear(x[:200], rows.take(np.arange(200)), loss="logistic", C=1.0)
    np.testing.assert_allclose(heavy.network_.bias.detach(), light.intercept, atol=0.05)
    with pytest.raises(ValueError, match="partial_fit needs a loss of minibatches"):
        LabelSetClassifier(loss="squared_hinge").fit(x, y).partial_fit(x, y)


def test_platt_scaling_finds_the_slopes_and_shrinks_rare_labels():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(4000, 3)) * 2 - [0, 0, 6]
    slope, offset = np.array([0.5, 2.0, 1.0]), np.array([1.0, -1.0, 0.0])
    hot = sp.csr_matrix(rng.random((4000, 3)) < 1 / (1 + np.exp(-(scores * slope + offset))))
    found = Calibration.fit(scores, hot)
    np.testing.assert_allclose(found.slope[:2], slope[:2], rtol=0.15)
    np.testing.assert_allclose(found.offset[:2], offset[:2], atol=0.2)
    few = Calibration.fit(scores[:40], hot[:40], penalties=(64.0,))
    one = Calibration.fit(scores[:40], hot[:40], penalties=(np.inf,))
    assert abs(few.slope[2] / one.slope[2] - 1) < 0.2  # no positive row of its own
    assert np.ptp(one.slope) == 0


@pytest.mark.parametrize("place", [(0.0, 1.0), (-0.9, 0.02), (40.0, 5.0)])
def test_platt_scaling_does_not_depend_on_where_scores_lie(place):
    rng = np.random.default_rng(0)
    z = rng.normal(size=(4000, 10))
    hot = sp.csr_matrix((rng.random(z.shape) < 1 / (1 + np.exp(6 - 1.5 * z))).astype(np.int8))
    shift, scale = place
    found = Calibration.fit(shift + scale * z, hot, penalties=(np.inf,))
    np.testing.assert_allclose(found.slope[0] * scale, 1.5, atol=0.15)
    np.testing.assert_allclose(found.probability(shift + scale * z).mean(), hot.mean(), rtol=1e-3)


def test_probabilities_are_those_of_the_true_labels_where_labels_are_missing_at_random():
    rng = np.random.default_rng(0)
    true = rng.random((4000, 3)) * [0.9, 0.5, 0.1]
    z = np.log(0.5 * true / (1 - 0.5 * true)).astype(np.float32)  # the log-odds that a label is written down
    hot = sp.csr_matrix((rng.random(true.shape) < true) & (rng.random(true.shape) < 0.5))
    labels = LabelData(None, None, hot.indptr.astype(np.int64), hot.indices.astype(np.int64), ["a", "b", "c"])
    config = Config(loss="binary", labels="incomplete", observed=0.5)
    found, _ = decided(HeldOut(z, labels), config, Resolved.of(config, labels))
    assert found.observed == 0.5
    assert np.abs(found.probability(z) - true).mean() < 0.02
    sure = torch.tensor([[20.0, 5.0, 1.0, 0.5, -3.0]])  # more probable than half of the true labels can be
    y = true_probability(sure.sigmoid(), 0.5)
    assert (y.diff() < 0).all()
    assert 0.999 < y[0, 3] < y.max() <= 1
    torch.testing.assert_close(y[0, 4], 2 * sure[0, 4].sigmoid())


def test_the_share_of_recorded_labels_is_that_of_the_surest_pairs():
    rng = np.random.default_rng(1)
    true = rng.random((20_000, 8)) < 0.3
    scores = (rng.normal(size=true.shape) + 3 * true).astype(np.float32)
    hot = sp.csr_matrix(true & (rng.random(true.shape) < 0.4))
    labels = LabelData(None, None, hot.indptr.astype(np.int64), hot.indices.astype(np.int64), list("abcdefgh"))
    config, held = Config(loss="binary", labels="incomplete"), HeldOut(scores, labels)
    before = Resolved.of(config, labels)
    found = with_share(before, held, config)
    assert abs(before.observed - 0.4) > 0.05
    assert abs(found.observed - 0.4) < 0.05
    assert found.k == found.mean_count
    np.testing.assert_allclose(found.k * found.observed, labels.row_counts().mean(), rtol=1e-6)
    assert decided(held, config, found)[0].observed == found.observed
    for other in (replace(config, observed="0.7"), replace(config, k="3"), replace(config, labels="complete")):
        assert with_share(before, held, other) == before
    assert with_share(before, None, config) == before
    assert with_share(before, HeldOut(scores[:20], labels.take(np.arange(20))), config) == before


@pytest.mark.parametrize("observed", [0.0, 0.5])
def test_thresholds_are_those_of_trying_all(observed):
    rng = np.random.default_rng(0)
    y = rng.random((60, 4)).astype(np.float32)
    hot = rng.random((60, 4)) < y * (observed or 1)

    def f1(said, true):
        return 2 * (said & true).sum() / ((observed or 1) * said.sum() + true.sum())

    for rule, columns in (("micro_f1", [slice(0, 4)]), ("macro_f1", range(4))):
        level = Decision.tune(rule, y, sp.csr_matrix(hot), observed=observed).per_label(4)
        for c in columns:
            best = max(f1(y[:, c] > t, hot[:, c]) for t in [0, *y[:, c].ravel()])
            assert f1(y[:, c] > level[c], hot[:, c]) == pytest.approx(best)
    if not observed:
        level = Decision.tune("precision=0.8", y, sp.csr_matrix(hot)).threshold
        assert (hot & (y > level)).sum() >= 0.8 * (y > level).sum()
        lower = y.ravel()[y.ravel() <= level]
        assert all((hot & (y >= t)).sum() < 0.8 * (y >= t).sum() for t in lower)
        level = Decision.tune("recall=0.7", y, sp.csr_matrix(hot)).threshold
        assert level == ll.tune_recall(torch.from_numpy(y), torch.from_numpy(hot), 0.7)


def test_metrics_of_label_sets_are_those_of_the_metrics():
    rng = np.random.default_rng(0)
    said, true = sp.csr_matrix(rng.random((30, 8)) < 0.2), sp.csr_matrix(rng.random((30, 8)) < 0.2)
    found = set_metrics(said.indptr, said.indices, true.indptr, true.indices, 8)
    a, b = torch.from_numpy(said.toarray()), torch.from_numpy(true.toarray())
    for name, average in (("micro_f1", "micro"), ("macro_f1", "macro"), ("sample_f1", "samples")):
        assert found[name] == pytest.approx(float(metrics.label_set_f1(a, b, average=average)), abs=1e-6)
    assert found["hamming_loss"] == pytest.approx(float(metrics.hamming_loss(a, b)), abs=1e-6)
    assert found["exact_match"] == pytest.approx(float(metrics.exact_match(a, b)), abs=1e-6)


@pytest.mark.parametrize("labels", ["complete", "incomplete"])
@pytest.mark.parametrize("loss", [name for name, facts in LOSSES.items() if facts.exact != "only"])
def test_weights_of_rows_in_minibatches(loss, labels):
    torch.manual_seed(0)
    config = Config(loss=loss, labels=labels, lr=0.1, k=1.0)
    x, target = torch.randn(4, 3), torch.tensor([[0, 1], [2, -1], [-1, -1], [1, -1]])
    data = LabelData.from_lists([["0", "1"], ["2"], [], ["1"]], label_names=["0", "1", "2", "3"])
    module = LabelSetModule(LabelSetNetwork(3, 4), config, Resolved.of(config, data), total_steps=1)
    torch.nn.init.normal_(module.network.first.weight)
    plain = module.loss(x, target)[0]
    if loss != "two_way":  # there, three times as many rows are more rows of a column
        torch.testing.assert_close(module.loss(x, target, torch.full((4,), 3.0))[0], plain)
    twice = [0, 0, 1, 2, 3]
    torch.testing.assert_close(
        module.loss(x, target, torch.tensor([2.0, 1, 1, 1]))[0], module.loss(x[twice], target[twice])[0]
    )


def test_bad_input_is_one_line_or_a_right_answer(tmp_path):
    x = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    lists = [["a"] if row[0] > 0 else ["b"] for row in x]
    broken = x.copy()
    broken[7, 1] = np.inf
    with pytest.raises(DataError, match="features must be finite, got inf in row"):
        train({"train": LabelData.from_lists(lists, features=broken)}, Config(), tmp_path / "a")
    some = LabelData.from_lists(lists, features=x).take(np.arange(8))
    with pytest.raises(ConfigError, match="`decide` must be top_k where held-out rows have fewer"):
        train({"train": some}, Config(valid_fraction=0, decide="micro_f1", loss="binary"), tmp_path / "b")
    whole = LabelData.from_lists(lists, features=x)
    with pytest.raises(ConfigError, match="`decide` must be top_k where held-out rows have fewer than 20 labels"):
        train({"train": whole, "valid": whole.take(np.arange(9))}, Config(decide="recall=0.9"), tmp_path / "promise")
    assert not (tmp_path / "promise").exists()  # before anything is trained
    data = LabelData.from_lists([["a"]] * 60, features=x, label_names=["a", "none"])  # all alike, and one without rows
    run = train({"all": data}, Config(bootstrap=0, loss="squared_hinge"), tmp_path / "c")
    assert ll.load(run.path).predict(x[:2], k=1) == [["a"], ["a"]]
    assert np.isfinite(ll.load(run.path).predict_proba(x)).all()


def test_label_sets_choose_the_epoch(tmp_path):
    config = Config(loss="lml", epochs=3, batch_size=32, bootstrap=0, monitor="hamming_loss")
    run = train({"all": make_rows(200)}, config, tmp_path / "a")
    values = [row["hamming_loss"] for row in run.history()]
    assert run.metrics()["best_epoch"] == int(np.argmin(values))
    assert {"micro_f1", "macro_f1", "sample_f1", "exact_match"} <= run.history()[0].keys()
    assert run.history()[-1]["micro_f1"] > 0.5


@pytest.mark.parametrize(("labels", "calibrated"), [("complete", True), ("incomplete", False)])
def test_probabilities_of_lml_are_those_of_the_true_labels_where_labels_are_missing(labels, calibrated, tmp_path):
    keep = 1.0 if labels == "complete" else 0.7
    config = Config(loss="lml", labels=labels, keep=keep, bootstrap=0, epochs=2)
    run = train({"all": noisy()}, config, tmp_path / "a")
    assert (run / "calibration.safetensors").exists() == calibrated


def test_a_run_serves_the_probabilities_of_the_true_labels(tmp_path):
    config = Config(loss="binary", labels="incomplete", observed=0.6, keep=0.6, bootstrap=0)
    run = train({"all": noisy()}, config, tmp_path / "a")
    model, rows = ll.load(run.path), noisy().take(np.arange(40))
    assert model.calibration.observed == 0.6
    expected = model.calibration.probability(model.decision_function(rows))
    np.testing.assert_allclose(model.predict_proba(rows), expected, rtol=1e-5)
    with torch.no_grad():
        y = Exported(model)(torch.from_numpy(model.matrix(rows).toarray()))[1]
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-4)


def test_a_blend_is_one_network_whose_outputs_are_added():
    rng = np.random.default_rng(0)
    x = sp.random(9, 7, 0.5, "csr", random_state=rng, dtype=np.float32)
    networks = [LabelSetNetwork(7, 3, sparse=True) for _ in range(2)]
    for network in networks:
        torch.nn.init.normal_(network.first.weight)
        torch.nn.init.normal_(network.bias)
    one, other = (outputs(network, x) for network in networks)
    np.testing.assert_allclose(outputs(added(networks, (2.0, 0.5)), x), 2 * one + 0.5 * other, atol=1e-5)


@pytest.mark.parametrize("labels", ["complete", "incomplete"])
def test_losses_that_err_on_different_rows_are_blended(labels):
    """Two models of which each is sure in the half of the rows that the other one gets wrong."""
    rng, n = np.random.default_rng(0), 1200
    data = LabelData(None, None, np.arange(n + 1), rng.integers(0, 8, n), [f"label{i}" for i in range(8)])
    pool = Pool(sp.csr_matrix(rng.random((n, 3), np.float32)), data, n)
    config = Config(monitor="recall@1", at=(1,), labels=labels)
    race = _Race(pool, config, Resolved.of(config, data), lambda line: None)
    right, noise = np.eye(8, dtype=np.float32)[data.indices], rng.normal(size=(2, n, 8)).astype(np.float32)
    half = (np.arange(n) % 2 == 0)[:, None]
    parts = Candidate("squared_hinge", 1.0), Candidate("lml", 0.0, labels == "incomplete")
    race.held = [data]
    race.scores = {c: [np.where(half == i, 3 * right, 0) + 0.2 * noise[i]] for i, c in enumerate(parts)}
    race.networks = {c: LabelSetNetwork(3, 8, sparse=True) for c in parts}
    race._drop()
    made = race.finish([(np.arange(n), np.arange(n))])
    assert set(made.blend.parts) == set(parts)
    assert made.resolved.blend == made.blend.names()
    assert made.resolved.probability == "lml"
    np.testing.assert_allclose(np.std(made.blend.scales) / np.mean(made.blend.scales), 0, atol=0.1)
    assert " + " in made.line
    assert [line["chosen"] for line in made.table] == [True, True]


def test_whole_groups_are_set_aside_where_rows_are_many():
    n, config = 20_000, Config(loss="binary")
    groups = [f"group{i // 40}" for i in range(n)]
    data = LabelData(None, None, np.arange(n + 1), np.arange(n) % 2, ["a", "b"], groups=groups)
    for rows in (data, replace(data, groups=None)):
        (fitted, held), *others = _splits(Pool(sp.csr_matrix((n, 1)), rows, n), config, True)
        assert len(others) == (0 if rows.groups is None else 4)
        assert sorted([*fitted, *held]) == list(range(n))
        assert abs(len(held) - n // (5 if others else 10)) <= 40
        shared = {groups[i] for i in fitted} & {groups[i] for i in held}
        assert bool(shared) == (rows.groups is None)


@pytest.mark.parametrize("n", [40, FEW, 10 * GROUPED])
@pytest.mark.parametrize("n_groups", [1, 2, 3])
def test_few_groups_are_as_many_folds(n, n_groups):
    groups = np.arange(n) % n_groups
    data = LabelData(None, None, np.arange(n + 1), np.arange(n) % 2, ["a", "b"], groups=[f"g{g}" for g in groups])
    splits = list(_splits(Pool(sp.csr_matrix((n, 1)), data, n), Config(loss="binary"), True))
    assert len(splits) == (0 if n_groups == 1 else 1 if n == 10 * GROUPED else n_groups)
    for fitted, held in splits:
        assert not set(groups[fitted]) & set(groups[held])
        assert len(fitted) + len(held) == n


@pytest.mark.parametrize("n_groups", [1, 3])
def test_estimator_with_few_groups(n_groups):
    x = np.random.default_rng(0).normal(size=(60, 4))
    y = (x > 0).astype(int)
    model = LabelSetClassifier(random_state=0).fit(x, y, groups=np.arange(60) % n_groups)
    assert model.score(x, y) > 0.9
    assert ("too few rows or groups" in model.choice_) == (n_groups == 1)


def test_groups_reach_the_choice_and_the_trees(monkeypatch):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 3)), rng.integers(0, 2, (60, 4))
    groups, seen = np.arange(60) // 6, []
    kept = LabelSetClassifier(C=1.0, loss="binary", random_state=0)
    monkeypatch.setattr("lastlayer.train.choose._splits", lambda pool, *rest: seen.append(pool.labels.groups) or [])
    kept.fit(x, y, groups=groups)
    assert seen == [[str(group) for group in groups]]
    trees = [LabelSetClassifier(tree=1, random_state=0).fit(x, y, groups=g).predict_proba(x) for g in (None, groups)]
    assert not np.array_equal(*trees)
    with pytest.raises(ValueError, match="`groups` must have one value per row, 60, got 2"):
        kept.fit(x, y, groups=[0, 1])


def _labels_of(hot, weights=None):
    hot = sp.csr_matrix(hot)
    names = [f"label{i}" for i in range(hot.shape[1])]
    return LabelData(None, None, hot.indptr.astype(np.int64), hot.indices.astype(np.int64), names, weights=weights)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("options", [{}, {"labels": "incomplete"}])
def test_rows_of_weight_0_do_not_choose(options, dense):
    """Rows of weight 0 whose labels are nonsense leave everything as it is without them."""
    rows = noisy(240)
    x = sp.csr_matrix(np.array([[text.count(f"word{j}") for j in range(6)] for text in rows.texts], np.float32))
    y = [rows.names(i) for i in range(240)]
    weight = (np.arange(240) % 3 < 2).astype(float)
    if dense:
        x = np.where(weight[:, None] > 0, x.toarray(), 100)
    spoilt = [names if w else ["label5"] for names, w in zip(y, weight, strict=True)]
    model = LabelSetClassifier(random_state=0, **options).fit(x, spoilt, sample_weight=weight)
    used = np.flatnonzero(weight)
    alone = LabelSetClassifier(random_state=0, **options).fit(x[used], [y[i] for i in used])
    assert model.choice_ == alone.choice_
    np.testing.assert_allclose(model.predict_proba(x), alone.predict_proba(x), rtol=1e-5)
    np.testing.assert_array_equal(model.predict(x), alone.predict(x))


def _parts(spoilt):
    """Training and validation rows; every other one of the latter has weight 0 and a wrong label, or is absent."""
    valid = noisy(60, seed=1)
    if not spoilt:
        return {"train": noisy(100), "valid": valid.take(np.arange(0, 60, 2))}
    names = [["label5"] if i % 2 else valid.names(i) for i in range(60)]
    more = {"weights": 1.0 - np.arange(60) % 2, "texts": valid.texts, "ids": valid.ids}
    return {"train": noisy(100), "valid": LabelData.from_lists(names, label_names=valid.label_names, **more)}


@pytest.mark.parametrize("monitor", ["valid_loss", "micro_f1"])
def test_rows_of_weight_0_do_not_choose_the_epoch(monitor, tmp_path):
    config = Config(loss="lml", epochs=3, bootstrap=0, monitor=monitor)
    runs = [train(_parts(spoilt), config, tmp_path / str(spoilt)) for spoilt in (True, False)]
    one, other = ([{k: v for k, v in line.items() if k != "seconds"} for line in run.history()] for run in runs)
    assert one == other
    assert runs[0].metrics()["best_epoch"] == runs[1].metrics()["best_epoch"]


def test_validation_rows_that_all_have_weight_0_are_measured(tmp_path):
    parts = _parts(True)
    parts["valid"] = replace(parts["valid"], weights=np.zeros(60))
    run = train(parts, Config(loss="lml", epochs=1, bootstrap=0), tmp_path / "a")
    assert run.history()[0]["ndcg@5"] > 0


def test_rows_of_weight_0_in_a_run_do_not_choose(tmp_path):
    config = Config(bootstrap=0, refit="false", monitor="micro_f1", solver="dual")
    runs = [train(_parts(spoilt), config, tmp_path / str(spoilt)) for spoilt in (True, False)]
    one, other = ((run / "choice.json").read_text().partition('"candidates"')[0] for run in runs)
    assert one == other
    for name in ("weights.safetensors", "calibration.safetensors", "decision.json"):
        assert (runs[0] / name).read_bytes() == (runs[1] / name).read_bytes()


@pytest.mark.parametrize("monitor", ["recall@1", "ndcg@3", "micro_f1", "macro_f1", "hamming_loss"])
def test_a_weight_of_2_is_that_of_two_held_out_rows(monitor):
    rng, n = np.random.default_rng(0), 200
    hot = rng.random((n, 5)) < 0.3
    outputs = [(rng.normal(size=(n, 5)) + slope * hot).astype(np.float32) for slope in (2.0, 1.7)]
    times = rng.integers(0, 4, n)
    config, found = Config(monitor=monitor, at=(1, 3)), []
    parts = Candidate("squared_hinge", 1.0), Candidate("binary", 1.0)
    for rows, weights in ((np.arange(n), times.astype(float)), (np.repeat(np.arange(n), times), None)):
        data = _labels_of(hot[rows], weights)
        race = _Race(Pool(np.zeros((len(rows), 1)), data, len(rows)), config, Resolved.of(config, data), print)
        race.held, race.scores = [data], {c: [z[rows]] for c, z in zip(parts, outputs, strict=True)}
        found.append([*map(race.value, parts), *map(race.slope, parts)])
        if "@" in monitor:
            ours, theirs = race.each(parts[1]), race.each(parts[0])
            race.measured = {parts[0]: [theirs + 0.5], parts[1]: [ours]}
            found[-1].append(race._behind(parts[1], parts[0]))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-3)


def test_chance_is_judged_by_the_number_of_rows_that_count():
    rng, n = np.random.default_rng(0), 400
    best, other = Candidate("squared_hinge", 1.0), Candidate("binary", 1.0)
    config, found = Config(monitor="recall@1", at=(1,)), {}
    for few in (4, n):
        weights = np.where(np.arange(n) < few, 1.0, 1e-6)
        data = _labels_of(np.ones((n, 2)), weights)
        race = _Race(Pool(np.zeros((n, 1)), data, n), config, Resolved.of(config, data), print)
        race.held, race.measured = [data], {best: [np.full(n, 0.9)], other: [0.7 + 0.5 * rng.normal(size=n)]}
        found[few] = race._behind(other, best)
    assert found[4] is None  # four rows cannot tell
    assert found[n] == pytest.approx(0.2, abs=0.1)


def test_thresholds_and_the_share_of_labels_count_rows_by_their_weights():
    rng, n = np.random.default_rng(0), 3000
    true = rng.random((n, 4)) < 0.3
    hot = true & (rng.random((n, 4)) < np.where(np.arange(n) % 2, 0.8, 0.2)[:, None])  # two kinds of rows
    scores = (rng.normal(size=(n, 4)) + 4 * true).astype(np.float32)
    times = np.where(np.arange(n) % 2, 2, 1) * (rng.random(n) < 0.8)
    rows = np.repeat(np.arange(n), times)
    y, weight = 1 / (1 + np.exp(-scores)), times.astype(float)
    for rule in ("micro_f1", "macro_f1", "precision=0.5"):
        one = Decision.tune(rule, y, sp.csr_matrix(hot), weight=weight).threshold
        other = Decision.tune(rule, y[rows], sp.csr_matrix(hot[rows])).threshold
        np.testing.assert_allclose(one, other, atol=2e-3)
    config = Config(labels="incomplete", loss="binary")
    held, again = HeldOut(scores, _labels_of(hot, weight)), HeldOut(scores[rows], _labels_of(hot[rows]))
    shares = [with_share(Resolved.of(config, one.labels), one, config).observed for one in (held, again)]
    np.testing.assert_allclose(*shares, rtol=0.05)
    plain = HeldOut(scores, _labels_of(hot))
    assert abs(with_share(Resolved.of(config, plain.labels), plain, config).observed / shares[1] - 1) > 0.1
    used = np.flatnonzero(times)
    kept = HeldOut(scores[used], _labels_of(hot[used], weight[used]))
    for settings in (Config(), replace(config, observed=0.5), Config(decide="recall=0.8")):
        resolved = Resolved.of(settings, kept.labels)
        (one, level), (other, same) = decided(held, settings, resolved), decided(kept, settings, resolved)
        np.testing.assert_array_equal(one.slope, other.slope)
        np.testing.assert_array_equal(level.threshold, same.threshold)
        assert one.rows == len(used)
