"""A run of source C's script goes on here, and one of ours there: weights, moments, schedule.
Hostile, damaged and other files are refused."""

import contextlib
import pickle
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import get_state_dict

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
from tests.programs import assert_equal_bits, finished, lines_of, newest
from tests.refusals import leaving_nothing, refusal, refused
from tests.tiny import mesh_of_ranks, micro_batches, samples, tiny_config, whole_weights
from tests.tools.convert.legacy import tutorial
from tests.tools.convert.legacy.test_pickles import PAYLOADS, write_zip
from tests.tools.convert.legacy.tutorial import BASE, BATCH, HEADS, POSITIONS, Script
from tests.tools.corpus.lines import write_jsonl
from tools.convert.folder import read_description
from tools.convert.legacy.dcp_tutorial import read_schedule
from tools.convert.writing import check_weights
from tools.convert_dcp import main

Capture = pytest.CaptureFixture[str]

DONE = 3  # steps before the save
IMPORT = f"--global-batch-size {BATCH} --rotary-base {BASE} --no-tokenizer"
SETTINGS = {
    "adam_beta1": tutorial.BETAS[0], "adam_beta2": tutorial.BETAS[1], "adam_eps": tutorial.EPS,
    "weight_decay": tutorial.DECAY, "decay_biases_and_norms": True,
}  # fmt: skip
OPTIMIZER = OptimizerConfig(**SETTINGS)
SKIPPED = 2
# Both go on in fp64 from the same numbers; what differs is the order of sums.
CLOSE = 1e-11


def save_both(root: Path, kind: str) -> None:
    """Every rank calls this."""
    script = Script(tensor_parallel=dist.is_initialized())
    script.train(0, DONE)
    for by_name in (False, True):
        script.save(root / f"{kind}{' by name' * by_name}", by_name=by_name)


def script_of(folder: Path, by_name: bool = False) -> Script:
    """The run that goes on with the tutorial's own means."""
    script = Script(seed=1)
    script.load(folder, by_name=by_name)
    return script


def import_folder(folder: Path, to: Path, flags: str = IMPORT) -> Path:
    main(["import", "--from", str(folder), "--output", str(to), *flags.split()], {})
    return newest(to)


def export_folder(checkpoint: Path, to: Path, flags: str = "") -> Path:
    main(["export", "--from", str(checkpoint), "--output", str(to), *flags.split()], {})
    return to


@pytest.fixture(scope="module")
def saved(gloo: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of one process and of "two ranks", and each "by name"."""
    root = tmp_path_factory.mktemp("saved")
    save_both(root, "one")
    gloo.run(2, save_both, root, "two ranks")
    return root


@pytest.fixture(scope="module")
def imported(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of the first."""
    return import_folder(saved / "one", tmp_path_factory.mktemp("imported") / "ours")


def loaded(checkpoint: Path, mesh: Mesh, dtype: torch.dtype, zero_stage: int = 0) -> TrainState:
    manifest = read_manifest(checkpoint)
    config, size = config_of(manifest), manifest["vocab_size"]
    settings = {"dtype": dtype, "optimizer": OPTIMIZER, "zero_stage": zero_stage}
    state = build_state(config, mesh, size, seed=1, **settings)
    state.load(verify(checkpoint, mesh))
    return state


def go_on(state: TrainState, rates: Sequence[float]) -> list[float]:
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


@pytest.mark.parametrize("kind", ["one", "two ranks by name"])
def test_import_goes_on(gloo: Pool, tmp_path: Path, saved: Path, kind: str) -> None:
    path = import_folder(saved / kind, tmp_path / "ours")
    script = script_of(saved / kind, "by name" in kind)
    manifest = read_manifest(path)
    counters = {"step": DONE, "samples": DONE * BATCH, "skipped": 0}
    assert manifest["counters"].items() >= counters.items()
    assert manifest["config"]["optimizer"] == SETTINGS | {
        "lr": tutorial.LR, "min_lr": tutorial.MIN_LR, "lr_decay_style": "cosine",
        "lr_warmup_init": pytest.approx(0.1 * tutorial.LR), "lr_warmup_iters": tutorial.WARMUP,
        "lr_decay_iters": tutorial.STEPS,
    }  # fmt: skip
    config = config_of(manifest)
    sizes = config.num_attention_heads, config.max_position_embeddings
    assert sizes == (HEADS, POSITIONS)

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
def test_export_goes_on(
    gloo: Pool, tmp_path: Path, imported: Path, keys: str, zero_stage: int
) -> None:
    rates = [rate for rate, _ in Script().train(0, DONE + 6)][DONE:]
    gloo.run(2, train_and_save, imported, rates[:3], tmp_path / "ours", zero_stage)
    exported = export_folder(tmp_path / "ours", tmp_path / "theirs", f"--state-keys {keys}")

    script = script_of(exported, keys == "name")
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
def test_round_trip(tmp_path: Path, kept: str) -> None:
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
        back = script_of(export_folder(path, tmp_path / "back", flags))
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


def test_printed_command(tmp_path: Path, capsys: Capture, saved: Path) -> None:
    vocabulary = write_tokenizer_json(tmp_path / "tokenizer")
    flags = f"{IMPORT.replace('--no-tokenizer', '')} --vocab-file {vocabulary}"
    import_folder(saved / "two ranks", tmp_path / "ours", flags)
    data = write_jsonl(tmp_path / "web.jsonl", [{"text": f"text {n}"} for n in range(40)])
    said = capsys.readouterr().out.partition("pretrain.py ")[2].splitlines()[0]
    words = " ".join([
        *shlex.split(said), f"--data-path {data} --train-iters 5 --log-interval 1",
        f"--metrics-file {tmp_path / 'metrics.jsonl'} --eval-iters 0",
    ])  # fmt: skip
    for flag in ("--pad", "--no-shuffle", "--begin-token [BOT]", "--end-token [EOT]", "--lr 0.01"):
        assert flag in words
    finished(words, folder=tmp_path, program="pretrain", shape="")
    found = lines_of(tmp_path)
    counted = [(line["step"], line["samples"]) for line in found]
    assert counted == [(step, step * BATCH) for step in (DONE + 1, DONE + 2)]
    rates = [rate for rate, _ in Script().train(0, DONE + 2)][DONE:]
    assert [line["lr"] for line in found] == pytest.approx(rates)


def test_steps_of_get_state_dict(tmp_path: Path) -> None:
    """The second tutorial saves before its first step, and so makes Adam count one step."""
    script = Script()
    script.save(tmp_path / "first", by_name=True)
    script.train(0, DONE)
    script.save(tmp_path / "theirs", by_name=True)
    for name, steps in (("first", 0), ("theirs", DONE)):
        path = import_folder(tmp_path / name, tmp_path / f"ours_{name}")
        assert read_manifest(path)["counters"]["step"] == steps
    stored = load_file(newest(tmp_path / "ours_theirs") / "shard_00000.safetensors")
    for name, wanted in script.moments("exp_avg").items():
        assert torch.equal(stored[f"exp_avg.{name}"], wanted)


def renamed(base: str, script: Script, folder: Path) -> None:
    """The base has another name, and the model has its parameters in another order."""
    model = {
        name.replace("base_model.", base): weight
        for name, weight in reversed(script.model.state_dict().items())
        if "rotary" not in name
    }
    optimizer = script.optimizer.state_dict()
    optimizer["state"] = dict(enumerate(reversed(optimizer["state"].values())))
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)


def compiled(script: Script, folder: Path) -> None:
    """Its own state_dict keeps the prefix that get_state_dict drops."""
    _, optimizer = get_state_dict(script.model, script.optimizer)
    model = {f"_orig_mod.{name}": weight for name, weight in script.model.state_dict().items()}
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    torch.save(script.scheduler.state_dict(), folder / "lrscheduler.pt")


def other_scheduler(is_pickled: bool, script: Script, folder: Path) -> None:
    script.save(folder, by_name=False)
    (folder / "lrscheduler.pt").unlink()
    if is_pickled:
        (folder / "scheduler.pkl").write_bytes(pickle.dumps(script.scheduler.state_dict()))
    else:
        torch.save(script.scheduler, folder / "scheduler.pt")


FORMS: dict[str, Callable[[Script, Path], None]] = {
    "base model": partial(renamed, "model."),
    "no base": partial(renamed, ""),
    "compiled": compiled,
    "pickled scheduler": partial(other_scheduler, True),
    "scheduler object": partial(other_scheduler, False),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(tmp_path: Path, capsys: Capture, saved: Path, imported: Path, form: str) -> None:
    FORMS[form](script_of(saved / "one"), tmp_path / "theirs")
    is_bare = "base" in form  # without buffers and scheduler
    sizes = f"--num-attention-heads {HEADS} --max-position-embeddings {POSITIONS}"
    flags = f"{IMPORT} {sizes}" if is_bare else IMPORT
    path = import_folder(tmp_path / "theirs", tmp_path / "ours", flags)
    assert_equal_bits(path, imported)
    found, wanted = (read_manifest(each)["config"]["optimizer"] for each in (path, imported))
    assert found == (SETTINGS if is_bare else wanted)
    assert ("--scheduler" in capsys.readouterr().err) == is_bare


def test_check_weights(saved: Path, imported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = script_of(saved / "one").weights()
    check_weights(imported, weights, "")
    with monkeypatch.context() as patch:
        wrong = torch.tensor([1.0, torch.inf])
        patch.setattr("tools.convert.writing.whole_logits", lambda *_: wrong)
        refusal(lambda: check_weights(imported, weights, ""), "logits")
    weights["final_norm.weight"][0] += 1
    assert "final_norm.weight" in str(refusal(lambda: check_weights(imported, weights, "")))


# Settings of ours, flags of the export, the number of warnings, and what the schedule then is.
@pytest.mark.parametrize(
    ("settings", "flags", "warned", "schedule"),
    [
        ({}, "", 0, {}),
        ({"decay_biases_and_norms": False}, "", 1, {}),
        ({"decoupled_weight_decay": False, "lr_decay_style": "linear"}, "", 2, {}),
        ({"lr_warmup_init": None}, "", 1, {"lr_warmup_init": 1e-3}),
        ({"lr_warmup_init": None}, "--lr-warmup-init 0.001", 0, {"lr_warmup_init": 0.001}),
        ({"lr": 1e-2, "lr_warmup_init": 5e-3}, "--lr 1e-3 --min-lr 0", 0,
         {"lr_warmup_init": 5e-4, "min_lr": 0}),
    ],
)  # fmt: skip
def test_export_warnings(
    tmp_path: Path, capsys: Capture, imported: Path, settings: dict[str, Any],
    flags: str, warned: int, schedule: dict[str, float],
) -> None:  # fmt: skip
    state = loaded(imported, mesh_of_ranks(1), torch.float32)
    save_ours(state, imported, tmp_path / "ours", **settings)
    capsys.readouterr()
    to = export_folder(tmp_path / "ours", tmp_path / "theirs", flags)
    assert capsys.readouterr().err.count("warning: ") == warned
    found = read_schedule(to / "lrscheduler.pt")
    for name, value in schedule.items():
        assert getattr(found, name) == pytest.approx(value)


# Refusals


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved / "two ranks", tmp_path / "theirs"))


program = leaving_nothing(partial(main, environ={}))


def import_words(folder: Path, flags: str = "") -> list[str]:
    words = ["import", "--from", str(folder), "--output", str(folder.with_name("ours"))]
    return [*words, *IMPORT.split(), *flags.split()]


def damage(folder: Path, part: str, change: Callable[[Any], object]) -> None:
    """Change files, or what one of them says, or save another model or optimizer of a run in one
    process."""
    if part == "files":
        change(folder)
    elif part == "metadata":
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        change(metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    elif part == "scheduler":
        state = torch.load(folder / "lrscheduler.pt", weights_only=False)
        change(state)
        torch.save(state, folder / "lrscheduler.pt")
    else:
        script = Script()
        script.train(0, DONE)
        model, optimizer = dict(script.model.state_dict()), script.optimizer.state_dict()
        parts = {"model": model, "state": optimizer["state"], "groups": optimizer["param_groups"]}
        change(parts[part])
        shutil.rmtree(folder)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)


def move_entry(folder: Path, key: str, name: str, file: Path) -> None:
    """Let .metadata say that the object `key` is the whole of another file."""

    def move(metadata: Any) -> None:
        place = metadata.storage_data[MetadataIndex(key)]
        place.relative_path, place.offset, place.length = name, 0, file.stat().st_size

    damage(folder, "metadata", move)


def in_an_object(folder: Path, marker: Path) -> None:
    file = write_zip(folder / "__9_0.distcp", PAYLOADS["getattr"](marker))
    move_entry(folder, "optimizer.param_groups.0.weight_decay", file.name, file)


HIDDEN: dict[str, Callable[[Path, Path], object]] = {
    "metadata": lambda folder, marker: (folder / ".metadata").write_bytes(
        b"\x80\x04" + PAYLOADS["os.system"](marker) + b"."
    ),
    "scheduler": lambda folder, marker: write_zip(
        folder / "lrscheduler.pt", PAYLOADS["eval"](marker)
    ),
    "object": in_an_object,
}


@pytest.mark.parametrize("place", HIDDEN)
def test_payloads(tmp_path: Path, folder: Path, place: str) -> None:
    marker = tmp_path / "marker"
    HIDDEN[place](folder, marker)
    assert "theirs" in str(refusal(lambda: program(import_words(folder))))
    assert not marker.exists()
    with contextlib.suppress(Exception, CheckpointException):  # as other programs read it
        torch.load(folder / "lrscheduler.pt", weights_only=False)
        Script().load(folder, by_name=False)
    assert marker.exists()


def shorten(name: str, nbytes: int) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:nbytes])


def flip_a_weight(folder: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    place = metadata.storage_data[MetadataIndex("model.base_model.norm.weight", (0,))]
    content = bytearray((folder / place.relative_path).read_bytes())
    content[place.offset + place.length // 2] ^= 1
    (folder / place.relative_path).write_bytes(content)


def lead_out(folder: Path) -> None:
    file = folder.parent / "outside"
    torch.save(1e-8, file)
    move_entry(folder, "optimizer.param_groups.0.eps", "../outside", file)


HEAD = "model.lm_head.weight"


def inflate(metadata: Any) -> None:
    """A tensor that no memory holds, though the file is small."""
    described = metadata.state_dict_metadata[HEAD]
    described.size = torch.Size((2**40, 96))
    described.chunks[-1].sizes = torch.Size((2**40 - described.chunks[-1].offsets[0], 96))


def compress(metadata: Any) -> None:
    metadata.storage_data[MetadataIndex(HEAD, (0, 0))].transform_descriptors = ["zstd"]


def as_bf16(metadata: Any) -> None:
    metadata.state_dict_metadata["optimizer.state.4.exp_avg"].properties.dtype = torch.bfloat16


def scheduled(steps: int) -> Any:
    script = Script()
    script.train(0, steps)
    return script.scheduler.state_dict()


def rotary(base: float, dtype: torch.dtype, factor: float) -> Callable[[Any], None]:
    """With tables of this base, the slower half of the turns slower by a factor."""

    def change(model: dict[str, Any]) -> None:
        new = tutorial.Rotary(tutorial.HIDDEN // HEADS, base)
        new.frequencies[2:] /= factor
        new.fill(torch.float32)
        model |= {f"base_model.rotary_emb.{name}": new.get_buffer(name) for name in ("cos", "sin")}
        model |= {name: each.to(dtype) for name, each in model.items()}

    return change


ROTARY = ("base_model.rotary_emb.cos", "base_model.rotary_emb.sin")
EMBEDDING, LAYER = "base_model.embed_tokens.weight", "base_model.layers.1."
K, Q, UP = (f"{LAYER}{name}_proj.weight" for name in ("self_attn.k", "self_attn.q", "mlp.up"))
# (the part that is changed, how, what the error names)
DAMAGED: list[tuple[str, Callable[[Any], object], str]] = [
    ("files", lambda folder: (folder / ".metadata").unlink(), "--from"),
    ("files", shorten(".metadata", 500), ".metadata"),
    ("files", shorten("__0_0.distcp", 10**6), "__0_0.distcp is damaged: it is shorter"),
    ("files", lambda folder: (folder / "__1_0.distcp").unlink(), "__1_0.distcp"),
    ("files", flip_a_weight, ".distcp"),
    ("files", lead_out, ".metadata"),
    ("files", shorten("lrscheduler.pt", 500), "lrscheduler.pt"),
    ("files", lambda it: shutil.copy(it / "lrscheduler.pt", it / "other.pt"), "--scheduler"),
    ("metadata", lambda it: it.state_dict_metadata[HEAD].chunks.pop(), ".metadata"),
    ("metadata", inflate, ".metadata"),
    ("metadata", compress, ".metadata"),
    ("metadata", as_bf16, ".distcp"),
    ("metadata", lambda it: setattr(it, "planner_data", None), ".metadata"),
    ("scheduler", lambda state: state.pop("_schedulers"), "lrscheduler.pt"),
    ("scheduler", lambda state: state.update(scheduled(DONE + 2)), "lrscheduler.pt"),
    ("scheduler", lambda state: state.update(scheduled(DONE - 1)), "lrscheduler.pt"),
    ("model", lambda model: model.pop(UP), "layers.1.mlp.up_proj.weight"),
    ("model", lambda model: model.update({K: model[K][:-2]}), "self_attn.k_proj"),
    ("model", lambda model: model.update({Q: model[Q] * torch.nan}), "q_proj"),
    ("model", lambda model: model.update({f"{LAYER}q_norm.weight": torch.ones(8)}), "q_norm"),
    ("model", lambda model: model.update({n: w.double() for n, w in model.items()}), "--dtype"),
    ("model", lambda model: [*map(model.pop, ROTARY)], "--num-attention-heads"),
    ("model", rotary(1.1 * BASE, torch.float32, 1), "--rotary-base"),
    ("model", rotary(BASE, torch.float32, 8), "--rotary-base"),
    ("model", rotary(1.1 * BASE, torch.bfloat16, 1), "--rotary-base"),
    ("state", lambda state: state.pop(4), "exp_avg"),
    ("state", lambda state: state[4].pop("step"), "step"),
    ("state", lambda state: state[4].update(step=torch.tensor(9.0)), "steps"),
    ("state", lambda state: state[4].update(exp_avg=torch.ones(3)), "optimizer.state.4.exp_avg"),
    ("state", lambda state: state[4]["exp_avg"].fill_(torch.nan), "exp_avg"),
    ("state", lambda state: state[4].update(max_exp_avg_sq=torch.ones(3)), "max_exp_avg_sq"),
    ("state", lambda state: state.update({EMBEDDING: state[0]}), "twice"),
    ("groups", lambda groups: groups[0].update(amsgrad=True), "amsgrad"),
    ("groups", lambda groups: groups.append({"lr": 1.0}), "groups"),
]
FLAGS = {
    **{flag: flag.split()[0] for flag in (
        "--scheduler nowhere.pt", "--num-attention-heads 6", "--max-position-embeddings 32",
        "--rotary-base 5500", "--global-batch-size 0",
    )},
    "--no-no-tokenizer": "--vocab-file", "--vocab-file VOCABULARY": "--no-tokenizer",
}  # fmt: skip


@pytest.mark.parametrize(
    ("part", "change", "flags", "named"),
    [
        *((part, change, "", named) for part, change, named in DAMAGED),
        *(("files", Path.is_dir, flags, field) for flags, field in FLAGS.items()),
    ],
)
def test_import_refusals(
    tmp_path: Path, folder: Path, part: str, change: Callable[[Any], object], flags: str, named: str
) -> None:
    damage(folder, part, change)
    vocabulary = write_tokenizer_json(tmp_path / "tokenizer")
    words = import_words(folder, flags.replace("VOCABULARY", vocabulary))
    if named.startswith("--"):
        assert refused(program, words) == named
    else:
        assert named in str(refusal(lambda: program(words)))


def llama(**changes: Any) -> LlamaConfig:
    return LlamaConfig(num_layers=1, hidden_size=32, num_attention_heads=4, **changes)


OTHERS = {
    "gpt2": tiny_config(),
    "unknown": llama(),
    "tied": llama(untie_embeddings_and_output_weights=False),
    "epsilon": llama(layernorm_epsilon=1e-6),
    "scaled": llama(rope_scaling=(8.0, 1.0, 4.0, 8192.0)),
}


def save_other(name: str, to: Path) -> None:
    """A checkpoint of a model that the script has not."""
    config = OTHERS[name]
    state = build_state(config, mesh_of_ranks(1), tutorial.VOCABULARY, seed=1, dtype=torch.float32)
    facts = {"kind": config.kind, "config": {"model": asdict(config)}, "vocab_size": 263}
    facts = state.facts() | (facts if name != "unknown" else {})
    save_checkpoint(to, 0, state.slices(), facts, state.mesh)


@pytest.mark.parametrize(
    ("source", "flags", "field"),
    [
        *(("", flag, flag.split()[0]) for flag in (
            f"--lr-warmup-iters {tutorial.STEPS}", "--lr-warmup-iters 0", "--lr-warmup-init 1",
            "--lr-warmup-init 0", "--lr 0", "--min-lr -1", "--train-iters 0",
        )),
        ("", "--lr 1e-5", "--min-lr"),
        ("nowhere", "", "--from"),
        *((name, "--train-iters 9000", "--from") for name in OTHERS),
    ],
)  # fmt: skip
def test_export_refusals(
    tmp_path: Path, imported: Path, source: str, flags: str, field: str
) -> None:
    if source in OTHERS:
        save_other(source, tmp_path / source)
    checkpoint = tmp_path / source if source else imported
    words = ["export", "--from", str(checkpoint), "--output", str(tmp_path / "theirs")]
    assert refused(program, [*words, *flags.split()]) == field


def test_convert_hf_names_convert_dcp(saved: Path) -> None:
    assert "convert_dcp.py import" in str(refusal(lambda: read_description(saved / "one")))
