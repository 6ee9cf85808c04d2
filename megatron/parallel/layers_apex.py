"""Layer norm by a kernel of NVIDIA's apex, which has to be installed."""

from __future__ import annotations

from torch import Tensor

from megatron.libraries import load
from megatron.parallel.layers import LayerNorm
from megatron.parallel.mesh import Mesh


class ApexLayerNorm(LayerNorm):
    """LayerNorm by the kernel of NVIDIA apex's FusedLayerNorm, which also computes in fp32."""

    def __init__(self, mesh: Mesh, hidden_size: int, *, epsilon: float = 1e-5) -> None:
        super().__init__(mesh, hidden_size, epsilon=epsilon)
        if self.hidden.size > 1:
            raise ValueError("apex's layer norm needs whole rows; LayerNorm takes shards")
        module = load("apex.normalization.fused_layer_norm", "--layernorm-impl torch")
        self.kernel = module.fused_layer_norm_affine

    def forward(self, x: Tensor) -> Tensor:
        normalised: Tensor = self.kernel(x, self.weight, self.bias, self.weight.shape, self.epsilon)
        return normalised
