"""Imported by the fork server of dist.py after the rest: what tyro and typing keep of the first
command line that they parse, in a quarter of a second, is there in each process, and no process
looks for garbage in what it has from the server."""

import gc

from megatron.config.parse import parse
from megatron.config.pretrain import PretrainGPT2Config

SIZES = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --max-position-embeddings 8"

parse(PretrainGPT2Config, [*SIZES.split(), "--train-iters", "1"], {})
gc.freeze()
