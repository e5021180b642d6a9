"""The readers, batches and baselines of the scene-graph experiment, on images small enough to write down."""

import argparse
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from experiments.scene_graphs import data, run

ARRAYS = {  # three images: two boxes and two relations; no box; three boxes and one relation
    "boxes_1024": np.array([[10, 10, 4, 6], [30, 10, 8, 8], [5, 5, 2, 2], [9, 9, 4, 4], [7, 7, 2, 6]], np.int32),
    "labels": np.array([[3], [1], [2], [2], [1]], np.int64),
    "img_to_first_box": np.array([0, -1, 2]),
    "img_to_last_box": np.array([1, -1, 4]),
    "img_to_first_rel": np.array([0, -1, 2]),
    "img_to_last_rel": np.array([1, -1, 2]),
    "relationships": np.array([[0, 1], [0, 1], [4, 2]], np.int32),
    "predicates": np.array([[2], [1], [4]], np.int64),
    "split": np.array([0, 0, 2], np.int32),
}


def check(graphs):
    assert graphs.boxes[:2].tolist() == [[8, 7, 12, 13], [26, 6, 34, 14]]  # centre and size to corners
    assert graphs.labels.tolist() == [2, 0, 1, 1, 0]  # counted from 0
    assert graphs.relations.tolist() == [[0, 1, 1], [0, 1, 0], [4, 2, 3]]
    assert (graphs.n_labels, graphs.n_predicates) == (3, 4)
    assert graphs.images(test=False).tolist() == [0]
    assert graphs.images(test=True).tolist() == [2]
    assert graphs.triplets(np.array([2, 0])).tolist() == [[0, 1, 3], [2, 0, 1], [2, 0, 0]]
    assert graphs.padded_relations(np.array([0, 2])).tolist() == [
        [[0, 1, 1], [0, 1, 0]],
        [[4, 2, 3], [-1, -1, -1]],
    ]


def test_visual_genome_arrays():
    check(data.from_visual_genome(ARRAYS))


def test_visual_genome_file(tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "VG-SGG.h5", "w") as file:
        for name, value in ARRAYS.items():
            file[name] = value
    check(data.load(tmp_path))


def test_visual_genome_arrays_in_npz(tmp_path):
    np.savez(tmp_path / "VG-SGG.npz", **ARRAYS)
    check(data.load(tmp_path))


def test_an_image_without_a_pair_is_tested_and_not_trained_on():
    one_box = ARRAYS | {"img_to_last_box": np.array([0, -1, 4]), "relationships": np.array([[0, 0], [0, 0], [4, 2]])}
    assert data.from_visual_genome(one_box).images(test=False).tolist() == []
    graphs = data.from_visual_genome(one_box | {"split": np.array([2, 0, 2])})
    images = graphs.images(test=True)
    assert images.tolist() == [0, 2]
    assert data.batch_of(graphs, images, np.random.default_rng(0)).ptr.tolist() == [0, 0, 6]


def test_visual_genome_file_without_h5py(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    (tmp_path / "VG-SGG.h5").touch()
    with pytest.raises(SystemExit, match="pip install h5py"):
        data.load(tmp_path)


def test_rows_of_images_may_stand_in_any_order():
    swapped = ARRAYS | {
        f"img_to_{end}_{kind}": ARRAYS[f"img_to_{end}_{kind}"][[2, 1, 0]]
        for end in ("first", "last")
        for kind in ("box", "rel")
    }
    graphs = data.from_visual_genome(swapped)
    assert graphs.labels.tolist() == [1, 1, 0, 2, 0]
    assert graphs.relations.tolist() == [[2, 0, 3], [3, 4, 1], [3, 4, 0]]


def test_vrd(tmp_path):
    np.savez(
        tmp_path / "vrd.npz",
        boxes=np.array([[0, 0, 9, 9], [5, 5, 20, 20]], np.int16),
        labels=np.array([1, 0], np.uint8),
        rels=np.array([[1, 0, 1]], np.int32),
        first_box=np.array([0, 2, 2], np.int32),
        first_rel=np.array([0, 1, 1], np.int32),
        split=np.array([0, 1], np.uint8),
        obj_w2v=np.ones((2, 3), np.float16),
        pred_w2v=np.ones((4, 3), np.float16),
    )
    graphs = data.load(tmp_path)
    assert graphs.triplets(graphs.images(test=False)).tolist() == [[0, 1, 1]]
    assert (graphs.n_labels, graphs.n_predicates, graphs.test.tolist()) == (2, 4, [False, True])


def test_no_data(tmp_path):
    with pytest.raises(SystemExit, match="neither"):
        data.load(tmp_path)


def test_batch_holds_all_ordered_pairs_and_their_relations():
    graphs = data.from_visual_genome(ARRAYS)
    batch = data.batch_of(graphs, np.array([0, 2]), np.random.default_rng(0))
    assert batch.pairs.tolist() == [[0, 1], [1, 0], [2, 3], [2, 4], [3, 2], [3, 4], [4, 2], [4, 3]]
    assert batch.objects.flatten()[batch.slots].equal(batch.pairs)
    assert batch.present.tolist() == [[True, True, False], [True, True, True]]
    assert batch.ptr.tolist() == [0, 2, 8]
    assert batch.labels.tolist() == [[0, 1], [4 * 4 + 3, -1]]  # pair 0 with predicates 0 and 1; pair 4 with 3
    assert batch.one_each[0] in (0, 1)
    assert batch.one_each[1:].tolist() == [4, 4, 4, 4, 4, 3, 4]

    rows = run.by_image(torch.arange(8.0)[:, None].expand(8, 5), batch)  # 4 predicates and "no relation"
    assert rows.shape == (2, 8 * 4)
    assert rows[0].tolist() == [0.0] * 4 + [1.0] * 4 + [-torch.inf] * 24
    assert rows[1, batch.labels[1, 0]] == 6.0  # the pair (4, 2)


@pytest.mark.parametrize("most", [1, 3, 5, 100])
def test_a_smaller_batch_keeps_the_relations(most):
    graphs = data.tiny()
    images = graphs.images(test=False)
    whole = data.batch_of(graphs, images, np.random.default_rng(0))
    some = data.batch_of(graphs, images, np.random.default_rng(0), most)
    assert some.ptr.diff().tolist() == whole.ptr.diff().clamp(max=most).tolist()
    related = torch.zeros(len(images), dtype=torch.long).index_add(
        0, whole.image, (whole.one_each < graphs.n_predicates).long()
    )
    kept = torch.zeros_like(related).index_add(0, some.image, (some.one_each < graphs.n_predicates).long())
    assert kept.tolist() == related.clamp(max=most).tolist()
    truth = {tuple(row) for row in graphs.relations}
    for image, labels in enumerate(some.labels):
        for label in labels[labels >= 0].tolist():
            pair = some.pairs[some.ptr[image] + label // graphs.n_predicates]
            assert (*pair.tolist(), label % graphs.n_predicates) in truth


def test_frequency_baseline_by_hand():
    graphs = data.from_visual_genome(ARRAYS)
    score = run.frequency(graphs, np.array([0]), "cpu")
    batch = data.batch_of(graphs, np.array([0]), np.random.default_rng(0))
    # The pair (2, 0) of classes was seen once, with two relations: 1 / (2 + 1 + 1) each. The other way round: never.
    assert score(batch).tolist() == [[0.25, 0.25, 0, 0], [-torch.inf] * 4]


@pytest.mark.parametrize("loss", run.LOSSES)
def test_losses_have_gradients_where_they_should(loss):
    graphs = data.tiny()
    batch = data.batch_of(graphs, graphs.images(test=False)[:8], np.random.default_rng(0))
    scores = torch.zeros(len(batch.pairs), graphs.n_predicates + 1, requires_grad=True)
    run.LOSSES[loss](scores, batch).backward()
    assert scores.grad.isfinite().all()
    assert (scores.grad[:, -1] != 0).any() == (loss == run.SOFTMAX)  # only that one knows of "no relation"
    label = batch.labels[0, 0]
    assert scores.grad[label // graphs.n_predicates, label % graphs.n_predicates] < 0 or loss == run.SOFTMAX


@pytest.mark.slow
def test_training_finds_the_rule_of_the_tiny_images(monkeypatch):
    graphs = data.tiny()
    flat = torch.zeros(graphs.n_labels, graphs.n_labels, graphs.n_predicates + 1)
    monkeypatch.setattr(run, "prior", lambda *_: flat)  # else the answer is there before training
    arguments = argparse.Namespace(device="cpu", hidden=32, dropout=0.0, weight_decay=0.01, batch=8, most_pairs=1024)
    images, held = run.parts(graphs, "test", 0)
    found = {}
    for epochs in (1, 20):
        setting = {"seed": 0, "loss": "LML 50", "lr": 1e-2, "epochs": epochs}
        network = run.train(graphs, images, setting, arguments)
        found[epochs] = run.measure(
            graphs, held, graphs.triplets(images), network, {"": run.relation_scores}, arguments.device
        )
    assert found[1]["uR@50"] < 0.7 < 0.9 < found[20]["uR@50"]
    assert found[20]["R@100"] <= 0.5  # each pair has two relations, and one is allowed


def test_only_the_settings_chosen_now_are_shown():
    recalls = [f"{mode}R@{cut}" for mode in run.MODES for cut in run.CUTS]

    def row(part, lr, value):
        return {"data": "d", "part": part, "loss": "LML 20", "lr": lr, "epochs": 5} | dict.fromkeys(recalls, value)

    baseline = {"data": "d", "part": "test", "loss": run.FREQUENCY}
    rows = [baseline, row("valid", 0.1, 0.5), row("valid", 0.2, 0.6), row("test", 0.1, 0.9), row("test", 0.2, 0.4)]
    assert run.chosen(rows, "d", "LML 20") == {"lr": 0.2, "epochs": 5}
    assert run.final(rows, "d") == [baseline, rows[-1]]
