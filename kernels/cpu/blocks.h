// Weights in blocks: kBlockInputs inputs of one output, each a code of 4 or 8 bits, worth code * scale + least.
//
// That is what files with quantized weights hold (Q4_0, Q4_1, Q8_0 of GGUF), and what is lost when they are loaded as
// float32. Whether weights are blocks is found out from the numbers themselves, exactly: then nothing else has to be
// known of the file, its names or the order of its rows. The bits of every weight stay what they were.
#pragma once

#include <cstdint>

#include "linear.h"

namespace octavo {

constexpr int64_t kBlockInputs = 32;

// Stored, panel by panel and block by block:
//   4 bits: kPanel scales and kPanel leasts in float16, then for each half of the panel 4 vectors of bytes, lane by
//           lane 4 inputs; the low half of a byte is of input 4 * vector + i, the high half of the 16th behind it
//   8 bits: kPanel scales in float16, then for each half 8 vectors of bytes; the code is unsigned, least -128 * scale
constexpr int64_t block_bytes(int32_t bits) {
  return bits == 4 ? 4 * kPanel + kPanel * kBlockInputs / 2 : 2 * kPanel + kPanel * kBlockInputs;
}

// How many bits the codes of these weights have: 4, 8, or 0 where they are no blocks.
int32_t find_block_bits(const float* weights, int64_t num_outputs, int64_t num_inputs);

// Fills linear.weights. The weights were found to be blocks of linear.block_bits.
void pack_blocks(const Linear& linear, const float* weights);

// Tokens [begin, end), at most kUnpackedRows, by panels [first, last).
void multiply_blocks(const Linear& linear, const Rows2d& in, int64_t begin, int64_t end, int64_t first, int64_t last,
                     const Product& product);

}  // namespace octavo
