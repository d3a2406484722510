// CUTLASS' own grouped kernels: forward, and weight gradients without and with its promotion (every 128 of K).
#include "ptr_array.cuh"

namespace mfp8 {

using namespace cutlass::gemm;
using namespace cutlass::epilogue;

static const GroupedEntry entries[] = {
    PtrArray<E4M3, E4M3, BF16, 128, 256, 2, 1, KernelPtrArrayTmaWarpSpecializedCooperativeFP8FastAccum,
             PtrArrayTmaWarpSpecializedCooperative, Groups::Rows>::entry(0, 0),
    PtrArray<E4M3, E4M3, BF16, 128, 128, 2, 1, KernelPtrArrayTmaWarpSpecializedPingpongFP8FastAccum,
             PtrArrayTmaWarpSpecializedPingpong, Groups::Rows>::entry(0, 1),
    PtrArray<E5M2, E4M3, BF16, 128, 256, 2, 1, KernelPtrArrayTmaWarpSpecializedCooperativeFP8FastAccum,
             PtrArrayTmaWarpSpecializedCooperative, Groups::Sum>::entry(0, 0),
    PtrArray<E5M2, E4M3, BF16, 128, 128, 2, 1, KernelPtrArrayTmaWarpSpecializedCooperative,
             PtrArrayTmaWarpSpecializedCooperative, Groups::Sum>::entry(128, 0),
};

extern const GroupedFamily ptr_array = family(entries);

}  // namespace mfp8
