// dgrad of all experts: E5M2 x E4M3, promoted every 256 of K.
#include "grouped.cuh"

namespace mfp8 {

static const GroupedEntry entries[] = {
    GroupedTiled<E5M2, E4M3, BF16, 128, 256, 1, 2, Groups::Rows>::promoted<256, 128>(),
    GroupedTiled<E5M2, E4M3, BF16, 128, 128, 1, 2, Groups::Rows>::promoted<256>(),
};

extern const GroupedFamily rows_e5m2 = grouped_family(entries);

}  // namespace mfp8
