"""Compiled transformer layers: graphs, kernels, guards and host time compared with others.

Compares the forward and backward graphs of one block with those of another of the same sizes: a
GPT-2 block in plain torch, and LlamaDecoderLayer of transformers with grouped queries. bf16, on a
CPU without this project's own CPU kernels, whose graphs differ from those of a GPU; one run counts
all. Copies are clones, copies, concatenations and casts; saved are the tensors that the forward
keeps for the backward, weights and input included; kernels are those that Inductor generates;
guards are the conditions that each call of a layer checks. Host time is forward and backward of 12
compiled GPT-2 blocks of hidden size 64 on 16 tokens, gradients included.
"""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor import metrics

from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn
from benchmarks.plain_gpt2 import Block
from benchmarks.report import Results
from benchmarks.steps import SEED
from megatron.config.model import GPT2Config, LlamaConfig, TextModelConfig
from megatron.models.build import build_model
from megatron.models.gpt import Sequences
from megatron.parallel import kernels
from megatron.parallel.buckets import GradientBuckets
from megatron.parallel.mesh import serial_mesh
from megatron.train.compiled import compile_layers

OURS, PLAIN, TRANSFORMERS = "this project", "plain torch", "transformers"
PEERS, GRAPHS, HOST = {"gpt2": PLAIN, "llama": TRANSFORMERS}, "a block of ", "12 layers, the host"
MATMULS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "megatron.add_matmul.")
COPIES = ("aten.clone.", "aten.copy", "aten.cat.", "aten.stack.", "aten._to_copy.", "convert_")
COMPARED = ("forward", "backward", "matmuls", "attention", "copies", "copied", "saved", "kernels")
RATIO, LARGEST = "this project's host time / its", "this project's largest count or size / its"
RESULT = """A block of GPT-2 has at most {:.2f} of the operators, matmuls, copies, bytes and kernels
of plain torch's; a block of Llama has at most {:.2f} of those of transformers'. The host's time is
{:.2f} of plain torch's."""
Compile = Callable[[Any], None]  # with this backend
Run = Callable[[], None]  # forward and backward


def config_of(kind: str, layers: int, hidden: int, heads: int, tokens: int) -> TextModelConfig:
    sizes: dict[str, Any] = {"num_layers": layers, "hidden_size": hidden}
    sizes |= {"num_attention_heads": heads, "max_position_embeddings": tokens}
    if kind == "gpt2":
        return GPT2Config(
            **sizes, activation="gelu_tanh", hidden_dropout=0.0, attention_dropout=0.0
        )
    return LlamaConfig(**sizes, num_query_groups=heads // 4, ffn_hidden_size=4 * hidden)


def ours(config: TextModelConfig, samples: int, dtype: torch.dtype) -> tuple[Compile, Run, Any]:
    """(compile, run, first layer) of this project, with gradients in their buckets."""
    kernels.use_cpu_kernels = False
    model = build_model(config, serial_mesh(), 128, seed=SEED, dtype=dtype)
    buckets, s = GradientBuckets.for_master_weights(model), config.max_position_embeddings
    layers = [*model.transformer.layers.values()]
    rotary_cos_sin = None
    if isinstance(config, LlamaConfig):
        rotary_cos_sin = model.rotary(torch.arange(s).expand(samples, s), dtype)
    at = Sequences(count=samples, mask=None, is_causal=True, rotary_cos_sin=rotary_cos_sin)

    def run() -> None:
        x = torch.ones(samples * s, config.hidden_size, dtype=dtype, requires_grad=True)
        buckets.start()
        with buckets.backward(is_last=False):
            y: Tensor = x
            for layer in layers:
                y = layer(y, at)
            y.sum().backward()

    return lambda backend: compile_layers(model, backend), run, layers[0]


def theirs(config: TextModelConfig, samples: int, dtype: torch.dtype) -> tuple[Compile, Run, Any]:
    s, arguments = config.max_position_embeddings, dict[str, Any]()
    if isinstance(config, LlamaConfig):
        from transformers import LlamaConfig as TheirConfig
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

        settings = TheirConfig(
            hidden_size=config.hidden_size,
            intermediate_size=config.ffn_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_query_groups,
            attn_implementation="sdpa",
        )
        blocks = [LlamaDecoderLayer(settings, n) for n in range(config.num_layers)]
        positions = torch.arange(s)[None]
        x = torch.ones(1, 1, 1, dtype=dtype)
        arguments = {"position_embeddings": LlamaRotaryEmbedding(settings)(x, positions)}
    else:
        blocks = [Block(config) for _ in range(config.num_layers)]
    layers = nn.ModuleList(blocks).to(dtype)

    def compile_all(backend: Any) -> None:
        for layer in layers:
            layer.compile(fullgraph=True, dynamic=False, backend=backend)

    def run() -> None:
        layers.zero_grad(set_to_none=True)
        y = torch.ones(samples, s, config.hidden_size, dtype=dtype, requires_grad=True)
        for layer in layers:
            y = layer(y, **arguments)
        y.sum().backward()

    return compile_all, run, layers[0]


MAKERS = {OURS: ours, PLAIN: theirs, TRANSFORMERS: theirs}


def counts(graphs: dict[str, torch.fx.GraphModule]) -> Figures:
    """Counts the operators in the forward and the backward graph."""
    found: Figures = {"matmuls": 0, "attention": 0, "copies": 0, "copied": 0}
    for name, graph in graphs.items():
        nodes = [each for each in graph.graph.nodes if each.op == "call_function"]
        named = [(str(each.target), each) for each in nodes if "getitem" not in str(each.target)]
        copies = [each for target, each in named if target.startswith(COPIES)]
        found[name] = len(named)
        found["matmuls"] += sum(target.startswith(MATMULS) for target, _ in named)
        found["attention"] += sum("attention" in target for target, _ in named)
        found["copies"] += len(copies)
        found["copied"] += sum(map(nbytes, copies))
    outputs: Any = graphs["forward"].graph.output_node().args[0]
    return found | {"saved": sum(map(nbytes, filter(None, outputs[1:])))}


def nbytes(node: torch.fx.Node) -> int:
    value = node.meta.get("val")
    return value.nbytes if isinstance(value, torch.Tensor) else 0


def graphs_of(compile_by: Compile, run: Run) -> dict[str, torch.fx.GraphModule]:
    """The forward and backward graphs that torch traces and partitions for training."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    graphs: dict[str, torch.fx.GraphModule] = {}

    def keep(name: str) -> Callable[..., Any]:
        def compiler(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
            assert name not in graphs  # one graph of all layers
            graphs[name] = graph
            return make_boxed_func(graph.forward)

        return compiler

    torch._dynamo.reset()
    partition = {"partition_fn": min_cut_rematerialization_partition}
    compile_by(aot_autograd(fw_compiler=keep("forward"), bw_compiler=keep("backward"), **partition))
    run()
    return graphs


def guards_of(layer: nn.Module) -> int:
    """Number of conditions that a call of the compiled layer checks; its class has one entry."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list  # there is no public function

    def leaves(manager: Any) -> int:
        pairs: Any = getattr(manager, "get_key_value_managers", dict)().values()
        below = [*manager.get_child_managers(), *(each for pair in pairs for each in pair if each)]
        return len(manager.get_leaf_guards()) + sum(map(leaves, below))

    (entry,) = _debug_get_cache_entry_list(type(layer).forward.__code__)
    return leaves(entry.guard_manager.root)


def graph(rank: Rank, name: str, config: TextModelConfig, samples: int, backend: str) -> Turn:
    compile_by, run, layer = MAKERS[name](config, samples, torch.bfloat16)
    found = counts(graphs_of(compile_by, run)) | {"guards": guards_of(layer)}
    torch._dynamo.reset()
    compile_by(backend)
    metrics.reset()
    run()
    found["kernels"] = metrics.generated_kernel_count
    return lambda: found


def host(rank: Rank, name: str, config: TextModelConfig, steps: int, backend: str) -> Turn:
    compile_by, run, _ = MAKERS[name](config, 1, torch.float32)
    compile_by(backend)

    def turn() -> Figures:
        for _ in range(steps):
            run()
        return {"steps": steps}

    return turn


def contenders(
    flags: Flags,
    hidden_size: int = 768,
    tokens: int = 1024,
    samples: int = 1,
    steps: int = 10,
    backend: str = "inductor",
    groups: Sequence[str] = ("gpt2", "llama", "host"),
) -> Iterator[Contender]:
    """Compare layers.

    Args:
        hidden_size: hidden size of the blocks whose graphs are compared, with 64 per head.
        tokens: tokens per sample.
        samples: samples per batch.
        steps: steps per turn, for the host time.
        backend: backend of torch.compile, to count kernels and to measure time.
        groups: comparisons to run.
    """
    for kind, peer in PEERS.items():
        config = config_of(kind, 1, hidden_size, max(4, hidden_size // 64), tokens)
        for name in (OURS, peer) if kind in groups else ():
            own = {"name": name, "config": config, "samples": samples, "backend": backend}
            needs = ["transformers"] if peer == TRANSFORMERS else []
            yield Contender(name, graph, own, group=GRAPHS + kind, threads=2, needs=needs)
    for name in (OURS, PLAIN) if "host" in groups else ():
        config = config_of("gpt2", 12, 64, 4, 16)
        own = {"name": name, "config": config, "steps": steps, "backend": backend}
        yield Contender(name, host, own, group=HOST)


def largest(own: Figures, first: Figures) -> float:
    """Largest ratio of a figure of the group's first contender to this contender's."""
    return max(first[key] / max(1, own[key]) for key in COMPARED)


def answer(found: Results) -> str:
    blocks = [found.median(GRAPHS + kind, peer, LARGEST) for kind, peer in PEERS.items()]
    return RESULT.format(*blocks, found.median(HOST, PLAIN, RATIO))


QUESTION = Question(
    contenders,
    (
        Column("operators, forward", "forward", "{:.0f}"),
        Column("backward", "backward", "{:.0f}"),
        Column("matmuls", "matmuls", "{:.0f}"),
        Column("attention", "attention", "{:.0f}"),
        Column("copies", "copies", "{:.0f}"),
        Column("MB copied", "copied", "{:.2f}", unit=1e6),
        Column("MB saved", "saved", "{:.2f}", unit=1e6),
        Column("kernels", "kernels", "{:.0f}"),
        Column("guards", "guards", "{:.0f}"),
        Column("host ms", "cpu", "{:.2f}", per="steps", unit=1e-3),
        Column(RATIO, "cpu", "{:.2f}", "first / its", per="steps"),
        Column(LARGEST, largest, "{:.2f}"),
    ),
    answer,
    rounds=3,
    turns=20,
    picture="",
    small="--hidden-size 64 --tokens 16 --groups gpt2 host --backend eager --steps 2",
)

if __name__ == "__main__":
    QUESTION.run()
