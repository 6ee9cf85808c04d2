"""Folders of source C's script that cannot go on here: hostile, damaged, of something else."""

import contextlib
import pickle
import shutil
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
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
from tests.data.samples import write_tokenizer_json
from tests.dist import Pool
from tests.refusals import leaving_nothing, refusal, refused
from tests.tiny import mesh_of_ranks, tiny_section
from tests.tools.convert.legacy.test_dcp_tutorial import DONE, IMPORT, import_folder, save_on_ranks
from tests.tools.convert.legacy.test_pickles import PAYLOADS, write_zip
from tests.tools.convert.legacy.tutorial import (
    BASE,
    HEADS,
    HIDDEN,
    STEPS,
    VOCABULARY,
    Rotary,
    Script,
)
from tools.convert.folder import read_description
from tools.convert_dcp import main


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


def in_an_object(folder: Path, marker: Path) -> None:
    file = write_zip(folder / "__9_0.distcp", PAYLOADS["getattr"](marker))
    move_entry(folder, "optimizer.param_groups.0.weight_decay", file.name, file.stat().st_size)


def read_by_pickle(folder: Path) -> None:
    """As other programs do."""
    torch.load(folder / "lrscheduler.pt", weights_only=False)
    Script().load(folder, by_name=False)


program = leaving_nothing(partial(main, environ={}))


def import_words(folder: Path, flags: str = "") -> list[str]:
    words = ["import", "--from", str(folder), "--output", str(folder.with_name("ours"))]
    return [*words, *IMPORT.split(), *flags.split()]


@pytest.mark.parametrize(
    "hide", [in_metadata, in_scheduler, in_an_object], ids=lambda f: f.__name__
)
def test_a_payload_does_not_run(
    tmp_path: Path, folder: Path, hide: Callable[[Path, Path], None]
) -> None:
    marker = tmp_path / "marker"
    hide(folder, marker)
    assert "theirs" in str(refusal(lambda: program(import_words(folder))))
    assert not marker.exists()
    with contextlib.suppress(Exception, CheckpointException):
        read_by_pickle(folder)
    assert marker.exists()


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


def edited(change: Callable[[Any], object]) -> Callable[[Path], None]:
    return lambda folder: edit(folder, change)


def inflate(metadata: Any) -> None:
    """A tensor that no memory holds, though the file is small."""
    described = metadata.state_dict_metadata[HEAD]
    described.size = torch.Size((2**40, 96))
    described.chunks[-1].sizes = torch.Size((2**40 - described.chunks[-1].offsets[0], 96))


def compress(metadata: Any) -> None:
    metadata.storage_data[MetadataIndex(HEAD, (0, 0))].transform_descriptors = ["zstd"]


def second_scheduler(folder: Path) -> None:
    shutil.copy(folder / "lrscheduler.pt", folder / "other.pt")


def scheduler_of(steps: int) -> Callable[[Path], None]:
    def broken(folder: Path) -> None:
        script = Script()
        script.train(0, steps)
        torch.save(script.scheduler.state_dict(), folder / "lrscheduler.pt")

    return broken


def scheduler_with(**changes: Any) -> Callable[[Path], None]:
    """changes: by the name of a scheduler's value; a milestone is the warm-up's length, too."""

    def broken(folder: Path) -> None:
        file = folder / "lrscheduler.pt"
        state = torch.load(file, weights_only=False)
        warmup, cosine = state["_schedulers"]
        if "milestone" in changes:
            state["_milestones"] = [changes["milestone"]]
            warmup["total_iters"] = changes["milestone"]
        cosine["T_max"] = changes.get("T_max", cosine["T_max"])
        state["last_epoch"] = changes.get("last_epoch", state["last_epoch"])
        torch.save(state, file)

    return broken


def other_scheduler(folder: Path) -> None:
    torch.save({"last_epoch": DONE, "gamma": 0.1}, folder / "lrscheduler.pt")


def resaved(change: Callable[[dict[str, Any], dict[str, Any]], object]) -> Callable[[Path], None]:
    """A folder of a run in one process, with another model or optimizer."""

    def broken(folder: Path) -> None:
        script = Script()
        script.train(0, DONE)
        model, optimizer = dict(script.model.state_dict()), script.optimizer.state_dict()
        change(model, optimizer)
        shutil.rmtree(folder)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    return broken


def of_model(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return resaved(lambda model, _: change(model))


def of_state(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return resaved(lambda _, optimizer: change(optimizer["state"][4]))


def of_groups(change: Callable[[list[dict[str, Any]]], object]) -> Callable[[Path], None]:
    return resaved(lambda _, optimizer: change(optimizer["param_groups"]))


def twice(state: dict[Any, Any]) -> None:
    """The state of one parameter by its position and by its name."""
    state["base_model.embed_tokens.weight"] = state[0]


def rotary(base: float, dtype: torch.dtype, factor: float) -> Callable[[Path], None]:
    """With tables of this base, the slower half of the turns slower by a factor."""

    def change(model: dict[str, Any], _: object) -> None:
        new = Rotary(HIDDEN // HEADS, base)
        new.frequencies[2:] /= factor
        new.fill(torch.float32)
        model |= {f"base_model.rotary_emb.{name}": new.get_buffer(name) for name in ("cos", "sin")}
        model |= {name: each.to(dtype) for name, each in model.items()}

    return resaved(change)


def no_rotary(model: dict[str, Any]) -> None:
    for name in ("cos", "sin"):
        del model[f"base_model.rotary_emb.{name}"]


LAYER = "base_model.layers.1."
K, Q, UP = (f"{LAYER}{name}_proj.weight" for name in ("self_attn.k", "self_attn.q", "mlp.up"))
DAMAGED: list[tuple[Callable[[Path], None], str]] = [
    (remove(".metadata"), "--from"),
    (shorten(".metadata", 500), ".metadata"),
    (shorten("__0_0.distcp", 5000), "__0_0.distcp"),
    (remove("__1_0.distcp"), "__1_0.distcp"),
    (flip_a_weight, ".distcp"),
    (lead_out, ".metadata"),
    (edited(lambda metadata: metadata.state_dict_metadata[HEAD].chunks.pop()), ".metadata"),
    (edited(inflate), ".metadata"),
    (edited(compress), ".metadata"),
    (edited(lambda metadata: setattr(metadata, "planner_data", None)), ".metadata"),
    (shorten("lrscheduler.pt", 500), "lrscheduler.pt"),
    (other_scheduler, "lrscheduler.pt"),
    (scheduler_of(DONE + 2), "lrscheduler.pt"),
    (scheduler_of(DONE - 1), "lrscheduler.pt"),
    (scheduler_with(milestone=10.7), "milestone is 10.7"),
    (scheduler_with(T_max=-30.5), "T_max is -30.5"),
    (scheduler_with(last_epoch=-4), "last_epoch is -4"),
    (second_scheduler, "--scheduler"),
    (of_model(lambda model: model.pop(UP)), "layers.1.mlp.up_proj.weight"),
    (of_model(lambda model: model.update({K: model[K][:-2]})), "self_attn.k_proj"),
    (of_model(lambda model: model.update({Q: model[Q] * torch.nan})), "q_proj"),
    (of_model(lambda model: model.update({f"{LAYER}q_norm.weight": torch.ones(8)})), "q_norm"),
    (of_model(lambda model: model.update({n: w.double() for n, w in model.items()})), "--dtype"),
    (of_model(lambda model: model.update({UP: model[UP].long()})), "up_proj.weight is torch.int64"),
    (of_model(no_rotary), "--num-attention-heads"),
    (rotary(1.1 * BASE, torch.float32, 1), "--rotary-base"),
    (rotary(BASE, torch.float32, 8), "--rotary-base"),
    (rotary(1.1 * BASE, torch.bfloat16, 1), "--rotary-base"),
    (resaved(lambda _, optimizer: optimizer["state"].pop(4)), "exp_avg"),
    (of_state(lambda state: state.pop("step")), "step"),
    (of_state(lambda state: state.update(step=torch.tensor(9.0))), "steps"),
    (of_state(lambda state: state.update(exp_avg=torch.ones(3))), "optimizer.state.4.exp_avg"),
    (of_state(lambda state: state.update(max_exp_avg_sq=torch.ones(3))), "max_exp_avg_sq"),
    (resaved(lambda _, optimizer: twice(optimizer["state"])), "twice"),
    (of_groups(lambda groups: groups[0].update(amsgrad=True)), "amsgrad"),
    (of_groups(lambda groups: groups.append({"lr": 1.0})), "groups"),
]


FLAGS = [
    ("--scheduler nowhere.pt", "--scheduler"),
    ("--num-attention-heads 6", "--num-attention-heads"),
    ("--max-position-embeddings 32", "--max-position-embeddings"),
    ("--rotary-base 5500", "--rotary-base"),
    ("--global-batch-size 0", "--global-batch-size"),
    ("--no-no-tokenizer", "--vocab-file"),
    ("--vocab-file VOCABULARY", "--no-tokenizer"),
]


@pytest.mark.parametrize(
    ("broken", "flags", "named"),
    [
        *((broken, "", named) for broken, named in DAMAGED),
        *((Path.is_dir, flags, field) for flags, field in FLAGS),
    ],
)
def test_an_import_is_refused_by_the_flag_file_entry_or_tensor(
    tmp_path: Path, folder: Path, broken: Callable[[Path], object], flags: str, named: str
) -> None:
    broken(folder)
    vocabulary = write_tokenizer_json(tmp_path / "tokenizer")
    words = import_words(folder, flags.replace("VOCABULARY", vocabulary))
    if named.startswith("--"):
        assert refused(program, words) == named
    else:
        assert named in str(refusal(lambda: program(words)))


@pytest.fixture(scope="module")
def imported(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return import_folder(saved, tmp_path_factory.mktemp("imported") / "ours")


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (f"--lr-warmup-iters {STEPS}", "--lr-warmup-iters"),
        ("--lr-warmup-iters 0", "--lr-warmup-iters"),
        ("--lr-warmup-init 1", "--lr-warmup-init"),
        ("--lr-warmup-init 0", "--lr-warmup-init"),
        ("--lr 0", "--lr"),
        ("--lr 1e-5", "--min-lr"),
        ("--min-lr -1", "--min-lr"),
        ("--train-iters 0", "--train-iters"),
        ("--from nowhere", "--from"),
    ],
)
def test_a_schedule_that_torch_has_not_is_not_exported(
    tmp_path: Path, imported: Path, flags: str, field: str
) -> None:
    words = [
        "export",
        "--from",
        str(imported),
        "--output",
        str(tmp_path / "theirs"),
        *flags.split(),
    ]
    assert refused(program, words) == field


def llama(**changes: Any) -> LlamaConfig:
    return LlamaConfig(num_layers=1, hidden_size=32, num_attention_heads=4, **changes)


OTHERS = {
    "gpt2": tiny_section(),
    "unknown": llama(),
    "tied": llama(untie_embeddings_and_output_weights=False),
    "epsilon": llama(layernorm_epsilon=1e-6),
    "scaled": llama(rope_scaling=(8.0, 1.0, 4.0, 8192.0)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_kind_or_form_is_not_exported(tmp_path: Path, name: str) -> None:
    section, checkpoint = OTHERS[name], tmp_path / "ours"
    state = build_state(section, mesh_of_ranks(1), VOCABULARY, seed=1, dtype=torch.float32)
    facts = {"kind": section.kind, "config": {"model": asdict(section)}, "vocab_size": 263}
    facts = state.facts() | (facts if name != "unknown" else {})
    save_checkpoint(checkpoint, 0, state.slices(), facts, state.mesh)
    words = ["export", "--from", str(checkpoint), "--output", str(tmp_path / "theirs")]
    assert refused(program, [*words, "--train-iters", "9000"]) == "--from"


def test_the_other_import_names_this_program(saved: Path) -> None:
    assert "convert_dcp.py import" in str(refusal(lambda: read_description(saved)))
