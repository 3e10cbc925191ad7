// Products of blocks, in float32 and in integers. A panel is unpacked, some blocks at a time, into memory that stays in
// the first cache, and meets all tokens of the call there.
//
// Integers: products of 4 and 8 bits can be added up in 16 bits for a whole block (15 * 127 * 2 * 8 < 2^15), so bytes
// are multiplied pair by pair (vpmaddubsw), twice as many in an instruction as 16-bit numbers, which codes of 8 bits
// need. With VNNI bytes are multiplied as they are.
#include <type_traits>

#include "blocks.h"

namespace octavo {
namespace {

constexpr int kTogether = 2;   // panels that one token alone is multiplied by at a time
constexpr int64_t kChunk = 8;  // blocks that are unpacked at a time

// ------------------------------------------------------------------------------------------------------------ integers

// dot4: 4 unsigned codes of each weight times 4 of the input, added to a sum that widen_sum makes 32 bits wide. At most
// kBlockInputs of them: the sum may have 16 bits. dot2, where bytes overflow: 2 codes of 16 bits each.
#if defined(__AVX512F__) && defined(__AVX512VNNI__) && !defined(OCTAVO_EMULATE_VNNI)
typedef __m512i Partial;
inline Partial dot4(Partial sum, Words weights, int32_t codes) {
  return _mm512_dpbusd_epi32(sum, (__m512i)weights, _mm512_set1_epi32(codes));
}
inline Words widen_sum(Partial sum) { return (Words)sum; }
#elif !defined(__AVX512F__) && defined(__AVXVNNI__) && !defined(OCTAVO_EMULATE_VNNI)
typedef __m256i Partial;
inline Partial dot4(Partial sum, Words weights, int32_t codes) {
  return _mm256_dpbusd_avx_epi32(sum, (__m256i)weights, _mm256_set1_epi32(codes));
}
inline Words widen_sum(Partial sum) { return (Words)sum; }
#elif defined(__AVX512BW__) && !defined(OCTAVO_EMULATE_VNNI)
typedef __m512i Partial;
inline Partial dot4(Partial sum, Words weights, int32_t codes) {
  // In assembly: else the compiler puts all products of a block first, and most of them into memory.
  asm("vpmaddubsw %2, %1, %%zmm31\n\tvpaddw %%zmm31, %0, %0"
      : "+v"(sum) : "v"(weights), "v"(_mm512_set1_epi32(codes)) : "xmm31");
  return sum;
}
inline Words widen_sum(Partial sum) { return (Words)_mm512_madd_epi16(sum, _mm512_set1_epi16(1)); }
inline Words dot2(Words sum, Words weights, int32_t codes) {
  return sum + (Words)_mm512_madd_epi16((__m512i)weights, _mm512_set1_epi32(codes));
}
#elif defined(__AVX2__) && !defined(__AVX512F__) && !defined(OCTAVO_EMULATE_VNNI)
typedef __m256i Partial;
inline Partial dot4(Partial sum, Words weights, int32_t codes) {
  __m256i products;  // in assembly: else the compiler puts all products of a block first, and most of them into memory
  asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0"
      : "+x"(sum), "=&x"(products) : "x"(weights), "x"(_mm256_set1_epi32(codes)));
  return sum;
}
inline Words widen_sum(Partial sum) { return (Words)_mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
inline Words dot2(Words sum, Words weights, int32_t codes) {
  __m256i products;
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0"
      : "+x"(sum), "=&x"(products) : "x"(weights), "x"(_mm256_set1_epi32(codes)));
  return sum;
}
#else
typedef Words Partial;
inline Partial dot4(Partial sum, Words weights, int32_t codes) {
  for (int i = 0; i < 4; ++i) sum += (weights >> (8 * i) & 255) * static_cast<int8_t>(codes >> (8 * i));
  return sum;
}
inline Words widen_sum(Partial sum) { return sum; }
inline Words dot2(Words sum, Words weights, int32_t codes) {
  return sum + (weights & 0xffff) * static_cast<int16_t>(codes) + (weights >> 16) * (codes >> 16);
}
#endif

// Inputs that one dot takes: those of codes of 8 bits are stored as `Code`s (linear.h).
template <int kBits>
constexpr int kDot = kBits == 4 ? 4 : kGroup;

template <int kBits>
using CodeOf = std::conditional_t<kBits == 4, int8_t, Code>;

// A chunk of a panel: codes as vectors, as dots take them, with scale and least of each output.
struct Codes {
  Words codes[kChunk][kBlockInputs / 2][2];  // [blocks][dots][halves]
  Floats scale[kChunk][2], least[kChunk][2];
};

// Weights are read once a step and little is computed with few tokens: memory is asked for them well before.
inline void prefetch_behind(const char* block, int64_t bytes) {
  constexpr int64_t kAhead = 2048;
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(block + kAhead + at);
}

// The same as numbers: [blocks * kBlockInputs][halves].
struct Numbers {
  Floats weights[kChunk * kBlockInputs][2];
};

inline Words load_words(const char* from) {
  Words words;
  std::memcpy(&words, from, sizeof words);
  return words;
}

inline Floats to_floats(Words words) { return __builtin_convertvector(words, Floats); }

// One half's scales and leasts of a stored block.
template <int kBits>
inline void load_scales(const char* from, int half, Floats& scale, Floats& least) {
  scale = load_float16(from + half * kLanes * 2);
  least = kBits == 4 ? load_float16(from + (kPanel + half * kLanes) * 2) : scale * -128.0f;
}

template <int kBits>
inline const char* codes_of(const char* block, int half) {
  return block + (kBits == 4 ? 4 : 2) * kPanel + half * (kBits == 4 ? 4 : 8) * kLanes * 4;
}

template <int kBits>
void unpack(const char* from, int64_t blocks, Codes& to) {
  for (int64_t block = 0; block < blocks; ++block, from += block_bytes(kBits)) {
    prefetch_behind(from, block_bytes(kBits));
    for (int half = 0; half < 2; ++half) {
      load_scales<kBits>(from, half, to.scale[block][half], to.least[block][half]);
      const char* codes = codes_of<kBits>(from, half);
      auto* dots = to.codes[block];
      for (int i = 0; i < (kBits == 4 ? 4 : 8); ++i) {
        Words bytes = load_words(codes + i * kLanes * 4);
        if (kBits == 4) {
          dots[i][half] = bytes & 0x0f0f0f0f;
          dots[i + 4][half] = bytes >> 4 & 0x0f0f0f0f;
        } else if (kDot<kBits> == 4) {
          dots[i][half] = bytes;
        } else {
          dots[2 * i][half] = (bytes & 0xff) | (bytes << 8 & 0xff0000);
          dots[2 * i + 1][half] = (bytes >> 16 & 0xff) | (bytes >> 8 & 0xff0000);
        }
      }
    }
  }
}

template <int kBits>
void unpack(const char* from, int64_t blocks, Numbers& to) {
  for (int64_t block = 0; block < blocks; ++block, from += block_bytes(kBits)) {
    prefetch_behind(from, block_bytes(kBits));
    auto* numbers = to.weights + block * kBlockInputs;
    for (int half = 0; half < 2; ++half) {
      Floats scale, least;
      load_scales<kBits>(from, half, scale, least);
      const char* codes = codes_of<kBits>(from, half);
      for (int vector = 0; vector < (kBits == 4 ? 4 : 8); ++vector) {
        Words bytes = load_words(codes + vector * kLanes * 4);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          Words code = bytes >> (8 * i) & (kBits == 4 ? 15 : 255);
          numbers[vector * 4 + i][half] = to_floats(code) * scale + least;
          if (kBits == 4) {
            numbers[16 + vector * 4 + i][half] = to_floats(bytes >> (8 * i + 4) & 15) * scale + least;
          }
        }
      }
    }
  }
}

// totals[row][half] += the products of a chunk
template <int kRows, int kBits>
void add_chunk(const Codes& panel, const Rows2d& in, int64_t token, int64_t first_block, int64_t blocks,
               Floats (*totals)[2]) {
  using Sum = std::conditional_t<kDot<kBits> == 4, Partial, Words>;
  for (int64_t block = 0; block < blocks; ++block) {
    auto* codes = reinterpret_cast<const CodeOf<kBits>*>(in.codes) + token * in.stride;
    codes += (first_block + block) * kBlockInputs;
    asm volatile("" : : "r"(totals) : "memory");  // keeps them out of the registers: those are for the integers
    Sum sums[kRows][2] = {};
#pragma GCC unroll 16
    for (int i = 0; i < kBlockInputs / kDot<kBits>; ++i) {
      Words first = panel.codes[block][i][0], second = panel.codes[block][i][1];
#pragma GCC unroll 12
      for (int row = 0; row < kRows; ++row) {
        int32_t some;
        std::memcpy(&some, codes + row * in.stride + i * kDot<kBits>, 4);
        if constexpr (kDot<kBits> == 4) {
          sums[row][0] = dot4(sums[row][0], first, some);
          sums[row][1] = dot4(sums[row][1], second, some);
        } else {
          sums[row][0] = dot2(sums[row][0], first, some);
          sums[row][1] = dot2(sums[row][1], second, some);
        }
      }
    }
    const float* scales = in.scales + token * in.scale_stride + first_block + block;
    const float* inputs = in.sums + token * in.scale_stride + first_block + block;
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) {
      float scale = scales[row * in.scale_stride], input = inputs[row * in.scale_stride];
      for (int half = 0; half < 2; ++half) {
        Words sum;
        if constexpr (kDot<kBits> == 4) {
          sum = widen_sum(sums[row][half]);
        } else {
          sum = sums[row][half];
        }
        Floats scaled = to_floats(sum) * scale;
        totals[row][half] += scaled * panel.scale[block][half];
        totals[row][half] += panel.least[block][half] * input;
      }
    }
  }
}

template <int kRows, int kBits>
void add_chunk(const Numbers& panel, const Rows2d& in, int64_t token, int64_t first_block, int64_t blocks,
               Floats (*totals)[2]) {
  const float* inputs = in.floats + token * in.stride + first_block * kBlockInputs;
  Floats sums[kRows][2];
#pragma GCC unroll 12
  for (int row = 0; row < kRows; ++row) {
    sums[row][0] = totals[row][0];
    sums[row][1] = totals[row][1];
  }
  for (int64_t k = 0; k < blocks * kBlockInputs; ++k) {
    Floats first = panel.weights[k][0], second = panel.weights[k][1];
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) {
      float input = inputs[row * in.stride + k];
      sums[row][0] += first * input;
      sums[row][1] += second * input;
    }
  }
#pragma GCC unroll 12
  for (int row = 0; row < kRows; ++row) {
    totals[row][0] = sums[row][0];
    totals[row][1] = sums[row][1];
  }
}

template <int kRows, int kBits, typename Unpacked>
void add_rows(const Unpacked& panel, const Rows2d& in, int64_t token, int64_t count, int64_t first_block,
              int64_t blocks, Floats (*totals)[2]) {
  if constexpr (kRows > 0) {
    if (count == kRows) return add_chunk<kRows, kBits>(panel, in, token, first_block, blocks, totals);
    add_rows<kRows - 1, kBits>(panel, in, token, count, first_block, blocks, totals);
  }
}

template <int kBits, typename Unpacked>
void multiply_unpacked(const Linear& linear, const Rows2d& in, int64_t begin, int64_t end, int64_t panel,
                       const Product& product) {
  int64_t num_blocks = linear.num_inputs / kBlockInputs, count = end - begin;
  int64_t tiles = (count + kMaxRows - 1) / kMaxRows;  // of about equal size
  Unpacked unpacked;
  Floats totals[kUnpackedRows][2];
  std::memset(totals, 0, count * sizeof totals[0]);
  for (int64_t first = 0; first < num_blocks; first += kChunk) {
    int64_t blocks = std::min(kChunk, num_blocks - first);
    unpack<kBits>(linear.weights + (panel * num_blocks + first) * block_bytes(kBits), blocks, unpacked);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      int64_t from = count * tile / tiles, to = count * (tile + 1) / tiles;
      add_rows<kMaxRows, kBits>(unpacked, in, begin + from, to - from, first, blocks, totals + from);
    }
  }
  Floats bias[2] = {};
  if (linear.bias) {
    bias[0] = load(linear.bias + panel * kPanel);
    bias[1] = load(linear.bias + panel * kPanel + kLanes);
  }
  for (int64_t row = 0; row < count; ++row) {
    finish(product, begin + row, panel, totals[row][0] + bias[0], totals[row][1] + bias[1]);
  }
}

// One token by kSide panels, in float32, nothing unpacked to memory. Several panels, since each sum waits for its last.
template <int kBits, int kSide>
void multiply_one(const Linear& linear, const Rows2d& in, int64_t token, int64_t panel, const Product& product) {
  int64_t num_blocks = linear.num_inputs / kBlockInputs, stride = num_blocks * block_bytes(kBits);
  constexpr int kVectors = kBits == 4 ? 4 : 8;
  const float* inputs = in.floats + token * in.stride;
  const char* at = linear.weights + panel * stride;
  Floats sums[kSide][2] = {};
  for (int64_t block = 0; block < num_blocks; ++block, at += block_bytes(kBits), inputs += kBlockInputs) {
    Floats scale[kSide][2], least[kSide][2];
#pragma GCC unroll 8
    for (int side = 0; side < kSide; ++side) {
      prefetch_behind(at + side * stride, block_bytes(kBits));
      for (int half = 0; half < 2; ++half) {
        load_scales<kBits>(at + side * stride, half, scale[side][half], least[side][half]);
      }
    }
    for (int dot = 0; dot < 8; ++dot) {
      int shift = dot / kVectors * 4;
#pragma GCC unroll 8
      for (int side = 0; side < kSide; ++side) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          Words bytes = load_words(codes_of<kBits>(at + side * stride, half) + dot % kVectors * kLanes * 4) >> shift;
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i) {
            Words code = bytes >> (8 * i) & (kBits == 4 ? 15 : 255);
            Floats weight = to_floats(code) * scale[side][half] + least[side][half];
            sums[side][half] += weight * inputs[dot * 4 + i];
          }
        }
      }
    }
  }
  for (int side = 0; side < kSide; ++side) {
    if (linear.bias) {
      sums[side][0] += load(linear.bias + (panel + side) * kPanel);
      sums[side][1] += load(linear.bias + (panel + side) * kPanel + kLanes);
    }
    finish(product, token, panel + side, sums[side][0], sums[side][1]);
  }
}

template <int kBits>
void multiply_floats(const Linear& linear, const Rows2d& in, int64_t begin, int64_t end, int64_t first, int64_t last,
                     const Product& product) {
  int64_t panel = first;
  if (end - begin == 1) {
    for (; panel + kTogether <= last; panel += kTogether) {
      multiply_one<kBits, kTogether>(linear, in, begin, panel, product);
    }
    for (; panel < last; ++panel) multiply_one<kBits, 1>(linear, in, begin, panel, product);
  }
  for (; panel < last; ++panel) multiply_unpacked<kBits, Numbers>(linear, in, begin, end, panel, product);
}

}  // namespace

void multiply_blocks(const Linear& linear, const Rows2d& in, int64_t begin, int64_t end, int64_t first, int64_t last,
                     const Product& product) {
  if (linear.format != kInt8) {
    if (linear.block_bits == 4) return multiply_floats<4>(linear, in, begin, end, first, last, product);
    return multiply_floats<8>(linear, in, begin, end, first, last, product);
  }
  for (int64_t panel = first; panel < last; ++panel) {
    if (linear.block_bits == 4) {
      multiply_unpacked<4, Codes>(linear, in, begin, end, panel, product);
    } else {
      multiply_unpacked<8, Codes>(linear, in, begin, end, panel, product);
    }
  }
}

}  // namespace octavo
