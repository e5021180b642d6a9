import pytest
from train_tools import make_rows

from lastlayer.data import LabelData


@pytest.fixture
def rows() -> LabelData:
    return make_rows()
