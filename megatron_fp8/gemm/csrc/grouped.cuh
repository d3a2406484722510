// Grouped GEMMs for mixtures of experts: all experts' products in one launch, without a wait for their counts.
//
// The rows of all experts lie in one matrix (R, K), sorted by expert, each expert's padded with zero rows to a multiple
// of 128. So a tile of 128 rows belongs to one expert, an operand needs one tensor map, and CUTLASS' ordinary kernel
// multiplies. New is only which tile a block takes, and from where it loads:
//
//     Rows   D (R, N)    = A (R, K) B_e (N, K)^T       forward, dgrad     e = expert[m], of the tile of rows m
//     Sum    D_e (M, N)  = A (M, R) B (N, R)^T         wgrad              sums over expert e's part of R alone
//
// Two tables in global memory, made on the device, tell where experts are: first[e] is the first tile of 128 rows of
// expert e, with first[experts] their number; expert[m] is the expert of tile m. Tiles of rows beyond first[experts]
// are neither read nor written. An expert without rows has zeros as its sum.
//
// CUTLASS' own grouped kernels rewrite tensor maps on the device for each expert instead; benchmarks/grouped_gemm.py
// compares. DeepGEMM's "contiguous" layout has the same idea for the forward pass.
#pragma once

#include "gemm.cuh"

namespace mfp8 {

enum class Groups { Rows, Sum };
constexpr int GroupTile = 128;  // rows of a tile, to whose multiple an expert's rows are padded

template <Groups>
struct Grouped {};  // the tag by which CUTLASS selects this scheduler

// The tiles of all experts. They are numbered along N first: the blocks that run at a time then read all of few experts'
// B, and few rows of A, from the L2 cache.
template <class ClusterShape, Groups G>
class GroupedScheduler : public NumberTaker<ClusterShape, GroupedScheduler<ClusterShape, G>> {
  using Base = NumberTaker<ClusterShape, GroupedScheduler<ClusterShape, G>>;
  static constexpr int ClusterM = cute::size<0>(ClusterShape{}), ClusterN = cute::size<1>(ClusterShape{});
  static_assert(G == Groups::Sum || ClusterM == 1, "neighbours along rows may belong to two experts");

 public:
  struct Tables {
    const int32_t *first = nullptr, *expert = nullptr;
    int32_t experts = 0;
  };
  struct Arguments : Base::Arguments, Tables {};
  struct Params : Base::Params, Tables {
    uint32_t clusters_m = 0, clusters_n = 0;  // of D, or of one expert's D
  };
  struct WorkTileInfo : Base::WorkTileInfo {
    int32_t k_start = 0, k_count = 0;  // in tiles; of Sum
  };

  template <class Problem, class Tile, class Cluster>
  static Params to_underlying_arguments(Problem problem, Tile tile, Cluster cluster,
                                        cutlass::KernelHardwareInfo const& hw_info, Arguments const& arguments,
                                        void* workspace, uint32_t subtiles) {
    Params params;
    static_cast<typename Base::Params&>(params) =
        Base::to_underlying_arguments(problem, tile, cluster, hw_info, arguments, workspace, subtiles);
    static_cast<Tables&>(params) = arguments;
    params.clusters_m = ceil_div(int(get<0>(problem)), int(size<0>(tile)) * ClusterM);
    params.clusters_n = ceil_div(int(get<1>(problem)), int(size<1>(tile)) * ClusterN);
    return params;
  }

  CUTLASS_DEVICE explicit GroupedScheduler(Params const& params) : Base(params), params_(params) {
    uint32_t along_m = G == Groups::Rows ? params.first[params.experts] : params.clusters_m * params.experts;
    clusters_ = params.clusters_n * along_m;
  }

  CUTLASS_DEVICE uint32_t clusters() const { return clusters_; }

  CUTLASS_DEVICE WorkTileInfo tile_of(uint32_t cluster) const {
    WorkTileInfo work;
    if (cluster >= clusters_) return work;
    uint32_t along_m = cluster / params_.clusters_n;
    work.N_idx = cluster % params_.clusters_n * ClusterN;
    if constexpr (ClusterN > 1) work.N_idx += cute::block_id_in_cluster().y;
    work.is_valid_tile = true;
    if constexpr (G == Groups::Rows) {
      work.M_idx = along_m;
    } else {
      uint32_t expert = along_m / params_.clusters_m;
      work.M_idx = along_m % params_.clusters_m * ClusterM;
      if constexpr (ClusterM > 1) work.M_idx += cute::block_id_in_cluster().x;
      work.L_idx = expert;
      work.k_start = params_.first[expert];
      work.k_count = params_.first[expert + 1] - work.k_start;
    }
    return work;
  }

  template <class Problem, class Tile>
  CUTLASS_DEVICE static int get_work_k_tile_count(WorkTileInfo const& work, Problem problem, Tile tile) {
    return G == Groups::Sum ? work.k_count : Base::get_work_k_tile_count(work, problem, tile);
  }

  CUTLASS_DEVICE static uint32_t get_work_k_tile_start(WorkTileInfo const& work) {
    return G == Groups::Sum ? work.k_start : 0;
  }

 private:
  Params const& params_;
  uint32_t clusters_;
};

// A main loop that finds a tile's expert. The tensor maps have an axis of experts; A's, and in sums B's, use its 0 only.
template <class Base, Groups G>
struct GroupedMma : Base {
  using typename Base::MainloopPipeline;
  using typename Base::PipelineState;
  using typename Base::TensorStorage;

  struct Arguments : Base::Arguments {
    const int32_t* expert = nullptr;
  };
  struct Params : Base::Params {
    const int32_t* expert = nullptr;
  };

  template <class Problem>
  static Params to_underlying_arguments(Problem const& problem, Arguments const& arguments, void* workspace) {
    Params params;
    static_cast<typename Base::Params&>(params) = Base::to_underlying_arguments(problem, arguments, workspace);
    params.expert = arguments.expert;
    return params;
  }

  template <class TensorA, class TensorB, class Iterator, class Coord>
  CUTLASS_DEVICE void load(Params const& params, MainloopPipeline pipeline, PipelineState write,
                           cute::tuple<TensorA, TensorB> const& inputs, Coord const& at, Iterator k, int k_tiles,
                           int thread, uint32_t rank, TensorStorage& tensors) {
    auto block = make_coord(get<0>(at), get<1>(at), _, 0);
    if constexpr (G == Groups::Rows) {
      Tensor b = domain_offset(make_coord(0, 0, 0, 0, params.expert[get<0>(at)]), get<1>(inputs));
      Base::load(params, pipeline, write, cute::make_tuple(get<0>(inputs), b), block, k, k_tiles, thread, rank, tensors);
    } else {
      Base::load(params, pipeline, write, inputs, block, k, k_tiles, thread, rank, tensors);
    }
  }

  template <class Accumulators>
  CUTLASS_DEVICE void mma(MainloopPipeline pipeline, PipelineState read, Accumulators& sums, int k_tiles, int thread,
                          TensorStorage& tensors, Params const& params) {
    if (G == Groups::Sum && k_tiles == 0) {  // CUTLASS' fast loop would leave what the registers held
      clear(sums);
    } else {
      Base::mma(pipeline, read, sums, k_tiles, thread, tensors, params);
    }
  }
};

// scale_a[e] scale_b[e] of a tile's expert e.
struct ExpertScale {
  struct SharedStorage {};
  struct Arguments {
    const float *a = nullptr, *b = nullptr;
    const int32_t* expert = nullptr;  // of a tile of rows; null: the batch is the expert
  };
  using Params = Arguments;

  template <class Problem>
  static constexpr Params to_underlying_arguments(Problem const&, Arguments const& arguments, void*) {
    return arguments;
  }
  template <class Problem>
  static bool can_implement(Problem const&, Arguments const&) {
    return true;
  }
  template <class Problem>
  static size_t get_workspace_size(Problem const&, Arguments const&) {
    return 0;
  }
  template <class Problem>
  static cutlass::Status initialize_workspace(Problem const&, Arguments const&, void*, cudaStream_t,
                                              cutlass::CudaHostAdapter* = nullptr) {
    return cutlass::Status::kSuccess;
  }

  CUTLASS_HOST_DEVICE ExpertScale() {}
  CUTLASS_HOST_DEVICE ExpertScale(Params const& params, SharedStorage const&) : params_(&params) {}
  CUTLASS_DEVICE bool is_producer_load_needed() const { return false; }
  CUTLASS_DEVICE bool is_C_load_needed() const { return false; }
  template <class... Args>
  CUTLASS_DEVICE auto get_producer_load_callbacks(fusion::ProducerLoadArgs<Args...> const&) {
    return fusion::EmptyProducerLoadCallbacks{};
  }

  struct Callbacks : fusion::EmptyConsumerStoreCallbacks {
    float scale;
    CUTLASS_DEVICE explicit Callbacks(float scale) : scale(scale) {}
    template <class T, int Count>
    CUTLASS_DEVICE cutlass::Array<float, Count> visit(cutlass::Array<T, Count> const&, int, int, int) {
      cutlass::Array<float, Count> values;
      values.fill(scale);
      return values;
    }
  };

  template <bool, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(fusion::ConsumerStoreArgs<Args...> const& args) {
    auto [m, n, k, l] = args.tile_coord_mnkl;
    int e = params_->expert == nullptr ? int(l) : params_->expert[m];
    return Callbacks(params_->a[e] * params_->b[e]);
  }

 private:
  Params const* params_ = nullptr;
};

template <class Tile, class Cluster, class Out>
struct GroupedEpilogueOf {
  using Dense = EpilogueOf<Tile, Cluster, Out, cutlass::epilogue::TmaWarpSpecializedCooperative>;
  using Multiply = fusion::Sm90Compute<cutlass::multiplies, float, float, cutlass::FloatRoundStyle::round_to_nearest>;
  using Scaled = fusion::Sm90EVT<Multiply, ExpertScale, fusion::Sm90AccFetch>;
  using Tree = fusion::Sm90EVT<typename Dense::template MultiplyAdd<Out>, typename Dense::Beta, fusion::Sm90SrcFetch<Out>,
                               Scaled>;
  using Op = typename cutlass::epilogue::collective::CollectiveBuilder<
      Sm90, TensorOp, Tile, Cluster, typename Dense::Subtile, float, float, Out, RowMajor, Dense::Aligned, Out, RowMajor,
      Dense::Aligned, cutlass::epilogue::TmaWarpSpecializedCooperative, Tree>::CollectiveOp;
};

template <class Dense, class Epilogue, Groups G>
struct GroupedLaunch {
  using Mainloop = GroupedMma<Dense, G>;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, Mainloop, Epilogue, Grouped<G>>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  static int run(const mfp8_grouped_args& p, int sms, uint32_t* counter) {
    using Out = typename Epilogue::ElementD;
    auto a = static_cast<const typename Kernel::ElementA*>(p.a);
    auto b = static_cast<const typename Kernel::ElementB*>(p.b);
    auto d = static_cast<Out*>(p.d);
    auto scale_a = static_cast<const float*>(p.scale_a), scale_b = static_cast<const float*>(p.scale_b);
    auto first = static_cast<const int32_t*>(p.first), expert = static_cast<const int32_t*>(p.expert);
    float beta = p.accumulate ? 1.f : 0.f;
    // A map's axis of experts needs a stride also if only its 0 is used.
    int64_t m = p.m, n = p.n, k = p.k;
    typename Kernel::StrideA rows_a{k, _1{}, m * k};
    typename Kernel::StrideB rows_b{k, _1{}, G == Groups::Rows ? p.step_b : n * k};
    typename Kernel::StrideD rows_d{n, _1{}, G == Groups::Sum ? p.step_d : m * n};
    typename Gemm::Arguments arguments{
        cutlass::gemm::GemmUniversalMode::kGemm,
        {p.m, p.n, p.k, p.experts},
        {{a, rows_a, b, rows_b}, expert},
        {{{{beta}, {nullptr}, {}},
          {},
          {{scale_a, scale_b, G == Groups::Rows ? expert : nullptr}, {}, {}},
          {}},
         d, rows_d, d, rows_d}};
    arguments.hw_info.device_id = p.device;
    arguments.hw_info.sm_count = sms;
    arguments.scheduler.counter = counter;
    arguments.scheduler.first = first;
    arguments.scheduler.expert = expert;
    arguments.scheduler.experts = p.experts;
    return launched<Gemm>(arguments, static_cast<cudaStream_t>(p.stream));
  }
};

template <class A, class B, class Out, int M, int N, int ClusterM, int ClusterN, Groups G>
struct GroupedTiled {
  using Tile = Shape<Int<M>, Int<N>, _128>;
  using Cluster = Shape<Int<ClusterM>, Int<ClusterN>, _1>;
  using Epilogue = typename GroupedEpilogueOf<Tile, Cluster, Out>::Op;
  static_assert(G == Groups::Sum || M == GroupTile);

  template <class Mma>
  static constexpr GroupedEntry entry(int promote) {
    using L = GroupedLaunch<Mma, Epilogue, G>;
    constexpr int Stages = Mma::DispatchPolicy::Stages, Bytes = L::Kernel::SharedStorageSize;
    return {{type_code<A>, type_code<B>, type_code<Out>, promote, M, N, ClusterM, ClusterN, 0, Stages, Bytes},
            G == Groups::Sum, &L::run};
  }
  static constexpr GroupedEntry fast() {
    return entry<FastMma<A, B, Tile, Cluster, Epilogue, cutlass::gemm::KernelTmaWarpSpecializedCooperativeFP8FastAccum>>(0);
  }
  template <int Promote, int SliceN = N>
  static constexpr GroupedEntry promoted() {
    return entry<typename PromotedMmaOf<A, B, Tile, Cluster, Epilogue, Promote, SliceN>::Op>(Promote);
  }
};

}  // namespace mfp8

template <mfp8::Groups G, class TileShape, class ClusterShape, uint32_t Stages>
struct cutlass::gemm::kernel::detail::TileSchedulerSelector<mfp8::Grouped<G>, cutlass::arch::Sm90, TileShape,
                                                            ClusterShape, Stages> {
  using Scheduler = mfp8::GroupedScheduler<ClusterShape, G>;
};
