"""The kinds of kernels that benchmarks/kernels.py distinguishes, by names from profiles on an H200."""

import re
import sys
from types import SimpleNamespace

import pytest
from launch import ROOT
from megatron.core.transformer import attention as megatrons

sys.path.insert(0, str(ROOT / "benchmarks"))
import kernels
import kinds
import profile_gpt
import train_step

AT = "void at::native::"
ANON = AT + "(anonymous namespace)::"
SDPA = "cudnn_generated_fort_native_sdpa_sm90_flash_"
TE = "void transformer_engine::"
EMPTY = "transformer_engine::Empty"
NAMES = {
    kinds.FORWARD: [  # cuBLASLt; then CUTLASS, whose name holds the types
        "nvjet_sm90_qqtst_256x128_128x4_1x2_h_bz_coopA_TNT",
        "nvjet_sm90_qqtst_192x192_128x4_2x1_v_bz_coopB_TNN",
        "void cutlass::device_kernel<GemmUniversal<MainloopSm90TmaGmmaWarpSpecializedFP8<4>, cutlass::float_e4m3_t> >",
    ],
    kinds.BACKWARD: [
        "nvjet_sm90_qrtst_128x160_128x5_2x1_v_bz_coopA_algo2_TNT",
        "_ZN7cutlass13device_kernelINS_4gemm6kernel13GemmUniversalIN4cute5tupleIJiiiiEEEN4mfp811PromotedMmaINS1_10"
        "collective13CollectiveMmaINS_12float_e5m2_tENS_12float_e4m3_tEEEEEEEEvNT_6ParamsE",
        "nvjet_sm90_rqtst_128x128_128x6_2x1_v_bz_coopA_algo2_TNT",
        "nvjet_sm90_qrsss_128x128_128x6_2x1_v_bz_coopA_algo2_TNT",
        "void cutlass::device_kernel<GemmUniversal<cutlass::float_e5m2_t, cutlass::float_e4m3_t> >",
        "void cutlass::device_kernel<GemmUniversal<cutlass::float_e4m3_t, cutlass::float_e5m2_t> >",
    ],
    kinds.BF16: [
        "nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_NTT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel",
        "void cutlass::device_kernel<GemmUniversal<cutlass::bfloat16_t, cutlass::bfloat16_t> >",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, true, false>",
    ],
    kinds.ATTENTION: [
        "_attention_merge_kernel",
        SDPA + "bprop_wgmma_f16_knob_26_64x64x128_1x4x1_cga1x1x1_kernel0_0",
        SDPA + "fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0",
        "void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(void const*, void const*, void*)",
        "void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*, unsigned int, unsigned int)",
        "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, cutlass::bfloat16_t> >",
    ],
    kinds.CAST: [
        "_tile_kernel",
        "_flat_kernel",
        "_count_cast_kernel",
        "cast_transpose_optimized_kernel",
        "transpose_optimized_kernel",
        TE + f"unary_kernel<16, false, float, {EMPTY}, &transformer_engine::detail::identity, __nv_bfloat16>",
        TE + f"detail::cast_transpose_fused_kernel_notaligned<true, false, false, float, {EMPTY}, (float (*)())0>",
        TE + "delayed_scaling_recipe::(anonymous namespace)::kernel_bulk(transformer_engine::AmaxParams)",
        TE + "(anonymous namespace)::amax_kernel<8, true, __nv_bfloat16>(__nv_bfloat16 const*, float*, unsigned long)",
    ],
    kinds.GRADIENTS: [
        "_add_kernel",
        "_quantize_kernel",
        AT + "unrolled_elementwise_kernel<at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>, 4, "
        "TrivialOffsetCalculator<2, unsigned int>, at::native::memory::LoadWithCast<2> >",
    ],
    kinds.NORM: [
        "_norm_rows_kernel",
        "_norm_recast_kernel",
        "_norm_backward_kernel",
        "_parts_sum_kernel",
        ANON + "vectorized_layer_norm_kernel<c10::BFloat16, float, true>(int, float, c10::BFloat16 const*)",
        ANON + "layer_norm_grad_input_kernel_vectorized<c10::BFloat16, float, false>(c10::BFloat16 const*)",
        ANON + "GammaBetaBackwardCUDAKernelTemplate<c10::BFloat16, float, 32u, 8u, 64u, false, false, true>",
        TE + "normalization::rmsnorm_fwd_tuned_kernel<transformer_engine::normalization::Kernel_traits<__half> >",
    ],
    kinds.ACTIVATION: [
        "_activate_kernel",
        "_activate_backward_kernel",
        "triton_poi_fused_mul_silu_split_0",
        "triton_poi_fused_add_cat_mul_rsub_sigmoid_silu_split_0",
        AT + "vectorized_elementwise_kernel<8, at::native::GeluBackwardCUDAKernelImpl(at::TensorIteratorBase&)>",
        TE + f"dispatch::fp8::kernel::cast_fp8_gated_kernel<false, {EMPTY}, &(float transformer_engine::silu<float>)>",
        TE + f"detail::dgated_act_cast_transpose_kernel<2, 4, {EMPTY}, &(float transformer_engine::dsilu<float>)>",
        TE + f"unary_kernel<16, false, float, {EMPTY}, &(float transformer_engine::gelu<float, float>)>",
    ],
    kinds.ROTARY: [
        "_qkv_split_kernel",
        "_qkv_join_kernel",
        "_norm_rotate_kernel",
        "_norm_rotate_backward_kernel",
        "rotary_bwd_kv_kernel",
        ANON + "CatArrayBatchedCopy_vectorized<OpaqueType<8u>, unsigned int, 4, 64, 64>",
        ANON + "CatArrayBatchedCopy<at::native::(anonymous namespace)::OpaqueType<2u>, unsigned int, 4, 64, 64>",
        TE + "fused_rope_forward_kernel<__nv_bfloat16>(__nv_bfloat16 const*, int const*, float const*)",
        TE + "fused_qkv_rope_backward_kernel<__nv_bfloat16>(__nv_bfloat16 const*, __nv_bfloat16 const*)",
        AT + "elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::BinaryFunctor<c10::BFloat16, "
        "c10::BFloat16, c10::BFloat16, at::native::binary_internal::MulFunctor<float> > >(at::TensorIteratorBase&)",
        AT + "elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::neg_kernel_cuda(at::Tensor&)>",
    ],
    kinds.LOSS: [
        "_cross_entropy_statistics_kernel",
        "_cross_entropy_loss_kernel",
        "_cross_entropy_gradient_kernel",
        "triton_red_fused_copy__exp_sub_sum_unsqueeze_2",
        "triton_poi_fused__to_copy_copy__mul_unsqueeze_view_2",
        "triton_poi_fused_copy__div_split_unsqueeze_1",
        "triton_poi_fused__to_copy_arange_index_index_put_rsub_sub_view_0",
        "triton_red_fused__to_copy_max_0",
    ],
    kinds.RESIDUAL: [
        "triton_poi_fused_add_0",
        AT + "vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul> >",
    ],
    kinds.EMBEDDING: [
        "_embedding_backward_kernel",
        ANON + "compute_grad_weight<c10::BFloat16, long>(long const*, c10::BFloat16 const*)",
        ANON + "sum_and_scatter<c10::BFloat16, long>(long const*, c10::BFloat16*, long, long const*, long const*)",
        ANON + "krn_partials_per_segment<long>(long*, long const*, long const*, long)",
        ANON + "krn_partial_segment_offset<long>(long*, long const*, long const*, long const*, long const*)",
        "void at_cuda_detail::cub::detail::radix_sort::DeviceRadixSortOnesweepKernel<at_cuda_detail::cub::detail::radix"
        "::policy_hub<long, at::cuda::cub::detail::OpaqueType<8>, unsigned long long>::Policy1000, false, long>",
        "void thrust::cub::detail::unique_by_key::DeviceUniqueByKeySweepKernel<cub::policy_hub<long, int>::Policy1000>",
        AT + "vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long, long, long, bool)",
        AT + "indexing_backward_kernel_stride_1<c10::BFloat16, 4, at::OpaqueType<2> >(long const*, long const*)",
        AT + "index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<at::native::index_kernel_impl<float> >()>",
    ],
    kinds.ROUTING: [  # read in Transformer Engine's source
        "_permute_kernel",
        "_unpermute_kernel",
        "_unpermute_bwd_with_merging_probs_kernel",
        "_row_id_map_pass_1_kernel",
        "_make_chunk_sort_map_kernel",
        "_sort_chunks_by_map_kernel",
        TE + "fused_router::fused_topk_with_score_function_forward_kernel<float, float>(float const*, int, int)",
        TE + "(anonymous namespace)::multi_padding_kernel<16, unsigned char>(transformer_engine::MultiPaddingArgs)",
    ],
    kinds.OPTIMIZER: [
        "_adam_kernel",
        "_sum_kernel",
        ANON + "multi_tensor_apply_kernel<TensorListMetadata<1>, LpNormFunctor<float> >",
        "void multi_tensor_apply_kernel<TensorListMetadata<4>, transformer_engine::multi_tensor_adam::AdamFunctor<> >",
    ],
    kinds.COPY: [
        "Memset (Device)",
        "Memcpy DtoH (Device -> Pinned)",
        AT + "vectorized_elementwise_kernel<8, at::native::FillFunctor<c10::BFloat16>, std::array<char*, 1ul> >",
        AT + "vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)>",
        AT + "elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda()>",
    ],
    kinds.COMMUNICATION: ["ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"],
    kinds.OTHER: [
        AT + "vectorized_elementwise_kernel<4, at::native::AUnaryFunctor<float, float, float, MulFunctor<float> > >",
        AT + "unrolled_elementwise_kernel<at::native::AUnaryFunctor<float, float, float, MulFunctor<float> >, "
        "at::native::memory::LoadWithoutCast>",
    ],
}


@pytest.mark.parametrize("kind", NAMES)
def test_kind(kind):
    assert {name: kinds.kind_of(name) for name in NAMES[kind]} == dict.fromkeys(NAMES[kind], kind)


OURS = {"norm": kinds.NORM, "activation": kinds.ACTIVATION, "qkv": kinds.ROTARY, "cross_entropy": kinds.LOSS}
OURS |= {"embedding": kinds.EMBEDDING, "adam": kinds.OPTIMIZER, "cast": kinds.CAST}
OURS |= {"weighted": kinds.ACTIVATION, "combine": kinds.ROUTING}


def test_our_own_kernels():
    """A profile shows their names. Each kernel of ops/triton must have the kind of its module."""
    found = {}
    for path in (ROOT / "megatron_fp8/ops/triton").glob("*.py"):
        for name in re.findall(r"^def (_\w*kernel)\(", path.read_text(), re.MULTILINE):
            found.setdefault(path.stem, set()).add(kinds.kind_of(name))
    assert found.keys() >= OURS.keys() - {"embedding"}  # it has no kernel yet
    for module, kinds_found in found.items():
        assert kinds_found == {OURS[module]} if module in OURS else kinds.OTHER not in kinds_found, module


def test_every_kind_has_a_line():
    assert set(NAMES) == set(kinds.ORDER) and len(set(kinds.ORDER)) == len(kinds.ORDER)


def event(name, start, stop, device="CUDA"):
    return SimpleNamespace(
        name=name, device_type=SimpleNamespace(name=device), time_range=SimpleNamespace(start=start, end=stop)
    )


def test_summary_counts():
    """Kernels, ATen calls, waits, and host time without waits, in a call or in a full queue."""
    events = [
        event(profile_gpt.STEP, 1000, 9000, "CPU"),
        event(profile_gpt.STEP, 1000, 9900),  # the range's shadow on the GPU
        event("aten::mul", 1000, 1100, "CPU"),
        event("cudaLaunchKernel", 1010, 1015, "CPU"),
        event("cudaLaunchKernel", 2000, 3000, "CPU"),
        event("aten::item", 5000, 7000, "CPU"),
        event("cudaStreamSynchronize", 5000, 7000, "CPU"),
        event("cudaDeviceSynchronize", 9100, 9900, "CPU"),  # the profiler's own
        event("_tile_kernel", 2000, 4000),
        event("nvjet_sm90_qqtst_x", 3000, 6000),
        event("Memcpy DtoH (Device -> Pinned)", 6500, 7000),
        event("nccl:all_to_all", 8000, 8500),  # torch's name for a collective, beside NCCL's kernel
        event("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 8000, 8500),
    ]
    found = profile_gpt.summary(SimpleNamespace(events=lambda: events))
    assert found["ms"] == {kinds.FORWARD: 3.0, kinds.CAST: 2.0, kinds.COPY: 0.5, kinds.COMMUNICATION: 0.5}
    assert found["collectives"] == {"SendRecv": {"kernels": 1, "ms": 0.5, "exposed_ms": 0.5}}
    assert (found["busy"], found["span"]) == (5.0, 6.5)
    assert (found["kernels"], found["aten_calls"], found["host_ms"]) == (3, 2, 5.0)
    waits = ("aten::item", "copy to host", "cudaDeviceSynchronize", "cudaStreamSynchronize")
    assert found["waits"] == dict.fromkeys(waits, 1)


def floors_of(shape, nproc=1):
    args = SimpleNamespace(shape=shape, gbs=train_step.SHAPES[shape].gbs, extra=[])
    return kernels.floors(kernels.dimensions(train_step.model_flags(args)), nproc)


def test_floors():
    """By hand for the 7B slice: 32,768 tokens, 8 layers of 12 x 4096 x 4096 weights, 50,304 logits a token."""
    floor, tokens, weights = floors_of("7b"), 16 * 2048, 8 * 12 * 4096 * 4096
    assert floor[kinds.FORWARD] == pytest.approx(2 * tokens * weights / 1492e12 * 1e3)
    assert floor[kinds.BACKWARD] == pytest.approx(4 * tokens * weights / 1354e12 * 1e3)
    assert floor[kinds.LOSS] == pytest.approx(tokens * 50304 * 6 / 4e12 * 1e3)
    assert floor[kinds.ACTIVATION] == pytest.approx(tokens * 8 * 16384 * 6 / 4e12 * 1e3)
    assert floor[kinds.ROTARY] == pytest.approx(tokens * 8 * 3 * 4096 * 2 / 4e12 * 1e3)  # no rotation: the gather alone
    halves = floors_of("7b", 2)
    assert all(halves[kind] == pytest.approx(ms / 2) for kind, ms in floor.items())


def test_llama_dimensions():
    args = SimpleNamespace(shape="llama", gbs=8, extra=["--num-layers", "4"])
    d = kernels.dimensions(train_step.model_flags(args))
    assert (d.num_layers, d.seq_length, d.num_query_groups, d.kv_channels) == (4, 4096, 8, 128)
    assert (d.ffn_hidden_size, d.swiglu, d.untie_embeddings_and_output_weights) == (14336, True, True)


def test_table():
    """A column for each system, a dash for a kind that it lacks, the sums, and idle time."""
    profile = {"ms": {kinds.FORWARD: 70.04, kinds.CAST: 26.0}, "busy": 96.0, "span": 100.0, "kernels": 7}
    profile |= {"aten_calls": 8, "host_ms": 9.0, "waits": {"cudaStreamSynchronize": 2, "aten::item": 40}}
    row = {"system": "O3", "te": "none", "mbs": 4, "ms": 101.0, "profile": profile}
    other = row | {"system": "te-delayed", "te": "repaired", "profile": profile | {"ms": {kinds.FORWARD: 71.0}}}
    lines = kernels.table([row, other], {kinds.FORWARD: 60.0, kinds.CAST: 10.0}).splitlines()
    cells = {line[0]: line[1:] for line in ([c.strip() for c in text.strip("|").split("|")] for text in lines)}
    assert cells["ms a step"] == ["O3 MBS 4", "te-delayed MBS 4", "floor"]
    assert cells["Transformer Engine"] == ["none", "repaired", ""]
    assert cells[kinds.FORWARD] == ["70.0", "71.0", "60.0"]
    assert cells[kinds.CAST] == ["26.0", "-", "10.0"]
    assert cells["= all"] == ["96.0", "71.0", "70.0"]
    assert cells["idle (span - busy)"] == ["4.0", "4.0", ""]
    assert cells["host waits for the GPU"] == ["2", "2", ""]


def test_logs_of_earlier_runs(tmp_path):
    """The median leaves out warm-up, the profiled step and the last. The micro-batch is read from the run."""
    times = (900, 900, 10, 30, 20, 2000, 15)
    lines = [f" iteration {i:8}/ {7:8} | elapsed time per iteration (ms): {ms}.0 |" for i, ms in enumerate(times, 1)]
    lines = [
        "  eval_micro_batch_size ........ 4",
        "  micro_batch_size ............. 8",
        *lines,
        'PROFILE {"busy": 1.5}',
    ]
    (tmp_path / "O3.log").write_text("\n".join(lines))
    args = SimpleNamespace(systems=["O3"], logs=str(tmp_path), warmup=2)
    (row,) = kernels.earlier(args)
    assert (row["system"], row["te"], row["mbs"], row["ms"], row["profile"]) == ("O3", "none", 8, 20.0, {"busy": 1.5})


@pytest.mark.parametrize("on_disk", [True, False])
@pytest.mark.parametrize("state", ["repaired", "unrepaired"])
def test_te_is_as_the_system_is_named(monkeypatch, state, on_disk):
    """Whatever TE is installed, Megatron finds `_SplitAlongDim` if it should; a run with the wrong state raises."""
    split = object()
    attention = SimpleNamespace(**({"_SplitAlongDim": object()} if on_disk else {}))
    pytorch = SimpleNamespace(attention=attention, utils=SimpleNamespace(SplitAlongDim=split))
    te = SimpleNamespace(pytorch=pytorch)
    for name, module in {
        "": te,
        ".pytorch": pytorch,
        ".pytorch.attention": attention,
        ".pytorch.utils": pytorch.utils,
    }.items():
        monkeypatch.setitem(sys.modules, "transformer_engine" + name, module)
    monkeypatch.setitem(sys.modules, "fused_weight_gradient_mlp_cuda", SimpleNamespace())  # apex's
    profile_gpt.prepare_te(state)
    assert vars(attention) == ({"_SplitAlongDim": split} if state == "repaired" else {})

    monkeypatch.setattr(megatrons, "HAVE_TE", True)
    monkeypatch.setattr(megatrons, "SplitAlongDim", split if state == "repaired" else None)
    profile_gpt.check_te(state)
    monkeypatch.setattr(megatrons, "SplitAlongDim", None if state == "repaired" else split)
    with pytest.raises(RuntimeError, match=f"was to be {state}"):
        profile_gpt.check_te(state)


def test_a_system_without_te_finds_none(monkeypatch):
    """Even if it is installed; a run that finds it nevertheless raises."""
    monkeypatch.setitem(sys.modules, "transformer_engine", SimpleNamespace())
    profile_gpt.prepare_te("none")
    with pytest.raises(ImportError):
        __import__("transformer_engine")
    monkeypatch.setattr(megatrons, "HAVE_TE", False)
    profile_gpt.check_te("none")
    monkeypatch.setattr(megatrons, "HAVE_TE", True)
    with pytest.raises(RuntimeError, match="was to be none"):
        profile_gpt.check_te("none")


@pytest.mark.parametrize(
    ("words", "gbs", "mbs"),
    [
        ("--systems O1 O3", 16, {"O1": 4, "O3": 4}),
        ("--systems O1 O3 --shape 125m --gbs 32 --mbs O3=8", 32, {"O1": 32, "O3": 8}),
    ],
)
def test_batches(monkeypatch, words, gbs, mbs):
    """A shape has default batches; --gbs and --mbs SYSTEM=N override them."""
    monkeypatch.setattr(sys, "argv", ["train_step.py", *words.split(), "--lr", "1"])
    args = train_step.arguments("", ["bf16"])
    assert (args.gbs, args.mbs, args.extra) == (gbs, mbs, ["--lr", "1"])


@pytest.mark.parametrize("words", ["--mbs O2=4", "--mbs O1", "--mbs O1=0.5", "--micro-batch-size 8", "--iterations 6"])
def test_a_wrong_command_line_runs_nothing(monkeypatch, words):
    monkeypatch.setattr(sys, "argv", ["train_step.py", "--systems", "O1", *words.split()])
    with pytest.raises(SystemExit):
        train_step.arguments("", ["bf16"])


def test_columns_are_checked_before_a_run(tmp_path):
    """A file with an earlier version's columns is left alone; rows are appended to one with the same columns."""
    path = tmp_path / "x.csv"
    train_step.append(str(path), ["a", "b"], [{"a": 1, "b": 0.12345}])
    train_step.check_columns(str(path), ["a", "b"])
    train_step.append(str(path), ["a", "b"], [{"a": 2, "b": "x"}])
    assert path.read_text().split() == ["a,b", "1,0.123", "2,x"]
    with pytest.raises(SystemExit, match="other columns"):
        train_step.check_columns(str(path), ["a", "c"])


def test_experts_have_no_floor():
    """The formulas are a dense model's."""
    assert floors_of("qwen3-moe") == floors_of("deepseek-moe") == {} != floors_of("llama")
