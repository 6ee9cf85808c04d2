"""The picture of a plan has the model's modules in the order of its calls, with f and g where they
are sent."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.refusals import refused
from tests.tools.layouts.test_prove import config_of
from tests.tools.report.pages import texts_of
from tools.experiments.runner import ROOT
from tools.layouts import plan_picture, prove

SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 512}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 128}
# By model: what its config.json says, and the steps of its modules: communication before, weights
# with the dim [in, out] that is cut, communication after. A line without a module goes on with it.
EXPECTED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "gpt2": (
        {"n_layer": 2, "n_embd": 64, "n_head": 8},
        """
        transformer          |   | wte 0    | g
        transformer.h.*.attn | f | c_attn 1 |
                             |   | c_proj 0 | g
        transformer.h.*.mlp  | f | c_fc 1   |
                             |   | c_proj 0 | g
        the model            | f | lm_head 1 | all-gather of the output
        """,
    ),
    "llama": (
        SIZES | HEADS,
        """
        model                    |   | embed_tokens 0               | g
        model.layers.*.self_attn | f | q_proj 1, k_proj 1, v_proj 1 |
                                 |   | o_proj 0                     | g
        model.layers.*.mlp       | f | gate_proj 1, up_proj 1       |
                                 |   | down_proj 0                  | g
        the model                | f | lm_head 1                    | all-gather of the output
        """,
    ),
    # One head of keys and values, which every rank holds whole.
    "qwen3": (
        SIZES | HEADS | {"num_key_value_heads": 1},
        """
        model                    |   | embed_tokens 0                     | g
        model.layers.*.self_attn | f | q_proj 1, k_proj None, v_proj None |
                                 |   | o_proj 0                           | g
        model.layers.*.mlp       | f | gate_proj 1, up_proj 1             |
                                 |   | down_proj 0                        | g
        the model                | f | lm_head 1                          | all-gather of the output
        """,
    ),
    # Its code has o_proj first, and a column layer in another module than its row layer.
    "phi3": (
        SIZES | HEADS | {"pad_token_id": None},
        """
        model                    |   | embed_tokens 0 | g
        model.layers.*.self_attn | f | qkv_proj 1     | all-gather of the output
                                 |   | o_proj 0       | g
        model.layers.*.mlp       | f | gate_up_proj 1 | all-gather of the output
                                 |   | down_proj 0    | g
        the model                | f | lm_head 1      | all-gather of the output
        """,
    ),
    "bert": (
        SIZES | {"num_attention_heads": 8, "intermediate_size": 128},
        """
        bert.embeddings                |   | word_embeddings 0                      | g
        bert.encoder.layer.*.attention | f | self.query 1, self.key 1, self.value 1 |
                                       |   | output.dense 0                         | g
        bert.encoder.layer.*           | f | intermediate.dense 1                   |
                                       |   | output.dense 0                         | g
        cls.predictions                | f | decoder 1 | all-gather of the output
        """,
    ),
}


@cache
def rows_of(model_type: str) -> list[plan_picture.Row]:
    config = config_of(model_type, **EXPECTED[model_type][0])
    rows = prove.modules_of(config, 2, is_ordered=True)
    assert not isinstance(rows, str)
    return rows


@pytest.mark.parametrize("model_type", [*EXPECTED])
def test_modules_stand_between_f_and_g(model_type: str) -> None:
    found = []
    for block in plan_picture.blocks_of(rows_of(model_type)):
        name = block.name or "the model"
        for step in block.steps:
            weights = (
                f"{row.name.removeprefix(f'{block.name}.')} {row.cut}" for row in step.weights
            )
            found.append([name, step.before, ", ".join(weights), step.after])
            name = ""
    lines = EXPECTED[model_type][1].strip().splitlines()
    assert found == [[cell.strip() for cell in line.split("|")] for line in lines]


def test_what_else_the_plan_says_is_noted() -> None:
    by_name = {each.name: each for each in plan_picture.blocks_of(rows_of("qwen3"))}
    notes = by_name["model.layers.*.self_attn"].notes
    assert {each.partition(":")[0] for each in notes} == {"q_norm", "k_norm", "k_proj", "v_proj"}
    by_name = {each.name: each for each in plan_picture.blocks_of(rows_of("gpt2"))}
    assert by_name["transformer.h.*.attn"].notes == ["Local(num_heads, split_size)"]
    assert by_name["transformer.h.*.attn"].times == 2


def test_layers_of_other_modules_that_read_one_tensor_share_f() -> None:
    row = ("", "", "", "", "f")
    rows = [
        plan_picture.Row(row, "h.*.attn.q", 2, 1, 7, 0),
        plan_picture.Row((*row[:4], "g"), "h.*.attn.out", 2, 0, None, 1),
        plan_picture.Row(row, "h.*.mlp.fc", 2, 1, 7, 2),
    ]
    attention, mlp = plan_picture.blocks_of(rows)
    assert [step.before for step in attention.steps] == ["f", ""]
    assert [step.before for step in mlp.steps] == [""]
    assert mlp.notes == ["fc reads what q reads: one f"]


def test_the_picture_of_the_docs_is_that_of_gpt2(tmp_path: Path) -> None:
    assert "](layouts/plan_gpt2.svg)" in (ROOT / "docs" / "parallelism.md").read_text()
    config, file = config_of("gpt2"), tmp_path / "plan.svg"  # whose defaults are GPT-2's sizes
    rows = prove.modules_of(config, 2, is_ordered=True)
    assert not isinstance(rows, str)
    plan_picture.write(file, prove.title("gpt2", 2), rows, prove.LEGEND.splitlines(), 2)
    assert texts_of(file) == texts_of(ROOT / "docs" / "layouts" / "plan_gpt2.svg")


def test_a_wrong_ending_is_refused_before_the_model_is_read(tmp_path: Path) -> None:
    words = ["--model", str(tmp_path / "none"), "--picture", str(tmp_path / "plan.gif")]
    assert refused(lambda words: prove.main(words, {}), words, whole=False) == "--picture"
