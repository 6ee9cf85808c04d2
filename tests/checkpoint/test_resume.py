"""Where a run starts, and what a resumed run may not change."""

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.resume import (
    Start,
    changes,
    check_start,
    data_fingerprint,
    differences,
    find_start,
    newest_readable,
)
from megatron.config.parse import parse
from megatron.config.pretrain import PretrainGPT2Config
from megatron.errors import UsageError
from megatron.models.registry import config_of
from tests.checkpoint.files import make_checkpoint
from tests.config.test_checks import settings
from tests.models.own_kind import PretrainOwnConfig
from tests.refusals import by_last_flag, refusal, refused

IDENTITY = {"vocab_size": 100, "tokenizer": "f", "data": ["1/4 of SHA-256 a", "3/4 of SHA-256 b"]}
PATH = Path("somewhere/step_00000004")
WORDS = "--num-layers 2 --hidden-size 8 --num-attention-heads 4 --train-iters 3"


def manifest(**changes: Any) -> dict[str, Any]:
    facts = {"config": asdict(settings(**changes)), "precision": "fp32", **IDENTITY}
    environment = {"layout": {"data": 2, "tensor": 1}, "device": "cpu"}
    return {"kind": "gpt2", **facts, "environment": environment}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that tests work in: "one" and "ahead" hold the same run, "two" another, "tuned"
    one that was fine-tuned from "one"; "link" leads to "one", "straight" to a checkpoint in it."""
    monkeypatch.chdir(tmp_path)
    for step in (4, 8):
        make_checkpoint(Path("one"), step, run="one")
    make_checkpoint(Path("ahead"), 10, run="one")
    make_checkpoint(Path("two"), 9, run="two")
    make_checkpoint(Path("tuned"), 2, run="three", weights_of="one")
    make_checkpoint(Path("seeds/seed_1"), 3)
    Path("link").symlink_to("one")
    Path("ring").symlink_to("ring")
    Path("straight").symlink_to("one/step_00000004")
    for file in ("config.json", "latest_checkpointed_iteration.txt", ".metadata"):
        Path(f"with_{file}").mkdir()
        Path(f"with_{file}", file).write_text("{}")
    return tmp_path


def start_of(words: list[str]) -> Start:
    return find_start(parse(PretrainGPT2Config, [*WORDS.split(), *words], {}).checkpoint)


ONE, AHEAD = ["one/step_00000008", "one/step_00000004"], ["ahead/step_00000010"]


# The folders that a run looks at, by arguments.
STARTS: list[tuple[list[str], list[str]]] = [
    ([], ["", "--save new", "--save new --load new"]),  # a job that restarts itself, at first
    (ONE, ["--save one --load one", "--save one --load link", "--save ./one/ --load one/"]),
    (ONE, ["--load one", "--load one --save new"]),
    (ONE, ["--load one --save new --finetune", "--load one --save one/finer --finetune"]),
    (AHEAD + ONE, ["--load one --save ahead", "--load ahead --save one"]),
    # Going back on purpose.
    (ONE[1:], [f"--load {load} --save one" for load in (ONE[1], "link/step_00000004", "straight")]),
    (ONE[1:], ["--load one/step_00000004 --save new"]),
    (AHEAD + ONE[1:], ["--load one/step_00000004 --save ahead"]),
    (["tuned/step_00000002"], ["--load one --save tuned --finetune"]),
]


def test_a_fingerprint_of_data_covers_each_part() -> None:
    facts = {"vocab_size": 51, "tokenizer": "f", "data": ["1 of x"]}
    others = {"vocab_size": 52, "tokenizer": "g", "data": ["1 of y"]}
    changed = [facts, *({**facts, key: value} for key, value in others.items())]
    assert len({*map(data_fingerprint, changed)}) == 4


def test_start_from_the_furthest_checkpoint(runs: Path) -> None:
    for folders, several in STARTS:
        for arguments in several:
            start = start_of(arguments.split())
            found = [each.resolve() for each in start.folders]
            assert found == [runs / each for each in folders], arguments
            assert start.finetune == ("--finetune" in arguments and "tuned" not in arguments)


MIXED = """
--save one | --load one --save two | --load two --save one | --load one --save two --finetune
--load one --save ahead --finetune | --load one --save tuned | --load one --save one --finetune
--load one/ --save one --finetune | --load ./one --save one --finetune
--load link --save one --finetune | --load one/step_00000004 --save one --finetune
--load straight --save one --finetune
"""


def test_runs_are_not_mixed(runs: Path) -> None:
    for words, _ in by_last_flag(MIXED):
        assert refused(start_of, words) == "--save", words


def test_a_load_without_checkpoints_is_refused(runs: Path) -> None:
    for load, cure in (
        ("nowhere", "--save"),
        ("one/step_00000003", "--save"),
        ("ring", "--save"),
        ("with_config.json", "convert_hf.py import --from with_config.json --output NEW"),
        ("with_latest_checkpointed_iteration.txt", "tools/import_megatron.py"),
        ("with_.metadata", "convert_dcp.py import --from with_.metadata --output NEW"),
        ("seeds", "seeds/seed_1"),
    ):
        for save in ("new", "other"):
            words = ["--load", load, "--save", save]
            assert refusal(partial(start_of, words), cure).value == load
            assert refused(start_of, words) == "--load"


def test_a_damaged_newest_one_is_not_looked_at(runs: Path) -> None:
    (make_checkpoint(Path("one"), 12) / "manifest.json").write_text("{")
    longer = make_checkpoint(Path("one"), 16) / "shard_00001.safetensors"
    longer.write_bytes(longer.read_bytes() * 2)
    # The newest that can be read is of the same run.
    folders = start_of(["--load", "one", "--save", "ahead"]).folders
    newest, reasons = newest_readable(folders, any_loop=True)
    assert newest.path.name == "step_00000010"
    named = [folder.name in reason for folder, reason in zip(folders, reasons, strict=False)]
    assert named == [True, True]


def check(identity: dict[str, Any] | None = None, finetune: bool = False, **changes: Any) -> None:
    """changes: of settings; the checkpoint has those of `settings()`."""
    identity = IDENTITY | (identity or {})
    check_start(settings(**changes), PATH, manifest(), identity=identity, finetune=finetune)


def refused_start(
    config: PretrainGPT2Config, facts: dict[str, Any], *, finetune: bool = False, **other: Any
) -> tuple[str, tuple[str, ...]]:
    """(flag, what works) of the start that is refused; other: in place of IDENTITY's facts."""
    identity = IDENTITY | other
    start = partial(check_start, config, PATH, facts, identity=identity, finetune=finetune)
    error = refusal(start, str(PATH))
    return error.flag, error.works


OVERRIDE = ("--override-data",)
MOCK, MOCK_DATA = {"mock_data": True}, {"data": ["1 of mock data"]}
OTHER_DATA: list[dict[str, Any]] = [
    {"data": ["1/4 of SHA-256 a", "3/4 of SHA-256 c"]},
    {"data": ["1/4 of SHA-256 a"]},
    {"data": []},
    {"tokenizer": "g"},
]


# Settings of which the last may not change, in a run and where weights are tuned; those that may.
FIXED = """
--num-layers 3 | --override-data --num-layers 3 | --seed 5 --num-layers 3 | --seed 5 | --split 1,1,1
--seq-length 8 | --eod-mask-loss | --no-shuffle | --bf16 | --override-data --bf16 | --pure-bf16
"""
FREE = """
--lr 1e-4 | --train-iters 9 --tensor-model-parallel-size 2 --lr 0.1 --save s
--data-path moved --vocab-file v --merge-file m | --override-data --seed 5 --seq-length 8
--recompute-granularity full --cpu-offload-activations | --optimizer-cpu-offload
"""


def started(words: list[str]) -> None:
    config = parse(PretrainGPT2Config, [*WORDS.split(), "--load=here", *words], {})
    check_start(config, PATH, manifest(), identity=IDENTITY, finetune=False)


def test_settings_that_may_and_may_not_change() -> None:
    for row, flag in by_last_flag(FIXED):
        assert refused(started, row) == flag, row
    for row, _ in by_last_flag(FREE):
        started(row.split())
    check(finetune=True, seed=5, bf16=True, identity={"data": []})
    assert refused_start(settings(num_layers=3), manifest(), finetune=True)[0] == "--num-layers"


def test_data_that_may_not_change_are_refused() -> None:
    for given, flag, works in (
        *(({"identity": other}, "--data-path", OVERRIDE) for other in OTHER_DATA),
        ({"identity": {"vocab_size": 90}}, "--data-path", ()),
        (
            {"identity": {"vocab_size": 90}, "load": "here", "override_data": True},
            "--data-path",
            (),
        ),
        ({"identity": {"tokenizer": "g"}, "finetune": True}, "--data-path", OVERRIDE),
        (MOCK | {"identity": MOCK_DATA}, "--mock-data", ("--mock-data", *OVERRIDE)),
        (MOCK | {"identity": {"data": [], "vocab_size": 90}}, "--mock-data", ("--no-mock-data",)),
        (MOCK | {"identity": {"vocab_size": 90}}, "--vocab-size", ("--vocab-size", "100")),
    ):
        error = refusal(partial(check, **given), field=flag)
        assert set(error.works) == set(works)
        if works == OVERRIDE:
            check(**given, load="here", override_data=True)


def test_samples_of_files_are_compared() -> None:
    """An older one has none."""
    first, second = IDENTITY["data"]
    saved, other = (IDENTITY | {"data": [first, f"{second}; sample {each}"]} for each in "xy")
    check_start(settings(), PATH, manifest(), identity=saved)
    check_start(settings(), PATH, manifest() | saved, identity=saved)
    check_start(settings(load="here", override_data=True), PATH, manifest() | saved, identity=other)
    assert refused_start(settings(), manifest() | saved, **other) == ("--data-path", OVERRIDE)


@pytest.mark.parametrize(("saved", "now"), [(True, False), (False, True)])
def test_bf16_with_masters_and_without_are_two_precisions(saved: bool, now: bool) -> None:
    """Both compute in bf16; settings that are not given are those of the checkpoint."""
    facts = manifest(bf16=True, pure_bf16=saved) | {"precision": "bf16"}
    flags = {False: "--bf16", True: "--pure-bf16"}
    config = settings(bf16=True, pure_bf16=now)
    assert refused_start(config, facts) == (flags[now], (flags[saved],))
    check_start(settings(bf16=True, pure_bf16=saved), PATH, facts, identity=IDENTITY)


@pytest.mark.parametrize(("saved", "now"), [("a", None), (None, "a"), ("a", "b")])
def test_a_setting_that_may_be_left_out(saved: str | None, now: str | None) -> None:
    config, facts = settings(pad=True, begin_token=now), manifest(pad=True, begin_token=saved)
    works = () if saved is None else ("--begin-token", saved)
    assert refused_start(config, facts) == ("--begin-token", works)


def test_default_of_a_new_setting() -> None:
    facts = manifest()
    for name in ("shuffle", "pad", "num_workers"):
        del facts["config"]["data"][name]
    check_start(settings(num_workers=7), PATH, facts, identity=IDENTITY)
    assert refused_start(settings(shuffle=False), facts)[1] == ("--shuffle",)
    del facts["config"]["optimizer"]["optimizer"]  # moments are of adamw
    assert refused_start(settings(optimizer="sgd"), facts)[1] == ("--optimizer", "adamw")
    sgd = settings(optimizer="sgd", sgd_momentum=0.5)
    assert refused_start(sgd, manifest(optimizer="sgd"))[1] == ("--sgd-momentum", "0.9")
    now = settings(cpu_offload_activations=True, optimizer_cpu_offload=True)
    del facts["config"]["model"]["cpu_offload_activations"]
    del facts["config"]["optimizer"]["optimizer_cpu_offload"]
    check_start(now, PATH, facts, identity=IDENTITY)
    assert config_of(facts) == replace(now.model, cpu_offload_activations=False)


def test_a_key_that_one_config_json_lacks_differs() -> None:
    both = [manifest(attention_dropout=0.0, hidden_dropout=0.0) for _ in range(2)]
    for facts, text in zip(both, ('{"rope": 1}', "{}"), strict=True):
        facts["config"]["model"]["hf_config"] = text
    assert differences(*both)["config.json: rope"] == (1, None)
    assert differences(*both[::-1])["config.json: rope"] == (None, 1)


def test_settings_of_a_custom_kind_may_not_change() -> None:
    """Neither those of its model nor of its data, which have defaults in an older checkpoint."""
    saved, heads, twice = (
        parse(PretrainOwnConfig, f"{WORDS} --data-path d --key-value-heads {more}".split(), {})
        for more in ("1", "2", "1 --twice")
    )
    facts = manifest() | {"config": asdict(saved), "kind": saved.model.kind}
    del facts["config"]["data"]["twice"]
    check_start(saved, PATH, facts, identity=IDENTITY)
    assert refused_start(heads, facts)[1] == ("--key-value-heads", "1")
    assert refused_start(twice, facts)[1] == ("--no-twice",)


def test_both_values_are_named() -> None:
    for given, values in (
        ({"seed": 5}, ("5", "1234")),
        ({"identity": {"tokenizer": "g" * 64}}, ("g" * 12, "f")),
        ({"identity": OTHER_DATA[0]}, ("3/4 of SHA-256 c", "3/4 of SHA-256 b")),
    ):
        refusal(partial(check, **given), *values, kind=UsageError)


def test_imported_weights_are_not_resumed() -> None:
    """Such a manifest has the settings of the model and the data alone."""
    config = {part: asdict(settings())[part] for part in ("model", "data")}
    imported = manifest() | {"config": config, "imported_from": "gpt2"}
    assert refused_start(settings(), imported)[1] == ("--load", str(PATH), "--finetune")
    check_start(settings(), PATH, imported, identity=IDENTITY, finetune=True)
    check_start(settings(), PATH, imported | {"tokenizer": ""}, identity=IDENTITY, finetune=True)
    assert refused_start(settings(num_layers=3), imported, finetune=True)[0] == "--num-layers"


def test_resume_of_an_imported_run() -> None:
    """It has the optimizer's state, but not its data and most of its settings."""
    config = {part: asdict(settings())[part] for part in ("model", "data")}
    config["optimizer"] = {"lr": 3.0, "weight_decay": settings().optimizer.weight_decay}
    imported = manifest() | {"config": config, "imported_from": "elsewhere", "data": []}
    imported["tensors"] = {"exp_avg.weight": {}}
    check_start(settings(data_path=("one",), seed=5), PATH, imported, identity=IDENTITY)
    assert refused_start(settings(num_layers=3), imported)[0] == "--num-layers"
    assert refused_start(settings(bf16=True), imported)[0] == "--bf16"
    assert refused_start(settings(), imported, tokenizer="g")[0] == "--data-path"
    assert refused_start(settings(shuffle=False), imported)[1] == ("--shuffle",)
    free = settings(shuffle=False, load="here", override_data=True)
    check_start(free, PATH, imported, identity=IDENTITY)
    facts = {"config": asdict(settings()), **IDENTITY}
    assert [line.split()[1] for line in changes(facts, imported, 2)] == ["--lr"]


CONSTANT = {"lr_decay_style": "constant"}


def test_changed_settings_are_listed() -> None:
    for before, now, changed in (
        ({}, {}, []),
        ({}, {"lr": 3.0}, ["--lr"]),
        ({}, {"optimizer": "sgd"}, ["--optimizer"]),
        ({"clip_grad": 0.5}, {"save": "s", "log_interval": 3}, ["--clip-grad"]),
        ({}, {"data_path": ("0.3", "a")}, ["--data-path"]),
        # Unset options are compared by their effective values.
        ({"train_iters": 5}, {"train_iters": 9}, ["--lr-decay-iters", "--train-iters"]),
        ({"lr_decay_iters": 5}, {"lr_decay_iters": 5, "train_iters": 9}, ["--train-iters"]),
        (CONSTANT, CONSTANT | {"train_iters": 9}, ["--train-iters"]),
        ({}, {"data_size": 4}, ["--global-batch-size"]),
        ({}, {"data_size": 4, "global_batch_size": 2}, []),
        ({"bf16": None}, {"bf16": False}, []),  # compared by its name elsewhere
        ({"cuda_graph": False}, {}, []),  # the same numbers
        ({"optimizer_cpu_offload": True}, {}, ["--optimizer-cpu-offload"]),
        ({}, {"cpu_offload_activations": True}, ["--cpu-offload-activations"]),
        ({}, {"tokenizer": "g"}, ["tokenizer"]),
    ):
        facts = {"config": asdict(settings(**now)), **IDENTITY}
        facts["tokenizer"] = now.get("tokenizer", "f")
        lines = changes(facts, manifest(**before), now.get("data_size", 2))
        assert [line.split()[1] for line in lines] == changed


@pytest.mark.parametrize(("ranks", "changed"), [(2, []), (1, ["--global-batch-size"])])
def test_ranks_of_one_model_may_read_different_samples(ranks: int, changed: list[str]) -> None:
    facts, saved = {"config": asdict(settings()), **IDENTITY}, manifest()
    saved["environment"]["layout"] = {"data": 1, "row": 2, "column": 2}
    assert [line.split()[1] for line in changes(facts, saved, ranks)] == changed


@pytest.mark.parametrize(("p", "lines"), [(0.1, 1), (0.0, 0)])
def test_other_masks_of_dropout_are_said_once(p: float, lines: int) -> None:
    """The checkpoint is from the time when each rank drew its masks."""
    dropout = {"attention_dropout": p, "hidden_dropout": p}
    old, now = manifest(**dropout), manifest(**dropout)
    assert changes(now, old, 2) == []
    del old["config"]["model"]["attention_dropout_rng"]
    assert len(changes(now, old, 2)) == lines


def test_another_source_of_attentions_dropout_is_listed() -> None:
    """It is compared by its effective value on the device."""
    for before, now, lines in (
        (("cpu", None), ("cpu", "coordinates"), 0),
        (("NVIDIA H200", None), ("NVIDIA H200", "kernel"), 0),
        (("cpu", None), ("NVIDIA H200", None), 1),
        (("cpu", "coordinates"), ("NVIDIA H200", "coordinates"), 0),
        (("cpu", None), ("cpu", "kernel"), 1),
    ):
        old, new = (
            manifest(attention_dropout=0.1, attention_dropout_rng=rng) for _, rng in (before, now)
        )
        old["environment"]["device"], new["environment"]["device"] = before[0], now[0]
        assert len(changes(new, old, 2)) == lines


def test_unknown_settings_are_not_compared() -> None:
    old = manifest()
    del old["config"]["model"]["layernorm_epsilon"], old["config"]["training"]["seed"]
    check_start(settings(), PATH, old, identity=IDENTITY)
    assert changes({"config": asdict(settings()), **IDENTITY}, old, 2) == []
