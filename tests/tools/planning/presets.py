"""The presets of the programs, and what is planned of them."""

from pathlib import Path

from megatron.config.parse import parse
from megatron.config.pretrain import PretrainBertConfig, PretrainConfig, PretrainGPT2Config
from tools.planning.shape import Shape, shape_of

PRESETS = Path(__file__).parents[3] / "scripts" / "presets"
NAMES = sorted(path.stem for path in PRESETS.glob("*.toml"))


def preset(name: str, *flags: str) -> PretrainConfig:
    program = PretrainBertConfig if "bert" in name else PretrainGPT2Config
    return parse(program, ["--preset", str(PRESETS / f"{name}.toml"), *flags], {})


def planned(config: PretrainConfig, ranks: int, precision: str = "fp16") -> Shape:
    config.check(ranks)
    return shape_of(config, ranks, precision)
