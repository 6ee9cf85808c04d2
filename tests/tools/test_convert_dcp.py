"""A run of source C's script goes on here, and one of ours there: weights, moments, schedule."""

import contextlib
import json
import pickle
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron.checkpoint.format import read_manifest
from megatron.checkpoint.load import verify
from megatron.checkpoint.save import save_checkpoint
from megatron.config.model import LlamaConfig
from megatron.config.training import OptimizerConfig
from megatron.models.registry import config_of
from megatron.parallel.mesh import Mesh
from megatron.train.state import TrainState, build_state
from megatron.train.step import train_step
from tests.data.samples import write_tokenizer_json
from tests.dist import Pool
from tests.programs import newest, pretrain
from tests.tiny import mesh_of_ranks, micro_batches, samples, tiny_section, whole_weights
from tests.tools.test_unpickler import PAYLOADS, write_zip
from tests.tools.tutorial import BATCH, HEADS, LR, POSITIONS, STEPS, VOCABULARY, WARMUP, Script
from tools.convert_dcp import main

DONE = 3  # steps behind the folders
IMPORT = f"--global-batch-size {BATCH} --max-position-embeddings {POSITIONS} --no-tokenizer"
OPTIMIZER = OptimizerConfig(weight_decay=0.1, adam_beta2=0.99, decay_biases_and_norms=True)
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
    main(["import", "--from", str(folder), "--to", str(to), *flags.split()], {})
    return newest(to)


def export_folder(checkpoint: Path, to: Path, flags: str = "") -> Path:
    main(["export", "--from", str(checkpoint), "--to", str(to), *flags.split()], {})
    return to


def loaded(checkpoint: Path, mesh: Mesh, dtype: torch.dtype) -> TrainState:
    manifest = read_manifest(checkpoint)
    section, size = config_of(manifest), manifest["vocab_size"]
    state = build_state(section, mesh, size, seed=1, dtype=dtype, optimizer=OPTIMIZER)
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
    optimizer = manifest["config"]["optimizer"]
    assert optimizer["lr"] == LR
    assert optimizer["lr_warmup_iters"] == WARMUP
    assert optimizer["lr_warmup_init"] == pytest.approx(0.1 * LR)
    assert optimizer["lr_decay_iters"] == STEPS
    assert optimizer["adam_beta2"] == 0.99

    script.widen()
    rates, losses = zip(*script.train(DONE, 3), strict=True)
    alone = loaded(path, mesh_of_ranks(1), torch.float64)
    everywhere = [(go_on(alone, rates), whole_weights(alone.model))]
    everywhere += gloo.run(2, go_on_everywhere, path, rates)[0]
    for found, weights in everywhere:
        assert found == pytest.approx(losses, rel=CLOSE)
        assert_close(weights, script.weights())


def train_and_save(checkpoint: Path, rates: Sequence[float], to: Path) -> None:
    """As a run at t = 2 does."""
    state = loaded(checkpoint, mesh_of_ranks(2), torch.float32)
    go_on(state, rates)
    manifest = read_manifest(checkpoint)
    facts = {name: manifest[name] for name in ("kind", "config", "vocab_size", "tokenizer", "data")}
    facts["run"] = manifest["run"]
    save_checkpoint(to, state.step, state.slices(), {**facts, **state.facts()}, state.mesh)


@pytest.mark.parametrize("keys", ["place", "name"])
def test_a_run_of_ours_goes_on_in_the_script(
    gloo: Pool, tmp_path: Path, folders: dict[str, Folder], keys: str
) -> None:
    path = import_folder(folders["two ranks"].path, tmp_path / "imported")
    rates = [rate for rate, _ in Script().train(0, DONE + 6)][DONE:]
    gloo.run(2, train_and_save, path, rates[:3], tmp_path / "ours")
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_there_and_back_nothing_changes(tmp_path: Path, dtype: torch.dtype) -> None:
    """bf16: the tutorial's pure form, moments too; here the masters are in fp32."""
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        script = Script()
        script.train(0, DONE)
        folder = script.save(tmp_path / "theirs", by_name=False)
        path = import_folder(folder, tmp_path / "ours")
        flags = "" if dtype == torch.float32 else "--dtype bf16"
        back = Folder(export_folder(path, tmp_path / "back", flags), False).script()
    finally:
        torch.set_default_dtype(before)
    tensors = read_manifest(path)["tensors"]
    assert {"float32" if dtype == torch.float32 else "bfloat16"} == {
        facts["dtype"] for key, facts in tensors.items() if key.startswith("model.")
    }
    assert any(key.startswith("master.") for key in tensors) == (dtype == torch.bfloat16)
    found, expected = states(back), states(script)
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        if isinstance(wanted, Tensor):
            tolerance = 0.02 if name.endswith((".cos", ".sin")) and "float16" in str(dtype) else 0
            # Its buffers are angles of bf16, ours rounded to bf16.
            torch.testing.assert_close(found[name], wanted, rtol=0, atol=tolerance)
        else:
            assert found[name] == wanted, name


def test_pretrain_goes_on_with_the_data(tmp_path: Path, folders: dict[str, Folder]) -> None:
    vocabulary = write_tokenizer_json(tmp_path / "tokenizer")
    flags = f"{IMPORT.replace('--no-tokenizer', '')} --vocab-file {vocabulary}"
    import_folder(folders["two ranks"].path, tmp_path / "ours", flags)
    data = tmp_path / "web.jsonl"
    data.write_text("".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(40)))
    words = (
        f"--model llama --hidden-size 96 --num-attention-heads {HEADS} --num-query-groups 3 "
        f"--max-position-embeddings {POSITIONS} --pad --no-shuffle --vocab-file {vocabulary} "
        f"--begin-token [BOT] --load {tmp_path / 'ours'} --train-iters 5 --lr {LR} --min-lr 0 "
        f"--metrics-file {tmp_path / 'metrics.jsonl'} --log-interval 1 --eval-iters 0"
    )
    with pretrain(words, folder=tmp_path, program="pretrain", data=data) as run:
        assert run.wait(200) == [0], run.text()
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    steps = {line["step"]: line["samples"] for line in lines if "loss" in line}
    assert steps == {DONE + 1: (DONE + 1) * BATCH, DONE + 2: (DONE + 2) * BATCH}


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


def move_entry(folder: Path, key: str, file: str, nbytes: int) -> None:
    """Let .metadata say that the object `key` is the whole of another file."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    place = metadata.storage_data[MetadataIndex(key)]
    place.relative_path, place.offset, place.length = file, 0, nbytes
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def in_metadata(folder: Path, marker: Path) -> None:
    payload = b"\x80\x04" + PAYLOADS["os.system"](marker) + b"."
    (folder / ".metadata").write_bytes(payload)


def in_scheduler(folder: Path, marker: Path) -> None:
    write_zip(folder / "lrscheduler.pt", PAYLOADS["eval"](marker))


def in_bare_scheduler(folder: Path, marker: Path) -> None:
    (folder / "lrscheduler.pt").unlink()
    payload = b"\x80\x04" + PAYLOADS["exec"](marker) + b"."
    (folder / "lrscheduler.pkl").write_bytes(payload)


def in_an_object(folder: Path, marker: Path) -> None:
    file = write_zip(folder / "__9_0.distcp", PAYLOADS["getattr"](marker))
    move_entry(folder, "optimizer.param_groups.0.weight_decay", file.name, file.stat().st_size)


def read_by_pickle(folder: Path) -> None:
    """As other programs do."""
    if (file := folder / "lrscheduler.pkl").exists():
        pickle.loads(file.read_bytes())
    else:
        torch.load(folder / "lrscheduler.pt", weights_only=False)
    Script().load(folder, by_name=False)


@pytest.mark.parametrize(
    "hide", [in_metadata, in_scheduler, in_bare_scheduler, in_an_object], ids=lambda f: f.__name__
)
def test_a_payload_does_not_run(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    folders: dict[str, Folder],
    hide: Callable[[Path, Path], None],
) -> None:
    folder, marker = tmp_path / "theirs", tmp_path / "marker"
    shutil.copytree(folders["two ranks"].path, folder)
    hide(folder, marker)
    assert "theirs" in failure(capsys, folder, tmp_path / "ours", IMPORT)
    assert not marker.exists()
    with contextlib.suppress(Exception, CheckpointException):
        read_by_pickle(folder)
    assert marker.exists()


def failure(capsys: pytest.CaptureFixture[str], folder: Path, to: Path, flags: str) -> str:
    """The message of an import that leaves nothing."""
    with pytest.raises(SystemExit) as stop:
        import_folder(folder, to, flags)
    assert stop.value.code == 2
    assert not to.exists()
    assert not list(to.parent.glob(".*partial"))
    message = capsys.readouterr().err
    assert "Traceback" not in message
    return message[message.index("error: ") :]


def shorten(name: str, nbytes: int) -> Callable[[Path], None]:
    def broken(folder: Path) -> None:
        file = folder / name
        file.write_bytes(file.read_bytes()[:nbytes])

    return broken


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def flip_a_weight(folder: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    place = metadata.storage_data[MetadataIndex("model.base_model.norm.weight", (0,))]
    with (folder / place.relative_path).open("r+b") as stream:
        stream.seek(place.offset + place.length // 2)
        content = stream.read(1)
        stream.seek(-1, 1)
        stream.write(bytes([content[0] ^ 1]))


def lead_out(folder: Path) -> None:
    file = folder.parent / "outside"
    file.write_bytes(b"PK")
    move_entry(folder, "optimizer.param_groups.0.eps", "../outside", 2)


def second_scheduler(folder: Path) -> None:
    shutil.copy(folder / "lrscheduler.pt", folder / "other.pt")


def later_scheduler(folder: Path) -> None:
    script = Script()
    script.train(0, DONE + 2)
    torch.save(script.scheduler.state_dict(), folder / "lrscheduler.pt")


def other_scheduler(folder: Path) -> None:
    torch.save({"last_epoch": DONE, "gamma": 0.1}, folder / "lrscheduler.pt")


def resaved(change: Callable[[dict[str, Any], dict[str, Any]], object]) -> Callable[[Path], None]:
    """Of a run in one process, with another model or optimizer."""

    def broken(folder: Path) -> None:
        script = Script()
        script.train(0, DONE)
        model, optimizer = dict(script.model.state_dict()), script.optimizer.state_dict()
        change(model, optimizer)
        shutil.rmtree(folder)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    return broken


LAYER = "base_model.layers.1."
K, Q, UP = (f"{LAYER}{name}_proj.weight" for name in ("self_attn.k", "self_attn.q", "mlp.up"))


def nothing(folder: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("broken", "flags", "said", "works"),
    [
        (remove(".metadata"), "", "--from", None),
        (shorten(".metadata", 500), "", ".metadata", None),
        (shorten("__0_0.distcp", 5000), "", "__0_0.distcp", None),
        (remove("__1_0.distcp"), "", "__1_0.distcp", None),
        (flip_a_weight, "", ".distcp", None),
        (lead_out, "", "../outside", None),
        (shorten("lrscheduler.pt", 500), "", "lrscheduler.pt", None),
        (other_scheduler, "", "lrscheduler.pt", None),
        (later_scheduler, "", "--scheduler", None),
        (second_scheduler, "", "--scheduler", "--scheduler {folder}/lrscheduler.pt"),
        (nothing, "--scheduler nowhere.pt", "--scheduler", None),
        (resaved(lambda model, _: model.pop(UP)), "", UP.removeprefix("base_model."), None),
        (resaved(lambda model, _: model.update({UP: model[UP][:-2]})), "", "layers.1.mlp.up", None),
        (resaved(lambda model, _: model.update({K: model[K][:-2]})), "", "self_attn.k_proj", None),
        (resaved(lambda model, _: model.update({Q: model[Q] * torch.nan})), "", "q_proj", None),
        (
            resaved(lambda model, _: model.update({f"{LAYER}q_norm.weight": torch.ones(8)})),
            "",
            "q_norm",
            None,
        ),
        (resaved(lambda _, optimizer: optimizer["state"].pop(4)), "", "exp_avg", None),
        (resaved(lambda _, optimizer: optimizer["state"][4].pop("step")), "", "step", None),
        (
            resaved(lambda _, optimizer: optimizer["state"][4].update(step=torch.tensor(9.0))),
            "",
            "steps",
            None,
        ),
        (
            resaved(lambda _, optimizer: optimizer["state"][4].update(exp_avg=torch.ones(3))),
            "",
            "optimizer.state.4.exp_avg",
            None,
        ),
        (
            resaved(
                lambda _, optimizer: optimizer["state"][4].update(max_exp_avg_sq=torch.ones(3))
            ),
            "",
            "max_exp_avg_sq",
            None,
        ),
        (
            resaved(lambda _, optimizer: optimizer["param_groups"].append({"lr": 1.0})),
            "",
            "groups",
            None,
        ),
        (
            resaved(lambda model, _: model.update({n: w.double() for n, w in model.items()})),
            "",
            "--dtype",
            "--dtype fp32",
        ),
        (nothing, "--num-attention-heads 6", "--num-attention-heads", "--num-attention-heads 12"),
        (nothing, "--num-attention-heads 0", "--num-attention-heads", "--num-attention-heads 12"),
        (nothing, "--rotary-base 500", "--rotary-base", None),
        (nothing, "--global-batch-size 0", "--global-batch-size", "--global-batch-size 32"),
        (nothing, "--no-no-tokenizer", "--vocab-file", "--no-tokenizer"),
        (nothing, "--vocab-file t", "--no-tokenizer", None),
    ],
)
def test_what_cannot_be_imported_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    folders: dict[str, Folder],
    broken: Callable[[Path], None],
    flags: str,
    said: str,
    works: str | None,
) -> None:
    folder = tmp_path / "theirs"
    shutil.copytree(folders["two ranks"].path, folder)
    broken(folder)
    assert said in failure(capsys, folder, tmp_path / "ours", f"{IMPORT} {flags}")
    if works is not None:
        words = f"{IMPORT} {flags} {works.format(folder=folder)}"
        assert import_folder(folder, tmp_path / "ours", words).is_dir()


@pytest.mark.parametrize(
    ("flags", "said", "works"),
    [
        (f"--lr-warmup-iters {STEPS}", "--lr-warmup-iters", "--lr-warmup-iters 2"),
        ("--lr-warmup-iters 0", "--lr-warmup-iters", "--lr-warmup-iters 2"),
        ("--lr-warmup-init 1", "--lr-warmup-init", "--lr-warmup-init 0.001"),
        ("--lr 0", "--lr", "--lr 0.01"),
        ("--from nowhere", "--from", None),
    ],
)
def test_what_cannot_be_exported_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    folders: dict[str, Folder],
    flags: str,
    said: str,
    works: str | None,
) -> None:
    path, to = import_folder(folders["one process"].path, tmp_path / "ours"), tmp_path / "theirs"
    with pytest.raises(SystemExit) as stop:
        export_folder(path, to, flags)
    assert stop.value.code == 2
    assert said in capsys.readouterr().err
    assert not to.exists()
    if works is not None:
        assert export_folder(path, to, f"{flags} {works}").is_dir()


def llama(**changes: Any) -> LlamaConfig:
    return LlamaConfig(num_layers=1, hidden_size=32, num_attention_heads=4, **changes)


def test_another_kind_or_form_is_not_exported(tmp_path: Path) -> None:
    for name, section in (
        ("gpt2", tiny_section()),
        ("tied", llama(untie_embeddings_and_output_weights=False)),
        ("scaled", llama(rope_scaling=(8.0, 1.0, 4.0, 8192.0))),
        ("epsilon", llama(layernorm_epsilon=1e-6)),
    ):
        state = build_state(section, mesh_of_ranks(1), VOCABULARY, seed=1, dtype=torch.float32)
        facts = {"kind": section.kind, "config": {"model": asdict(section)}, "vocab_size": 263}
        facts |= state.facts()
        save_checkpoint(tmp_path / name, 0, state.slices(), facts, state.mesh)
        with pytest.raises(SystemExit):
            export_folder(tmp_path / name, tmp_path / f"theirs_{name}", "--train-iters 9000")
        assert not (tmp_path / f"theirs_{name}").exists()
