// Tiles from a counter: a cluster of blocks takes the next ones as it gets on, until there are none.
//
//   shares          as many clusters as there is room for, each with its share of the tiles: where a collective holds
//                   some multiprocessors, clusters begin late, and everybody waits for their shares
//   a tile a block  nobody waits, but a tile's first loads begin when the tile before it has been written
//   counted         the next tile's loads run while a tile is written, and a late cluster finds what is left, or nothing
//
// CUTLASS' cooperative kernel takes a scheduler of this form, for Blackwell, whose hardware hands tiles out: a warp of
// each block fetches the next number, and the others read it in shared memory (sm90_gemm_tma_warpspecialized_
// cooperative.hpp, where IsSchedDynamicPersistent). Here the cluster's first block counts in global memory, and writes
// the number into the shared memory of all its blocks.
#pragma once

#include "cutlass/arch/barrier.h"
#include "cutlass/gemm/kernel/tile_scheduler.hpp"

namespace mfp8 {

struct Counted {};  // names it to CUTLASS

template <class ClusterShape>
class CountedScheduler : public cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90 {
  using Base = cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90;
  static constexpr uint32_t Blocks = cute::size(ClusterShape{});

 public:
  static constexpr bool IsDynamicPersistent = true;

  struct Arguments : Base::Arguments {
    uint32_t* counter = nullptr;  // in global memory, zero, and zero again when the kernel has ended
  };
  struct Params : Base::Params {
    uint32_t* counter = nullptr;
  };

  // What the fetching warps write (the kernel's name for it). The second is fetched while the first may still be read.
  struct CLCResponse {
    uint32_t first, next;
  };

  // A number, from the first block of a cluster to all warps of all its blocks; then the next.
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
      cutlass::arch::ClusterTransactionBarrier full;  // of each block: its number is there
      cutlass::arch::ClusterBarrier empty;            // of the first: every warp of the cluster has read
    };

    CUTLASS_DEVICE Pipeline(SharedStorage& storage, Params const& params) : storage_(storage) {
      if (threadIdx.x == 0) {
        storage.full.init(1);
        storage.empty.init(params.consumer_arv_count / cutlass::NumThreadsPerWarp * Blocks);
      }
      cutlass::arch::fence_barrier_init();
    }

    CUTLASS_DEVICE void wait_empty(PipelineState state) { storage_.empty.wait(state.phase()); }

    // By one thread of each block: one number will come.
    CUTLASS_DEVICE void expect() { storage_.full.arrive_and_expect_tx(sizeof(uint32_t)); }

    CUTLASS_DEVICE void send(uint32_t value, uint32_t* to, uint32_t block) {
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

    // The first block ends when nobody signals to it any more.
    CUTLASS_DEVICE void producer_tail(PipelineState state) {
      if (cute::block_rank_in_cluster() == 0) wait_empty(state);
    }

   private:
    SharedStorage& storage_;
  };

  // What keeps the fetching warp from going ahead: nothing, as the pipeline holds one number.
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

  CUTLASS_DEVICE explicit CountedScheduler(Params const& params) : Base(params), counter_(params.counter) {}

  CUTLASS_DEVICE void set_data_ptr(CLCResponse* data) { data_ = data; }

  // By all threads of a cluster, each once: also the first tile is counted, for a cluster may begin when all is done.
  template <class Cluster>
  CUTLASS_DEVICE WorkTileInfo initial_work_tile_info(Cluster) {
    if (threadIdx.x == 0 && cute::block_rank_in_cluster() == 0) {
      uint32_t taken = take(), here = cute::cast_smem_ptr_to_uint(&data_->first);
      for (uint32_t block = 0; block < Blocks; ++block) {
        asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(cute::set_block_rank(here, block)), "r"(taken) : "memory");
      }
    }
    cute::cluster_arrive();
    cute::cluster_wait();
    return tile_of(*reinterpret_cast<uint32_t const volatile*>(&data_->first));
  }

  // By the fetching warp of each block.
  CUTLASS_DEVICE typename Pipeline::PipelineState advance_to_next_work(Pipeline& pipeline,
                                                                      typename Pipeline::PipelineState state) {
    bool first = cute::block_rank_in_cluster() == 0;
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

  // By every warp that has to do with tiles.
  CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo, Pipeline& pipeline, typename Pipeline::PipelineState state) {
    return cute::make_tuple(tile_of(pipeline.read(state, &data_->next)), true);
  }
  using Base::fetch_next_work;

 private:
  // Each cluster takes numbers until one is beyond the tiles, so it is known which is the last of all: it sets back.
  CUTLASS_DEVICE uint32_t take() {
    uint32_t taken = atomicAdd(counter_, 1u);
    uint32_t tiles = scheduler_params.blocks_per_problem_ / Blocks, clusters = gridDim.x * gridDim.y / Blocks;
    if (taken == tiles + clusters - 1) atomicExch(counter_, 0u);
    return taken;
  }

  // This block's of a cluster of tiles. In the base class' order those of a cluster follow each other, as its blocks do.
  CUTLASS_DEVICE WorkTileInfo tile_of(uint32_t cluster) const {
    bool along_n = scheduler_params.raster_order_ == RasterOrder::AlongN;
    uint32_t block = along_n ? blockIdx.x + blockIdx.y * gridDim.x : blockIdx.x * gridDim.y + blockIdx.y;
    return get_current_work_for_linear_idx(uint64_t(cluster) * Blocks + block % Blocks);
  }

  uint32_t* counter_;
  CLCResponse* data_ = nullptr;
};

}  // namespace mfp8

template <class TileShape, class ClusterShape, uint32_t Stages>
struct cutlass::gemm::kernel::detail::TileSchedulerSelector<mfp8::Counted, cutlass::arch::Sm90, TileShape, ClusterShape,
                                                            Stages> {
  using Scheduler = mfp8::CountedScheduler<ClusterShape>;
};
