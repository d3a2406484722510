// Forward by CUTLASS' own grouped kernels.
#include "ptr_array.cuh"

namespace mfp8 {

using namespace cutlass::gemm;
using namespace cutlass::epilogue;

static const GroupedEntry entries[] = {
    PtrArray<E4M3, E4M3, BF16, 128, 256, 2, 1, KernelPtrArrayTmaWarpSpecializedCooperativeFP8FastAccum,
             PtrArrayTmaWarpSpecializedCooperative, Groups::Rows>::entry(0, 0),
    PtrArray<E4M3, E4M3, BF16, 128, 128, 2, 1, KernelPtrArrayTmaWarpSpecializedPingpongFP8FastAccum,
             PtrArrayTmaWarpSpecializedPingpong, Groups::Rows>::entry(0, 1),
};

extern const GroupedFamily ptr_array_rows = grouped_family(entries);

}  // namespace mfp8
