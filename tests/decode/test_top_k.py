"""The k best classes: against a sort in Python."""

import inspect

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import lastlayer as ll
from lastlayer import Decoded, DecodeTopK, decode_threshold, decode_top_k, lml

INF, NAN = float("inf"), float("nan")


def plain(row, k):
    """Sort by score, then by index; nothing at -inf or nan."""
    usable = [(-s, i) for i, s in enumerate(row) if s == s and s > -INF]
    chosen = [i for _, i in sorted(usable)[:k]]
    return chosen + [-1] * (k - len(chosen))


def test_by_hand():
    index, score = decode_top_k(torch.tensor([[0.1, 0.9, 0.4], [0.5, 0.2, 0.5]]), 2)
    assert index.tolist() == [[1, 2], [0, 2]]
    torch.testing.assert_close(score, torch.tensor([[0.9, 0.4], [0.5, 0.5]]))
    assert index.dtype == torch.int64


@pytest.mark.parametrize("k", [0, 1, 3, 7, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_agrees_with_a_sort(k, dtype):
    scores = torch.randint(-2, 3, (50, 7)).to(dtype)  # many ties
    scores[torch.rand(50, 7) < 0.2] = -INF
    scores[torch.rand(50, 7) < 0.1] = torch.nan
    index, score = decode_top_k(scores, k)
    assert index.tolist() == [plain(row, k) for row in scores.tolist()]
    assert score.dtype == dtype
    torch.testing.assert_close(score, torch.where(index >= 0, scores.gather(-1, index.clamp(min=0)), -INF)[:, :k])


def test_ties_across_the_cut_take_the_lowest_index():
    scores = torch.zeros(3, 1000)
    scores[1, 500:] = 1
    assert decode_top_k(scores, 4).index.tolist() == [[0, 1, 2, 3], [500, 501, 502, 503], [0, 1, 2, 3]]


def test_one_k_per_row():
    scores = torch.tensor([[3.0, 2.0, 1.0]]).expand(5, 3)
    index, score = decode_top_k(scores, torch.tensor([0.0, 1.4, 2.0, 9.0, -1.0]))
    assert index.tolist() == [[-1, -1, -1], [0, -1, -1], [0, 1, -1], [0, 1, 2], [-1, -1, -1]]
    assert (score[index < 0] == -INF).all()
    assert decode_top_k(scores, torch.tensor([0, 1, 2, 9, 1]), at_most=2).index.shape == (5, 2)
    assert decode_top_k(scores, torch.tensor(2)).index.tolist() == [[0, 1]] * 5


def test_auto_is_the_rounded_sum():
    p = lml(torch.randn(20, 9), k=3.3)
    assert torch.equal(decode_top_k(p, "auto").index, decode_top_k(p, 3).index)
    q = torch.tensor([[0.9, 0.8, 0.9], [0.1, 0.1, 0.2], [torch.nan, 0.7, 0.6]])
    assert decode_top_k(q, "auto").index.tolist() == [[0, 2, 1], [-1, -1, -1], [1, -1, -1]]
    assert decode_top_k(q, "auto", mask=torch.tensor([True, False, True])).index.tolist() == [[0, 2], [-1, -1], [2, -1]]


def test_mask_rules_classes_out():
    scores = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    mask = torch.tensor([[False, True, True], [False, False, False]])
    assert decode_top_k(scores, 2, mask=mask).index.tolist() == [[1, 2], [-1, -1]]


@pytest.mark.parametrize("shape", [(5,), (0, 5), (2, 3, 5), (1, 1), (3, 0)])
def test_any_batch_shape(shape):
    scores = torch.randn(shape)
    for k in (2, torch.full(shape[:-1], 2), "auto"):
        index, score = decode_top_k(scores.sigmoid(), k)
        assert index.shape == score.shape
        assert index.shape[:-1] == shape[:-1]
    assert decode_top_k(scores, 2).index.shape == (*shape[:-1], 2)


def test_rows_are_independent_and_classes_can_be_permuted():
    scores = torch.randn(6, 40)
    order = torch.randperm(40)
    index = decode_top_k(scores, 5).index
    assert torch.equal(order[decode_top_k(scores[:, order], 5).index], index)
    assert torch.equal(decode_top_k(scores[2], 5).index, index[2])


def test_scores_have_a_gradient():
    scores = torch.tensor([[1.0, 5.0, 3.0]], requires_grad=True)
    _, score = decode_top_k(scores, 2)
    score.sum().backward()
    assert scores.grad.tolist() == [[0.0, 1.0, 1.0]]


def test_compiles_with_a_fixed_width():
    compiled = torch.compile(lambda s: decode_top_k(s, "auto", at_most=3), fullgraph=True, backend="aot_eager")
    p = torch.rand(4, 6).round(decimals=1)
    assert torch.equal(compiled(p).index, decode_top_k(p, "auto", at_most=3).index)


def test_module():
    scores = torch.randn(3, 5)
    found = DecodeTopK(2)(scores)
    assert isinstance(found, Decoded)
    assert torch.equal(found.index, decode_top_k(scores, 2).index)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (([1.0], 1), TypeError, r"decode_top_k: `scores` must be a tensor, got list"),
        ((torch.zeros(2, 3), -1), ValueError, r"`k` must be a whole number of at least 0, got -1. Round or raise it."),
        ((torch.zeros(2, 3), 1.5), ValueError, r"`k` must be a whole number of at least 0, got 1.5"),
        ((torch.zeros(2, 3), True), TypeError, r"`k` must be a whole number, got bool"),
        ((torch.zeros(2, 3), "many"), ValueError, r"`k` must be one of 'auto', got 'many'"),
        ((torch.zeros(2, 3), torch.ones(3)), ValueError, r"`k` must broadcast to the batch shape \(2,\)"),
    ],
)
def test_messages(arguments, error, text):
    with pytest.raises(error, match=text):
        decode_top_k(*arguments)


def test_without_values():
    """On meta tensors and under transforms the lists have the right shape; values are the same under vmap."""
    for scores in (torch.zeros(3, 5, device="meta"), torch.zeros(3, 1, device="meta")):
        for found in (decode_top_k(scores, 2), decode_top_k(scores, "auto", at_most=2)):
            assert found.index.is_meta
            assert found.index.shape == found.score.shape == (3, 2)
        assert decode_threshold(scores, at_most=4, at_least=1).index.shape == (3, 4)
    with pytest.raises(ValueError, match=r"decode_top_k: `at_most` must be given where the lengths of lists cannot be"):
        decode_top_k(scores, "auto")
    with pytest.raises(ValueError, match=r"decode_threshold: `at_most` must be given where"):
        decode_threshold(scores)
    scores = torch.randint(-2, 3, (20, 7)).float()
    scores[torch.rand(20, 7) < 0.2] = torch.nan
    assert torch.equal(torch.vmap(lambda row: decode_top_k(row, 3).index)(scores), decode_top_k(scores, 3).index)
    with FakeTensorMode() as mode:
        assert decode_top_k(mode.from_tensor(scores), 3).index.shape == (20, 3)
    traced = make_fx(lambda s: decode_top_k(s, 3).index)(torch.randn(20, 7))
    assert torch.equal(traced(scores), decode_top_k(scores, 3).index)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_jit_traces_hold_for_ties_and_nan():
    """The example has none of them."""
    traced = torch.jit.trace(lambda s: decode_top_k(s, 3), torch.randn(4, 7), check_trace=False)
    scores = torch.tensor([[0.0] * 7, [1, 2, NAN, 2, 0, 2, 2], [-INF, 1, -INF, NAN, -INF, -INF, -INF]])
    for found, expected in zip(traced(scores), decode_top_k(scores, 3), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("module", [ll.DecodeTopK, ll.DecodeThreshold, ll.DecodeReject, ll.DecodeTree, ll.DecodeGraph])
def test_modules_declare_what_forward_takes(module):
    """What a call may give is an argument of the function that the module does not store, under the same name."""
    forward = inspect.signature(module.forward).parameters
    function = inspect.signature(module.function).parameters
    stored = inspect.signature(module.__init__).parameters
    assert set(forward) | set(stored) == {"self", *function}
    assert all(p.kind is not p.VAR_POSITIONAL and p.kind is not p.VAR_KEYWORD for p in forward.values())
    assert inspect.signature(module.forward).return_annotation == "Decoded"
