"""Which kernels rows of a length are given."""

import pytest

from lastlayer._triton import plan

TABLES = (plan.FORWARD, plan.LOSS, plan.DENSE, plan.BACKWARD)


@pytest.fixture
def fresh(monkeypatch):
    monkeypatch.setattr(plan, "_seen", {})
    monkeypatch.setattr(plan, "PATIENCE", 3)
    monkeypatch.setattr(plan, "OFTEN", 5)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_lengths_that_vary_share_few_kernels(itemsize, fresh):
    for tables in TABLES:
        plans = {repr(plan.plan(n, tables, itemsize)) for n in range(2, 5001)}
        assert len(plans) <= 5  # forward and backward together stay below 12


def test_a_length_met_in_succession_or_often_is_given_its_own(fresh):
    def own(n):
        return plan.plan(n, plan.FORWARD, 4) is plan.exact(n, plan.FORWARD[4], 4)

    assert [own(1000) for _ in range(4)] == [False, False, True, True]
    alternating = [[own(n) for n in (300, 500)] for _ in range(6)]
    assert alternating == [[False, False]] * 4 + [[True, True]] * 2


@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_plan_covers_its_rows(itemsize):
    for tables in TABLES:
        table = tables[itemsize]
        for n in (*range(1, 300), 1000, 5000, 12289, plan.LONGEST):
            for found in (plan.exact(n, table, itemsize), plan.shared(n)):
                covered = found.tiles["C"] * (found.tiles["WA"] + found.tiles["WB"] + found.tiles["WC"])
                assert covered >= n
                assert n % found.align == 0
                assert not found.tiles["FULL"] or covered == n
