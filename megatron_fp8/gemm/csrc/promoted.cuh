// The main loop with promoted accumulation: partial sums over `Promote` of K are added in FP32 registers.
//
// Hopper's FP8 tensor core keeps about 14 bits of a running sum. So the sum over K is cut: the tensor core sums
// `Promote` elements of K, starting from zero, into a partial fragment, and the FP32 units add it to the total. Both
// are in registers, and a thread has 232. CUTLASS' own loop keeps a second copy of all 128 x 256 accumulators, which
// would need 256. So a tile is cut into slices, one MMA fragment each, and a partial sum covers one slice: it is
// multiplied, waited for and added, while the other warp group's MMAs keep the tensor core busy.
//
// The class inherits the loads, their pipeline and the tensor maps from CUTLASS' FP8 main loop; it replaces only `mma`.
#pragma once

#include "cutlass/gemm/collective/collective_mma.hpp"

namespace mfp8 {

using namespace cute;

template <class Base, int Promote>
struct PromotedMma : Base {
  using typename Base::MainloopPipeline;
  using typename Base::Params;
  using typename Base::PipelineState;
  using typename Base::TensorStorage;
  using typename Base::TiledMma;

  static constexpr int TileK = size<2>(typename Base::TileShape{});
  static constexpr int Group = Promote / TileK;  // K tiles in a partial sum
  static_assert(Promote % TileK == 0 && Group >= 1, "promotion happens at the end of a K tile");
  static_assert(Group < Base::DispatchPolicy::Stages, "the stages must hold one partial sum's K tiles and one to load");

  // All slices of a group read the same stages, which are released after the last slice.
  template <class Accumulators>
  CUTLASS_DEVICE void mma(MainloopPipeline pipeline, PipelineState read, Accumulators& sums, int k_tiles, int thread,
                          TensorStorage& tensors, Params const&) {
    Tensor sA = make_tensor(make_smem_ptr(tensors.smem_A.data()), typename Base::SmemLayoutA{});  // (M, K, stage)
    Tensor sB = make_tensor(make_smem_ptr(tensors.smem_B.data()), typename Base::SmemLayoutB{});  // (N, K, stage)
    int warp_group = __shfl_sync(0xffffffff, thread / cutlass::NumThreadsPerWarpGroup, 0);
    TiledMma tiled_mma;
    auto thread_mma = tiled_mma.get_slice(warp_group * cutlass::NumThreadsPerWarpGroup);
    Tensor rA = thread_mma.make_fragment_A(thread_mma.partition_A(sA));  // (MMA, slice_m, k, stage): descriptors
    Tensor rB = thread_mma.make_fragment_B(thread_mma.partition_B(sB));  // (MMA, slice_n, k, stage)
    constexpr int SlicesM = decltype(size<1>(sums))::value, Slices = SlicesM * decltype(size<2>(sums))::value;
    static_assert(decltype(size<2>(rA) == size<2>(rB))::value);
    auto sum = make_fragment_like(sums(_, _0{}, _0{}));

    // A partial sum over `tiles` K tiles for every slice. The last slice releases the stages before its addition.
    auto partial_sums = [&](auto tiles) {
      for_each(make_int_sequence<Slices>{}, [&](auto slice) {
        constexpr int m = decltype(slice)::value % SlicesM, n = decltype(slice)::value / SlicesM;
        PipelineState from = read;
        warpgroup_fence_operand(sum);
        tiled_mma.accumulate_ = GMMA::ScaleOut::Zero;
        for_each(make_int_sequence<decltype(tiles)::value>{}, [&](auto) {
          if constexpr (decltype(slice)::value == 0) pipeline.consumer_wait(from);
          int stage = from.index();
          warpgroup_arrive();
          CUTLASS_PRAGMA_UNROLL
          for (int k = 0; k < size<2>(rA); ++k) {
            cute::gemm(tiled_mma, rA(_, m, k, stage), rB(_, n, k, stage), sum);
            tiled_mma.accumulate_ = GMMA::ScaleOut::One;
          }
          ++from;
        });
        warpgroup_commit_batch();
        warpgroup_wait<0>();
        if constexpr (decltype(slice)::value == Slices - 1) {
          for_each(make_int_sequence<decltype(tiles)::value>{}, [&](auto) {
            pipeline.consumer_release(read);
            ++read;
          });
        }
        warpgroup_fence_operand(sum);
        Tensor total = sums(_, m, n);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < size(sum); ++i) total(i) += sum(i);
      });
    };

    clear(sums);
    if constexpr (Group > 1) {
      CUTLASS_PRAGMA_NO_UNROLL
      for (; k_tiles >= Group; k_tiles -= Group) partial_sums(Int<Group>{});
    }
    CUTLASS_PRAGMA_NO_UNROLL
    for (; k_tiles > 0; --k_tiles) partial_sums(_1{});  // the remaining K tiles are promoted one by one
  }

  // `mma` has released every stage already.
  CUTLASS_DEVICE void mma_tail(MainloopPipeline, PipelineState, int) {}
};

}  // namespace mfp8
