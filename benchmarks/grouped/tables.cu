// Tiles and clusters to compare with those of megatron_fp8/gemm/csrc/*_grouped.cu.
#include "grouped.cuh"

namespace mfp8 {

static const GroupedEntry entries[] = {
    GroupedTiled<E4M3, E4M3, BF16, 128, 256, 1, 1, Groups::Rows>::fast(),
    GroupedTiled<E5M2, E4M3, BF16, 128, 256, 1, 1, Groups::Rows>::promoted<256, 128>(),
    GroupedTiled<E5M2, E4M3, BF16, 256, 128, 1, 2, Groups::Sum>::promoted<256>(),
};

extern const GroupedFamily tables = family(entries);

}  // namespace mfp8
