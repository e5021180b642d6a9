"""The examples run, and learn."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("plain_loop", "torch"),
        ("lightning", "pytorch_lightning"),
        pytest.param("huggingface_trainer", "transformers", marks=pytest.mark.slow),
        ("skorch_criterion", "skorch"),
    ],
)
def test_example(name, needs):
    pytest.importorskip(needs)
    recall = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]()
    assert recall > 0.8  # chance is 0.25


def test_the_trainers_loss_does_not_depend_on_gradient_accumulation(tmp_path):
    transformers = pytest.importorskip("transformers")
    example = runpy.run_path(str(EXAMPLES / "huggingface_trainer.py"))
    found = []
    for parts in (1, 4):
        arguments = transformers.TrainingArguments(
            tmp_path, max_steps=1, per_device_train_batch_size=32 // parts, gradient_accumulation_steps=parts,
            logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model=example["tiny_model"](),
            args=arguments,
            train_dataset=example["Rows"](64, 0),
            compute_loss_func=example["loss"],
        )
        trainer.train()
        found.append(trainer.state.log_history[0])
    for name in ("loss", "grad_norm"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-4)
