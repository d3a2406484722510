// The main loop with promoted accumulation: partial sums over `Promote` of K are added in FP32 registers.
//
// Hopper's FP8 tensor core keeps about 14 bits of a running sum. So a sum is cut: the tensor core sums `Promote`
// elements of K from zero into a partial fragment, and the ordinary FP32 units add that to the real one. Both live in
// registers, of which a thread has 232, and 128 x 256 of accumulators with a second copy of all of them (CUTLASS' own
// loop) would need 256. So a tile is cut into slices, one MMA fragment each, and a partial sum is of one slice:
//
//     Partials = 1   a slice is multiplied, waited for and added; the other warp group's MMAs fill the tensor core
//     Partials = 2   two slices: while one is added, the warp group's own other slice is being multiplied
//
// Loading, its pipeline and the tensor maps are CUTLASS' FP8 main loop, of which this is a child: only `mma` is ours.
#pragma once

#include "cutlass/gemm/collective/collective_mma.hpp"

namespace mfp8 {

using namespace cute;

template <class Base, int Promote, int Partials>
struct PromotedMma : Base {
  using typename Base::MainloopPipeline;
  using typename Base::Params;
  using typename Base::PipelineState;
  using typename Base::TensorStorage;
  using typename Base::TiledMma;

  static constexpr int TileK = size<2>(typename Base::TileShape{});
  static constexpr int Group = Promote / TileK;  // K tiles in a partial sum
  static_assert(Promote % TileK == 0 && Group >= 1, "promotion happens at the end of a K tile");
  static_assert(Partials == 1 || Partials == 2);
  static_assert(Group * Partials < Base::DispatchPolicy::Stages, "what is multiplied, and a stage to load, must fit");

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
    static_assert(Partials == 1 || Slices == 2, "two partial sums alternate between two slices");
    static_assert(decltype(size<2>(rA) == size<2>(rB))::value);

    using Partial = decltype(make_fragment_like(sums(_, _0{}, _0{})));
    Partial partial[Partials];

    // Multiplies one slice over `tiles` K tiles from stage `from` on, without waiting for the result.
    auto issue = [&](auto slice, auto tiles, PipelineState from) {
      constexpr int m = decltype(slice)::value % SlicesM, n = decltype(slice)::value / SlicesM;
      Partial& sum = partial[decltype(slice)::value % Partials];
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
    };
    auto add = [&](auto slice) {
      constexpr int m = decltype(slice)::value % SlicesM, n = decltype(slice)::value / SlicesM;
      Partial& sum = partial[decltype(slice)::value % Partials];
      warpgroup_fence_operand(sum);
      Tensor total = sums(_, m, n);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < size(sum); ++i) total(i) += sum(i);
    };
    auto release = [&](auto tiles) {  // the oldest stages; reading goes on after them
      for_each(make_int_sequence<decltype(tiles)::value>{}, [&](auto) {
        pipeline.consumer_release(read);
        ++read;
      });
    };
    auto one_by_one = [&](auto tiles) {  // a partial sum of each slice
      for_each(make_int_sequence<Slices>{}, [&](auto slice) {
        issue(slice, tiles, read);
        warpgroup_wait<0>();
        if constexpr (decltype(slice)::value == Slices - 1) release(tiles);
        add(slice);
      });
    };
    // Two partial sums of each of two slices; of four additions only the last is waited for. In straight lines, and
    // with nothing in flight where a loop closes: else ptxas loses sight of a sum and serialises all.
    auto overlapped = [&](auto tiles) {
      PipelineState next = read;
      next.advance(tiles);
      issue(_0{}, tiles, read);
      issue(_1{}, tiles, read);
      warpgroup_wait<1>();
      add(_0{});
      issue(_0{}, tiles, next);
      warpgroup_wait<1>();
      release(tiles);
      add(_1{});
      issue(_1{}, tiles, next);
      warpgroup_wait<1>();
      add(_0{});
      warpgroup_wait<0>();
      release(tiles);
      add(_1{});
    };

    clear(sums);
    if constexpr (Partials == 2) {
      CUTLASS_PRAGMA_NO_UNROLL
      for (; k_tiles >= 2 * Group; k_tiles -= 2 * Group) overlapped(Int<Group>{});
    } else if constexpr (Group > 1) {
      CUTLASS_PRAGMA_NO_UNROLL
      for (; k_tiles >= Group; k_tiles -= Group) one_by_one(Int<Group>{});
    }
    CUTLASS_PRAGMA_NO_UNROLL
    for (; k_tiles > 0; --k_tiles) one_by_one(_1{});  // what is left is promoted at every K tile
  }

  // Every stage has been given back.
  CUTLASS_DEVICE void mma_tail(MainloopPipeline, PipelineState, int) {}
};

}  // namespace mfp8
