"""transformers' own tensor parallelism (tensor) and FSDP (data with zero=3), in a plain loop."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from conformance.adapters import Refused
from conformance.adapters.torch import Adapter as OfTorch
from conformance.fixture import Fixture, MicroBatch, ranks

CLASSES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "bert": "BertForPreTraining"}


class Adapter(OfTorch):
    """The loss and the step are those of the adapter of torch; the model is from_pretrained's."""

    def __init__(self, fixture: Fixture, layout: Mapping[str, int], dtype: torch.dtype) -> None:
        if unknown := layout.keys() - {"tensor", "data", "zero"}:
            raise Refused(f"no {min(unknown)} here, but tensor, and data with zero=3")
        if dtype == torch.float64 and fixture.facts["model_type"] == "llama":
            raise Refused("transformers computes norms and rotary tables of Llama in fp32")
        self.facts, size = fixture.facts, ranks(layout)
        self.sizes = (layout.get("data", 1), layout.get("tensor", 1))
        self.is_sharded = self.sizes[0] > 1
        if layout.get("zero", 0) != 3 * self.is_sharded:
            raise Refused("transformers' fsdp_size is data with zero=3, and nothing else of both")
        if size > 1 and not dist.is_initialized():
            dist.init_process_group("gloo")
        kind = self.facts["model_type"]
        settings: dict[str, Any] = {}
        if size > 1:
            config = transformers.DistributedConfig(tp_size=self.sizes[1], fsdp_size=self.sizes[0])
            settings["distributed_config"] = config
        with tempfile.TemporaryDirectory() as folder:
            description = self.facts["config"] | {"model_type": kind}
            (Path(folder) / "config.json").write_text(json.dumps(description))
            weights = Path(folder) / "model.safetensors"
            save_file(fixture.weights(), weights, metadata={"format": "pt"})
            name = CLASSES[kind]
            self.model = getattr(transformers, name).from_pretrained(
                folder, dtype=dtype, **settings
            )
        self.model.train()
        self.group, self.data_rank = None, 0
        if self.is_sharded:  # data are the slower axis
            self.data_rank = dist.get_rank() // self.sizes[1]
            for data in range(self.sizes[1]):
                members = [each for each in range(size) if each % self.sizes[1] == data]
                group = dist.new_group(members)
                if dist.get_rank() in members:
                    self.group = group
        self.make_optimizer(self.facts["optimizer"]["decayed"])
        self.recorded = {}

    def outputs(self, batch: MicroBatch) -> tuple[Tensor, Tensor | None]:
        inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        if batch.token_type_ids is None:
            result = self.model(**inputs, use_cache=False)
            return result.logits, None
        result = self.model(**inputs, token_type_ids=batch.token_type_ids)
        return result.prediction_logits, result.seq_relationship_logits

    def to_theirs(self, ours: Mapping[str, Any]) -> dict[str, Tensor]:
        """A weight that is no longer tied is a parameter that the fixture has not."""
        whole = {}
        for name, each in ours.items():
            part = each.detach()
            whole[name] = part.full_tensor() if isinstance(part, DTensor) else part
        return whole
