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
from conformance.adapters.torch import Base
from conformance.fixture import Fixture, MicroBatch

CLASSES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "bert": "BertForPreTraining"}


def read(fixture: Fixture, dtype: torch.dtype, **settings: Any) -> Any:
    """The model of from_pretrained."""
    kind = fixture.facts["model_type"]
    with tempfile.TemporaryDirectory() as folder:
        description = fixture.facts["config"] | {"model_type": kind}
        (Path(folder) / "config.json").write_text(json.dumps(description))
        weights = Path(folder) / "model.safetensors"
        save_file(fixture.weights(), weights, metadata={"format": "pt"})
        made = getattr(transformers, CLASSES[kind])
        return made.from_pretrained(folder, dtype=dtype, **settings).train()


class Adapter(Base):
    """transformers shards as it reads."""

    trainer = "transformers"
    keys = ("tensor", "data", "zero")
    stages = (0, 3)

    def check(self, layout: Mapping[str, int], dtype: torch.dtype) -> None:
        super().check(layout, dtype)
        if dtype == torch.float64 and self.facts["model_type"] == "llama":
            raise Refused("transformers computes norms and rotary tables of Llama in fp32")
        if self.zero != 3 * (self.sizes[0] > 1):
            raise Refused("transformers' fsdp_size is data with zero=3, and nothing else of both")

    def build(self, fixture: Fixture, dtype: torch.dtype) -> Any:
        data, tensor = self.sizes
        settings: dict[str, Any] = {}
        if self.ranks > 1:
            config = transformers.DistributedConfig(tp_size=tensor, fsdp_size=data)
            settings["distributed_config"] = config
        return read(fixture, dtype, **settings)

    def prepare(self) -> None:
        data, tensor = self.sizes
        for first in range(tensor if self.ranks > 1 else 0):
            members = [first + tensor * each for each in range(data)]
            group = dist.new_group(members)
            if dist.get_rank() in members:
                self.group = group
        self.optimizer = self.adamw()

    def outputs(self, batch: MicroBatch) -> tuple[Tensor, Tensor | None]:
        inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        if batch.token_type_ids is None:
            return self.model(**inputs, use_cache=False).logits, None
        result = self.model(**inputs, token_type_ids=batch.token_type_ids)
        return result.prediction_logits, result.seq_relationship_logits

    def to_ours(self, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(theirs)

    def to_theirs(self, ours: Mapping[str, Any]) -> dict[str, Tensor]:
        """A weight that is no longer tied is a parameter that the fixture has not."""
        whole = {}
        for name, each in ours.items():
            part = each.detach()
            whole[name] = part.full_tensor() if isinstance(part, DTensor) else part
        return whole
