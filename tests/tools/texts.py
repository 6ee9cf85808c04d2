"""What tools/generate.py computes, as a function that ranks can run."""

from megatron.config.parse import parse
from megatron.train.evaluate import load_newest
from megatron.train.trained import open_trained
from tests.tiny import mesh_of_ranks
from tools.generate import Reader, Settings, continue_all, read_prompts


def texts_of(tensor_size: int, words: list[str]) -> list[list[int]]:
    """The new tokens of each prompt, on the ranks of this call or in this process."""
    mesh = mesh_of_ranks(tensor_size)
    settings = parse(Settings, words, {})
    folders, tokenizer, manifest = open_trained(settings.trained, settings.parallel, 1)
    positions = manifest["config"]["model"]["max_position_embeddings"]
    prompts = read_prompts(settings, Reader(tokenizer, positions, settings.max_new_tokens))
    _, model = load_newest(folders, mesh)
    return continue_all(model, mesh, prompts, settings, tokenizer.eod)
