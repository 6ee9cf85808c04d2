"""A run of source C's script goes on here, and one of ours there: weights, moments, schedule."""

import json
import pickle
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict

from megatron.checkpoint.format import read_manifest
from megatron.checkpoint.load import verify
from megatron.checkpoint.save import save_checkpoint
from megatron.config.training import OptimizerConfig
from megatron.models.registry import config_of
from megatron.parallel.mesh import Mesh
from megatron.train.state import TrainState, build_state
from megatron.train.step import train_step
from tests.data.samples import write_tokenizer_json
from tests.dist import Pool
from tests.programs import assert_equal_bits, newest, pretrain
from tests.refusals import refusal
from tests.tiny import mesh_of_ranks, micro_batches, samples, whole_weights
from tests.tools.convert.legacy import tutorial
from tests.tools.convert.legacy.tutorial import BATCH, HEADS, POSITIONS, Script
from tools.convert.legacy.dcp_tutorial import read_schedule
from tools.convert.writing import check_weights
from tools.convert_dcp import main

DONE = 3  # steps behind the folders
IMPORT = f"--global-batch-size {BATCH} --rotary-base {tutorial.BASE} --no-tokenizer"
SETTINGS = {
    "adam_beta1": tutorial.BETAS[0],
    "adam_beta2": tutorial.BETAS[1],
    "adam_eps": tutorial.EPS,
    "weight_decay": tutorial.DECAY,
    "decay_biases_and_norms": True,
}
OPTIMIZER = OptimizerConfig(**SETTINGS)
SKIPPED = 2
# Both go on in fp64 from the same numbers; what differs is the order of sums.
CLOSE = 1e-11


@dataclass(frozen=True)
class Folder:
    path: Path
    by_name: bool

    def script(self) -> Script:
        """The run that goes on with the tutorial's own means."""
        script = Script(seed=1)
        script.load(self.path, by_name=self.by_name)
        return script


KINDS = ["one process", "one process, by name", "two ranks", "two ranks, by name"]


def save_on_ranks(root: Path) -> None:
    script = Script(tensor_parallel=True)
    script.train(0, DONE)
    for by_name in (False, True):
        script.save(root / f"two_{by_name}", by_name=by_name)


@pytest.fixture(scope="module")
def folders(gloo: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Folder]:
    root = tmp_path_factory.mktemp("saved")
    gloo.run(2, save_on_ranks, root)
    script = Script()
    script.train(0, DONE)
    for by_name in (False, True):
        script.save(root / f"one_{by_name}", by_name=by_name)
    places = [f"{count}_{by_name}" for count in ("one", "two") for by_name in (False, True)]
    return {
        kind: Folder(root / place, place.endswith("True"))
        for kind, place in zip(KINDS, places, strict=True)
    }


def import_folder(folder: Path, to: Path, flags: str = IMPORT) -> Path:
    main(["import", "--from", str(folder), "--output", str(to), *flags.split()], {})
    return newest(to)


def export_folder(checkpoint: Path, to: Path, flags: str = "") -> Path:
    main(["export", "--from", str(checkpoint), "--output", str(to), *flags.split()], {})
    return to


def loaded(checkpoint: Path, mesh: Mesh, dtype: torch.dtype, zero_stage: int = 0) -> TrainState:
    manifest = read_manifest(checkpoint)
    section, size = config_of(manifest), manifest["vocab_size"]
    settings = {"dtype": dtype, "optimizer": OPTIMIZER, "zero_stage": zero_stage}
    state = build_state(section, mesh, size, seed=1, **settings)
    state.load(verify(checkpoint, mesh))
    return state


def go_on(state: TrainState, rates: Sequence[float]) -> list[float]:
    """The losses."""
    losses = []
    for rate in rates:
        batch = micro_batches(samples(BATCH, first=state.samples), state.mesh, 1)
        losses.append(train_step(state, batch, rate).loss)
    return losses


def go_on_everywhere(
    checkpoint: Path, rates: Sequence[float]
) -> list[tuple[list[float], dict[str, Tensor]]]:
    found = []
    for tensor_size in (1, 2):  # of two ranks: d = 2, then t = 2
        state = loaded(checkpoint, mesh_of_ranks(tensor_size), torch.float64)
        found.append((go_on(state, rates), whole_weights(state.model)))
    return found


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """By the norm of each: an element may be any fraction of what was added to it."""
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        assert (found[name] - wanted).norm() <= CLOSE * wanted.norm(), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_the_script_goes_on_at_any_layout(
    gloo: Pool, tmp_path: Path, folders: dict[str, Folder], kind: str
) -> None:
    path = import_folder(folders[kind].path, tmp_path / "ours")
    script = folders[kind].script()
    stored = load_file(path / "shard_00000.safetensors")
    for ours, theirs in (
        ("model", script.weights()),
        ("exp_avg", script.moments("exp_avg")),
        ("exp_avg_sq", script.moments("exp_avg_sq")),
    ):
        for name, wanted in theirs.items():
            assert wanted.any(), name
            assert torch.equal(stored[f"{ours}.{name}"], wanted), (ours, name)
    manifest = read_manifest(path)
    counters = {"step": DONE, "samples": DONE * BATCH, "skipped": 0}
    assert manifest["counters"].items() >= counters.items()
    assert manifest["config"]["optimizer"] == SETTINGS | {
        "lr": tutorial.LR,
        "min_lr": tutorial.MIN_LR,
        "lr_decay_style": "cosine",
        "lr_warmup_iters": tutorial.WARMUP,
        "lr_warmup_init": pytest.approx(0.1 * tutorial.LR),
        "lr_decay_iters": tutorial.STEPS,
    }
    section = config_of(manifest)
    assert section.num_attention_heads == HEADS
    assert section.max_position_embeddings == POSITIONS

    script.widen()
    rates, losses = zip(*script.train(DONE, 3), strict=True)
    alone = loaded(path, mesh_of_ranks(1), torch.float64)
    everywhere = [(go_on(alone, rates), whole_weights(alone.model))]
    everywhere += gloo.run(2, go_on_everywhere, path, rates)[0]
    for found, weights in everywhere:
        assert found == pytest.approx(losses, rel=CLOSE)
        assert_close(weights, script.weights())


def train_and_save(checkpoint: Path, rates: Sequence[float], to: Path, zero_stage: int) -> None:
    """As a run of two ranks does that has skipped steps: at t = 2, or with ZeRO at d = 2."""
    mesh = mesh_of_ranks(1 if zero_stage else 2)
    state = loaded(checkpoint, mesh, torch.float32, zero_stage)
    go_on(state, rates)
    save_ours(state, checkpoint, to)


def save_ours(state: TrainState, imported: Path, to: Path, **settings: Any) -> None:
    manifest = read_manifest(imported)
    facts = {name: manifest[name] for name in ("kind", "config", "vocab_size", "tokenizer", "data")}
    facts["config"]["optimizer"] |= settings
    facts |= {"run": manifest["run"], **state.facts()}
    facts["counters"] |= {"step": state.step + SKIPPED, "skipped": SKIPPED}
    save_checkpoint(to, state.step + SKIPPED, state.slices(), facts, state.mesh)


@pytest.mark.parametrize(("keys", "zero_stage"), [("place", 0), ("name", 3)])
def test_a_run_of_ours_goes_on_in_the_script(
    gloo: Pool, tmp_path: Path, folders: dict[str, Folder], keys: str, zero_stage: int
) -> None:
    path = import_folder(folders["two ranks"].path, tmp_path / "imported")
    rates = [rate for rate, _ in Script().train(0, DONE + 6)][DONE:]
    gloo.run(2, train_and_save, path, rates[:3], tmp_path / "ours", zero_stage)
    exported = export_folder(tmp_path / "ours", tmp_path / "theirs", f"--state-keys {keys}")

    script = Folder(exported, keys == "name").script()
    script.widen()
    found, losses = zip(*script.train(DONE + 3, 3), strict=True)
    assert found == pytest.approx(rates[3:], rel=1e-12)
    state = loaded(newest(tmp_path / "ours"), mesh_of_ranks(1), torch.float64)
    assert go_on(state, found) == pytest.approx(losses, rel=CLOSE)
    assert_close(whole_weights(state.model), script.weights())


def states(script: Script) -> dict[str, Any]:
    """All of it, as numbers and tensors by flat names."""
    parts = script.optimizer.state_dict()
    flat = dict(script.model.state_dict())
    flat |= {f"{n}.{kind}": v for n, each in parts["state"].items() for kind, v in each.items()}
    flat |= {f"group.{name}": value for name, value in parts["param_groups"][0].items()}
    return flat | {"scheduler": script.scheduler.state_dict()}


@pytest.mark.parametrize("kept", ["fp32", "masters", "pure-bf16", "bf16"])
def test_there_and_back_nothing_changes(tmp_path: Path, kept: str) -> None:
    """The tutorial's pure bf16 is so here, too, or has masters if asked for."""
    dtype = torch.float32 if kept in ("fp32", "masters") else torch.bfloat16
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        script = Script()
        script.train(0, DONE)
        folder = script.save(tmp_path / "theirs", by_name=False)
        flags = "--dtype bf16" if kept in ("bf16", "masters") else ""
        path = import_folder(folder, tmp_path / "ours", f"{IMPORT} {flags}")
        flags = flags if kept == "bf16" else ""
        back = Folder(export_folder(path, tmp_path / "back", flags), False).script()
    finally:
        torch.set_default_dtype(before)
    wide, narrow = "float32", str(dtype).removeprefix("torch.")
    dtypes = {"model": narrow, "exp_avg": wide, "exp_avg_sq": wide}
    dtypes |= {
        "pure-bf16": {"exp_avg": narrow, "exp_avg_sq": narrow},
        "bf16": {"master": wide},
        "masters": {"model": "bfloat16", "master": wide},
    }.get(kept, {})
    tensors = read_manifest(path)["tensors"].items()
    assert {(key.partition(".")[0], facts["dtype"]) for key, facts in tensors} == dtypes.items()
    found, expected = states(back), states(script)
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        if isinstance(wanted, Tensor):
            # Buffers of a model in bf16 are of angles in bf16, which ours are not.
            is_coarse = name.endswith((".cos", ".sin")) and dtype != torch.float32
            tolerance = 0.05 if is_coarse else 0
            torch.testing.assert_close(found[name], wanted, rtol=0, atol=tolerance)
        else:
            assert found[name] == wanted, name


def test_the_command_that_an_import_prints_goes_on_with_the_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], folders: dict[str, Folder]
) -> None:
    vocabulary = write_tokenizer_json(tmp_path / "tokenizer")
    flags = f"{IMPORT.replace('--no-tokenizer', '')} --vocab-file {vocabulary}"
    import_folder(folders["two ranks"].path, tmp_path / "ours", flags)
    data = tmp_path / "web.jsonl"
    data.write_text("".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(40)))
    said = capsys.readouterr().out.partition("pretrain.py ")[2].splitlines()[0]
    words = " ".join([
        *shlex.split(said), f"--data-path {data} --train-iters 5 --log-interval 1",
        f"--metrics-file {tmp_path / 'metrics.jsonl'} --eval-iters 0",
    ])  # fmt: skip
    for flag in ("--pad", "--no-shuffle", "--begin-token [BOT]", "--end-token [EOT]", "--lr 0.01"):
        assert flag in words
    with pretrain(words, folder=tmp_path, program="pretrain", shape="") as run:
        assert run.wait() == [0], run.text()
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    found = [line for line in lines if "loss" in line]
    assert [line["step"] for line in found] == [DONE + 1, DONE + 2]
    assert [line["samples"] for line in found] == [(DONE + 1) * BATCH, (DONE + 2) * BATCH]
    rates = [rate for rate, _ in Script().train(0, DONE + 2)][DONE:]
    assert [line["lr"] for line in found] == pytest.approx(rates)


def test_a_state_that_get_state_dict_made_is_one_step_ahead(tmp_path: Path) -> None:
    """The second tutorial saves before its first step, and so makes Adam count one step."""
    script = Script()
    script.save(tmp_path / "first", by_name=True)
    script.train(0, DONE)
    folder = script.save(tmp_path / "theirs", by_name=True)
    for name, steps in (("first", 0), ("theirs", DONE)):
        path = import_folder(tmp_path / name, tmp_path / f"ours_{name}")
        assert read_manifest(path)["counters"]["step"] == steps
    stored = load_file(newest(tmp_path / "ours_theirs") / "shard_00000.safetensors")
    for name, wanted in script.moments("exp_avg").items():
        assert torch.equal(stored[f"exp_avg.{name}"], wanted)
    assert folder.is_dir()


@pytest.mark.parametrize("base", ["model.", ""])
def test_names_and_places_are_those_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], folders: dict[str, Folder], base: str
) -> None:
    """Whatever its base is called, and in whatever order its model has its parameters."""
    script = folders["one process"].script()
    model = {
        name.replace("base_model.", base): weight
        for name, weight in reversed(script.model.state_dict().items())
        if "rotary" not in name
    }
    flags = f"{IMPORT} --num-attention-heads {HEADS} --max-position-embeddings {POSITIONS}"
    optimizer = script.optimizer.state_dict()
    states = reversed(optimizer["state"].values())
    optimizer["state"] = dict(enumerate(states))
    folder = tmp_path / "theirs"
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    path = import_folder(folder, tmp_path / "ours", flags)
    assert "--scheduler" in capsys.readouterr().err
    expected = import_folder(folders["one process"].path, tmp_path / "expected")
    assert_equal_bits(path, expected)


def test_prefixes_of_weights_and_of_the_state_by_name_may_differ(
    tmp_path: Path, folders: dict[str, Folder]
) -> None:
    """A compiled model's own state_dict keeps the prefix that get_state_dict drops."""
    theirs = folders["one process, by name"]
    script = theirs.script()
    _, optimizer = get_state_dict(script.model, script.optimizer)
    model = {f"_orig_mod.{name}": weight for name, weight in script.model.state_dict().items()}
    folder = tmp_path / "theirs"
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    shutil.copy(theirs.path / "lrscheduler.pt", folder)
    path = import_folder(folder, tmp_path / "ours")
    assert_equal_bits(path, import_folder(theirs.path, tmp_path / "expected"))


@pytest.mark.parametrize("is_pickle", [True, False])
def test_a_scheduler_is_read_in_any_form(
    tmp_path: Path, folders: dict[str, Folder], is_pickle: bool
) -> None:
    folder = tmp_path / "theirs"
    shutil.copytree(folders["one process"].path, folder)
    expected = import_folder(folder, tmp_path / "expected")
    (folder / "lrscheduler.pt").unlink()
    scheduler = folders["one process"].script().scheduler
    if is_pickle:
        (folder / "scheduler.pkl").write_bytes(pickle.dumps(scheduler.state_dict()))
    else:
        torch.save(scheduler, folder / "scheduler.pt")
    path = import_folder(folder, tmp_path / "ours")
    found, wanted = (read_manifest(each)["config"]["optimizer"] for each in (path, expected))
    assert found == wanted
    assert "lr_decay_iters" in found


def test_the_check_of_a_new_checkpoint_compares_weights(
    tmp_path: Path, folders: dict[str, Folder]
) -> None:
    path = import_folder(folders["one process"].path, tmp_path / "ours")
    weights = folders["one process"].script().weights()
    check_weights(path, weights, "")
    weights["final_norm.weight"][0] += 1
    assert "final_norm.weight" in str(refusal(lambda: check_weights(path, weights, "")))


@pytest.mark.parametrize(
    ("settings", "flags", "warned", "schedule"),
    [
        ({}, "", 0, {}),
        ({"decay_biases_and_norms": False}, "", 1, {}),
        ({"decoupled_weight_decay": False, "lr_decay_style": "linear"}, "", 2, {}),
        ({"lr_warmup_init": None}, "", 1, {}),
        ({"lr_warmup_init": None}, "--lr-warmup-init 0.001", 0, {"lr_warmup_init": 0.001}),
        (
            {"lr": 1e-2, "lr_warmup_init": 5e-3},
            "--lr 1e-3 --min-lr 0",
            0,
            {"lr_warmup_init": 5e-4, "min_lr": 0},
        ),
    ],
)
def test_an_export_warns_of_each_setting_that_the_script_has_otherwise(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    folders: dict[str, Folder],
    settings: dict[str, Any],
    flags: str,
    warned: int,
    schedule: dict[str, float],
) -> None:
    path = import_folder(folders["one process"].path, tmp_path / "imported")
    state = loaded(path, mesh_of_ranks(1), torch.float32)
    save_ours(state, path, tmp_path / "ours", **settings)
    capsys.readouterr()
    to = export_folder(tmp_path / "ours", tmp_path / "theirs", flags)
    assert capsys.readouterr().err.count("warning: ") == warned
    found = read_schedule(to / "lrscheduler.pt")
    for name, value in schedule.items():
        assert getattr(found, name) == pytest.approx(value)
