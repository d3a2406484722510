// Weight gradients of all experts in FP32.
#include "grouped.cuh"

namespace mfp8 {

static const GroupedEntry entries[] = {
    GroupedTiled<E5M2, E4M3, FP32, 128, 256, 2, 1, Groups::Sum>::promoted<256, 128>(),
};

extern const GroupedFamily sum_fp32 = grouped_family(entries);

}  // namespace mfp8
