// CUTLASS' own grouped kernels (GemmUniversalMode::kGrouped), to compare with grouped.cuh: an array of pointers, shapes
// and strides, made on the device from the counts, and tensor maps that the kernel rewrites for each expert.
//
// The same operands as in grouped.cuh, with the rows of padding. If an expert has no rows, its sum (wgrad) is what the
// registers held.
#pragma once

#include <cuda_runtime.h>

#include "cutlass/gemm/group_array_problem_shape.hpp"
#include "grouped.cuh"

namespace mfp8 {

struct PtrArrayTables {
  const void **a, **b;
  void** d;
  const float** alpha;
  float* scale;
  int64_t *stride_a, *stride_b, *stride_d;
  int32_t* shape;  // m, n, k

  static constexpr int64_t Bytes = 10 * 8;  // an expert's, at most

  PtrArrayTables(void* at, int experts) {
    auto take = [&](auto*& pointer, int each) {
      pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(at);
      at = static_cast<char*>(at) + int64_t(experts) * each;
    };
    take(a, 8), take(b, 8), take(d, 8), take(alpha, 8), take(stride_a, 8), take(stride_b, 8), take(stride_d, 8);
    take(scale, 4), take(shape, 12);
  }
};

template <class Out>
__global__ void fill_ptr_array(PtrArrayTables to, mfp8_grouped_args p, bool sums) {
  int e = blockIdx.x * blockDim.x + threadIdx.x;
  if (e >= p.experts) return;
  auto first = static_cast<const int32_t*>(p.first) + e;
  int64_t row = int64_t(first[0]) * GroupTile;
  int count = (first[1] - first[0]) * GroupTile;
  auto a = static_cast<const char*>(p.a), b = static_cast<const char*>(p.b);  // FP8: a byte each
  auto d = static_cast<Out*>(p.d);
  int64_t n = p.n, k = p.k;
  to.a[e] = sums ? a + row : a + row * k;
  to.b[e] = sums ? b + row : b + e * p.step_b;
  to.d[e] = sums ? d + e * p.step_d : d + row * n;
  to.stride_a[e] = to.stride_b[e] = k;
  to.stride_d[e] = n;
  to.shape[3 * e] = sums ? p.m : count;
  to.shape[3 * e + 1] = p.n;
  to.shape[3 * e + 2] = sums ? count : p.k;
  to.scale[e] = static_cast<const float*>(p.scale_a)[e] * static_cast<const float*>(p.scale_b)[e];
  to.alpha[e] = to.scale + e;
}

constexpr int64_t WorkspaceBytes = 8 << 20;

// Memory for tables and tensor maps, made by the first call. Products on one stream share it.
inline void* ptr_array_workspace() {
  static void* made = [] {
    void* at = nullptr;
    return cudaMalloc(&at, WorkspaceBytes) == cudaSuccess ? at : nullptr;
  }();
  return made;
}

template <class A, class B, class Out, int M, int N, int ClusterM, int ClusterN, class Schedule, class After, Groups G>
struct PtrArray {
  using Tile = Shape<Int<M>, Int<N>, _128>;
  using Cluster = Shape<Int<ClusterM>, Int<ClusterN>, _1>;
  static constexpr int Aligned = 16 / sizeof(Out);
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      Sm90, TensorOp, Tile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto, float, float, Out, RowMajor*,
      Aligned, Out, RowMajor*, Aligned, After, fusion::LinearCombination<Out, float>>::CollectiveOp;
  using Mainloop = typename collective::CollectiveBuilder<Sm90, TensorOp, A, RowMajor*, 16, B, ColumnMajor*, 16, float,
                                                          Tile, Cluster, StagesBeside<Epilogue>, Schedule>::CollectiveOp;
  using Problem = cutlass::gemm::GroupProblemShape<Shape<int, int, int>>;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<Problem, Mainloop, Epilogue>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  static int run(const mfp8_grouped_args& p, int sms, uint32_t*) {
    auto stream = static_cast<cudaStream_t>(p.stream);
    void* workspace = ptr_array_workspace();
    int64_t tables = (PtrArrayTables::Bytes * p.experts + 255) / 256 * 256;
    if (workspace == nullptr || WorkspaceBytes < tables) return MFP8_UNFIT;
    PtrArrayTables at(workspace, p.experts);
    fill_ptr_array<Out><<<(p.experts + 127) / 128, 128, 0, stream>>>(at, p, G == Groups::Sum);
    typename Gemm::Arguments arguments;
    arguments.mode = cutlass::gemm::GemmUniversalMode::kGrouped;
    using Sides = typename Problem::UnderlyingProblemShape;
    static_assert(sizeof(Sides) == 12 && sizeof(typename Kernel::InternalStrideA) == 8);
    arguments.problem_shape = {p.experts, reinterpret_cast<Sides*>(at.shape), nullptr};
    arguments.mainloop = {reinterpret_cast<const A**>(at.a), reinterpret_cast<typename Kernel::InternalStrideA*>(at.stride_a),
                          reinterpret_cast<const B**>(at.b), reinterpret_cast<typename Kernel::InternalStrideB*>(at.stride_b)};
    arguments.epilogue.thread.alpha_ptr_array = at.alpha;
    arguments.epilogue.thread.dAlpha = {_0{}, _0{}, 1};
    arguments.epilogue.thread.beta = 0.f;
    arguments.epilogue.ptr_C = nullptr;
    arguments.epilogue.dC = reinterpret_cast<typename Kernel::InternalStrideC*>(at.stride_d);
    arguments.epilogue.ptr_D = reinterpret_cast<Out**>(at.d);
    arguments.epilogue.dD = reinterpret_cast<typename Kernel::InternalStrideD*>(at.stride_d);
    arguments.hw_info.device_id = p.device;
    arguments.hw_info.sm_count = sms;
    if (Gemm::can_implement(arguments) != cutlass::Status::kSuccess) return MFP8_UNFIT;
    if (int64_t(Gemm::get_workspace_size(arguments)) > WorkspaceBytes - tables) return MFP8_UNFIT;
    Gemm gemm;
    auto status = gemm.initialize(arguments, static_cast<char*>(workspace) + tables, stream);
    if (status != cutlass::Status::kSuccess) return MFP8_FAILED;
    return gemm.run(stream) == cutlass::Status::kSuccess ? MFP8_OK : MFP8_FAILED;
  }

  static constexpr GroupedEntry entry(int promote, int pingpong) {
    constexpr int Stages = Mainloop::DispatchPolicy::Stages, Bytes = Kernel::SharedStorageSize;
    return {{type_code<A>, type_code<B>, type_code<Out>, promote, M, N, ClusterM, ClusterN, pingpong, Stages, Bytes},
            G == Groups::Sum, &run};
  }
};

}  // namespace mfp8
