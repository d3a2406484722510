// A tile scheduler: each cluster of blocks takes its next tiles from a counter, until there are none. Compared with
// two others:
//
//   shares          as many clusters as fit the GPU, each with a fixed share of the tiles. If a collective occupies
//                   some multiprocessors, their clusters begin late, and the GEMM waits for their shares
//   a tile a block  no waiting, but a tile's first loads begin only when the tile before it has been written
//   counted         the next tile's loads run while a tile is written; a late cluster takes the tiles that are left
//
// CUTLASS' cooperative kernel accepts a scheduler of this form. It is meant for Blackwell, whose hardware hands out
// the tiles: a warp of each block fetches the next number, and the others read it in shared memory (see
// IsSchedDynamicPersistent in sm90_gemm_tma_warpspecialized_cooperative.hpp). Here the cluster's first block counts in
// global memory, and writes the number into the shared memory of all its blocks.
#pragma once

#include "cutlass/arch/barrier.h"
#include "cutlass/gemm/kernel/tile_scheduler.hpp"

namespace mfp8 {

struct Counted {};  // the tag by which CUTLASS selects this scheduler

// What takes numbers, and hands them to all warps. Self, the scheduler itself, tells what they mean:
//
//     uint32_t clusters() const                     how many clusters of tiles there are
//     WorkTileInfo tile_of(uint32_t number) const   this block's tile of one; not a valid tile if there are fewer
template <class ClusterShape, class Self>
class NumberTaker : public cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90 {
  using Base = cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90;

 protected:
  static constexpr uint32_t Blocks = cute::size(ClusterShape{});

 public:
  static constexpr bool IsDynamicPersistent = true;

  struct Arguments : Base::Arguments {
    uint32_t* counter = nullptr;  // in global memory; zero before the kernel, and again after it
  };
  struct Params : Base::Params {
    uint32_t* counter = nullptr;
  };

  // The fetched tile numbers; the name is CUTLASS'. `next` is fetched while `first` may still be read.
  struct CLCResponse {
    uint32_t first, next;
  };

  // Sends one number after another from the first block of a cluster to all warps of all its blocks.
  class Pipeline {
   public:
    static constexpr uint32_t Stages = 1;
    using PipelineState = cutlass::PipelineState<Stages>;
    enum class ThreadCategory { Consumer, ProducerConsumer };
    struct Params {
      ThreadCategory role;
      uint32_t producer_blockid, producer_arv_count, consumer_arv_count, transaction_bytes;
    };
    struct SharedStorage {
      cutlass::arch::ClusterTransactionBarrier full;  // in each block: the number has arrived
      cutlass::arch::ClusterBarrier empty;            // in the first block: every warp of the cluster has read it
    };

    CUTLASS_DEVICE Pipeline(SharedStorage& storage, Params const& params) : storage_(storage) {
      if (threadIdx.x == 0) {
        storage.full.init(1);
        storage.empty.init(params.consumer_arv_count / cutlass::NumThreadsPerWarp * Blocks);
      }
      cutlass::arch::fence_barrier_init();
    }

    CUTLASS_DEVICE void wait_empty(PipelineState state) { storage_.empty.wait(state.phase()); }

    // Called by one thread of each block: one number will arrive.
    CUTLASS_DEVICE void expect() {
      if constexpr (Blocks > 1) storage_.full.arrive_and_expect_tx(sizeof(uint32_t));
    }

    CUTLASS_DEVICE void send(uint32_t value, uint32_t* to, uint32_t block) {
      if constexpr (Blocks == 1) {
        *const_cast<uint32_t volatile*>(to) = value;
        storage_.full.arrive();
        return;
      }
      uint32_t arrived = cute::cast_smem_ptr_to_uint(&storage_.full);
      cute::store_shared_remote(value, cute::cast_smem_ptr_to_uint(to), arrived, block);
    }

    CUTLASS_DEVICE uint32_t read(PipelineState state, uint32_t const* from) {
      storage_.full.wait(state.phase());
      uint32_t value = *reinterpret_cast<uint32_t const volatile*>(from);
      __syncwarp();
      storage_.empty.arrive(0, cutlass::canonical_lane_idx() == 0);
      return value;
    }

    // The first block must not end before the other blocks' last signal to it.
    CUTLASS_DEVICE void producer_tail(PipelineState state) {
      if (leads()) wait_empty(state);
    }

   private:
    SharedStorage& storage_;
  };

  // CUTLASS' limit on how far the fetching warp may run ahead. It does nothing here: the pipeline holds one number.
  struct ThrottlePipeline {
    static constexpr uint32_t Stages = 1;
    using PipelineState = cutlass::PipelineState<Stages>;
    enum class ThreadCategory { Producer, Consumer };
    struct Params {
      ThreadCategory role;
      uint32_t producer_arv_count, consumer_arv_count, dst_blockid;
      int initializing_warp;
    };
    struct SharedStorage {};

    CUTLASS_DEVICE ThrottlePipeline(SharedStorage&, Params const&) {}
    CUTLASS_DEVICE void producer_acquire(PipelineState) {}
    CUTLASS_DEVICE void producer_commit(PipelineState) {}
    CUTLASS_DEVICE void consumer_wait(PipelineState) {}
    CUTLASS_DEVICE void consumer_release(PipelineState) {}
  };

  class SharedStorage {
   public:
    CUTLASS_DEVICE typename Pipeline::SharedStorage& pipeline() { return pipeline_; }
    CUTLASS_DEVICE typename ThrottlePipeline::SharedStorage& throttle_pipeline() { return throttle_pipeline_; }
    CUTLASS_DEVICE CLCResponse* data() { return &data_; }

   private:
    alignas(16) typename Pipeline::SharedStorage pipeline_;
    alignas(16) typename ThrottlePipeline::SharedStorage throttle_pipeline_;
    alignas(16) CLCResponse data_;
  };

  template <class Problem, class Tile, class Cluster>
  static Params to_underlying_arguments(Problem problem, Tile tile, Cluster cluster,
                                        cutlass::KernelHardwareInfo const& hw_info, Arguments const& arguments,
                                        void* workspace, uint32_t subtiles) {
    Params params;
    static_cast<Base::Params&>(params) =
        Base::to_underlying_arguments(problem, tile, cluster, hw_info, arguments, workspace, subtiles);
    params.counter = arguments.counter;
    return params;
  }

  CUTLASS_DEVICE explicit NumberTaker(Params const& params) : Base(params), counter_(params.counter) {}

  CUTLASS_DEVICE void set_data_ptr(CLCResponse* data) { data_ = data; }

  // Called once by all threads of a cluster. The first tile is counted too: a late cluster may get none.
  template <class Cluster>
  CUTLASS_DEVICE auto initial_work_tile_info(Cluster) {
    if (threadIdx.x == 0 && leads()) {
      uint32_t taken = take(), here = cute::cast_smem_ptr_to_uint(&data_->first);
      if constexpr (Blocks == 1) {
        data_->first = taken;
      } else {
        for (uint32_t block = 0; block < Blocks; ++block) {
          asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(cute::set_block_rank(here, block)), "r"(taken) : "memory");
        }
      }
    }
    if constexpr (Blocks == 1) {
      __syncthreads();
    } else {
      cute::cluster_arrive();
      cute::cluster_wait();
    }
    return self().tile_of(*reinterpret_cast<uint32_t const volatile*>(&data_->first));
  }

  // Called by the fetching warp of each block.
  CUTLASS_DEVICE typename Pipeline::PipelineState advance_to_next_work(Pipeline& pipeline,
                                                                      typename Pipeline::PipelineState state) {
    bool first = leads();
    if (first) pipeline.wait_empty(state);
    if (cutlass::canonical_lane_idx() == 0) {
      pipeline.expect();
      if (first) {
        uint32_t taken = take();
        for (uint32_t block = 0; block < Blocks; ++block) pipeline.send(taken, &data_->next, block);
      }
    }
    __syncwarp();
    ++state;
    return state;
  }

  // Called by every warp that works on tiles.
  template <class Work>
  CUTLASS_DEVICE auto fetch_next_work(Work, Pipeline& pipeline, typename Pipeline::PipelineState state) {
    return cute::make_tuple(self().tile_of(pipeline.read(state, &data_->next)), true);
  }

  // CUTLASS calls this for a warp group that has no part of a tile. There is none.
  template <class Work>
  CUTLASS_DEVICE auto fetch_next_work(Work work) {
    return cute::make_tuple(work, true);
  }

 private:
  // A kernel with clusters of one block is launched without clusters, so it does not ask for its place in one.
  CUTLASS_DEVICE static bool leads() { return Blocks == 1 || cute::block_rank_in_cluster() == 0; }

  CUTLASS_DEVICE Self const& self() const { return static_cast<Self const&>(*this); }

  // Each cluster takes exactly one number beyond the tiles. So the last number of all is known; its taker resets the
  // counter.
  CUTLASS_DEVICE uint32_t take() {
    uint32_t taken = atomicAdd(counter_, 1u);
    if (taken == self().clusters() + gridDim.x * gridDim.y / Blocks - 1) atomicExch(counter_, 0u);
    return taken;
  }

  uint32_t* counter_;
  CLCResponse* data_ = nullptr;
};

// The tiles of one matrix.
template <class ClusterShape>
class CountedScheduler : public NumberTaker<ClusterShape, CountedScheduler<ClusterShape>> {
  using Base = NumberTaker<ClusterShape, CountedScheduler<ClusterShape>>;
  using Base::Blocks;

 public:
  using typename Base::WorkTileInfo;
  using Base::Base;

  CUTLASS_DEVICE uint32_t clusters() const { return this->scheduler_params.blocks_per_problem_ / Blocks; }

  // A cluster's tiles are consecutive in the base class' order, as its blocks.
  CUTLASS_DEVICE WorkTileInfo tile_of(uint32_t cluster) const {
    bool along_n = this->scheduler_params.raster_order_ == Base::RasterOrder::AlongN;
    uint32_t block = along_n ? blockIdx.x + blockIdx.y * gridDim.x : blockIdx.x * gridDim.y + blockIdx.y;
    return this->get_current_work_for_linear_idx(uint64_t(cluster) * Blocks + block % Blocks);
  }
};

}  // namespace mfp8

template <class TileShape, class ClusterShape, uint32_t Stages>
struct cutlass::gemm::kernel::detail::TileSchedulerSelector<mfp8::Counted, cutlass::arch::Sm90, TileShape, ClusterShape,
                                                            Stages> {
  using Scheduler = mfp8::CountedScheduler<ClusterShape>;
};
