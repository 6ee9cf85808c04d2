"""Files of torch.save are read as data: tensors and attributes come out, and no payload runs."""

import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.refusals import refusal
from tools.convert.legacy.pickles import MAGIC, VERSION, Placeholder, SavedFile

Write = Callable[[Path, bytes], Path]


def save(content: Any, file: Path, zipped: bool) -> Path:
    torch.save(content, file, _use_new_zipfile_serialization=zipped)
    return file


@pytest.mark.parametrize("zipped", [False, True])
def test_tensors(tmp_path: Path, zipped: bool) -> None:
    base = torch.randn(6, 4)
    dtypes = (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
    content: OrderedDict[str, Any] = OrderedDict(
        {str(dtype): torch.arange(5).to(dtype) for dtype in dtypes},
        turned=base.T, part=base[2:4, 1:3], number=base[1, 1], none=torch.empty(0, 3),
        parameter=torch.nn.Parameter(base[1]),
    )  # fmt: skip
    saved = SavedFile(save(content, tmp_path / "a.pt", zipped))
    assert list(saved.content) == list(content)
    for name, value in saved.content.items():
        tensor = saved.tensor(value, name)
        assert tensor.dtype == content[name].dtype, name
        assert torch.equal(tensor, content[name]), name


# Pickles by hand. Each is an instruction sequence that leaves one object.
def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def name(module: str, path: str) -> bytes:
    return text(module) + text(path) + b"\x93"


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + b"(" + b"".join(arguments) + b"tR"


EVAL, GETATTR = name("builtins", "eval"), name("builtins", "getattr")
IMPORT, GETITEM = name("importlib", "import_module"), name("operator", "getitem")
DOTTED = name("torch._utils", "_rebuild_tensor_v2.__globals__.get")
REBUILD, FLOATS = name("torch._utils", "_rebuild_tensor_v2"), name("torch", "FloatStorage")


def touch(marker: Path) -> str:
    return f"__import__('pathlib').Path({str(marker)!r}).touch()"


def torch_load(marker: Path) -> bytes:
    """A partial of torch.load, restored from a state with the keyword, that reads a payload."""
    inner = write_old(marker.with_name("inner.pt"), call(EVAL, text(touch(marker))))
    load = name("torch", "load")
    state = b"(" + load + b"(" + text(str(inner)) + b"t}" + text("weights_only") + b"\x89sNt"
    return call(call(name("functools", "partial"), load) + state + b"b")


PAYLOADS: dict[str, Callable[[Path], bytes]] = {
    "os.system": lambda m: call(name("os", "system"), text(f"touch {m}")),
    "the old opcode": lambda m: b"cposix\nsystem\n(" + text(f"touch {m}") + b"tR",
    "eval": lambda m: call(EVAL, text(touch(m))),
    "getattr": lambda m: call(
        call(GETATTR, call(IMPORT, text("os")), text("system")), text(f"touch {m}")
    ),
    "a dotted name of an allowed one": lambda m: call(
        call(GETITEM, call(DOTTED, text("__builtins__")), text("eval")), text(touch(m))
    ),
    "an instance": lambda m: b"(" + text(str(m)) + text("w") + b"iio\nFileIO\n",
    "an object": lambda m: b"(" + name("io", "FileIO") + text(str(m)) + text("w") + b"o",
    "torch.load": torch_load,
    "an import of a storage": lambda m: name("writes_on_import", "EvilStorage"),
}


def write_old(file: Path, instructions: bytes, content: bytes | None = None) -> Path:
    """content: elements of the storage "0" of fp32, if the instructions name it."""
    with file.open("wb") as stream:
        for fact in (MAGIC, VERSION, {"little_endian": True}):
            pickle.dump(fact, stream, protocol=2)
        stream.write(b"\x80\x04" + instructions + b".")
        pickle.dump([] if content is None else ["0"], stream, protocol=2)
        if content is not None:
            stream.write(struct.pack("<q", len(content) // 4) + content)
    return file


def write_zip(file: Path, instructions: bytes, *others: str) -> Path:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x04" + instructions + b".")
        for other in ("version", *others):
            archive.writestr(f"archive/{other}", "3\n")
    return file


def read_whole(file: Path) -> dict[str, torch.Tensor]:
    saved = SavedFile(file)
    return {name: saved.tensor(value, name) for name, value in saved.content.items()}


def assert_refused(file: Path) -> None:
    assert str(file) in str(refusal(lambda: read_whole(file)))


@pytest.mark.parametrize("write", [write_old, write_zip])
@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_payload_runs_in_torch_load_and_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, payload: str, write: Write
) -> None:
    marker = tmp_path / "marker"
    monkeypatch.syspath_prepend(tmp_path)
    source = f"{touch(marker)}\nclass EvilStorage: pass\n"
    (tmp_path / "writes_on_import.py").write_text(source)
    sys.modules.pop("writes_on_import", None)
    file = write(tmp_path / "a.pt", PAYLOADS[payload](marker))

    assert isinstance(SavedFile(file).content, Placeholder | type)
    assert not marker.exists()
    assert "writes_on_import" not in sys.modules
    torch.load(file, weights_only=False)
    assert marker.exists()


def test_later_files(tmp_path: Path) -> None:
    attributes = b"}" + b"".join(
        text(each) + text("evil") + b"s" for each in ("stands_for", "arguments", "__init__")
    )
    states = (attributes, b"(N" + attributes + b"t")  # of its __dict__, and of its slots
    for known, state in product((REBUILD, FLOATS, name("collections", "OrderedDict")), states):
        assert_refused(write_old(tmp_path / "a.pt", known + state + b"b"))
    tensors = {"a": torch.ones(3), "b": torch.zeros(2)}
    read = read_whole(save(OrderedDict(tensors), tmp_path / "b.pt", False))
    assert all(torch.equal(read[key], tensor) for key, tensor in tensors.items())


def persistent(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"tQ"


def storage(kind: bytes, count: bytes) -> bytes:
    return persistent(text("storage"), kind, text("0"), text("cpu"), count)


def tensor(of: bytes, offset: bytes, shape: bytes, stride: bytes) -> bytes:
    return call(name("torch._utils", "_rebuild_tensor"), of, offset, shape, stride)


FOUR = storage(FLOATS, b"K\x04")
ONE, TWO, MINUS_ONE = b"K\x01\x85", b"K\x02\x85", b"J\xff\xff\xff\xff\x85"


def write_tensor(file: Path, instructions: bytes) -> Path:
    return write_old(file, b"}" + text("a") + instructions + b"s", struct.pack("<4f", 1, 2, 3, 4))


def test_tensor_by_hand(tmp_path: Path) -> None:
    """So the next test's tensors are refused for their numbers."""
    view = persistent(
        text("storage"), FLOATS, text("0"), text("cpu"), b"K\x04", b"(" + text("1") + b"K\x01K\x03t"
    )
    for of, expected in ((FOUR, [2.0, 3.0]), (view, [3.0, 4.0])):
        file = write_tensor(tmp_path / "a.pt", tensor(of, b"K\x01", TWO, ONE))
        assert read_whole(file)["a"].tolist() == expected


@pytest.mark.parametrize(
    "instructions",
    [
        text("0") + b"Q",
        persistent(text("file"), text("/etc/passwd")),
        tensor(storage(name("os", "system"), b"K\x04"), b"K\x00", TWO, ONE),
        tensor(storage(FLOATS, text("4")), b"K\x00", TWO, ONE),
        tensor(storage(FLOATS, b"J\xff\xff\xff\xff"), b"K\x00", TWO, ONE),
        tensor(FOUR, b"K\x03", TWO, ONE),
        tensor(FOUR, b"K\x00", b"J\xff\xff\xff\x7f\x85", b"K\x00\x85"),
        tensor(FOUR, b"K\x00", TWO, MINUS_ONE),
        tensor(FOUR, b"K\x00", TWO, b")"),
        tensor(text("0"), b"K\x00", TWO, ONE),
    ],
)
def test_odd_storages(tmp_path: Path, instructions: bytes) -> None:
    assert_refused(write_tensor(tmp_path / "a.pt", instructions))


@pytest.mark.parametrize("zipped", [False, True])
def test_truncated(tmp_path: Path, zipped: bool) -> None:
    file = save({"a": torch.ones(40), "b": torch.ones(3, 3)}, tmp_path / "a.pt", zipped)
    whole = file.read_bytes()
    read_whole(file)
    for end in {*range(0, len(whole), 29), len(whole) - 1}:
        file.write_bytes(whole[:end])
        assert_refused(file)


def test_flipped_byte_and_other_archives(tmp_path: Path) -> None:
    file = save({"a": torch.full((40,), 7.0)}, tmp_path / "a.pt", True)
    content = file.read_bytes()
    assert content.count(struct.pack("<f", 7.0) * 40) == 1
    file.write_bytes(content.replace(struct.pack("<2f", 7.0, 7.0), struct.pack("<2f", 7.0, 8.0), 1))
    assert_refused(file)
    assert_refused(write_zip(tmp_path / "b.pt", b"}", "constants.pkl"))
    with zipfile.ZipFile(tmp_path / "c.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
    assert_refused(tmp_path / "c.pt")
