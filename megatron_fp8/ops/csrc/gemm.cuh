// D (M, N) = scale_a scale_b A (M, K) B (N, K)^T + bias (N,) + beta C (M, N): CUTLASS FP8 GEMMs for Hopper, and their table.
//
// A .cu file lists the kernels of a family; library.cu joins the lists and is what is called. One epilogue serves plain
// results, a bias, a residual (C is another tensor) and accumulation (C is D): what is absent is skipped at run time.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/operations.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "promoted.cuh"
#include "table.h"

namespace mfp8 {

using namespace cute;

using E4M3 = cutlass::float_e4m3_t;
using E5M2 = cutlass::float_e5m2_t;
using BF16 = cutlass::bfloat16_t;
using FP32 = float;

template <class T>
constexpr int type_code() {
  return std::is_same_v<T, E4M3> ? MFP8_E4M3 : std::is_same_v<T, E5M2> ? MFP8_E5M2 : std::is_same_v<T, BF16> ? MFP8_BF16 : MFP8_FP32;
}

// ---- What follows the product ----------------------------------------------------------------------------------------

template <class Tile, class Cluster, class Out, class Schedule>
struct EpilogueOf {
  static constexpr auto Round = cutlass::FloatRoundStyle::round_to_nearest;
  using Scales = cutlass::epilogue::fusion::Sm90ScalarBroadcast<float, Stride<_0, _0, int64_t>, 2>;  // scale_a scale_b
  using Beta = cutlass::epilogue::fusion::Sm90ScalarBroadcast<float, Stride<_0, _0, int64_t>>;
  using Bias = cutlass::epilogue::fusion::Sm90RowBroadcast<0, Tile, BF16, float, Stride<_0, _1, int64_t>>;
  template <class T>
  using MultiplyAdd = cutlass::epilogue::fusion::Sm90Compute<cutlass::homogeneous_multiply_add, T, float, Round>;
  using Tree = cutlass::epilogue::fusion::Sm90EVT<
      MultiplyAdd<Out>, Beta, cutlass::epilogue::fusion::Sm90SrcFetch<Out>,
      cutlass::epilogue::fusion::Sm90EVT<MultiplyAdd<float>, Scales, cutlass::epilogue::fusion::Sm90AccFetch, Bias>>;
  // Four buffers of a tile of 8 KiB: as much shared memory for FP32 as for BF16, and as many stages of A and B.
  static constexpr bool Cooperative = std::is_same_v<Schedule, cutlass::epilogue::TmaWarpSpecializedCooperative>;
  using EpilogueTile = Shape<Int<Cooperative ? 128 : 64>, Int<sizeof(Out) == 4 ? 16 : 32>>;
  using Op = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster, EpilogueTile, float, float, Out,
      cutlass::layout::RowMajor, 16 / sizeof(Out), Out, cutlass::layout::RowMajor, 16 / sizeof(Out), Schedule, Tree>::CollectiveOp;
};

// ---- The product -----------------------------------------------------------------------------------------------------

template <class A, class B, class Tile, class Cluster, class Epilogue, class Schedule>
using FastMma = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, A, cutlass::layout::RowMajor, 16, B, cutlass::layout::ColumnMajor, 16,
    float, Tile, Cluster,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
    Schedule>::CollectiveOp;

// As the builder makes it, but for the width of an MMA (SliceN) and the loop.
template <class A, class B, class Tile, class Cluster, class Epilogue, int Promote, int SliceN, int Partials>
struct PromotedMmaOf {
  using M = decltype(get<0>(Tile{}));
  using N = decltype(get<1>(Tile{}));
  using K = decltype(get<2>(Tile{}));
  static constexpr auto Major = GMMA::Major::K;
  using TiledMma = decltype(make_tiled_mma(GMMA::ss_op_selector<A, B, float, Shape<M, Int<SliceN>, K>, Major, Major>(),
                                           Layout<Shape<_2, _1, _1>>{}));
  static constexpr int Carveout = static_cast<int>(sizeof(typename Epilogue::SharedStorage));
  static constexpr int Stages = cutlass::gemm::collective::detail::compute_stage_count_or_override<
      cutlass::gemm::collective::detail::sm90_smem_capacity_bytes, A, B, Tile>(
      cutlass::gemm::collective::StageCountAutoCarveout<Carveout>{});
  using Base = cutlass::gemm::collective::CollectiveMma<
      cutlass::gemm::MainloopSm90TmaGmmaWarpSpecializedFP8<Stages, Cluster, cutlass::gemm::KernelTmaWarpSpecializedCooperative>,
      Tile, A, cutlass::gemm::TagToStrideA_t<cutlass::layout::RowMajor>, B,
      cutlass::gemm::TagToStrideB_t<cutlass::layout::ColumnMajor>, TiledMma,
      decltype(cutlass::gemm::collective::detail::sm90_cluster_shape_to_tma_atom(shape<1>(Cluster{}))),
      decltype(cutlass::gemm::collective::detail::ss_smem_selector<Major, A, M, K>()), void, identity,
      decltype(cutlass::gemm::collective::detail::sm90_cluster_shape_to_tma_atom(shape<0>(Cluster{}))),
      decltype(cutlass::gemm::collective::detail::ss_smem_selector<Major, B, N, K>()), void, identity>;
  using Op = PromotedMma<Base, Promote, Partials>;
};

// ---- A kernel and its launch -----------------------------------------------------------------------------------------

template <class Mainloop, class Epilogue>
struct Launch {
  using Kernel = cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, Mainloop, Epilogue, cutlass::gemm::PersistentScheduler>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
  using Out = typename Epilogue::ElementD;

  static int run(const mfp8_args& p, int sms) {
    using StrideA = typename Kernel::StrideA;
    using StrideB = typename Kernel::StrideB;
    using StrideD = typename Kernel::StrideD;
    auto c = static_cast<const Out*>(p.c == nullptr ? p.d : p.c);  // a tensor map wants an address, read or not
    typename Gemm::Arguments arguments{
        cutlass::gemm::GemmUniversalMode::kGemm,
        {p.m, p.n, p.k, 1},
        {static_cast<const typename Kernel::ElementA*>(p.a), StrideA{p.k, _1{}, 0},
         static_cast<const typename Kernel::ElementB*>(p.b), StrideB{p.k, _1{}, 0}},
        {{{{p.c == nullptr ? 0.f : 1.f}, {nullptr}, {}},
          {},
          {{{1.f, 1.f}, {static_cast<const float*>(p.scale_a), static_cast<const float*>(p.scale_b)}, {}},
           {},
           {static_cast<const BF16*>(p.bias), BF16(0), {}},
           {}},
          {}},
         c, StrideD{p.n, _1{}, 0}, static_cast<Out*>(p.d), StrideD{p.n, _1{}, 0}}};
    arguments.hw_info.device_id = p.device;
    arguments.hw_info.sm_count = sms;
    using Raster = cutlass::gemm::kernel::detail::RasterOrderOptions;
    arguments.scheduler.max_swizzle_size = p.swizzle;
    arguments.scheduler.raster_order = p.raster == MFP8_ALONG_M ? Raster::AlongM : p.raster == MFP8_ALONG_N ? Raster::AlongN : Raster::Heuristic;
    if (Gemm::can_implement(arguments) != cutlass::Status::kSuccess) return MFP8_UNFIT;
    if (Gemm::get_workspace_size(arguments) != 0) return MFP8_UNFIT;
    Gemm gemm;
    auto stream = static_cast<cudaStream_t>(p.stream);
    if (gemm.initialize(arguments, nullptr, stream) != cutlass::Status::kSuccess) return MFP8_FAILED;
    return gemm.run(stream) == cutlass::Status::kSuccess ? MFP8_OK : MFP8_FAILED;
  }
};

template <class A, class B, class Out, int M, int N, int ClusterM, int ClusterN>
struct Tiled {
  using Tile = Shape<Int<M>, Int<N>, _128>;
  using Cluster = Shape<Int<ClusterM>, Int<ClusterN>, _1>;

  template <class Mma, class Epilogue>
  static constexpr Entry entry(int promote, int pingpong) {
    using L = Launch<Mma, Epilogue>;
    return {{type_code<A>(), type_code<B>(), type_code<Out>(), promote, M, N, ClusterM, ClusterN, pingpong,
             Mma::DispatchPolicy::Stages, L::Kernel::SharedStorageSize},
            &L::run};
  }

  static constexpr Entry fast() {
    using Epilogue = typename EpilogueOf<Tile, Cluster, Out, cutlass::epilogue::TmaWarpSpecializedCooperative>::Op;
    return entry<FastMma<A, B, Tile, Cluster, Epilogue, cutlass::gemm::KernelTmaWarpSpecializedCooperativeFP8FastAccum>, Epilogue>(0, 0);
  }

  static constexpr Entry fast_pingpong() {
    using Epilogue = typename EpilogueOf<Tile, Cluster, Out, cutlass::epilogue::TmaWarpSpecialized>::Op;
    return entry<FastMma<A, B, Tile, Cluster, Epilogue, cutlass::gemm::KernelTmaWarpSpecializedPingpongFP8FastAccum>, Epilogue>(0, 1);
  }

  template <int Promote, int SliceN = N, int Partials = 1>
  static constexpr Entry promoted() {
    using Epilogue = typename EpilogueOf<Tile, Cluster, Out, cutlass::epilogue::TmaWarpSpecializedCooperative>::Op;
    return entry<typename PromotedMmaOf<A, B, Tile, Cluster, Epilogue, Promote, SliceN, Partials>::Op, Epilogue>(Promote, 0);
  }
};

}  // namespace mfp8
