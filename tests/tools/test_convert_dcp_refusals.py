"""Folders of source C's script that cannot go on here: hostile, damaged, of something else."""

import contextlib
import pickle
import shutil
import struct
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron.checkpoint.save import save_checkpoint
from megatron.config.model import LlamaConfig
from megatron.train.state import build_state
from tests.dist import Pool
from tests.tiny import mesh_of_ranks, tiny_section
from tests.tools.test_convert_dcp import DONE, IMPORT, export_folder, import_folder, save_on_ranks
from tests.tools.test_unpickler import PAYLOADS, write_zip
from tests.tools.tutorial import BASE, HEADS, HIDDEN, POSITIONS, STEPS, VOCABULARY, Rotary, Script
from tools.convert.folder import read_description


@pytest.fixture(scope="module")
def saved(gloo: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    gloo.run(2, save_on_ranks, root)
    return root / "two_False"


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy, to be broken."""
    return Path(shutil.copytree(saved, tmp_path / "theirs"))


def edit(folder: Path, change: Callable[[Any], object]) -> None:
    """Change what .metadata says."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def move_entry(folder: Path, key: str, file: str, nbytes: int) -> None:
    """Let .metadata say that the object `key` is the whole of another file."""

    def move(metadata: Any) -> None:
        place = metadata.storage_data[MetadataIndex(key)]
        place.relative_path, place.offset, place.length = file, 0, nbytes

    edit(folder, move)


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
    folder: Path,
    hide: Callable[[Path, Path], None],
) -> None:
    marker = tmp_path / "marker"
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
    torch.save(1e-8, file)
    move_entry(folder, "optimizer.param_groups.0.eps", "../outside", file.stat().st_size)


HEAD = "model.lm_head.weight"


def leave_out_a_chunk(folder: Path) -> None:
    edit(folder, lambda metadata: metadata.state_dict_metadata[HEAD].chunks.pop())


def inflate(folder: Path) -> None:
    """A tensor that no memory holds, though the file is small."""

    def change(metadata: Any) -> None:
        described = metadata.state_dict_metadata[HEAD]
        described.size = torch.Size((2**40, 96))
        described.chunks[-1].sizes = torch.Size((2**40 - described.chunks[-1].offsets[0], 96))

    edit(folder, change)


def compress(folder: Path) -> None:
    def change(metadata: Any) -> None:
        metadata.storage_data[MetadataIndex(HEAD, (0, 0))].transform_descriptors = ["zstd"]

    edit(folder, change)


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


def rotary(base: float, dtype: torch.dtype, factor: float) -> Callable[[Path], None]:
    """With tables of this base, the slower half of the turns slower by a factor."""

    def change(model: dict[str, Any], _: object) -> None:
        new = Rotary(HIDDEN // HEADS, base)
        new.frequencies[2:] /= factor
        new.fill(torch.float32)
        model |= {f"base_model.rotary_emb.{name}": new.get_buffer(name) for name in ("cos", "sin")}
        model |= {name: each.to(dtype) for name, each in model.items()}

    return resaved(change)


def no_rotary(model: dict[str, Any], _: object) -> None:
    for name in ("cos", "sin"):
        del model[f"base_model.rotary_emb.{name}"]


def without_order(folder: Path) -> None:
    edit(folder, lambda metadata: setattr(metadata, "planner_data", None))


def earlier_scheduler(folder: Path) -> None:
    script = Script()
    script.train(0, DONE - 1)
    torch.save(script.scheduler.state_dict(), folder / "lrscheduler.pt")


def on_several_disks(folder: Path) -> None:
    file = folder / "lrscheduler.pt"
    content = file.read_bytes()
    end = content.rindex(b"PK\5\6")
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, 0, 2)
    file.write_bytes(content[: end - len(locator)] + locator + content[end:])


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
        (lead_out, "", ".metadata", None),
        (leave_out_a_chunk, "", ".metadata", None),
        (inflate, "", ".metadata", None),
        (compress, "", ".metadata", None),
        (shorten("lrscheduler.pt", 500), "", "lrscheduler.pt", None),
        (other_scheduler, "", "lrscheduler.pt", None),
        (later_scheduler, "", "--scheduler", None),
        (earlier_scheduler, "", "--scheduler", None),
        (on_several_disks, "", "lrscheduler.pt", None),
        (without_order, "", "by place", None),
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
            resaved(lambda _, optimizer: optimizer["param_groups"][0].update(amsgrad=True)),
            "",
            "amsgrad",
            None,
        ),
        (
            resaved(lambda _, optimizer: optimizer["param_groups"][0].update(maximize=True)),
            "",
            "maximize",
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
        (
            resaved(no_rotary),
            "",
            "--num-attention-heads",
            "--num-attention-heads 12",
        ),
        (
            nothing,
            "--max-position-embeddings 32",
            "--max-position-embeddings",
            f"--max-position-embeddings {POSITIONS}",
        ),
        (nothing, "--rotary-base 500", "--rotary-base", None),
        (nothing, "--rotary-base 5500", "--rotary-base", f"--rotary-base {BASE}"),
        (rotary(1.1 * BASE, torch.float32, 1), "", "--rotary-base", f"--rotary-base {1.1 * BASE}"),
        (rotary(1.1 * BASE, torch.bfloat16, 1), "", "--rotary-base", f"--rotary-base {1.1 * BASE}"),
        (rotary(BASE, torch.float32, 8), "", "--rotary-base", None),
        (rotary(BASE, torch.bfloat16, 8), "", "--rotary-base", None),
        (nothing, "--global-batch-size 0", "--global-batch-size", "--global-batch-size 32"),
        (nothing, "--no-no-tokenizer", "--vocab-file", "--no-tokenizer"),
        (nothing, "--vocab-file t", "--no-tokenizer", None),
    ],
)
def test_what_cannot_be_imported_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    broken: Callable[[Path], None],
    flags: str,
    said: str,
    works: str | None,
) -> None:
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
        ("--lr 1e-5", "--min-lr", "--min-lr 0"),
        ("--min-lr -1", "--min-lr", "--min-lr 0"),
        ("--lr-warmup-init 0", "--lr-warmup-init", "--lr-warmup-init 0.001"),
        ("--train-iters 0", "--train-iters", "--train-iters 10000"),
        ("--train-iters -5", "--train-iters", "--train-iters 10000"),
        ("--from nowhere", "--from", None),
    ],
)
def test_what_cannot_be_exported_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    saved: Path,
    flags: str,
    said: str,
    works: str | None,
) -> None:
    path, to = import_folder(saved, tmp_path / "ours"), tmp_path / "theirs"
    with pytest.raises(SystemExit) as stop:
        export_folder(path, to, flags)
    assert stop.value.code == 2
    assert said in capsys.readouterr().err
    assert not to.exists()
    if works is not None:
        assert export_folder(path, to, f"{flags} {works}").is_dir()


def llama(**changes: Any) -> LlamaConfig:
    return LlamaConfig(num_layers=1, hidden_size=32, num_attention_heads=4, **changes)


def test_another_kind_or_form_is_not_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, section in (
        ("gpt2", tiny_section()),
        ("unknown", llama()),
        ("tied", llama(untie_embeddings_and_output_weights=False)),
        ("scaled", llama(rope_scaling=(8.0, 1.0, 4.0, 8192.0))),
        ("epsilon", llama(layernorm_epsilon=1e-6)),
    ):
        state = build_state(section, mesh_of_ranks(1), VOCABULARY, seed=1, dtype=torch.float32)
        facts = {"kind": section.kind, "config": {"model": asdict(section)}, "vocab_size": 263}
        facts = state.facts() | (facts if name != "unknown" else {})
        save_checkpoint(tmp_path / name, 0, state.slices(), facts, state.mesh)
        with pytest.raises(SystemExit):
            export_folder(tmp_path / name, tmp_path / f"theirs_{name}", "--train-iters 9000")
        assert not (tmp_path / f"theirs_{name}").exists()
        words = {
            "tied": "--untie-embeddings",
            "scaled": "no --rope-scaling, not --rope-scaling 8.0",
        }
        assert words.get(name, "") in (said := capsys.readouterr().err)
        assert "True" not in said
        assert "None" not in said


def test_the_other_import_names_this_program(saved: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"convert_dcp\.py import"):
        read_description(saved)
