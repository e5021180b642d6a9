"""Relations from pair scores: against a sort over all of them."""

import itertools

import pytest
import torch

from lastlayer import DecodeGraph, decode_graph

INF = float("inf")


def plain(scores, pairs, k, constrained, object_scores=None, background=None):
    """One image, lists of numbers: rank candidates by score, pair, predicate."""
    found = []
    for i, (row, (s, o)) in enumerate(zip(scores, pairs, strict=True)):
        weight = 1 if object_scores is None else object_scores[s] * object_scores[o]
        candidates = [(-x * weight, i, r) for r, x in enumerate(row) if r != background and x == x and x > -INF]
        found += sorted(candidates)[:1] if constrained else candidates
    ranked = [[*pairs[i], r] for _, i, r in sorted(found)[:k]]
    return ranked + [[-1, -1, -1]] * (k - len(ranked))


def all_pairs(n):
    return torch.tensor([(i, j) for i in range(n) for j in range(n) if i != j])


def test_by_hand():
    scores = torch.tensor([[0.9, 0.5, 0.1], [0.0, 0.6, 0.8]])  # column 0 is "no relation"
    pairs = torch.tensor([[0, 1], [1, 0]])
    index, score = decode_graph(scores, pairs, 3, background=0)
    assert index.tolist() == [[1, 0, 2], [0, 1, 1], [-1, -1, -1]]
    torch.testing.assert_close(score, torch.tensor([0.8, 0.5, -INF]))
    assert torch.equal(DecodeGraph(3, background=0)(scores, pairs).index, index)
    free = decode_graph(scores, pairs, 3, background=0, constrained=False)
    assert free.index.tolist() == [[1, 0, 2], [1, 0, 1], [0, 1, 1]]


@pytest.mark.parametrize("constrained", [True, False])
@pytest.mark.parametrize("background", [None, 0, 3])
def test_agrees_with_a_sort(constrained, background):
    pairs = all_pairs(4)
    objects = torch.rand(4, dtype=torch.float64)
    for _ in range(10):
        scores = torch.randint(0, 5, (12, 4)).double() / 4  # ties
        scores[torch.rand(12, 4) < 0.1] = -INF
        for given in (None, objects):
            found = decode_graph(
                scores, pairs, 9, constrained=constrained, background=background, object_scores=given
            ).index
            weights = None if given is None else given.tolist()
            # A pair whose every predicate is at -inf has no relation.
            assert found.tolist() == plain(scores.tolist(), pairs.tolist(), 9, constrained, weights, background)


@pytest.mark.parametrize("constrained", [True, False])
def test_ragged_images_are_those_alone(constrained):
    sizes = [6, 0, 2, 12, 0]
    scores = torch.rand(sum(sizes), 5)
    pairs = torch.randint(0, 9, (sum(sizes), 2))
    ptr = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()])
    index, score = decode_graph(scores, pairs, 7, constrained=constrained, ptr=ptr)
    assert index.shape == (5, 7, 3)
    for i, (a, b) in enumerate(itertools.pairwise(ptr.tolist())):
        alone = decode_graph(scores[a:b], pairs[a:b], 7, constrained=constrained)
        assert torch.equal(index[i], alone.index)
        assert torch.equal(score[i], alone.score)


def test_batches_masks_and_edges():
    scores, pairs = torch.rand(2, 3, 6, 4), all_pairs(3)
    index, _ = decode_graph(scores, pairs, 5)
    assert index.shape == (2, 3, 5, 3)
    assert torch.equal(index[1, 2], decode_graph(scores[1, 2], pairs, 5).index)
    mask = torch.zeros(6, dtype=torch.bool)
    mask[2] = True
    only = decode_graph(scores[0, 0], pairs, 5, mask=mask[:, None], constrained=False).index
    assert only[:4, :2].tolist() == [pairs[2].tolist()] * 4
    assert only[4].tolist() == [-1, -1, -1]
    assert decode_graph(torch.rand(0, 4), torch.empty(0, 2, dtype=torch.long), 2).index.tolist() == [[-1, -1, -1]] * 2
    assert decode_graph(torch.rand(3, 0), all_pairs(3)[:3], 1).index.tolist() == [[-1, -1, -1]]
    assert decode_graph(torch.rand(0, 4), torch.empty(0, 2, dtype=torch.long), ptr=torch.tensor([0])).index.shape == (
        0,
        100,
        3,
    )


def test_padded_pairs_are_never_chosen():
    scores, pairs = torch.rand(2, 6, 4), all_pairs(3).repeat(2, 1, 1)
    pairs[0, 4:], pairs[1, 0, 1] = -1, -1
    for options in ({}, {"object_scores": torch.rand(3)}):
        whole = decode_graph(scores, pairs, 30, constrained=False, **options).index
        assert (whole[..., 0] >= 0).sum(-1).tolist() == [16, 20]
        alone = decode_graph(scores[0, :4], pairs[0, :4], 30, constrained=False, **options).index
        assert torch.equal(whole[0], alone)


def test_constrained_has_each_pair_once():
    index = decode_graph(torch.rand(12, 7), all_pairs(4), 100).index
    seen = [tuple(p) for p in index[index[:, 0] >= 0][:, :2].tolist()]
    assert len(seen) == len(set(seen)) == 12


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda s, p: decode_graph(s[0], p), ValueError, r"decode_graph: `scores` must have shape \(..., n_pairs, n_p"),
        (lambda s, p: decode_graph(s, p.float()), TypeError, "`pairs` must be a tensor of an integer dtype, got torch"),
        (
            lambda s, p: decode_graph(s, p[:3]),
            ValueError,
            r"`pairs` must hold a subject and an object .* got shape \(3",
        ),
        (lambda s, p: decode_graph(s, p, ptr=p), ValueError, r"`ptr` must have shape \(n_images \+ 1,\), got \(6, 2\)"),
        (lambda s, p: decode_graph(s[None], p, ptr=p), ValueError, r"must have shape \(all pairs, n_predicates\)"),
        (lambda s, p: decode_graph(s, p, ptr=torch.tensor([0, 5])), ValueError, "`ptr` must go from 0 to the 6 pairs"),
        (
            lambda s, p: decode_graph(s, p, object_scores=s[0, :2]),
            ValueError,
            "`pairs` must hold objects below n_objects=2, got 2",
        ),
        (
            lambda s, p: decode_graph(s, p, background=4),
            ValueError,
            "`background` must be a column of `scores`, -4 to 3",
        ),
        (
            lambda s, p: decode_graph(s, p, object_scores=s),
            ValueError,
            r"`object_scores` must have shape \(n_objects,\)",
        ),
    ],
)
def test_messages(call, error, text):
    with pytest.raises(error, match=text):
        call(torch.rand(6, 4), all_pairs(3))
