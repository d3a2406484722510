// Weight gradients by CUTLASS' own grouped kernels, without and with its promotion (every 128 of K).
#include "ptr_array.cuh"

namespace mfp8 {

using namespace cutlass::gemm;
using namespace cutlass::epilogue;

static const GroupedEntry entries[] = {
    PtrArray<E5M2, E4M3, BF16, 128, 256, 2, 1, KernelPtrArrayTmaWarpSpecializedCooperativeFP8FastAccum,
             PtrArrayTmaWarpSpecializedCooperative, Groups::Sum>::entry(0, 0),
    PtrArray<E5M2, E4M3, BF16, 128, 128, 2, 1, KernelPtrArrayTmaWarpSpecializedCooperative,
             PtrArrayTmaWarpSpecializedCooperative, Groups::Sum>::entry(128, 0),
};

extern const GroupedFamily ptr_array_sum = grouped_family(entries);

}  // namespace mfp8
