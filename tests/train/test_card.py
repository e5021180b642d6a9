"""The model card of a run: its numbers are those of the run, and a user's words are no markup."""

import pytest
from train_tools import make_rows

from lastlayer.data import LabelData
from lastlayer.train import Config, train
from lastlayer.train.card import of


def test_numbers_are_those_of_the_run(tmp_path):
    data = make_rows(200)
    names = ["a|b*c", *data.label_names[1:]]
    lists = [[names[i] for i in data.row_labels(row)] for row in range(len(data))]
    rows = LabelData.from_lists(lists, texts=data.texts)
    run = train({"all": rows}, Config(loss="binary", epochs=3, bootstrap=20, accelerator="cpu"), tmp_path / "run")
    card = (run.path / "model_card.md").read_text()
    found = run.metrics()["metrics"]["recall@5"]
    shown = [f"{100 * found[key]:.1f}" for key in ("value", "low", "high")]
    assert f"| recall@5 | {shown[0]} | {shown[1]} to {shown[2]} |" in card
    parts = run.read_json("data.json")["parts"]
    for name, part in parts.items():
        assert f"| {name} | {part['rows']} | {part['labels_per_row']:.2f} |" in card
    assert "a\\|b\\*c" in card
    assert "a|b" not in card
    counts = run.train_counts()
    assert f"Training rows per label: {min(counts)} to {max(counts)}" in card
    assert "| label5 | word5" in card
    for title in ("Intended use", "Data", "Metrics", "Labels", "What speaks for a label", "Limits"):
        assert f"\n## {title}\n" in card
    assert of(run.path) == card


@pytest.mark.parametrize("hidden", [(4,)])
def test_a_network_has_a_card_too(tmp_path, hidden):
    config = Config(epochs=1, bootstrap=0, hidden=hidden, accelerator="cpu")
    run = train({"all": make_rows(60)}, config, tmp_path / "run")
    card = (run.path / "model_card.md").read_text()
    assert "a network with hidden layers of 4" in card
    assert "Only 12 rows were held out" in card
