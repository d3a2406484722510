// The main loop with promoted accumulation: partial sums over `Promote` of K are added in FP32 registers.
//
// Hopper's FP8 tensor core keeps about 14 bits of a running sum. So a sum is cut: the tensor core sums `Promote`
// elements of K from zero into a partial fragment, and the ordinary FP32 units add that to the real one. Both live in
// registers, of which a thread has 232, and 128 x 256 of accumulators with a second copy of all of them (CUTLASS' own
// loop) would need 256. So a tile is cut into slices, one MMA fragment each, and a partial sum is of one slice: it is
// multiplied, waited for and added, while the other warp group's MMAs fill the tensor core.
//
// Loading, its pipeline and the tensor maps are CUTLASS' FP8 main loop, of which this is a child: only `mma` is ours.
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
  static_assert(Group < Base::DispatchPolicy::Stages, "what is multiplied, and a stage to load, must fit");

  // The slices of a group are multiplied from the same stages, which are given back when the last has been.
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

    // A partial sum over `tiles` K tiles of every slice; the last gives the stages back before it is added.
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
    for (; k_tiles > 0; --k_tiles) partial_sums(_1{});  // what is left is promoted at every K tile
  }

  // Every stage has been given back.
  CUTLASS_DEVICE void mma_tail(MainloopPipeline, PipelineState, int) {}
};

}  // namespace mfp8
