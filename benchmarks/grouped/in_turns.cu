// Forward by warp groups that take turns (CUTLASS' pingpong): one writes a tile while the other multiplies the next. A
// block has a fixed share of the tiles, because a group must know the other's in advance.
#include "grouped.cuh"

namespace mfp8 {

struct InTurns {};  // the tag by which CUTLASS selects this scheduler

template <class ClusterShape>
class SharesScheduler : public cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90 {
  using Base = cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90;
  static constexpr int Blocks = cute::size(ClusterShape{}), ClusterN = cute::size<1>(ClusterShape{});
  static_assert(Blocks == ClusterN);

 public:
  using Grouped = GroupedScheduler<ClusterShape, Groups::Rows>;
  using Arguments = typename Grouped::Arguments;
  using Params = typename Grouped::Params;

  template <class... Args>
  static Params to_underlying_arguments(Args&&... args) {
    return Grouped::to_underlying_arguments(args...);
  }

  CUTLASS_DEVICE explicit SharesScheduler(Params const& params) : Base(params), params_(params) {
    bool along_n = params.raster_order_ == RasterOrder::AlongN;
    at_ = along_n ? blockIdx.x + blockIdx.y * gridDim.x : blockIdx.x * gridDim.y + blockIdx.y;
    clusters_ = params.clusters_n * params.first[params.experts];
  }

  CUTLASS_DEVICE WorkTileInfo get_current_work() const {
    uint32_t cluster = at_ / Blocks;
    if (cluster >= clusters_) return WorkTileInfo::invalid_work_tile();
    return {int32_t(cluster / params_.clusters_n), int32_t(cluster % params_.clusters_n * ClusterN + at_ % Blocks), 0, true};
  }

  CUTLASS_DEVICE WorkTileInfo initial_work_tile_info(ClusterShape) { return get_current_work(); }
  CUTLASS_DEVICE void advance_to_next_work(uint32_t count = 1) { at_ += gridDim.x * gridDim.y * count; }

 private:
  Params const& params_;
  uint32_t at_, clusters_;
};

}  // namespace mfp8

template <class TileShape, class ClusterShape, uint32_t Stages>
struct cutlass::gemm::kernel::detail::TileSchedulerSelector<mfp8::InTurns, cutlass::arch::Sm90, TileShape, ClusterShape,
                                                            Stages> {
  using Scheduler = mfp8::SharesScheduler<ClusterShape>;
};

namespace mfp8 {

template <int M, int N, int ClusterN>
struct Turns {
  using Tile = Shape<Int<M>, Int<N>, _128>;
  using Cluster = Shape<_1, Int<ClusterN>, _1>;
  using Schedule = cutlass::epilogue::TmaWarpSpecialized;
  using Dense = EpilogueOf<Tile, Cluster, BF16, Schedule>;
  using Multiply = fusion::Sm90Compute<cutlass::multiplies, float, float, cutlass::FloatRoundStyle::round_to_nearest>;
  using Scaled = fusion::Sm90EVT<Multiply, ExpertScale, fusion::Sm90AccFetch>;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      Sm90, TensorOp, Tile, Cluster, typename Dense::Subtile, float, float, void, RowMajor, Dense::Aligned, BF16,
      RowMajor, Dense::Aligned, Schedule, Scaled>::CollectiveOp;
  using Mma = FastMma<E4M3, E4M3, Tile, Cluster, Epilogue, cutlass::gemm::KernelTmaWarpSpecializedPingpongFP8FastAccum>;
  using Mainloop = GroupedMma<Mma, Groups::Rows>;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, Mainloop, Epilogue, InTurns>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  static int run(const mfp8_grouped_args& p, int sms, uint32_t*) {
    auto first = static_cast<const int32_t*>(p.first), expert = static_cast<const int32_t*>(p.expert);
    int64_t m = p.m, n = p.n, k = p.k;
    typename Kernel::StrideD rows_d{n, _1{}, m * n};
    typename Gemm::Arguments arguments{
        cutlass::gemm::GemmUniversalMode::kGemm,
        {p.m, p.n, p.k, p.experts},
        {{static_cast<const E4M3*>(p.a), {k, _1{}, m * k}, static_cast<const E4M3*>(p.b), {k, _1{}, p.step_b}}, expert},
        {{{static_cast<const float*>(p.scale_a), static_cast<const float*>(p.scale_b), expert}, {}, {}},
         nullptr, {}, static_cast<BF16*>(p.d), rows_d}};
    arguments.hw_info.device_id = p.device;
    arguments.hw_info.sm_count = sms;
    arguments.scheduler.first = first;
    arguments.scheduler.expert = expert;
    arguments.scheduler.experts = p.experts;
    if (Gemm::can_implement(arguments) != cutlass::Status::kSuccess) return MFP8_UNFIT;
    Gemm gemm;
    auto stream = static_cast<cudaStream_t>(p.stream);
    if (gemm.initialize(arguments, nullptr, stream) != cutlass::Status::kSuccess) return MFP8_FAILED;
    return gemm.run(stream) == cutlass::Status::kSuccess ? MFP8_OK : MFP8_FAILED;
  }

  static constexpr GroupedEntry entry() {
    constexpr int Stages = Mma::DispatchPolicy::Stages, Bytes = Kernel::SharedStorageSize;
    return {{MFP8_E4M3, MFP8_E4M3, MFP8_BF16, 0, M, N, 1, ClusterN, 1, Stages, Bytes}, 0, &run};
  }
};

static const GroupedEntry entries[] = {Turns<128, 128, 2>::entry(), Turns<128, 192, 1>::entry()};

extern const GroupedFamily in_turns = family(entries);

}  // namespace mfp8
