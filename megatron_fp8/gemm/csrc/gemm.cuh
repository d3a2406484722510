// D (M, N) = scale_a scale_b A (M, K) B (N, K)^T + bias (N,) + C (M, N): CUTLASS FP8 GEMMs for Hopper.
//
// A .cu file lists the kernels of a family; library.cu has the functions that are called, and searches these lists. One
// epilogue serves plain results, a bias, a residual (C is another tensor) and accumulation (C is D). It skips absent
// parts at run time.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/operations.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "counted.cuh"
#include "promoted.cuh"
#include "table.h"

namespace mfp8 {

using namespace cute;
namespace collective = cutlass::gemm::collective;
namespace fusion = cutlass::epilogue::fusion;

using E4M3 = cutlass::float_e4m3_t;
using E5M2 = cutlass::float_e5m2_t;
using BF16 = cutlass::bfloat16_t;
using FP32 = float;
using RowMajor = cutlass::layout::RowMajor;
using ColumnMajor = cutlass::layout::ColumnMajor;  // the layout of B^T (K, N), because B is (N, K) and row-major
using Sm90 = cutlass::arch::Sm90;
using TensorOp = cutlass::arch::OpClassTensorOp;

template <class T>
constexpr int type_code = -1;
template <>
constexpr int type_code<E4M3> = MFP8_E4M3;
template <>
constexpr int type_code<E5M2> = MFP8_E5M2;
template <>
constexpr int type_code<BF16> = MFP8_BF16;
template <>
constexpr int type_code<FP32> = MFP8_FP32;

// ---- The epilogue ---------------------------------------------------------------------------------------------------

template <class Tile, class Cluster, class Out, class Schedule>
struct EpilogueOf {
  using Once = Stride<_0, _0, int64_t>;  // one value for the matrix
  template <class T>
  using MultiplyAdd = fusion::Sm90Compute<cutlass::homogeneous_multiply_add, T, float,
                                          cutlass::FloatRoundStyle::round_to_nearest>;
  using Scales = fusion::Sm90ScalarBroadcast<float, Once, 2>;  // scale_a scale_b
  using Bias = fusion::Sm90RowBroadcast<0, Tile, BF16, float, Stride<_0, _1, int64_t>>;
  using Scaled = fusion::Sm90EVT<MultiplyAdd<float>, Scales, fusion::Sm90AccFetch, Bias>;
  using Beta = fusion::Sm90ScalarBroadcast<float, Once>;  // 1, or 0: then C is not read
  using Tree = fusion::Sm90EVT<MultiplyAdd<Out>, Beta, fusion::Sm90SrcFetch<Out>, Scaled>;
  // Four buffers of 8 KiB: FP32 takes as much shared memory as BF16, and leaves as many stages for A and B.
  static constexpr bool Cooperative = std::is_same_v<Schedule, cutlass::epilogue::TmaWarpSpecializedCooperative>;
  using Subtile = Shape<Int<Cooperative ? 128 : 64>, Int<sizeof(Out) == 4 ? 16 : 32>>;
  static constexpr int Aligned = 16 / sizeof(Out);
  using Op = typename cutlass::epilogue::collective::CollectiveBuilder<
      Sm90, TensorOp, Tile, Cluster, Subtile, float, float, Out, RowMajor, Aligned, Out, RowMajor, Aligned, Schedule,
      Tree>::CollectiveOp;
};

// ---- The product ----------------------------------------------------------------------------------------------------

template <class Epilogue>
using StagesBeside = collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>;

template <class A, class B, class Tile, class Cluster, class Epilogue, class Schedule>
using FastMma = typename collective::CollectiveBuilder<Sm90, TensorOp, A, RowMajor, 16, B, ColumnMajor, 16, float, Tile,
                                                       Cluster, StagesBeside<Epilogue>, Schedule>::CollectiveOp;

// What CollectiveBuilder would make, except for the width of an MMA (SliceN) and the loop.
template <class A, class B, class Tile, class Cluster, class Epilogue, int Promote, int SliceN>
struct PromotedMmaOf {
  using M = decltype(get<0>(Tile{}));
  using N = decltype(get<1>(Tile{}));
  using K = decltype(get<2>(Tile{}));
  static constexpr auto Major = GMMA::Major::K;
  using Mma = decltype(GMMA::ss_op_selector<A, B, float, Shape<M, Int<SliceN>, K>, Major, Major>());
  using TiledMma = decltype(make_tiled_mma(Mma{}, Layout<Shape<_2, _1, _1>>{}));
  using CopyA = decltype(collective::detail::sm90_cluster_shape_to_tma_atom(shape<1>(Cluster{})));
  using CopyB = decltype(collective::detail::sm90_cluster_shape_to_tma_atom(shape<0>(Cluster{})));
  using LayoutA = decltype(collective::detail::ss_smem_selector<Major, A, M, K>());
  using LayoutB = decltype(collective::detail::ss_smem_selector<Major, B, N, K>());
  static constexpr int Stages =
      collective::detail::compute_stage_count_or_override<collective::detail::sm90_smem_capacity_bytes, A, B, Tile>(
          StagesBeside<Epilogue>{});
  using Policy = cutlass::gemm::MainloopSm90TmaGmmaWarpSpecializedFP8<
      Stages, Cluster, cutlass::gemm::KernelTmaWarpSpecializedCooperative>;
  using Base = collective::CollectiveMma<Policy, Tile, A, cutlass::gemm::TagToStrideA_t<RowMajor>, B,
                                         cutlass::gemm::TagToStrideB_t<ColumnMajor>, TiledMma, CopyA, LayoutA, void,
                                         identity, CopyB, LayoutB, void, identity>;
  using Op = PromotedMma<Base, Promote>;
};

// ---- A kernel and its launch ----------------------------------------------------------------------------------------

template <class Gemm>
int launched(const typename Gemm::Arguments& arguments, cudaStream_t stream) {
  if (Gemm::can_implement(arguments) != cutlass::Status::kSuccess) return MFP8_UNFIT;
  if (Gemm::get_workspace_size(arguments) != 0) return MFP8_UNFIT;
  Gemm gemm;
  if (gemm.initialize(arguments, nullptr, stream) != cutlass::Status::kSuccess) return MFP8_FAILED;
  return gemm.run(stream) == cutlass::Status::kSuccess ? MFP8_OK : MFP8_FAILED;
}

template <class Mainloop, class Epilogue>
struct Launch {
  static constexpr bool InTurns = std::is_base_of_v<cutlass::gemm::KernelTmaWarpSpecializedPingpong,
                                                    typename Mainloop::DispatchPolicy::Schedule>;
  // Pingpong: the warp groups must know each other's tiles in advance, so CUTLASS gives a block a fixed share.
  using Scheduler = std::conditional_t<InTurns, cutlass::gemm::PersistentScheduler, Counted>;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, Mainloop, Epilogue, Scheduler>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  static int run(const mfp8_args& p, int sms, uint32_t* counter) {
    using A = typename Kernel::ElementA;
    using B = typename Kernel::ElementB;
    using Out = typename Epilogue::ElementD;
    auto a = static_cast<const A*>(p.a);
    auto b = static_cast<const B*>(p.b);
    auto c = static_cast<const Out*>(p.c == nullptr ? p.d : p.c);  // a tensor map needs an address, read or not
    auto scale_a = static_cast<const float*>(p.scale_a), scale_b = static_cast<const float*>(p.scale_b);
    auto bias = static_cast<const BF16*>(p.bias);
    float beta = p.c == nullptr ? 0.f : 1.f;
    typename Kernel::StrideA rows_ab{p.k, _1{}, 0};
    typename Kernel::StrideD rows_d{p.n, _1{}, 0};
    // The arguments nest like the trees, with a node's own arguments last: Beta, C, (Scales, the sum, Bias).
    typename Gemm::Arguments arguments{
        cutlass::gemm::GemmUniversalMode::kGemm,
        {p.m, p.n, p.k, 1},
        {a, rows_ab, b, rows_ab},
        {{{{beta}, {nullptr}, {}}, {}, {{{1.f, 1.f}, {scale_a, scale_b}, {}}, {}, {bias, BF16(0), {}}, {}}, {}},
         c, rows_d, static_cast<Out*>(p.d), rows_d}};
    arguments.hw_info.device_id = p.device;
    arguments.hw_info.sm_count = sms;
    if constexpr (!InTurns) arguments.scheduler.counter = counter;
    using Raster = cutlass::gemm::kernel::detail::RasterOrderOptions;
    arguments.scheduler.max_swizzle_size = p.swizzle;
    arguments.scheduler.raster_order = p.raster == MFP8_ALONG_M   ? Raster::AlongM
                                       : p.raster == MFP8_ALONG_N ? Raster::AlongN
                                                                  : Raster::Heuristic;
    return launched<Gemm>(arguments, static_cast<cudaStream_t>(p.stream));
  }
};

// The kernels with one tile shape: Tiled<...>::fast() and the others return entries for a family's list.
template <class A, class B, class Out, int M, int N, int ClusterM, int ClusterN>
struct Tiled {
  using Tile = Shape<Int<M>, Int<N>, _128>;
  using Cluster = Shape<Int<ClusterM>, Int<ClusterN>, _1>;
  template <class Schedule>
  using After = typename EpilogueOf<Tile, Cluster, Out, Schedule>::Op;

  template <class Mma, class Epilogue>
  static constexpr Entry entry(int promote, int pingpong) {
    using L = Launch<Mma, Epilogue>;
    constexpr int Stages = Mma::DispatchPolicy::Stages, Bytes = L::Kernel::SharedStorageSize;
    return {{type_code<A>, type_code<B>, type_code<Out>, promote, M, N, ClusterM, ClusterN, pingpong, Stages, Bytes},
            &L::run};
  }

  static constexpr Entry fast() {
    using Epilogue = After<cutlass::epilogue::TmaWarpSpecializedCooperative>;
    using Schedule = cutlass::gemm::KernelTmaWarpSpecializedCooperativeFP8FastAccum;
    return entry<FastMma<A, B, Tile, Cluster, Epilogue, Schedule>, Epilogue>(0, 0);
  }

  static constexpr Entry fast_pingpong() {
    using Epilogue = After<cutlass::epilogue::TmaWarpSpecialized>;
    using Schedule = cutlass::gemm::KernelTmaWarpSpecializedPingpongFP8FastAccum;
    return entry<FastMma<A, B, Tile, Cluster, Epilogue, Schedule>, Epilogue>(0, 1);
  }

  template <int Promote, int SliceN = N>
  static constexpr Entry promoted() {
    using Epilogue = After<cutlass::epilogue::TmaWarpSpecializedCooperative>;
    using Mma = typename PromotedMmaOf<A, B, Tile, Cluster, Epilogue, Promote, SliceN>::Op;
    return entry<Mma, Epilogue>(Promote, 0);
  }
};

}  // namespace mfp8
