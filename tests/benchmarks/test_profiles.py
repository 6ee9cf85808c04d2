"""Exposed communication, and the axis that communicates."""

from typing import Any

import pytest

from benchmarks.profiles import TURN, by_kind, communication
from megatron.train.profiling import kind_of


def event(name: str, start: float, stop: float, thread: int = 1, **more: Any) -> dict[str, Any]:
    cat = "cpu_op" if name.startswith(("aten", "mkldnn", "autograd")) else "user_annotation"
    times = {"ts": 1e6 * start, "dur": 1e6 * (stop - start)}
    return {"ph": "X", "cat": cat, "name": name, "tid": thread, **times, **more}


@pytest.mark.parametrize(
    ("kind", "all_reduce", "matmul"),
    [
        ("kernel", "ncclDevKernel_AllReduce", "nvjet_hsh"),
        ("cpu_op", "gloo:all_reduce", "aten::mm"),
        ("cpu_op", "gloo:all_reduce", "mkldnn::_linear_pointwise"),
    ],
)
def test_communication_is_exposed_where_nothing_is_computed(
    kind: str, all_reduce: str, matmul: str
) -> None:
    events = [
        event(all_reduce, 1, 4, cat=kind),
        event(all_reduce, 3, 6, cat=kind),  # two at once count once
        event(matmul, 0, 2, cat=kind),
        event(matmul, 5, 9, cat=kind),
        event("autograd::engine", 0, 9),  # holds others, and computes nothing
        event("gloo:barrier", 10, 20, cat=kind),
        {"ph": "M", "name": "process_name"},
    ]
    assert communication(events) == (pytest.approx(5), pytest.approx(3))
    assert communication(events[2:]) == (0, 0)


def test_kernels_name_their_group_on_a_gpu() -> None:
    def kernel(name: str, start: float, stop: float, group: str = "") -> dict[str, Any]:
        more = {"args": {"Process Group Name": group}} if group else {}
        return event(name, start, stop, 7, cat="kernel", **more)

    events = [
        event("aten::mm", 0, 9),  # on the host: only kernels count
        kernel("nvjet", 0, 4),
        kernel("ncclDevKernel_AllReduce", 2, 6, "5"),
        kernel("ncclDevKernel_AllReduce", 12, 16, "6"),
    ]
    assert communication(events, "5") == (pytest.approx(4), pytest.approx(2))
    assert communication(events, "6") == (pytest.approx(4), pytest.approx(4))


KERNELS = {  # as torch, its compiler, cuBLAS, cuDNN and NCCL name them, and operators
    "matmul": (
        "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn",
        "nvjet_tst_192x192_64x4_2x1_v_bz_coopA_TNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_cublas",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_nn_align8>",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>",
        "triton_tem_fused_mm_3",
        "aten::addmm",
        "aten::bmm",
        "mkldnn::_linear_pointwise",
    ),
    "attention": (
        "flash_fwd_kernel",
        "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<64, 128>>",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x64x64_4x1x1",
        "void cudnn::fusion::convert_dq_to_16bits<true, __nv_bfloat16, 128>",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<...>)",
        "triton_tem_fused_flex_attention_0",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
    ),
    "elementwise": (
        "triton_poi_fused_add_gelu_3",
        "triton_poi_fused__to_copy_gelu_5",
        "triton_red_fused__log_softmax_nll_loss_forward_2",
        "triton_per_fused_add_native_layer_norm_0",
        "triton_poi_fused__scaled_dot_product_flash_attention_backward_mul_1",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, sum_functor, ...>>",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>",
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long, ...>",
        "aten::native_layer_norm",
    ),
    "copies": (
        "triton_poi_fused__to_copy_t_view_12",
        "triton_poi_fused_clone_transpose_7",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(...)>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, ...>",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy_aligned16_contig<...>",
        "Memcpy DtoD (Device -> Device)",
        "Memset (Device)",
        "aten::copy_",
    ),
    "optimizer": (
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<"
        "FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<float, 4, ADAM_MODE::ADAMW>>",
        "aten::_fused_adamw_",
    ),
    "norm": (
        "void at::native::lpnorm_cleanup<float, at::native::NormType::L2, float>",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<LpNormFunctor<float>>",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, NormTwoOps<...>>>",
        "aten::_foreach_norm",
    ),
    "communication": ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "gloo:all_reduce"),
    "other": (
        "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<...>",
        "void cudnn::ops::nchwToNhwcKernel<__nv_bfloat16, __nv_bfloat16, float, false, true>",
    ),
}


def test_kernels_are_of_the_kind_that_their_name_says() -> None:
    found = {name: kind_of(name) for names in KERNELS.values() for name in names}
    assert found == {name: kind for kind, names in KERNELS.items() for name in names}


def test_time_by_kind_idle_launches_and_the_host_of_a_step_on_a_gpu() -> None:
    def at(cat: str, name: str, start: float, stop: float, thread: int = 7) -> dict[str, Any]:
        return event(name, start, stop, thread, cat=cat)

    events = [
        at("user_annotation", TURN, 0, 20, 1),
        at("gpu_user_annotation", TURN, 2, 14),
        at("cpu_op", "aten::mm", 0, 19, 1),  # on the host: only kernels count
        at("cuda_runtime", "cudaLaunchKernel", 1, 2, 1),
        at("cuda_driver", "cuLaunchKernelEx", 3, 4, 1),
        at("cuda_runtime", "cudaMemcpyAsync", 4, 8, 1),  # waits for the device
        at("cuda_runtime", "cudaLaunchKernelExC", 9, 10, 1),
        at("cuda_runtime", "cudaDeviceSynchronize", 10, 20, 1),
        at("kernel", "nvjet_hsh", 2, 5),
        at("kernel", "triton_poi_fused_add_0", 4, 7.5, 8),  # another stream
        at("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 7, 8),
        at("kernel", "multi_tensor_apply_kernel<FusedAdam>", 10, 14),
    ]
    kinds = {"matmul": 3, "elementwise": 3.5, "copies": 1, "optimizer": 4, "idle": 15 - 10}
    assert by_kind(events, wall=15) == {
        "device_ms": {kind: pytest.approx(1e3 * each) for kind, each in kinds.items()},
        "launches": 4,
        "reads": 1,
        "host_ms": pytest.approx(1e3 * (9 - 4)),
        "copies_ms": pytest.approx(1e3),
        "hidden_copies_ms": pytest.approx(5e2),
    }


def test_an_operator_on_a_cpu_does_not_count_those_that_it_calls() -> None:
    events = [
        event(TURN, 0, 20),
        event("aten::linear", 1, 9),
        event("aten::copy_", 2, 3),  # begins with the one that calls it
        event("aten::addmm", 2, 8),
        event("autograd::engine::evaluate_function: AddmmBackward0", 10, 16, 2),
        event("aten::mm", 11, 15, 2),
    ]
    kinds = {"matmul": 2 + 5 + 4, "copies": 1, "idle": 20 - 12}
    found = {kind: pytest.approx(1e3 * each) for kind, each in kinds.items()}
    assert by_kind(events, wall=99) == {"device_ms": found}
